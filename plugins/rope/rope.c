/* Rotary embedding; every product and sum is rounded to the dtype, as Hugging Face models do. */
#include "../native/common.h"

typedef struct {
    const void *x;
    int64_t x_row, x_head;
    const void *table; /* [rows, rotary_dim]: cosines, sines */
    int64_t table_row;
    void *out;
    int64_t out_row, out_head, rows, heads, dim, rotary_dim, interleaved, dtype;
} rope_args;

/* Products stand in statements of their own so that none is fused into the addition. */
INLINE v8f turn(v8f first, v8f cos, v8f second, v8f sin, int dtype) {
    v8f kept = round_to(first * cos, dtype);
    v8f mixed = round_to(second * sin, dtype);
    return kept + mixed;
}

INLINE void split_head(const rope_args *a, const void *x, const void *table, void *out, int dtype) {
    int64_t half = a->rotary_dim / 2;
    for (int64_t i = 0; i < half; i += 8) {
        int64_t n = min64(8, half - i);
        const void *p[4] = {at(x, i, dtype), at(x, half + i, dtype), at(table, i, dtype),
                            at(table, half + i, dtype)};
        v8f v[4];
        for (int j = 0; j < 4; j++) v[j] = n == 8 ? load8(p[j], dtype) : load_part(p[j], n, dtype);
        v8f first = turn(v[0], v[2], -v[1], v[3], dtype), second = turn(v[1], v[2], v[0], v[3], dtype);
        if (n == 8) {
            store8(at_out(out, i, dtype), first, dtype);
            store8(at_out(out, half + i, dtype), second, dtype);
        } else {
            store_part(at_out(out, i, dtype), first, n, dtype);
            store_part(at_out(out, half + i, dtype), second, n, dtype);
        }
    }
}

INLINE void interleaved_head(const rope_args *a, const void *x, const void *table, void *out, int dtype) {
    int64_t half = a->rotary_dim / 2;
    for (int64_t i = 0; i < half; i++) {
        v8f first = splat(load1(x, 2 * i, dtype)), second = splat(load1(x, 2 * i + 1, dtype));
        v8f cos = splat(load1(table, i, dtype)), sin = splat(load1(table, half + i, dtype));
        store1(out, 2 * i, turn(first, cos, -second, sin, dtype)[0], dtype);
        store1(out, 2 * i + 1, turn(second, cos, first, sin, dtype)[0], dtype);
    }
}

INLINE void run(const rope_args *a, int64_t begin, int64_t end, int dtype) {
    for (int64_t i = begin; i < end; i++) {
        int64_t row = i / a->heads, head = i % a->heads;
        const void *x = at(a->x, row * a->x_row + head * a->x_head, dtype);
        const void *table = at(a->table, row * a->table_row, dtype);
        void *out = at_out(a->out, row * a->out_row + head * a->out_head, dtype);
        if (a->interleaved) interleaved_head(a, x, table, out, dtype);
        else split_head(a, x, table, out, dtype);
        memmove(at_out(out, a->rotary_dim, dtype), at(x, a->rotary_dim, dtype),
                (size_t)((a->dim - a->rotary_dim) * item_bytes(dtype)));
    }
}

static void body(const void *args, int64_t begin, int64_t end) {
    const rope_args *a = args;
    if (a->dtype == F32) run(a, begin, end, F32);
    else run(a, begin, end, BF16);
}

KERNEL(rope, rope_args) {
    int64_t items = a->rows * a->heads;
    parallel_for(items, items * a->dim * 8, body, a);
}
