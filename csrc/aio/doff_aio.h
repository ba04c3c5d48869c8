/* The asynchronous I/O engine: bytes between memory and files, one ticket per request.
 *
 * Everything here takes addresses, lengths, file ids and codes; the caller keeps buffers alive until their request is
 * done. Functions that can fail return 0 (or a non-negative value where stated) or -errno. All are safe to call from
 * any thread. After fork() the child's calls return -ECHILD and change nothing: threads and kernel queues stay with the
 * parent. -ENOTRECOVERABLE: the kernel's queue no longer says what is done (doff_stats.completions_lost_errno says
 * why); what is in flight stays so, its memory must stay, and nothing more can be submitted.
 *
 * Contract of DOFF_PADDED: address and offset of every segment are multiples of 4096, and both the memory and the file
 * range behind the segment extend to the next multiple of 4096 and belong to the request. A transfer may then round its
 * length up. Without it, any address, offset and length works on a direct file, exactly, and leaves nothing in the page
 * cache: whole blocks whose memory is not aligned as they are go through a bounce buffer (bounce.c), parts of blocks
 * through the page cache, which is written back and emptied of them before the request is done.
 */
#ifndef DOFF_AIO_H
#define DOFF_AIO_H

#include <stdint.h>

/* cdef-begin: build_aio.py hands the lines from here to cffi as they are. */
#define DOFF_PAGE 4096
#define DOFF_QUEUE_DEPTH_MAX 1024
#define DOFF_SUM_BYTES 262144 /* what one checksum stands for, at most */
#define DOFF_TOKEN_BYTES 16
#define DOFF_BOARD_SLOTS 64

#define DOFF_READ 0
#define DOFF_WRITE 1

#define DOFF_URGENT 1
#define DOFF_PADDED 2

#define DOFF_DIRECT_OFF 0
#define DOFF_DIRECT_PREFERRED 1
#define DOFF_DIRECT_REQUIRED 2

#define DOFF_OPEN_CREATE 1 /* O_CREAT | O_EXCL; without it the file must exist */
#define DOFF_OPEN_READONLY 2
#define DOFF_OPEN_LOCK 4   /* flock, exclusive; -EWOULDBLOCK when somebody else holds it */
#define DOFF_OPEN_UNLINK 8 /* removes the name at once: the file dies with its last descriptor, also after SIGKILL */
#define DOFF_OPEN_OWN 16   /* -EPERM for a file of another user, open to everybody's writes, or with two names */

typedef struct doff_engine doff_engine;
typedef struct doff_request doff_request;
typedef struct doff_sums doff_sums;

typedef struct {
    uint64_t address;
    int64_t offset;
    int64_t nbytes;
    int32_t file;
    uint32_t sums_skipped; /* with sums: checksums that lie between those of the segment before and this one's */
} doff_segment;

typedef struct {
    int32_t error; /* 0, or the errno of the first chunk that failed */
    int32_t file;  /* where it failed; -1 when nothing did */
    int64_t offset;
    int64_t nbytes;      /* length of the failed piece */
    int64_t transferred; /* bytes that arrived, without padding */
    uint64_t started_ns; /* CLOCK_MONOTONIC: the first chunk left the queue (0: none did), the last one came back */
    uint64_t finished_ns;
    uint32_t
        sum_found; /* different when error is EBADMSG because checksums are: of what was read, of what was written */
    uint32_t sum_written;
} doff_result;

typedef struct {
    int32_t direct;        /* 1: O_DIRECT works on this file */
    int32_t direct_errno;  /* why it does not; 0 when it does or was not asked for */
    uint32_t memory_align; /* what a direct transfer asks of addresses and of offsets and lengths, bytes */
    uint32_t offset_align;
    int64_t size;
    uint64_t device;
} doff_file_info;

typedef struct {
    uint64_t bytes_read, bytes_written;
    uint64_t requests_done, requests_failed, requests_cancelled, requests_pending;
    uint64_t chunks_done, chunks_buffered, chunks_bounced, chunks_in_flight, chunks_in_flight_max;
    uint64_t short_transfers, retries, direct_refused, submit_calls, unobserved_failures;
    uint64_t completions_lost_errno; /* why the kernel's queue no longer says what is done; 0: it does */
} doff_stats;

/* 0 when the backend ("libaio", "io_uring", "pool") can be started here at this queue depth, else -errno. */
int doff_backend_probe(const char* backend, uint32_t queue_depth);
/* How the libaio backend reaches the kernel: the library's file name, or "raw system calls". */
const char* doff_libaio_origin(void);

/* block_bytes: chunk size, a multiple of 4096; queue_depth: chunks in flight per device; pending_max: requests
 * submitted and not done, beyond which doff_submit waits. fault_script: NULL, or the rules of backend_fault.c. */
int doff_engine_open(const char* backend, const char* fault_script, uint32_t queue_depth, uint32_t block_bytes,
                     uint32_t pending_max, doff_engine** out);
/* Finishes what is queued, then joins the threads and closes the files. -ETIMEDOUT: something is still in flight; its
 * memory must stay, all other files are closed, nothing can be submitted, and it may be called again. */
int doff_engine_close(doff_engine* engine, int64_t timeout_ms);
/* Frees the engine once closed and once all requests are released. */
void doff_engine_release(doff_engine* engine);
int doff_engine_stats(doff_engine* engine, doff_stats* out);

/* Returns the file's id. */
int doff_file_open(doff_engine* engine, const char* path, uint32_t flags, uint32_t direct, doff_file_info* out);
/* Allocates blocks up to size_bytes; never shrinks. Writes zeros where the file system has no fallocate. */
int doff_file_grow(doff_engine* engine, int32_t file, int64_t size_bytes);
/* Flushes data and the metadata needed to read it back. */
int doff_file_sync(doff_engine* engine, int32_t file);
/* -EBUSY while requests use the file. */
int doff_file_close(doff_engine* engine, int32_t file);

/* Room for the checksums of pieces of these lengths, which requests then name in the same order. In flight, a request
 * holds them, too. NULL: no memory. */
doff_sums* doff_sums_new(const doff_engine* engine, const int64_t* nbytes, uint32_t pieces);
/* How many checksums nbytes from the beginning of a piece on have. */
uint64_t doff_sums_count(const doff_engine* engine, int64_t nbytes);
void doff_sums_release(doff_sums* sums);
/* How many blocks there are. Of the first room of them: the checksum, and of how many bytes of the block it is (0:
 * never written), in turn. No write of these pieces may be in flight. */
uint64_t doff_sums_copy(const doff_sums* sums, uint32_t* pairs, uint64_t room);

/* One request over any number of segments. Waits up to timeout_ms for room in the queue: -ETIMEDOUT, nothing submitted.
 * sums: NULL, or what a write leaves its checksums in and a read compares with, as far as they were written: EBADMSG
 * when they differ. Only with DOFF_PADDED. Segments are pieces from the first on, whole but for the last. One that
 * skips checksums begins where the next of them does: at a chunk of its piece, or inside one, in which it ends then. */
int doff_submit(doff_engine* engine, int operation, const doff_segment* segments, uint32_t count, uint32_t flags,
                doff_sums* sums, int64_t timeout_ms, doff_request** out);
/* The same with one segment, which most requests have; NULL and errno when it fails. */
doff_request* doff_submit_one(doff_engine* engine, int operation, int32_t file, uint64_t address, int64_t nbytes,
                              int64_t offset, uint32_t flags, doff_sums* sums, int64_t timeout_ms);
int doff_request_done(doff_request* request);
/* 0: done well; 1: done badly, and doff_request_result says how; -ETIMEDOUT: still in flight. */
int doff_request_wait(doff_request* request, int64_t timeout_ms);
/* Any number of times once the request is done; -EBUSY before. With -ENOTRECOVERABLE the error is why. */
int doff_request_result(doff_request* request, doff_result* out);
/* 1: taken back before any of it was submitted (the result is ECANCELED); 0: too late. */
int doff_request_cancel(doff_request* request);
/* Moves what is still queued before everything that is not urgent. */
int doff_request_promote(doff_request* request);
/* The caller forgets the request; one in flight goes on and is freed when done. */
void doff_request_release(doff_request* request);

/* Anonymous memory on 2 MiB borders, advised for huge pages, not inherited by fork, not in core files, untouched.
 * *lock_errno: 0, or why
 * the best-effort mlock failed. */
int doff_map(uint64_t nbytes, int lock, uint64_t* address, int32_t* lock_errno);
int doff_unmap(uint64_t address, uint64_t nbytes);
/* The same without mlock, and spare addresses after it that have no memory yet. doff_unmap takes both together. */
int doff_map_with_spare(uint64_t nbytes, uint64_t spare, uint64_t* address);
/* Pages of the spare addresses get memory when they are touched, from open to close. */
int doff_spare_open(uint64_t address, uint64_t nbytes);
int doff_spare_close(uint64_t address, uint64_t nbytes);
/* The system takes back the memory of these pages; they read as zeros. */
int doff_forget(uint64_t address, uint64_t nbytes);

/* CRC-32C (Castagnoli) of each block of block_bytes; the last may be short. sums: ceil(nbytes / block_bytes) values. */
void doff_crc32c_blocks(uint64_t address, uint64_t nbytes, uint64_t block_bytes, uint32_t* sums);
/* The ways in which this CPU can do it, the one that is used first; NULL behind the last. */
const char* doff_crc32c_kind(uint32_t index);
/* The same in one of these ways (for tests). Returns 0 or -ENOTSUP. */
int doff_crc32c_blocks_by(const char* kind, uint64_t address, uint64_t nbytes, uint64_t block_bytes, uint32_t* sums);

/* neighbour.c: the memory of other processes of this host, read with process_vm_readv.
 *
 * A process shows its board to others. They must know its address and its token, 16 random bytes. The board lives as
 * long as somebody may read it, begins as zeros but for the token, and is written by the functions below alone. */
typedef struct {
    uint64_t number, address, nbytes;
} doff_offer;

typedef struct {
    uint8_t token[DOFF_TOKEN_BYTES];
    uint64_t closed; /* not 0: nothing more will be taken, and what was offered is withdrawn */
    doff_offer offers[DOFF_BOARD_SLOTS];
    uint64_t taken[DOFF_BOARD_SLOTS];
} doff_board;

typedef struct {
    int64_t pid;
    uint64_t board; /* its address in that process */
    uint8_t token[DOFF_TOKEN_BYTES];
} doff_neighbour;

/* Where yama restricts reading (ptrace_scope 1): lets every process of this user read this one's memory, or ends that.
 * -EINVAL: no yama here. */
int doff_neighbours_allow(int allow);

/* All of these: 0, or -EPERM: not allowed to read that process; -ESRCH: it is gone; -ESTALE: another process has its
 * number now, or another program runs in it; -EFAULT: this memory is not there; -ENOSYS: the kernel cannot do it;
 * -ESHUTDOWN: its board is closed. After an error, what target holds is undefined. */
int doff_neighbour_read(const doff_neighbour* from, uint64_t source, uint64_t target, uint64_t nbytes);
/* Waits for the offer of this number. -ETIMEDOUT: not offered yet; -EPROTO: the slot has a later offer already. */
int doff_neighbour_offer(const doff_neighbour* from, uint64_t number, int64_t timeout_ms, doff_offer* out);
/* Waits until that process has taken the transfer of this number, before its board was closed or not. -ETIMEDOUT as
 * above; -ESHUTDOWN: it never will. */
int doff_neighbour_taken(const doff_neighbour* by, uint64_t number, int64_t timeout_ms);

/* Numbers count from 1. One is used again after DOFF_BOARD_SLOTS others, when everybody has taken it. */
void doff_board_offer(doff_board* board, uint64_t number, uint64_t address, uint64_t nbytes);
void doff_board_taken(doff_board* board, uint64_t number);
void doff_board_close(doff_board* board);
/* cdef-end */

#endif
