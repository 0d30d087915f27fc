// float32 to E2M1 codes and E4M3 scales. Every step rounds once, in the order that the reference has.
#pragma once

#include "common/ptx.cuh"

namespace tejit {
namespace nvfp4 {

constexpr float kLargest = 3.402823466e+38f;
constexpr u32 kInfinity = 0x7f800000u;
constexpr u32 kNan = 0x7fu;  // of E4M3
constexpr float kSixth = 1.0f / 6.0f;

// Where the hardware rounds to E2M1 itself.
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL) || \
    defined(__CUDA_ARCH_FEAT_SM120_ALL) || defined(__CUDA_ARCH_FEAT_SM121_ALL)
#define TEJIT_HAS_E2M1 1
#else
#define TEJIT_HAS_E2M1 0
#endif

// --- E4M3 ---

// The byte nearest to f >= 0, at most 448's; NaN's for NaN.
TEJIT_DEVICE u32 e4m3_of(float f) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(f));
  return pair;
#else
  u32 a = __float_as_uint(f);
  if (a > kInfinity) return kNan;
  a = min(a, 0x43e00000u);
  // Below the smallest normal, a sum whose last place is the subnormal step rounds to that step.
  if (a < 0x3c800000u) return __float_as_uint(__fadd_rn(__uint_as_float(a), 16384.0f)) - 0x46800000u;
  return (a + 0x7ffffu + ((a >> 20) & 1u) - (120u << 23)) >> 20;
#endif
}

// What a byte below NaN's stands for: the same fields as a float32 with another bias, subnormals included.
TEJIT_DEVICE float e4m3_value(u32 byte) {
  return __fmul_rn(__uint_as_float(byte << 20), 0x1p120f);
}

// --- E2M1 ---

// Magnitudes come as eighths, at most 1: a multiplication saturates there for nothing, and so a magnitude of
// 8 or more gets code 8, which whoever packs codes turns into 7.

// The code of v / 8 is the least of round(2v), round(v) + 2 and round(v / 2) + 4. Each rounds by being added
// to a number whose last place is 1; the lowest four bits of the sum are the code, the others kCodeBias's.
constexpr u32 kCodeBias = 0x4b000000u;

TEJIT_DEVICE u32 nearest_code(float eighth) {
  constexpr float kBig = 8388608.0f;
  return min3(__float_as_uint(__fmaf_rn(eighth, 16.0f, kBig)),
              __float_as_uint(__fmaf_rn(eighth, 8.0f, kBig + 2.0f)),
              __float_as_uint(__fmaf_rn(eighth, 4.0f, kBig + 4.0f)));
}

// The code to which v / 8 is rounded by `random`: 2^23 plus a number below 256.
TEJIT_DEVICE u32 stochastic_code(float eighth, float random) {
  // (number + 1/2) / 512, exactly; times v's power of two, or 1: that part of the step from code to code.
  const float half = __fmaf_rn(random, 0x1p-9f, -16383.9990234375f);
  const float power = __uint_as_float(__float_as_uint(fmaxf(eighth, 0.125f)) & kInfinity);
  const float raised = __fmaf_rn(half, power, eighth);
  // As the smallest float32 numbers, these have E2M1's own fields; what lies below is cut off.
  return __float_as_uint(multiply_down(raised, 0x1p-123f)) >> 22;
}

// Eight codes out of eight nibbles from 0 to 8.
TEJIT_DEVICE u32 at_most_seven(u32 codes) {
  return codes - ((codes & 0x88888888u) >> 3);
}

// Byte i of a word, as 2^23 plus its number.
TEJIT_DEVICE float random_of(u32 word, int i) {
  return __uint_as_float(permute(word, kCodeBias, 0x7440u + static_cast<u32>(i)));
}

// A code's magnitude.
TEJIT_DEVICE float e2m1_value(u32 code) {
  return __fmul_rn(__uint_as_float((code & 7u) << 22), 0x1p126f);
}

// --- scales ---

// Of a tensor's amax (or a line's): what its blocks are scaled with.
struct Scales {
  float encode;
  float decode;
  float sixth;  // encode * float32(1/6)
};

TEJIT_DEVICE Scales scales_of(float amax, float e4m3_max) {
  Scales s;
  // Written so that NaN fails it too.
  const bool usable = amax > 0.0f && amax <= kLargest;
  s.encode = usable ? fminf(__fdiv_rn(__fmul_rn(6.0f, e4m3_max), amax), kLargest) : 1.0f;
  s.decode = __fdiv_rn(1.0f, s.encode);
  s.sixth = __fmul_rn(s.encode, kSixth);
  return s;
}

// What the buffer holds: for an infinite amax the one that an encode scale of 1 means.
TEJIT_DEVICE float stored_amax(float amax, float e4m3_max) {
  return fabsf(amax) > kLargest ? __fmul_rn(6.0f, e4m3_max) : amax;
}

// Of a block: its scale's byte and the number that its values are multiplied with.
struct BlockScale {
  u32 byte;
  float multiplier;
  bool nan;
};

TEJIT_DEVICE BlockScale with_byte(u32 byte, const Scales& s) {
  return {byte, fminf(__frcp_rn(__fmul_rn(e4m3_value(byte), s.decode)), kLargest), false};
}

// amax: the bits of a block's, NaN where it has one.
TEJIT_DEVICE BlockScale scale_of(u32 amax, const Scales& s) {
  BlockScale b = with_byte(e4m3_of(__fmul_rn(__uint_as_float(amax), s.sixth)), s);
  b.nan = amax > kInfinity;
  return b;
}

// Where a scale lies: of line `line` the block `block`; a line has `pitch` of them.
TEJIT_DEVICE i64 scale_at(u32 line, u32 block, u32 pitch, bool swizzled) {
  if (!swizzled) return static_cast<i64>(line) * pitch + block;
  const u32 tile = (line / 128) * (pitch / 4) + block / 4;
  return static_cast<i64>(tile) * 512 + (line % 32 * 16 + line % 128 / 32 * 4 + block % 4);
}

// --- sixteen bfloat16 ---

struct Packed {
  u32 w[8];
};

// The bits of the largest |x|; NaN's where there is one.
TEJIT_DEVICE u32 amax_of(const Packed& x) {
  u32 m = x.w[0];
#pragma unroll
  for (int i = 1; i < 8; ++i) m = max_abs_or_nan_bf16x2(m, x.w[i]);
  m &= 0x7fff7fffu;
  return max(m & 0xffff0000u, m << 16);
}

TEJIT_DEVICE float lower(u32 word) {
  return __uint_as_float(word << 16);
}

TEJIT_DEVICE float upper(u32 word) {
  return __uint_as_float(word & 0xffff0000u);
}

// The signs of eight numbers at the top of eight nibbles.
TEJIT_DEVICE u32 signs_of(const u32* w) {
  const u32 a = permute(w[0], w[1], 0x7351), b = permute(w[2], w[3], 0x7351);
  const u32 even = permute(a, b, 0x5410), odd = permute(a, b, 0x7632);
  return ((even >> 4) & 0x08080808u) | (odd & 0x80808080u);
}

// Eight codes to nearest. `eighth` is the multiplier's, or x is.
TEJIT_DEVICE u32 nearest8(const u32* w, float eighth) {
  u32 codes = 0;
#pragma unroll
  for (int i = 3; i >= 0; --i) {
    codes = codes * 16 + nearest_code(multiply_up_to_1(fabsf(upper(w[i])), eighth));
    codes = codes * 16 + nearest_code(multiply_up_to_1(fabsf(lower(w[i])), eighth));
  }
  return at_most_seven(codes - kCodeBias * 0x11111111u);
}

// Eight codes by eight random bytes.
TEJIT_DEVICE u32 stochastic8(const u32* w, float eighth, u32 random_lo, u32 random_hi) {
  u32 codes = 0;
#pragma unroll
  for (int i = 3; i >= 0; --i) {
    const u32 random = i < 2 ? random_lo : random_hi;
    const float hi = multiply_up_to_1(fabsf(upper(w[i])), eighth);
    const float lo = multiply_up_to_1(fabsf(lower(w[i])), eighth);
    codes = codes * 16 + stochastic_code(hi, random_of(random, 2 * (i % 2) + 1));
    codes = codes * 16 + stochastic_code(lo, random_of(random, 2 * (i % 2)));
  }
  return at_most_seven(codes);
}

#if TEJIT_HAS_E2M1
TEJIT_DEVICE u32 hardware_pair(float lo, float hi) {
  u32 byte;
  asm("{.reg .b8 pair; cvt.rn.satfinite.e2m1x2.f32 pair, %1, %2; cvt.u32.u8 %0, pair;}"
      : "=r"(byte)
      : "f"(hi), "f"(lo));
  return byte;
}

TEJIT_DEVICE u32 hardware8(const u32* w, float multiplier) {
  u32 byte[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    byte[i] = hardware_pair(__fmul_rn(lower(w[i]), multiplier), __fmul_rn(upper(w[i]), multiplier));
  return permute(permute(byte[0], byte[1], 0x0040), permute(byte[2], byte[3], 0x0040), 0x5410);
}
#endif

// --- random bits ---

// (seed, offset) of a direction.
struct Random {
  u64 seed, offset;
};

TEJIT_DEVICE Random random_of(const long long* seed, bool columnwise) {
  if (seed == nullptr) return {0, 0};
  return {static_cast<u64>(seed[0]), static_cast<u64>(seed[1]) + (columnwise ? 1ull << 63 : 0)};
}

// Philox4x32-10: the sixteen bytes of a block, which depend on nothing but these.
TEJIT_DEVICE uint4 random_bytes(const Random& r, u64 block) {
  u32 a = static_cast<u32>(block), b = static_cast<u32>(block >> 32);
  u32 c = static_cast<u32>(r.offset), d = static_cast<u32>(r.offset >> 32);
  u32 k0 = static_cast<u32>(r.seed), k1 = static_cast<u32>(r.seed >> 32);
#pragma unroll
  for (int i = 0; i < 10; ++i) {
    const u64 p = static_cast<u64>(a) * 0xd2511f53u, q = static_cast<u64>(c) * 0xcd9e8d57u;
    a = static_cast<u32>(q >> 32) ^ b ^ k0;
    b = static_cast<u32>(q);
    c = static_cast<u32>(p >> 32) ^ d ^ k1;
    d = static_cast<u32>(p);
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return make_uint4(a, b, c, d);
}

// Sixteen codes; `block` counts the blocks of the direction. A NaN has taken the block's scale: no code then.
template <bool kRandom>
TEJIT_DEVICE uint2 encode(Packed x, const BlockScale& b, const Random& random, u64 block) {
  uint2 codes;
#if TEJIT_HAS_E2M1
  if constexpr (!kRandom) {
    codes = make_uint2(hardware8(x.w, b.multiplier), hardware8(x.w + 4, b.multiplier));
    return b.nan ? make_uint2(0, 0) : codes;
  }
#endif
  float eighth = __fmul_rn(b.multiplier, 0.125f);
  // Of so small a multiplier an eighth would not be exact; one of x is, wherever it matters.
  if (b.multiplier < 0x1p-123f) {
    eighth = b.multiplier;
#pragma unroll
    for (int i = 0; i < 8; ++i) x.w[i] = multiply_bf16x2(x.w[i], 0x3e003e00u);
  }
  if constexpr (kRandom) {
    const uint4 r = random_bytes(random, block);
    codes = make_uint2(stochastic8(x.w, eighth, r.x, r.y), stochastic8(x.w + 4, eighth, r.z, r.w));
  } else {
    codes = make_uint2(nearest8(x.w, eighth), nearest8(x.w + 4, eighth));
  }
  codes.x += signs_of(x.w);
  codes.y += signs_of(x.w + 4);
  return b.nan ? make_uint2(0, 0) : codes;
}

}  // namespace nvfp4
}  // namespace tejit
