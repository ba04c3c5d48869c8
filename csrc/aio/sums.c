/* Checksums of what lies in files: taken when a chunk is written, compared when it was read.
 *
 * CRC-32C of each DOFF_SUM_BYTES of a chunk, by the thread that submits a write or reports a read, outside the engine's
 * mutex: what the disk is to do next is on its way meanwhile. A write that fails leaves the sums of what it would have
 * written, because nobody knows what lies there then; one that never began leaves the old ones.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <stdlib.h>

#define RUN_MAX 16 /* blocks summed in one call, side by side */

struct sum {
    uint32_t crc, nbytes; /* of the first nbytes of its block; 0: never written */
};

struct doff_sums {
    _Atomic unsigned references;
    uint64_t count;
    struct sum blocks[];
};

/* Each chunk begins a block. */
uint64_t doff_sums_count(const doff_engine* engine, int64_t nbytes) {
    uint64_t chunks = (uint64_t)nbytes / engine->block_bytes, rest = (uint64_t)nbytes % engine->block_bytes;
    uint64_t per_chunk = (engine->block_bytes + DOFF_SUM_BYTES - 1) / DOFF_SUM_BYTES;
    return chunks * per_chunk + (rest + DOFF_SUM_BYTES - 1) / DOFF_SUM_BYTES;
}

doff_sums* doff_sums_new(const doff_engine* engine, const int64_t* nbytes, uint32_t pieces) {
    uint64_t count = 0;
    for (uint32_t i = 0; i < pieces; i++)
        count += doff_sums_count(engine, nbytes[i]);
    doff_sums* sums = calloc(1, sizeof *sums + count * sizeof *sums->blocks);
    if (sums) {
        sums->references = 1;
        sums->count = count;
    }
    return sums;
}

void doff_sums_release(doff_sums* sums) {
    if (sums && atomic_fetch_sub_explicit(&sums->references, 1, memory_order_acq_rel) == 1)
        free(sums);
}

uint64_t doff_sums_copy(const doff_sums* sums, uint32_t* pairs, uint64_t room) {
    for (uint64_t i = 0; i < sums->count && i < room; i++) {
        pairs[2 * i] = sums->blocks[i].crc;
        pairs[2 * i + 1] = sums->blocks[i].nbytes;
    }
    return sums->count;
}

bool doff_sums_attach(const doff_engine* engine, struct doff_request* request, doff_sums* sums) {
    uint64_t base = 0;
    for (unsigned i = 0; i < request->seg_count; i++) {
        base += request->segs[i].sum_base; /* as many as it skips */
        request->segs[i].sum_base = base;
        base += doff_sums_count(engine, request->segs[i].nbytes);
    }
    if (base > sums->count || !request->padded) /* without padding, chunks may begin anywhere */
        return false;
    atomic_fetch_add_explicit(&sums->references, 1, memory_order_relaxed);
    request->sums = sums;
    return true;
}

static struct sum* sums_at(const struct doff_op* op) {
    const struct doff_seg* seg = op->seg;
    return seg->request->sums->blocks + seg->sum_base + doff_sums_count(seg->request->engine, op->first - seg->buf);
}

static uint32_t block_length(size_t rest) { return rest < DOFF_SUM_BYTES ? (uint32_t)rest : DOFF_SUM_BYTES; }

static void sum_bytes(const char* at, size_t nbytes, uint32_t* crcs) {
    doff_crc32c_blocks((uint64_t)(uintptr_t)at, nbytes, DOFF_SUM_BYTES, crcs);
}

bool doff_sums_missing(const struct doff_op* op) { return op->io.write && op->seg->request->sums && !op->summed; }

void doff_sums_record(struct doff_op* op) {
    uint32_t crcs[RUN_MAX];
    struct sum* known = sums_at(op);
    for (size_t at = 0, run; at < op->whole; at += run) {
        run = op->whole - at < RUN_MAX * (size_t)DOFF_SUM_BYTES ? op->whole - at : RUN_MAX * (size_t)DOFF_SUM_BYTES;
        sum_bytes(op->first + at, run, crcs);
        for (size_t i = 0; i * DOFF_SUM_BYTES < run; i++)
            *known++ = (struct sum){crcs[i], block_length(run - i * DOFF_SUM_BYTES)};
    }
    op->summed = true;
}

/* How many blocks from here on were written as far as they were read; their bytes in *nbytes. */
static size_t equal_run(const struct sum* known, size_t rest, size_t* nbytes) {
    size_t count = 0;
    for (*nbytes = 0; *nbytes < rest && count < RUN_MAX; count++) {
        if (known[count].nbytes != block_length(rest - *nbytes))
            break;
        *nbytes += known[count].nbytes;
    }
    return count;
}

void doff_sums_check(struct doff_op* op) {
    uint32_t crcs[RUN_MAX];
    const struct sum* known = sums_at(op);
    size_t step, nbytes;
    for (size_t at = 0; at < op->whole; at += step) {
        size_t count = equal_run(known, op->whole - at, &nbytes);
        step = nbytes;
        if (!count) { /* less of it was written, more, or nothing */
            step = block_length(op->whole - at);
            count = 1;
            nbytes = known->nbytes <= step ? known->nbytes : 0;
        }
        if (nbytes)
            sum_bytes(op->first + at, nbytes, crcs);
        for (size_t i = 0; nbytes && i < count; i++)
            if (crcs[i] != known[i].crc) {
                op->fault_errno = EBADMSG;
                op->fault.offset = op->seg->off + (op->first - op->seg->buf) + (int64_t)(at + i * DOFF_SUM_BYTES);
                op->fault.nbytes = known[i].nbytes;
                op->fault.found = crcs[i];
                op->fault.written = known[i].crc;
                return;
            }
        known += count;
    }
}
