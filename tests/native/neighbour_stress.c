/* Exercises neighbour.c without Python, for the sanitizers (run_sanitizers.sh): two processes that hand each other
 * bytes a few thousand times, each from two threads; then memory that is not there, a wrong token, a closed board, a
 * limit that passes, and a process that is killed while it is read.
 *
 * usage: neighbour_stress. Exit status 0 when all data was right. */
#define _GNU_SOURCE
#include "doff_aio.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define TRANSFERS 2000
#define BYTES 100003
#define LANES 2
#define RUN_S 120

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, strerror(errno));                      \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* One board and one buffer for each of LANES threads of a process. */
struct side {
    doff_board boards[LANES];
    char given[LANES][BYTES], got[LANES][BYTES];
};

struct lane {
    struct side* side;
    int number, which;
    doff_neighbour other;
};

static uint64_t address_of(const void* memory) { return (uint64_t)(uintptr_t)memory; }

static doff_neighbour neighbour(pid_t pid, const doff_board* board, const uint8_t* token) {
    doff_neighbour other = {.pid = pid, .board = address_of(board)};
    memcpy(other.token, token, sizeof other.token);
    return other;
}

static char pattern(int which, uint64_t number) { return (char)(which * 101 + (int)(number % 97)); }

static void* exchange(void* argument) {
    struct lane* lane = argument;
    doff_board* board = &lane->side->boards[lane->number];
    char *given = lane->side->given[lane->number], *got = lane->side->got[lane->number];
    for (uint64_t number = 1; number <= TRANSFERS; number++) {
        doff_offer offer;
        memset(given, pattern(lane->which, number), BYTES);
        doff_board_offer(board, number, address_of(given), BYTES);
        CHECK(doff_neighbour_offer(&lane->other, number, 30000, &offer) == 0);
        CHECK(offer.nbytes == BYTES);
        CHECK(doff_neighbour_read(&lane->other, offer.address, address_of(got), offer.nbytes) == 0);
        char wanted = pattern(!lane->which, number);
        CHECK(got[0] == wanted && !memcmp(got, got + 1, BYTES - 1));
        doff_board_taken(board, number);
        CHECK(doff_neighbour_taken(&lane->other, number, 30000) == 0);
    }
    return NULL;
}

static void exchange_all(struct side* side, int which, pid_t pid) {
    pthread_t threads[LANES];
    struct lane lanes[LANES];
    for (int i = 0; i < LANES; i++) {
        /* both processes have the same addresses and tokens: one was forked from the other */
        lanes[i] = (struct lane){side, i, which, neighbour(pid, &side->boards[i], side->boards[i].token)};
        CHECK(!pthread_create(&threads[i], NULL, exchange, &lanes[i]));
    }
    for (int i = 0; i < LANES; i++)
        pthread_join(threads[i], NULL);
}

static void hand_over(void) {
    struct side* side = calloc(1, sizeof *side);
    CHECK(side);
    for (int i = 0; i < LANES; i++)
        memset(side->boards[i].token, 'a' + i, DOFF_TOKEN_BYTES);
    pid_t parent = getpid(), child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(RUN_S);
        doff_neighbours_allow(1);
        exchange_all(side, 1, parent);
        /* stays until the parent has seen what was taken */
        doff_neighbour other = neighbour(parent, &side->boards[0], side->boards[0].token);
        doff_offer none;
        CHECK(doff_neighbour_offer(&other, TRANSFERS + 1, 60000, &none) == -ESHUTDOWN);
        exit(0);
    }
    exchange_all(side, 0, child);
    doff_board_close(&side->boards[0]);
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    free(side);
}

static void refuse(void) {
    doff_board* board = calloc(1, sizeof *board);
    CHECK(board);
    memset(board->token, 7, sizeof board->token);
    doff_neighbour self = neighbour(getpid(), board, board->token), wrong = self;
    char target[64], *pages = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(pages != MAP_FAILED && !munmap(pages + 4096, 4096));
    memset(pages, 3, 4096);
    CHECK(doff_neighbour_read(&self, address_of(pages), address_of(target), sizeof target) == 0 && target[63] == 3);
    CHECK(doff_neighbour_read(&self, 0, 0, 0) == 0);
    CHECK(doff_neighbour_read(&self, address_of(pages) + 4064, address_of(target), sizeof target) == -EFAULT);
    CHECK(doff_neighbour_read(&self, address_of(pages) + 4096, address_of(target), sizeof target) == -EFAULT);
    wrong.token[15] ^= 1;
    CHECK(doff_neighbour_read(&wrong, address_of(pages), address_of(target), sizeof target) == -ESTALE);
    wrong.board = address_of(pages) + 4096;
    CHECK(doff_neighbour_read(&wrong, address_of(pages), address_of(target), sizeof target) == -EFAULT);
    doff_offer offer;
    CHECK(doff_neighbour_offer(&self, 1, 5, &offer) == -ETIMEDOUT);
    CHECK(doff_neighbour_taken(&self, 1, 5) == -ETIMEDOUT);
    doff_board_offer(board, 1 + DOFF_BOARD_SLOTS, 4096, 1);
    CHECK(doff_neighbour_offer(&self, 1, 5, &offer) == -EPROTO);
    doff_board_close(board);
    CHECK(doff_neighbour_offer(&self, 2, 30000, &offer) == -ESHUTDOWN);
    CHECK(doff_neighbour_offer(&self, 1 + DOFF_BOARD_SLOTS, 5, &offer) == -ESHUTDOWN);
    CHECK(doff_neighbour_read(&self, address_of(pages), address_of(target), sizeof target) == -ESHUTDOWN);
    munmap(pages, 4096);
    free(board);
}

static void read_until_killed(void) {
    size_t nbytes = (size_t)64 << 20;
    doff_board* board = calloc(1, sizeof *board);
    char *source = malloc(nbytes), *target = malloc(nbytes);
    CHECK(board && source && target);
    memset(source, 5, nbytes);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(RUN_S);
        doff_neighbours_allow(1);
        for (;;)
            pause();
    }
    doff_neighbour other = neighbour(child, board, board->token);
    int code = doff_neighbour_read(&other, address_of(source), address_of(target), nbytes), whole = 0;
    CHECK(code == 0);
    for (int turn = 0; code == 0; turn++) {
        if (turn == 3)
            CHECK(!kill(child, SIGKILL));
        memset(target, 0, nbytes);
        code = doff_neighbour_read(&other, address_of(source), address_of(target), nbytes);
        if (code == 0) {
            CHECK(target[0] == 5 && !memcmp(target, target + 1, nbytes - 1));
            whole++;
        }
    }
    CHECK(code == -ESRCH || code == -EFAULT);
    CHECK(waitpid(child, NULL, 0) == child);
    CHECK(doff_neighbour_read(&other, address_of(source), address_of(target), 1) == -ESRCH);
    printf("%d transfers of %d bytes in %d threads; %d of %zu bytes until the end\n", TRANSFERS, BYTES, LANES, whole,
           nbytes);
    free(board);
    free(source);
    free(target);
}

int main(void) {
    alarm(RUN_S);
    doff_neighbours_allow(1); /* -EINVAL without yama */
    hand_over();
    refuse();
    read_until_killed();
    return 0;
}
