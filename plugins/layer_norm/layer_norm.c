/* layer_norm over rows x groups x dim; see the schema. */
#include "../native/common.h"

typedef struct {
    const void *x;
    int64_t x_row, x_group;
    const void *weight;
    const void *bias; /* may be null */
    int64_t weight_dtype;
    void *out;
    int64_t out_row, out_group, rows, groups, dim, dtype;
    double eps;
} layer_norm_args;

INLINE v8f up_to8(const void *p, int64_t i, int64_t dim, int dtype) {
    return i + 8 <= dim ? load8(at(p, i, dtype), dtype) : load_part(at(p, i, dtype), dim - i, dtype);
}

INLINE void one_row(const layer_norm_args *a, int64_t row, int64_t group, int dtype, int weight_dtype) {
    const void *x = at(a->x, row * a->x_row + group * a->x_group, dtype);
    void *out = at_out(a->out, row * a->out_row + group * a->out_group, dtype);
    v8f total = splat(0), squares = splat(0);
    for (int64_t i = 0; i < a->dim; i += 8) total += up_to8(x, i, a->dim, dtype);
    v8f mean = splat(sum8(total) / (float)a->dim);
    for (int64_t i = 0; i < a->dim; i += 8) {
        v8f v = up_to8(x, i, a->dim, dtype) - mean;
        for (int64_t j = a->dim - i; j < 8; j++) v[j] = 0; /* lanes past the end */
        squares += v * v;
    }
    v8f factor = splat(1.0f / sqrtf(sum8(squares) / (float)a->dim + (float)a->eps));
    for (int64_t i = 0; i < a->dim; i += 8) {
        v8f v = (up_to8(x, i, a->dim, dtype) - mean) * factor * up_to8(a->weight, i, a->dim, weight_dtype);
        if (a->bias) v += up_to8(a->bias, i, a->dim, weight_dtype);
        if (i + 8 <= a->dim) store8(at_out(out, i, dtype), v, dtype);
        else store_part(at_out(out, i, dtype), v, a->dim - i, dtype);
    }
}

static void body(const void *args, int64_t begin, int64_t end) {
    const layer_norm_args *a = args;
    for (int64_t i = begin; i < end; i++) {
        int64_t row = i / a->groups, group = i % a->groups;
        if (a->dtype == F32) one_row(a, row, group, F32, F32);
        else if (a->weight_dtype == F32) one_row(a, row, group, BF16, F32);
        else one_row(a, row, group, BF16, BF16);
    }
}

KERNEL(layer_norm, layer_norm_args) {
    int64_t items = a->rows * a->groups;
    parallel_for(items, items * a->dim * 8, body, a);
}
