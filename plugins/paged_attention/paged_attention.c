/* Paged attention: KV write, then online softmax over blocks of keys; see the schema.
 *
 * Work item = (block of query rows of one sequence, kv head[, query head]). Keys are taken in
 * blocks that start at multiples of KEY_BLOCK tokens, whatever the page size, the chunking of
 * the prompt or the other sequences: a row's bits depend on that row and its cache alone.
 */
#include "../native/common.h"

typedef struct {
    const void *q;
    int64_t q_row, q_head;
    const void *k;
    int64_t k_row, k_head;
    const void *v;
    int64_t v_row, v_head;
    void *out;
    int64_t out_row, out_head;
    const float *slopes; /* of ALiBi; may be null */
    const void *sinks;   /* may be null */
    void *pool;        /* [pages, layers, 2, kv_heads, tokens_per_page, dim] */
    const int32_t *page_table;
    int64_t page_table_row;
    const int32_t *cu_q, *kv_lens, *counts;
    int64_t heads, kv_heads, dim, layers, layer, tokens_per_page, dtype, pool_dtype, window;
    double scale, softcap;
} paged_attention_args;

enum { KEY_BLOCK = 32, ROWS_PER_ITEM = 48, MAX_DIM = 256 };

/* Element index of a token's key (which = 0) or value (1) in the pool. */
INLINE int64_t pool_index(const paged_attention_args *a, int64_t seq, int64_t token, int64_t head, int which) {
    int64_t page = a->page_table[seq * a->page_table_row + token / a->tokens_per_page];
    return ((((page * a->layers + a->layer) * 2 + which) * a->kv_heads + head) * a->tokens_per_page +
            token % a->tokens_per_page) *
           a->dim;
}

static int64_t sequence_of_row(const paged_attention_args *a, int64_t row) {
    int64_t low = 0, high = a->counts[1] - 1;
    while (low < high) { /* last sequence that starts at or before the row and is not empty */
        int64_t middle = (low + high + 1) / 2;
        if (a->cu_q[middle] <= row) low = middle;
        else high = middle - 1;
    }
    return low;
}

INLINE void write_kv(const paged_attention_args *a, int64_t begin, int64_t end, int dtype, int pool_dtype) {
    for (int64_t row = begin; row < end; row++) {
        int64_t seq = sequence_of_row(a, row);
        int64_t token = a->kv_lens[seq] - a->cu_q[seq + 1] + row;
        for (int64_t head = 0; head < a->kv_heads; head++)
            for (int which = 0; which < 2; which++) {
                const void *from = which ? at(a->v, row * a->v_row + head * a->v_head, dtype)
                                         : at(a->k, row * a->k_row + head * a->k_head, dtype);
                void *to = at_out(a->pool, pool_index(a, seq, token, head, which), pool_dtype);
                for (int64_t i = 0; i < a->dim; i += 8)
                    store8(at_out(to, i, pool_dtype), load8(at(from, i, dtype), dtype), pool_dtype);
            }
    }
}

static void write_body(const void *args, int64_t begin, int64_t end) {
    const paged_attention_args *a = args;
    if (a->dtype == F32 && a->pool_dtype == F32) write_kv(a, begin, end, F32, F32);
    else if (a->dtype == F32) write_kv(a, begin, end, F32, BF16);
    else if (a->pool_dtype == F32) write_kv(a, begin, end, BF16, F32);
    else write_kv(a, begin, end, BF16, BF16);
}

/* State of one item: R query rows of one kv head; a row is (token, query head of the group). */
typedef struct {
    float q[ROWS_PER_ITEM * MAX_DIM], sums[ROWS_PER_ITEM * MAX_DIM];
    float scores[ROWS_PER_ITEM * KEY_BLOCK];
    float most[ROWS_PER_ITEM], total[ROWS_PER_ITEM];
    float slope[ROWS_PER_ITEM]; /* of ALiBi */
    int64_t position[ROWS_PER_ITEM];
    float wide[2][KEY_BLOCK * MAX_DIM]; /* keys and values of a block, widened from bfloat16 */
    const float *keys[KEY_BLOCK], *values[KEY_BLOCK];
} item_state;

/* Raw dot products of `rows` query rows with `columns` keys. */
INLINE void score_tile(item_state *s, int64_t dim, int64_t row, int64_t key, int rows, int columns) {
    v8f sums[12];
    UNROLL for (int i = 0; i < rows * columns; i++) sums[i] = splat(0);
    for (int64_t d = 0; d < dim; d += 8)
        UNROLL for (int c = 0; c < columns; c++) {
            v8f k = load8_f32(s->keys[key + c] + d);
            UNROLL for (int r = 0; r < rows; r++) sums[r * columns + c] += k * load8_f32(s->q + (row + r) * dim + d);
        }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < columns; c++) s->scores[(row + r) * KEY_BLOCK + key + c] = sum8(sums[r * columns + c]);
}

INLINE void score_rows(item_state *s, int64_t dim, int64_t row, int64_t count, int rows) {
    int64_t key = 0;
    for (; key + 3 <= count; key += 3) score_tile(s, dim, row, key, rows, 3);
    for (; key < count; key++) score_tile(s, dim, row, key, rows, 1);
}

/* Scores to probabilities relative to the running maximum; hidden keys get 0. */
INLINE void softmax_row(const paged_attention_args *a, item_state *s, int64_t row, int64_t first, int64_t count) {
    float *scores = s->scores + row * KEY_BLOCK;
    int64_t high = min64(count, s->position[row] + 1 - first);
    int64_t low = a->window > 0 ? max64(0, s->position[row] - a->window + 1 - first) : 0;
    if (low >= high) {
        memset(scores, 0, KEY_BLOCK * sizeof(float));
        return;
    }
    v8f lanes[KEY_BLOCK / 8], most = splat(-INFINITY);
    float softcap = (float)a->softcap;
    v8i lane = {0, 1, 2, 3, 4, 5, 6, 7};
    for (int i = 0; i < KEY_BLOCK / 8; i++) {
        v8f v = load8_f32(scores + 8 * i) * splat((float)a->scale);
        if (softcap > 0) v = splat(softcap) * tanh8(v / splat(softcap));
        v8i key = lane + 8 * i;
        if (a->slopes)
            v += splat(s->slope[row]) * __builtin_convertvector(key + (int32_t)(first - s->position[row]), v8f);
        lanes[i] = select8((key >= (int32_t)low) & (key < (int32_t)high), v, splat(-INFINITY));
        most = select8(lanes[i] > most, lanes[i], most);
    }
    float peak = s->most[row];
    for (int i = 0; i < 8; i++) peak = most[i] > peak ? most[i] : peak;
    /* Nothing but -inf so far: any finite reference gives the same zeros. */
    float reference = peak == -INFINITY ? 0 : peak;
    v8f sum = splat(0);
    for (int i = 0; i < KEY_BLOCK / 8; i++) {
        v8f p = exp8(lanes[i] - splat(reference));
        sum += p;
        store8(scores + 8 * i, p, F32);
    }
    float shrink = exp8(splat(s->most[row] - reference))[0];
    s->total[row] = s->total[row] * shrink + sum8(sum);
    s->most[row] = peak;
    if (shrink != 1.0f)
        for (int64_t d = 0; d < a->dim; d += 8) {
            float *to = s->sums + row * a->dim + d;
            store8(to, load8_f32(to) * splat(shrink), F32);
        }
}

INLINE void value_rows(item_state *s, int64_t dim, int64_t row, int64_t count, int rows) {
    for (int64_t d = 0; d < dim; d += 16) {
        int wide = d + 16 <= dim;
        v8f sums[8];
        UNROLL for (int r = 0; r < rows; r++) {
            const float *from = s->sums + (row + r) * dim + d;
            sums[2 * r] = load8_f32(from);
            sums[2 * r + 1] = wide ? load8_f32(from + 8) : splat(0);
        }
        for (int64_t key = 0; key < count; key++) {
            v8f low = load8_f32(s->values[key] + d), high = wide ? load8_f32(s->values[key] + d + 8) : splat(0);
            UNROLL for (int r = 0; r < rows; r++) {
                v8f p = splat(s->scores[(row + r) * KEY_BLOCK + key]);
                sums[2 * r] += p * low;
                sums[2 * r + 1] += p * high;
            }
        }
        UNROLL for (int r = 0; r < rows; r++) {
            float *to = s->sums + (row + r) * dim + d;
            store8(to, sums[2 * r], F32);
            if (wide) store8(to + 8, sums[2 * r + 1], F32);
        }
    }
}

INLINE void load_keys(const paged_attention_args *a, item_state *s, int64_t seq, int64_t head, int64_t first,
                      int64_t count, int pool_dtype) {
    for (int64_t i = 0; i < count; i++)
        for (int which = 0; which < 2; which++) {
            const void *from = at(a->pool, pool_index(a, seq, first + i, head, which), pool_dtype);
            const float **to = which ? s->values + i : s->keys + i;
            if (pool_dtype == F32) {
                *to = from;
                continue;
            }
            float *wide = s->wide[which] + i * a->dim;
            for (int64_t d = 0; d < a->dim; d += 8) store8(wide + d, load8(at(from, d, BF16), BF16), F32);
            *to = wide;
        }
}

/* Query rows [begin, end) of sequence seq, query heads [head, head + heads) of one kv head. */
INLINE void attend(const paged_attention_args *a, int64_t seq, int64_t begin, int64_t end, int64_t head,
                   int64_t heads, int dtype, int pool_dtype) {
    item_state *s = thread_scratch(sizeof(item_state));
    int64_t rows = (end - begin) * heads, kv_head = head / (a->heads / a->kv_heads);
    int64_t to_position = a->kv_lens[seq] - a->cu_q[seq + 1];
    for (int64_t row = 0; row < rows; row++) {
        int64_t token = begin + row / heads, h = head + row % heads;
        const void *q = at(a->q, token * a->q_row + h * a->q_head, dtype);
        for (int64_t d = 0; d < a->dim; d += 8) store8(s->q + row * a->dim + d, load8(at(q, d, dtype), dtype), F32);
        memset(s->sums + row * a->dim, 0, (size_t)a->dim * sizeof(float));
        s->position[row] = token + to_position;
        s->slope[row] = a->slopes ? a->slopes[h] : 0;
        /* A sink is a logit seen before all keys; it adds to the total and carries no value. */
        s->most[row] = a->sinks ? load1(a->sinks, h, dtype) : -INFINITY;
        s->total[row] = a->sinks ? 1 : 0;
    }
    int64_t last = s->position[rows - 1];
    int64_t oldest = a->window > 0 ? max64(0, s->position[0] - a->window + 1) : 0;
    for (int64_t block = oldest / KEY_BLOCK * KEY_BLOCK; block <= last; block += KEY_BLOCK) {
        /* Keys no row sees are not touched: their page may be gone, or hold stale bytes. */
        int64_t skip = max64(0, oldest - block), count = min64(KEY_BLOCK, last + 1 - block);
        load_keys(a, s, seq, kv_head, block + skip, count - skip, pool_dtype);
        for (int64_t i = count - 1; i >= 0; i--) {
            s->keys[i] = s->keys[i < skip ? 0 : i - skip];
            s->values[i] = s->values[i < skip ? 0 : i - skip];
        }
        int64_t row = 0;
        for (; row + 4 <= rows; row += 4) score_rows(s, a->dim, row, count, 4);
        for (; row < rows; row++) score_rows(s, a->dim, row, count, 1);
        for (row = 0; row < rows; row++) softmax_row(a, s, row, block, count);
        for (row = 0; row + 4 <= rows; row += 4) value_rows(s, a->dim, row, count, 4);
        for (; row < rows; row++) value_rows(s, a->dim, row, count, 1);
    }
    for (int64_t row = 0; row < rows; row++) {
        void *out = at_out(a->out, (begin + row / heads) * a->out_row + (head + row % heads) * a->out_head, dtype);
        v8f factor = splat(1.0f / s->total[row]);
        for (int64_t d = 0; d < a->dim; d += 8)
            store8(at_out(out, d, dtype), load8_f32(s->sums + row * a->dim + d) * factor, dtype);
    }
}

typedef struct {
    const paged_attention_args *a;
    int64_t row_blocks, tokens_per_item, head_splits; /* head_splits: work items a kv head */
} attention_plan;

/* Items count down from the last rows, whose key ranges are the longest. */
INLINE void attend_items(const attention_plan *plan, int64_t begin, int64_t end, int dtype, int pool_dtype) {
    const paged_attention_args *a = plan->a;
    int64_t splits = a->kv_heads * plan->head_splits, heads = a->heads / splits;
    for (int64_t item = begin; item < end; item++) {
        int64_t block = plan->row_blocks - 1 - item / splits, head = item % splits * heads, seq = 0;
        for (;; seq++) {
            int64_t count = a->cu_q[seq + 1] - a->cu_q[seq];
            int64_t blocks = (count + plan->tokens_per_item - 1) / plan->tokens_per_item;
            if (block < blocks) break;
            block -= blocks;
        }
        int64_t first = a->cu_q[seq] + block * plan->tokens_per_item;
        int64_t stop = min64(first + plan->tokens_per_item, a->cu_q[seq + 1]);
        attend(a, seq, first, stop, head, heads, dtype, pool_dtype);
    }
}

static void attend_body(const void *args, int64_t begin, int64_t end) {
    const attention_plan *plan = args;
    if (plan->a->dtype == F32 && plan->a->pool_dtype == F32) attend_items(plan, begin, end, F32, F32);
    else if (plan->a->dtype == F32) attend_items(plan, begin, end, F32, BF16);
    else if (plan->a->pool_dtype == F32) attend_items(plan, begin, end, BF16, F32);
    else attend_items(plan, begin, end, BF16, BF16);
}

KERNEL(paged_attention, paged_attention_args) {
    int64_t group = a->heads / a->kv_heads, rows = a->counts[0], seqs = a->counts[1];
    int64_t row_bytes = a->kv_heads * a->dim * item_bytes((int)a->pool_dtype);
    parallel_for(rows, rows * row_bytes * 4, write_body, a);
    attention_plan plan = {a, 0, max64(1, ROWS_PER_ITEM / group), 1};
    int64_t work_bytes = 0;
    for (int64_t seq = 0; seq < seqs; seq++) {
        int64_t blocks = (a->cu_q[seq + 1] - a->cu_q[seq] + plan.tokens_per_item - 1) / plan.tokens_per_item;
        plan.row_blocks += blocks;
        work_bytes += blocks * a->kv_lens[seq] * row_bytes * 2;
    }
    /* Few items: give every query head its own, at the price of reading keys once more each. */
    if (plan.row_blocks * a->kv_heads < 2 * thread_count() || group > ROWS_PER_ITEM) plan.head_splits = group;
    parallel_for(plan.row_blocks * a->kv_heads * plan.head_splits, work_bytes, attend_body, &plan);
}
