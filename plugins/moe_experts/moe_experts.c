/* Mixture-of-experts MLPs; see the schema.
 *
 * An assignment is one row of x with one of its experts. Assignments are sorted by expert, so that up to
 * ROWS of them share each load of a weight. Three phases over one scratch: up and activation, down, and the
 * weighted sum of each row's results. Every sum has one order, whatever the other rows are.
 */
#include "../activation/activation.h"

typedef struct {
    const void *x;
    int64_t x_row;
    const void *ids; /* [rows, chosen] */
    int64_t ids_row, id_bytes;
    const float *weights; /* [rows, chosen] */
    int64_t weights_row;
    const void *up;   /* [experts, gated ? 2 inner : inner, hidden] */
    const void *down; /* [experts, hidden, inner] */
    const void *up_bias, *down_bias; /* may be null */
    void *out;
    int64_t out_row, rows, chosen, experts, hidden, inner, gated, activation, dtype;
    double alpha, limit;
} moe_experts_args;

enum { ROWS = 4, COLUMNS = 32, CLAMPED = 100 };

typedef struct {
    const moe_experts_args *a;
    int64_t *order;  /* assignments by expert */
    int64_t *starts; /* [experts + 1] first of an expert in order */
    int64_t *groups; /* [experts + 1] groups of up to ROWS before an expert */
    float *inner;    /* [assignments, inner rounded up to 8] */
    float *parts;    /* [assignments, hidden] */
    int64_t inner_row;
} moe_plan;

INLINE int64_t expert_of(const moe_experts_args *a, int64_t assignment) {
    int64_t at_row = assignment / a->chosen * a->ids_row + assignment % a->chosen;
    return a->id_bytes == 4 ? ((const int32_t *)a->ids)[at_row] : ((const int64_t *)a->ids)[at_row];
}

INLINE v8f up_to8(const void *p, int64_t i, int64_t dim, int dtype) {
    return i + 8 <= dim ? load8(at(p, i, dtype), dtype) : load_part(at(p, i, dtype), dim - i, dtype);
}

/* sums[r] = row r . weight, for `count` rows that share the weight's loads. */
INLINE void dot_rows(const void *const *rows, int64_t count, int row_dtype, const void *weight, int64_t dim,
                     int dtype, float *sums) {
    v8f lanes[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) lanes[r] = splat(0);
    for (int64_t i = 0; i < dim; i += 8) {
        v8f w = up_to8(weight, i, dim, dtype);
        UNROLL for (int r = 0; r < ROWS; r++)
            if (r < count) lanes[r] += w * up_to8(rows[r], i, dim, row_dtype);
    }
    UNROLL for (int r = 0; r < ROWS; r++) sums[r] = sum8(lanes[r]);
}

INLINE float rounded(float f, int dtype) { return dtype == F32 ? f : bf16_to_float(float_to_bf16(f)); }

INLINE float activated(const moe_experts_args *a, float gate, float up, int dtype) {
    if (a->activation == CLAMPED) {
        float limit = (float)a->limit;
        if (gate > limit) gate = limit;
        if (up > limit) up = limit;
        if (up < -limit) up = -limit;
        float swish = rounded(gate * rounded(activate8(splat(rounded((float)a->alpha * gate, dtype)), SIGMOID)[0], dtype), dtype);
        return rounded(rounded(up + 1.0f, dtype) * swish, dtype);
    }
    float value = rounded(activate8(splat(gate), (int)a->activation)[0], dtype);
    return a->gated ? rounded(value * up, dtype) : value;
}

/* The expert and the assignments of a group. */
INLINE int64_t group_rows(const moe_plan *p, int64_t group, int64_t *expert, int64_t *first) {
    int64_t e = 0;
    while (p->groups[e + 1] <= group) e++;
    *expert = e;
    *first = p->starts[e] + (group - p->groups[e]) * ROWS;
    return min64(ROWS, p->starts[e + 1] - *first);
}

INLINE void up_items(const moe_plan *p, int64_t begin, int64_t end, int dtype) {
    const moe_experts_args *a = p->a;
    int64_t blocks = (a->inner + COLUMNS - 1) / COLUMNS, width = a->gated ? 2 * a->inner : a->inner;
    for (int64_t item = begin; item < end; item++) {
        int64_t expert, first, count = group_rows(p, item / blocks, &expert, &first);
        const void *rows[ROWS];
        for (int64_t r = 0; r < count; r++) rows[r] = at(a->x, p->order[first + r] / a->chosen * a->x_row, dtype);
        for (int64_t r = count; r < ROWS; r++) rows[r] = rows[0];
        int64_t column = item % blocks * COLUMNS, stop = min64(column + COLUMNS, a->inner);
        for (; column < stop; column++) {
            float gate[ROWS], up[ROWS] = {0};
            int64_t row = expert * width + column;
            dot_rows(rows, count, dtype, at(a->up, row * a->hidden, dtype), a->hidden, dtype, gate);
            if (a->gated)
                dot_rows(rows, count, dtype, at(a->up, (row + a->inner) * a->hidden, dtype), a->hidden, dtype, up);
            for (int64_t r = 0; r < count; r++) {
                float g = gate[r] + (a->up_bias ? load1(a->up_bias, row, dtype) : 0);
                float u = up[r] + (a->up_bias && a->gated ? load1(a->up_bias, row + a->inner, dtype) : 0);
                p->inner[(first + r) * p->inner_row + column] =
                    activated(a, rounded(g, dtype), rounded(u, dtype), dtype);
            }
        }
    }
}

INLINE void down_items(const moe_plan *p, int64_t begin, int64_t end, int dtype) {
    const moe_experts_args *a = p->a;
    int64_t blocks = (a->hidden + COLUMNS - 1) / COLUMNS;
    for (int64_t item = begin; item < end; item++) {
        int64_t expert, first, count = group_rows(p, item / blocks, &expert, &first);
        const void *rows[ROWS];
        for (int64_t r = 0; r < ROWS; r++) rows[r] = p->inner + (first + (r < count ? r : 0)) * p->inner_row;
        int64_t column = item % blocks * COLUMNS, stop = min64(column + COLUMNS, a->hidden);
        for (; column < stop; column++) {
            float sums[ROWS];
            int64_t row = expert * a->hidden + column;
            dot_rows(rows, count, F32, at(a->down, row * a->inner, dtype), a->inner, dtype, sums);
            for (int64_t r = 0; r < count; r++)
                p->parts[p->order[first + r] * a->hidden + column] =
                    rounded(sums[r] + (a->down_bias ? load1(a->down_bias, row, dtype) : 0), dtype);
        }
    }
}

INLINE void sum_rows(const moe_plan *p, int64_t begin, int64_t end, int dtype) {
    const moe_experts_args *a = p->a;
    for (int64_t row = begin; row < end; row++) {
        void *out = at_out(a->out, row * a->out_row, dtype);
        for (int64_t i = 0; i < a->hidden; i++) {
            float total = 0;
            for (int64_t k = 0; k < a->chosen; k++)
                total += p->parts[(row * a->chosen + k) * a->hidden + i] * a->weights[row * a->weights_row + k];
            store1(out, i, total, dtype);
        }
    }
}

#define BODY(name, of)                                                                             \
    static void name(const void *args, int64_t begin, int64_t end) {                               \
        const moe_plan *p = args;                                                                  \
        if (p->a->dtype == F32) of(p, begin, end, F32);                                            \
        else of(p, begin, end, BF16);                                                              \
    }
BODY(up_body, up_items)
BODY(down_body, down_items)
BODY(sum_body, sum_rows)

KERNEL(moe_experts, moe_experts_args) {
    int64_t count = a->rows * a->chosen, experts = a->experts, inner_row = (a->inner + 7) / 8 * 8;
    int64_t numbers = count + 2 * (experts + 1);
    /* Bodies take no scratch of their own, so this block stays whole while they run. */
    char *scratch = thread_scratch(numbers * 8 + 64 + 4 * count * (inner_row + a->hidden));
    moe_plan p = {a, (int64_t *)scratch, 0, 0, 0, 0, inner_row};
    p.starts = p.order + count;
    p.groups = p.starts + experts + 1;
    p.inner = (float *)(p.groups + experts + 1);
    p.parts = p.inner + count * inner_row;
    memset(p.starts, 0, (size_t)(experts + 1) * 8);
    for (int64_t i = 0; i < count; i++) p.starts[expert_of(a, i) + 1]++;
    p.groups[0] = 0;
    for (int64_t e = 0; e < experts; e++) {
        p.groups[e + 1] = p.groups[e] + (p.starts[e + 1] + ROWS - 1) / ROWS;
        p.starts[e + 1] += p.starts[e];
    }
    for (int64_t i = 0; i < count; i++) p.order[p.starts[expert_of(a, i)]++] = i;
    for (int64_t e = experts; e > 0; e--) p.starts[e] = p.starts[e - 1];
    p.starts[0] = 0;
    int64_t groups = p.groups[experts], size = item_bytes((int)a->dtype);
    int64_t bytes = groups * a->inner * a->hidden * size;
    parallel_for(groups * ((a->inner + COLUMNS - 1) / COLUMNS), bytes * (a->gated ? 2 : 1), up_body, &p);
    parallel_for(groups * ((a->hidden + COLUMNS - 1) / COLUMNS), bytes, down_body, &p);
    parallel_for(a->rows, 4 * count * a->hidden, sum_body, &p);
}
