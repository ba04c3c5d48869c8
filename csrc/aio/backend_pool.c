/* pread(2) and pwrite(2) on threads of our own: works on every file system, and does what kernel AIO cannot do
 * asynchronously (buffered files, unaligned pieces). Threads are started as chunks find all others busy. */
#define _GNU_SOURCE
#include "backend.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#define THREADS_MAX 64

struct pool_state {
    struct doff_backend* backend;
    pthread_mutex_t mutex;
    pthread_cond_t work;
    struct doff_io *head, **tail;
    unsigned queued, idle, threads, threads_max;
    bool stop;
    pthread_t thread[THREADS_MAX];
};

#define PAGE_MASK (sysconf(_SC_PAGESIZE) - 1)

/* Writes the pages back first: posix_fadvise(2) drops clean ones only. An error of that is one of the transfer. A page
 * that another thread changes meanwhile stays until that thread evicts it. */
static int evict(const struct doff_io* io, int64_t nbytes) {
    off_t from = io->off & ~PAGE_MASK, to = (io->off + nbytes + PAGE_MASK) & ~PAGE_MASK;
    const unsigned how = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
    for (unsigned tries = 0; io->write && sync_file_range(io->fd, from, to - from, how); tries++)
        if (errno != EINTR || tries == DOFF_INTERRUPTS_MAX)
            return -errno;
    posix_fadvise(io->fd, from, to - from, POSIX_FADV_DONTNEED);
    return 0;
}

static int64_t transfer(const struct doff_io* io) {
    ssize_t moved = io->write ? pwrite(io->fd, io->buf, io->len, io->off) : pread(io->fd, io->buf, io->len, io->off);
    if (moved < 0)
        return -errno;
    int code = io->evict && moved ? evict(io, moved) : 0;
    return code ? code : moved;
}

static void* pool_main(void* argument) {
    struct pool_state* pool = argument;
    pthread_mutex_lock(&pool->mutex);
    for (;;) {
        while (!pool->head && !pool->stop) {
            pool->idle++;
            pthread_cond_wait(&pool->work, &pool->mutex);
            pool->idle--;
        }
        struct doff_io* io = pool->head;
        if (!io)
            break;
        pool->head = io->next;
        if (!pool->head)
            pool->tail = &pool->head;
        pool->queued--;
        pthread_mutex_unlock(&pool->mutex);
        struct doff_completion done = {io, transfer(io)};
        pool->backend->complete(pool->backend->context, &done, 1);
        pthread_mutex_lock(&pool->mutex);
    }
    pthread_mutex_unlock(&pool->mutex);
    return NULL;
}

static int pool_init(struct doff_backend* backend, unsigned in_flight_max, const char* argument) {
    (void)argument;
    struct pool_state* pool = calloc(1, sizeof *pool);
    if (!pool)
        return -ENOMEM;
    pool->backend = backend;
    pool->threads_max = in_flight_max < THREADS_MAX ? in_flight_max : THREADS_MAX;
    pool->tail = &pool->head;
    pthread_mutex_init(&pool->mutex, NULL);
    int code = doff_cond_init(&pool->work);
    if (code) {
        pthread_mutex_destroy(&pool->mutex);
        free(pool);
        return code;
    }
    backend->state = pool;
    return 0;
}

static int pool_submit(struct doff_backend* backend, struct doff_io** ios, unsigned count) {
    struct pool_state* pool = backend->state;
    int code = 0;
    pthread_mutex_lock(&pool->mutex);
    /* A thread that was signalled still counts as idle until it runs, so compare with what waits, not with zero. */
    for (unsigned ready = pool->idle; ready < pool->queued + count && pool->threads < pool->threads_max; ready++) {
        code = doff_thread_start(&pool->thread[pool->threads], pool_main, pool, "doff-pool");
        if (code)
            break;
        pool->threads++;
    }
    if (!pool->threads) {
        pthread_mutex_unlock(&pool->mutex);
        return code;
    }
    for (unsigned i = 0; i < count; i++) {
        ios[i]->next = NULL;
        *pool->tail = ios[i];
        pool->tail = &ios[i]->next;
        pthread_cond_signal(&pool->work);
    }
    pool->queued += count;
    pthread_mutex_unlock(&pool->mutex);
    return (int)count;
}

static void pool_fini(struct doff_backend* backend) {
    struct pool_state* pool = backend->state;
    pthread_mutex_lock(&pool->mutex);
    pool->stop = true;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->mutex);
    for (unsigned i = 0; i < pool->threads; i++)
        pthread_join(pool->thread[i], NULL);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->mutex);
    free(pool);
}

const struct doff_backend_table doff_backend_pool = {"pool", pool_init, pool_submit, NULL, pool_fini};
