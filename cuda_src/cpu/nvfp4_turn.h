// The transpose of a matrix, and that of its random Hadamard transform: what columnwise NVFP4 quantizes row
// by row.
#pragma once

#include <cstdint>
#include <cstring>

#include "elements.h"
#include "nvfp4_rules.h"
#include "parallel.h"

namespace tejit::cpu {

namespace detail {

constexpr int kTurnRows = 64, kTurnColumns = 256;  // of x, that one share of the work covers

inline uint16_t bf16_bits(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7FFFFFFFu) > infinity_bits(In::f32)) return 0x7FC0;
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// f(m, k, rows, columns) for pieces of up to 64 rows by `width` columns.
template <class F>
inline void for_pieces(int64_t M, int64_t K, int width, const F& f) {
  const int64_t across = (K + kTurnColumns - 1) / kTurnColumns;
  parallel_for((M + kTurnRows - 1) / kTurnRows * across, 2, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t m = i / across * kTurnRows, first = i % across * kTurnColumns;
      const int64_t last = first + kTurnColumns < K ? first + kTurnColumns : K;
      const int rows = static_cast<int>(M - m < kTurnRows ? M - m : kTurnRows);
      for (int64_t k = first; k < last; k += width)
        f(m, k, rows, static_cast<int>(last - k < width ? last - k : width));
    }
  });
}

// As wide as a cache line of x: lines of far apart rows fall into one set of the cache, and do not stay
// there.
template <class Element>
constexpr int kPieceWidth = 64 / sizeof(Element);

template <class Element>
using Piece = Element[kPieceWidth<Element>][kTurnRows];

template <class Element>
inline void write_piece(const Piece<Element>& piece, int rows, int columns, Element* to, int64_t M) {
  for (int j = 0; j < columns; ++j)
    std::memcpy(to + j * M, piece[j], static_cast<size_t>(rows) * sizeof(Element));
}

template <class Element>
TEJIT_NOINLINE inline void turn_piece(const Element* x, int64_t K, int rows, int columns, Element* to,
                                      int64_t M) {
  Piece<Element> piece;
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < columns; ++j) piece[j][i] = x[i * K + j];
  }
  write_piece(piece, rows, columns, to, M);
}

// 16 rows of x, 16 columns of which the first `columns` are there, to columns of a piece, from row `at` on.
template <In in>
inline void rotate_square(const uint8_t* x, int64_t K, int columns, uint32_t sign_mask, int at,
                          uint16_t (*piece)[kTurnRows]) {
  float a[kFp4Block][kFp4Block];
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
  for (int i = 0; i < kFp4Block; ++i) {
    for (int j = 0; j < kFp4Block; ++j) piece[j][at + i] = bf16_bits(a[i][j] * 0.25f);
  }
}

template <In in>
TEJIT_NOINLINE inline void rotate_piece(const uint8_t* x, int64_t K, int rows, int columns,
                                        uint32_t sign_mask, uint16_t* to, int64_t M) {
  Piece<uint16_t> piece;
  for (int i = 0; i < rows; i += kFp4Block) {
    for (int j = 0; j < columns; j += kFp4Block)
      rotate_square<in>(x + (i * K + j) * bytes_of(in), K, columns - j < kFp4Block ? columns - j : kFp4Block,
                        sign_mask, i, piece + j);
  }
  write_piece(piece, rows, columns, to, M);
}

}  // namespace detail

// x (M, K) to (K, M) of the same elements.
inline void nvfp4_turn(const void* x, In in, int64_t M, int64_t K, void* to) {
  const auto run = [&](auto element) {
    using Element = decltype(element);
    detail::for_pieces(M, K, detail::kPieceWidth<Element>, [&](int64_t m, int64_t k, int rows, int columns) {
      detail::turn_piece(static_cast<const Element*>(x) + m * K + k, K, rows, columns,
                         static_cast<Element*>(to) + k * M + m, M);
    });
  };
  in == In::f32 ? run(uint32_t{}) : run(uint16_t{});
}

// The transform of x (bf16 or f32) along its columns, as (K, M) in bfloat16. M is a multiple of 16.
inline void nvfp4_rotate(const void* x, In in, int64_t M, int64_t K, uint32_t sign_mask, uint16_t* to) {
  const auto run = [&](auto piece) {
    detail::for_pieces(M, K, detail::kPieceWidth<uint16_t>, [&](int64_t m, int64_t k, int rows, int columns) {
      piece(static_cast<const uint8_t*>(x) + (m * K + k) * bytes_of(in), K, rows, columns, sign_mask,
            to + k * M + m, M);
    });
  };
  in == In::bf16 ? run(detail::rotate_piece<In::bf16>) : run(detail::rotate_piece<In::f32>);
}

}  // namespace tejit::cpu
