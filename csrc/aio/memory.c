/* Memory for transfers. Huge pages matter more than any setting of the engine: a 1 MiB request in 4 KiB pages exceeds
 * the segments that a disk takes at once, and every page has to be pinned by itself. */
#define _GNU_SOURCE
#include "doff_aio.h"

#include <errno.h>
#include <stddef.h>
#include <sys/mman.h>

#define HUGE_BYTES ((uint64_t)2 << 20)

static uint64_t whole_pages(uint64_t nbytes) { return (nbytes + DOFF_PAGE - 1) & ~(uint64_t)(DOFF_PAGE - 1); }

static void* at(uint64_t address) { return (void*)(uintptr_t)address; }

/* Addresses for length bytes on a 2 MiB border. */
static int reserve(uint64_t length, int protection, int flags, uint64_t* address) {
    char* whole = mmap(NULL, length + HUGE_BYTES, protection, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    if (whole == MAP_FAILED)
        return -errno;
    uint64_t base = (uint64_t)(uintptr_t)whole, start = (base + HUGE_BYTES - 1) & ~(HUGE_BYTES - 1);
    if (start > base)
        munmap(whole, start - base);
    if (base + HUGE_BYTES > start)
        munmap(at(start + length), base + HUGE_BYTES - start);
    *address = start;
    return 0;
}

static int advise(uint64_t address, uint64_t length) {
    madvise(at(address), length, MADV_HUGEPAGE); /* a kernel without huge pages says EINVAL: ordinary pages then */
    /* Nor in core files: they would be as large as the budget, and hold weights. */
    return madvise(at(address), length, MADV_DONTFORK) || madvise(at(address), length, MADV_DONTDUMP) ? -errno : 0;
}

/* Opens a reserved range. It is counted against what the system lets a process have, except where the system takes that
 * for an obvious overcommitment: a machine whose memory grows as it is used says less than it has. doff_map does so,
 * too. */
static int open_counted(uint64_t address, uint64_t length) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    if (mmap(at(address), length, PROT_READ | PROT_WRITE, flags, -1, 0) != MAP_FAILED)
        return 0;
    if (errno == ENOMEM &&
        mmap(at(address), length, PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, -1, 0) != MAP_FAILED)
        return 0;
    return -errno;
}

int doff_map(uint64_t nbytes, int lock, uint64_t* address, int32_t* lock_errno) {
    uint64_t length = whole_pages(nbytes), start;
    *lock_errno = 0;
    if (!nbytes || length < nbytes || length > UINT64_MAX - HUGE_BYTES)
        return -EINVAL;
    int code = reserve(length, PROT_READ | PROT_WRITE, 0, &start);
    if (code == -ENOMEM)
        code = reserve(length, PROT_READ | PROT_WRITE, MAP_NORESERVE, &start);
    if (code)
        return code;
    code = advise(start, length);
    if (code) {
        munmap(at(start), length);
        return code;
    }
    if (lock && mlock(at(start), length))
        *lock_errno = errno;
    *address = start;
    return 0;
}

int doff_map_with_spare(uint64_t nbytes, uint64_t spare, uint64_t* address) {
    uint64_t length = whole_pages(nbytes), more = whole_pages(spare), start;
    if (!nbytes || length < nbytes || more < spare || length > UINT64_MAX - HUGE_BYTES - more)
        return -EINVAL;
    int code = reserve(length + more, PROT_NONE, MAP_NORESERVE, &start);
    if (code)
        return code;
    code = open_counted(start, length);
    if (!code)
        code = advise(start, length);
    if (!code && (madvise(at(start + length), more, MADV_DONTFORK) || madvise(at(start + length), more, MADV_DONTDUMP)))
        code = -errno;
    if (code) {
        munmap(at(start), length + more);
        return code;
    }
    madvise(at(start + length), more, MADV_NOHUGEPAGE); /* a huge page would take more than what was opened */
    *address = start;
    return 0;
}

int doff_spare_open(uint64_t address, uint64_t nbytes) {
    return mprotect(at(address), nbytes, PROT_READ | PROT_WRITE) ? -errno : 0;
}

int doff_spare_close(uint64_t address, uint64_t nbytes) {
    int code = doff_forget(address, nbytes);
    return mprotect(at(address), nbytes, PROT_NONE) ? -errno : code;
}

int doff_forget(uint64_t address, uint64_t nbytes) { return madvise(at(address), nbytes, MADV_DONTNEED) ? -errno : 0; }

int doff_unmap(uint64_t address, uint64_t nbytes) { return munmap(at(address), whole_pages(nbytes)) ? -errno : 0; }
