/* A stand-in for libcublasLt: the functions that are called, on memory of the host.
 *
 * Products are of bfloat16 with float32 sums. An algorithm is 64 bytes: a mark, a number, and how it is
 * wrong. With a hook, calls of cublasLtMatmul go there instead of being computed, as a capture takes them.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef VERSION
#define VERSION 130100
#endif
#ifndef ALGORITHMS
#define ALGORITHMS 3
#endif
#ifndef START_STATUS
#define START_STATUS 0
#endif
enum { SUCCESS = 0, INVALID_VALUE = 7, NOT_SUPPORTED = 15, MARK = 0x7a9e };

typedef struct { uint64_t data[8]; } Algorithm;
typedef struct { Algorithm algo; size_t workspace; int state; float waves; int reserved[4]; } Heuristic;
typedef struct { int compute, scale, transa; uint32_t epilogue; const uint16_t *bias; } Operation;
typedef struct { int type; uint64_t rows, columns; int64_t ld; } Layout;
typedef struct { uint64_t workspace; uint32_t reduction, alignment[4]; } Preference;

/* A call as its record: 14 words. */
typedef struct {
    int64_t m, n, k, lda, ldb, ldc, ldd;
    const uint16_t *a, *b, *c, *bias;
    uint16_t *d;
    int64_t algorithm, wrong;
} Call;

static int handles, objects;
static void (*hook)(const Call *);

int stub_open_handles(void) { return handles; }
int stub_open_objects(void) { return objects; }
void stub_hook(void (*function)(const Call *)) { hook = function; }

size_t cublasLtGetVersion(void) { return VERSION; }
const char *cublasLtGetStatusName(int status) {
    return status == INVALID_VALUE ? "CUBLAS_STATUS_INVALID_VALUE"
         : status == NOT_SUPPORTED ? "CUBLAS_STATUS_NOT_SUPPORTED"
         : status == 1 ? "CUBLAS_STATUS_NOT_INITIALIZED" : "CUBLAS_STATUS_SUCCESS";
}

int cublasLtCreate(void **handle) {
    if (START_STATUS) return START_STATUS;
    handles++, *handle = malloc(1);
    return SUCCESS;
}
int cublasLtDestroy(void *handle) { handles--, free(handle); return SUCCESS; }

int cublasLtMatmulDescCreate(Operation **made, int compute, int scale) {
    objects++, *made = calloc(1, sizeof **made);
    (*made)->compute = compute, (*made)->scale = scale, (*made)->epilogue = 1;
    return SUCCESS;
}
int cublasLtMatmulDescDestroy(Operation *made) { objects--, free(made); return SUCCESS; }
int cublasLtMatmulDescSetAttribute(Operation *made, int which, const void *value, size_t size) {
    if (which == 3 && size == 4) return memcpy(&made->transa, value, 4), SUCCESS;
    if (which == 7 && size == 4) return memcpy(&made->epilogue, value, 4), SUCCESS;
    if (which == 8 && size == 8) return memcpy(&made->bias, value, 8), SUCCESS;
    return INVALID_VALUE;
}

int cublasLtMatrixLayoutCreate(Layout **made, int type, uint64_t rows, uint64_t columns, int64_t ld) {
    if (ld < (int64_t)rows) return INVALID_VALUE;
    objects++, *made = malloc(sizeof **made);
    **made = (Layout){type, rows, columns, ld};
    return SUCCESS;
}
int cublasLtMatrixLayoutDestroy(Layout *made) { objects--, free(made); return SUCCESS; }

int cublasLtMatmulPreferenceCreate(Preference **made) {
    objects++, *made = calloc(1, sizeof **made);
    return SUCCESS;
}
int cublasLtMatmulPreferenceDestroy(Preference *made) { objects--, free(made); return SUCCESS; }
int cublasLtMatmulPreferenceSetAttribute(Preference *made, int which, const void *value, size_t size) {
    if (which == 1 && size == 8) return memcpy(&made->workspace, value, 8), SUCCESS;
    if (which == 3 && size == 4) return memcpy(&made->reduction, value, 4), SUCCESS;
    if (which >= 5 && which <= 8 && size == 4) return memcpy(&made->alignment[which - 5], value, 4), SUCCESS;
    return INVALID_VALUE;
}

static int fits(const Operation *o, const Layout *a, const Layout *b, const Layout *c, const Layout *d) {
    if (o->compute != 68 || o->scale != 0 || o->transa != 1 || (o->epilogue != 1 && o->epilogue != 4)) return 0;
    if (a->type != 14 || b->type != 14 || c->type != 14 || d->type != 14) return 0;
    return a->rows == b->rows && a->columns == d->rows && b->columns == d->columns
        && c->rows == d->rows && c->columns == d->columns;
}

/* The first algorithm offered is wrong by WRONG, the others are right. */
int cublasLtMatmulAlgoGetHeuristic(void *handle, const Operation *o, const Layout *a, const Layout *b,
                                   const Layout *c, const Layout *d, const Preference *p, int count,
                                   Heuristic *results, int *found) {
    *found = 0;
    if (!handle || !fits(o, a, b, c, d)) return INVALID_VALUE;
    if (p->reduction != 2) return INVALID_VALUE;
    for (int i = 0; i < 4; i++) if (p->alignment[i] != 16) return INVALID_VALUE;
    for (int i = 0; i < ALGORITHMS && i < count; i++, ++*found) {
        memset(&results[i], 0, sizeof results[i]);
        results[i].algo.data[0] = MARK, results[i].algo.data[1] = i, results[i].algo.data[2] = i == 0;
        results[i].workspace = 1024 * i;
    }
    return *found ? SUCCESS : NOT_SUPPORTED;
}

int cublasLtMatmulAlgoCheck(void *handle, const Operation *o, const Layout *a, const Layout *b,
                            const Layout *c, const Layout *d, const Algorithm *algo, Heuristic *result) {
    if (!handle || !fits(o, a, b, c, d)) return INVALID_VALUE;
    memset(result, 0, sizeof *result);
    result->algo = *algo, result->workspace = 1024 * algo->data[1];
    return algo->data[0] == MARK ? SUCCESS : NOT_SUPPORTED;
}

static float wide(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}
static uint16_t rounded(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) return 0x7fc0;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

void stub_compute(const Call *call) {
    for (int64_t column = 0; column < call->n; column++)
        for (int64_t row = 0; row < call->m; row++) {
            float sum = 0;
            for (int64_t i = 0; i < call->k; i++)
                sum += wide(call->a[row * call->lda + i]) * wide(call->b[column * call->ldb + i]);
            if (call->bias) sum += wide(call->bias[row]);
            if (call->c) sum += wide(call->c[column * call->ldc + row]);
            call->d[column * call->ldd + row] = rounded(call->wrong && row == 0 ? sum + 100 : sum);
        }
}

int cublasLtMatmul(void *handle, const Operation *o, const float *alpha, const void *a, const Layout *al,
                   const void *b, const Layout *bl, const float *beta, const void *c, const Layout *cl, void *d,
                   const Layout *dl, const Algorithm *algo, void *workspace, size_t size, void *stream) {
    if (!handle || !stream || !fits(o, al, bl, cl, dl) || algo->data[0] != MARK || *alpha != 1) return INVALID_VALUE;
    if (size < 1024 * algo->data[1] || (uintptr_t)workspace % 256) return INVALID_VALUE;
    if ((uintptr_t)a % 16 || (uintptr_t)b % 16 || (uintptr_t)c % 16 || (uintptr_t)d % 16) return INVALID_VALUE;
    Call call = {dl->rows, dl->columns, al->rows, al->ld, bl->ld, cl->ld, dl->ld, a, b, *beta ? c : 0,
                 o->epilogue == 4 ? o->bias : 0, d, algo->data[1], algo->data[2]};
    if (hook) hook(&call); else stub_compute(&call);
    return SUCCESS;
}
