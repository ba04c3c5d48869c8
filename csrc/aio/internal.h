/* The engine's own structures. One mutex guards all of them; no system call that can block runs under it. */
#ifndef DOFF_INTERNAL_H
#define DOFF_INTERNAL_H

#include "backend.h"
#include "doff_aio.h"

#include <stdatomic.h>
#include <sys/types.h>

#define DOFF_LANES_MAX 8
#define DOFF_FILES_MAX 256
#define DOFF_SIDE_THREADS 8
#define DOFF_SEGMENTS_INLINE 4
#define DOFF_BUSY_BYTES (4u << 20)   /* in flight, a device is busy until the next of them is done */
#define DOFF_TRANSFER_MAX 0x7ffff000 /* Linux moves no more than this per call */

enum { DOFF_QUEUE_URGENT, DOFF_QUEUE_READ, DOFF_QUEUE_WRITE, DOFF_QUEUES };

struct doff_file {
    bool used;
    int fd_direct; /* -1: buffered only */
    int fd_buffered;
    bool aside;     /* direct transfers go to the pool, too */
    uint32_t mask;  /* what must be clear in address, offset and length of a direct transfer */
    unsigned users; /* requests not done */
    struct doff_lane* lane;
};

struct doff_seg {
    struct doff_seg* next;
    struct doff_request* request;
    struct doff_file* file;
    int32_t file_id;
    char* buf;
    int64_t off, nbytes, cut; /* cut: bytes already handed out as chunks */
    uint64_t sum_base;        /* in the request's checksums; until these are attached, how many it skips */
    bool queued;
};

struct doff_queue {
    struct doff_seg *head, **tail;
};

/* What shares one device shares one queue depth and one turn between reads and writes. */
struct doff_lane {
    dev_t device;
    unsigned files, in_flight;
    uint64_t bytes_in_flight;
    bool write_turn;
    struct doff_queue queue[DOFF_QUEUES];
    struct doff_op* resend; /* chunks to be sent again; they keep their place in in_flight */
};

/* A chunk. */
struct doff_op {
    struct doff_io io; /* first: a backend's pointer to io is a pointer to the chunk */
    struct doff_op* next;
    struct doff_seg* seg;
    size_t want;  /* io.len without padding */
    size_t taken; /* of the lane's bytes_in_flight */
    unsigned again_count;
    char *user, *bounce; /* bounce.c: the memory that io.buf stands for, or NULL; the slot's buffer, or NULL */
    bool aside;          /* goes to the pool that runs next to the main backend */
    bool summed;         /* sums.c: a write's checksums are taken */
    int fault_errno; /* what is wrong with a transfer that succeeded: EFAULT (bounce.c), EBADMSG (sums.c; see fault) */
    char* first;     /* the whole chunk in the caller's memory, moved already or not */
    size_t whole;
    struct {
        int64_t offset, nbytes;
        uint32_t found, written;
    } fault;
};

struct doff_request {
    doff_engine* engine;
    _Atomic int done;
    bool released, urgent, write, padded, started;
    unsigned segs_queued, ops_out, seg_count;
    doff_result result;
    doff_sums* sums;
    struct doff_seg *segs, inline_segs[DOFF_SEGMENTS_INLINE];
};

struct doff_engine {
    pid_t pid;
    pthread_mutex_t mutex;
    pthread_cond_t work, room, finished; /* submit thread; doff_submit; waiters */
    pthread_t submitter;
    int lost_errno; /* a backend no longer reports what is in flight, because of this */
    bool stop, closed, kicked, pumping, has_side_pool, all_buffered_aside;
    bool ended;          /* requests have, and their waiter has not been woken yet */
    unsigned references; /* 1 for the handle + requests not released */
    uint32_t queue_depth, block_bytes, pending_max;
    struct doff_backend backend, side_pool;
    struct doff_file files[DOFF_FILES_MAX];
    struct doff_lane lanes[DOFF_LANES_MAX];
    unsigned lane_next; /* round robin */
    struct doff_op *ops, *ops_free, *delayed;
    char* bounce_next; /* the rest of a page of bounce buffers */
    unsigned bounces_left;
    doff_stats stats;
};

/* engine.c: releases the mutex, then wakes those who wait for requests that ended; woken under it they would only wait
 * again, for the mutex. */
void doff_unlock(doff_engine* engine);

/* request.c; all with the mutex held */
void doff_request_enqueue(doff_engine* engine, struct doff_request* request);
void doff_request_dequeue(doff_engine* engine, struct doff_request* request);
void doff_request_settle(doff_engine* engine, struct doff_request* request);
void doff_request_fail(doff_engine* engine, struct doff_request* request, int error, const struct doff_op* op);
/* Whether a chunk would go out now; top_up: the caller is awake anyway and fills the queue to its depth. */
bool doff_lane_open(const doff_engine* engine, const struct doff_lane* lane, bool top_up);
struct doff_op* doff_op_pick(doff_engine* engine, struct doff_lane* lane, bool top_up);
void doff_op_done(doff_engine* engine, struct doff_op* op, int64_t result);
/* error: what it fails with after too many times. */
void doff_op_delay(doff_engine* engine, struct doff_op* op, int error);
void doff_request_free(struct doff_request* request);

/* bounce.c; begin and end with the mutex held, the copies without it */
size_t doff_bounce_length(const doff_engine* engine);
/* false: no memory */
bool doff_bounce_begin(doff_engine* engine, struct doff_op* op);
void doff_bounce_end(struct doff_op* op);
bool doff_bounce_needed(const struct doff_op* op);
/* 0, or EFAULT: the memory is not there. */
int doff_bounce_fill(const struct doff_op* op);
int doff_bounce_empty(const struct doff_op* op, int64_t moved);
void doff_bounce_free(doff_engine* engine, unsigned ops);

/* sums.c */
bool doff_sums_attach(const doff_engine* engine, struct doff_request* request, doff_sums* sums); /* false: too many */
bool doff_sums_missing(const struct doff_op* op);
void doff_sums_record(struct doff_op* op);
/* Once a chunk is read. */
void doff_sums_check(struct doff_op* op);

/* request.c: what is in flight stays so, what is queued fails, waiters are told. */
void doff_completions_lost(doff_engine* engine, int error);

/* pump.c; without the mutex */
void doff_pump_complete(void* engine, const struct doff_completion* done, unsigned count);
void* doff_pump_main(void* engine);

/* file.c; lanes with the mutex held */
struct doff_file* doff_file_get(doff_engine* engine, int32_t file);
/* All of them, or those that no request uses. */
void doff_files_close(doff_engine* engine, bool all);

#endif
