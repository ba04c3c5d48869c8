/* A slower disk: loaded in front of libc (LD_PRELOAD), it makes transfers past the page cache (O_DIRECT) take as long
 * as on a disk of SLOW_DISK_BYTES_PER_S, reads and writes together. The transfers themselves are made.
 *
 * Kernel AIO and io_uring go past libc, so they seem to be missing here: the I/O engine then uses threads. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static double free_at_s; /* when the disk has done all that was asked of it */

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

/* When a transfer of so many bytes that begins now ends. */
static double end_s(size_t nbytes) {
    double rate = strtod(getenv("SLOW_DISK_BYTES_PER_S"), NULL), begin = now_s();
    pthread_mutex_lock(&lock);
    free_at_s = (free_at_s > begin ? free_at_s : begin) + nbytes / rate;
    double end = free_at_s;
    pthread_mutex_unlock(&lock);
    return end;
}

static void sleep_until(double s) {
    struct timespec end = {(time_t)s, (long)((s - (time_t)s) * 1e9)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &end, NULL) == EINTR) {
    }
}

static int is_direct(int fd) { return fcntl(fd, F_GETFL) & O_DIRECT; }

#define SLOW(name, pointer)                                                                                            \
    ssize_t name(int fd, pointer buf, size_t nbytes, off_t at) {                                                       \
        static ssize_t (*real)(int, pointer, size_t, off_t);                                                           \
        if (!real)                                                                                                     \
            real = (ssize_t (*)(int, pointer, size_t, off_t))dlsym(RTLD_NEXT, #name);                                  \
        if (!is_direct(fd))                                                                                            \
            return real(fd, buf, nbytes, at);                                                                          \
        double end = end_s(nbytes);                                                                                    \
        ssize_t moved = real(fd, buf, nbytes, at);                                                                     \
        int code = errno;                                                                                              \
        sleep_until(end);                                                                                              \
        errno = code;                                                                                                  \
        return moved;                                                                                                  \
    }

SLOW(pread, void*)
SLOW(pread64, void*)
SLOW(pwrite, const void*)
SLOW(pwrite64, const void*)

void* dlopen(const char* name, int flags) {
    static void* (*real)(const char*, int);
    if (!real)
        real = (void* (*)(const char*, int))dlsym(RTLD_NEXT, "dlopen");
    return name && strstr(name, "libaio") ? NULL : real(name, flags);
}

long syscall(long number, ...) {
    static long (*real)(long, long, long, long, long, long, long);
    if (!real)
        real = (long (*)(long, long, long, long, long, long, long))dlsym(RTLD_NEXT, "syscall");
    if (number == SYS_io_setup || number == SYS_io_uring_setup) {
        errno = ENOSYS;
        return -1;
    }
    long value[6];
    va_list more;
    va_start(more, number);
    for (int n = 0; n < 6; n++)
        value[n] = va_arg(more, long);
    va_end(more);
    return real(number, value[0], value[1], value[2], value[3], value[4], value[5]);
}
