/* Aligned memory between a direct file and memory that direct I/O cannot take.
 *
 * Whole blocks of the file whose memory does not lie as they do are copied, chunk by chunk, so that they need not go
 * through the page cache. One buffer belongs to one chunk slot and stays with it until the engine is freed; slots are
 * taken from the top of a stack, so there are never more buffers than chunks were in flight at once. Copies run outside
 * the engine's mutex: of a write directly before it is submitted, of a read before its completion is handled.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#define BOUNCE_MAX (1u << 20)
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif
#define PAGE_BYTES (2u << 20) /* a huge page, which several buffers share: see memory.c */

size_t doff_bounce_length(const doff_engine* engine) {
    return engine->block_bytes < BOUNCE_MAX ? engine->block_bytes : BOUNCE_MAX;
}

bool doff_bounce_begin(doff_engine* engine, struct doff_op* op) {
    size_t length = doff_bounce_length(engine);
    uint64_t address;
    int32_t ignored;
    if (!op->bounce) {
        if (!engine->bounces_left) {
            /* Not inherited by fork: a child would take the pages that the device is writing to. */
            if (doff_map(PAGE_BYTES, 0, &address, &ignored))
                return false;
            engine->bounce_next = (char*)(uintptr_t)address;
            engine->bounces_left = (unsigned)(PAGE_BYTES / length);
        }
        op->bounce = engine->bounce_next;
        engine->bounce_next += length;
        engine->bounces_left--;
    }
    op->user = op->io.buf;
    op->io.buf = op->bounce;
    return true;
}

void doff_bounce_end(struct doff_op* op) {
    if (op->user)
        op->io.buf = op->user;
    op->user = NULL;
}

bool doff_bounce_needed(const struct doff_op* op) { return op->user && op->io.write; }

/* memcpy(3) between a bounce buffer and the caller's memory, or EFAULT, which a direct transfer would say of memory
 * that is not there or may not be touched, and where memcpy alone would end the process. Asking first is nearly free on
 * huge pages and takes 25 ms per GB on others; to let the kernel copy takes twice that. */
static int copy(char* bounce, char* user, size_t nbytes, bool to_user) {
    unsigned char ignored[BOUNCE_MAX / DOFF_PAGE + 1];
    uintptr_t mask = (uintptr_t)DOFF_PAGE - 1, from = (uintptr_t)user & ~mask;
    size_t length = ((uintptr_t)user + nbytes + mask - from) & ~mask;
    if (madvise((void*)from, length, to_user ? MADV_POPULATE_WRITE : MADV_POPULATE_READ)) {
        if (errno != EINVAL)
            return EFAULT;
        /* It may not be touched, or Linux is older than 5.14. */
        const struct iovec ours = {bounce, nbytes}, theirs = {user, nbytes};
        ssize_t moved = to_user ? process_vm_writev(getpid(), &ours, 1, &theirs, 1, 0)
                                : process_vm_readv(getpid(), &ours, 1, &theirs, 1, 0);
        if (moved >= 0 || (errno != ENOSYS && errno != EPERM))
            return moved == (ssize_t)nbytes ? 0 : EFAULT;
        if (mincore((void*)from, length, ignored)) /* a sandbox forbids that: at least whether something is mapped */
            return EFAULT;
    }
    to_user ? memcpy(user, bounce, nbytes) : memcpy(bounce, user, nbytes);
    return 0;
}

int doff_bounce_fill(const struct doff_op* op) { return copy(op->io.buf, op->user, op->want, false); }

int doff_bounce_empty(const struct doff_op* op, int64_t moved) {
    if (!op->user || moved <= 0)
        return 0;
    return copy(op->io.buf, op->user, (size_t)moved < op->want ? (size_t)moved : op->want, true);
}

void doff_bounce_free(doff_engine* engine, unsigned ops) {
    for (unsigned i = 0; i < ops; i++) {
        uint64_t address = (uint64_t)(uintptr_t)engine->ops[i].bounce;
        if (address && !(address & (PAGE_BYTES - 1))) /* the first of its page */
            doff_unmap(address, PAGE_BYTES);
    }
}
