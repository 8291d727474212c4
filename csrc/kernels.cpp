// The two epilogues, one row at a time. This file is compiled once per instruction set (BAPO_ISA; see CMakeLists.txt).
#include "epilogues.h"
#include "simd.h"

#include <vector>

namespace bapo {
namespace {

// Which steps there are between z and the logit; `plain` has none and pays for none.
enum class Logits { plain, affine, softcap };

template <class T>
struct Logit {
    Vec<T> x, slope;  // slope = dx / dz
};

template <class T, Logits kind>
struct Head {
    const T *bias;
    T scale, softcap, inv_temperature;

    Head(const Tile<T> &t, int64_t row)
        : bias(t.bias), scale(t.scale), softcap(t.softcap), inv_temperature(t.inv_temperature ? t.inv_temperature[row] : T(1)) {}

    template <class Access>
    Logit<T> operator()(const T *z, int64_t column, Access access) const {
        Vec<T> x = access.load(z + column);
        Vec<T> slope = all<T>(scale * inv_temperature);
        if constexpr (kind == Logits::plain) return {x, slope};
        if (bias) x += access.load(bias + column);
        x *= scale;
        if constexpr (kind == Logits::softcap) {
            const Tanh<T> t = tanh<T>(x / softcap);
            x = t.value * softcap;
            slope *= t.slope;
        }
        return {x * inv_temperature, slope};
    }
};

// Calls use(Head) with the simplest Head that does what the tile asks for.
template <class T, class Use>
inline void with_head(const Tile<T> &t, int64_t row, Use use) {
    if (t.softcap != 0)
        use(Head<T, Logits::softcap>(t, row));
    else if (t.bias || t.inv_temperature || t.scale != 1)
        use(Head<T, Logits::affine>(t, row));
    else
        use(Head<T, Logits::plain>(t, row));
}

template <class T, class Use>
inline void for_picked(const Tile<T> &t, int64_t row, Use use) {
    const int64_t *ids = t.ids + row * t.ids_per_row;
    for (int64_t k = 0; k < t.ids_per_row; ++k) {
        const int64_t column = ids[k] - t.first_column;
        if (column >= 0 && column < t.w) use(row * t.ids_per_row + k, column);
    }
}

// The row's logits and their maximum, then the exponentials: the second sweep finds the row in the first-level cache, and makes the
// logits again from the products, which stay as they are for whoever keeps the tile.
// NaN and +inf are not looked for: `larger` skips a NaN and keeps a +inf, and x - m is NaN for either, so the sum becomes NaN.
template <class T, bool kSpread, Logits kind>
inline void fold_row(const Fold<T> &f, int64_t row, Head<T, kind> head) {
    constexpr T infinity = T(__builtin_inff());
    const T *z = f.tile.z + row * f.tile.stride;

    Vec<T> m[kAccumulators];
    for (Vec<T> &v : m) v = all<T>(-infinity);
    for_columns<T>(f.tile.w, [&](int64_t c, int k, auto access) {
        m[k] = larger(access.pad(head(z, c, access).x, -infinity), m[k]);
    });
    const T m_tile = largest<T>(m), m_old = f.max[row];
    const T m_new = m_tile > m_old ? m_tile : m_old;
    const T shift = m_new == -infinity ? T(0) : m_new;  // nothing but -inf so far: exp(-inf - 0) = 0, not exp(-inf + inf)

    Vec<T> s[kAccumulators] = {}, u[kAccumulators] = {};
    for_columns<T>(f.tile.w, [&](int64_t c, int k, auto access) {
        const Vec<T> d = clamp_for_exp<T>(access.pad(head(z, c, access).x, -infinity) - shift);
        const Vec<T> p = exp<T>(d);
        s[k] += p;
        if constexpr (kSpread) u[k] = fma(p, d, u[k]);
    });

    const Vec<T> d = clamp_for_exp<T>(all<T>(m_old - shift));
    const T rescale = exp<T>(d)[0];
    if constexpr (kSpread) f.spread[row] = rescale * (f.spread[row] + d[0] * f.sum[row]) + total<T>(u);
    f.sum[row] = rescale * f.sum[row] + total<T>(s);
    f.max[row] = m_new;
    for_picked(f.tile, row, [&](int64_t at, int64_t column) { f.picked[at] = head(z, column, Part<T>{1}).x[0]; });
}

template <class T, bool kEntropy, Logits kind>
inline void dlogits_row(const Dlogits<T> &g, int64_t row, Head<T, kind> head) {
    T *z = g.tile.z + row * g.tile.stride;
    const T m = g.max[row], log_sum = g.log_sum[row];
    const Vec<T> weight_p = all<T>(-g.weight_p[row]);
    const Vec<T> weight_h = all<T>(kEntropy ? -g.weight_h[row] : T(0));
    const T entropy = kEntropy ? g.entropy[row] : T(0);

    // Both parts of a picked column are multiplied by the same bits of its slope: where the policy is sure, and a softcap flat, they
    // cancel to a small rest. The slope is taken before the sweep overwrites z.
    thread_local std::vector<T> slopes;
    slopes.resize(g.tile.ids_per_row);
    const int64_t first = row * g.tile.ids_per_row;
    for_picked(g.tile, row, [&](int64_t at, int64_t column) { slopes[at - first] = head(z, column, Part<T>{1}).slope[0]; });
    for_columns<T>(g.tile.w, [&](int64_t c, int, auto access) {
        const Logit<T> logit = head(z, c, access);
        const Vec<T> logp = clamp_for_exp<T>((logit.x - m) - log_sum);
        const Vec<T> weight = kEntropy ? fma(weight_h, logp + entropy, weight_p) : weight_p;
        Vec<T> dx = exp<T>(logp) * weight;
        if constexpr (kind != Logits::plain) dx *= logit.slope;
        access.store(z + c, dx);
    });
    for_picked(g.tile, row, [&](int64_t at, int64_t column) { z[column] += g.picked[at] * slopes[at - first]; });
}

template <class T>
void fold(const Fold<T> &f, int64_t row) {
    with_head(f.tile, row, [&](auto head) {
        if (f.spread)
            fold_row<T, true>(f, row, head);
        else
            fold_row<T, false>(f, row, head);
    });
}

template <class T>
void dlogits(const Dlogits<T> &g, int64_t row) {
    with_head(g.tile, row, [&](auto head) {
        if (g.weight_h)
            dlogits_row<T, true>(g, row, head);
        else
            dlogits_row<T, false>(g, row, head);
    });
}

bool supported() {
#if defined(__AVX512F__)
    return __builtin_cpu_supports("avx512f");
#elif defined(__AVX2__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return true;
#endif
}

}  // namespace

#define BAPO_JOIN_(a, b) a##b
#define BAPO_JOIN(a, b) BAPO_JOIN_(a, b)
#define BAPO_STRING_(a) #a
#define BAPO_STRING(a) BAPO_STRING_(a)

const Kernels BAPO_JOIN(kernels_, BAPO_ISA) = {BAPO_STRING(BAPO_ISA), supported, fold<float>, fold<double>, dlogits<float>,
                                              dlogits<double>};

}  // namespace bapo
