/* rms_norm, and add_rms_norm when `residual` is set; see the schemas. */
#include "../native/common.h"

typedef struct {
    const void *x;
    int64_t x_row, x_group;
    const void *residual; /* null: plain rms_norm */
    int64_t residual_row, residual_group;
    const void *weight;
    int64_t weight_dtype;
    void *out;
    int64_t out_row, out_group;
    void *sum; /* null when residual is */
    int64_t sum_row, sum_group;
    int64_t rows, groups, dim, dtype, cast_before_weight;
    double eps, weight_offset;
} rms_norm_args;

INLINE v8f load_up_to8(const void *p, int64_t i, int64_t dim, int dtype) {
    return i + 8 <= dim ? load8(at(p, i, dtype), dtype) : load_part(at(p, i, dtype), dim - i, dtype);
}

INLINE void store_up_to8(void *p, int64_t i, int64_t dim, v8f v, int dtype) {
    if (i + 8 <= dim) store8(at_out(p, i, dtype), v, dtype);
    else store_part(at_out(p, i, dtype), v, dim - i, dtype);
}

INLINE void one_row(const rms_norm_args *a, int64_t row, int64_t group, int dtype, int weight_dtype) {
    const void *x = at(a->x, row * a->x_row + group * a->x_group, dtype);
    void *out = at_out(a->out, row * a->out_row + group * a->out_group, dtype);
    if (a->residual) {
        const void *residual = at(a->residual, row * a->residual_row + group * a->residual_group, dtype);
        void *sum = at_out(a->sum, row * a->sum_row + group * a->sum_group, dtype);
        for (int64_t i = 0; i < a->dim; i += 8)
            store_up_to8(sum, i, a->dim,
                         load_up_to8(x, i, a->dim, dtype) + load_up_to8(residual, i, a->dim, dtype), dtype);
        x = sum;
    }
    v8f squares = splat(0);
    for (int64_t i = 0; i < a->dim; i += 8) {
        v8f v = load_up_to8(x, i, a->dim, dtype);
        squares += v * v;
    }
    v8f factor = splat(1.0f / sqrtf(sum8(squares) / (float)a->dim + (float)a->eps));
    v8f offset = splat((float)a->weight_offset);
    for (int64_t i = 0; i < a->dim; i += 8) {
        v8f normed = load_up_to8(x, i, a->dim, dtype) * factor;
        v8f weight = load_up_to8(a->weight, i, a->dim, weight_dtype) + offset;
        if (a->cast_before_weight) {
            normed = round_to(normed, dtype);
            weight = round_to(round_to(weight, weight_dtype), dtype);
        }
        store_up_to8(out, i, a->dim, normed * weight, dtype);
    }
}

static void body(const void *args, int64_t begin, int64_t end) {
    const rms_norm_args *a = args;
    for (int64_t i = begin; i < end; i++) {
        int64_t row = i / a->groups, group = i % a->groups;
        if (a->dtype == F32) one_row(a, row, group, F32, F32);
        else if (a->weight_dtype == F32) one_row(a, row, group, BF16, F32);
        else one_row(a, row, group, BF16, BF16);
    }
}

KERNEL(rms_norm, rms_norm_args) {
    int64_t items = a->rows * a->groups;
    parallel_for(items, items * a->dim * 8, body, a);
}
