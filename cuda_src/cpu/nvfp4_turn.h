// The transpose of a matrix, and that of its random Hadamard transform: what columnwise NVFP4 quantizes row
// by row.
#pragma once

#include <cstdint>
#include <cstring>

#include "elements.h"
#include "fp8_amax.h"
#include "nvfp4_rules.h"
#include "parallel.h"

namespace tejit::cpu {

namespace detail {

constexpr int kTurnColumns = 256;  // of x, that one piece of work covers

inline uint16_t bf16_bits(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7FFFFFFFu) > infinity_bits(In::f32)) return 0x7FC0;
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// f(m, k, columns) for pieces of (up to, below) 16 rows by up to 16 columns.
template <class F>
inline void for_squares(int64_t M, int64_t K, const F& f) {
  const int64_t across = (K + kTurnColumns - 1) / kTurnColumns;
  parallel_for((M + kFp4Block - 1) / kFp4Block * across, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t m = i / across * kFp4Block, first = i % across * kTurnColumns;
      const int64_t last = first + kTurnColumns < K ? first + kTurnColumns : K;
      for (int64_t k = first; k < last; k += kFp4Block)
        f(m, k, static_cast<int>(last - k < kFp4Block ? last - k : kFp4Block));
    }
  });
}

template <class Element>
TEJIT_NOINLINE inline void turn_square(const Element* x, int64_t K, int rows, int columns, Element* to,
                                       int64_t M) {
  Element square[kFp4Block][kFp4Block];
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < columns; ++j) square[j][i] = x[i * K + j];
  }
  for (int j = 0; j < columns; ++j)
    std::memcpy(to + j * M, square[j], static_cast<size_t>(rows) * sizeof(Element));
}

template <In in>
TEJIT_NOINLINE inline void rotate_square(const uint8_t* x, int64_t K, int columns, uint32_t sign_mask,
                                         uint16_t* to, int64_t M) {
  float a[kFp4Block][kFp4Block] = {};
  for (int i = 0; i < kFp4Block; ++i) {
    alignas(64) uint8_t line[kFp4Block * bytes_of(in)] = {};
    std::memcpy(line, x + i * K * bytes_of(in), static_cast<size_t>(columns * bytes_of(in)));
    const float sign = (sign_mask >> i) & 1u ? -1.0f : 1.0f;
    for (int j = 0; j < kFp4Block; ++j) a[i][j] = to_float(in, element_bits(line, in, j)) * sign;
  }
  for (int stride = 1; stride < kFp4Block; stride *= 2) {
    for (int i = 0; i < kFp4Block; ++i) {
      if (i & stride) continue;
      for (int j = 0; j < kFp4Block; ++j) {
        const float u = a[i][j], v = a[i + stride][j];
        a[i][j] = u + v;
        a[i + stride][j] = u - v;
      }
    }
  }
  for (int j = 0; j < columns; ++j) {
    uint16_t column[kFp4Block];
    for (int i = 0; i < kFp4Block; ++i) column[i] = bf16_bits(a[i][j] * 0.25f);
    std::memcpy(to + j * M, column, sizeof column);
  }
}

}  // namespace detail

// x (M, K) to (K, M) of the same elements.
inline void nvfp4_turn(const void* x, In in, int64_t M, int64_t K, void* to) {
  const auto run = [&](auto element) {
    using Element = decltype(element);
    detail::for_squares(M, K, [&](int64_t m, int64_t k, int columns) {
      const int rows = static_cast<int>(M - m < kFp4Block ? M - m : kFp4Block);
      detail::turn_square(static_cast<const Element*>(x) + m * K + k, K, rows, columns,
                          static_cast<Element*>(to) + k * M + m, M);
    });
  };
  in == In::f32 ? run(uint32_t{}) : run(uint16_t{});
}

// The transform of x (bf16 or f32) along its columns, as (K, M) in bfloat16. M is a multiple of 16.
inline void nvfp4_rotate(const void* x, In in, int64_t M, int64_t K, uint32_t sign_mask, uint16_t* to) {
  const auto run = [&](auto square) {
    detail::for_squares(M, K, [&](int64_t m, int64_t k, int columns) {
      square(static_cast<const uint8_t*>(x) + (m * K + k) * bytes_of(in), K, columns, sign_mask,
             to + k * M + m, M);
    });
  };
  in == In::bf16 ? run(detail::rotate_square<In::bf16>) : run(detail::rotate_square<In::f32>);
}

}  // namespace tejit::cpu
