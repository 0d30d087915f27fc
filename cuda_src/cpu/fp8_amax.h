// max |x| of a tensor, and the scale that follows from it.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#include "elements.h"
#include "parallel.h"
#include "simd.h"

namespace tejit::cpu {

// A pass over a flat tensor goes block by block. 64 Ki elements keep a core busy for 5 to 10 us, more than
// waking it costs, and are long enough for the prefetchers.
constexpr int64_t kBlock = 64 * 1024;

namespace detail {

// |x| compared as integers: the order of the bits is the order of the values, and no floating-point mode
// enters.
template <bool wide>
TEJIT_NOINLINE inline uint32_t amax_bits(const uint8_t* x, int64_t n, uint32_t infinity) {
  constexpr int64_t size = wide ? 4 : 2, step = simd::kBytes / size;
  constexpr int accumulators = 4;  // one would wait for itself
  const simd::Int magnitude = wide ? simd::fill32(0x7FFFFFFFu) : simd::fill16(0x7FFF);
  const simd::Int limit = wide ? simd::fill32(infinity) : simd::fill16(static_cast<int>(infinity));
  const auto join = [&](simd::Int acc, simd::Int v) {
    v = v & magnitude;
    return wide ? simd::max_upto32(acc, v, limit) : simd::max_upto16(acc, v, limit);
  };
  simd::Int acc[accumulators];
  for (auto& a : acc) a = simd::fill32(0);
  int64_t done = 0;
  for (; done + accumulators * step <= n; done += accumulators * step) {
    for (int j = 0; j < accumulators; ++j) acc[j] = join(acc[j], simd::load(x + j * simd::kBytes));
    x += accumulators * simd::kBytes;
  }
  for (; done < n; done += step) {
    alignas(64) uint8_t padded[simd::kBytes] = {};
    const int64_t left = n - done < step ? n - done : step;
    std::memcpy(padded, x, static_cast<size_t>(left * size));
    acc[0] = join(acc[0], simd::load(padded));
    x += simd::kBytes;
  }
  for (int j = 1; j < accumulators; ++j) acc[0] = join(acc[0], acc[j]);
  uint8_t lanes[simd::kBytes];
  simd::store(lanes, acc[0]);
  uint32_t result = 0;
  for (int64_t i = 0; i < step; ++i) {
    const uint32_t bits = element_bits(lanes, wide ? In::f32 : In::bf16, i);
    result = bits > result ? bits : result;
  }
  return result;
}

}  // namespace detail

// max |x| of n elements as float32, 0 for none. A NaN does not enter, inf does, subnormals count.
inline float fp8_amax(const void* x, In in, int64_t n) {
  const auto* bytes = static_cast<const uint8_t*>(x);
  const int64_t size = bytes_of(in);
  std::atomic<uint32_t> result{0};
  parallel_for((n + kBlock - 1) / kBlock, 1, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kBlock, last = end * kBlock < n ? end * kBlock : n;
    const auto* part = bytes + first * size;
    const uint32_t mine = in == In::f32 ? detail::amax_bits<true>(part, last - first, infinity_bits(in))
                                        : detail::amax_bits<false>(part, last - first, infinity_bits(in));
    uint32_t seen = result.load(std::memory_order_relaxed);
    while (mine > seen && !result.compare_exchange_weak(seen, mine, std::memory_order_relaxed)) {
    }
  });
  return to_float(in, result.load(std::memory_order_relaxed));
}

// The factor that maps amax to fp8_max: 1 where amax (after eps) is 0, inf or NaN, `limit` where the quotient
// overflows, then rounded down to a power of two if asked. Both rules need DefaultFloatModes.
inline float scale_rule(float amax, float fp8_max, bool pow2, float eps, float limit) {
  if (amax < eps) amax = eps;
  float scale = 1.0f;
  if (amax > 0.0f && bits_of(amax) < infinity_bits(In::f32)) {
    scale = fp8_max / amax;
    if (bits_of(scale) == infinity_bits(In::f32)) scale = limit;
  }
  return pow2 ? float_of(bits_of(scale) & 0xFF800000u) : scale;
}

inline float scale_from_amax(float amax, float fp8_max, bool pow2, float eps, float limit) {
  DefaultFloatModes modes;
  pin(amax);
  float scale = scale_rule(amax, fp8_max, pow2, eps, limit);
  pin(scale);
  return scale;
}

// 1 / scale, correctly rounded also where the result is subnormal (a scale near FLT_MAX).
inline float scale_inverse(float scale) {
  DefaultFloatModes modes;
  pin(scale);
  float inverse = 1.0f / scale;
  pin(inverse);
  return inverse;
}

}  // namespace tejit::cpu
