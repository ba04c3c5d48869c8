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
#include <sys/uio.h>
#include <unistd.h>

#define BOUNCE_MAX (1u << 20)
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

/* The kernel copies, as it would for a direct transfer: memory that is not there is EFAULT, not the end of the process.
 * That takes a third longer than memcpy(3), which is left to systems that forbid it. */
static int copy(char* bounce, char* user, size_t nbytes, bool to_user) {
    for (size_t done = 0; done < nbytes;) {
        const struct iovec ours = {bounce + done, nbytes - done}, theirs = {user + done, nbytes - done};
        ssize_t moved = to_user ? process_vm_writev(getpid(), &ours, 1, &theirs, 1, 0)
                                : process_vm_readv(getpid(), &ours, 1, &theirs, 1, 0);
        if (moved > 0) {
            done += (size_t)moved;
        } else if (moved < 0 && (errno == ENOSYS || errno == EPERM)) {
            to_user ? memcpy(user, bounce, nbytes) : memcpy(bounce, user, nbytes);
            return 0;
        } else {
            return EFAULT;
        }
    }
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
