// Sum each block into 64 bits: every 8-byte word is mixed with its position, the results are added mod 2^64.
//
// Addition commutes, so the order in which threads finish does not matter. Sums must be zero before the launch.
// Grid:  x = parts of a block, y = block;  block: 256 threads
// Proven by reference.checksum.

__device__ unsigned long long mix(unsigned long long word) {  // the finaliser of splitmix64 (Steele et al. 2014)
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9ull;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBull;
    return word ^ (word >> 31);
}

extern "C" __global__ void __launch_bounds__(256) checksum_blocks(
    unsigned long long* sums,  // (gridDim.y,)
    const unsigned char* arena,
    const long long* block_ids,  // (gridDim.y,)
    long long block_bytes) {     // a multiple of 16
    const unsigned long long* words =
        reinterpret_cast<const unsigned long long*>(arena + block_ids[blockIdx.y] * block_bytes);
    const long long num_words = block_bytes / 8;
    unsigned long long sum = 0;
    const long long stride = 1ll * gridDim.x * blockDim.x;
    for (long long i = 1ll * blockIdx.x * blockDim.x + threadIdx.x; i < num_words; i += stride) {
        sum += mix(words[i] + (i + 1) * 0x9E3779B97F4A7C15ull);
    }
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (threadIdx.x % 32 == 0) atomicAdd(&sums[blockIdx.y], sum);
}
