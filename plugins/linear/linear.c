/* out = x @ weight.T + bias, float32 sums, weights streamed from memory once for small x.
 *
 * Every output has one accumulator of eight lanes filled in the order of k, whatever tile it
 * falls in: a row's bits depend on that row alone.
 */
#include "../native/common.h"

typedef struct {
    const void *x;
    int64_t x_stride;
    const void *weight;
    int64_t weight_stride;
    const void *bias; /* may be null */
    void *out;
    int64_t out_stride, rows, n, k, dtype;
} linear_args;

/* Tiles of rows x columns hold TILE accumulators in registers. */
enum { TILE = 12, MAX_TILE_ROWS = 4, X_CHUNK_BYTES = 256 * 1024 };

/* Element order of packed x: bfloat16 weights are widened as even and odd halves of 32-bit
 * words, which costs no shuffle; x is laid out to match, 16 elements a group, zero-padded. */
static void pack_x(const linear_args *a, int64_t row, int64_t count, int dtype, float *packed, int64_t stride) {
    for (int64_t r = 0; r < count; r++) {
        const void *x = at(a->x, (row + r) * a->x_stride, dtype);
        float *to = packed + r * stride;
        memset(to, 0, (size_t)stride * 4);
        for (int64_t k = 0; k < a->k; k++) {
            int64_t lane = k % 16;
            int64_t place = dtype == F32 ? k : k - lane + (lane & 1) * 8 + lane / 2;
            to[place] = load1(x, k, dtype);
        }
    }
}

INLINE v8u load_words(const bf16 *p, int64_t count) {
    v8u words = {0};
    memcpy(&words, p, (size_t)count * 2);
    return words;
}

INLINE void tile(const linear_args *a, const float *x, int64_t x_stride, int64_t row, int64_t column,
                 int rows, int columns, int dtype) {
    v8f sums[TILE];
    for (int i = 0; i < rows * columns; i++) sums[i] = splat(0);
    const void *weight = at(a->weight, column * a->weight_stride, dtype);
    if (dtype == F32) {
        int64_t whole = a->k & ~(int64_t)7;
        for (int64_t k = 0; k < whole; k += 8)
#pragma clang loop unroll(full)
            for (int c = 0; c < columns; c++) {
                v8f w = load8_f32((const float *)weight + c * a->weight_stride + k);
#pragma clang loop unroll(full)
                for (int r = 0; r < rows; r++)
                    sums[r * columns + c] += w * load8_f32(x + r * x_stride + k);
            }
        if (whole < a->k)
            for (int c = 0; c < columns; c++) {
                v8f w = load_part((const float *)weight + c * a->weight_stride + whole, a->k - whole, F32);
                for (int r = 0; r < rows; r++)
                    sums[r * columns + c] += w * load_part(x + r * x_stride + whole, a->k - whole, F32);
            }
    } else {
        for (int64_t k = 0; k < a->k; k += 16) {
            int64_t count = min64(16, a->k - k);
#pragma clang loop unroll(full)
            for (int c = 0; c < columns; c++) {
                const bf16 *p = (const bf16 *)weight + c * a->weight_stride + k;
                v8u words = count == 16 ? load_words(p, 16) : load_words(p, count);
                v8f even = (v8f)(words << 16), odd = (v8f)(words & 0xffff0000u);
#pragma clang loop unroll(full)
                for (int r = 0; r < rows; r++) {
                    const float *xr = x + r * x_stride + k;
                    sums[r * columns + c] += even * load8_f32(xr);
                    sums[r * columns + c] += odd * load8_f32(xr + 8);
                }
            }
        }
    }
    for (int r = 0; r < rows; r++) {
        void *out = at_out(a->out, (row + r) * a->out_stride + column, dtype);
        for (int c = 0; c < columns; c++) {
            float sum = sum8(sums[r * columns + c]);
            if (a->bias) sum += load1(a->bias, column + c, dtype);
            store1(out, c, sum, dtype);
        }
    }
}

INLINE void columns_of(const linear_args *a, const float *x, int64_t x_stride, int64_t row,
                       int64_t begin, int64_t end, int rows, int dtype) {
    int64_t column = begin;
    for (; column + TILE / rows <= end; column += TILE / rows)
        tile(a, x, x_stride, row, column, rows, TILE / rows, dtype);
    for (; column < end; column++) tile(a, x, x_stride, row, column, rows, 1, dtype);
}

INLINE void run(const linear_args *a, int64_t begin, int64_t end, int dtype) {
    int packs = dtype == BF16;
    int64_t padded = (a->k + 15) & ~(int64_t)15;
    int64_t chunk = max64(MAX_TILE_ROWS, X_CHUNK_BYTES / (padded * 4) / MAX_TILE_ROWS * MAX_TILE_ROWS);
    chunk = min64(chunk, a->rows);
    float *packed = packs ? thread_scratch(chunk * padded * 4) : NULL;
    for (int64_t first = 0; first < a->rows; first += chunk) {
        int64_t count = min64(chunk, a->rows - first);
        if (packs) pack_x(a, first, count, dtype, packed, padded);
        const float *x = packs ? packed : (const float *)a->x + first * a->x_stride;
        int64_t x_stride = packs ? padded : a->x_stride;
        for (int64_t block = begin; block < end; block += TILE) {
            int64_t stop = min64(block + TILE, end);
            for (int64_t r = 0; r < count;) {
                /* 5 rows are 3 + 2 rather than 4 + 1: fewer passes over thin tiles. */
                int64_t left = count - r;
                int take = (int)(left >= 7 || left == 4 ? 4 : left > 4 ? 3 : left);
                const float *from = x + r * x_stride;
                switch (take) {
                case 4: columns_of(a, from, x_stride, first + r, block, stop, 4, dtype); break;
                case 3: columns_of(a, from, x_stride, first + r, block, stop, 3, dtype); break;
                case 2: columns_of(a, from, x_stride, first + r, block, stop, 2, dtype); break;
                default: columns_of(a, from, x_stride, first + r, block, stop, 1, dtype); break;
                }
                r += take;
            }
        }
    }
}

/* Work is split in blocks of TILE columns so that no thread gets a ragged edge but the last. */
static void body(const void *args, int64_t begin, int64_t end) {
    const linear_args *a = args;
    begin *= TILE;
    end = min64(end * TILE, a->n);
    if (a->dtype == F32) run(a, begin, end, F32);
    else run(a, begin, end, BF16);
}

KERNEL(linear, linear_args) {
    int64_t bytes = a->n * a->k * item_bytes((int)a->dtype) * max64(1, a->rows / 4);
    parallel_for((a->n + TILE - 1) / TILE, bytes, body, a);
}
