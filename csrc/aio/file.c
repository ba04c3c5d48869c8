/* Files: opening with a say on direct I/O, alignment asked of the file, allocation, locks.
 *
 * Each file has a buffered descriptor, and a direct one where O_DIRECT really works: it is asked by statx(2)
 * (STATX_DIOALIGN, Linux 6.1) and then tried, because overlay, FUSE and network file systems may accept the flag and
 * fail the first transfer. The kernel keeps both views of the file coherent.
 *
 * A path is looked up once: in a directory that others may write to, its name may belong to another file a moment
 * later. The second descriptor is opened through the first (proc_pid_fd(5)).
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#define ZERO_BYTES (1 << 20)

/* statx(2) as the kernel lays it out, down to what is used; older headers do not have the last two fields. */
struct statx_dio {
    uint32_t mask, block_size;
    char skipped[0x98 - 8];
    uint32_t dio_mem_align, dio_offset_align;
    char rest[256 - 0xa0];
};
#define STATX_DIOALIGN_BIT 0x2000u
#define TMPFS_TYPE 0x01021994
#define FUSE_TYPE 0x65735546
#define V9FS_TYPE 0x01021997

/* 0: alignments are filled; EOPNOTSUPP: the file says that it has no direct I/O. */
static int ask_alignment(int fd, uint32_t* memory_align, uint32_t* offset_align) {
    struct statx_dio answer;
    struct statfs system;
    /* tmpfs takes the flag since Linux 6.6 and copies all the same, inside io_submit: threads serve it better. */
    if (!fstatfs(fd, &system) && system.f_type == TMPFS_TYPE)
        return EOPNOTSUPP;
    memset(&answer, 0, sizeof answer);
    *memory_align = *offset_align = DOFF_PAGE;
    long code = syscall(SYS_statx, fd, "", AT_EMPTY_PATH, STATX_DIOALIGN_BIT, &answer);
    if (code < 0 || !(answer.mask & STATX_DIOALIGN_BIT))
        return 0; /* cannot say: one page suits every disk */
    if (!answer.dio_offset_align)
        return EOPNOTSUPP;
    *memory_align = answer.dio_mem_align;
    *offset_align = answer.dio_offset_align;
    /* Extents and buffers are page-aligned; a file that wants more is used buffered. */
    return answer.dio_offset_align > DOFF_PAGE || answer.dio_mem_align > DOFF_PAGE ? EINVAL : 0;
}

/* Whether kernels' queues would wait for a server while they take a transfer, and keep those to other devices waiting:
 * io_submit(2) moves the data there, io_uring asks first whether it might (poll). */
static bool blocks_submission(int fd) {
    struct statfs system;
    return !fstatfs(fd, &system) && (system.f_type == FUSE_TYPE || system.f_type == V9FS_TYPE);
}

/* One real transfer; a new file gets its first page. */
static int try_direct(int fd, bool create) {
    char* page = mmap(NULL, DOFF_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED)
        return errno;
    ssize_t moved = create ? pwrite(fd, page, DOFF_PAGE, 0) : pread(fd, page, DOFF_PAGE, 0);
    int code = moved < 0 ? errno : create && moved != DOFF_PAGE ? ENOSPC : 0;
    munmap(page, DOFF_PAGE);
    return code;
}

static int open_direct(int fd_buffered, bool readonly, bool create, doff_file_info* info) {
    char path[64];
    int code = ask_alignment(fd_buffered, &info->memory_align, &info->offset_align);
    if (code)
        return -code;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd_buffered);
    int fd = open(path, (readonly ? O_RDONLY : O_RDWR) | O_CLOEXEC | O_DIRECT);
    if (fd < 0)
        return -errno;
    code = try_direct(fd, create);
    if (!code)
        return fd;
    close(fd);
    return -code;
}

static struct doff_lane* lane_for(doff_engine* engine, dev_t device) {
    struct doff_lane* free_lane = NULL;
    for (unsigned i = 0; i < DOFF_LANES_MAX; i++) {
        struct doff_lane* lane = &engine->lanes[i];
        if (lane->files && lane->device == device)
            return lane;
        if (!lane->files && !free_lane)
            free_lane = lane;
    }
    /* More devices than lanes: the rest share. */
    if (!free_lane)
        return &engine->lanes[device % DOFF_LANES_MAX];
    free_lane->device = device;
    return free_lane;
}

static int adopt(doff_engine* engine, int fd_direct, int fd_buffered, const doff_file_info* info) {
    int id = -EMFILE;
    bool aside = blocks_submission(fd_buffered);
    pthread_mutex_lock(&engine->mutex);
    for (int i = 0; i < DOFF_FILES_MAX && id < 0 && !engine->closed; i++) {
        struct doff_file* file = &engine->files[i];
        if (file->used)
            continue;
        uint32_t align = info->memory_align > info->offset_align ? info->memory_align : info->offset_align;
        *file = (struct doff_file){.used = true,
                                   .fd_direct = fd_direct,
                                   .fd_buffered = fd_buffered,
                                   .aside = aside,
                                   .mask = align - 1,
                                   .lane = lane_for(engine, (dev_t)info->device)};
        file->lane->files++;
        id = i;
    }
    if (engine->closed)
        id = -ESHUTDOWN;
    pthread_mutex_unlock(&engine->mutex);
    return id;
}

/* Whether nobody else has made the file, can change it, or has led to it by a second name of one of this user's files.
 */
static bool is_own(const struct stat* status) {
    return status->st_uid == geteuid() && status->st_nlink <= 1 && !(status->st_mode & S_IWOTH);
}

/* Locks, tries direct I/O: the direct descriptor, or -1 when there is none. */
static int prepare(int fd, bool named, uint32_t flags, uint32_t direct, doff_file_info* info, int* fd_direct) {
    struct stat status;
    if ((flags & DOFF_OPEN_LOCK) && flock(fd, LOCK_EX | LOCK_NB))
        return -errno;
    if (fstat(fd, &status))
        return -errno;
    /* Somebody who clears away files of dead runs, or the run that it was of, was between our opening and our locking
     * it. */
    if ((flags & DOFF_OPEN_LOCK) && named && !status.st_nlink)
        return flags & DOFF_OPEN_CREATE ? -EAGAIN : -ENOENT;
    if (!S_ISREG(status.st_mode) && !S_ISBLK(status.st_mode))
        return S_ISDIR(status.st_mode) ? -EISDIR : -EINVAL;
    if ((flags & DOFF_OPEN_OWN) && !(flags & DOFF_OPEN_CREATE) && !is_own(&status))
        return -EPERM;
    *info = (doff_file_info){.memory_align = 1, .offset_align = 1, .device = status.st_dev};
    if (direct != DOFF_DIRECT_OFF) {
        int code = open_direct(fd, flags & DOFF_OPEN_READONLY, flags & DOFF_OPEN_CREATE, info);
        *fd_direct = code >= 0 ? code : -1;
        info->direct = code >= 0;
        /* Next to direct I/O the page cache sees single blocks only: reading ahead would fill it with neighbours that
         * direct writes then make stale. */
        if (code >= 0)
            posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
        info->direct_errno = code < 0 ? -code : 0;
        if (code < 0)
            info->memory_align = info->offset_align = 1;
        if (code < 0 && direct == DOFF_DIRECT_REQUIRED)
            return code;
    }
    if (fstat(fd, &status))
        return -errno;
    info->size = status.st_size;
    return 0;
}

/* A new file that never has a name, in the directory of path. */
static int open_nameless(const char* path) {
    const char* end = strrchr(path, '/');
    char* directory = end == path ? strdup("/") : end ? strndup(path, (size_t)(end - path)) : strdup(".");
    if (!directory)
        return -ENOMEM;
    int fd = open(directory, O_TMPFILE | O_EXCL | O_RDWR | O_CLOEXEC, 0600); /* O_EXCL: and never gets one */
    int code = errno;
    free(directory);
    return fd >= 0 ? fd : -code;
}

/* The kernel's own links to open files, /proc/N/fd/N: nobody can put another one in their place (proc(5)). */
static bool of_a_process(const char* path) {
    int end = 0;
    return (sscanf(path, "/proc/%*u/fd/%*u%n", &end) >= 0 && end > 0 && !path[end]) ||
           (sscanf(path, "/proc/self/fd/%*u%n", &end) >= 0 && end > 0 && !path[end]);
}

int doff_file_open(doff_engine* engine, const char* path, uint32_t flags, uint32_t direct, doff_file_info* out) {
    if (engine->pid != getpid())
        return -ECHILD;
    bool create = flags & DOFF_OPEN_CREATE;
    int mode = (flags & DOFF_OPEN_READONLY) ? O_RDONLY : O_RDWR, fd_direct = -1, code = 0;
    int fd = create && (flags & DOFF_OPEN_UNLINK) ? open_nameless(path) : -EOPNOTSUPP;
    bool named = fd < 0; /* network file systems and old kernels do not have nameless files; or it fails again */
    /* Without O_NONBLOCK a pipe of that name would be waited for. Files that transfer do not have the flag: io_uring
     * would answer EAGAIN for it. */
    if (named)
        fd = open(path,
                  mode | (create ? O_CREAT | O_EXCL : O_NONBLOCK) | (of_a_process(path) ? 0 : O_NOFOLLOW) | O_CLOEXEC,
                  0600);
    if (fd < 0)
        return -errno;
    if (named && !create && fcntl(fd, F_SETFL, 0))
        code = -errno;
    if (!code)
        code = prepare(fd, named, flags, direct, out, &fd_direct);
    if (!code && named && (flags & DOFF_OPEN_UNLINK))
        code = unlink(path) ? -errno : 0;
    if (!code)
        code = adopt(engine, fd_direct, fd, out);
    if (code < 0) {
        if (create && named)
            unlink(path);
        if (fd_direct >= 0)
            close(fd_direct);
        close(fd);
    }
    return code;
}

struct doff_file* doff_file_get(doff_engine* engine, int32_t file) {
    return file >= 0 && file < DOFF_FILES_MAX && engine->files[file].used ? &engine->files[file] : NULL;
}

/* A separate descriptor, so that a close in another thread cannot pull it away under a call that blocks. */
static int borrow_fd(doff_engine* engine, int32_t id) {
    if (engine->pid != getpid())
        return -ECHILD;
    pthread_mutex_lock(&engine->mutex);
    struct doff_file* file = doff_file_get(engine, id);
    int fd = file ? fcntl(file->fd_buffered, F_DUPFD_CLOEXEC, 0) : -1;
    int code = file ? errno : EBADF;
    pthread_mutex_unlock(&engine->mutex);
    return fd >= 0 ? fd : -code;
}

static int write_zeros(int fd, int64_t from, int64_t to) {
    char* zeros = mmap(NULL, ZERO_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (zeros == MAP_FAILED)
        return -errno;
    int code = 0;
    unsigned interrupts = 0;
    while (from < to && !code) {
        ssize_t moved = pwrite(fd, zeros, (size_t)(to - from < ZERO_BYTES ? to - from : ZERO_BYTES), from);
        if (moved > 0)
            from += moved;
        else if (moved == 0 || errno != EINTR || ++interrupts > DOFF_INTERRUPTS_MAX)
            code = moved == 0 ? -ENOSPC : -errno;
    }
    munmap(zeros, ZERO_BYTES);
    return code;
}

/* tmpfs and others give up an allocation when a signal arrives, and a profiler's timer always finds one that takes
 * longer than its period: signals wait. */
static int allocate(int fd, int64_t size_bytes) {
    sigset_t all, before;
    int code = -EINTR;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (unsigned tries = 0; code == -EINTR && tries <= DOFF_INTERRUPTS_MAX; tries++)
        code = fallocate(fd, 0, 0, size_bytes) ? -errno : 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return code;
}

int doff_file_grow(doff_engine* engine, int32_t file, int64_t size_bytes) {
    struct stat status;
    int fd = borrow_fd(engine, file), code = 0;
    if (fd < 0)
        return fd;
    if (fstat(fd, &status)) {
        code = -errno;
    } else if (status.st_size < size_bytes) {
        code = allocate(fd, size_bytes);
        if (code == -EOPNOTSUPP || code == -ENOSYS)
            code = write_zeros(fd, status.st_size, size_bytes);
        /* An allocation that failed half-way must not keep the blocks. */
        if (code && ftruncate(fd, status.st_size))
            code = code == -ENOSPC ? code : -errno;
    }
    close(fd);
    return code;
}

int doff_file_sync(doff_engine* engine, int32_t file) {
    int fd = borrow_fd(engine, file);
    if (fd < 0)
        return fd;
    int code = fdatasync(fd) ? -errno : 0;
    close(fd);
    return code;
}

static void file_close(struct doff_file* file) {
    if (file->fd_direct >= 0)
        close(file->fd_direct);
    close(file->fd_buffered);
    file->lane->files--;
    file->used = false;
}

int doff_file_close(doff_engine* engine, int32_t id) {
    if (engine->pid != getpid())
        return -ECHILD;
    pthread_mutex_lock(&engine->mutex);
    struct doff_file* file = doff_file_get(engine, id);
    int code = !file ? -EBADF : !file->users ? 0 : engine->lost_errno ? -ENOTRECOVERABLE : -EBUSY;
    if (!code)
        file_close(file);
    pthread_mutex_unlock(&engine->mutex);
    return code;
}

void doff_files_close(doff_engine* engine, bool all) {
    for (int i = 0; i < DOFF_FILES_MAX; i++)
        if (engine->files[i].used && (all || !engine->files[i].users))
            file_close(&engine->files[i]);
}
