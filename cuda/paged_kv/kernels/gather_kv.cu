// Copy one sequence's keys and values out of its blocks into contiguous, dequantised tensors.
//
// The prompt path uses it: attention over many new tokens is compute-bound and belongs to a tensor-core library,
// which wants contiguous operands; this copy costs 3 to 12 % of it (floors in DESIGN.md).
// Grid:  x = tokens / rows per block; y = head; z = 0 for K, 1 for V
// Block: 128 threads, one lane group per row
// Proven by reference.read_rows.
#include "kv_types.cuh"

extern "C" __global__ void __launch_bounds__(128) gather_kv(
    Query::Item* out,  // (2, num_kv_heads, num_kv_tokens, HEAD_DIM): K, then V
    unsigned char* arena,
    const int* block_table,  // covers num_kv_tokens
    int num_kv_tokens,
    int num_kv_heads,
    int tiles_per_block,
    int layer_tile) {
    const int is_value = blockIdx.z, head = blockIdx.y;
    const int token = blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES;
    const int first = threadIdx.x % LANES * VALUES_PER_LANE;
    if (token >= num_kv_tokens || first >= HEAD_DIM) return;

    const int tile_in_block = layer_tile + is_value * num_kv_heads + head;
    const TileRow source =
        tile_row(arena, block_table[token / BLOCK_SIZE], tiles_per_block, tile_in_block, token % BLOCK_SIZE);
    float values[VALUES_PER_LANE];
    Kv::unpack(load_packed<Kv>(source.items() + first), values);
    if (KV_IS_QUANTISED) {
        const float scale = source.scale();
#pragma unroll
        for (int i = 0; i < VALUES_PER_LANE; i++) values[i] *= scale;
    }
    const long long row = (1ll * is_value * num_kv_heads + head) * num_kv_tokens + token;
    store_values<Query>(out + row * HEAD_DIM + first, values);
}
