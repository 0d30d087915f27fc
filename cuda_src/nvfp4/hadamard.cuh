// The random Hadamard transform of sixteen numbers: y = x . diag(signs) . H, H = Sylvester's matrix over 4.
#pragma once

#include "common/ptx.cuh"

namespace tejit {
namespace nvfp4 {

// The sign of number r under a mask, as a bit pattern to exclusive-or with.
TEJIT_DEVICE u32 flipped(u32 mask, int r, u32 sign_bits) {
  return (mask >> r) & 1u ? sign_bits : 0u;
}

// Number r under the mask that tuned kernels know: no instruction, but another sign in the first butterflies.
template <u32 kMask>
TEJIT_DEVICE float signed_by(float f, int r) {
  return (kMask >> r) & 1u ? -f : f;
}

// Butterflies of strides 1, 2, ... below kEnd.
template <int kEnd>
TEJIT_DEVICE void butterflies(float (&f)[16]) {
#pragma unroll
  for (int stride = 1; stride < kEnd; stride *= 2) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if ((i & stride) == 0) {
        const float a = f[i], b = f[i + stride];
        f[i] = __fadd_rn(a, b);
        f[i + stride] = __fadd_rn(a, -b);
      }
    }
  }
}

// The transform, rounded: two numbers a word.
TEJIT_DEVICE void transform(float (&f)[16], u32 (&w)[8]) {
  butterflies<16>(f);
#pragma unroll
  for (int i = 0; i < 8; ++i) w[i] = bf16x2_of(__fmul_rn(f[2 * i], 0.25f), __fmul_rn(f[2 * i + 1], 0.25f));
}

// The largest magnitude of 4 y before rounding, and of m; NaN left out. Of a + b and a - b the larger one is
// |a| + |b|; dividing by 4 and rounding keep the order, so once at the end is enough for them.
TEJIT_DEVICE float transform_amax(float m, float (&f)[16]) {
  butterflies<8>(f);
#pragma unroll
  for (int i = 0; i < 8; ++i) m = fmaxf(m, __fadd_rn(fabsf(f[i]), fabsf(f[i + 8])));
  return m;
}

TEJIT_DEVICE float finish_transform_amax(float m) {
  return __uint_as_float(bf16x2_of(0.0f, __fmul_rn(m, 0.25f)));
}

}  // namespace nvfp4
}  // namespace tejit
