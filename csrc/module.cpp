// Python binding: checks shapes, picks the instruction set once, and runs the row functions in parallel over rows.
//
// A row is computed by one thread, always in the same order: results do not depend on the number of threads.
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "epilogues.h"

namespace nb = nanobind;

namespace bapo {
namespace {

// Tensors come by DLPack and are never copied (every argument is noconvert): results are written into the caller's memory.
// Scalars are doubles whatever T: a DLPack capsule can be read once, so no overload may fail after it has read one of its own dtype.
template <class T>
using Rows = nb::ndarray<T, nb::ndim<2>, nb::device::cpu>;
template <class T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Maybe = std::optional<Vector<T>>;

// Best first.
constexpr const Kernels *kBuilt[] = {
#if defined(BAPO_X86)
    &kernels_avx512, &kernels_avx2,
#endif
    &kernels_baseline};

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (const Kernels *k : kBuilt)
        if (k->supported()) names.push_back(k->name);
    return names;
}

const Kernels *kernels;

void set_isa(const std::string &name) {
    std::string known;
    for (const Kernels *k : kBuilt) {
        if (!k->supported()) continue;
        if (name == k->name) {
            kernels = k;
            return;
        }
        known += known.empty() ? k->name : std::string(", ") + k->name;
    }
    throw nb::value_error(("instruction set '" + name + "' is not one of those available here: " + known).c_str());
}

template <class T>
auto fold_of(const Kernels *k) {
    if constexpr (sizeof(T) == 4)
        return k->fold_f32;
    else
        return k->fold_f64;
}

template <class T>
auto dlogits_of(const Kernels *k) {
    if constexpr (sizeof(T) == 4)
        return k->dlogits_f32;
    else
        return k->dlogits_f64;
}

template <class T, class Row>
void for_rows(const Tile<T> &tile, int threads, Row row) {
    nb::gil_scoped_release release;
    if (tile.n * tile.w < (1 << 14)) threads = 1;  // a few microseconds of work: waking a thread takes as long
    (void)threads;                                 // unused without OpenMP
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < tile.n; ++i) row(i);
}

void check_size(const char *name, int64_t got, int64_t wanted) {
    if (got != wanted)
        throw nb::value_error(
            (std::string(name) + " has length " + std::to_string(got) + " where the tile needs " + std::to_string(wanted)).c_str());
}

// The data of a vector or matrix whose first axis has `wanted` entries; null for None.
template <class A>
auto *data(const char *name, const A &array, int64_t wanted) {
    check_size(name, array.shape(0), wanted);
    return array.data();
}
template <class T>
T *data(const char *name, const Maybe<T> &array, int64_t wanted) {
    return array ? data(name, *array, wanted) : nullptr;
}

template <class T>
Tile<T> make_tile(const Rows<T> &z, const Maybe<const T> &bias, double scale, double softcap, const Maybe<const T> &inv_temperature,
                  const Matrix<const int64_t> &ids, int64_t first_column) {
    const int64_t n = z.shape(0), w = z.shape(1);
    if (w > 1 && z.stride(1) != 1) throw nb::value_error("z must have columns next to each other (last stride 1)");
    return {z.data(),
            n,
            w,
            z.stride(0),
            data("bias", bias, w),
            T(scale),
            T(softcap),
            data("inv_temperature", inv_temperature, n),
            data("ids", ids, n),
            int64_t(ids.shape(1)),
            first_column};
}

template <class T>
void fold(Rows<T> z, Maybe<const T> bias, double scale, double softcap, Maybe<const T> inv_temperature, Matrix<const int64_t> ids,
          int64_t first_column, Vector<T> max, Vector<T> sum, Maybe<T> spread, Matrix<T> picked, int threads) {
    const Tile<T> tile = make_tile(z, bias, scale, softcap, inv_temperature, ids, first_column);
    const Fold<T> f{tile, data("max", max, tile.n), data("sum", sum, tile.n), data("spread", spread, tile.n),
                    data("picked", picked, tile.n)};
    check_size("a row of picked", picked.shape(1), tile.ids_per_row);
    for_rows(tile, threads, [&, row_kernel = fold_of<T>(kernels)](int64_t row) { row_kernel(f, row); });
}

template <class T>
void dlogits(Rows<T> z, Maybe<const T> bias, double scale, double softcap, Maybe<const T> inv_temperature, Matrix<const int64_t> ids,
             int64_t first_column, Vector<const T> max, Vector<const T> log_sum, Vector<const T> weight_p, Maybe<const T> weight_h,
             Maybe<const T> entropy, Matrix<const T> picked, int threads) {
    const Tile<T> tile = make_tile(z, bias, scale, softcap, inv_temperature, ids, first_column);
    const Dlogits<T> g{tile,
                       data("max", max, tile.n),
                       data("log_sum", log_sum, tile.n),
                       data("weight_p", weight_p, tile.n),
                       data("weight_h", weight_h, tile.n),
                       data("entropy", entropy, tile.n),
                       data("picked", picked, tile.n)};
    check_size("a row of picked", picked.shape(1), tile.ids_per_row);
    if (g.weight_h && !g.entropy) throw nb::value_error("weight_h needs entropy");
    for_rows(tile, threads, [&, row_kernel = dlogits_of<T>(kernels)](int64_t row) { row_kernel(g, row); });
}

template <class T>
void define(nb::module_ &m) {
    using namespace nb::literals;
    m.def("fold", &fold<T>, "z"_a.noconvert(), "bias"_a.noconvert().none(), "scale"_a, "softcap"_a,
          "inv_temperature"_a.noconvert().none(), "ids"_a.noconvert(), "first_column"_a, "max"_a.noconvert(), "sum"_a.noconvert(),
          "spread"_a.noconvert().none(), "picked"_a.noconvert(), "threads"_a);
    m.def("dlogits", &dlogits<T>, "z"_a.noconvert(), "bias"_a.noconvert().none(), "scale"_a, "softcap"_a,
          "inv_temperature"_a.noconvert().none(), "ids"_a.noconvert(), "first_column"_a, "max"_a.noconvert(), "log_sum"_a.noconvert(),
          "weight_p"_a.noconvert(), "weight_h"_a.noconvert().none(), "entropy"_a.noconvert().none(), "picked"_a.noconvert(),
          "threads"_a);
}

}  // namespace
}  // namespace bapo

NB_MODULE(_epilogues, m) {
    using namespace bapo;
    const char *forced = std::getenv("BAPO_KERNELS_ISA");
    set_isa(forced && *forced ? forced : available_isas().front());

    m.doc() = "Epilogues of the vocabulary-sized matrix products on CPUs; see csrc/.";
    define<float>(m);
    define<double>(m);
    m.def("isa", [] { return std::string(kernels->name); }, "The instruction set in use.");
    m.def("available_isas", available_isas, "Instruction sets that this build and this machine have, best first.");
    m.def("set_isa", set_isa, nanobind::arg("name"), "Use another of available_isas(). For tests; BAPO_KERNELS_ISA does the same.");
#if defined(_OPENMP)
    m.attr("openmp") = true;
#else
    m.attr("openmp") = false;
#endif
}
