/* mul_weight over rows x groups x dim; see the schema. */
#include "../native/common.h"

typedef struct {
    const void *x;
    int64_t x_row, x_group;
    const void *weight;
    int64_t weight_step, weight_dtype; /* step 0: one number for all columns */
    void *out;
    int64_t out_row, out_group, rows, groups, dim, dtype;
} mul_weight_args;

static void body(const void *args, int64_t begin, int64_t end) {
    const mul_weight_args *a = args;
    int dtype = (int)a->dtype, weight_dtype = (int)a->weight_dtype;
    for (int64_t item = begin; item < end; item++) {
        int64_t row = item / a->groups, group = item % a->groups;
        const void *x = at(a->x, row * a->x_row + group * a->x_group, dtype);
        void *out = at_out(a->out, row * a->out_row + group * a->out_group, dtype);
        for (int64_t i = 0; i < a->dim; i++)
            store1(out, i, load1(x, i, dtype) * load1(a->weight, i * a->weight_step, weight_dtype), dtype);
    }
}

KERNEL(mul_weight, mul_weight_args) {
    int64_t items = a->rows * a->groups;
    parallel_for(items, items * a->dim * 8, body, a);
}
