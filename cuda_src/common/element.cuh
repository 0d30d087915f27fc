// The three input dtypes: how many elements a 16-byte vector holds, how they widen to float32 (always exact),
// and running maxima of |x| that ignore NaN, of a whole vector or of each column in a word.
#pragma once

#include "common/ptx.cuh"

namespace tejit {

struct F32 {
  static constexpr float kLargest = 3.402823466e+38f;
  static constexpr int kBytes = 4;
  static constexpr int kPerVector = 4;

  TEJIT_DEVICE static float load(const void* x, i64 i) {
    return __uint_as_float(load4(static_cast<const u32*>(x) + i));
  }

  TEJIT_DEVICE static void widen(uint4 v, float (&f)[kPerVector]) {
    f[0] = __uint_as_float(v.x);
    f[1] = __uint_as_float(v.y);
    f[2] = __uint_as_float(v.z);
    f[3] = __uint_as_float(v.w);
  }

  // The accumulator is the bits of one float32.
  TEJIT_DEVICE static u32 amax_step(u32 m, uint4 v) {
    m = amax_word(m, v.x);
    m = amax_word(m, v.y);
    m = amax_word(m, v.z);
    return amax_word(m, v.w);
  }

  TEJIT_DEVICE static u32 amax_word(u32 m, u32 x) {
    return __float_as_uint(fmaxf(__uint_as_float(m), fabsf(__uint_as_float(x))));
  }

  TEJIT_DEVICE static float element(u32 word, int) { return __uint_as_float(word); }

  TEJIT_DEVICE static float amax_result(u32 m) { return __uint_as_float(m); }
};

struct BF16 {
  static constexpr float kLargest = 0x1.FEp127f;
  static constexpr int kBytes = 2;
  static constexpr int kPerVector = 8;

  TEJIT_DEVICE static float load(const void* x, i64 i) {
    return __uint_as_float(static_cast<u32>(load2(static_cast<const u16*>(x) + i)) << 16);
  }

  TEJIT_DEVICE static void widen(uint4 v, float (&f)[kPerVector]) {
    pair(v.x, f[0], f[1]);
    pair(v.y, f[2], f[3]);
    pair(v.z, f[4], f[5]);
    pair(v.w, f[6], f[7]);
  }

  // The accumulator is a pair of bfloat16: two elements an instruction.
  TEJIT_DEVICE static u32 amax_step(u32 m, uint4 v) {
    m = amax_word(m, v.x);
    m = amax_word(m, v.y);
    m = amax_word(m, v.z);
    return amax_word(m, v.w);
  }

  TEJIT_DEVICE static u32 amax_word(u32 m, u32 x) { return max_bf16x2(m, x & 0x7fff7fffu); }

  // The first element of a word is in its lower half.
  TEJIT_DEVICE static float element(u32 word, int i) {
    float lo, hi;
    pair(word, lo, hi);
    return i ? hi : lo;
  }

  TEJIT_DEVICE static float amax_result(u32 m) {
    float lo, hi;
    pair(m, lo, hi);
    return fmaxf(lo, hi);
  }

 private:
  TEJIT_DEVICE static void pair(u32 w, float& lo, float& hi) {
    lo = __uint_as_float(w << 16);
    hi = __uint_as_float(w & 0xffff0000u);
  }
};

struct F16 {
  static constexpr float kLargest = 65504.0f;
  static constexpr int kBytes = 2;
  static constexpr int kPerVector = 8;

  TEJIT_DEVICE static float load(const void* x, i64 i) {
    return f32_of_f16(load2(static_cast<const u16*>(x) + i));
  }

  TEJIT_DEVICE static void widen(uint4 v, float (&f)[kPerVector]) {
    pair(v.x, f[0], f[1]);
    pair(v.y, f[2], f[3]);
    pair(v.z, f[4], f[5]);
    pair(v.w, f[6], f[7]);
  }

  TEJIT_DEVICE static u32 amax_step(u32 m, uint4 v) {
    m = amax_word(m, v.x);
    m = amax_word(m, v.y);
    m = amax_word(m, v.z);
    return amax_word(m, v.w);
  }

  TEJIT_DEVICE static u32 amax_word(u32 m, u32 x) { return max_f16x2(m, x & 0x7fff7fffu); }

  // The first element of a word is in its lower half.
  TEJIT_DEVICE static float element(u32 word, int i) {
    float lo, hi;
    pair(word, lo, hi);
    return i ? hi : lo;
  }

  TEJIT_DEVICE static float amax_result(u32 m) {
    float lo, hi;
    pair(m, lo, hi);
    return fmaxf(lo, hi);
  }

 private:
  TEJIT_DEVICE static void pair(u32 w, float& lo, float& hi) {
    lo = f32_of_f16(static_cast<u16>(w & 0xffffu));
    hi = f32_of_f16(static_cast<u16>(w >> 16));
  }
};

}  // namespace tejit
