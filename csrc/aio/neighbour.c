/* The memory of other processes of this host (process_vm_readv, Linux 3.2): one copy, nothing is mapped, and huge pages
 * stay huge. It is how ranks on one host hand each other their bytes.
 *
 * Each process has a board in its own memory, which only it writes. There it says which bytes it offers and which
 * offers of others it has taken; the others read that. Offers have numbers from 1 on, the same on all ranks for the
 * same transfer, and a slot of the board is used again DOFF_BOARD_SLOTS transfers later.
 *
 * Every call reads the head of the other's board with the bytes that it wants, in one system call. The kernel looks the
 * process up once per call, so a token that is right says that the bytes come from the process that was meant, and not
 * from another one that has got its number since. */
#define _GNU_SOURCE
#include "doff_aio.h"

#include <errno.h>
#include <sched.h>
#include <stddef.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>

#define CALL_BYTES ((uint64_t)1 << 30) /* below the 0x7ffff000 bytes that Linux moves per call */
#define INTERRUPTS_MAX 1000
#define YIELDS 32
#define PAUSE_NS_MIN 20000
#define PAUSE_NS_MAX 1000000
#define PAUSE_PER_WAITED 16 /* a pause is at most this part of what has been waited */

struct head {
    uint8_t token[DOFF_TOKEN_BYTES];
    uint64_t closed;
};

_Static_assert(offsetof(doff_board, token) == offsetof(struct head, token), "the head of a board");
_Static_assert(offsetof(doff_board, closed) == offsetof(struct head, closed), "the head of a board");

static void* at(uint64_t address) { return (void*)(uintptr_t)address; }

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Reads the head and, of the rest, what one call gives: how many bytes, not 0 where some are wanted, or -errno. */
static int64_t read_some(const doff_neighbour* from, uint64_t source, void* target, uint64_t nbytes,
                         struct head* head) {
    uint64_t now = nbytes < CALL_BYTES ? nbytes : CALL_BYTES;
    const struct iovec here[2] = {{head, sizeof *head}, {target, now}};
    const struct iovec there[2] = {{at(from->board), sizeof *head}, {at(source), now}};
    unsigned parts = now ? 2 : 1;
    ssize_t got = -1;
    for (unsigned turn = 0; turn < INTERRUPTS_MAX; turn++) {
        got = process_vm_readv((pid_t)from->pid, here, parts, there, parts, 0);
        if (got >= 0 || errno != EINTR)
            break;
    }
    if (got < 0)
        return -errno;
    if ((size_t)got < sizeof *head)
        return -EFAULT;
    if (memcmp(head->token, from->token, DOFF_TOKEN_BYTES))
        return -ESTALE;
    int64_t moved = (int64_t)got - (int64_t)sizeof *head;
    return moved || !now ? moved : -EFAULT;
}

static int read_all(const doff_neighbour* from, uint64_t source, uint64_t target, uint64_t nbytes, struct head* head) {
    do {
        int64_t moved = read_some(from, source, at(target), nbytes, head);
        if (moved < 0)
            return (int)moved;
        source += (uint64_t)moved;
        target += (uint64_t)moved;
        nbytes -= (uint64_t)moved;
    } while (nbytes);
    return 0;
}

int doff_neighbours_allow(int allow) {
#ifdef PR_SET_PTRACER
    return prctl(PR_SET_PTRACER, allow ? PR_SET_PTRACER_ANY : 0UL, 0UL, 0UL, 0UL) ? -errno : 0;
#else
    (void)allow;
    return -ENOSYS;
#endif
}

int doff_neighbour_read(const doff_neighbour* from, uint64_t source, uint64_t target, uint64_t nbytes) {
    struct head head;
    int code = read_all(from, source, target, nbytes, &head);
    /* Who closes its board may use the memory for something else, so the head is read after the bytes. */
    if (!code && nbytes)
        code = read_all(from, 0, 0, 0, &head);
    return code ? code : head.closed ? -ESHUTDOWN : 0;
}

/* Yields first, because the others are usually about to come; then sleeps ever longer, but for a small part of what has
 * been waited. */
static void pause_after(unsigned turn, int64_t waited_ns) {
    if (turn < YIELDS) {
        sched_yield();
        return;
    }
    int64_t pause_ns = waited_ns / PAUSE_PER_WAITED;
    pause_ns = pause_ns < PAUSE_NS_MIN ? PAUSE_NS_MIN : pause_ns > PAUSE_NS_MAX ? PAUSE_NS_MAX : pause_ns;
    nanosleep(&(struct timespec){.tv_nsec = pause_ns}, NULL);
}

/* Until the number at this address of the other's memory is that of the transfer or a later one. */
static int await_number(const doff_neighbour* from, uint64_t source, uint64_t number, int64_t timeout_ms) {
    int64_t begin_ns = now_ns();
    for (unsigned turn = 0;; turn++) {
        struct head head;
        uint64_t found = 0;
        int code = read_all(from, source, (uint64_t)(uintptr_t)&found, sizeof found, &head);
        if (code)
            return code;
        /* pairs with the releases below: what was written before the number is read after it */
        if (__atomic_load_n(&found, __ATOMIC_ACQUIRE) >= number)
            return 0;
        if (head.closed)
            return -ESHUTDOWN;
        int64_t waited_ns = now_ns() - begin_ns;
        if (waited_ns >= timeout_ms * 1000000)
            return -ETIMEDOUT;
        pause_after(turn, waited_ns);
    }
}

static unsigned slot_of(uint64_t number) { return (unsigned)(number % DOFF_BOARD_SLOTS); }

void doff_board_offer(doff_board* board, uint64_t number, uint64_t address, uint64_t nbytes) {
    doff_offer* offer = &board->offers[slot_of(number)];
    offer->address = address;
    offer->nbytes = nbytes;
    __atomic_store_n(&offer->number, number, __ATOMIC_RELEASE);
}

void doff_board_taken(doff_board* board, uint64_t number) {
    __atomic_store_n(&board->taken[slot_of(number)], number, __ATOMIC_RELEASE);
}

/* Nothing that the caller writes next is seen without it. */
void doff_board_close(doff_board* board) {
    __atomic_store_n(&board->closed, (uint64_t)1, __ATOMIC_SEQ_CST);
    __sync_synchronize();
}

int doff_neighbour_offer(const doff_neighbour* from, uint64_t number, int64_t timeout_ms, doff_offer* out) {
    uint64_t slot = from->board + offsetof(doff_board, offers) + slot_of(number) * sizeof(doff_offer);
    int code = await_number(from, slot + offsetof(doff_offer, number), number, timeout_ms);
    if (!code)
        code = doff_neighbour_read(from, slot, (uint64_t)(uintptr_t)out, sizeof *out);
    if (!code && out->number != number)
        return -EPROTO;
    return code;
}

int doff_neighbour_taken(const doff_neighbour* by, uint64_t number, int64_t timeout_ms) {
    uint64_t slot = by->board + offsetof(doff_board, taken) + slot_of(number) * sizeof(uint64_t);
    return await_number(by, slot, number, timeout_ms);
}
