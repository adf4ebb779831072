/* Rows copied by index (embedding, select_rows) and strided copies; any dtype, strides in bytes. */
#include "common.h"

typedef struct {
    const char *table;
    int64_t table_row_bytes, table_rows;
    const void *ids;
    int64_t id_bytes; /* 4 or 8 */
    char *out;
    int64_t out_row_bytes, rows, row_bytes;
} gather_args;

/* An id outside the table gives a row of 0xff bytes, which is NaN in every float dtype: the
 * logits check then fails that request instead of the process. */
static void gather_body(const void *args, int64_t begin, int64_t end) {
    const gather_args *a = args;
    for (int64_t row = begin; row < end; row++) {
        int64_t id = a->id_bytes == 4 ? ((const int32_t *)a->ids)[row] : ((const int64_t *)a->ids)[row];
        char *out = a->out + row * a->out_row_bytes;
        if (id < 0 || id >= a->table_rows) memset(out, 0xff, (size_t)a->row_bytes);
        else memcpy(out, a->table + id * a->table_row_bytes, (size_t)a->row_bytes);
    }
}

KERNEL(gather, gather_args) { parallel_for(a->rows, 2 * a->rows * a->row_bytes, gather_body, a); }

typedef struct {
    const char *x;
    int64_t x_row_bytes, x_group_bytes;
    char *out;
    int64_t out_row_bytes, out_group_bytes, rows, groups, dim_bytes;
} copy_args;

static void copy_body(const void *args, int64_t begin, int64_t end) {
    const copy_args *a = args;
    for (int64_t i = begin; i < end; i++) {
        int64_t row = i / a->groups, group = i % a->groups;
        memcpy(a->out + row * a->out_row_bytes + group * a->out_group_bytes,
               a->x + row * a->x_row_bytes + group * a->x_group_bytes, (size_t)a->dim_bytes);
    }
}

KERNEL(copy, copy_args) {
    int64_t items = a->rows * a->groups;
    parallel_for(items, 2 * items * a->dim_bytes, copy_body, a);
}
