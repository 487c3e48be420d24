// The type and address of one K or V value on the device: the only header with vendor-specific code.
//
// Set by the compiler's command line, so that every kernel is built for exactly one layout:
//   KV_DTYPE, QUERY_DTYPE  one of the TYPE_ numbers below
//   HEAD_DIM               values per row, a multiple of 8, at most 256
//   BLOCK_SIZE             tokens per block
//
// A row (one token of one head) is worked on by a *lane group*: LANES neighbouring threads of a warp, each
// with 8 values, so that a row is read as whole 8 to 32 byte vectors whatever the type. LANES is a power of two
// so that a row is reduced by xor shuffles; with a head size such as 80 the last lanes have nothing to do.
//
// ROCm: CuPy and hipcc know the same names for all that is used here, with two changes: fp8 is __hip_fp8_e4m3
// (on CDNA3 the "fnuz" variant, largest value 240) and masks of shuffles are 64 bits wide. Not compiled, not run.
#pragma once

#define TYPE_FP32 0
#define TYPE_BF16 1
#define TYPE_FP16 2
#define TYPE_FP8_E4M3 3
#define TYPE_INT8 4

#if KV_DTYPE == TYPE_FP8_E4M3
#include <cuda_fp8.h>
#endif
#if KV_DTYPE == TYPE_BF16 || QUERY_DTYPE == TYPE_BF16
#include <cuda_bf16.h>
#endif
#include <cuda_fp16.h>

#define FULL_WARP 0xffffffffu
#define VALUES_PER_LANE 8

constexpr int LANES = HEAD_DIM <= 8 ? 1 : HEAD_DIM <= 16 ? 2 : HEAD_DIM <= 32 ? 4 : HEAD_DIM <= 64 ? 8
    : HEAD_DIM <= 128 ? 16 : 32;
constexpr bool KV_IS_QUANTISED = KV_DTYPE == TYPE_FP8_E4M3 || KV_DTYPE == TYPE_INT8;
static_assert(HEAD_DIM % VALUES_PER_LANE == 0 && HEAD_DIM <= 256, "HEAD_DIM must be a multiple of 8, at most 256");

// ---- values: eight at a time, as stored and as floats ---------------------------------------------

template <int TYPE>
struct Stored;  // Item: one value in memory; Packed: eight of them, one or two vector loads

template <>
struct Stored<TYPE_FP32> {
    typedef float Item;
    struct Packed { float4 low, high; };
    static __device__ void unpack(const Packed& packed, float* values) {
        values[0] = packed.low.x, values[1] = packed.low.y, values[2] = packed.low.z, values[3] = packed.low.w;
        values[4] = packed.high.x, values[5] = packed.high.y, values[6] = packed.high.z, values[7] = packed.high.w;
    }
    static __device__ Item encode(float value) { return value; }
};

#if KV_DTYPE == TYPE_BF16 || QUERY_DTYPE == TYPE_BF16
template <>
struct Stored<TYPE_BF16> {
    typedef unsigned short Item;
    struct Packed { uint4 words; };
    static __device__ void unpack(const Packed& packed, float* values) {
        const unsigned words[4] = {packed.words.x, packed.words.y, packed.words.z, packed.words.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {  // widening bf16 is a shift: its bits are the upper half of a float
            const unsigned even = words[i] << 16, odd = words[i] & 0xffff0000u;
            values[2 * i] = *reinterpret_cast<const float*>(&even);
            values[2 * i + 1] = *reinterpret_cast<const float*>(&odd);
        }
    }
    static __device__ Item encode(float value) { return __bfloat16_as_ushort(__float2bfloat16_rn(value)); }
};
#endif

#if KV_DTYPE == TYPE_FP16 || QUERY_DTYPE == TYPE_FP16
template <>
struct Stored<TYPE_FP16> {
    typedef unsigned short Item;
    struct Packed { uint4 words; };
    static __device__ void unpack(const Packed& packed, float* values) {
        const unsigned words[4] = {packed.words.x, packed.words.y, packed.words.z, packed.words.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            values[2 * i] = __half2float(__ushort_as_half(static_cast<unsigned short>(words[i] & 0xffffu)));
            values[2 * i + 1] = __half2float(__ushort_as_half(static_cast<unsigned short>(words[i] >> 16)));
        }
    }
    static __device__ Item encode(float value) { return __half_as_ushort(__float2half_rn(value)); }
};
#endif

#if KV_DTYPE == TYPE_FP8_E4M3
template <>
struct Stored<TYPE_FP8_E4M3> {
    typedef unsigned char Item;
    struct Packed { uint2 words; };
    static __device__ void unpack(const Packed& packed, float* values) {
        const unsigned words[2] = {packed.words.x, packed.words.y};
#pragma unroll
        for (int i = 0; i < 4; i++) {  // two at a time: one instruction from sm_89 on
            const unsigned short pair = static_cast<unsigned short>(words[i / 2] >> (i % 2 * 16));
            const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3);
            values[2 * i] = __half2float(__ushort_as_half(halves.x));
            values[2 * i + 1] = __half2float(__ushort_as_half(halves.y));
        }
    }
    static __device__ Item encode(float value) { return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3); }
};
#endif

#if KV_DTYPE == TYPE_INT8
template <>
struct Stored<TYPE_INT8> {
    typedef signed char Item;
    struct Packed { uint2 words; };
    static __device__ void unpack(const Packed& packed, float* values) {
        const unsigned words[2] = {packed.words.x, packed.words.y};
#pragma unroll
        for (int i = 0; i < 8; i++) values[i] = static_cast<signed char>(words[i / 4] >> (i % 4 * 8));
    }
    static __device__ Item encode(float value) { return static_cast<signed char>(rintf(value)); }
};
#endif

typedef Stored<KV_DTYPE> Kv;
typedef Stored<QUERY_DTYPE> Query;

template <class Type>
__device__ typename Type::Packed load_packed(const typename Type::Item* source) {
    return *reinterpret_cast<const typename Type::Packed*>(source);
}

template <class Type>
__device__ void store_values(typename Type::Item* target, const float* values) {
    typename Type::Packed packed;
    typename Type::Item* items = reinterpret_cast<typename Type::Item*>(&packed);
#pragma unroll
    for (int i = 0; i < VALUES_PER_LANE; i++) items[i] = Type::encode(values[i]);
    *reinterpret_cast<typename Type::Packed*>(target) = packed;
}

// ---- places: see layout.py, which these lines repeat ----------------------------------------------------------

constexpr unsigned long long TILE_DATA_BYTES = 1ull * BLOCK_SIZE * HEAD_DIM * sizeof(Kv::Item);
constexpr float SCALE_UNIT = 1.0f / 256;  // of the fp16 scales
constexpr unsigned long long SCALE_BYTES = (BLOCK_SIZE * sizeof(unsigned short) + 15) / 16 * 16;
constexpr unsigned long long TILE_BYTES = TILE_DATA_BYTES + (KV_IS_QUANTISED ? SCALE_BYTES : 0);

struct TileRow {  // one token of one head, K or V
    unsigned char* tile;
    int offset;

    __device__ Kv::Item* items() const {
        return reinterpret_cast<Kv::Item*>(tile) + offset * HEAD_DIM;
    }
    __device__ unsigned short* stored_scale() const {  // fp16, in SCALE_UNIT
        return reinterpret_cast<unsigned short*>(tile + TILE_DATA_BYTES) + offset;
    }
    __device__ float scale() const { return __half2float(__ushort_as_half(*stored_scale())) * SCALE_UNIT; }
};

__device__ inline TileRow tile_row(
    unsigned char* arena, long long block_id, int tiles_per_block, int tile_in_block, int offset) {
    return TileRow{arena + (block_id * tiles_per_block + tile_in_block) * TILE_BYTES, offset};
}
