// The rules of NVFP4 for single values: scales, rounding, Philox. Scalar code; needs DefaultFloatModes.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "elements.h"
#include "fp8_encode.h"

namespace tejit::cpu {

constexpr int kFp4Block = 16;  // elements that share a scale
constexpr Fp8 kE2m1 = {1, 127, 6.0f, 7};
constexpr const Fp8& kE4m3 = kFp8[0];

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

// A block's values, scaled; and its codes, one a byte. Loops without a branch, for the compiler to vectorise.
using Fp4Floats = float[kFp4Block];
using Fp4Codes = uint8_t[kFp4Block];

// The power of two at or below a magnitude, but not less than 1: half of it is E2M1's step there.
inline uint32_t fp4_power(float magnitude) {
  return bits_of(magnitude > 1.0f ? magnitude : 1.0f) & 0x7F800000u;
}

// The code from the count of steps (see Fp8Encoder: it takes the exponent along).
inline uint32_t fp4_code(uint32_t count, uint32_t power) {
  return count + (power >> 22) - (127u << 1);
}

// To nearest even, saturating: the codes, and the values that they stand for.
inline void fp4_nearest(const Fp4Floats& x, float multiplier, Fp4Codes& codes, Fp4Floats& values) {
  uint32_t wide[kFp4Block];
  for (int i = 0; i < kFp4Block; ++i) {
    const uint32_t bits = bits_of(x[i] * multiplier), sign = bits & 0x80000000u;
    float magnitude = float_of(bits ^ sign);
    magnitude = magnitude < kE2m1.max ? magnitude : kE2m1.max;
    const uint32_t power = fp4_power(magnitude);
    const float unit = float_of(power) * 0x1p22f, rounded = unit + magnitude;
    values[i] = float_of(bits_of(rounded - unit) | sign);
    wide[i] = (fp4_code(bits_of(rounded), power) & 7u) | (sign >> 28);
  }
  for (int i = 0; i < kFp4Block; ++i) codes[i] = static_cast<uint8_t>(wide[i]);
}

// Up or down to a neighbour, as random numbers from 0 to 255 decide.
inline void fp4_stochastic(const Fp4Floats& x, float multiplier, const Fp4Codes& random, Fp4Codes& codes) {
  const auto step_of = [](float v) { return fp4_power(v < 4.0f ? v : 4.0f); };  // twice the step
  uint32_t wide[kFp4Block];
  for (int i = 0; i < kFp4Block; ++i) {
    const uint32_t bits = bits_of(x[i] * multiplier), sign = bits & 0x80000000u;
    float magnitude = float_of(bits ^ sign);
    magnitude = magnitude < 8.0f ? magnitude : 8.0f;  // above 6 in any case, and a small count
    const float u = (static_cast<float>(random[i]) + 0.5f) * 0x1p-8f;
    const float raised = magnitude + u * (float_of(step_of(magnitude)) * 0.5f);
    const uint32_t power = step_of(raised);
    const float inverse = float_of(0x7F800000u - power);  // 2 / power
    const uint32_t code = fp4_code(static_cast<uint32_t>(static_cast<int32_t>(raised * inverse)), power);
    wide[i] = (code < 7u ? code : 7u) | (sign >> 28);
  }
  for (int i = 0; i < kFp4Block; ++i) codes[i] = static_cast<uint8_t>(wide[i]);
}

inline void fp4_pack(const Fp4Codes& codes, uint8_t* to) {
  for (int i = 0; i < kFp4Block / 2; ++i)
    to[i] = static_cast<uint8_t>(codes[2 * i] | (codes[2 * i + 1] << 4));
}

// Philox4x32-10: 16 random bytes, by the index of a block in its output.
inline void fp4_random(const int64_t* seed, bool columnwise, uint64_t block, uint8_t (&bytes)[kFp4Block]) {
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
  void write(int64_t i, int64_t first, const uint8_t* bytes, int count) const {
    if (!swizzled) {
      std::memcpy(scales + i * cols + first, bytes, static_cast<size_t>(count));
    } else {
      for (int j = 0; j < count; ++j) at(i, first + j) = bytes[j];
    }
  }
  void zero(int64_t i, int64_t from) const {
    for (int64_t j = from; j < cols; ++j) at(i, j) = 0;
  }
};

}  // namespace tejit::cpu
