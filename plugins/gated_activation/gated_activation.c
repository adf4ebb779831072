/* out = act(gate) * up, act(gate) rounded to the dtype; x is gate | up. */
#include "../activation/activation.h"

typedef struct {
    const void *x;
    int64_t x_row;
    void *out;
    int64_t out_row, rows, dim, dtype, kind;
} gated_activation_args;

enum { BLOCK = 512 };

INLINE void run(const gated_activation_args *a, int64_t begin, int64_t end, int dtype, int kind) {
    int64_t blocks = (a->dim + BLOCK - 1) / BLOCK;
    for (int64_t item = begin; item < end; item++) {
        int64_t row = item / blocks, first = item % blocks * BLOCK;
        const void *gate = at(a->x, row * a->x_row, dtype), *up = at(gate, a->dim, dtype);
        void *out = at_out(a->out, row * a->out_row, dtype);
        for (int64_t i = first; i < min64(first + BLOCK, a->dim); i += 8) {
            int64_t n = min64(8, a->dim - i);
            v8f g = n == 8 ? load8(at(gate, i, dtype), dtype) : load_part(at(gate, i, dtype), n, dtype);
            v8f u = n == 8 ? load8(at(up, i, dtype), dtype) : load_part(at(up, i, dtype), n, dtype);
            v8f result = round_to(activate8(g, kind), dtype) * u;
            if (n == 8) store8(at_out(out, i, dtype), result, dtype);
            else store_part(at_out(out, i, dtype), result, n, dtype);
        }
    }
}

INLINE void of_kind(const gated_activation_args *a, int64_t begin, int64_t end, int dtype) {
    switch (a->kind) {
    case SILU: run(a, begin, end, dtype, SILU); break;
    case GELU: run(a, begin, end, dtype, GELU); break;
    case GELU_TANH: run(a, begin, end, dtype, GELU_TANH); break;
    default: run(a, begin, end, dtype, RELU); break;
    }
}

static void body(const void *args, int64_t begin, int64_t end) {
    const gated_activation_args *a = args;
    if (a->dtype == F32) of_kind(a, begin, end, F32);
    else of_kind(a, begin, end, BF16);
}

KERNEL(gated_activation, gated_activation_args) {
    int64_t blocks = (a->dim + BLOCK - 1) / BLOCK;
    parallel_for(a->rows * blocks, a->rows * a->dim * 16, body, a);
}
