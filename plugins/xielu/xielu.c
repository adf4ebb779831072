/* xielu over rows x groups x dim; see the schema. */
#include "../native/common.h"

typedef struct {
    const void *x;
    int64_t x_row, x_group;
    const void *alpha_p, *alpha_n, *beta, *eps;
    void *out;
    int64_t out_row, out_group, rows, groups, dim, dtype;
} xielu_args;

static float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

static void body(const void *args, int64_t begin, int64_t end) {
    const xielu_args *a = args;
    int dtype = (int)a->dtype;
    float beta = load1(a->beta, 0, dtype), eps = load1(a->eps, 0, dtype);
    float above = softplus(load1(a->alpha_p, 0, dtype)), below = beta + softplus(load1(a->alpha_n, 0, dtype));
    for (int64_t item = begin; item < end; item++) {
        int64_t row = item / a->groups, group = item % a->groups;
        const void *x = at(a->x, row * a->x_row + group * a->x_group, dtype);
        void *out = at_out(a->out, row * a->out_row + group * a->out_group, dtype);
        for (int64_t i = 0; i < a->dim; i++) {
            float v = load1(x, i, dtype);
            float bent = v > 0 ? above * v * v : below * (expm1f(v < eps ? v : eps) - v);
            store1(out, i, bent + beta * v, dtype);
        }
    }
}

KERNEL(xielu, xielu_args) {
    int64_t items = a->rows * a->groups;
    parallel_for(items, items * a->dim * 32, body, a);
}
