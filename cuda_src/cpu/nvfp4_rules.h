// The rules of NVFP4 for single values: scales, rounding, Philox. Scalar code; needs DefaultFloatModes.
#pragma once

#include <cstdint>
#include <limits>

#include "elements.h"
#include "fp8_encode.h"

namespace tejit::cpu {

constexpr int kFp4Block = 16;  // elements that share a scale
constexpr Fp8 kE2m1 = {1, 127, 6.0f, 7};
constexpr const Fp8& kE4m3 = kFp8[0];
constexpr float kFp4Values[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};

// What follows from an amax, of a tensor or of a row.
struct Fp4Scales {
  float encode, decode;
  float sixth;  // encode / 6, as one rounded product
  float amax;   // as it is stored: for an infinite one the amax that encode = 1 means
};

inline Fp4Scales fp4_scales(float amax, float e4m3_max) {
  const float full = kE2m1.max * e4m3_max, largest = std::numeric_limits<float>::max();
  const bool infinite = (bits_of(amax) & 0x7FFFFFFFu) == infinity_bits(In::f32);
  float encode = 1.0f;
  if (amax > 0.0f && !infinite) {
    encode = full / amax;
    if (encode > largest) encode = largest;
  }
  return {encode, 1.0f / encode, encode * (1.0f / kE2m1.max), infinite ? full : amax};
}

inline uint8_t e4m3_byte(float value) {
  return fp8_encode(value, 1.0f, kE4m3);
}

inline float e4m3_value(uint8_t byte) {
  const uint32_t exponent = byte >> 3, mantissa = byte & 7u;
  if (exponent == 0) return static_cast<float>(mantissa) * 0x1p-9f;
  return float_of(((exponent + 120u) << 23) | (mantissa << 20));
}

// What the values of a block with this scale are multiplied with.
inline float fp4_multiplier(uint8_t scale, float decode) {
  const float t = 1.0f / (e4m3_value(scale) * decode), largest = std::numeric_limits<float>::max();
  return t > largest ? largest : t;
}

inline uint8_t fp4_nearest(float value, float multiplier) {
  const uint8_t byte = fp8_encode(value, multiplier, kE2m1);
  return static_cast<uint8_t>((byte & 7u) | ((byte >> 4) & 8u));
}

// Up or down to a neighbour, as a random number from 0 to 255 decides.
inline uint8_t fp4_stochastic(float value, float multiplier, uint32_t random) {
  const auto step_of = [](float v) { return v < 2.0f ? 0.5f : v < 4.0f ? 1.0f : 2.0f; };
  const uint32_t bits = bits_of(value * multiplier);
  const float magnitude = float_of(bits & 0x7FFFFFFFu);
  const float u = (static_cast<float>(random) + 0.5f) * 0x1p-8f;
  float raised = magnitude + u * step_of(magnitude);
  raised = raised < 8.0f ? raised : 8.0f;  // above 6 in any case, and small enough for an integer
  const float step = step_of(raised);
  const float rounded = static_cast<float>(static_cast<int>(raised / step)) * step;
  return static_cast<uint8_t>(fp4_nearest(rounded, 1.0f) | ((bits >> 28) & 8u));
}

// Philox4x32-10: 16 random bytes, by the index of a block in its output.
inline void fp4_random(const int64_t* seed, bool columnwise, uint64_t block, uint8_t bytes[kFp4Block]) {
  const auto key = static_cast<uint64_t>(seed[0]);
  const uint64_t offset = static_cast<uint64_t>(seed[1]) ^ (columnwise ? uint64_t{1} << 63 : 0);
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  uint32_t c[4] = {static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32),
                   static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * c[0], b = uint64_t{0xCD9E8D57u} * c[2];
    c[0] = static_cast<uint32_t>(b >> 32) ^ c[1] ^ k0;
    c[1] = static_cast<uint32_t>(b);
    c[2] = static_cast<uint32_t>(a >> 32) ^ c[3] ^ k1;
    c[3] = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  std::memcpy(bytes, c, kFp4Block);
}

// A buffer of scales: where the byte of block j of row i lies.
struct Fp4ScaleMap {
  uint8_t* scales;
  int64_t rows, cols;  // padded: multiples of 128 and 4
  bool swizzled;

  uint8_t& at(int64_t i, int64_t j) const {
    if (!swizzled) return scales[i * cols + j];
    return scales[(i / 128 * (cols / 4) + j / 4) * 512 + i % 32 * 16 + i % 128 / 32 * 4 + j % 4];
  }
  void zero(int64_t i, int64_t from) const {
    for (int64_t j = from; j < cols; ++j) at(i, j) = 0;
  }
};

}  // namespace tejit::cpu
