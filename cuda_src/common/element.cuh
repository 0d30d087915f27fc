// The three input dtypes: how many elements a 16-byte vector holds, how they widen to float32 (always exact),
// and a running maximum of |x| that ignores NaN.
#pragma once

#include "common/ptx.cuh"

namespace tejit {

struct F32 {
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
    m = one(m, v.x);
    m = one(m, v.y);
    m = one(m, v.z);
    return one(m, v.w);
  }

  TEJIT_DEVICE static float amax_result(u32 m) { return __uint_as_float(m); }

 private:
  TEJIT_DEVICE static u32 one(u32 m, u32 x) {
    return __float_as_uint(fmaxf(__uint_as_float(m), fabsf(__uint_as_float(x))));
  }
};

struct BF16 {
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
    m = max_bf16x2(m, v.x & 0x7fff7fffu);
    m = max_bf16x2(m, v.y & 0x7fff7fffu);
    m = max_bf16x2(m, v.z & 0x7fff7fffu);
    return max_bf16x2(m, v.w & 0x7fff7fffu);
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
    m = max_f16x2(m, v.x & 0x7fff7fffu);
    m = max_f16x2(m, v.y & 0x7fff7fffu);
    m = max_f16x2(m, v.z & 0x7fff7fffu);
    return max_f16x2(m, v.w & 0x7fff7fffu);
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
