/* Aligned memory between a direct file and memory that direct I/O cannot take.
 *
 * Whole blocks of the file whose memory does not lie as they do are copied, chunk by chunk, so that they need not go
 * through the page cache. One buffer belongs to one chunk slot and stays with it until the engine is freed; slots are
 * taken from the top of a stack, so there are never more buffers than chunks were in flight at once. Copies run outside
 * the engine's mutex: of a write directly before it is submitted, of a read before its completion is handled.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <string.h>

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

unsigned doff_bounce_fill(struct doff_io** ios, unsigned count) {
    const struct doff_op* first = (const struct doff_op*)ios[0];
    if (first->user && first->io.write) {
        memcpy(first->io.buf, first->user, first->want);
        return 1;
    }
    unsigned ready = 1;
    while (ready < count && !(((const struct doff_op*)ios[ready])->user && ios[ready]->write))
        ready++;
    return ready;
}

void doff_bounce_empty(const struct doff_op* op, int64_t moved) {
    if (op->user && !op->io.write && moved > 0)
        memcpy(op->user, op->io.buf, (size_t)moved < op->want ? (size_t)moved : op->want);
}

void doff_bounce_free(doff_engine* engine, unsigned ops) {
    for (unsigned i = 0; i < ops; i++) {
        uint64_t address = (uint64_t)(uintptr_t)engine->ops[i].bounce;
        if (address && !(address & (PAGE_BYTES - 1))) /* the first of its page */
            doff_unmap(address, PAGE_BYTES);
    }
}
