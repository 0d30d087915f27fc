// float32 to FP8 bytes: nearest even, saturating, a NaN is 0x7F whatever its sign, a negative zero stays
// 0x80.
//
// Which of the two element types is meant is known when a kernel starts: a branch around several vectors
// costs kernels that wait for memory nothing, and spares the compiler half of them.
#pragma once

#include "common/ptx.cuh"

namespace tejit {
namespace fp8 {

TEJIT_DEVICE float largest(bool e5m2) {
  return e5m2 ? 57344.0f : 448.0f;
}

// For architectures without the instruction. Rounding happens once, on the bits; below the smallest normal an
// addition of a power of two whose last place is the subnormal step rounds to that step.
TEJIT_DEVICE u32 encode_bits(float f, bool e5m2) {
  const u32 mantissa = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7, drop = 23 - mantissa;
  const u32 min_normal = (127 + 1 - bias) << 23, magic = (127 + 24 - bias - mantissa) << 23;
  const u32 max_bits = __float_as_uint(largest(e5m2));
  const u32 bits = __float_as_uint(f);
  const u32 magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fu;
  const u32 a = magnitude < max_bits ? magnitude : max_bits;
  const u32 normal = (a + ((1u << (drop - 1)) - 1) + ((a >> drop) & 1u) - ((127 - bias) << 23)) >> drop;
  const u32 subnormal = __float_as_uint(__fadd_rn(__uint_as_float(a), __uint_as_float(magic))) - magic;
  return (a < min_normal ? subnormal : normal) | ((bits >> 24) & 0x80u);
}

// An element type that is known to the compiler.
template <bool kE5M2>
struct Known {
  TEJIT_DEVICE constexpr operator bool() const { return kE5M2; }
};

// Two bytes, the first in the low one. Volatile keeps a branch on the type a branch: without, both
// conversions run, and the instruction that joins two conversions into a word is not used.
template <typename Type>
TEJIT_DEVICE u32 encode2(float first, float second, Type e5m2) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  u16 pair;
  if (e5m2) {
    asm volatile("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  } else {
    asm volatile("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  }
  return pair;
#else
  return encode_bits(first, e5m2) | (encode_bits(second, e5m2) << 8);
#endif
}

TEJIT_DEVICE u8 encode(float f, bool e5m2) {
  return static_cast<u8>(encode2(f, 0.0f, e5m2) & 0xffu);
}

TEJIT_DEVICE float scale_at(float scale, int) {
  return scale;
}

template <int kCount>
TEJIT_DEVICE float scale_at(const float (&scale)[kCount], int i) {
  return scale[i];
}

template <int kWords, typename Type>
TEJIT_DEVICE void encode_words(const float* f, Type e5m2, u32 (&word)[kWords]) {
#pragma unroll
  for (int w = 0; w < kWords; ++w, f += 4)
    word[w] = encode2(f[0], f[1], e5m2) | (encode2(f[2], f[3], e5m2) << 16);
}

template <typename T, typename Scale>
TEJIT_DEVICE void scale_vector(uint4 v, const Scale& scale, float (&f)[T::kPerVector]) {
  T::widen(v, f);
#pragma unroll
  for (int i = 0; i < T::kPerVector; ++i) f[i] = __fmul_rn(f[i], scale_at(scale, i));
}

// The bytes of a vector, times one scale or a scale for each element: a word of four for each four elements.
template <typename T, typename Scale, bool kE5M2>
TEJIT_DEVICE void encode_vector(uint4 v, const Scale& scale, Known<kE5M2> e5m2,
                                u32 (&word)[T::kPerVector / 4]) {
  float f[T::kPerVector];
  scale_vector<T>(v, scale, f);
  encode_words(f, e5m2, word);
}

template <typename T, typename Scale>
TEJIT_DEVICE void encode_vector(uint4 v, const Scale& scale, bool e5m2, u32 (&word)[T::kPerVector / 4]) {
  float f[T::kPerVector];
  scale_vector<T>(v, scale, f);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  if (e5m2) {
    encode_words(f, Known<true>(), word);
  } else {
    encode_words(f, Known<false>(), word);
  }
#else
  encode_words(f, e5m2, word);
#endif
}

}  // namespace fp8
}  // namespace tejit
