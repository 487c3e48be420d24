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
