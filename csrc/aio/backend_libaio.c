/* Linux kernel AIO (io_setup(2), io_submit(2)), through libaio when it is installed and by raw system calls otherwise.
 *
 * libaio is opened by name at run time: Debian and Ubuntu renamed it in 2024 (t64), which breaks programs linked to the
 * old name, and the request layout is the kernel's either way. Asynchronous only for O_DIRECT on allocated blocks; the
 * engine sends everything else to the pool.
 */
#define _GNU_SOURCE
#include "backend.h"

#include <dlfcn.h>
#include <errno.h>
#include <linux/aio_abi.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SUBMIT_MAX 64

/* All return a count or -errno, as libaio's do. */
struct aio_calls {
    int (*setup)(int events, aio_context_t* context);
    int (*destroy)(aio_context_t context);
    int (*submit)(aio_context_t context, long count, struct iocb** iocbs);
    int (*getevents)(aio_context_t context, long min, long max, struct io_event* events, struct timespec* timeout);
    const char* origin;
};

static int raw_setup(int events, aio_context_t* context) {
    long code = syscall(SYS_io_setup, events, context);
    return code < 0 ? -errno : (int)code;
}
static int raw_destroy(aio_context_t context) {
    long code = syscall(SYS_io_destroy, context);
    return code < 0 ? -errno : (int)code;
}
static int raw_submit(aio_context_t context, long count, struct iocb** iocbs) {
    long code = syscall(SYS_io_submit, context, count, iocbs);
    return code < 0 ? -errno : (int)code;
}
static int raw_getevents(aio_context_t context, long min, long max, struct io_event* events, struct timespec* timeout) {
    long code = syscall(SYS_io_getevents, context, min, max, events, timeout);
    return code < 0 ? -errno : (int)code;
}

static struct aio_calls calls;
static pthread_once_t calls_once = PTHREAD_ONCE_INIT;

static void find_calls(void) {
    static const char* const names[] = {"libaio.so.1t64", "libaio.so.1"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        void* library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
        if (!library)
            continue;
        *(void**)&calls.setup = dlsym(library, "io_setup");
        *(void**)&calls.destroy = dlsym(library, "io_destroy");
        *(void**)&calls.submit = dlsym(library, "io_submit");
        *(void**)&calls.getevents = dlsym(library, "io_getevents");
        if (calls.setup && calls.destroy && calls.submit && calls.getevents) {
            calls.origin = names[i];
            return;
        }
        dlclose(library);
    }
    calls = (struct aio_calls){raw_setup, raw_destroy, raw_submit, raw_getevents, "raw system calls"};
}

const char* doff_libaio_origin(void);
const char* doff_libaio_origin(void) {
    pthread_once(&calls_once, find_calls);
    return calls.origin;
}

struct aio_state {
    aio_context_t context;
};

static int aio_init(struct doff_backend* backend, unsigned in_flight_max, const char* argument) {
    (void)argument;
    pthread_once(&calls_once, find_calls);
    struct aio_state* state = calloc(1, sizeof *state);
    if (!state)
        return -ENOMEM;
    int code = calls.setup((int)in_flight_max, &state->context);
    if (code < 0) {
        free(state);
        return code;
    }
    backend->state = state;
    return 0;
}

/* The iocb need not outlive io_submit: the kernel copies it. */
static int aio_submit(struct doff_backend* backend, struct doff_io** ios, unsigned count) {
    struct aio_state* state = backend->state;
    struct iocb blocks[SUBMIT_MAX], *pointers[SUBMIT_MAX];
    if (count > SUBMIT_MAX)
        count = SUBMIT_MAX;
    for (unsigned i = 0; i < count; i++) {
        blocks[i] = (struct iocb){
            .aio_data = (uint64_t)(uintptr_t)ios[i],
            .aio_lio_opcode = ios[i]->write ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD,
            .aio_fildes = (uint32_t)ios[i]->fd,
            .aio_buf = (uint64_t)(uintptr_t)ios[i]->buf,
            .aio_nbytes = ios[i]->len,
            .aio_offset = ios[i]->off,
        };
        pointers[i] = &blocks[i];
    }
    doff_backend_publish(backend);
    return calls.submit(state->context, count, pointers);
}

static int aio_reap(struct doff_backend* backend, struct doff_completion* done, unsigned max) {
    struct aio_state* state = backend->state;
    struct io_event events[64];
    if (max > 64)
        max = 64;
    int count = calls.getevents(state->context, 1, max, events, NULL);
    for (int i = 0; i < count; i++) {
        done[i].io = (struct doff_io*)(uintptr_t)events[i].data;
        done[i].result = events[i].res;
    }
    return count;
}

static void aio_fini(struct doff_backend* backend) {
    struct aio_state* state = backend->state;
    calls.destroy(state->context);
    free(state);
}

const struct doff_backend_table doff_backend_libaio = {"libaio", aio_init, aio_submit, aio_reap, aio_fini};
