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

/* x as float32 in the order the tile reads it: [k / GROUP][row of the tile][GROUP], zero-padded.
 * Bfloat16 weights are widened as the even and odd halves of 32-bit words, which costs no
 * shuffle; a group of bfloat16 x is laid out to match: eight even elements, eight odd ones. */
enum { GROUP = 16 };

INLINE void widen_group(const void *p, int64_t count, int dtype, v8f *first, v8f *second) {
    if (dtype == F32) {
        *first = count >= 8 ? load8(p, F32) : load_part(p, count, F32);
        const void *next = at(p, 8, F32);
        *second = count >= 16 ? load8(next, F32) : count > 8 ? load_part(next, count - 8, F32) : splat(0);
        return;
    }
    v8u words = {0};
    if (count >= GROUP) memcpy(&words, p, 32);
    else memcpy(&words, p, (size_t)count * 2);
    *first = (v8f)(words << 16);
    *second = (v8f)(words & 0xffff0000u);
}

INLINE void pack_tile(const linear_args *a, int64_t row, int64_t rows, int dtype, float *packed) {
    for (int64_t r = 0; r < rows; r++) {
        const void *x = at(a->x, (row + r) * a->x_stride, dtype);
        float *to = packed + r * GROUP;
        for (int64_t k = 0; k < a->k; k += GROUP, to += rows * GROUP) {
            v8f first, second;
            widen_group(at(x, k, dtype), min64(GROUP, a->k - k), dtype, &first, &second);
            store8(to, first, F32);
            store8(to + 8, second, F32);
        }
    }
}

INLINE void tile_step(const float *x, const void *const *weight, int64_t stride, int64_t k, int64_t count,
                      v8f *sums, int rows, int columns, int dtype) {
    UNROLL for (int c = 0; c < columns; c++) {
        v8f first, second;
        widen_group(at(weight[c], k, dtype), count, dtype, &first, &second);
        /* A row of weights is too short for the hardware prefetcher: name the next tile's lines. */
        __builtin_prefetch(at(weight[c], k + columns * stride, dtype));
        UNROLL for (int r = 0; r < rows; r++) {
            sums[r * columns + c] += first * load8_f32(x + r * GROUP);
            sums[r * columns + c] += second * load8_f32(x + r * GROUP + 8);
        }
    }
}

INLINE void tile(const linear_args *a, const float *x, int64_t row, int64_t column, int rows, int columns,
                 int dtype) {
    v8f sums[TILE];
    const void *weight[TILE];
    UNROLL for (int i = 0; i < rows * columns; i++) sums[i] = splat(0);
    UNROLL for (int c = 0; c < columns; c++) weight[c] = at(a->weight, (column + c) * a->weight_stride, dtype);
    int64_t k = 0;
    for (; k + GROUP <= a->k; k += GROUP, x += rows * GROUP)
        tile_step(x, weight, a->weight_stride, k, GROUP, sums, rows, columns, dtype);
    if (k < a->k) tile_step(x, weight, a->weight_stride, k, a->k - k, sums, rows, columns, dtype);
    UNROLL for (int r = 0; r < rows; r++) {
        void *out = at_out(a->out, (row + r) * a->out_stride + column, dtype);
        UNROLL for (int c = 0; c < columns; c++) {
            float sum = sum8(sums[r * columns + c]);
            if (a->bias) sum += load1(a->bias, column + c, dtype);
            store1(out, c, sum, dtype);
        }
    }
}

INLINE void columns_of(const linear_args *a, const float *x, int64_t row, int64_t begin, int64_t end, int rows,
                       int dtype) {
    int64_t column = begin;
    for (; column + TILE / rows <= end; column += TILE / rows)
        tile(a, x, row, column, rows, TILE / rows, dtype);
    for (; column < end; column++) tile(a, x, row, column, rows, 1, dtype);
}

/* 5 rows are tiles of 3 + 2 rather than 4 + 1: thin tiles reuse weights least. */
INLINE int64_t tile_rows(int64_t left) { return left >= 7 || left == 4 ? 4 : left > 4 ? 3 : left; }

INLINE void run(const linear_args *a, int64_t begin, int64_t end, int dtype) {
    int64_t padded = (a->k + GROUP - 1) / GROUP * GROUP;
    int64_t chunk = max64(MAX_TILE_ROWS, X_CHUNK_BYTES / (padded * 4) / MAX_TILE_ROWS * MAX_TILE_ROWS);
    chunk = min64(chunk, a->rows);
    float *packed = thread_scratch(chunk * padded * 4);
    for (int64_t first = 0; first < a->rows; first += chunk) {
        int64_t count = min64(chunk, a->rows - first);
        for (int64_t r = 0; r < count; r += tile_rows(count - r))
            pack_tile(a, first + r, tile_rows(count - r), dtype, packed + r * padded);
        for (int64_t block = begin; block < end; block += TILE) {
            int64_t stop = min64(block + TILE, end);
            for (int64_t r = 0; r < count; r += tile_rows(count - r)) {
                const float *x = packed + r * padded;
                switch (tile_rows(count - r)) {
                case 4: columns_of(a, x, first + r, block, stop, 4, dtype); break;
                case 3: columns_of(a, x, first + r, block, stop, 3, dtype); break;
                case 2: columns_of(a, x, first + r, block, stop, 2, dtype); break;
                default: columns_of(a, x, first + r, block, stop, 1, dtype); break;
                }
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
