// Vectors of the widest kind that the compiler flags of this translation unit allow, and exp and tanh on them.
//
// Arithmetic is that of GCC's and Clang's vector extensions; only what they cannot say (fused multiply-add, max with a defined answer
// for NaN) is an intrinsic. Built with -ffp-contract=off: what is fused is written as fma(), so that a logit has the same bits
// wherever it is computed. Everything is in an unnamed namespace: the linker must never merge an AVX-512 copy of a function with another.
#pragma once
#include <cstdint>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace bapo {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class T>
struct Lanes;
template <>
struct Lanes<float> {
    typedef float Vec __attribute__((vector_size(kVectorBytes)));
    typedef int32_t Int __attribute__((vector_size(kVectorBytes)));
};
template <>
struct Lanes<double> {
    typedef double Vec __attribute__((vector_size(kVectorBytes)));
    typedef int64_t Int __attribute__((vector_size(kVectorBytes)));
};
template <class T>
using Vec = typename Lanes<T>::Vec;
template <class T>
using Int = typename Lanes<T>::Int;
template <class T>
constexpr int kLanes = kVectorBytes / int(sizeof(T));

template <class T>
inline Vec<T> all(T value) {
    return value - Vec<T>{};
}

// fma(a, b, c) = a * b + c.  larger(a, b) = a > b ? a : b, which is b when either is NaN.
// (maskz with a full mask is the plain max; the plain intrinsic draws false warnings from GCC 12.)
#if defined(__AVX512F__)
inline Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) { return _mm512_fmadd_pd(a, b, c); }
inline Vec<float> larger(Vec<float> a, Vec<float> b) { return _mm512_maskz_max_ps(-1, a, b); }
inline Vec<double> larger(Vec<double> a, Vec<double> b) { return _mm512_maskz_max_pd(-1, a, b); }
#elif defined(__AVX2__)
inline Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) { return _mm256_fmadd_pd(a, b, c); }
inline Vec<float> larger(Vec<float> a, Vec<float> b) { return _mm256_max_ps(a, b); }
inline Vec<double> larger(Vec<double> a, Vec<double> b) { return _mm256_max_pd(a, b); }
#else
template <class V>
inline V larger(V a, V b) {
    return a > b ? a : b;
}
#if defined(__aarch64__)
inline Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) {
    return (Vec<float>)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
inline Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) {
    return (Vec<double>)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
}
#else
template <class V>
inline V fma(V a, V b, V c) {
    return a * b + c;
}
#endif
#endif

// exp(x) = 2^n * (1 + r + r^2 q(r)),  x = n ln2 + r,  |r| <= ln2 / 2.
// ln2 is split so that n * ln2_high is exact even without fma. `round` is 1.5 * 2^mantissa + exponent bias: adding it rounds to an
// integer and leaves the biased exponent of 2^n in the low bits. q is minimax for float (relative error of exp 4e-9), Taylor for double.
template <class T>
struct ExpConstants;
template <>
struct ExpConstants<float> {
    static constexpr float log2e = 1.44269504f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f, round = 12582912.0f + 127.0f;
    static constexpr int mantissa = 23;
    static constexpr float lowest = -88.0f;  // n = -127: 2^n comes out as 0
    static constexpr float q[] = {1.381453942e-3f, 8.368745446e-3f, 4.166838899e-2f, 1.666652113e-1f, 4.999999404e-1f};
};
template <>
struct ExpConstants<double> {
    static constexpr double log2e = 1.4426950408889634, ln2_high = 0.693145751953125, ln2_low = 1.42860682030941723212e-6,
                            round = 6755399441055744.0 + 1023.0;
    static constexpr int mantissa = 52;
    static constexpr double lowest = -709.0;  // n = -1023
    static constexpr double q[] = {1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0,
                                   1.0 / 40320.0,      1.0 / 5040.0,      1.0 / 720.0,      1.0 / 120.0,     1.0 / 24.0,
                                   1.0 / 6.0,          0.5};
};

// Brings x <= 0 (-inf included) into the range of the exponentials below, where the lower end gives exactly 0; NaN stays.
// The clamped value is finite, so that p * x is 0 and not NaN when p is 0.
template <class T>
inline Vec<T> clamp_for_exp(Vec<T> x) {
    return larger(all<T>(ExpConstants<T>::lowest), x);
}

// exp(x) = power + power * part, where `part` has its full relative accuracy near x = 0. The last step is left to the caller.
template <class T>
struct Exponential {
    Vec<T> power, part;
};

template <class T>
inline Exponential<T> exponential(Vec<T> x) {
    using C = ExpConstants<T>;
    const Vec<T> shifted = fma(x, all<T>(C::log2e), all<T>(C::round));
    const Vec<T> n = shifted - (C::round);
    const Vec<T> r = fma(n, all<T>(-C::ln2_low), fma(n, all<T>(-C::ln2_high), x));
    Vec<T> q = all<T>(C::q[0]);
#pragma GCC unroll 16
    for (unsigned i = 1; i < sizeof(C::q) / sizeof(T); ++i) q = fma(q, r, all<T>(C::q[i]));
    return {(Vec<T>)((Int<T>)shifted << C::mantissa), fma(r * r, q, r)};
}

template <class T>
inline Vec<T> exp(Vec<T> x) {
    const Exponential<T> e = exponential<T>(x);
    return fma(e.power, e.part, e.power);
}

// tanh(y) and its derivative 1 - tanh^2, both with full relative accuracy: with u = -2|y|,
// tanh|y| = -expm1(u) / (2 + expm1(u)) and 1 - tanh^2 = 4 exp(u) / (2 + expm1(u))^2; neither subtracts two near numbers.
template <class T>
struct Tanh {
    Vec<T> value, slope;
};

template <class T>
inline Tanh<T> tanh(Vec<T> y) {
    const Int<T> sign = (Int<T>)y & (Int<T>)all<T>(T(-0.0));
    const Vec<T> magnitude = (Vec<T>)((Int<T>)y ^ sign);
    const Exponential<T> e = exponential<T>(clamp_for_exp<T>(magnitude * T(-2)));
    const Vec<T> expm1 = fma(e.power, e.part, e.power - T(1));
    const Vec<T> base = expm1 + T(2);
    const Vec<T> value = (Vec<T>)((Int<T>)(-expm1 / base) ^ sign);
    return {value, fma(e.power, e.part, e.power) * T(4) / (base * base)};
}

// How a loop body touches its columns: a whole vector, or what is left at the end of the row.
template <class T>
struct Whole {
    static Vec<T> load(const T *p) {
        Vec<T> v;
        __builtin_memcpy(&v, p, sizeof v);
        return v;
    }
    static void store(T *p, Vec<T> v) { __builtin_memcpy(p, &v, sizeof v); }
    static Vec<T> pad(Vec<T> v, T) { return v; }
};

template <class T>
struct Part {
    int count;
    Vec<T> load(const T *p) const {
        Vec<T> v{};
        __builtin_memcpy(&v, p, count * sizeof(T));
        return v;
    }
    void store(T *p, Vec<T> v) const { __builtin_memcpy(p, &v, count * sizeof(T)); }
    Vec<T> pad(Vec<T> v, T value) const {  // lanes past the end of the row
        for (int i = count; i < kLanes<T>; ++i) v[i] = value;
        return v;
    }
};

// Calls body(column, accumulator, access) over a row. Four accumulators hide the latency of the adds.
constexpr int kAccumulators = 4;

template <class T, class Body>
inline void for_columns(int64_t w, Body body) {
    constexpr int64_t lanes = kLanes<T>;
    int64_t c = 0;
    for (; c + kAccumulators * lanes <= w; c += kAccumulators * lanes) {
#pragma GCC unroll 4
        for (int k = 0; k < kAccumulators; ++k) body(c + k * lanes, k, Whole<T>{});
    }
    for (; c + lanes <= w; c += lanes) body(c, 0, Whole<T>{});
    if (c < w) body(c, 0, Part<T>{int(w - c)});
}

template <class T>
inline T total(const Vec<T> (&a)[kAccumulators]) {
    const Vec<T> v = (a[0] + a[1]) + (a[2] + a[3]);
    T sum = v[0];
    for (int i = 1; i < kLanes<T>; ++i) sum += v[i];
    return sum;
}

template <class T>
inline T largest(const Vec<T> (&a)[kAccumulators]) {
    const Vec<T> v = larger(larger(a[0], a[1]), larger(a[2], a[3]));
    T result = v[0];
    for (int i = 1; i < kLanes<T>; ++i) result = v[i] > result ? v[i] : result;
    return result;
}

}  // namespace
}  // namespace bapo
