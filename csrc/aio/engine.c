/* The engine's life, and requests from submission to result. */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static uint64_t deadline(int64_t timeout_ms) {
    return doff_now_ns() + (timeout_ms > 0 ? (uint64_t)timeout_ms * 1000000u : 0);
}

static void engine_free(doff_engine* engine) {
    pthread_cond_destroy(&engine->work);
    pthread_cond_destroy(&engine->room);
    pthread_cond_destroy(&engine->finished);
    pthread_mutex_destroy(&engine->mutex);
    doff_bounce_free(engine, engine->queue_depth * DOFF_LANES_MAX);
    free(engine->ops);
    free(engine);
}

static doff_engine* engine_new(uint32_t queue_depth, uint32_t block_bytes, uint32_t pending_max) {
    unsigned ops = queue_depth * DOFF_LANES_MAX;
    doff_engine* engine = calloc(1, sizeof *engine);
    if (!engine)
        return NULL;
    if (!(engine->ops = calloc(ops, sizeof *engine->ops))) {
        free(engine);
        return NULL;
    }
    for (unsigned i = 0; i < ops; i++) {
        engine->ops[i].next = engine->ops_free;
        engine->ops_free = &engine->ops[i];
    }
    for (unsigned i = 0; i < DOFF_LANES_MAX; i++)
        for (unsigned q = 0; q < DOFF_QUEUES; q++)
            engine->lanes[i].queue[q].tail = &engine->lanes[i].queue[q].head;
    engine->pid = getpid();
    engine->references = 1;
    engine->queue_depth = queue_depth;
    engine->block_bytes = block_bytes;
    engine->pending_max = pending_max;
    pthread_mutex_init(&engine->mutex, NULL);
    doff_cond_init(&engine->work);
    doff_cond_init(&engine->room);
    doff_cond_init(&engine->finished);
    return engine;
}

static int start_backends(doff_engine* engine, const struct doff_backend_table* table, const char* fault_script) {
    unsigned ops = engine->queue_depth * DOFF_LANES_MAX;
    int code;
    if (fault_script) {
        /* Faults must reach every chunk, so buffered ones take the same way. */
        char* argument = malloc(strlen(table->name) + strlen(fault_script) + 2);
        if (!argument)
            return -ENOMEM;
        stpcpy(stpcpy(stpcpy(argument, table->name), ":"), fault_script);
        code = doff_backend_start(&engine->backend, &doff_backend_fault, ops, argument, doff_pump_complete, engine);
        free(argument);
        return code;
    }
    code = doff_backend_start(&engine->backend, table, ops, NULL, doff_pump_complete, engine);
    if (code || table == &doff_backend_pool)
        return code;
    /* libaio would do all buffered chunks inside io_submit, io_uring those with pages that have yet to be evicted
     * without doing that; the pool starts threads only when there are such chunks. */
    engine->all_buffered_aside = table == &doff_backend_libaio;
    code =
        doff_backend_start(&engine->side_pool, &doff_backend_pool, DOFF_SIDE_THREADS, NULL, doff_pump_complete, engine);
    if (code)
        doff_backend_stop(&engine->backend);
    engine->has_side_pool = !code;
    return code;
}

int doff_backend_probe(const char* name, uint32_t queue_depth) {
    const struct doff_backend_table* table = doff_backend_find(name);
    struct doff_backend backend = {.table = table};
    if (!table || !queue_depth || queue_depth > INT32_MAX / DOFF_LANES_MAX)
        return -EINVAL;
    int code = table->init(&backend, queue_depth * DOFF_LANES_MAX, NULL);
    if (!code)
        table->fini(&backend);
    return code;
}

int doff_engine_open(const char* backend, const char* fault_script, uint32_t queue_depth, uint32_t block_bytes,
                     uint32_t pending_max, doff_engine** out) {
    const struct doff_backend_table* table = doff_backend_find(backend);
    if (!table || !queue_depth || queue_depth > DOFF_QUEUE_DEPTH_MAX || !pending_max)
        return -EINVAL;
    if (!block_bytes || block_bytes % DOFF_PAGE || block_bytes > DOFF_TRANSFER_MAX)
        return -EINVAL;
    doff_engine* engine = engine_new(queue_depth, block_bytes, pending_max);
    if (!engine)
        return -ENOMEM;
    int code = start_backends(engine, table, fault_script);
    if (!code) {
        code = doff_thread_start(&engine->submitter, doff_pump_main, engine, "doff-submit");
        if (code) {
            doff_backend_stop(&engine->backend);
            doff_backend_stop(&engine->side_pool);
        }
    }
    if (code) {
        engine_free(engine);
        return code;
    }
    *out = engine;
    return 0;
}

int doff_engine_close(doff_engine* engine, int64_t timeout_ms) {
    if (engine->pid != getpid())
        return -ECHILD;
    uint64_t until = deadline(timeout_ms);
    pthread_mutex_lock(&engine->mutex);
    engine->closed = true; /* from now on doff_submit refuses */
    pthread_cond_broadcast(&engine->room);
    int code = 0;
    while (!code && engine->stats.requests_pending && !engine->lost_errno)
        code = doff_cond_wait_until(&engine->finished, &engine->mutex, until);
    if (engine->stats.requests_pending) {
        code = engine->lost_errno ? -ENOTRECOVERABLE : -ETIMEDOUT;
        doff_files_close(engine, false);
        pthread_mutex_unlock(&engine->mutex);
        return code;
    }
    bool again = engine->stop;
    engine->stop = true;
    pthread_cond_signal(&engine->work);
    pthread_mutex_unlock(&engine->mutex);
    if (again)
        return 0;
    pthread_join(engine->submitter, NULL);
    doff_backend_stop(&engine->backend);
    doff_backend_stop(&engine->side_pool);
    doff_files_close(engine, true);
    return 0;
}

static void drop_reference(doff_engine* engine) {
    pthread_mutex_lock(&engine->mutex);
    bool last = --engine->references == 0;
    pthread_mutex_unlock(&engine->mutex);
    if (last)
        engine_free(engine);
}

void doff_engine_release(doff_engine* engine) {
    if (engine->pid == getpid())
        drop_reference(engine);
}

int doff_engine_stats(doff_engine* engine, doff_stats* out) {
    if (engine->pid != getpid())
        return -ECHILD;
    pthread_mutex_lock(&engine->mutex);
    *out = engine->stats;
    out->completions_lost_errno = (uint64_t)engine->lost_errno;
    pthread_mutex_unlock(&engine->mutex);
    return 0;
}

void doff_unlock(doff_engine* engine) {
    bool ended = engine->ended;
    engine->ended = false;
    pthread_mutex_unlock(&engine->mutex);
    if (ended)
        pthread_cond_broadcast(&engine->finished);
}

static struct doff_request* request_new(doff_engine* engine, int operation, const doff_segment* segments,
                                        uint32_t count, uint32_t flags) {
    struct doff_request* request = calloc(1, sizeof *request);
    if (!request)
        return NULL;
    request->engine = engine;
    request->segs = count > DOFF_SEGMENTS_INLINE ? calloc(count, sizeof *request->segs) : request->inline_segs;
    if (!request->segs) {
        free(request);
        return NULL;
    }
    request->write = operation == DOFF_WRITE;
    request->urgent = flags & DOFF_URGENT;
    request->padded = flags & DOFF_PADDED;
    request->seg_count = count;
    request->result.file = -1;
    for (uint32_t i = 0; i < count; i++)
        request->segs[i] = (struct doff_seg){.request = request,
                                             .file_id = segments[i].file,
                                             .buf = (char*)(uintptr_t)segments[i].address,
                                             .off = segments[i].offset,
                                             .nbytes = segments[i].nbytes,
                                             .sum_base = segments[i].sums_skipped};
    return request;
}

static int check_segments(const doff_segment* segments, uint32_t count, uint32_t flags) {
    for (uint32_t i = 0; i < count; i++) {
        const doff_segment* segment = &segments[i];
        if (segment->nbytes < 0 || segment->offset < 0 || !segment->address)
            return -EINVAL;
        if (segment->offset > INT64_MAX - DOFF_PAGE - segment->nbytes)
            return -EINVAL;
        if ((flags & DOFF_PADDED) && ((segment->address | (uint64_t)segment->offset) & (DOFF_PAGE - 1)))
            return -EINVAL;
    }
    return 0;
}

/* With the mutex held: finds the files, waits for room. */
static int admit(doff_engine* engine, struct doff_request* request, int64_t timeout_ms) {
    uint64_t until = deadline(timeout_ms);
    while (!engine->closed && !engine->lost_errno && engine->stats.requests_pending >= engine->pending_max)
        if (doff_cond_wait_until(&engine->room, &engine->mutex, until))
            return -ETIMEDOUT;
    if (engine->closed)
        return -ESHUTDOWN;
    if (engine->lost_errno)
        return -ENOTRECOVERABLE;
    for (unsigned i = 0; i < request->seg_count; i++)
        if (!(request->segs[i].file = doff_file_get(engine, request->segs[i].file_id)))
            return -EBADF;
    return 0;
}

/* The submit thread sends the chunks: entering the kernel with 64 MiB takes longer than a caller should have to wait.
 */
static int submit(doff_engine* engine, struct doff_request* request, int64_t timeout_ms) {
    pthread_mutex_lock(&engine->mutex);
    int code = admit(engine, request, timeout_ms);
    if (code) {
        pthread_mutex_unlock(&engine->mutex);
        return code;
    }
    bool kick = false;
    engine->references++;
    engine->stats.requests_pending++;
    doff_request_enqueue(engine, request);
    for (unsigned i = 0; i < request->seg_count; i++) {
        request->segs[i].file->users++;
        kick |= doff_lane_open(engine, request->segs[i].file->lane, false);
    }
    doff_request_settle(engine, request); /* a request of no bytes is done */
    engine->kicked |= kick;
    doff_unlock(engine);
    if (kick)
        pthread_cond_signal(&engine->work);
    return 0;
}

int doff_submit(doff_engine* engine, int operation, const doff_segment* segments, uint32_t count, uint32_t flags,
                doff_sums* sums, int64_t timeout_ms, doff_request** out) {
    if (engine->pid != getpid())
        return -ECHILD;
    if (check_segments(segments, count, flags) || (operation != DOFF_READ && operation != DOFF_WRITE))
        return -EINVAL;
    struct doff_request* request = request_new(engine, operation, segments, count, flags);
    if (!request)
        return -ENOMEM;
    int code = sums && !doff_sums_attach(engine, request, sums) ? -EINVAL : submit(engine, request, timeout_ms);
    if (code)
        doff_request_free(request);
    else
        *out = request;
    return code;
}

doff_request* doff_submit_one(doff_engine* engine, int operation, int32_t file, uint64_t address, int64_t nbytes,
                              int64_t offset, uint32_t flags, doff_sums* sums, int64_t timeout_ms) {
    const doff_segment segment = {.address = address, .offset = offset, .nbytes = nbytes, .file = file};
    doff_request* request = NULL;
    errno = -doff_submit(engine, operation, &segment, 1, flags, sums, timeout_ms, &request);
    return request;
}

int doff_request_done(doff_request* request) {
    if (request->engine->pid != getpid())
        return -ECHILD;
    return atomic_load_explicit(&request->done, memory_order_acquire);
}

int doff_request_wait(doff_request* request, int64_t timeout_ms) {
    doff_engine* engine = request->engine;
    if (engine->pid != getpid())
        return -ECHILD;
    bool done = atomic_load_explicit(&request->done, memory_order_acquire), lost = false;
    if (!done) {
        uint64_t until = deadline(timeout_ms);
        pthread_mutex_lock(&engine->mutex);
        for (int code = 0; !(done = atomic_load_explicit(&request->done, memory_order_relaxed)) && !code && !lost;)
            if (!(lost = engine->lost_errno))
                code = doff_cond_wait_until(&engine->finished, &engine->mutex, until);
        pthread_mutex_unlock(&engine->mutex);
    }
    return done ? request->result.error != 0 : lost ? -ENOTRECOVERABLE : -ETIMEDOUT;
}

int doff_request_result(doff_request* request, doff_result* out) {
    if (request->engine->pid != getpid())
        return -ECHILD;
    if (!atomic_load_explicit(&request->done, memory_order_acquire)) {
        pthread_mutex_lock(&request->engine->mutex);
        int lost_errno = request->engine->lost_errno;
        pthread_mutex_unlock(&request->engine->mutex);
        if (!lost_errno)
            return -EBUSY;
        *out = (doff_result){.error = lost_errno, .file = -1};
        return -ENOTRECOVERABLE;
    }
    *out = request->result; /* which does not change any more */
    return 0;
}

int doff_request_cancel(doff_request* request) {
    doff_engine* engine = request->engine;
    if (engine->pid != getpid())
        return -ECHILD;
    pthread_mutex_lock(&engine->mutex);
    bool cancel = !request->started && !atomic_load_explicit(&request->done, memory_order_relaxed);
    if (cancel) {
        doff_request_fail(engine, request, ECANCELED, NULL);
        doff_request_settle(engine, request);
    }
    doff_unlock(engine);
    return cancel;
}

int doff_request_promote(doff_request* request) {
    doff_engine* engine = request->engine;
    if (engine->pid != getpid())
        return -ECHILD;
    pthread_mutex_lock(&engine->mutex);
    if (!request->urgent && request->segs_queued) {
        doff_request_dequeue(engine, request);
        request->urgent = true;
        doff_request_enqueue(engine, request);
    }
    pthread_mutex_unlock(&engine->mutex);
    return 0;
}

void doff_request_release(doff_request* request) {
    doff_engine* engine = request->engine;
    if (engine->pid != getpid())
        return;
    pthread_mutex_lock(&engine->mutex);
    bool done = atomic_load_explicit(&request->done, memory_order_relaxed);
    request->released = true;
    pthread_mutex_unlock(&engine->mutex);
    if (!done)
        return;
    doff_request_free(request);
    drop_reference(engine);
}
