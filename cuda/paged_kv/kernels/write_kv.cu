// Store one step's keys and values in their blocks, quantising where the type asks for it.
//
// Grid:  x = rows / rows per block, where a row is (token, head) and heads vary fastest; y = 0 for K, 1 for V
// Block: 128 threads, one lane group per row
// Proven by reference.write_rows, byte for byte.
#include "kv_types.cuh"

constexpr float KV_MAX_MAGNITUDE = KV_DTYPE == TYPE_INT8 ? 127.0f : 448.0f;
constexpr float MIN_STORED_SCALE = 6.103515625e-5f, MAX_STORED_SCALE = 65504.0f;  // of codec.py

__device__ bool is_finite(float value) { return fabsf(value) <= 3.402823466e38f; }  // false for NaN and infinity

// Scale a row so that its largest finite value becomes the type's largest; NaN becomes 0, infinity saturates.
// Returns the scale as stored, fp16 in SCALE_UNIT.
__device__ __half quantise(float* values) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < VALUES_PER_LANE; i++) {
        largest = fmaxf(largest, is_finite(values[i]) ? fabsf(values[i]) : 0.0f);
    }
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, distance));
    }
    const float exact = largest / KV_MAX_MAGNITUDE / SCALE_UNIT;
    const __half stored = __float2half_rn(fminf(fmaxf(exact, MIN_STORED_SCALE), MAX_STORED_SCALE));
    const float scale = __half2float(stored) * SCALE_UNIT;
#pragma unroll
    for (int i = 0; i < VALUES_PER_LANE; i++) {
        const float scaled = fminf(fmaxf(values[i] / scale, -KV_MAX_MAGNITUDE), KV_MAX_MAGNITUDE);
        values[i] = values[i] == values[i] ? scaled : 0.0f;
    }
    return stored;
}

extern "C" __global__ void __launch_bounds__(128) write_kv(
    unsigned char* arena,
    const Query::Item* key,         // (num_tokens, num_kv_heads, HEAD_DIM), tokens key_stride apart
    const Query::Item* value,       // the same, value_stride apart
    const long long* slot_mapping,  // (num_tokens,)
    int num_tokens,
    int num_kv_heads,
    int tiles_per_block,
    int layer_tile,  // first tile of the layer in a block
    long long key_stride,
    long long value_stride) {
    const int is_value = blockIdx.y;
    const int row = blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES;
    const int first = threadIdx.x % LANES * VALUES_PER_LANE;
    const int token = row / num_kv_heads, head = row % num_kv_heads;
    const bool has_values = token < num_tokens && first < HEAD_DIM;  // no early return: all lanes must shuffle

    float values[VALUES_PER_LANE] = {};
    if (has_values) {
        const Query::Item* source = is_value ? value + token * value_stride : key + token * key_stride;
        Query::unpack(load_packed<Query>(source + head * HEAD_DIM + first), values);
    }
    __half scale = __float2half_rn(0.0f);
    if (KV_IS_QUANTISED) scale = quantise(values);
    if (!has_values) return;
    const long long slot = slot_mapping[token];
    const int tile_in_block = layer_tile + is_value * num_kv_heads + head;
    const TileRow target =
        tile_row(arena, slot / BLOCK_SIZE, tiles_per_block, tile_in_block, static_cast<int>(slot % BLOCK_SIZE));
    store_values<Kv>(target.items() + first, values);
    if (KV_IS_QUANTISED && first == 0) *target.stored_scale() = __half_as_ushort(scale);
}
