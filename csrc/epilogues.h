// What the epilogues take: one tile of logits that a GEMM just wrote, and the running statistics of its rows.
// The module fills these structs; every instruction set brings its own build of the two row functions (kernels.cpp).
#pragma once
#include <cstdint>

namespace bapo {

// z is what hidden . weight gave. The logit is x = (z + bias) * scale, then softcap * tanh(x / softcap), then * inv_temperature.
template <class T>
struct Tile {
    T *z;  // (n, w), rows `stride` apart
    int64_t n, w, stride;
    const T *bias;             // (w,) or null
    T scale, softcap;          // softcap 0: none
    const T *inv_temperature;  // (n,) or null
    const int64_t *ids;        // (n, ids_per_row): ids whose logits are wanted, anything outside the tile is left alone
    int64_t ids_per_row;
    int64_t first_column;  // vocabulary id of column 0
};

template <class T>
struct Fold {
    Tile<T> tile;  // z is only read
    T *max;        // (n,) m = max x
    T *sum;        // (n,) sum exp(x - m)
    T *spread;     // (n,) sum exp(x - m) (x - m), or null
    T *picked;     // (n, ids_per_row) x at ids
};

template <class T>
struct Dlogits {
    Tile<T> tile;  // z becomes the gradient of the loss with respect to z
    const T *max, *log_sum;
    const T *weight_p;            // (n,)
    const T *weight_h, *entropy;  // (n,), both or neither
    const T *picked;              // (n, ids_per_row) coefficients of the logits at ids
};

struct Kernels {
    const char *name;
    bool (*supported)();
    void (*fold_f32)(const Fold<float> &, int64_t row);
    void (*fold_f64)(const Fold<double> &, int64_t row);
    void (*dlogits_f32)(const Dlogits<float> &, int64_t row);
    void (*dlogits_f64)(const Dlogits<double> &, int64_t row);
};

extern const Kernels kernels_baseline, kernels_avx2, kernels_avx512;

}  // namespace bapo
