/* add, mul, scale and activation over rows x groups x dim. */
#include "../activation/activation.h"

typedef struct {
    const void *a;
    int64_t a_row, a_group;
    const void *b; /* null for one operand */
    int64_t b_row, b_group;
    void *out;
    int64_t out_row, out_group, rows, groups, dim, dtype, operation;
    double factor;
} elementwise_args;

/* Codes as in elementwise.py; ACTIVATION + kind for activations. */
enum { ADD = 0, MUL = 1, SCALE = 2, ACTIVATION = 16 };

INLINE v8f apply(v8f a, v8f b, float factor, int64_t operation) {
    switch (operation) {
    case ADD: return a + b;
    case MUL: return a * b;
    case SCALE: return a * splat(factor);
    case ACTIVATION + SILU: return activate8(a, SILU);
    case ACTIVATION + GELU: return activate8(a, GELU);
    case ACTIVATION + GELU_TANH: return activate8(a, GELU_TANH);
    case ACTIVATION + RELU: return activate8(a, RELU);
    case ACTIVATION + TANH: return activate8(a, TANH);
    case ACTIVATION + RELU2: return activate8(a, RELU2);
    case ACTIVATION + QUICK_GELU: return activate8(a, QUICK_GELU);
    case ACTIVATION + SOFTPLUS: return activate8(a, SOFTPLUS);
    default: return activate8(a, SIGMOID);
    }
}

INLINE void run(const elementwise_args *e, int64_t begin, int64_t end, int dtype) {
    for (int64_t item = begin; item < end; item++) {
        int64_t row = item / e->groups, group = item % e->groups;
        const void *a = at(e->a, row * e->a_row + group * e->a_group, dtype);
        const void *b = e->b ? at(e->b, row * e->b_row + group * e->b_group, dtype) : a;
        void *out = at_out(e->out, row * e->out_row + group * e->out_group, dtype);
        int64_t i = 0;
        for (; i + 8 <= e->dim; i += 8)
            store8(at_out(out, i, dtype),
                   apply(load8(at(a, i, dtype), dtype), load8(at(b, i, dtype), dtype), (float)e->factor,
                         e->operation),
                   dtype);
        if (i < e->dim)
            store_part(at_out(out, i, dtype),
                       apply(load_part(at(a, i, dtype), e->dim - i, dtype),
                             load_part(at(b, i, dtype), e->dim - i, dtype), (float)e->factor, e->operation),
                       e->dim - i, dtype);
    }
}

static void body(const void *args, int64_t begin, int64_t end) {
    const elementwise_args *a = args;
    if (a->dtype == F32) run(a, begin, end, F32);
    else run(a, begin, end, BF16);
}

KERNEL(elementwise, elementwise_args) {
    int64_t items = a->rows * a->groups;
    parallel_for(items, items * a->dim * 8, body, a);
}
