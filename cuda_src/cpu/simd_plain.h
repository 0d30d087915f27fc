// simd.h in the compiler's own vectors of 16 bytes: SSE2 on any x86-64, NEON on aarch64, scalar code
// elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace tejit::cpu::simd {

using Int = int32_t __attribute__((vector_size(16)));
using Float = float __attribute__((vector_size(16)));
using Int16 = int16_t __attribute__((vector_size(16)));
using Bytes = uint8_t __attribute__((vector_size(16)));
using Word32 = uint32_t __attribute__((vector_size(16)));
using Word16 = uint16_t __attribute__((vector_size(16)));
constexpr int kBytes = 16;

// g++ 11 knows only the first spelling, clang only the second.
#if defined(__GNUC__) && !defined(__clang__)
#define TEJIT_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Bytes{__VA_ARGS__})
#else
#define TEJIT_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif

inline Int load(const void* p) {
  Int v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(void* p, Int v) {
  std::memcpy(p, &v, sizeof v);
}
#if defined(__SSE2__)
inline void stream(void* p, Int v) {
  _mm_stream_si128(static_cast<__m128i*>(p), (__m128i)v);
}
inline void fence() {
  _mm_sfence();
}
#else
inline void stream(void* p, Int v) {
  store(p, v);
}  // no such store in plain C++
inline void fence() {}
#endif

inline Int as_int(Float v) {
  return (Int)v;
}
inline Float as_float(Int v) {
  return (Float)v;
}
inline Int fill16(int v) {
  const int16_t s = static_cast<int16_t>(v);
  return (Int)Int16{s, s, s, s, s, s, s, s};
}
inline Int fill32(uint32_t v) {
  return (Int)Word32{v, v, v, v};
}
inline Float fill(float v) {
  return Float{v, v, v, v};
}

inline Float mul(Float a, Float b) {
  return a * b;
}
inline Float min(Float a, Float b) {
  return a < b ? a : b;
}
inline Float max(Float a, Float b) {
  return a > b ? a : b;
}
inline Float mul_add(Float a, Float b, Float c) {
  return a * b + c;
}

inline Int add32(Int a, Int b) {
  return (Int)((Word32)a + (Word32)b);
}
inline Int sub32(Int a, Int b) {
  return (Int)((Word32)a - (Word32)b);
}
inline Int sub16(Int a, Int b) {
  return (Int)((Word16)a - (Word16)b);
}
template <int n>
inline Int shl32(Int v) {
  return (Int)((Word32)v << n);
}
template <int n>
inline Int shr32(Int v) {
  return (Int)((Word32)v >> n);
}
template <int n>
inline Int shr16(Int v) {
  return (Int)((Word16)v >> n);
}
inline Int shr32(Int v, Int n) {
  return (Int)((Word32)v >> static_cast<uint32_t>(n[0]));
}

inline Int or_and(Int a, Int b, Int mask) {
  return a | (b & mask);
}
inline Int where_gt16(Int a, Int b, Int yes, Int no) {
  const Int mask = (Int)((Int16)a > (Int16)b);
  return (yes & mask) | (no & ~mask);
}
inline Int where_gt32(Int a, Int b, Int yes, Int no) {
  const Int mask = a > b;
  return (yes & mask) | (no & ~mask);
}
inline Int max_upto16(Int acc, Int a, Int limit) {
  const Int16 kept = (Int16)a & ((Int16)a <= (Int16)limit);
  return (Int)((Int16)acc > kept ? (Int16)acc : kept);
}
inline Int max_upto32(Int acc, Int a, Int limit) {
  const Int kept = a & (a <= limit);
  return acc > kept ? acc : kept;
}
inline uint32_t largest32(Int v) {
  const int32_t low = v[0] > v[1] ? v[0] : v[1], high = v[2] > v[3] ? v[2] : v[3];
  return static_cast<uint32_t>(low > high ? low : high);
}
inline Int merge_odd(Int even, Int odd) {
  return (even & 0xFFFF) | shl32<16>(odd);
}

inline Int pack16(Int a, Int b) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#error "the host kernels are written for little-endian machines"
#endif
  return (Int)TEJIT_SHUFFLE((Bytes)a, (Bytes)b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
}
// A lane of 32 bits is two of 16, the second 0: packed once, the pair is the same value in one lane of 16.
inline Int pack32(Int a, Int b, Int c, Int d) {
  return pack16(pack16(a, b), pack16(c, d));
}

inline Int load_lanes(const uint8_t* p, ptrdiff_t) {
  return load(p);
}
inline Int zip_lo(Int a, Int b) {
  return (Int)TEJIT_SHUFFLE((Bytes)a, (Bytes)b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
inline Int zip_hi(Int a, Int b) {
  return (Int)TEJIT_SHUFFLE((Bytes)a, (Bytes)b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

#undef TEJIT_SHUFFLE

}  // namespace tejit::cpu::simd
