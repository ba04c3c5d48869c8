/* CRC-32C (Castagnoli, reflected polynomial 0x82f63b78; RFC 3720 B.4) per block, by the CPU's instruction or a table.
 *
 * The instruction has a latency of three cycles and one may start in each, so blocks are summed side by side: four, as
 * many as a chunk of 1 MiB has, which is then read as fast as memory gives it. */
#include "doff_aio.h"

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

static void sum_table(const unsigned char* at, uint64_t nbytes, uint64_t block, uint32_t* sums) {
    for (; nbytes; sums++) {
        uint64_t n = nbytes < block ? nbytes : block;
        *sums = ~crc_table(~0u, at, n);
        at += n;
        nbytes -= n;
    }
}

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

CRC_TARGET static void sum_instruction(const unsigned char* at, uint64_t nbytes, uint64_t block, uint32_t* sums) {
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
    for (; nbytes; sums++) {
        uint64_t n = nbytes < block ? nbytes : block;
        *sums = ~crc_instruction(~0u, at, n);
        at += n;
        nbytes -= n;
    }
}
#endif

static void (*sum)(const unsigned char*, uint64_t, uint64_t, uint32_t*);
static const char* kind;

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
    sum = sum_table;
    kind = "table";
#ifdef CRC_TARGET
    if (have_instruction()) {
        sum = sum_instruction;
        kind = CRC_KIND;
    }
#endif
}

void doff_crc32c_blocks(uint64_t address, uint64_t nbytes, uint64_t block_bytes, uint32_t* sums) {
    pthread_once(&once, choose);
    sum((const unsigned char*)(uintptr_t)address, nbytes, block_bytes, sums);
}

void doff_crc32c_blocks_table(uint64_t address, uint64_t nbytes, uint64_t block_bytes, uint32_t* sums) {
    pthread_once(&once, choose);
    sum_table((const unsigned char*)(uintptr_t)address, nbytes, block_bytes, sums);
}

const char* doff_crc32c_kind(void) {
    pthread_once(&once, choose);
    return kind;
}
