/* CRC-32C (Castagnoli, reflected polynomial 0x82f63b78; RFC 3720 B.4) per block: by carry-less multiplication
 * (crc32c_fold.h), by the CPU's instruction, or by a table.
 *
 * The instruction has a latency of three cycles and one may start in each, so blocks are summed side by side: four, as
 * many as a chunk of 1 MiB has. Multiplication is faster for one block; vectors of 512 bits sum it as fast as memory
 * gives it. */
#include "doff_aio.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

static uint32_t table[8][256];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static uint32_t crc_table(uint32_t crc, const unsigned char* at, uint64_t n) {
    for (; n >= 8; n -= 8, at += 8) {
        uint32_t low = crc ^ ((uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24);
        crc = table[7][low & 255] ^ table[6][low >> 8 & 255] ^ table[5][low >> 16 & 255] ^ table[4][low >> 24] ^
              table[3][at[4]] ^ table[2][at[5]] ^ table[1][at[6]] ^ table[0][at[7]];
    }
    while (n--)
        crc = crc >> 8 ^ table[0][(crc ^ *at++) & 255];
    return crc;
}

#if defined(__x86_64__)
#include <nmmintrin.h>
#define CRC_TARGET __attribute__((target("sse4.2")))
#define CRC_KIND "sse4.2"
#define CRC8(crc, value) ((uint32_t)_mm_crc32_u64(crc, value))
#define CRC1(crc, value) _mm_crc32_u8(crc, value)
static int have_instruction(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("sse4.2") != 0;
}
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <sys/auxv.h>
#define CRC_TARGET __attribute__((target("+crc")))
#define CRC_KIND "armv8 crc"
#define CRC8(crc, value) __crc32cd(crc, value)
#define CRC1(crc, value) __crc32cb(crc, value)
static int have_instruction(void) { return (getauxval(AT_HWCAP) >> 7 & 1) != 0; /* HWCAP_CRC32 */ }
#endif

static void sum_blocks(uint32_t (*crc_of)(uint32_t, const unsigned char*, uint64_t), const unsigned char* at,
                       uint64_t nbytes, uint64_t block, uint32_t* sums) {
    for (; nbytes; sums++) {
        uint64_t n = nbytes < block ? nbytes : block;
        *sums = ~crc_of(~0u, at, n);
        at += n;
        nbytes -= n;
    }
}

static void sum_table(const unsigned char* at, uint64_t nbytes, uint64_t block, uint32_t* sums) {
    sum_blocks(crc_table, at, nbytes, block, sums);
}

static int always(void) { return 1; }

#ifdef CRC_TARGET
static inline uint64_t load8(const unsigned char* at) {
    uint64_t value;
    memcpy(&value, at, 8);
    return value;
}

CRC_TARGET static uint32_t crc_instruction(uint32_t crc, const unsigned char* at, uint64_t n) {
    for (; n >= 8; n -= 8, at += 8)
        crc = CRC8(crc, load8(at));
    while (n--)
        crc = CRC1(crc, *at++);
    return crc;
}

/* Four blocks at a time, and the rest one by one. */
CRC_TARGET static void sum_side_by_side(uint32_t (*crc_of_run)(uint32_t, const unsigned char*, uint64_t),
                                        const unsigned char* at, uint64_t nbytes, uint64_t block, uint32_t* sums) {
    for (; block % 8 == 0 && nbytes / 4 >= block; at += 4 * block, nbytes -= 4 * block, sums += 4) {
        uint32_t a = ~0u, b = ~0u, c = ~0u, d = ~0u;
        for (uint64_t i = 0; i < block; i += 8) {
            a = CRC8(a, load8(at + i));
            b = CRC8(b, load8(at + block + i));
            c = CRC8(c, load8(at + 2 * block + i));
            d = CRC8(d, load8(at + 3 * block + i));
        }
        sums[0] = ~a, sums[1] = ~b, sums[2] = ~c, sums[3] = ~d;
    }
    sum_blocks(crc_of_run, at, nbytes, block, sums);
}

static void sum_instruction(const unsigned char* at, uint64_t nbytes, uint64_t block, uint32_t* sums) {
    sum_side_by_side(crc_instruction, at, nbytes, block, sums);
}
#endif

#if defined(__x86_64__)
#include "crc32c_fold.h"

static uint32_t crc_folded_128(uint32_t crc, const unsigned char* at, uint64_t n) {
    uint64_t whole = n & ~63ull;
    if (whole)
        crc = fold_128(crc, at, whole);
    return crc_instruction(crc, at + whole, n - whole);
}

static uint32_t crc_folded_512(uint32_t crc, const unsigned char* at, uint64_t n) {
    uint64_t whole = n & ~255ull;
    if (whole)
        crc = fold_512(crc, at, whole);
    return crc_folded_128(crc, at + whole, n - whole);
}

static void sum_folded_128(const unsigned char* at, uint64_t nbytes, uint64_t block, uint32_t* sums) {
    sum_side_by_side(crc_folded_128, at, nbytes, block, sums);
}

static void sum_folded_512(const unsigned char* at, uint64_t nbytes, uint64_t block, uint32_t* sums) {
    sum_blocks(crc_folded_512, at, nbytes, block, sums);
}

static int have_folds(void) {
    __builtin_cpu_init();
    return have_instruction() && __builtin_cpu_supports("pclmul");
}

static int have_wide_folds(void) {
    return have_folds() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("vpclmulqdq");
}
#endif

/* The fastest first. */
static const struct kind {
    const char* name;
    int (*available)(void);
    void (*sum)(const unsigned char*, uint64_t, uint64_t, uint32_t*);
} kinds[] = {
#if defined(__x86_64__)
    {"vpclmulqdq", have_wide_folds, sum_folded_512},
    {"pclmulqdq", have_folds, sum_folded_128},
#endif
#ifdef CRC_TARGET
    {CRC_KIND, have_instruction, sum_instruction},
#endif
    {"table", always, sum_table},
};
static const struct kind* chosen;

static void choose(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? crc >> 1 ^ 0x82f63b78u : crc >> 1;
        table[0][i] = crc;
    }
    for (uint32_t i = 0; i < 256; i++)
        for (int k = 1; k < 8; k++)
            table[k][i] = table[k - 1][i] >> 8 ^ table[0][table[k - 1][i] & 255];
#if defined(__x86_64__)
    prepare_folds();
#endif
    for (chosen = kinds; !chosen->available(); chosen++)
        ;
}

void doff_crc32c_blocks(uint64_t address, uint64_t nbytes, uint64_t block_bytes, uint32_t* sums) {
    pthread_once(&once, choose);
    chosen->sum((const unsigned char*)(uintptr_t)address, nbytes, block_bytes, sums);
}

const char* doff_crc32c_kind(uint32_t index) {
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (kinds[i].available() && index-- == 0)
            return kinds[i].name;
    return NULL;
}

int doff_crc32c_blocks_by(const char* kind, uint64_t address, uint64_t nbytes, uint64_t block_bytes, uint32_t* sums) {
    pthread_once(&once, choose);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (!strcmp(kind, kinds[i].name) && kinds[i].available()) {
            kinds[i].sum((const unsigned char*)(uintptr_t)address, nbytes, block_bytes, sums);
            return 0;
        }
    return -ENOTSUP;
}
