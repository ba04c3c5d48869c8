/* Wraps another backend and makes chunks fail, by a script with a seed. For tests: with it every error path runs
 * without a broken disk.
 *
 * Script: rules separated by ';', each of key=value words. A rule applies to the chunks it selects:
 *   op=read|write   only these            nth=K   only the K-th it sees (from 1)     after=K   all but the first K
 *   every=K         each K-th             permille=P  at random                      seed=S    of all random choices
 * and does all of:
 *   errno=N      completes with that error, nothing is transferred
 *   short=B      reports the first B bytes only (what is transferred ends at the next 4096)
 *   delay_ms=N   holds the completion back
 *   jitter_us=N  the same by a random time, which also changes the order
 *   gate=FD      holds the completion back until the descriptor can be read: a test opens it by a byte into its pipe
 *   flip=N       inverts bit N of the data read
 *   refuse=1     the backend answers EAGAIN once instead of accepting
 */
#define _GNU_SOURCE
#include "backend.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#define RULES_MAX 16
#define DIRECT_ALIGN 4096
#define LOOK_NS 1000000u /* between two looks at a gate */

struct rule {
    int op; /* -1: any, 0: read, 1: write */
    uint64_t nth, after, every, permille, seen;
    int64_t error, shorten, flip, gate;
    uint64_t delay_ns, jitter_ns;
    bool refuse;
};

struct fault_state {
    struct doff_backend* outer;
    struct doff_backend inner;
    struct rule rules[RULES_MAX];
    unsigned rule_count;
    uint64_t random;
    pthread_mutex_t mutex; /* guards held, stop */
    pthread_cond_t changed;
    pthread_t thread;
    struct doff_io* held;
    bool stop;
};

static uint64_t next_random(struct fault_state* state) { /* xorshift64* (Vigna 2016) */
    state->random ^= state->random >> 12;
    state->random ^= state->random << 25;
    state->random ^= state->random >> 27;
    return state->random * 0x2545f4914f6cdd1dull;
}

static int parse_word(struct fault_state* state, struct rule* rule, char* word) {
    char *value = strchr(word, '='), *end;
    if (!value)
        return -EINVAL;
    *value++ = 0;
    if (!strcmp(word, "op")) {
        rule->op = !strcmp(value, "write") ? 1 : !strcmp(value, "read") ? 0 : -2;
        return rule->op == -2 ? -EINVAL : 0;
    }
    int64_t number = strtoll(value, &end, 10);
    if (end == value || *end || number < 0)
        return -EINVAL;
    if (!strcmp(word, "nth"))
        rule->nth = (uint64_t)number;
    else if (!strcmp(word, "after"))
        rule->after = (uint64_t)number;
    else if (!strcmp(word, "every"))
        rule->every = (uint64_t)number;
    else if (!strcmp(word, "permille"))
        rule->permille = (uint64_t)number;
    else if (!strcmp(word, "seed"))
        state->random = (uint64_t)number * 2 + 1;
    else if (!strcmp(word, "errno"))
        rule->error = number;
    else if (!strcmp(word, "short"))
        rule->shorten = number;
    else if (!strcmp(word, "delay_ms"))
        rule->delay_ns = (uint64_t)number * 1000000u;
    else if (!strcmp(word, "jitter_us"))
        rule->jitter_ns = (uint64_t)number * 1000u;
    else if (!strcmp(word, "gate"))
        rule->gate = number;
    else if (!strcmp(word, "flip"))
        rule->flip = number;
    else if (!strcmp(word, "refuse"))
        rule->refuse = number != 0;
    else
        return -EINVAL;
    return 0;
}

static int parse(struct fault_state* state, char* script) {
    char *rest = script, *text;
    while ((text = strsep(&rest, ";"))) {
        char *words = text, *word;
        if (!*text)
            continue;
        if (state->rule_count == RULES_MAX)
            return -E2BIG;
        struct rule* rule = &state->rules[state->rule_count++];
        *rule = (struct rule){.op = -1, .shorten = -1, .flip = -1, .gate = -1};
        while ((word = strsep(&words, " "))) {
            int code = *word ? parse_word(state, rule, word) : 0;
            if (code)
                return code;
        }
    }
    return 0;
}

static bool selects(struct fault_state* state, struct rule* rule, const struct doff_io* io) {
    if (rule->op >= 0 && rule->op != io->write)
        return false;
    uint64_t number = ++rule->seen;
    if (rule->nth && number != rule->nth)
        return false;
    if (number <= rule->after)
        return false;
    if (rule->every && number % rule->every)
        return false;
    return !rule->permille || next_random(state) % 1000 < rule->permille;
}

static void hold(struct fault_state* state, struct doff_io* io) {
    io->fault.due_ns = doff_now_ns() + io->fault.delay_ns;
    pthread_mutex_lock(&state->mutex);
    io->fault.next = state->held;
    state->held = io;
    pthread_cond_signal(&state->changed);
    pthread_mutex_unlock(&state->mutex);
}

static bool is_shut(const struct doff_io* io) {
    struct pollfd gate = {.fd = io->fault.gate, .events = POLLIN};
    return io->fault.gate >= 0 && poll(&gate, 1, 0) <= 0;
}

/* Takes the chunk that is due first; NULL when none is due yet, and then *due_ns says when to look again. */
static struct doff_io* take_due(struct fault_state* state, uint64_t* due_ns) {
    struct doff_io** first = NULL;
    const uint64_t now_ns = doff_now_ns();
    for (struct doff_io** at = &state->held; *at; at = &(*at)->fault.next) {
        if ((*at)->fault.due_ns <= now_ns && is_shut(*at))
            (*at)->fault.due_ns = now_ns + LOOK_NS;
        if (!first || (*at)->fault.due_ns < (*first)->fault.due_ns)
            first = at;
    }
    *due_ns = first ? (*first)->fault.due_ns : 0;
    if (!first || *due_ns > now_ns)
        return NULL;
    struct doff_io* io = *first;
    *first = io->fault.next;
    return io;
}

static void* holder_main(void* argument) {
    struct fault_state* state = argument;
    uint64_t due_ns;
    pthread_mutex_lock(&state->mutex);
    while (!state->stop) {
        struct doff_io* io = take_due(state, &due_ns);
        if (io) {
            pthread_mutex_unlock(&state->mutex);
            struct doff_completion done = {io, io->fault.result};
            state->outer->complete(state->outer->context, &done, 1);
            pthread_mutex_lock(&state->mutex);
        } else if (due_ns) {
            doff_cond_wait_until(&state->changed, &state->mutex, due_ns);
        } else {
            pthread_cond_wait(&state->changed, &state->mutex);
        }
    }
    pthread_mutex_unlock(&state->mutex);
    return NULL;
}

static void inner_complete(void* context, const struct doff_completion* done, unsigned count) {
    struct fault_state* state = context;
    if (!done->io) {
        state->outer->complete(state->outer->context, done, 1);
        return;
    }
    for (unsigned i = 0; i < count; i++) {
        struct doff_io* io = done[i].io;
        int64_t result = done[i].result;
        io->len = io->fault.len;
        if (result > (int64_t)io->fault.report_max) {
            /* What goes beyond the report must be transferred again: spoil it, so that a test sees when it is not. */
            size_t surplus = (size_t)result - io->fault.report_max;
            if (!io->write)
                memset(io->buf + io->fault.report_max, 0xa5, surplus);
            result = (int64_t)io->fault.report_max;
        }
        if (io->fault.flip_bit >= 0 && !io->write && result > io->fault.flip_bit / 8)
            io->buf[io->fault.flip_bit / 8] ^= (char)(1 << io->fault.flip_bit % 8);
        if (io->fault.delay_ns || io->fault.gate >= 0) {
            io->fault.result = result;
            hold(state, io);
        } else {
            struct doff_completion report = {io, result};
            state->outer->complete(state->outer->context, &report, 1);
        }
    }
}

static int submit_one(struct fault_state* state, struct doff_io* io) {
    int64_t error = 0;
    bool refuse = false;
    io->fault.len = io->len;
    io->fault.delay_ns = 0;
    io->fault.flip_bit = -1;
    io->fault.gate = -1;
    size_t length = io->len;
    for (unsigned i = 0; i < state->rule_count; i++) {
        struct rule* rule = &state->rules[i];
        if (!selects(state, rule, io))
            continue;
        if (rule->error)
            error = rule->error;
        if (rule->shorten >= 0 && (size_t)rule->shorten < length)
            length = (size_t)rule->shorten;
        if (rule->gate >= 0)
            io->fault.gate = (int)rule->gate;
        if (rule->flip >= 0)
            io->fault.flip_bit = rule->flip;
        io->fault.delay_ns += rule->delay_ns + (rule->jitter_ns ? 1 + next_random(state) % rule->jitter_ns : 0);
        refuse |= rule->refuse;
    }
    if (refuse)
        return -EAGAIN;
    if (error || !length) {
        io->fault.result = -error;
        hold(state, io);
        return 1;
    }
    io->fault.report_max = length;
    length = (length + DIRECT_ALIGN - 1) & ~(size_t)(DIRECT_ALIGN - 1); /* or O_DIRECT would refuse it */
    if (length < io->len)
        io->len = length;
    int code = doff_backend_submit(&state->inner, &io, 1);
    if (code <= 0)
        io->len = io->fault.len; /* still ours; an accepted chunk may be gone by now */
    return code;
}

static int fault_submit(struct doff_backend* backend, struct doff_io** ios, unsigned count) {
    for (unsigned i = 0; i < count; i++) {
        int code = submit_one(backend->state, ios[i]);
        if (code <= 0)
            return i ? (int)i : code;
    }
    return (int)count;
}

static int fault_start(struct fault_state* state, unsigned in_flight_max, char* argument) {
    char* script = strchr(argument, ':');
    *script++ = 0;
    const struct doff_backend_table* table = doff_backend_find(argument);
    int code = table ? parse(state, script) : -EINVAL;
    if (!code)
        code = doff_backend_start(&state->inner, table, in_flight_max, NULL, inner_complete, state);
    if (code)
        return code;
    code = doff_thread_start(&state->thread, holder_main, state, "doff-fault");
    if (code)
        doff_backend_stop(&state->inner);
    return code;
}

/* argument: the inner backend's name, ':', the script. */
static int fault_init(struct doff_backend* backend, unsigned in_flight_max, const char* argument) {
    struct fault_state* state = calloc(1, sizeof *state);
    char* copy = strdup(argument);
    int code = state && copy ? 0 : -ENOMEM;
    if (!code) {
        state->outer = backend;
        state->random = 1;
        pthread_mutex_init(&state->mutex, NULL);
        doff_cond_init(&state->changed);
        code = fault_start(state, in_flight_max, copy);
        if (code) {
            pthread_cond_destroy(&state->changed);
            pthread_mutex_destroy(&state->mutex);
        }
    }
    free(copy);
    if (code)
        free(state);
    else
        backend->state = state;
    return code;
}

static void fault_fini(struct doff_backend* backend) {
    struct fault_state* state = backend->state;
    doff_backend_stop(&state->inner);
    pthread_mutex_lock(&state->mutex);
    state->stop = true;
    pthread_cond_signal(&state->changed);
    pthread_mutex_unlock(&state->mutex);
    pthread_join(state->thread, NULL);
    pthread_cond_destroy(&state->changed);
    pthread_mutex_destroy(&state->mutex);
    free(state);
}

const struct doff_backend_table doff_backend_fault = {"fault", fault_init, fault_submit, NULL, fault_fini};
