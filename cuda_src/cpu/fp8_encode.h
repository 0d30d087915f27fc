// float32, float16 or bfloat16 times a scale to FP8 bytes, one output register at a time.
#pragma once

#include <cstdint>
#include <cstring>

#include "elements.h"
#include "simd.h"

namespace tejit::cpu {

// What an FP8 format comes down to here: a NaN is the byte 0x7F in both.
struct Fp8 {
  int mantissa_bits;
  int min_exponent;  // of the smallest normal number, with float32's bias
  float max;
  uint8_t max_code;
};
constexpr Fp8 kFp8[2] = {{3, 127 - 6, 448.0f, 0x7E}, {2, 127 - 14, 57344.0f, 0x7B}};
constexpr int kNanCode = 0x7F;

// One value, any scale: the rule that Fp8Encoder follows, in scalar code. Needs DefaultFloatModes.
inline uint8_t fp8_encode(float value, float scale, const Fp8& format) {
  const uint32_t bits = bits_of(value * scale), sign = (bits >> 24) & 0x80u;
  uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > infinity_bits(In::f32)) return kNanCode;
  const uint32_t max = bits_of(format.max), min_normal = static_cast<uint32_t>(format.min_exponent) << 23;
  magnitude = magnitude < max ? magnitude : max;
  const uint32_t power = (magnitude > min_normal ? magnitude : min_normal) & 0x7F800000u;
  const int unit = 23 - format.mantissa_bits;
  const float rounded = float_of(power) * float_of((127u + unit) << 23) + float_of(magnitude);
  return static_cast<uint8_t>(sign | ((bits_of(rounded) + (power >> unit) - (min_normal >> unit)) & 0x7Fu));
}

// kBytes elements to kBytes bytes, for a finite scale > 0 (so that a result is a NaN, or negative, exactly
// where the element is).
//
// Rounding: let p be the power of two at or below y, at least FP8's smallest normal number, and b FP8's count
// of mantissa bits. y + p * 2^(23 - b) is a float32 whose last place is one unit of FP8 at y, subnormals
// included, so one addition rounds to nearest even and leaves the count of units in the low bits. Adding p's
// exponent, shifted to where FP8 has its own, gives the code: a count that reaches the next power of two
// carries into the exponent as it should.
class Fp8Encoder {
 public:
  static constexpr int kElements = simd::kBytes;

  Fp8Encoder(float scale, const Fp8& format)
      : scale_(simd::fill(scale)),
        max_(simd::fill(format.max)),
        to_unit_(simd::fill(float_of((127u + 23 - format.mantissa_bits) << 23))),
        min_normal_(simd::fill(float_of(static_cast<uint32_t>(format.min_exponent) << 23))),
        shift_(simd::fill32(23u - format.mantissa_bits)),
        max_code_(simd::fill16(format.max_code)) {
    const uint32_t bias = static_cast<uint32_t>(format.min_exponent) << format.mantissa_bits;
    bias_ = simd::fill16(static_cast<int>(bias));
    bias32_ = simd::fill32(bias);
  }

  void rescale(float scale) { scale_ = simd::fill(scale); }

  template <In in>
  simd::Int full(const uint8_t* x) const {
    if constexpr (in == In::f32) {
      return simd::pack32(floats(x, scale_), floats(x + simd::kBytes, scale_),
                          floats(x + 2 * simd::kBytes, scale_), floats(x + 3 * simd::kBytes, scale_));
    } else {
      return simd::pack16(halves<in>(x, scale_, scale_), halves<in>(x + simd::kBytes, scale_, scale_));
    }
  }

  // One scale for the first half of the elements, another for the second.
  template <In in>
  simd::Int full(const uint8_t* x, simd::Float first, simd::Float second) const {
    if constexpr (in == In::f32) {
      return simd::pack32(floats(x, first), floats(x + simd::kBytes, first),
                          floats(x + 2 * simd::kBytes, second), floats(x + 3 * simd::kBytes, second));
    } else {
      return simd::pack16(halves<in>(x, first, first), halves<in>(x + simd::kBytes, second, second));
    }
  }

  // A scale of its own for each element: that of element i is scales[scale_lane<in>(i)].
  template <In in>
  simd::Int full(const uint8_t* x, const float* scales) const {
    const auto lanes = [scales](int i) { return simd::as_float(simd::load(scales + i * kLanes)); };
    if constexpr (in == In::f32) {
      return simd::pack32(floats(x, lanes(0)), floats(x + simd::kBytes, lanes(1)),
                          floats(x + 2 * simd::kBytes, lanes(2)), floats(x + 3 * simd::kBytes, lanes(3)));
    } else {
      return simd::pack16(halves<in>(x, lanes(0), lanes(1)),
                          halves<in>(x + simd::kBytes, lanes(2), lanes(3)));
    }
  }

  // Even and odd 16-bit elements of a register become float32 apart.
  template <In in>
  static constexpr int scale_lane(int i) {
    if (in == In::f32) return i;
    return (i / (2 * kLanes) * 2 + i % 2) * kLanes + i % (2 * kLanes) / 2;
  }

  // The first n < kElements elements; nothing behind them is read.
  template <In in>
  simd::Int some(const uint8_t* x, int64_t n) const {
    alignas(64) uint8_t padded[kElements * 4] = {};
    std::memcpy(padded, x, static_cast<size_t>(n * bytes_of(in)));
    return full<in>(padded);
  }

 private:
  static constexpr int kLanes = simd::kBytes / 4;

  // 32-bit lanes of |x| to the code without sign plus bias; the upper half of a lane holds remains.
  simd::Int biased_code(simd::Float magnitude, simd::Float scale) const {
    const simd::Float y = simd::min(simd::mul(magnitude, scale), max_);
    const simd::Int power = simd::as_int(simd::max(y, min_normal_)) & simd::fill32(0x7F800000u);
    const simd::Int rounded = simd::as_int(simd::mul_add(simd::as_float(power), to_unit_, y));
    return simd::add32(rounded, simd::shr32(power, shift_));
  }

  // One register of 16-bit elements to bytes in 16-bit lanes. Even and odd elements become float32 without a
  // shuffle.
  template <In in>
  simd::Int halves(const uint8_t* p, simd::Float even, simd::Float odd) const {
    const simd::Int x = simd::load(p);
    const simd::Int magnitude = x & simd::fill16(0x7FFF);
    const auto code = [&](simd::Int in_upper_half, simd::Float scale) {
      if constexpr (in == In::bf16) return biased_code(simd::as_float(in_upper_half), scale);
      // Read with float32's exponent bias of 127 instead of 15, then put right by 2^112: exact for subnormals
      // too. The exponent of inf comes out finite and is dealt with below.
      return biased_code(simd::mul(simd::as_float(simd::shr32<3>(in_upper_half)), simd::fill(0x1p112f)),
                         scale);
    };
    simd::Int w = simd::merge_odd(code(simd::shl32<16>(magnitude), even),
                                  code(magnitude & simd::fill32(0xFFFF0000u), odd));
    w = simd::sub16(w, bias_);
    if constexpr (in == In::f16)
      w = simd::where_gt16(magnitude, simd::fill16(infinity_bits(In::f16) - 1), max_code_, w);
    w = simd::or_and(w, simd::shr16<8>(x), simd::fill16(0x80));
    return simd::where_gt16(magnitude, simd::fill16(infinity_bits(in)), simd::fill16(kNanCode), w);
  }

  // One register of float32 to bytes in 32-bit lanes.
  simd::Int floats(const uint8_t* p, simd::Float scale) const {
    const simd::Int x = simd::load(p);
    const simd::Int magnitude = x & simd::fill32(0x7FFFFFFFu);
    simd::Int w = simd::sub32(biased_code(simd::as_float(magnitude), scale), bias32_) & simd::fill32(0x7F);
    w = simd::or_and(w, simd::shr32<24>(x), simd::fill32(0x80));
    return simd::where_gt32(magnitude, simd::fill32(infinity_bits(In::f32)), simd::fill32(kNanCode), w);
  }

  simd::Float scale_, max_, to_unit_, min_normal_;
  simd::Int shift_, max_code_, bias_, bias32_;
};

}  // namespace tejit::cpu
