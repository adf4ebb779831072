/* Threads are borrowed: the loader passes the OpenMP team torch already runs on. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "common.h"

/* Below this much memory traffic a fork costs more than it saves. */
enum { FORK_BYTES = 64 * 1024, CHUNKS_PER_THREAD = 4 };

typedef void gomp_parallel(void (*body)(void *), void *data, unsigned threads, unsigned flags);

static gomp_parallel *start_team;
static int64_t threads = 1;

EXPORT void tapeout_init(void *gomp_parallel_address, int64_t thread_limit);
void tapeout_init(void *gomp_parallel_address, int64_t thread_limit) {
    memcpy(&start_team, &gomp_parallel_address, sizeof start_team);
    threads = start_team && thread_limit > 1 ? thread_limit : 1;
}

int64_t thread_count(void) { return threads; }

typedef struct {
    range_body *body;
    const void *args;
    int64_t count, chunk;
    _Atomic int64_t next;
} team_work;

static void team_body(void *data) {
    team_work *work = data;
    for (;;) {
        int64_t begin = atomic_fetch_add_explicit(&work->next, work->chunk, memory_order_relaxed);
        if (begin >= work->count) return;
        work->body(work->args, begin, min64(begin + work->chunk, work->count));
    }
}

void parallel_for(int64_t count, int64_t work_bytes, range_body *body, const void *args) {
    if (count <= 0) return;
    if (threads == 1 || count == 1 || work_bytes < FORK_BYTES) {
        body(args, 0, count);
        return;
    }
    team_work work = {body, args, count, max64(1, count / (threads * CHUNKS_PER_THREAD)), 0};
    start_team(team_body, &work, (unsigned)min64(threads, count), 0);
}

void *thread_scratch(int64_t bytes) {
    static _Thread_local void *memory;
    static _Thread_local int64_t size;
    if (bytes > size) {
        free(memory);
        size = (bytes + 4095) / 4096 * 4096;
        memory = aligned_alloc(64, (size_t)size);
        if (!memory) {
            fprintf(stderr, "tapeout: out of memory for %lld bytes of kernel scratch\n", (long long)size);
            abort();
        }
    }
    return memory;
}
