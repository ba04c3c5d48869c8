/* Makes the N-th system call on files below a directory fail. For tests: loaded in front of libc (LD_PRELOAD) into a
 * process of its own, so that everything above libc is what it always is. Reads and writes that the I/O engine has in
 * flight go past libc: for those there is backend_fault.c.
 *
 * A call counts when the file that it names, or that its descriptor belongs to, lies below the directory.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

static char below[PATH_MAX];
static atomic_long seen, failing;
static atomic_int code;
static const char* failed;

/* From now on calls are counted, and the number nth of them fails with this errno. nth 0: none does. errno 0: only
 * calls of write(2) count, and one that fails writes a half. */
void failing_calls_begin(const char* directory, long nth, int error) {
    snprintf(below, sizeof below, "%s", directory);
    failed = "";
    code = error;
    failing = nth;
    seen = 0;
}

/* Ends it: how many there were. */
long failing_calls_end(void) {
    below[0] = 0;
    return seen;
}

const char* failing_calls_failed(void) { return failed; }

static bool fails(const char* name, const char* path) {
    if (!below[0] || strncmp(path, below, strlen(below)) || (!code && strcmp(name, "write")))
        return false;
    if (atomic_fetch_add(&seen, 1) + 1 != failing)
        return false;
    failed = name;
    errno = code;
    return true;
}

static const char* path_of(int fd, char* path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = 0;
    return path;
}

static bool fails_of(const char* name, int fd) {
    char path[PATH_MAX];
    int before = errno;
    bool found = below[0] && fails(name, path_of(fd, path));
    if (!found)
        errno = before;
    return found;
}

static bool fails_at(const char* name, int directory, const char* path) {
    char whole[PATH_MAX];
    if (!below[0] || path[0] == '/' || directory == AT_FDCWD)
        return fails(name, path);
    size_t length = strlen(path_of(directory, whole));
    snprintf(whole + length, sizeof whole - length, "/%s", path);
    return fails(name, whole);
}

#define NEXT(name, ...) (((__typeof__(&name))dlsym(RTLD_NEXT, #name))(__VA_ARGS__))

/* -- with a path -- */
#define MODE_OF(flags, mode)                                                                                           \
    mode_t mode = 0;                                                                                                   \
    if ((flags) & (O_CREAT | O_TMPFILE)) {                                                                             \
        va_list more;                                                                                                  \
        va_start(more, flags);                                                                                         \
        mode = va_arg(more, mode_t);                                                                                   \
        va_end(more);                                                                                                  \
    }

int open(const char* path, int flags, ...) {
    MODE_OF(flags, mode)
    return fails("open", path) ? -1 : NEXT(open, path, flags, mode);
}

int open64(const char* path, int flags, ...) {
    MODE_OF(flags, mode)
    return fails("open", path) ? -1 : NEXT(open64, path, flags, mode);
}

int openat(int directory, const char* path, int flags, ...) {
    MODE_OF(flags, mode)
    return fails_at("openat", directory, path) ? -1 : NEXT(openat, directory, path, flags, mode);
}

int openat64(int directory, const char* path, int flags, ...) {
    MODE_OF(flags, mode)
    return fails_at("openat", directory, path) ? -1 : NEXT(openat64, directory, path, flags, mode);
}

int mkdir(const char* path, mode_t mode) { return fails("mkdir", path) ? -1 : NEXT(mkdir, path, mode); }

int rmdir(const char* path) { return fails("rmdir", path) ? -1 : NEXT(rmdir, path); }

int unlink(const char* path) { return fails("unlink", path) ? -1 : NEXT(unlink, path); }

int unlinkat(int directory, const char* path, int flags) {
    return fails_at("unlinkat", directory, path) ? -1 : NEXT(unlinkat, directory, path, flags);
}

int rename(const char* from, const char* to) { return fails("rename", to) ? -1 : NEXT(rename, from, to); }

int renameat2(int from_directory, const char* from, int to_directory, const char* to, unsigned flags) {
    return fails_at("renameat2", to_directory, to) ? -1
                                                   : NEXT(renameat2, from_directory, from, to_directory, to, flags);
}

int statvfs(const char* path, struct statvfs* out) { return fails("statvfs", path) ? -1 : NEXT(statvfs, path, out); }

int statvfs64(const char* path, struct statvfs64* out) {
    return fails("statvfs", path) ? -1 : NEXT(statvfs64, path, out);
}

/* -- with a descriptor -- */
int fsync(int fd) { return fails_of("fsync", fd) ? -1 : NEXT(fsync, fd); }

int fdatasync(int fd) { return fails_of("fdatasync", fd) ? -1 : NEXT(fdatasync, fd); }

int fallocate(int fd, int mode, off_t offset, off_t nbytes) {
    return fails_of("fallocate", fd) ? -1 : NEXT(fallocate, fd, mode, offset, nbytes);
}

int fallocate64(int fd, int mode, off64_t offset, off64_t nbytes) {
    return fails_of("fallocate", fd) ? -1 : NEXT(fallocate64, fd, mode, offset, nbytes);
}

int ftruncate(int fd, off_t nbytes) { return fails_of("ftruncate", fd) ? -1 : NEXT(ftruncate, fd, nbytes); }

int ftruncate64(int fd, off64_t nbytes) { return fails_of("ftruncate", fd) ? -1 : NEXT(ftruncate64, fd, nbytes); }

int flock(int fd, int operation) { return fails_of("flock", fd) ? -1 : NEXT(flock, fd, operation); }

ssize_t read(int fd, void* buffer, size_t nbytes) { return fails_of("read", fd) ? -1 : NEXT(read, fd, buffer, nbytes); }

ssize_t pread(int fd, void* buffer, size_t nbytes, off_t offset) {
    return fails_of("pread", fd) ? -1 : NEXT(pread, fd, buffer, nbytes, offset);
}

ssize_t pread64(int fd, void* buffer, size_t nbytes, off64_t offset) {
    return fails_of("pread", fd) ? -1 : NEXT(pread64, fd, buffer, nbytes, offset);
}

ssize_t pwrite(int fd, const void* buffer, size_t nbytes, off_t offset) {
    return fails_of("pwrite", fd) ? -1 : NEXT(pwrite, fd, buffer, nbytes, offset);
}

ssize_t pwrite64(int fd, const void* buffer, size_t nbytes, off64_t offset) {
    return fails_of("pwrite", fd) ? -1 : NEXT(pwrite64, fd, buffer, nbytes, offset);
}

ssize_t write(int fd, const void* buffer, size_t nbytes) {
    bool found = fails_of("write", fd);
    return found && code ? -1 : NEXT(write, fd, buffer, found ? nbytes / 2 : nbytes);
}
