// simd.h at AVX2 with FMA.
#pragma once

#include <cstddef>
#include <cstdint>

#include <immintrin.h>

namespace tejit::cpu::simd {

using Int = __m256i;
using Float = __m256;
constexpr int kBytes = 32;

inline Int load(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
inline void store(void* p, Int v) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), v);
}
inline void stream(void* p, Int v) {
  _mm256_stream_si256(static_cast<__m256i*>(p), v);
}
inline void fence() {
  _mm_sfence();
}

inline Int fill16(int v) {
  return _mm256_set1_epi16(static_cast<short>(v));
}
inline Int fill32(uint32_t v) {
  return _mm256_set1_epi32(static_cast<int>(v));
}
inline Float fill(float v) {
  return _mm256_set1_ps(v);
}
inline Int as_int(Float v) {
  return _mm256_castps_si256(v);
}
inline Float as_float(Int v) {
  return _mm256_castsi256_ps(v);
}

inline Float mul(Float a, Float b) {
  return _mm256_mul_ps(a, b);
}
inline Float min(Float a, Float b) {
  return _mm256_min_ps(a, b);
}
inline Float max(Float a, Float b) {
  return _mm256_max_ps(a, b);
}
inline Float mul_add(Float a, Float b, Float c) {
  return _mm256_fmadd_ps(a, b, c);
}

inline Int add32(Int a, Int b) {
  return _mm256_add_epi32(a, b);
}
inline Int sub32(Int a, Int b) {
  return _mm256_sub_epi32(a, b);
}
inline Int sub16(Int a, Int b) {
  return _mm256_sub_epi16(a, b);
}
template <int n>
inline Int shl32(Int v) {
  return _mm256_slli_epi32(v, n);
}
template <int n>
inline Int shr32(Int v) {
  return _mm256_srli_epi32(v, n);
}
template <int n>
inline Int shr16(Int v) {
  return _mm256_srli_epi16(v, n);
}
inline Int shr32(Int v, Int n) {
  return _mm256_srlv_epi32(v, n);
}

inline Int or_and(Int a, Int b, Int mask) {
  return _mm256_or_si256(a, _mm256_and_si256(b, mask));
}
inline Int where_gt16(Int a, Int b, Int yes, Int no) {
  return _mm256_blendv_epi8(no, yes, _mm256_cmpgt_epi16(a, b));
}
inline Int where_gt32(Int a, Int b, Int yes, Int no) {
  return _mm256_blendv_epi8(no, yes, _mm256_cmpgt_epi32(a, b));
}
inline Int max_upto16(Int acc, Int a, Int limit) {
  return _mm256_max_epi16(acc, _mm256_andnot_si256(_mm256_cmpgt_epi16(a, limit), a));
}
inline Int max_upto32(Int acc, Int a, Int limit) {
  return _mm256_max_epi32(acc, _mm256_andnot_si256(_mm256_cmpgt_epi32(a, limit), a));
}
inline uint32_t largest32(Int v) {
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4E));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xB1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(m));
}
inline Int merge_odd(Int even, Int odd) {
  return _mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0xAA);
}

// The pack instructions work inside each 16-byte part: the parts' pieces are put in order afterwards.
inline Int pack16(Int a, Int b) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xD8);
}
inline Int pack32(Int a, Int b, Int c, Int d) {
  const Int parts = _mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d));
  return _mm256_permutevar8x32_epi32(parts, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

inline Int load_lanes(const uint8_t* p, ptrdiff_t stride) {
  const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + stride));
  return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}
inline Int zip_lo(Int a, Int b) {
  return _mm256_unpacklo_epi8(a, b);
}
inline Int zip_hi(Int a, Int b) {
  return _mm256_unpackhi_epi8(a, b);
}

}  // namespace tejit::cpu::simd
