/* Cosines and sines of position * inverse frequency in float32. */
#include "../native/common.h"

typedef struct {
    const void *positions;
    int64_t position_bytes; /* 4 or 8 */
    const float *inv_freq;
    void *out;
    int64_t out_row, rows, half, dtype;
    double scaling;
} rope_table_args;

static void body(const void *args, int64_t begin, int64_t end) {
    const rope_table_args *a = args;
    int dtype = (int)a->dtype;
    float scaling = (float)a->scaling;
    for (int64_t row = begin; row < end; row++) {
        float position = a->position_bytes == 4 ? (float)((const int32_t *)a->positions)[row]
                                                : (float)((const int64_t *)a->positions)[row];
        void *out = at_out(a->out, row * a->out_row, dtype);
        for (int64_t i = 0; i < a->half; i++) {
            float angle = position * a->inv_freq[i];
            store1(out, i, cosf(angle) * scaling, dtype);
            store1(out, a->half + i, sinf(angle) * scaling, dtype);
        }
    }
}

/* A sine costs about as much as moving 64 bytes. */
KERNEL(rope_table, rope_table_args) { parallel_for(a->rows, a->rows * a->half * 128, body, a); }
