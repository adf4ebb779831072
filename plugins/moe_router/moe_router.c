/* Routing of a mixture of experts, one row at a time; see the schema. */
#include "../native/common.h"

typedef struct {
    const void *logits;
    int64_t logits_row;
    const float *bias; /* may be null */
    int32_t *ids;
    int64_t ids_row;
    float *weights;
    int64_t weights_row, rows, experts, chosen, scoring, groups, chosen_groups, best_two, normalize, dtype;
    double scale;
} moe_router_args;

enum { SOFTMAX = 0, SIGMOID_SCORES = 1, SOFTMAX_OF_CHOSEN = 2, MAX_EXPERTS = 1024 };

/* Index of the largest value that is not taken yet; the first of equals, NaN never. */
static int64_t largest(const float *values, const char *taken, int64_t count) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; i++)
        if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
    return best;
}

static void softmax(float *values, int64_t count) {
    float peak = -INFINITY, total = 0;
    for (int64_t i = 0; i < count; i++) peak = values[i] > peak ? values[i] : peak;
    for (int64_t i = 0; i < count; i++) total += values[i] = expf(values[i] - peak);
    for (int64_t i = 0; i < count; i++) values[i] /= total;
}

/* Choices outside of the best groups become 0. */
static void keep_groups(const moe_router_args *a, float *choice) {
    float score[MAX_EXPERTS];
    char taken[MAX_EXPERTS];
    int64_t size = a->experts / a->groups;
    for (int64_t g = 0; g < a->groups; g++) {
        memset(taken, 0, (size_t)size);
        int64_t first = largest(choice + g * size, taken, size);
        score[g] = choice[g * size + first];
        if (a->best_two && size > 1) {
            taken[first] = 1;
            score[g] += choice[g * size + largest(choice + g * size, taken, size)];
        }
    }
    memset(taken, 0, (size_t)a->groups);
    for (int64_t i = 0; i < a->chosen_groups; i++) taken[largest(score, taken, a->groups)] = 1;
    for (int64_t i = 0; i < a->experts; i++)
        if (!taken[i / size]) choice[i] = 0;
}

static void one_row(const moe_router_args *a, int64_t row) {
    float scores[MAX_EXPERTS], choice[MAX_EXPERTS];
    char taken[MAX_EXPERTS] = {0};
    const void *logits = at(a->logits, row * a->logits_row, (int)a->dtype);
    for (int64_t i = 0; i < a->experts; i++) {
        float x = load1(logits, i, (int)a->dtype);
        scores[i] = a->scoring == SIGMOID_SCORES ? 1.0f / (1.0f + expf(-x)) : x;
    }
    if (a->scoring == SOFTMAX) softmax(scores, a->experts);
    for (int64_t i = 0; i < a->experts; i++) choice[i] = scores[i] + (a->bias ? a->bias[i] : 0);
    if (a->groups > 1) keep_groups(a, choice);
    float *weights = a->weights + row * a->weights_row, total = 0;
    for (int64_t k = 0; k < a->chosen; k++) {
        int64_t id = largest(choice, taken, a->experts);
        taken[id] = 1;
        a->ids[row * a->ids_row + k] = (int32_t)id;
        weights[k] = scores[id];
    }
    if (a->scoring == SOFTMAX_OF_CHOSEN) softmax(weights, a->chosen);
    for (int64_t k = 0; k < a->chosen; k++) total += weights[k];
    for (int64_t k = 0; k < a->chosen; k++)
        weights[k] = (a->normalize ? weights[k] / total : weights[k]) * (float)a->scale;
}

static void body(const void *args, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) one_row(args, row);
}

KERNEL(moe_router, moe_router_args) { parallel_for(a->rows, a->rows * a->experts * 64, body, a); }
