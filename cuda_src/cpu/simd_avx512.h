// simd.h at AVX-512 F, BW, VL, DQ (what torch calls the AVX512 level: no VBMI, no BF16 instructions).
#pragma once

#include <cstddef>
#include <cstdint>

#include <immintrin.h>

namespace tejit::cpu::simd {

using Int = __m512i;
using Float = __m512;
constexpr int kBytes = 64;

inline Int load(const void* p) {
  return _mm512_loadu_si512(p);
}
inline void store(void* p, Int v) {
  _mm512_storeu_si512(p, v);
}
inline void stream(void* p, Int v) {
  _mm512_stream_si512(static_cast<__m512i*>(p), v);
}
inline void fence() {
  _mm_sfence();
}

inline Int fill16(int v) {
  return _mm512_set1_epi16(static_cast<short>(v));
}
inline Int fill32(uint32_t v) {
  return _mm512_set1_epi32(static_cast<int>(v));
}
inline Float fill(float v) {
  return _mm512_set1_ps(v);
}
inline Int as_int(Float v) {
  return _mm512_castps_si512(v);
}
inline Float as_float(Int v) {
  return _mm512_castsi512_ps(v);
}

inline Float mul(Float a, Float b) {
  return _mm512_mul_ps(a, b);
}
inline Float min(Float a, Float b) {
  return _mm512_min_ps(a, b);
}
inline Float max(Float a, Float b) {
  return _mm512_max_ps(a, b);
}
inline Float mul_add(Float a, Float b, Float c) {
  return _mm512_fmadd_ps(a, b, c);
}

inline Int add32(Int a, Int b) {
  return _mm512_add_epi32(a, b);
}
inline Int sub32(Int a, Int b) {
  return _mm512_sub_epi32(a, b);
}
inline Int sub16(Int a, Int b) {
  return _mm512_sub_epi16(a, b);
}
template <int n>
inline Int shl32(Int v) {
  return _mm512_slli_epi32(v, n);
}
template <int n>
inline Int shr32(Int v) {
  return _mm512_srli_epi32(v, n);
}
template <int n>
inline Int shr16(Int v) {
  return _mm512_srli_epi16(v, n);
}
inline Int shr32(Int v, Int n) {
  return _mm512_srlv_epi32(v, n);
}

inline Int or_and(Int a, Int b, Int mask) {
  return _mm512_ternarylogic_epi32(a, b, mask, 0xF8);
}
inline Int where_gt16(Int a, Int b, Int yes, Int no) {
  return _mm512_mask_mov_epi16(no, _mm512_cmpgt_epi16_mask(a, b), yes);
}
inline Int where_gt32(Int a, Int b, Int yes, Int no) {
  return _mm512_mask_mov_epi32(no, _mm512_cmpgt_epi32_mask(a, b), yes);
}
inline Int max_upto16(Int acc, Int a, Int limit) {
  return _mm512_mask_max_epi16(acc, _mm512_cmple_epi16_mask(a, limit), acc, a);
}
inline Int max_upto32(Int acc, Int a, Int limit) {
  return _mm512_mask_max_epi32(acc, _mm512_cmple_epi32_mask(a, limit), acc, a);
}
inline uint32_t largest32(Int v) {
  return static_cast<uint32_t>(_mm512_reduce_max_epi32(v));
}
inline Int merge_odd(Int even, Int odd) {
  return _mm512_mask_mov_epi16(even, 0xAAAAAAAA, _mm512_slli_epi32(odd, 16));
}

// The pack instructions work inside each 16-byte part: the parts' pieces are put in order afterwards.
inline Int pack16(Int a, Int b) {
  return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), _mm512_packus_epi16(a, b));
}
inline Int pack32(Int a, Int b, Int c, Int d) {
  const Int parts = _mm512_packus_epi16(_mm512_packus_epi32(a, b), _mm512_packus_epi32(c, d));
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15),
                                  parts);
}

inline Int load_lanes(const uint8_t* p, ptrdiff_t stride) {
  const auto lane = [p, stride](int i) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i * stride));
  };
  Int v = _mm512_castsi128_si512(lane(0));
  v = _mm512_inserti32x4(v, lane(1), 1);
  v = _mm512_inserti32x4(v, lane(2), 2);
  return _mm512_inserti32x4(v, lane(3), 3);
}
inline Int zip_lo(Int a, Int b) {
  return _mm512_unpacklo_epi8(a, b);
}
inline Int zip_hi(Int a, Int b) {
  return _mm512_unpackhi_epi8(a, b);
}

}  // namespace tejit::cpu::simd
