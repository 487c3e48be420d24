// Attention of single new tokens over their sequences' blocks ("flash decoding", Dao et al. 2023).
//
// A thread block takes HEADS query heads that share one KV head, so that each K and V row is read once for all of
// them, and one *split* of the context, so that few long sequences still fill the device:
//
//   context   [visible_begin ........................................ visible_end)
//   splits    |--- split 0 ---|--- split 1 ---|--- split 2 ---|-- 3 --|
//   a step    | UNROLL rows for each of the NUM_GROUPS lane groups |
//
// Each lane group keeps a running softmax over its own rows (maximum, sum of weights, weighted sum of V), rescaled
// once per step of UNROLL rows. At the end the groups of a block are merged through shared memory, and the splits
// of a sequence by merge_splits. Rows outside the split are never loaded: they may contain NaN.
//
// Grid:  x = split, y = query heads / HEADS, z = decode row;  block: THREADS
// Proven by reference.attend.
#include "kv_types.cuh"

constexpr int THREADS = 128;
constexpr int NUM_GROUPS = THREADS / LANES;
constexpr int UNROLL = 4;  // K and V of 4 rows in flight per lane group: 128 bytes per thread in bf16
constexpr float NOTHING = -3.0e38f;  // the score of a row that is not visible: finite, so no infinity to guard

__device__ inline int lane_group() { return threadIdx.x / LANES; }
__device__ inline int first_value() { return threadIdx.x % LANES * VALUES_PER_LANE; }

// What to subtract from scores before exp2f: the maximum, but 0 before any row was seen, so that nothing weighs 0.
__device__ inline float softmax_base(float maximum) { return maximum == NOTHING ? 0.0f : maximum; }

// One KV head of one sequence.
struct Context {
    unsigned char* arena;
    const int* block_table;
    int tiles_per_block, key_tile, value_tile;

    __device__ TileRow row(int token, int tile_in_block) const {
        return tile_row(arena, block_table[token / BLOCK_SIZE], tiles_per_block, tile_in_block, token % BLOCK_SIZE);
    }
};

struct SplitRange {
    int begin, end;
};

// Cut the visible part of a context into equal runs of whole blocks; a late split of a short context is empty.
__device__ SplitRange split_range(int context_len, int sliding_window, int split, int num_splits) {
    const int begin = sliding_window > 0 && context_len > sliding_window ? context_len - sliding_window : 0;
    const int num_blocks = (context_len - begin + BLOCK_SIZE - 1) / BLOCK_SIZE;
    const int tokens = (num_blocks + num_splits - 1) / num_splits * BLOCK_SIZE;
    const int first = min(begin + split * tokens, context_len);
    return SplitRange{first, min(first + tokens, context_len)};
}

// UNROLL rows of K and V as loaded, all loads issued before any is used.
struct Rows {
    Kv::Packed keys[UNROLL], values[UNROLL];
    float key_scales[UNROLL], value_scales[UNROLL];
    bool is_visible[UNROLL];
};

__device__ void load_rows(Rows& rows, const Context& context, int base, int end) {
#pragma unroll
    for (int step = 0; step < UNROLL; step++) {
        const int token = base + step * NUM_GROUPS + lane_group();
        rows.is_visible[step] = token < end;
        rows.keys[step] = rows.values[step] = Kv::Packed{};
        rows.key_scales[step] = rows.value_scales[step] = 1.0f;
        if (!rows.is_visible[step] || first_value() >= HEAD_DIM) continue;
        const TileRow key = context.row(token, context.key_tile), value = context.row(token, context.value_tile);
        rows.keys[step] = load_packed<Kv>(key.items() + first_value());
        rows.values[step] = load_packed<Kv>(value.items() + first_value());
        if (KV_IS_QUANTISED) rows.key_scales[step] = key.scale(), rows.value_scales[step] = value.scale();
    }
}

__device__ void score_rows(
    float (*scores)[HEADS], const float (*queries)[VALUES_PER_LANE], const Rows& rows) {
#pragma unroll
    for (int step = 0; step < UNROLL; step++) {
        float keys[VALUES_PER_LANE];
        Kv::unpack(rows.keys[step], keys);
#pragma unroll
        for (int head = 0; head < HEADS; head++) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < VALUES_PER_LANE; i++) sum += queries[head][i] * keys[i];
#pragma unroll
            for (int distance = LANES / 2; distance > 0; distance /= 2) {
                sum += __shfl_xor_sync(FULL_WARP, sum, distance);
            }
            scores[step][head] = rows.is_visible[step] ? sum * rows.key_scales[step] : NOTHING;
        }
    }
}

// One lane group's running softmax, for HEADS heads; every lane holds its 8 values of the weighted sum of V.
struct Softmax {
    float maximum[HEADS], weight_sum[HEADS], mixed[HEADS][VALUES_PER_LANE];
};

__device__ void clear(Softmax& state) {
#pragma unroll
    for (int head = 0; head < HEADS; head++) {
        state.maximum[head] = NOTHING;
        state.weight_sum[head] = 0.0f;
#pragma unroll
        for (int i = 0; i < VALUES_PER_LANE; i++) state.mixed[head][i] = 0.0f;
    }
}

// Turn one head's scores into weights, and rescale what was summed before if the maximum has grown.
__device__ void weigh(Softmax& state, float (*scores)[HEADS], int head) {
    float maximum = state.maximum[head];
#pragma unroll
    for (int step = 0; step < UNROLL; step++) maximum = fmaxf(maximum, scores[step][head]);
    const float base = softmax_base(maximum);
    const float correction = exp2f(state.maximum[head] - base);
    state.maximum[head] = maximum;
    state.weight_sum[head] *= correction;
#pragma unroll
    for (int i = 0; i < VALUES_PER_LANE; i++) state.mixed[head][i] *= correction;
#pragma unroll
    for (int step = 0; step < UNROLL; step++) {
        scores[step][head] = exp2f(scores[step][head] - base);
        state.weight_sum[head] += scores[step][head];
    }
}

__device__ void absorb(Softmax& state, float (*scores)[HEADS], const Rows& rows) {
#pragma unroll
    for (int head = 0; head < HEADS; head++) weigh(state, scores, head);
#pragma unroll
    for (int step = 0; step < UNROLL; step++) {
        float values[VALUES_PER_LANE];
        Kv::unpack(rows.values[step], values);
#pragma unroll
        for (int head = 0; head < HEADS; head++) {
            const float weight = scores[step][head] * rows.value_scales[step];
#pragma unroll
            for (int i = 0; i < VALUES_PER_LANE; i++) state.mixed[head][i] += weight * values[i];
        }
    }
}

// Where the lane groups of a block put their parts.
struct Shared {
    float maximum[NUM_GROUPS][HEADS], weight_sum[NUM_GROUPS][HEADS], mixed[NUM_GROUPS][HEADS][HEAD_DIM];
};
static_assert(sizeof(Shared) <= 48 << 10, "static shared memory ends at 48 KiB");

__device__ void share(Shared& shared, const Softmax& state) {
#pragma unroll
    for (int head = 0; head < HEADS; head++) {
        if (first_value() == 0) {
            shared.maximum[lane_group()][head] = state.maximum[head];
            shared.weight_sum[lane_group()][head] = state.weight_sum[head];
        }
        if (first_value() >= HEAD_DIM) continue;
#pragma unroll
        for (int i = 0; i < VALUES_PER_LANE; i++) {
            shared.mixed[lane_group()][head][first_value() + i] = state.mixed[head][i];
        }
    }
}

struct Merged {
    float maximum, weight_sum, mixed;
};

__device__ Merged merge_groups(const Shared& shared, int head, int column) {
    Merged merged = {NOTHING, 0.0f, 0.0f};
    for (int group = 0; group < NUM_GROUPS; group++) {
        merged.maximum = fmaxf(merged.maximum, shared.maximum[group][head]);
    }
    for (int group = 0; group < NUM_GROUPS; group++) {
        const float weight = exp2f(shared.maximum[group][head] - softmax_base(merged.maximum));
        merged.mixed += weight * shared.mixed[group][head][column];
        merged.weight_sum += weight * shared.weight_sum[group][head];
    }
    return merged;
}

extern "C" __global__ void __launch_bounds__(THREADS) paged_decode(
    Query::Item* out,      // (num_tokens, num_heads, HEAD_DIM), written when there is one split
    float* partial_mixed,  // (rows, num_heads, num_splits, HEAD_DIM), written otherwise
    float* partial_stats,  // (rows, num_heads, num_splits, 2): maximum, weight sum
    const Query::Item* query,  // (num_tokens, num_heads, HEAD_DIM), tokens query_stride apart
    unsigned char* arena,
    const int* token_rows,    // (rows,): token of each decode row in query and out
    const int* block_tables,  // (rows, table_width)
    const int* context_lens,  // (rows,): tokens visible to the row's token, itself included
    int table_width,
    int num_kv_heads,
    int tiles_per_block,
    int layer_tile,
    int sliding_window,  // 0: none
    float score_scale,   // softmax scale times log2(e): weights are powers of two
    long long query_stride) {
    const int row = blockIdx.z, split = blockIdx.x, num_splits = gridDim.x;
    const int num_heads = gridDim.y * HEADS, first_head = blockIdx.y * HEADS;
    const int key_tile = layer_tile + first_head / (num_heads / num_kv_heads);
    const Context context = {
        arena, block_tables + 1ll * row * table_width, tiles_per_block, key_tile, key_tile + num_kv_heads};
    const SplitRange range = split_range(context_lens[row], sliding_window, split, num_splits);

    float queries[HEADS][VALUES_PER_LANE] = {};
    if (first_value() < HEAD_DIM) {
        const Query::Item* source = query + token_rows[row] * query_stride + first_value();
#pragma unroll
        for (int head = 0; head < HEADS; head++) {
            Query::unpack(load_packed<Query>(source + (first_head + head) * HEAD_DIM), queries[head]);
#pragma unroll
            for (int i = 0; i < VALUES_PER_LANE; i++) queries[head][i] *= score_scale;
        }
    }
    Softmax state;
    clear(state);
    // The trip count is the same for all threads, because every lane of a warp must take part in its shuffles.
    for (int base = range.begin; base < range.end; base += NUM_GROUPS * UNROLL) {
        Rows rows;
        load_rows(rows, context, base, range.end);
        float scores[UNROLL][HEADS];
        score_rows(scores, queries, rows);
        absorb(state, scores, rows);
    }
    __shared__ Shared shared;
    share(shared, state);
    __syncthreads();
    for (int index = threadIdx.x; index < HEADS * HEAD_DIM; index += THREADS) {
        const int head = index / HEAD_DIM, column = index % HEAD_DIM;
        const Merged merged = merge_groups(shared, head, column);
        if (num_splits == 1) {
            const long long target = 1ll * token_rows[row] * num_heads + first_head + head;
            out[target * HEAD_DIM + column] = Query::encode(merged.mixed / merged.weight_sum);
        } else {
            const long long part = (1ll * row * num_heads + first_head + head) * num_splits + split;
            partial_mixed[part * HEAD_DIM + column] = merged.mixed;
            if (column > 0) continue;
            partial_stats[2 * part] = merged.maximum;
            partial_stats[2 * part + 1] = merged.weight_sum;
        }
    }
}

// Merge the splits of each row and head. Grid: x = query head, y = decode row; block: at least HEAD_DIM threads.
extern "C" __global__ void merge_splits(
    Query::Item* out, const float* partial_mixed, const float* partial_stats, const int* token_rows, int num_splits) {
    const int head = blockIdx.x, num_heads = gridDim.x, row = blockIdx.y, column = threadIdx.x;
    if (column >= HEAD_DIM) return;
    const long long first_part = (1ll * row * num_heads + head) * num_splits;
    float maximum = NOTHING;  // never stays so: the token itself is visible in some split
    for (int split = 0; split < num_splits; split++) {
        maximum = fmaxf(maximum, partial_stats[2 * (first_part + split)]);
    }
    float mixed = 0.0f, weight_sum = 0.0f;
    for (int split = 0; split < num_splits; split++) {
        const long long part = first_part + split;
        const float weight = exp2f(partial_stats[2 * part] - maximum);
        mixed += weight * partial_mixed[part * HEAD_DIM + column];
        weight_sum += weight * partial_stats[2 * part + 1];
    }
    const long long target = 1ll * token_rows[row] * num_heads + head;
    out[target * HEAD_DIM + column] = Query::encode(mixed / weight_sum);
}
