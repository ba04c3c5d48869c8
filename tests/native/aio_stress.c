/* Exercises the engine without Python, for the sanitizers (run_sanitizers.sh): threads that submit, wait, cancel,
 * promote, drop and check data, on each backend, with and without faults; then closing with work in flight. A third of
 * the requests begin and end inside blocks, in memory that direct I/O cannot take; some keep checksums.
 *
 * The disk decides how long it takes: some 80000 chunks of 16 KiB, four at a time, each with the latency of a queue
 * that others keep full. Every wait has its limit, and a call that never returns ends the program with SIGALRM.
 *
 * usage: aio_stress DIRECTORY. Exit status 0 when all data was right. */
#define _GNU_SOURCE
#include "doff_aio.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define THREADS 4
#define TURNS 60
#define AREA_BYTES (256 << 10) /* of each thread, in the file and in memory (thrice: written, read, dropped) */
#define BLOCK_BYTES (16 << 10)
#define SCRAP_BYTES (AREA_BYTES / 64)
#define SHIFT_BYTES 700 /* at most, of offsets and memory of requests that are not padded */
#define RUN_S 300

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                            \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

struct worker {
    doff_engine* engine;
    int file, number;
    char* memory;
};

/* The same bytes of the file for all flags, unless shift_bytes moves them. */
static doff_request* submit(const struct worker* worker, int operation, char* memory, int64_t nbytes,
                            int64_t shift_bytes, unsigned seed) {
    int64_t base = (int64_t)worker->number * AREA_BYTES + shift_bytes, half = nbytes / 2 / DOFF_PAGE * DOFF_PAGE;
    doff_segment segments[2] = {
        {.address = (uint64_t)(uintptr_t)memory, .offset = base, .nbytes = half, .file = worker->file},
        {.address = (uint64_t)(uintptr_t)memory + (uint64_t)half,
         .offset = base + half,
         .nbytes = nbytes - half,
         .file = worker->file},
    };
    doff_request* request = NULL;
    bool aligned = !(((uintptr_t)memory | (uintptr_t)shift_bytes) & (DOFF_PAGE - 1));
    unsigned flags = (aligned && seed % 3 ? DOFF_PADDED : 0) | (seed % 5 ? 0 : DOFF_URGENT);
    if (seed % 2) {
        request = doff_submit_one(worker->engine, operation, worker->file, (uint64_t)(uintptr_t)memory, nbytes, base,
                                  flags, NULL, 30000);
        CHECK(request);
        return request;
    }
    CHECK(doff_submit(worker->engine, operation, segments, 2, flags, NULL, 30000, &request) == 0);
    return request;
}

static void finish(doff_request* request) {
    doff_result result;
    int early = doff_request_result(request, &result);
    CHECK(early == 0 || early == -EBUSY);
    CHECK(doff_request_wait(request, 30000) == 0);
    CHECK(doff_request_result(request, &result) == 0 && result.error == 0);
    CHECK(doff_request_done(request) == 1);
    doff_request_release(request);
}

/* Two segments with checksums, which the caller forgets while requests use them. */
static void write_and_read_summed(const struct worker* worker, char* memory, int64_t nbytes) {
    int64_t base = (int64_t)worker->number * AREA_BYTES, half = nbytes / 2 / DOFF_PAGE * DOFF_PAGE;
    const int64_t lengths[2] = {half, nbytes - half};
    doff_sums* sums = doff_sums_new(worker->engine, lengths, 2);
    CHECK(sums);
    for (int operation = DOFF_WRITE; operation >= DOFF_READ; operation--) {
        doff_request* request = NULL;
        doff_segment segments[2];
        for (int i = 0; i < 2; i++)
            segments[i] = (doff_segment){.address = (uint64_t)(uintptr_t)memory + (uint64_t)(i * half),
                                         .offset = base + i * half,
                                         .nbytes = lengths[i],
                                         .file = worker->file};
        CHECK(doff_submit(worker->engine, operation, segments, 2, DOFF_PADDED, sums, 30000, &request) == 0);
        if (operation == DOFF_READ)
            doff_sums_release(sums);
        finish(request);
    }
}

static void* work(void* argument) {
    const struct worker* worker = argument;
    char *out = worker->memory, *in = worker->memory + AREA_BYTES, *scrap = in + AREA_BYTES;
    unsigned seed = (unsigned)worker->number * 7919u + 1;
    for (int turn = 0; turn < TURNS; turn++) {
        seed = seed * 1103515245u + 12345u;
        int64_t nbytes = 1 + (int64_t)(seed >> 8) % (AREA_BYTES - SHIFT_BYTES);
        int64_t shift = turn % 3 ? 0 : (int64_t)(seed >> 5) % SHIFT_BYTES;
        char *from = out + (turn % 6 ? shift : 1), *to = in + (turn % 2 ? shift : 3 * (shift != 0));
        memset(from, turn + worker->number, (size_t)nbytes);
        memset(to, 0xff, (size_t)nbytes);
        finish(submit(worker, DOFF_WRITE, from, nbytes, shift, seed));
        /* Nobody waits for this one, so its memory is not used again. */
        doff_request* dropped = submit(worker, DOFF_READ, scrap + turn * SCRAP_BYTES, SCRAP_BYTES, 0, seed + 1);
        doff_request* read = submit(worker, DOFF_READ, to, nbytes, shift, seed + 2);
        doff_request_promote(read);
        if (turn % 2)
            doff_request_cancel(dropped);
        doff_request_release(dropped);
        finish(read);
        CHECK(!memcmp(from, to, (size_t)nbytes));
        if (turn % 4 == 0)
            write_and_read_summed(worker, out, nbytes);
    }
    return NULL;
}

static void run(const char* directory, const char* backend, const char* faults, int direct) {
    char path[4096];
    doff_engine* engine;
    doff_file_info info;
    struct worker workers[THREADS];
    pthread_t threads[THREADS];
    uint64_t address;
    int32_t lock_errno;
    alarm(RUN_S);
    int code = doff_engine_open(backend, faults, 4, BLOCK_BYTES, 16, &engine);
    if (code) {
        printf("%s: not here (%s)\n", backend, strerror(-code));
        return;
    }
    snprintf(path, sizeof path, "%s/data", directory);
    int file =
        doff_file_open(engine, path, DOFF_OPEN_CREATE | DOFF_OPEN_UNLINK | DOFF_OPEN_LOCK, (uint32_t)direct, &info);
    CHECK(file >= 0);
    CHECK(doff_file_grow(engine, file, (int64_t)THREADS * AREA_BYTES) == 0);
    CHECK(doff_map((uint64_t)THREADS * 3 * AREA_BYTES, 0, &address, &lock_errno) == 0);
    memset((void*)(uintptr_t)address, 0, (size_t)THREADS * 3 * AREA_BYTES);
    for (int i = 0; i < THREADS; i++) {
        workers[i] = (struct worker){engine, file, i, (char*)(uintptr_t)address + (size_t)i * 3 * AREA_BYTES};
        CHECK(!pthread_create(&threads[i], NULL, work, &workers[i]));
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    doff_request* late = submit(&workers[0], DOFF_WRITE, workers[0].memory, AREA_BYTES, 0, 1);
    doff_request_release(submit(&workers[1], DOFF_WRITE, workers[1].memory, AREA_BYTES, 0, 1));
    doff_stats stats;
    CHECK(doff_engine_stats(engine, &stats) == 0);
    CHECK(doff_engine_close(engine, 30000) == 0);
    doff_engine_release(engine);
    finish(late); /* the last one frees the engine */
    CHECK(doff_unmap(address, (uint64_t)THREADS * 3 * AREA_BYTES) == 0);
    printf("%-8s direct=%d faults=%-40s %llu requests, %llu chunks, %llu bounced, %llu buffered, %llu short, %llu "
           "retries\n",
           backend, info.direct, faults ? faults : "none", (unsigned long long)stats.requests_done,
           (unsigned long long)stats.chunks_done, (unsigned long long)stats.chunks_bounced,
           (unsigned long long)stats.chunks_buffered, (unsigned long long)stats.short_transfers,
           (unsigned long long)stats.retries);
    fflush(stdout);
}

int main(int count, char** arguments) {
    static const char* const backends[] = {"libaio", "io_uring", "pool"};
    static const char* const faults[] = {NULL, "short=5000 every=3; seed=5 jitter_us=300",
                                         "errno=4 every=5; errno=11 every=37; refuse=1 every=11"};
    CHECK(count == 2);
    for (size_t i = 0; i < sizeof backends / sizeof *backends; i++)
        for (size_t k = 0; k < sizeof faults / sizeof *faults; k++)
            for (int direct = DOFF_DIRECT_OFF; direct <= DOFF_DIRECT_PREFERRED; direct++)
                run(arguments[1], backends[i], faults[k], direct);
    return 0;
}
