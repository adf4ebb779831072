/* Rows of x quantized to int8, exact int32 dot products with int8 weights; see the schema. */
#include "../native/common.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

typedef struct {
    const void *x;
    int64_t x_stride;
    const int8_t *weight;
    int64_t weight_stride;
    const float *scale;
    const void *bias; /* may be null */
    void *out;
    int64_t out_stride, rows, n, k, dtype;
} linear_int8_args;

enum { TILE_ROWS = 4, TILE_COLUMNS = 3, CHUNK_ROWS = 64, STEP = 32 };

/* One row to int8, zero-padded to `padded`; the row's scale, NaN when it holds NaN or infinity. */
INLINE float quantize_row(const void *x, int64_t k, int dtype, int8_t *to, int64_t padded) {
    v8f largest = splat(0), poison = splat(0);
    for (int64_t i = 0; i < k; i += 8) {
        v8f v = i + 8 <= k ? load8(at(x, i, dtype), dtype) : load_part(at(x, i, dtype), k - i, dtype);
        v8f magnitude = select8(v < splat(0), -v, v);
        largest = select8(magnitude > largest, magnitude, largest);
        poison += v * splat(0); /* NaN where v is NaN or infinite */
    }
    float most = 0;
    for (int i = 0; i < 8; i++) most = largest[i] > most ? largest[i] : most;
    memset(to, 0, (size_t)padded);
    float unsound = sum8(poison);
    if (unsound != unsound) return NAN;
    float scale = most / 127.0f;
    if (scale == 0) return 0;
    for (int64_t i = 0; i < k; i++) to[i] = (int8_t)rintf(load1(x, i, dtype) / scale);
    return scale;
}

#ifdef __AVX2__
typedef __m256i sums_t;
INLINE sums_t zero_sums(void) { return _mm256_setzero_si256(); }
INLINE int32_t total(sums_t v) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
/* |w| * (x with w's sign): |w| <= 128 and |x| <= 127, so no pair of products saturates int16. */
INLINE sums_t dot_step(sums_t sums, __m256i w, __m256i magnitude, const int8_t *x) {
    __m256i signed_x = _mm256_sign_epi8(_mm256_loadu_si256((const __m256i *)x), w);
    __m256i pairs = _mm256_maddubs_epi16(magnitude, signed_x);
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif

INLINE void dot_tile(const int8_t *x, int64_t x_stride, const int8_t *weight, int64_t weight_stride,
                     int64_t k, int rows, int columns, int32_t *out) {
    UNROLL for (int i = 0; i < rows * columns; i++) out[i] = 0;
    int64_t whole = 0;
#ifdef __AVX2__
    whole = k & ~(int64_t)(STEP - 1);
    sums_t sums[TILE_ROWS * 8];
    UNROLL for (int i = 0; i < rows * columns; i++) sums[i] = zero_sums();
    for (int64_t i = 0; i < whole; i += STEP)
        UNROLL for (int c = 0; c < columns; c++) {
            __m256i w = _mm256_loadu_si256((const __m256i *)(weight + c * weight_stride + i));
            __m256i magnitude = _mm256_abs_epi8(w);
            /* Rows are too short for the hardware prefetcher: name the next tile's lines. */
            __builtin_prefetch(weight + (columns + c) * weight_stride + i);
            UNROLL for (int r = 0; r < rows; r++)
                sums[r * columns + c] = dot_step(sums[r * columns + c], w, magnitude, x + r * x_stride + i);
        }
    UNROLL for (int i = 0; i < rows * columns; i++) out[i] = total(sums[i]);
#endif
    UNROLL for (int c = 0; c < columns; c++)
        UNROLL for (int r = 0; r < rows; r++) {
            int32_t sum = 0;
            for (int64_t i = whole; i < k; i++)
                sum += (int32_t)x[r * x_stride + i] * weight[c * weight_stride + i];
            out[r * columns + c] += sum;
        }
}

INLINE void tile(const linear_int8_args *a, const int8_t *x, int64_t x_stride, const float *row_scales,
                 int64_t row, int64_t column, int rows, int columns, int dtype) {
    int32_t sums[TILE_ROWS * 8];
    dot_tile(x, x_stride, a->weight + column * a->weight_stride, a->weight_stride, a->k, rows, columns, sums);
    UNROLL for (int r = 0; r < rows; r++) {
        void *out = at_out(a->out, (row + r) * a->out_stride + column, dtype);
        UNROLL for (int c = 0; c < columns; c++) {
            float value = (float)sums[r * columns + c] * row_scales[r] * a->scale[column + c];
            if (a->bias) value += load1(a->bias, column + c, dtype);
            store1(out, c, value, dtype);
        }
    }
}

INLINE void columns_of(const linear_int8_args *a, const int8_t *x, int64_t x_stride, const float *row_scales,
                       int64_t row, int64_t begin, int64_t end, int rows, int columns, int dtype) {
    int64_t column = begin;
    for (; column + columns <= end; column += columns)
        tile(a, x, x_stride, row_scales, row, column, rows, columns, dtype);
    for (; column < end; column++) tile(a, x, x_stride, row_scales, row, column, rows, 1, dtype);
}

INLINE void run(const linear_int8_args *a, int64_t begin, int64_t end, int dtype) {
    int64_t padded = (a->k + STEP - 1) / STEP * STEP;
    int64_t chunk = min64(CHUNK_ROWS, a->rows);
    int8_t *quantized = thread_scratch(chunk * padded);
    float row_scales[CHUNK_ROWS];
    for (int64_t first = 0; first < a->rows; first += chunk) {
        int64_t count = min64(chunk, a->rows - first);
        for (int64_t r = 0; r < count; r++)
            row_scales[r] = quantize_row(at(a->x, (first + r) * a->x_stride, dtype), a->k, dtype,
                                         quantized + r * padded, padded);
        for (int64_t block = begin; block < end; block += 12) {
            int64_t stop = min64(block + 12, end), r = 0;
            for (; r + 4 <= count; r += 4)
                columns_of(a, quantized + r * padded, padded, row_scales + r, first + r, block, stop, 4, 3, dtype);
            for (; r + 2 <= count; r += 2)
                columns_of(a, quantized + r * padded, padded, row_scales + r, first + r, block, stop, 2, 4, dtype);
            if (r < count)
                columns_of(a, quantized + r * padded, padded, row_scales + r, first + r, block, stop, 1, 6, dtype);
        }
    }
}

static void body(const void *args, int64_t begin, int64_t end) {
    const linear_int8_args *a = args;
    begin *= 12;
    end = min64(end * 12, a->n);
    if (a->dtype == F32) run(a, begin, end, F32);
    else run(a, begin, end, BF16);
}

KERNEL(linear_int8, linear_int8_args) {
    parallel_for((a->n + 11) / 12, a->n * a->k * max64(1, a->rows / 2), body, a);
}
