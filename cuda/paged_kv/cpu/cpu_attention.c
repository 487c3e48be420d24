/* Attention of new tokens over paged fp32 keys and values, one core, without gathering them first; and storing
 * keys and values.
 *
 * For each sequence and KV head: the scores of the query heads that share it against every visible position,
 * their softmax, then the weighted sum of the values, each tile read once per pass, in place. A gathered
 * copy would be written and read again: three times the traffic of a computation that memory limits.
 * Several new tokens of one sequence are limited by arithmetic instead: six rows (a query head of a token each) by
 * sixteen positions, then by sixteen values, are summed in registers. A row's result has the same bits however its
 * prompt was cut: each of its sums runs over its own positions in their order.
 * Positions outside [first, length) are never read, so their content cannot matter.
 * Proven against `reference` by the contract tests of the backends.
 */
#include <math.h>
#include "vectors.h"

enum {
    GROUP = 4,       /* query heads at a time: with values in registers, all sixteen are in use */
    TILE_ROWS = 6,   /* with PANEL: twelve of sixteen registers are sums */
    PANEL = 16,
    BLOCK_ROWS = 24, /* rows that use keys or values while these are in the first-level cache */
};

struct shape {
    long num_kv_heads, group, head_dim, block_size, tiles_per_block;
    float scale;
};

/* Turn scores into weights that sum to one. */
static void softmax(float *scores, long count) {
    long padded = (count + LANES - 1) / LANES * LANES;
    for (long i = count; i < padded; i++) scores[i] = -INFINITY;
    f8 most = load(scores);
    for (long i = LANES; i < padded; i += LANES) most = choose(load(scores + i) > most, load(scores + i), most);
    float highest = most[0];
    for (int lane = 1; lane < LANES; lane++) highest = most[lane] > highest ? most[lane] : highest;
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

/* One sequence's several new tokens, of one KV head. The window of all: positions first..length-1. */
struct prompt {
    const struct shape *shape;
    const float *keys, *values; /* the KV head's tiles of block 0 */
    const int64_t *blocks;
    long first, length, window, stride; /* stride: floats in a row of scores */
    float *panels;                      /* keys as [position / PANEL][head_dim][PANEL] */
};

INLINE const float *row_at(const struct prompt *p, const float *tiles, long position) {
    const struct shape *s = p->shape;
    long tile_size = s->block_size * s->head_dim;
    return tiles + p->blocks[position / s->block_size] * s->tiles_per_block * tile_size
        + position % s->block_size * s->head_dim;
}

/* Positions past the end repeat the last one. */
static void make_panels(const struct prompt *p) {
    long head_dim = p->shape->head_dim;
    float *panel = p->panels;
    for (long start = p->first; start < p->length; start += PANEL, panel += head_dim * PANEL)
        for (long side = 0; side < PANEL; side += LANES) {
            const float *rows[LANES];
            for (int lane = 0; lane < LANES; lane++) {
                long position = start + side + lane;
                rows[lane] = row_at(p, p->keys, position < p->length ? position : p->length - 1);
            }
            for (long d = 0; d < head_dim; d += LANES) {
                f8 keys[LANES];
                UNROLL for (int lane = 0; lane < LANES; lane++) keys[lane] = load(rows[lane] + d);
                transpose(keys);
                UNROLL for (int i = 0; i < LANES; i++) store(panel + (d + i) * PANEL + side, keys[i]);
            }
        }
}

/* out[row][0..PANEL-1] = (is_first ? 0 : out) + the sum over k of rows[row][k] * panel[k]. */
INLINE void multiply(const float *rows, long stride, const float *panel, long panel_stride, long count, float *out,
                     long out_stride, int is_first) {
    f8 left[TILE_ROWS] = {0}, right[TILE_ROWS] = {0};
    if (!is_first)
        UNROLL for (int row = 0; row < TILE_ROWS; row++) {
            left[row] = load(out + row * out_stride);
            right[row] = load(out + row * out_stride + LANES);
        }
    for (long k = 0; k < count; k++, panel += panel_stride) {
        f8 first = load(panel), second = load(panel + LANES);
        UNROLL for (int row = 0; row < TILE_ROWS; row++) {
            left[row] += first * rows[row * stride + k];
            right[row] += second * rows[row * stride + k];
        }
    }
    UNROLL for (int row = 0; row < TILE_ROWS; row++) {
        store(out + row * out_stride, left[row]);
        store(out + row * out_stride + LANES, right[row]);
    }
}

/* BLOCK_ROWS rows of query, the first of them for `row` of the sequence, over positions first..end-1, which the
 * last of them sees. Rows past `num_rows` are zero and their results unused. */
static void attend_rows(const struct prompt *p, const float *query, long row, long num_rows, long num_tokens,
                        float *scores, float *out) {
    const struct shape *s = p->shape;
    long last = row + BLOCK_ROWS < num_rows ? row + BLOCK_ROWS : num_rows;
    long before = p->length - num_tokens, end = before + (last - 1) / s->group + 1;
    for (long start = p->first; start < end; start += PANEL)
        for (int i = 0; i < BLOCK_ROWS; i += TILE_ROWS)
            multiply(query + i * s->head_dim, s->head_dim, p->panels + (start - p->first) * s->head_dim, PANEL,
                     s->head_dim, scores + i * p->stride + start - p->first, p->stride, 1);
    for (long r = row; r < last; r++) {
        float *weights = scores + (r - row) * p->stride;
        long to = before + r / s->group + 1, from = to - p->window > p->first ? to - p->window : p->first;
        softmax(weights + from - p->first, to - from);
        memset(weights, 0, (from - p->first) * sizeof(float));
        memset(weights + to - p->first, 0, (end - to) * sizeof(float));
    }
    for (long start = p->first, next; start < end; start = next) {
        next = (start / s->block_size + 1) * s->block_size;
        if (next > end) next = end;
        const float *values = row_at(p, p->values, start);
        for (int i = 0; i < BLOCK_ROWS; i += TILE_ROWS)
            for (long d = 0; d < s->head_dim; d += PANEL)
                multiply(scores + i * p->stride + start - p->first, p->stride, values + d, s->head_dim, next - start,
                         out + i * s->head_dim + d, s->head_dim, start == p->first);
    }
}

/* query: [token][head][head_dim], tokens query_stride floats apart; out: the same, packed; head_dim is a multiple of
 * PANEL. keys, blocks: as above, of this sequence. length: its context, new tokens included; each sees `window`
 * positions. scratch, with `positions` = those visible to any token, rounded up to PANEL:
 * positions * head_dim + BLOCK_ROWS * (positions + LANES + 2 * head_dim) floats. */
void homing_paged_prefill(const float *query, long num_tokens, long query_stride, const float *keys,
                          const int64_t *blocks, long length, long window, const struct shape *s, float *scratch,
                          float *out) {
    long head_dim = s->head_dim, tile_size = s->block_size * head_dim, oldest = length - num_tokens + 1;
    long first = oldest > window ? oldest - window : 0, positions = (length - first + PANEL - 1) / PANEL * PANEL;
    float *panels = scratch, *rows = panels + positions * head_dim, *sums = rows + BLOCK_ROWS * head_dim;
    float *scores = sums + BLOCK_ROWS * head_dim;
    for (long kv_head = 0; kv_head < s->num_kv_heads; kv_head++) {
        const float *head_keys = keys + kv_head * tile_size;
        struct prompt p = {s, head_keys, head_keys + s->num_kv_heads * tile_size, blocks, first, length, window,
                           positions + LANES, panels};
        make_panels(&p);
        for (long row = 0; row < num_tokens * s->group; row += BLOCK_ROWS) {
            long count = num_tokens * s->group - row < BLOCK_ROWS ? num_tokens * s->group - row : BLOCK_ROWS;
            memset(rows, 0, BLOCK_ROWS * head_dim * sizeof(float));
            for (long i = 0; i < count; i++) {
                long token = (row + i) / s->group, head = kv_head * s->group + (row + i) % s->group;
                const float *from = query + token * query_stride + head * head_dim;
                for (long d = 0; d < head_dim; d += LANES) store(rows + i * head_dim + d, load(from + d) * s->scale);
            }
            attend_rows(&p, rows, row, num_tokens * s->group, num_tokens, scores, sums);
            for (long i = 0; i < count; i++) {
                long token = (row + i) / s->group, head = kv_head * s->group + (row + i) % s->group;
                memcpy(out + (token * s->num_kv_heads * s->group + head) * head_dim, sums + i * head_dim,
                       head_dim * sizeof(float));
            }
        }
    }
}
