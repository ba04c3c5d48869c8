/* From requests to chunks and back: cutting, short transfers, retries, the first error, and when a request is done. */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <stdlib.h>

enum route { ROUTE_DIRECT, ROUTE_BOUNCE, ROUTE_BUFFERED };

static void queue_push(struct doff_queue* queue, struct doff_seg* seg) {
    seg->next = NULL;
    *queue->tail = seg;
    queue->tail = &seg->next;
}

static void queue_remove(struct doff_queue* queue, struct doff_seg* seg) {
    for (struct doff_seg** at = &queue->head; *at; at = &(*at)->next) {
        if (*at != seg)
            continue;
        *at = seg->next;
        if (queue->tail == &seg->next)
            queue->tail = at;
        return;
    }
}

static struct doff_queue* queue_of(const struct doff_request* request, struct doff_lane* lane) {
    return &lane->queue[request->urgent ? DOFF_QUEUE_URGENT : request->write ? DOFF_QUEUE_WRITE : DOFF_QUEUE_READ];
}

void doff_request_enqueue(doff_engine* engine, struct doff_request* request) {
    (void)engine;
    for (unsigned i = 0; i < request->seg_count; i++) {
        struct doff_seg* seg = &request->segs[i];
        if (seg->cut >= seg->nbytes)
            continue;
        queue_push(queue_of(request, seg->file->lane), seg);
        seg->queued = true;
        request->segs_queued++;
    }
}

void doff_request_dequeue(doff_engine* engine, struct doff_request* request) {
    (void)engine;
    for (unsigned i = 0; i < request->seg_count; i++) {
        struct doff_seg* seg = &request->segs[i];
        if (!seg->queued)
            continue;
        queue_remove(queue_of(request, seg->file->lane), seg);
        seg->queued = false;
        request->segs_queued--;
    }
}

void doff_request_free(struct doff_request* request) {
    doff_sums_release(request->sums);
    if (request->segs != request->inline_segs)
        free(request->segs);
    free(request);
}

/* Done when nothing is queued and nothing is out. */
void doff_request_settle(doff_engine* engine, struct doff_request* request) {
    if (request->segs_queued || request->ops_out)
        return;
    request->result.finished_ns = doff_now_ns();
    for (unsigned i = 0; i < request->seg_count; i++)
        request->segs[i].file->users--;
    engine->stats.requests_pending--;
    if (!request->result.error)
        engine->stats.requests_done++;
    else if (request->result.error == ECANCELED)
        engine->stats.requests_cancelled++;
    else
        engine->stats.requests_failed++;
    pthread_cond_signal(&engine->room);
    engine->ended = true;
    if (!request->released) {
        atomic_store_explicit(&request->done, 1, memory_order_release);
        return;
    }
    if (request->result.error && request->result.error != ECANCELED)
        engine->stats.unobserved_failures++;
    engine->references--; /* never the last: a closing handle waits for pending requests */
    doff_request_free(request);
}

/* Keeps the first error; what was not handed out yet never will be. */
void doff_request_fail(doff_engine* engine, struct doff_request* request, int error, const struct doff_op* op) {
    if (!request->result.error) {
        request->result.error = error;
        if (op) {
            request->result.file = op->seg->file_id;
            request->result.offset = op->io.off;
            request->result.nbytes = (int64_t)op->want;
        }
        if (op && op->fault_errno == EBADMSG) {
            request->result.offset = op->fault.offset;
            request->result.nbytes = op->fault.nbytes;
            request->result.sum_found = op->fault.found;
            request->result.sum_written = op->fault.written;
        }
    }
    doff_request_dequeue(engine, request);
}

/* The length of the next chunk at a segment's cut, and how it goes. Pieces that direct I/O cannot do are cut off, so
 * that only they go through the page cache (and leave it at once, see backend_pool.c): whole blocks of 4096 bytes, even
 * where the device would take 512, because the page cache writes whole blocks back and would undo a direct write next
 * to it in the same block. Reading a part block directly, changing it in memory and writing it back is no way out: two
 * requests may change one block at the same time. */
static size_t chunk_length(const struct doff_engine* engine, const struct doff_seg* seg, enum route* route,
                           size_t* padded) {
    const uint64_t page_mask = DOFF_PAGE - 1;
    int64_t rest = seg->nbytes - seg->cut;
    size_t length = rest < (int64_t)engine->block_bytes ? (size_t)rest : engine->block_bytes;
    uint64_t address = (uint64_t)(uintptr_t)seg->buf + (uint64_t)seg->cut, off = (uint64_t)(seg->off + seg->cut);
    *padded = length;
    *route = ROUTE_BUFFERED;
    if (seg->file->fd_direct < 0)
        return length;
    uint64_t head = (DOFF_PAGE - (off & page_mask)) & page_mask;
    if (seg->request->padded && !head) { /* addresses are aligned then */
        *route = ROUTE_DIRECT;
        *padded = (length + page_mask) & ~page_mask;
        return length;
    }
    if (head || length < DOFF_PAGE) {
        if (head && head < length)
            length = head;
        return *padded = length;
    }
    *route = (address - off) & seg->file->mask ? ROUTE_BOUNCE : ROUTE_DIRECT;
    if (*route == ROUTE_BOUNCE && length > doff_bounce_length(engine))
        length = doff_bounce_length(engine);
    return *padded = length & ~page_mask;
}

/* Through the page cache. What belongs to a direct file does not stay there. */
static void op_buffered(doff_engine* engine, struct doff_op* op) {
    doff_bounce_end(op);
    op->io.fd = op->seg->file->fd_buffered;
    op->io.len = op->want;
    op->io.evict = op->seg->file->fd_direct >= 0;
    op->aside = engine->has_side_pool && (engine->all_buffered_aside || op->io.evict || op->seg->file->aside);
    engine->stats.chunks_buffered++;
}

static void op_release(doff_engine* engine, struct doff_op* op) {
    struct doff_request* request = op->seg->request;
    op->seg->file->lane->in_flight--;
    op->seg->file->lane->bytes_in_flight -= op->taken;
    engine->stats.chunks_in_flight--;
    op->next = engine->ops_free;
    engine->ops_free = op;
    request->ops_out--;
    doff_request_settle(engine, request);
}

static struct doff_op* op_cut(doff_engine* engine, struct doff_lane* lane, struct doff_queue* queue) {
    struct doff_op* op = engine->ops_free;
    struct doff_seg* seg = queue->head;
    enum route route;
    size_t padded, length = chunk_length(engine, seg, &route, &padded);
    engine->ops_free = op->next;
    op->seg = seg;
    op->want = length;
    op->again_count = 0;
    op->aside = engine->has_side_pool && seg->file->aside;
    op->user = NULL;
    op->summed = false;
    op->fault_errno = 0;
    op->first = seg->buf + seg->cut;
    op->whole = length;
    op->io = (struct doff_io){.fd = seg->file->fd_direct,
                              .write = seg->request->write,
                              .buf = op->first,
                              .len = padded,
                              .off = seg->off + seg->cut};
    if (route == ROUTE_BOUNCE && doff_bounce_begin(engine, op))
        engine->stats.chunks_bounced++;
    else if (route != ROUTE_DIRECT) /* also without memory for a bounce buffer */
        op_buffered(engine, op);
    seg->cut += (int64_t)length;
    if (!seg->request->started)
        seg->request->result.started_ns = doff_now_ns();
    seg->request->started = true;
    seg->request->ops_out++;
    if (seg->cut >= seg->nbytes) {
        queue_remove(queue, seg);
        seg->queued = false;
        seg->request->segs_queued--;
    }
    lane->in_flight++;
    lane->bytes_in_flight += op->taken = padded;
    if (++engine->stats.chunks_in_flight > engine->stats.chunks_in_flight_max)
        engine->stats.chunks_in_flight_max = engine->stats.chunks_in_flight;
    return op;
}

bool doff_lane_open(const doff_engine* engine, const struct doff_lane* lane, bool top_up) {
    if (lane->in_flight >= engine->queue_depth)
        return false;
    return top_up || lane->in_flight < 2 || lane->bytes_in_flight < DOFF_BUSY_BYTES ||
           lane->queue[DOFF_QUEUE_URGENT].head;
}

/* The next chunk for this device: what must be sent again, then urgent ones, then reads and writes in turn. */
struct doff_op* doff_op_pick(doff_engine* engine, struct doff_lane* lane, bool top_up) {
    while (lane->resend) {
        struct doff_op* op = lane->resend;
        lane->resend = op->next;
        if (!op->seg->request->result.error)
            return op;
        op_release(engine, op);
    }
    if (!doff_lane_open(engine, lane, top_up) || !engine->ops_free)
        return NULL;
    struct doff_queue* urgent = &lane->queue[DOFF_QUEUE_URGENT];
    if (urgent->head)
        return op_cut(engine, lane, urgent);
    struct doff_queue* first = &lane->queue[lane->write_turn ? DOFF_QUEUE_WRITE : DOFF_QUEUE_READ];
    struct doff_queue* other = &lane->queue[lane->write_turn ? DOFF_QUEUE_READ : DOFF_QUEUE_WRITE];
    struct doff_queue* queue = first->head ? first : other;
    if (!queue->head)
        return NULL;
    lane->write_turn = queue == &lane->queue[DOFF_QUEUE_READ];
    return op_cut(engine, lane, queue);
}

static void op_resend(struct doff_op* op) {
    struct doff_lane* lane = op->seg->file->lane;
    op->next = lane->resend;
    lane->resend = op;
}

/* Sent again by the submit thread, a millisecond later. */
void doff_op_delay(doff_engine* engine, struct doff_op* op, int error) {
    engine->stats.retries++;
    if (op->again_count++ >= DOFF_AGAIN_MAX) {
        doff_request_fail(engine, op->seg->request, error, op);
        op_release(engine, op);
        return;
    }
    op->next = engine->delayed;
    engine->delayed = op;
    pthread_cond_signal(&engine->work);
}

/* A short transfer goes on where it stopped; a rest that is no longer aligned goes through the page cache. */
static void op_continue(doff_engine* engine, struct doff_op* op, size_t moved) {
    struct doff_file* file = op->seg->file;
    engine->stats.short_transfers++;
    op->again_count = 0;
    op->io.buf += moved;
    op->io.off += (int64_t)moved;
    op->io.len -= moved;
    op->want -= moved;
    if (op->user)
        op->user += moved;
    uint64_t bits = (uint64_t)(uintptr_t)op->io.buf | (uint64_t)op->io.off | op->io.len;
    if (file->fd_direct < 0 || (bits & file->mask))
        op_buffered(engine, op);
    op_resend(op);
}

void doff_op_done(doff_engine* engine, struct doff_op* op, int64_t result) {
    struct doff_request* request = op->seg->request;
    if (result == -EINTR || result == -EAGAIN) {
        if (request->result.error) {
            op_release(engine, op);
        } else if (result == -EINTR && op->again_count < DOFF_INTERRUPTS_MAX) {
            engine->stats.retries++;
            op->again_count++;
            op_resend(op);
        } else {
            doff_op_delay(engine, op, (int)-result);
        }
        return;
    }
    if (result == -EINVAL && !request->result.error && op->io.fd == op->seg->file->fd_direct) {
        /* Some conditions make direct I/O refuse an aligned transfer (a size limit that cuts it at an odd length): the
         * page cache does it, or says what is really wrong. */
        engine->stats.direct_refused++;
        op_buffered(engine, op);
        op_resend(op);
        return;
    }
    if (op->fault_errno && result > 0) {
        doff_request_fail(engine, request, op->fault_errno, op);
        op_release(engine, op);
        return;
    }
    if (result <= 0 || result > (int64_t)op->io.len) {
        /* Nothing moved and no error: a read beyond the end of the file, or a write the device refused to take. */
        int error = result < 0 ? (int)-result : result == 0 && !op->io.write ? ENODATA : EIO;
        doff_request_fail(engine, request, error, op);
        op_release(engine, op);
        return;
    }
    size_t moved = (size_t)result, useful = moved < op->want ? moved : op->want;
    request->result.transferred += (int64_t)useful;
    *(op->io.write ? &engine->stats.bytes_written : &engine->stats.bytes_read) += useful;
    if (useful < op->want && !request->result.error) {
        op_continue(engine, op, moved);
        return;
    }
    engine->stats.chunks_done++;
    op_release(engine, op);
}

static void fail_queued(doff_engine* engine, struct doff_queue* queue) {
    while (queue->head) {
        struct doff_request* request = queue->head->request;
        doff_request_fail(engine, request, engine->lost_errno, NULL);
        doff_request_settle(engine, request);
    }
}

void doff_completions_lost(doff_engine* engine, int error) {
    pthread_mutex_lock(&engine->mutex);
    engine->lost_errno = error;
    for (unsigned i = 0; i < DOFF_LANES_MAX; i++)
        for (unsigned q = 0; q < DOFF_QUEUES; q++)
            fail_queued(engine, &engine->lanes[i].queue[q]);
    engine->ended = true;
    pthread_cond_broadcast(&engine->room);
    doff_unlock(engine);
}
