/* Shared by all CPU kernels: vectors of eight floats, bfloat16, threads and scratch memory.
 *
 * Eight lanes are used on every level (two registers on SSE and NEON), so a sum is taken in
 * one order everywhere. An argument block is a struct of 8-byte fields only: pointers,
 * int64_t and double; the Python side packs it field by field. Strides count elements.
 */
#ifndef TAPEOUT_COMMON_H
#define TAPEOUT_COMMON_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
/* Loops over register tiles must vanish early, or the tile lives in memory. */
#define UNROLL _Pragma("clang loop unroll(full)")
#define EXPORT __attribute__((visibility("default")))
/* A kernel and the size of its argument block, which the Python side checks. */
#define KERNEL(name, args_type)                                                                    \
    EXPORT extern const int64_t tapeout_##name##_args_bytes;                                       \
    const int64_t tapeout_##name##_args_bytes = sizeof(args_type);                                 \
    EXPORT void tapeout_##name(const args_type *a);                                                \
    void tapeout_##name(const args_type *a)

enum { F32 = 0, BF16 = 1 };
enum { LANES = 8 };

typedef float v8f __attribute__((vector_size(32)));
typedef int32_t v8i __attribute__((vector_size(32)));
typedef uint32_t v8u __attribute__((vector_size(32)));
typedef uint16_t v8h __attribute__((vector_size(16)));
typedef uint16_t bf16;

INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t item_bytes(int dtype) { return dtype == BF16 ? 2 : 4; }
INLINE const void *at(const void *base, int64_t index, int dtype) {
    return (const char *)base + index * item_bytes(dtype);
}
INLINE void *at_out(void *base, int64_t index, int dtype) {
    return (char *)base + index * item_bytes(dtype);
}

INLINE float bf16_to_float(bf16 h) {
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* Round to nearest, ties to even; NaN stays NaN. */
INLINE bf16 float_to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if (f != f) return (bf16)((bits >> 16) | 0x40);
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE v8f splat(float f) { return (v8f){f, f, f, f, f, f, f, f}; }

INLINE v8f load8_f32(const float *p) {
    v8f v;
    memcpy(&v, p, 32);
    return v;
}

INLINE v8f load8(const void *p, int dtype) {
    if (dtype == F32) return load8_f32(p);
    v8h half;
    memcpy(&half, p, 16);
    return (v8f)(__builtin_convertvector(half, v8u) << 16);
}

INLINE v8h narrow8(v8f v) {
    v8u bits = (v8u)v;
    v8u rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    v8u nan = (bits >> 16) | 0x40;
    v8u is_nan = (v8u)(v != v);
    return __builtin_convertvector((rounded & ~is_nan) | (nan & is_nan), v8h);
}

INLINE void store8(void *p, v8f v, int dtype) {
    if (dtype == F32) {
        memcpy(p, &v, 32);
        return;
    }
    v8h half = narrow8(v);
    memcpy(p, &half, 16);
}

/* The first n < 8 elements; the other lanes are zero. */
INLINE v8f load_part(const void *p, int64_t n, int dtype) {
    v8f v = splat(0);
    for (int64_t i = 0; i < n; i++)
        v[i] = dtype == F32 ? ((const float *)p)[i] : bf16_to_float(((const bf16 *)p)[i]);
    return v;
}

INLINE void store_part(void *p, v8f v, int64_t n, int dtype) {
    for (int64_t i = 0; i < n; i++) {
        if (dtype == F32) ((float *)p)[i] = v[i];
        else ((bf16 *)p)[i] = float_to_bf16(v[i]);
    }
}

INLINE float load1(const void *p, int64_t i, int dtype) {
    return dtype == F32 ? ((const float *)p)[i] : bf16_to_float(((const bf16 *)p)[i]);
}

INLINE void store1(void *p, int64_t i, float f, int dtype) {
    if (dtype == F32) ((float *)p)[i] = f;
    else ((bf16 *)p)[i] = float_to_bf16(f);
}

/* Round to the dtype and back. */
INLINE v8f round_to(v8f v, int dtype) {
    return dtype == F32 ? v : (v8f)(__builtin_convertvector(narrow8(v), v8u) << 16);
}

INLINE v8f select8(v8i mask, v8f a, v8f b) { return (v8f)(((v8i)a & mask) | ((v8i)b & ~mask)); }

INLINE float sum8(v8f v) {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

/* exp to about 2 ulp; 0 below -87.3, infinity above 88.3, NaN stays NaN. */
INLINE v8f exp8(v8f x) {
    const v8f lowest = splat(-87.3f), highest = splat(88.3f);
    v8f clamped = select8(x < lowest, lowest, select8(x > highest, highest, x));
    v8f n = (clamped * splat(1.44269504f) + splat(12582912.0f)) - splat(12582912.0f);
    v8f r = clamped - n * splat(0.693359375f) - n * splat(-2.12194440e-4f);
    v8f p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.0f);
    v8f finite_n = select8(n != n, splat(0), n);
    v8f power = (v8f)((__builtin_convertvector(finite_n, v8i) + 127) << 23);
    v8f result = p * power;
    result = select8(x < lowest, splat(0), result);
    return select8(x > highest, splat(INFINITY), result);
}

INLINE v8f tanh8(v8f x) {
    /* Through exp(-2|x|) no intermediate overflows; near 0 a polynomial keeps relative accuracy. */
    v8f magnitude = select8(x < splat(0), -x, x);
    v8f e = exp8(magnitude * splat(-2.0f));
    v8f large = (splat(1.0f) - e) / (splat(1.0f) + e);
    v8f s = x * x;
    v8f small = x + x * s *
                        (splat(-0.333333333f) +
                         s * (splat(0.133333333f) + s * (splat(-0.053968254f) + s * splat(0.021869489f))));
    v8f result = select8(magnitude < splat(0.25f), small, select8(x < splat(0), -large, large));
    return select8(x != x, x, result);
}

/* Run body(args, begin, end) over [0, count), on the thread team when work_bytes is worth it. */
typedef void range_body(const void *args, int64_t begin, int64_t end);
void parallel_for(int64_t count, int64_t work_bytes, range_body *body, const void *args);
int64_t thread_count(void);

/* Memory of this thread, valid until the thread asks again; 64-byte aligned. */
void *thread_scratch(int64_t bytes);

#endif
