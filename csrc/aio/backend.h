/* What a backend must do: take chunks, report each of them once. Four functions, plus a reaper for kernels' queues. */
#ifndef DOFF_BACKEND_H
#define DOFF_BACKEND_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct doff_op;

#define DOFF_AGAIN_MAX 2000      /* times a chunk is sent again, or a queue asked again, a millisecond apart */
#define DOFF_INTERRUPTS_MAX 2000 /* times a call is made again after EINTR */

/* The part of a chunk that a backend may look at. */
struct doff_io {
    int fd;
    bool write;
    bool evict; /* the pool: on the device and out of the page cache when done */
    char* buf;
    size_t len;
    int64_t off;
    struct doff_io* next; /* free for the backend's own lists while it holds the chunk */
    struct {              /* backend_fault.c's */
        struct doff_io* next;
        uint64_t due_ns, delay_ns;
        int64_t result, flip_bit;
        size_t len, report_max;
        int gate;
    } fault;
};

struct doff_completion {
    struct doff_io* io; /* NULL, alone: what is in flight will never be reported, because of -result */
    int64_t result;     /* bytes moved or -errno */
};

typedef void (*doff_complete_fn)(void* context, const struct doff_completion* done, unsigned count);

struct doff_backend {
    const struct doff_backend_table* table;
    doff_complete_fn complete; /* called from the backend's own threads, without any lock of its */
    void* context;
    void* state;
    /* reaper, only where table->reap is set; see reaper.c */
    pthread_t reaper;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    int64_t in_flight;
    _Atomic uint64_t submissions; /* see doff_backend_publish */
    bool stop, reaper_started;
};

struct doff_backend_table {
    const char* name;
    int (*init)(struct doff_backend* backend, unsigned in_flight_max, const char* argument);
    /* Accepts a prefix of ios: its length, or -errno for the first. One caller at a time. */
    int (*submit)(struct doff_backend* backend, struct doff_io** ios, unsigned count);
    /* Waits for at least one completion, or -errno; called only while something is in flight. NULL: the backend calls
     * complete. */
    int (*reap)(struct doff_backend* backend, struct doff_completion* done, unsigned max);
    void (*fini)(struct doff_backend* backend);
};

extern const struct doff_backend_table doff_backend_libaio, doff_backend_uring, doff_backend_pool, doff_backend_fault;

/* "libaio", "io_uring", "pool"; NULL when unknown. */
const struct doff_backend_table* doff_backend_find(const char* name);

/* reaper.c */
int doff_backend_start(struct doff_backend* backend, const struct doff_backend_table* table, unsigned in_flight_max,
                       const char* argument, doff_complete_fn complete, void* context);
int doff_backend_submit(struct doff_backend* backend, struct doff_io** ios, unsigned count);
void doff_backend_stop(struct doff_backend* backend);

/* Called by a backend with a reaper directly before the system call that submits: orders all that was done to the
 * chunks before their completions. The kernel does that in fact, but neither the C memory model nor a sanitizer sees
 * it. */
static inline void doff_backend_publish(struct doff_backend* backend) {
    atomic_fetch_add_explicit(&backend->submissions, 1, memory_order_release);
}

/* A thread with all signals blocked (they belong to the interpreter's main thread) and a small stack. */
int doff_thread_start(pthread_t* thread, void* (*body)(void*), void* argument, const char* name);
int doff_cond_init(pthread_cond_t* cond); /* on CLOCK_MONOTONIC */
uint64_t doff_now_ns(void);
/* Waits until deadline_ns on the monotonic clock: 0 or ETIMEDOUT. */
int doff_cond_wait_until(pthread_cond_t* cond, pthread_mutex_t* mutex, uint64_t deadline_ns);

#endif
