/* Products by bf16 weights, and the small steps between them, on one core.
 *
 * The weights are read in place, row-major as checkpoints store them (in a mapped file), widened to fp32
 * in registers, which is exact, and multiplied and summed in fp32. Two ways, chosen by the number of rows:
 *
 *   few rows   Each weight is used once, so memory is the limit: dot products along the weight's row, in the
 *              order of memory. A 32-bit word holds two bf16: shifting gives the even one, masking the odd
 *              one, two operations for sixteen weights; the input is split into even and odd to match.
 *   many rows  Arithmetic is the limit: sixteen outputs' weights become a panel [in][16], and six input rows
 *              by sixteen outputs are summed in registers, as in every BLAS (Goto and van de Geijn, 2008).
 *
 * Proven against torch in test_cpu_kernels.
 */
#include <math.h>
#include "vectors.h"

typedef uint32_t u8 __attribute__((vector_size(32)));

enum {
    PAIRS = 16,           /* weights in one vector of words */
    FEW_ROWS = 24,        /* above it, making panels pays */
    GROUP_ROWS = 8,       /* rows of dot products at a time: as many sums as hide the latency of an addition */
    BLOCK_IN = 768,       /* inputs at a time: eight rows of them stay in a 32 KiB first-level cache */
    BLOCK_OUT = 16,       /* weight rows that stay in it while several groups use them */
    TILE_ROWS = 6,        /* with PANEL: twelve of sixteen registers are sums */
    PANEL = 16,
    LINE = 32,            /* weights in a cache line */
    AHEAD_BYTES = 1024,   /* to prefetch: the hardware stops at every 4 KiB page */
};

INLINE f8 even_of(u8 pairs) { return (f8)(pairs << 16); }
INLINE f8 odd_of(u8 pairs) { return (f8)(pairs & 0xffff0000u); }
INLINE u8 load_pairs(const uint16_t *from) { u8 pairs; memcpy(&pairs, from, sizeof pairs); return pairs; }

/* One output of ROWS input rows, over inputs begin..end-1. STEPS vectors of weights a turn; CHAINS independent
 * sums per row, so that few rows do not wait for each other's additions. */
INLINE void dots(const int ROWS, const int STEPS, const int CHAINS, const float *rows, long stride,
                 const uint16_t *weight, long begin, long end, float *out, long out_stride, int is_first) {
    f8 sums[8] = {0};
    for (long k = begin; k < end; k += PAIRS * STEPS) {
        for (int line = 0; line < (STEPS + 1) / 2; line++)
            __builtin_prefetch((const char *)(weight + k) + AHEAD_BYTES + 64 * line);
        UNROLL for (int step = 0; step < STEPS; step++) {
            u8 pairs = load_pairs(weight + k + step * PAIRS);
            f8 even = even_of(pairs), odd = odd_of(pairs);
            UNROLL for (int row = 0; row < ROWS; row++) {
                const float *input = rows + row * stride + k + step * PAIRS;
                sums[row * CHAINS + (2 * step) % CHAINS] += even * load(input);
                sums[row * CHAINS + (2 * step + 1) % CHAINS] += odd * load(input + LANES);
            }
        }
    }
    UNROLL for (int row = 0; row < ROWS; row++) {
        f8 total = sums[row * CHAINS];
        UNROLL for (int chain = 1; chain < CHAINS; chain++) total += sums[row * CHAINS + chain];
        float *to = out + row * out_stride;
        *to = is_first ? sum(total) : *to + sum(total);
    }
}

INLINE void group(const int ROWS, const int STEPS, const int CHAINS, const float *rows, long num_in,
                  const uint16_t *weight, long num_out, float *out, long out_stride) {
    for (long begin = 0; begin < num_in; begin += BLOCK_IN) {
        long end = begin + BLOCK_IN < num_in ? begin + BLOCK_IN : num_in;
        long whole = begin + (end - begin) / (PAIRS * STEPS) * (PAIRS * STEPS);
        for (long n = 0; n < num_out; n++) {
            const uint16_t *row = weight + n * num_in;
            dots(ROWS, STEPS, CHAINS, rows, num_in, row, begin, whole, out + n, out_stride, begin == 0);
            if (whole < end)
                dots(ROWS, 1, CHAINS > 1 ? 2 : 1, rows, num_in, row, whole, end, out + n, out_stride, 0);
        }
    }
}

static void few_rows(const float *rows, long num_rows, long num_in, const uint16_t *weight, long num_out,
                     float *out, long out_stride) {
    switch (num_rows) {
    case 1: group(1, 4, 8, rows, num_in, weight, num_out, out, out_stride); break;
    case 2: group(2, 2, 4, rows, num_in, weight, num_out, out, out_stride); break;
    case 3: group(3, 1, 2, rows, num_in, weight, num_out, out, out_stride); break;
    case 4: group(4, 1, 2, rows, num_in, weight, num_out, out, out_stride); break;
    case 5: group(5, 1, 1, rows, num_in, weight, num_out, out, out_stride); break;
    case 6: group(6, 1, 1, rows, num_in, weight, num_out, out, out_stride); break;
    case 7: group(7, 1, 1, rows, num_in, weight, num_out, out, out_stride); break;
    default: group(8, 1, 1, rows, num_in, weight, num_out, out, out_stride);
    }
}

/* Per sixteen inputs: the eight at even places, then the eight at odd ones. */
static void split_pairs(const float *rows, long count, float *out) {
    for (long start = 0; start < count; start += PAIRS)
        for (int lane = 0; lane < LANES; lane++) {
            out[start + lane] = rows[start + 2 * lane];
            out[start + LANES + lane] = rows[start + 2 * lane + 1];
        }
}

/* Widen `width` (at most PANEL) weight rows to panel [in][PANEL]; missing ones repeat the last. */
static void make_panel(const uint16_t *weight, long width, long num_in, float *panel) {
    for (long side = 0; side < PANEL; side += LANES)
        for (long k = 0; k < num_in; k += PAIRS) {
            f8 even[LANES], odd[LANES];
            UNROLL for (int n = 0; n < LANES; n++) {
                long row = side + n < width ? side + n : width - 1;
                u8 pairs = load_pairs(weight + row * num_in + k);
                even[n] = even_of(pairs);
                odd[n] = odd_of(pairs);
            }
            transpose(even);
            transpose(odd);
            UNROLL for (int i = 0; i < LANES; i++) {
                store(panel + (k + 2 * i) * PANEL + side, even[i]);
                store(panel + (k + 2 * i + 1) * PANEL + side, odd[i]);
            }
        }
}

INLINE void tile(const int ROWS, const float *rows, long num_in, const float *panel, long width, float *out,
                 long out_stride) {
    f8 left[TILE_ROWS] = {0}, right[TILE_ROWS] = {0};
    for (long k = 0; k < num_in; k++) {
        f8 first = load(panel + k * PANEL), second = load(panel + k * PANEL + LANES);
        UNROLL for (int row = 0; row < ROWS; row++) {
            left[row] += first * rows[row * num_in + k];
            right[row] += second * rows[row * num_in + k];
        }
    }
    UNROLL for (int row = 0; row < ROWS; row++) {
        float line[PANEL];
        store(line, left[row]);
        store(line + LANES, right[row]);
        if (width == PANEL) memcpy(out + row * out_stride, line, sizeof line);
        else memcpy(out + row * out_stride, line, width * sizeof(float));
    }
}

/* Meanwhile fetches the weights of the next panel, a share beside each tile. */
static void many_rows(const float *rows, long num_rows, long num_in, const float *panel, long width,
                      const uint16_t *next, float *out, long out_stride) {
    long row = 0, share = width * num_in / (num_rows / TILE_ROWS);
    for (; row + TILE_ROWS <= num_rows; row += TILE_ROWS, next += share) {
        for (long ahead = 0; ahead < share; ahead += LINE) __builtin_prefetch(next + ahead, 0, 2);
        tile(TILE_ROWS, rows + row * num_in, num_in, panel, width, out + row * out_stride, out_stride);
    }
    rows += row * num_in;
    out += row * out_stride;
    switch (num_rows - row) {
    case 5: tile(5, rows, num_in, panel, width, out, out_stride); break;
    case 4: tile(4, rows, num_in, panel, width, out, out_stride); break;
    case 3: tile(3, rows, num_in, panel, width, out, out_stride); break;
    case 2: tile(2, rows, num_in, panel, width, out, out_stride); break;
    case 1: tile(1, rows, num_in, panel, width, out, out_stride);
    }
}

/* out[row][n] = rows[row] . weight[n]; num_in is a multiple of PAIRS.
 * scratch: num_in * max(FEW_ROWS, PANEL) floats. */
void homing_linear_bf16(const float *rows, long num_rows, long num_in, const uint16_t *weight, long num_out,
                        float *out, long out_stride, float *scratch) {
    int is_few = num_rows <= FEW_ROWS;
    if (is_few) split_pairs(rows, num_rows * num_in, scratch);
    long block = num_rows <= GROUP_ROWS ? num_out : is_few ? BLOCK_OUT : PANEL;
    for (long n = 0; n < num_out; n += block) {
        const uint16_t *from = weight + n * num_in;
        long width = num_out - n < block ? num_out - n : block;
        if (!is_few) {
            make_panel(from, width, num_in, scratch);
            many_rows(rows, num_rows, num_in, scratch, width, from + width * num_in, out + n, out_stride);
            continue;
        }
        for (long row = 0; row < num_rows; row += GROUP_ROWS) {
            long left = num_rows - row < GROUP_ROWS ? num_rows - row : GROUP_ROWS;
            few_rows(scratch + row * num_in, left, num_in, from, width, out + row * out_stride + n, out_stride);
        }
    }
}

/* out = rows / sqrt(mean(rows^2) + eps) * weight; num_in is a multiple of LANES. */
void homing_rms_norm(const float *rows, long num_rows, long num_in, const float *weight, float eps, float *out) {
    for (; num_rows > 0; num_rows--, rows += num_in, out += num_in) {
        f8 squares = {0}, more = {0};
        long k = 0;
        for (; k + 2 * LANES <= num_in; k += 2 * LANES) {
            squares += load(rows + k) * load(rows + k);
            more += load(rows + k + LANES) * load(rows + k + LANES);
        }
        if (k < num_in) squares += load(rows + k) * load(rows + k);
        float scale = 1.0f / sqrtf(sum(squares + more) / num_in + eps);
        for (k = 0; k < num_in; k += LANES) store(out + k, load(rows + k) * scale * load(weight + k));
    }
}

/* out = silu(gate) * up; rows hold [gate, up], num_inner each, a multiple of LANES. */
void homing_gated(const float *rows, long num_rows, long num_inner, float *out) {
    for (; num_rows > 0; num_rows--, rows += 2 * num_inner, out += num_inner)
        for (long k = 0; k < num_inner; k += LANES) {
            f8 gate = load(rows + k);
            store(out + k, gate / (1.0f + exponential(-gate)) * load(rows + num_inner + k));
        }
}

/* Turn heads in place: element i with element i + half, by the angles of the token. heads: num_heads of
 * 2 * half floats per token, tokens `stride` floats apart; cosines and sines: [token][2 * half], the first half of
 * the sines negated; half is a multiple of LANES. */
void homing_rotate(float *heads, long num_tokens, long stride, long num_heads, long half, const float *cosines,
                   const float *sines) {
    for (; num_tokens > 0; num_tokens--, heads += stride, cosines += 2 * half, sines += 2 * half)
        for (float *head = heads; head < heads + num_heads * 2 * half; head += 2 * half)
            for (long i = 0; i < half; i += LANES) {
                f8 low = load(head + i), high = load(head + half + i);
                store(head + i, low * load(cosines + i) + high * load(sines + i));
                store(head + half + i, high * load(cosines + half + i) + low * load(sines + half + i));
            }
}
