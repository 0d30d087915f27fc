// The element types that the host kernels read, and the plain float32 value of one element.
#pragma once

#include <cstdint>
#include <cstring>

namespace tejit::cpu {

enum class In : int { f32 = 0, f16 = 1, bf16 = 2 };

constexpr int64_t bytes_of(In in) {
  return in == In::f32 ? 4 : 2;
}

// The bits of +inf; larger bits without the sign are a NaN.
constexpr uint32_t infinity_bits(In in) {
  return in == In::f32 ? 0x7F800000u : in == In::f16 ? 0x7C00u : 0x7F80u;
}

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// float32 of an element's bits, exact for every value and in every floating-point mode.
inline float to_float(In in, uint32_t bits) {
  if (in == In::f32) return float_of(bits);
  if (in == In::bf16) return float_of(bits << 16);
  const uint32_t sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7FFFu;
  if (magnitude >= infinity_bits(In::f16)) return float_of(sign | 0x7F800000u | (magnitude << 13));
  if (magnitude < 0x400u) return float_of(sign | bits_of(static_cast<float>(magnitude) * 0x1p-24f));
  return float_of(sign | ((magnitude << 13) + ((127u - 15u) << 23)));
}

inline uint32_t element_bits(const void* x, In in, int64_t index) {
  const auto* p = static_cast<const uint8_t*>(x) + index * bytes_of(in);
  if (in == In::f32) {
    uint32_t bits;
    std::memcpy(&bits, p, sizeof bits);
    return bits;
  }
  uint16_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return bits;
}

}  // namespace tejit::cpu
