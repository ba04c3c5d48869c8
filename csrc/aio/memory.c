/* Memory for transfers. Huge pages matter more than any setting of the engine: a 1 MiB request in 4 KiB pages exceeds
 * the segments that a disk takes at once, and every page has to be pinned by itself. */
#define _GNU_SOURCE
#include "doff_aio.h"

#include <errno.h>
#include <stddef.h>
#include <sys/mman.h>

#define HUGE_BYTES ((uint64_t)2 << 20)

int doff_map(uint64_t nbytes, int lock, uint64_t* address, int32_t* lock_errno) {
    uint64_t length = (nbytes + DOFF_PAGE - 1) & ~(uint64_t)(DOFF_PAGE - 1);
    *lock_errno = 0;
    if (!nbytes || length < nbytes || length > UINT64_MAX - HUGE_BYTES)
        return -EINVAL;
    char* whole = mmap(NULL, length + HUGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (whole == MAP_FAILED)
        return -errno;
    uint64_t base = (uint64_t)(uintptr_t)whole, start = (base + HUGE_BYTES - 1) & ~(HUGE_BYTES - 1);
    if (start > base)
        munmap(whole, start - base);
    if (base + HUGE_BYTES > start)
        munmap((char*)(uintptr_t)(start + length), base + HUGE_BYTES - start);
    void* memory = (void*)(uintptr_t)start;
    madvise(memory, length, MADV_HUGEPAGE); /* a kernel without huge pages says EINVAL: ordinary pages then */
    /* Nor in core files: they would be as large as the budget, and hold weights. */
    if (madvise(memory, length, MADV_DONTFORK) || madvise(memory, length, MADV_DONTDUMP)) {
        int code = errno;
        munmap(memory, length);
        return -code;
    }
    if (lock && mlock(memory, length))
        *lock_errno = errno;
    *address = start;
    return 0;
}

int doff_unmap(uint64_t address, uint64_t nbytes) {
    return munmap((void*)(uintptr_t)address, (nbytes + DOFF_PAGE - 1) & ~(uint64_t)(DOFF_PAGE - 1)) ? -errno : 0;
}
