/* Vectors of eight fp32 numbers, for our C kernels: extensions of GCC and Clang, so one source for AVX2 and NEON. */
#ifndef HOMING_VECTORS_H
#define HOMING_VECTORS_H

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

typedef float f8 __attribute__((vector_size(32)));
typedef float f4 __attribute__((vector_size(16)));
typedef int32_t i8 __attribute__((vector_size(32)));

enum { LANES = 8 };

INLINE f8 load(const float *from) { f8 value; memcpy(&value, from, sizeof value); return value; }
INLINE void store(float *to, f8 value) { memcpy(to, &value, sizeof value); }
INLINE f8 choose(i8 mask, f8 yes, f8 no) { return (f8)((mask & (i8)yes) | (~mask & (i8)no)); }

INLINE float sum(f8 v) {
    f4 half = __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
    half += __builtin_shufflevector(half, half, 2, 3, 0, 1);
    return half[0] + half[1];
}

/* Transpose eight vectors: interleave neighbours, then pairs, then halves; each line is one instruction. */
INLINE void transpose(f8 v[8]) {
    f8 w[8];
    UNROLL for (int i = 0; i < 8; i += 2) {
        w[i] = __builtin_shufflevector(v[i], v[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        w[i + 1] = __builtin_shufflevector(v[i], v[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    f8 x[8];
    UNROLL for (int i = 0; i < 8; i += 4) UNROLL for (int j = 0; j < 2; j++) {
        x[i + 2 * j] = __builtin_shufflevector(w[i + j], w[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
        x[i + 2 * j + 1] = __builtin_shufflevector(w[i + j], w[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        v[i] = __builtin_shufflevector(x[i], x[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        v[i + 4] = __builtin_shufflevector(x[i], x[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

/* e^x to about one unit in the last place, x held within -87..88: 2^n * e^r with |r| <= ln(2) / 2, e^r as a
 * polynomial (Cephes). */
INLINE f8 exponential(f8 x) {
    x = choose(x < -87.0f, (f8){} - 87.0f, x);
    x = choose(x > 88.0f, (f8){} + 88.0f, x);
    f8 rounder = (f8){} + 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    f8 n = (x * 1.44269504f + rounder) - rounder;
    f8 r = x - n * 0.693359375f + n * 2.12194440e-4f;
    f8 p = ((((r * 1.9875691500e-4f + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r
            + 1.6666665459e-1f) * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (f8)((__builtin_convertvector(n, i8) + 127) << 23);
}

#endif
