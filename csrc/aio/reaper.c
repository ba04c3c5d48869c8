/* Starting and stopping backends, and the thread that waits for a kernel queue's completions.
 *
 * The reaper sleeps on a condition while nothing is in flight and in the kernel otherwise, so an idle engine wakes
 * nobody and stopping needs no signal. in_flight is counted up after the kernel accepted, so it may be below zero for a
 * moment when completions were faster; it never exceeds what the kernel really holds.
 */
#define _GNU_SOURCE
#include "backend.h"

#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#define REAP_MAX 64
#define STACK_BYTES (512 * 1024)

uint64_t doff_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

int doff_cond_init(pthread_cond_t* cond) {
    pthread_condattr_t attributes;
    int code = pthread_condattr_init(&attributes);
    if (code)
        return -code;
    code = pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    if (!code)
        code = pthread_cond_init(cond, &attributes);
    pthread_condattr_destroy(&attributes);
    return -code;
}

int doff_cond_wait_until(pthread_cond_t* cond, pthread_mutex_t* mutex, uint64_t deadline_ns) {
    struct timespec until = {.tv_sec = (time_t)(deadline_ns / 1000000000u),
                             .tv_nsec = (long)(deadline_ns % 1000000000u)};
    return pthread_cond_timedwait(cond, mutex, &until);
}

int doff_thread_start(pthread_t* thread, void* (*body)(void*), void* argument, const char* name) {
    sigset_t all, before;
    pthread_attr_t attributes;
    int code = pthread_attr_init(&attributes);
    if (code)
        return -code;
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    code = pthread_create(thread, &attributes, body, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (!code)
        pthread_setname_np(*thread, name);
    return -code;
}

static void nap(void) {
    const struct timespec time = {.tv_nsec = 1000000};
    nanosleep(&time, NULL);
}

static void* reaper_main(void* argument) {
    struct doff_backend* backend = argument;
    struct doff_completion done[REAP_MAX];
    unsigned failures = 0;
    for (;;) {
        pthread_mutex_lock(&backend->mutex);
        while (backend->in_flight <= 0 && !backend->stop)
            pthread_cond_wait(&backend->wake, &backend->mutex);
        bool finished = backend->in_flight <= 0;
        pthread_mutex_unlock(&backend->mutex);
        if (finished)
            return NULL;
        int count = backend->table->reap(backend, done, REAP_MAX);
        if (count <= 0) { /* also none, where one was waited for */
            if (failures++ < DOFF_AGAIN_MAX) {
                nap();
                continue;
            }
            *done = (struct doff_completion){.result = count ? count : -EAGAIN};
            backend->complete(backend->context, done, 1);
            return NULL;
        }
        failures = 0;
        (void)atomic_load_explicit(&backend->submissions, memory_order_acquire);
        pthread_mutex_lock(&backend->mutex);
        backend->in_flight -= count;
        pthread_mutex_unlock(&backend->mutex);
        backend->complete(backend->context, done, (unsigned)count);
    }
}

int doff_backend_start(struct doff_backend* backend, const struct doff_backend_table* table, unsigned in_flight_max,
                       const char* argument, doff_complete_fn complete, void* context) {
    memset(backend, 0, sizeof *backend);
    backend->table = table;
    backend->complete = complete;
    backend->context = context;
    pthread_mutex_init(&backend->mutex, NULL);
    int code = doff_cond_init(&backend->wake);
    if (!code) {
        code = table->init(backend, in_flight_max, argument);
        if (!code && table->reap) {
            code = doff_thread_start(&backend->reaper, reaper_main, backend, "doff-reap");
            backend->reaper_started = !code;
            if (code)
                table->fini(backend);
        }
        if (code)
            pthread_cond_destroy(&backend->wake);
    }
    if (code) {
        pthread_mutex_destroy(&backend->mutex);
        backend->table = NULL;
    }
    return code;
}

int doff_backend_submit(struct doff_backend* backend, struct doff_io** ios, unsigned count) {
    int accepted = backend->table->submit(backend, ios, count);
    if (accepted > 0 && backend->reaper_started) {
        pthread_mutex_lock(&backend->mutex);
        bool idle = backend->in_flight <= 0;
        backend->in_flight += accepted;
        if (idle)
            pthread_cond_signal(&backend->wake);
        pthread_mutex_unlock(&backend->mutex);
    }
    return accepted;
}

void doff_backend_stop(struct doff_backend* backend) {
    if (!backend->table)
        return;
    if (backend->reaper_started) {
        pthread_mutex_lock(&backend->mutex);
        backend->stop = true;
        pthread_cond_signal(&backend->wake);
        pthread_mutex_unlock(&backend->mutex);
        pthread_join(backend->reaper, NULL);
    }
    backend->table->fini(backend);
    pthread_cond_destroy(&backend->wake);
    pthread_mutex_destroy(&backend->mutex);
    backend->table = NULL;
}

const struct doff_backend_table* doff_backend_find(const char* name) {
    const struct doff_backend_table* all[] = {&doff_backend_libaio, &doff_backend_uring, &doff_backend_pool};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!strcmp(all[i]->name, name))
            return all[i];
    return NULL;
}
