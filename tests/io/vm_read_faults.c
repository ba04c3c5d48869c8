/* Makes process_vm_readv short, interrupted or empty. For tests: loaded in front of libc (LD_PRELOAD). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/uio.h>

static unsigned long shortest;    /* not 0: bytes that a call moves at most of its second range */
static long interrupts, headless; /* calls that fail with EINTR; calls that move a part of the first range only */
static long calls;

void vm_read_faults(unsigned long at_most, long interrupted, long without_head) {
    shortest = at_most;
    interrupts = interrupted;
    headless = without_head;
    calls = 0;
}

long vm_read_calls(void) { return calls; }

ssize_t process_vm_readv(pid_t pid, const struct iovec* here, unsigned long here_count, const struct iovec* there,
                         unsigned long there_count, unsigned long flags) {
    __typeof__(&process_vm_readv) next = (__typeof__(&process_vm_readv))dlsym(RTLD_NEXT, "process_vm_readv");
    calls++;
    if (interrupts > 0) {
        interrupts--;
        errno = EINTR;
        return -1;
    }
    struct iovec mine[2] = {here[0], here[here_count - 1]}, theirs[2] = {there[0], there[there_count - 1]};
    if (headless > 0) {
        headless--;
        mine[0].iov_len = theirs[0].iov_len = 5;
        return next(pid, mine, 1, theirs, 1, flags);
    }
    if (shortest && here_count == 2 && mine[1].iov_len > shortest)
        mine[1].iov_len = theirs[1].iov_len = shortest;
    return next(pid, mine, here_count, theirs, there_count, flags);
}
