// float32 to FP8 bytes: nearest even, saturating, a NaN is 0x7F whatever its sign, a negative zero stays
// 0x80.
#pragma once

#include "common/ptx.cuh"

namespace tejit {
namespace fp8 {

enum Format { kE4M3 = 0, kE5M2 = 1 };

template <Format kFormat>
struct Traits;

template <>
struct Traits<kE4M3> {
  static constexpr float kMax = 448.0f;
  static constexpr u32 kMaxBits = 0x43e00000u;
  static constexpr int kMantissa = 3;
  static constexpr int kBias = 7;
};

template <>
struct Traits<kE5M2> {
  static constexpr float kMax = 57344.0f;
  static constexpr u32 kMaxBits = 0x47600000u;
  static constexpr int kMantissa = 2;
  static constexpr int kBias = 15;
};

// For architectures without the instruction. Rounding happens once, on the bits; below the smallest normal an
// addition of a power of two whose last place is the subnormal step rounds to that step.
template <Format kFormat>
TEJIT_DEVICE u32 encode_bits(float f) {
  using F = Traits<kFormat>;
  constexpr int kDrop = 23 - F::kMantissa;
  constexpr u32 kMinNormal = static_cast<u32>(127 + 1 - F::kBias) << 23;
  constexpr u32 kMagic = static_cast<u32>(127 + 24 - F::kBias - F::kMantissa) << 23;
  const u32 bits = __float_as_uint(f);
  const u32 magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fu;
  const u32 a = magnitude < F::kMaxBits ? magnitude : F::kMaxBits;
  const u32 normal =
      (a + ((1u << (kDrop - 1)) - 1) + ((a >> kDrop) & 1u) - (static_cast<u32>(127 - F::kBias) << 23)) >>
      kDrop;
  const u32 subnormal = __float_as_uint(__fadd_rn(__uint_as_float(a), __uint_as_float(kMagic))) - kMagic;
  return (a < kMinNormal ? subnormal : normal) | ((bits >> 24) & 0x80u);
}

// Two bytes, the first in the low one.
template <Format kFormat>
TEJIT_DEVICE u32 encode2(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  u16 pair;
  if constexpr (kFormat == kE4M3) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  }
  return pair;
#else
  return encode_bits<kFormat>(first) | (encode_bits<kFormat>(second) << 8);
#endif
}

template <Format kFormat>
TEJIT_DEVICE u8 encode(float f) {
  return static_cast<u8>(encode2<kFormat>(f, 0.0f) & 0xffu);
}

// The bytes of one 16-byte vector of T, scaled: one word of four for float32, two words of four else.
template <typename T, Format kFormat>
TEJIT_DEVICE void encode_vector(uint4 v, float scale, u32 (&word)[T::kPerVector / 4]) {
  float f[T::kPerVector];
  T::widen(v, f);
#pragma unroll
  for (int w = 0; w < T::kPerVector / 4; ++w) {
    const float* q = f + 4 * w;
    word[w] = encode2<kFormat>(__fmul_rn(q[0], scale), __fmul_rn(q[1], scale)) |
              (encode2<kFormat>(__fmul_rn(q[2], scale), __fmul_rn(q[3], scale)) << 16);
  }
}

// The same with a scale for each element.
template <typename T, Format kFormat>
TEJIT_DEVICE void encode_vector(uint4 v, const float (&scale)[T::kPerVector],
                                u32 (&word)[T::kPerVector / 4]) {
  float f[T::kPerVector];
  T::widen(v, f);
#pragma unroll
  for (int w = 0; w < T::kPerVector; w += 4) {
    word[w / 4] =
        encode2<kFormat>(__fmul_rn(f[w], scale[w]), __fmul_rn(f[w + 1], scale[w + 1])) |
        (encode2<kFormat>(__fmul_rn(f[w + 2], scale[w + 2]), __fmul_rn(f[w + 3], scale[w + 3])) << 16);
  }
}

}  // namespace fp8
}  // namespace tejit
