/* Sending chunks: the submit thread, and what happens when a backend reports completions.
 *
 * A thread that finds chunks to send calls pump(): the submit thread after doff_submit, and the thread that reported
 * a completion (it is awake anyway, so a steady stream costs one thread switch per completion, not two). One pumps at a
 * time; the others leave, because the one inside looks again before it goes.
 *
 * The submit thread sends no more than keeps the device busy; the first completion tops the queue up. It often runs on
 * the processor of the thread that submitted, which goes on the sooner: sending 16 MiB takes 150 us.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>

#define BATCH_MAX 32
#define DELAY_NS 1000000u

static bool unprepared(const struct doff_io* io) {
    const struct doff_op* op = (const struct doff_op*)io;
    return doff_bounce_needed(op) || doff_sums_missing(op);
}

/* Copies and sums the first of ios if it needs that; returns how many can be submitted now, or -errno for the first. */
static int prepare(struct doff_io** ios, unsigned count) {
    struct doff_op* first = (struct doff_op*)ios[0];
    unsigned ready = 1;
    if (!unprepared(ios[0]))
        while (ready < count && !unprepared(ios[ready]))
            ready++;
    if (doff_sums_missing(first))
        doff_sums_record(first);
    int code = doff_bounce_needed(first) ? doff_bounce_fill(first) : 0;
    return code ? -code : (int)ready;
}

static void submit_batch(doff_engine* engine, struct doff_backend* backend, struct doff_io** ios, unsigned count) {
    unsigned sent = 0;
    while (sent < count) {
        int ready = prepare(ios + sent, count - sent);
        int code = ready > 0 ? doff_backend_submit(backend, ios + sent, (unsigned)ready) : ready;
        pthread_mutex_lock(&engine->mutex);
        engine->stats.submit_calls++;
        if (code > 0) {
            sent += (unsigned)code;
        } else if (code == 0 || code == -EAGAIN || code == -EBUSY || code == -EINTR) {
            while (sent < count)
                doff_op_delay(engine, (struct doff_op*)ios[sent++], code == -EINTR ? EINTR : EAGAIN);
        } else {
            doff_op_done(engine, (struct doff_op*)ios[sent++], code); /* the error is that of the first */
        }
        pthread_mutex_unlock(&engine->mutex);
    }
}

static unsigned pick_batch(doff_engine* engine, struct doff_io** ios, bool* aside, bool top_up) {
    unsigned count = 0;
    for (unsigned idle = 0; idle < DOFF_LANES_MAX && count < BATCH_MAX;) {
        struct doff_lane* lane = &engine->lanes[engine->lane_next];
        engine->lane_next = (engine->lane_next + 1) % DOFF_LANES_MAX;
        struct doff_op* op = lane->files ? doff_op_pick(engine, lane, top_up) : NULL;
        if (!op) {
            idle++;
            continue;
        }
        idle = 0;
        aside[count] = op->aside;
        ios[count++] = &op->io;
    }
    return count;
}

/* The caller holds the mutex; this releases it. New chunks go out before the waiters wake, so the device never idles.
 */
static void pump(doff_engine* engine, bool top_up) {
    struct doff_io *ios[BATCH_MAX], *group[2][BATCH_MAX];
    bool aside[BATCH_MAX], again = false;
    unsigned count;
    while (!engine->pumping && (count = pick_batch(engine, ios, aside, top_up))) {
        engine->pumping = true;
        if (again)
            doff_unlock(engine);
        else
            pthread_mutex_unlock(&engine->mutex);
        again = true;
        unsigned size[2] = {0, 0};
        for (unsigned i = 0; i < count; i++)
            group[aside[i]][size[aside[i]]++] = ios[i];
        submit_batch(engine, &engine->backend, group[0], size[0]);
        submit_batch(engine, &engine->side_pool, group[1], size[1]);
        pthread_mutex_lock(&engine->mutex);
        engine->pumping = false;
    }
    doff_unlock(engine);
}

static void arrived(struct doff_op* op, int64_t moved) {
    if (op->io.write)
        return;
    op->fault_errno = doff_bounce_empty(op, moved);
    if (!op->fault_errno && op->seg->request->sums && moved >= (int64_t)op->want)
        doff_sums_check(op);
}

void doff_pump_complete(void* context, const struct doff_completion* done, unsigned count) {
    doff_engine* engine = context;
    if (!done->io) {
        doff_completions_lost(engine, (int)-done->result);
        return;
    }
    for (unsigned i = 0; i < count; i++)
        arrived((struct doff_op*)done[i].io, done[i].result);
    pthread_mutex_lock(&engine->mutex);
    for (unsigned i = 0; i < count; i++)
        doff_op_done(engine, (struct doff_op*)done[i].io, done[i].result);
    pump(engine, true);
}

void* doff_pump_main(void* argument) {
    doff_engine* engine = argument;
    pthread_mutex_lock(&engine->mutex);
    while (!engine->stop) {
        if (engine->delayed) {
            uint64_t until = doff_now_ns() + DELAY_NS;
            while (doff_cond_wait_until(&engine->work, &engine->mutex, until) == 0 && !engine->stop)
                continue;
            while (engine->delayed) {
                struct doff_op* op = engine->delayed;
                engine->delayed = op->next;
                op->next = op->seg->file->lane->resend;
                op->seg->file->lane->resend = op;
            }
        } else if (!engine->kicked) {
            pthread_cond_wait(&engine->work, &engine->mutex);
            continue;
        }
        engine->kicked = false;
        pump(engine, false);
        pthread_mutex_lock(&engine->mutex);
    }
    pthread_mutex_unlock(&engine->mutex);
    return NULL;
}
