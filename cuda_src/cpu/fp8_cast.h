// FP8 with one scale a tensor: bytes in x's order, in the transpose's order, or both from one reading of x.
#pragma once

#include <cstdint>
#include <cstring>

#include "fp8_amax.h"
#include "fp8_encode.h"
#include "parallel.h"
#include "simd.h"

namespace tejit::cpu {

namespace detail {

constexpr int kLine = 64;  // a cache line, and the side of a tile
constexpr int kTile = kLine * kLine;

// Tiles are visited down groups of this many bands of 64 rows. Where an output row does not begin on a cache
// line, tiles that share lines then meet while these are in the second-level cache, whether they lie side by
// side or one below the other.
constexpr int64_t kBands = 8;

// From this size on outputs are written past the caches, which they would only empty. Lines scattered over a
// transpose gain a third by it; a flat pass neither gains nor loses.
constexpr int64_t kStreamBytes = 2 << 20;

inline bool on_line(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % kLine == 0;
}

struct Cast {
  const uint8_t* x;
  int64_t rows, columns;
  float scale;
  int fp8;
  uint8_t* row;
  uint8_t* col;
  bool stream;
};

template <In in>
TEJIT_NOINLINE inline void cast_flat(const Cast& job, int64_t begin, int64_t end) {
  constexpr int64_t size = bytes_of(in), step = Fp8Encoder::kElements;
  const Fp8Encoder encode(job.scale, kFp8[job.fp8]);
  const auto some = [&](int64_t n) {
    alignas(kLine) uint8_t codes[step];
    simd::store(codes, encode.template some<in>(job.x + begin * size, n));
    std::memcpy(job.row + begin, codes, static_cast<size_t>(n));
    begin += n;
  };
  const int64_t misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(job.row + begin) % step);
  if (misaligned != 0) some(end - begin < step - misaligned ? end - begin : step - misaligned);
  if (job.stream) {
    for (; begin + step <= end; begin += step)
      simd::stream(job.row + begin, encode.template full<in>(job.x + begin * size));
    simd::fence();
  } else {
    for (; begin + step <= end; begin += step)
      simd::store(job.row + begin, encode.template full<in>(job.x + begin * size));
  }
  if (begin < end) some(end - begin);
}

// 64x64 bytes transposed, in blocks of 16x16, as many side by side as a register holds. Interleaving row i
// with row i + 8 rotates the eight bits of an element's (row, column) by one place: four times, and they have
// changed places.
inline void transpose_tile(const uint8_t* from, uint8_t* to) {
  constexpr int block = 16;
  for (int row = 0; row < kLine; row += simd::kBytes) {
    for (int column = 0; column < kLine; column += block) {
      // Without the unrolling (-O2 does none) the arrays would live in memory.
      simd::Int a[block], b[block];
#pragma GCC unroll 16
      for (int i = 0; i < block; ++i)
        a[i] = simd::load_lanes(from + (row + i) * kLine + column, block * kLine);
      const auto zip = [](const simd::Int* rows, simd::Int* zipped) {
#pragma GCC unroll 8
        for (int i = 0; i < block / 2; ++i) {
          zipped[2 * i] = simd::zip_lo(rows[i], rows[i + block / 2]);
          zipped[2 * i + 1] = simd::zip_hi(rows[i], rows[i + block / 2]);
        }
      };
      zip(a, b), zip(b, a), zip(a, b), zip(b, a);
#pragma GCC unroll 16
      for (int i = 0; i < block; ++i) simd::store(to + (column + i) * kLine + row, a[i]);
    }
  }
}

// The first n bytes of a tile's line.
inline void copy_line(uint8_t* to, const uint8_t* line, int64_t n, bool stream) {
  if (n < kLine) {
    std::memcpy(to, line, static_cast<size_t>(n));
  } else if (stream && on_line(to)) {
    for (int i = 0; i < kLine; i += simd::kBytes) simd::stream(to + i, simd::load(line + i));
  } else {
    for (int i = 0; i < kLine; i += simd::kBytes) simd::store(to + i, simd::load(line + i));
  }
}

struct Corner {
  int64_t m, k;
};

inline Corner corner_of_tile(const Cast& job, int64_t index) {
  const int64_t bands = (job.rows + kLine - 1) / kLine, across = (job.columns + kLine - 1) / kLine;
  const int64_t first = index / (kBands * across) * kBands, in_group = index - first * across;
  const int64_t height = bands - first < kBands ? bands - first : kBands;
  return {(first + in_group % height) * kLine, in_group / height * kLine};
}

// One tile, or what of it lies inside the matrix: encoded into a buffer, from there to row and, turned, to
// col. A tile reads 64 short pieces far from each other, which no hardware prefetcher follows, so each tile
// asks for the pieces of the next one (at an edge also for what lies behind, which does no harm).
template <In in>
inline void cast_tile(const Cast& job, const Fp8Encoder& encode, Corner here, Corner next) {
  constexpr int64_t size = bytes_of(in), step = Fp8Encoder::kElements;
  const int64_t rows = job.rows - here.m < kLine ? job.rows - here.m : kLine;
  const int64_t columns = job.columns - here.k < kLine ? job.columns - here.k : kLine;
  alignas(kLine) uint8_t tile[kTile], turned[kTile];
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* soon = job.x + ((next.m + r) * job.columns + next.k) * size;
    for (int64_t i = 0; i < kLine * size; i += kLine) __builtin_prefetch(soon + i, 0, 2);
    const int64_t at = (here.m + r) * job.columns + here.k;
    uint8_t* line = tile + r * kLine;
    for (int64_t k = 0; k < columns; k += step) {
      const uint8_t* x = job.x + (at + k) * size;
      simd::store(line + k, columns - k >= step ? encode.template full<in>(x)
                                                : encode.template some<in>(x, columns - k));
    }
    if (job.row != nullptr) copy_line(job.row + at, line, columns, job.stream);
  }
  transpose_tile(tile, turned);
  uint8_t* to = job.col + here.k * job.rows + here.m;
  for (int64_t c = 0; c < columns; ++c, to += job.rows) copy_line(to, turned + c * kLine, rows, job.stream);
}

template <In in>
TEJIT_NOINLINE inline void cast_tiles(const Cast& job, int64_t begin, int64_t end) {
  const Fp8Encoder encode(job.scale, kFp8[job.fp8]);
  Corner here = corner_of_tile(job, end - 1);
  for (int64_t i = end; i-- > begin;) {
    const Corner next = i > begin ? corner_of_tile(job, i - 1) : here;
    cast_tile<in>(job, encode, here, next);
    here = next;
  }
  if (job.stream) simd::fence();
}

// The encoder asks for a finite scale > 0. No amax gives another, but a caller may: then each element by the
// scalar rule.
TEJIT_NOINLINE inline void cast_by_element(const Cast& job, In in, int64_t begin, int64_t end) {
  for (int64_t m = begin; m < end; ++m) {
    for (int64_t k = 0; k < job.columns; ++k) {
      const int64_t i = m * job.columns + k;
      const uint8_t code = fp8_encode(to_float(in, element_bits(job.x, in, i)), job.scale, kFp8[job.fp8]);
      if (job.row != nullptr) job.row[i] = code;
      if (job.col != nullptr) job.col[k * job.rows + m] = code;
    }
  }
}

// Every thread works from the end of its share to the beginning: fp8_amax, with about the same shares, went
// the other way, and what it read last may still be in the caches.
template <In in>
inline void cast(const Cast& job) {
  if (job.col == nullptr) {
    const int64_t n = job.rows * job.columns;
    parallel_for((n + kBlock - 1) / kBlock, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = end; i-- > begin;)
        cast_flat<in>(job, i * kBlock, (i + 1) * kBlock < n ? (i + 1) * kBlock : n);
    });
  } else {
    const int64_t tiles = (job.rows + kLine - 1) / kLine * ((job.columns + kLine - 1) / kLine);
    parallel_for(tiles, kBlock / kTile, [&](int64_t begin, int64_t end) { cast_tiles<in>(job, begin, end); });
  }
}

}  // namespace detail

// sat(x * scale) as FP8, x of M rows and K columns: row gets M*K bytes in x's order, col K*M in the
// transpose's; either may be null. fp8: 0 = E4M3, 1 = E5M2. Nearest even, saturating, a NaN is 0x7F, a
// negative zero keeps its sign.
inline void fp8_cast(const void* x, In in, int64_t M, int64_t K, float scale, int fp8, uint8_t* row,
                     uint8_t* col) {
  if (M == 0 || K == 0 || (row == nullptr && col == nullptr)) return;
  const int64_t out_bytes = M * K * ((row != nullptr) + (col != nullptr));
  detail::Cast job{static_cast<const uint8_t*>(x),   M, K, scale, fp8, row, col,
                   out_bytes >= detail::kStreamBytes};
  const uint32_t scale_bits = bits_of(scale);
  if (scale_bits == 0 || scale_bits >= infinity_bits(In::f32)) {
    parallel_for(M, 1 + kBlock / K,
                 [&](int64_t begin, int64_t end) { detail::cast_by_element(job, in, begin, end); });
    return;
  }
  // One row or one column: its transpose has the same bytes.
  const bool vector = M == 1 || K == 1;
  if (vector) job.row = row != nullptr ? row : col, job.col = nullptr;
  switch (in) {
    case In::f32:
      detail::cast<In::f32>(job);
      break;
    case In::f16:
      detail::cast<In::f16>(job);
      break;
    case In::bf16:
      detail::cast<In::bf16>(job);
      break;
  }
  if (vector && row != nullptr && col != nullptr) std::memcpy(col, row, static_cast<size_t>(M * K));
}

}  // namespace tejit::cpu
