// Copy many equally long byte ranges in one launch: block gather and scatter for tier transfers.
//
// A driver call per block costs microseconds; a launch costs them once. For single large ranges the copy engine is
// better, because it leaves the multiprocessors to the model. Ranges must not overlap. Either side may be pinned
// host memory.
// Grid:  x = parts of a range, y = range;  block: 256 threads, 16 bytes each
// Proven by copying the same ranges in numpy.

extern "C" __global__ void __launch_bounds__(256) copy_ranges(
    unsigned char* target,
    const unsigned char* source,
    const long long* target_offsets,  // (gridDim.y,) bytes, multiples of 16
    const long long* source_offsets,  // (gridDim.y,) bytes, multiples of 16
    long long range_bytes) {          // a multiple of 16
    uint4* to = reinterpret_cast<uint4*>(target + target_offsets[blockIdx.y]);
    const uint4* from = reinterpret_cast<const uint4*>(source + source_offsets[blockIdx.y]);
    const long long num_vectors = range_bytes / 16, stride = 1ll * gridDim.x * blockDim.x;
    for (long long i = 1ll * blockIdx.x * blockDim.x + threadIdx.x; i < num_vectors; i += stride) {
        to[i] = from[i];
    }
}
