/* Attention of new tokens over paged fp32 keys and values, one core, without gathering them first; and storing
 * keys and values.
 *
 * For each sequence and KV head: the scores of the query heads that share it against every visible position,
 * their softmax, then the weighted sum of the values, each tile read once per pass where it lies. A gathered
 * copy would be written and read again: three times the traffic of what is bound by memory.
 * Positions outside [first, length) are never read, so whatever they hold cannot matter.
 * Proven against `reference` by the contract tests of the backends.
 */
#include <math.h>
#include "vectors.h"

enum { GROUP = 4 /* query heads at a time: with values in registers, all sixteen are in use */ };

struct shape {
    long num_kv_heads, group, head_dim, block_size, tiles_per_block;
    float scale;
};

/* Turn scores into weights that sum to one. */
static void softmax(float *scores, long count) {
    float highest = scores[0];
    for (long i = 1; i < count; i++) highest = scores[i] > highest ? scores[i] : highest;
    long padded = (count + LANES - 1) / LANES * LANES;
    for (long i = count; i < padded; i++) scores[i] = -INFINITY;
    f8 total = {0};
    for (long i = 0; i < padded; i += LANES) {
        f8 weight = exponential(load(scores + i) - highest);
        store(scores + i, weight);
        if (i + LANES <= count) total += weight;
        else for (long lane = 0; i + lane < count; lane++) total[lane] += weight[lane];
    }
    float share = 1.0f / sum(total);
    for (long i = 0; i < padded; i += LANES) store(scores + i, load(scores + i) * share);
}

/* scores[head][position] of one tile's rows from..to-1. */
INLINE void score_tile(const int HEADS, const struct shape *s, const float *query, const float *tile, long from,
                       long to, float *scores, long stride) {
    for (long row = from; row < to; row++) {
        f8 sums[GROUP] = {0};
        for (long d = 0; d < s->head_dim; d += LANES) {
            f8 key = load(tile + row * s->head_dim + d);
            UNROLL for (int head = 0; head < HEADS; head++)
                sums[head] += key * load(query + head * s->head_dim + d);
        }
        UNROLL for (int head = 0; head < HEADS; head++)
            scores[head * stride + row] = sum(sums[head]) * s->scale;
    }
}

INLINE void add_tile(const int HEADS, const struct shape *s, const float *tile, long from, long to,
                     const float *weights, long stride, float *out) {
    for (long d = 0; d < s->head_dim; d += LANES) {
        f8 sums[GROUP];
        UNROLL for (int head = 0; head < HEADS; head++) sums[head] = load(out + head * s->head_dim + d);
        for (long row = from; row < to; row++) {
            f8 value = load(tile + row * s->head_dim + d);
            UNROLL for (int head = 0; head < HEADS; head++) sums[head] += value * weights[head * stride + row];
        }
        UNROLL for (int head = 0; head < HEADS; head++) store(out + head * s->head_dim + d, sums[head]);
    }
}

/* Up to GROUP query heads over one KV head. `keys` is its tile of block 0; scores: GROUP rows of `stride`. */
INLINE void attend(const int HEADS, const struct shape *s, const float *query, const float *keys,
                   const int64_t *blocks, long first, long length, float *scores, long stride, float *out) {
    long tile_size = s->block_size * s->head_dim, origin = first / s->block_size * s->block_size;
    const float *values = keys + s->num_kv_heads * tile_size;
    memset(out, 0, HEADS * s->head_dim * sizeof(float));
    for (int pass = 0; pass < 2; pass++) {
        for (long start = origin; start < length; start += s->block_size) {
            long offset = blocks[start / s->block_size] * s->tiles_per_block * tile_size;
            long from = first > start ? first - start : 0;
            long to = length - start < s->block_size ? length - start : s->block_size;
            float *at = scores + (start - first);
            if (pass == 0) score_tile(HEADS, s, query, keys + offset, from, to, at, stride);
            else add_tile(HEADS, s, values + offset, from, to, at, stride, out);
        }
        if (pass == 0)
            for (int head = 0; head < HEADS; head++) softmax(scores + head * stride, length - first);
    }
}

/* Store rows [token][head][head_dim], tokens `stride` floats apart. tiles, offsets: of each token, its first
 * head's tile in the layer's K (V) of block 0's numbering, and the row inside it. */
void homing_write_rows(const float *rows, long num_tokens, long stride, float *first_tile, const int64_t *tiles,
                       const int64_t *offsets, const struct shape *s) {
    long tile_size = s->block_size * s->head_dim;
    for (long token = 0; token < num_tokens; token++) {
        float *to = first_tile + tiles[token] * tile_size + offsets[token] * s->head_dim;
        for (long head = 0; head < s->num_kv_heads; head++)
            memcpy(to + head * tile_size, rows + token * stride + head * s->head_dim, s->head_dim * sizeof(float));
    }
}

/* query, out: [sequence][head][head_dim]; keys: the layer's first K tile of block 0.
 * blocks: [sequence][num_columns]; firsts, lengths: visible positions of each sequence.
 * scores: GROUP * stride floats, stride at least the longest visible length rounded up to LANES. */
void homing_paged_decode(const float *query, long num_sequences, const float *keys, const int64_t *blocks,
                         long num_columns, const int64_t *firsts, const int64_t *lengths,
                         const struct shape *s, float *scores, long stride, float *out) {
    for (long sequence = 0; sequence < num_sequences; sequence++)
        for (long kv_head = 0; kv_head < s->num_kv_heads; kv_head++)
            for (long head = 0; head < s->group; head += GROUP) {
                long row = (sequence * s->num_kv_heads + kv_head) * s->group + head;
                const float *from = query + row * s->head_dim, *tiles = keys + kv_head * s->block_size * s->head_dim;
                const int64_t *table = blocks + sequence * num_columns;
                float *to = out + row * s->head_dim;
                switch (s->group - head) {
                case 1: attend(1, s, from, tiles, table, firsts[sequence], lengths[sequence], scores, stride, to); break;
                case 2: attend(2, s, from, tiles, table, firsts[sequence], lengths[sequence], scores, stride, to); break;
                case 3: attend(3, s, from, tiles, table, firsts[sequence], lengths[sequence], scores, stride, to); break;
                default: attend(4, s, from, tiles, table, firsts[sequence], lengths[sequence], scores, stride, to);
                }
            }
}
