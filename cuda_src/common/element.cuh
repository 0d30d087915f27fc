// The input dtypes: how their elements are loaded in vectors, how they widen to float32 (always exact), and
// running maxima of |x| that ignore NaN, of a whole vector or of each column in a word.
//
// bfloat16, in which most training runs, has kernels of its own. float32 and float16 share kernels: `Any`
// holds float32 in registers, and which of the two lies in memory is known when a kernel starts.
#pragma once

#include "common/ptx.cuh"

namespace tejit {

struct BF16 {
  static constexpr int kBytes = 2;
  static constexpr int kWordElements = 2;  // of a word in registers
  static constexpr int kPerVector = 8;
  static constexpr bool kFused = false;  // what is loaded is what is cast

  TEJIT_DEVICE explicit BF16(int) {}

  TEJIT_DEVICE static constexpr int bytes() { return 2; }

  TEJIT_DEVICE static float load(const void* x, i64 i) { return element(load_word(x, i), 0); }

  // A vector as it lies in memory.
  template <Load kLoad>
  TEJIT_DEVICE static uint4 load_vector(const void* p) {
    return load16<kLoad>(p);
  }

  // What was loaded, as the other functions take it.
  TEJIT_DEVICE static uint4 settled(uint4 v) { return v; }

  // Elements one by one: a word with one of them, and kPerVector of these pushed into a settled vector, in
  // their order.
  TEJIT_DEVICE static u32 load_word(const void* x, i64 i) { return load2(static_cast<const u16*>(x) + i); }

  TEJIT_DEVICE static uint4 push(uint4 v, u32 word) {
    return make_uint4(permute(v.x, v.y, 0x5432), permute(v.y, v.z, 0x5432), permute(v.z, v.w, 0x5432),
                      permute(v.w, word, 0x5432));
  }

  TEJIT_DEVICE static void widen(uint4 v, float (&f)[kPerVector]) {
    pair(v.x, f[0], f[1]);
    pair(v.y, f[2], f[3]);
    pair(v.z, f[4], f[5]);
    pair(v.w, f[6], f[7]);
  }

  // The accumulator is a pair of bfloat16, whose signs mean nothing: two elements an instruction.
  TEJIT_DEVICE static u32 amax_step(u32 m, uint4 v) {
    return amax_word(amax_word(m, v.x), amax_word(amax_word(v.y, v.z), v.w));
  }

  TEJIT_DEVICE static u32 amax_word(u32 m, u32 x) { return max_abs_bf16x2(m, x); }

  // The first element of a word is in its lower half.
  TEJIT_DEVICE static float element(u32 word, int i) {
    float lo, hi;
    pair(word, lo, hi);
    return i ? hi : lo;
  }

  TEJIT_DEVICE static float amax_result(u32 m) {
    float lo, hi;
    pair(m, lo, hi);
    return fmaxf(0.0f, fmaxf(fabsf(lo), fabsf(hi)));
  }

 private:
  TEJIT_DEVICE static void pair(u32 w, float& lo, float& hi) {
    lo = __uint_as_float(w << 16);
    hi = __uint_as_float(w & 0xffff0000u);
  }
};

// Where a kernel asks for the dtype at every load.
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

 private:
  TEJIT_DEVICE static void pair(u32 w, float& lo, float& hi) {
    lo = f32_of_f16(static_cast<u16>(w & 0xffffu));
    hi = f32_of_f16(static_cast<u16>(w >> 16));
  }
};

// The element type T as a kernel with these arguments needs it.
template <typename T, typename Args>
TEJIT_DEVICE T type_of(const Args& args) {
  if constexpr (T::kFused) {
    return T(args.source);
  } else {
    return T(args.half);
  }
}

struct Any {
  static constexpr float kLargest = 3.402823466e+38f;
  static constexpr int kWordElements = 1;
  static constexpr int kPerVector = 4;
  static constexpr bool kFused = false;

  const bool half;  // float16 in memory

  TEJIT_DEVICE explicit Any(int half_) : half(half_ != 0) {}

  TEJIT_DEVICE int bytes() const { return half ? 2 : 4; }

  TEJIT_DEVICE float load(const void* x, i64 i) const {
    return half ? f32_of_f16(load2(static_cast<const u16*>(x) + i))
                : __uint_as_float(load4(static_cast<const u32*>(x) + i));
  }

  template <Load kLoad>
  TEJIT_DEVICE uint4 load_vector(const void* p) const {
    if (!half) return load16<kLoad>(p);
    const uint2 v = load8(p);
    return make_uint4(v.x, v.y, 0, 0);
  }

  // Apart from the loads, so that they need not wait for one another.
  TEJIT_DEVICE uint4 settled(uint4 v) const {
    if (!half) return v;
    return make_uint4(wide(v.x & 0xffffu), wide(v.x >> 16), wide(v.y & 0xffffu), wide(v.y >> 16));
  }

  TEJIT_DEVICE u32 load_word(const void* x, i64 i) const { return __float_as_uint(load(x, i)); }

  TEJIT_DEVICE static uint4 push(uint4 v, u32 word) { return make_uint4(v.y, v.z, v.w, word); }

  TEJIT_DEVICE static void widen(uint4 v, float (&f)[kPerVector]) {
    f[0] = __uint_as_float(v.x);
    f[1] = __uint_as_float(v.y);
    f[2] = __uint_as_float(v.z);
    f[3] = __uint_as_float(v.w);
  }

  // The accumulator is the bits of one float32.
  TEJIT_DEVICE static u32 amax_step(u32 m, uint4 v) {
    return amax_word(amax_word(m, v.x), amax_word(amax_word(v.y, v.z), v.w));
  }

  TEJIT_DEVICE static u32 amax_word(u32 m, u32 x) {
    return __float_as_uint(fmaxf(fabsf(__uint_as_float(m)), fabsf(__uint_as_float(x))));
  }

  TEJIT_DEVICE static float element(u32 word, int) { return __uint_as_float(word); }

  TEJIT_DEVICE static float amax_result(u32 m) { return fmaxf(0.0f, fabsf(__uint_as_float(m))); }

 private:
  TEJIT_DEVICE static u32 wide(u32 h) { return __float_as_uint(f32_of_f16(static_cast<u16>(h))); }
};

// One element of a dtype that only the arguments know: 0 float32, 1 float16, 2 bfloat16.
TEJIT_DEVICE float load_any(const void* p, int dtype, i64 i) {
  if (dtype == 0) return F32::load(p, i);
  return dtype == 1 ? F16::load(p, i) : BF16::load(p, i);
}

TEJIT_DEVICE void store_any(void* p, int dtype, i64 i, float f) {
  if (dtype == 0) {
    static_cast<float*>(p)[i] = f;
  } else {
    static_cast<u16*>(p)[i] = dtype == 1 ? f16_of(f) : static_cast<u16>(bf16x2_of(f, 0.0f) & 0xffffu);
  }
}

}  // namespace tejit
