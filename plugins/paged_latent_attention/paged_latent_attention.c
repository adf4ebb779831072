/* Attention over cached latents: write the step's rows, then online softmax; see the schema.
 *
 * Work item = one query row and up to HEADS of its heads, which share each cached row. Keys come one by one
 * in order, so a row's bits depend on that row and its cache alone.
 */
#include "../native/common.h"

typedef struct {
    const void *nope;
    int64_t nope_row, nope_head;
    const void *rot;
    int64_t rot_row, rot_head;
    const void *latent;
    int64_t latent_row;
    const void *k_rot;
    int64_t k_rot_row;
    const void *up_key;   /* [heads, nope, rank] */
    const void *up_value; /* [heads, value, rank] */
    void *out;
    int64_t out_row, out_head;
    void *pool; /* [pages, layers, 2, 1, tokens_per_page, (rank + rotary) / 2] */
    const int32_t *page_table;
    int64_t page_table_row;
    const int32_t *cu_q, *kv_lens, *counts;
    int64_t heads, nope_dim, rotary, rank, value_dim, layers, layer, tokens_per_page, dtype, pool_dtype, window;
    double scale;
} paged_latent_attention_args;

enum { HEADS = 4 };

static int64_t sequence_of_row(const paged_latent_attention_args *a, int64_t row) {
    int64_t low = 0, high = a->counts[1] - 1;
    while (low < high) { /* last sequence that starts at or before the row and is not empty */
        int64_t middle = (low + high + 1) / 2;
        if (a->cu_q[middle] <= row) low = middle;
        else high = middle - 1;
    }
    return low;
}

/* Element index of half `which` of a token's cached row. */
INLINE int64_t pool_index(const paged_latent_attention_args *a, int64_t seq, int64_t token, int which) {
    int64_t page = a->page_table[seq * a->page_table_row + token / a->tokens_per_page];
    return (((page * a->layers + a->layer) * 2 + which) * a->tokens_per_page + token % a->tokens_per_page) *
           ((a->rank + a->rotary) / 2);
}

static void write_body(const void *args, int64_t begin, int64_t end) {
    const paged_latent_attention_args *a = args;
    int64_t half = (a->rank + a->rotary) / 2;
    for (int64_t row = begin; row < end; row++) {
        int64_t seq = sequence_of_row(a, row), token = a->kv_lens[seq] - a->cu_q[seq + 1] + row;
        for (int64_t i = 0; i < a->rank + a->rotary; i++) {
            float v = i < a->rank ? load1(at(a->latent, row * a->latent_row, (int)a->dtype), i, (int)a->dtype)
                                  : load1(at(a->k_rot, row * a->k_rot_row, (int)a->dtype), i - a->rank, (int)a->dtype);
            store1(at_out(a->pool, pool_index(a, seq, token, i >= half), (int)a->pool_dtype), i % half, v,
                   (int)a->pool_dtype);
        }
    }
}

/* to += factor * from, over `count` elements, a multiple of 8. */
INLINE void add_scaled(float *to, const float *from, float factor, int64_t count) {
    for (int64_t i = 0; i < count; i += 8)
        store8(to + i, load8_f32(to + i) + splat(factor) * load8_f32(from + i), F32);
}

INLINE float dot(const float *a, const float *b, int64_t count) {
    v8f lanes = splat(0);
    for (int64_t i = 0; i < count; i += 8) lanes += load8_f32(a + i) * load8_f32(b + i);
    return sum8(lanes);
}

static void widen(float *to, const void *from, int64_t count, int dtype) {
    for (int64_t i = 0; i < count; i++) to[i] = load1(from, i, dtype);
}

static void attend(const paged_latent_attention_args *a, int64_t row, int64_t first, int64_t heads) {
    int64_t rank = a->rank, width = rank + a->rotary, padded = (width + 7) / 8 * 8, half = width / 2;
    int dtype = (int)a->dtype, pool_dtype = (int)a->pool_dtype;
    float *query = thread_scratch(4 * padded * (2 * HEADS + 2)), *mixed = query + HEADS * padded;
    float *key = mixed + HEADS * padded, *line = key + padded, most[HEADS], total[HEADS];
    memset(query, 0, (size_t)(4 * padded * (2 * HEADS + 2)));
    for (int64_t h = 0; h < heads; h++) {
        const void *nope = at(a->nope, row * a->nope_row + (first + h) * a->nope_head, dtype);
        for (int64_t n = 0; n < a->nope_dim; n++) {
            widen(line, at(a->up_key, ((first + h) * a->nope_dim + n) * rank, dtype), rank, dtype);
            add_scaled(query + h * padded, line, load1(nope, n, dtype), padded);
        }
        widen(query + h * padded + rank, at(a->rot, row * a->rot_row + (first + h) * a->rot_head, dtype), a->rotary,
              dtype);
        most[h] = -INFINITY;
        total[h] = 0;
    }
    int64_t seq = sequence_of_row(a, row), position = a->kv_lens[seq] - a->cu_q[seq + 1] + row;
    for (int64_t token = a->window > 0 ? max64(0, position - a->window + 1) : 0; token <= position; token++) {
        for (int which = 0; which < 2; which++)
            widen(key + which * half, at(a->pool, pool_index(a, seq, token, which), pool_dtype), half, pool_dtype);
        for (int64_t h = 0; h < heads; h++) {
            float score = dot(query + h * padded, key, padded) * (float)a->scale, weight = 1;
            if (score > most[h]) {
                float shrink = expf(most[h] - score);
                total[h] *= shrink;
                for (int64_t i = 0; i < padded; i++) mixed[h * padded + i] *= shrink;
                most[h] = score;
            } else weight = expf(score - most[h]);
            total[h] += weight;
            add_scaled(mixed + h * padded, key, weight, padded);
        }
    }
    for (int64_t h = 0; h < heads; h++) {
        void *out = at_out(a->out, row * a->out_row + (first + h) * a->out_head, dtype);
        for (int64_t i = rank; i < padded; i++) mixed[h * padded + i] = 0; /* the rotated part has no value */
        for (int64_t v = 0; v < a->value_dim; v++) {
            widen(line, at(a->up_value, ((first + h) * a->value_dim + v) * rank, dtype), rank, dtype);
            store1(out, v, dot(mixed + h * padded, line, padded) / total[h], dtype);
        }
    }
}

static void attend_body(const void *args, int64_t begin, int64_t end) {
    const paged_latent_attention_args *a = args;
    int64_t blocks = (a->heads + HEADS - 1) / HEADS;
    for (int64_t item = begin; item < end; item++) {
        int64_t first = item % blocks * HEADS;
        attend(a, item / blocks, first, min64(HEADS, a->heads - first));
    }
}

KERNEL(paged_latent_attention, paged_latent_attention_args) {
    int64_t rows = a->counts[0], width = a->rank + a->rotary, blocks = (a->heads + HEADS - 1) / HEADS;
    parallel_for(rows, rows * width * 8, write_body, a);
    int64_t cached = 0;
    for (int64_t seq = 0; seq < a->counts[1]; seq++) cached = max64(cached, a->kv_lens[seq]);
    parallel_for(rows * blocks, rows * a->heads * (cached + a->nope_dim + a->value_dim) * width * 4, attend_body, a);
}
