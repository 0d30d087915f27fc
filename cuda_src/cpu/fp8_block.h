// FP8 in blocks of 128 on the host: amax, scales and bytes of both directions from one reading of x.
//
// The work goes by tiles of 128x128, which stay in the second-level cache between the pass for the maxima and
// the pass for the bytes. At an edge a tile is completed with zeros first. Rowwise blocks alone need no
// tiles: they go row by row.
#pragma once

#include <cstdint>
#include <cstring>

#include "fp8_amax.h"
#include "fp8_cast.h"
#include "fp8_encode.h"
#include "parallel.h"
#include "simd.h"

namespace tejit::cpu {

// What one call reads and writes: x of M rows and K columns; a direction's two pointers are null where it is
// not wanted. A row of scales has row_pitch (col_pitch) entries, of which those behind the last block are
// written as 0.
struct Fp8Blocks {
  const void* x;
  int64_t M, K;
  int fp8;
  bool pow2;
  float eps, limit;
  uint8_t* row;
  float* row_scale_inv;
  int64_t row_pitch;
  uint8_t* col;
  float* col_scale_inv;
  int64_t col_pitch;
};

namespace detail {

constexpr int kSide = 128;
constexpr int kHalves = kSide / kLine;  // a tile's side in lines of its codes
constexpr int64_t kTilesHigh = 4;       // tiles are visited down groups of this many rows of tiles

template <In in>
inline simd::Int join_amax(simd::Int acc, simd::Int v) {
  if constexpr (in == In::f32) {
    return simd::max_upto32(acc, v & simd::fill32(0x7FFFFFFFu), simd::fill32(infinity_bits(in)));
  } else {
    return simd::max_upto16(acc, v & simd::fill16(0x7FFF), simd::fill16(infinity_bits(in)));
  }
}

template <In in>
inline float largest(simd::Int acc) {
  if constexpr (in != In::f32) {
    acc = simd::max_upto32(acc & simd::fill32(0xFFFF), simd::shr32<16>(acc), simd::fill32(0x7FFFFFFFu));
  }
  return to_float(in, simd::largest32(acc));
}

inline float scale_of(const Fp8Blocks& job, float amax) {
  return scale_rule(amax, kFp8[job.fp8].max, job.pow2, job.eps, job.limit);
}

// Codes of a tile as four squares of 64x64, each of which transpose_tile takes.
inline uint8_t* line_of(uint8_t* codes, int row, int column) {
  return codes + (row / kLine * kHalves + column / kLine) * kTile + row % kLine * kLine + column % kLine;
}

template <In in>
inline float row_amax(const uint8_t* x) {
  simd::Int acc = simd::fill32(0);
  for (int i = 0; i < kSide * bytes_of(in); i += simd::kBytes) acc = join_amax<in>(acc, simd::load(x + i));
  return largest<in>(acc);
}

// Lines of codes to their place in the output: `lines(r, half)` is 64 bytes, of which those inside are
// written.
template <class Lines>
inline void write_lines(uint8_t* to, int64_t pitch, int64_t rows, int64_t columns, bool stream,
                        const Lines& lines) {
  for (int64_t r = 0; r < rows; ++r, to += pitch) {
    for (int half = 0; half < kHalves && half * kLine < columns; ++half) {
      const int64_t left = columns - half * kLine;
      copy_line(to + half * kLine, lines(r, half), left < kLine ? left : kLine, stream);
    }
  }
}

inline void write_row(const Fp8Blocks& job, uint8_t* codes, Corner here, int64_t rows, int64_t columns,
                      bool stream) {
  write_lines(job.row + here.m * job.K + here.k, job.K, rows, columns, stream,
              [&](int64_t r, int half) { return line_of(codes, static_cast<int>(r), half * kLine); });
}

inline void write_col(const Fp8Blocks& job, uint8_t* codes, Corner here, int64_t rows, int64_t columns,
                      bool stream) {
  alignas(kLine) uint8_t turned[kHalves * kHalves * kTile];
  for (int a = 0; a < kHalves; ++a) {
    for (int b = 0; b < kHalves; ++b)
      transpose_tile(line_of(codes, a * kLine, b * kLine), line_of(turned, b * kLine, a * kLine));
  }
  write_lines(job.col + here.k * job.M + here.m, job.M, columns, rows, stream,
              [&](int64_t c, int half) { return line_of(turned, static_cast<int>(c), half * kLine); });
}

inline void zero(float* from, float* to) {
  while (from < to) *from++ = 0.0f;
}

// A whole tile of x at `from`, its rows `pitch` bytes apart; `rows` and `columns` of it lie inside the
// matrix.
template <In in>
struct BlockTile {
  static constexpr int64_t kSize = bytes_of(in);
  static constexpr int kStep = Fp8Encoder::kElements;

  const Fp8Blocks& job;
  const uint8_t* from;
  int64_t pitch;
  Corner here;
  int64_t rows, columns;
  bool stream;

  template <class Encode>
  void encode_into(uint8_t* codes, const Encode& encode) const {
    for (int r = 0; r < kSide; ++r) {
      for (int k = 0; k < kSide; k += kStep)
        simd::store(line_of(codes, r, k), encode(from + r * pitch + k * kSize, k));
    }
  }

  void square(Fp8Encoder& encoder, uint8_t* codes) const {
    simd::Int acc = simd::fill32(0);
    for (int r = 0; r < kSide; ++r) {
      for (int i = 0; i < kSide * kSize; i += simd::kBytes)
        acc = join_amax<in>(acc, simd::load(from + r * pitch + i));
    }
    const float scale = scale_of(job, largest<in>(acc)), inverse = 1.0f / scale;
    encoder.rescale(scale);
    encode_into(codes, [&](const uint8_t* x, int) { return encoder.template full<in>(x); });
    const int64_t i = here.m / kSide, j = here.k / kSide;
    if (job.row != nullptr) {
      float* line = job.row_scale_inv + i * job.row_pitch;
      line[j] = inverse;
      if (here.k + kSide >= job.K) zero(line + j + 1, line + job.row_pitch);
      write_row(job, codes, here, rows, columns, stream);
    }
    if (job.col != nullptr) {
      float* line = job.col_scale_inv + j * job.col_pitch;
      line[i] = inverse;
      if (here.m + kSide >= job.M) zero(line + i + 1, line + job.col_pitch);
      write_col(job, codes, here, rows, columns, stream);
    }
  }

  void along_rows(Fp8Encoder& encoder, uint8_t* codes) const {
    float* line = job.row_scale_inv + here.k / kSide * job.row_pitch;
    for (int64_t r = 0; r < rows; ++r) {
      const float scale = scale_of(job, row_amax<in>(from + r * pitch));
      line[here.m + r] = 1.0f / scale;
      encoder.rescale(scale);
      for (int k = 0; k < kSide; k += kStep)
        simd::store(line_of(codes, static_cast<int>(r), k),
                    encoder.template full<in>(from + r * pitch + k * kSize));
    }
    if (here.m + kSide >= job.M) zero(line + job.M, line + job.row_pitch);
    write_row(job, codes, here, rows, columns, stream);
  }

  void along_columns(const Fp8Encoder& encoder, uint8_t* codes) const {
    constexpr int registers = kSide * kSize / simd::kBytes;
    alignas(64) uint8_t magnitudes[kSide * kSize];
    for (int i = 0; i < registers; i += 4) {  // four sums in registers, then down again
      simd::Int acc[4] = {simd::fill32(0), simd::fill32(0), simd::fill32(0), simd::fill32(0)};
      for (int r = 0; r < kSide; ++r) {
        const uint8_t* x = from + r * pitch + i * simd::kBytes;
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) acc[j] = join_amax<in>(acc[j], simd::load(x + j * simd::kBytes));
      }
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) simd::store(magnitudes + (i + j) * simd::kBytes, acc[j]);
    }
    alignas(64) float scales[kSide];
    float* line = job.col_scale_inv + here.m / kSide * job.col_pitch + here.k;
    for (int k = 0; k < kSide; ++k) {
      const float scale = scale_of(job, to_float(in, element_bits(magnitudes, in, k)));
      scales[k / kStep * kStep + Fp8Encoder::scale_lane<in>(k % kStep)] = scale;
      if (k < columns) line[k] = 1.0f / scale;
    }
    if (here.k + kSide >= job.K) zero(line + columns, line - here.k + job.col_pitch);
    encode_into(codes, [&](const uint8_t* x, int k) { return encoder.template full<in>(x, scales + k); });
    write_col(job, codes, here, rows, columns, stream);
  }
};

inline Corner corner_of_block(const Fp8Blocks& job, int64_t index) {
  const int64_t down = (job.M + kSide - 1) / kSide, across = (job.K + kSide - 1) / kSide;
  const int64_t first = index / (kTilesHigh * across) * kTilesHigh, in_group = index - first * across;
  const int64_t height = down - first < kTilesHigh ? down - first : kTilesHigh;
  return {(first + in_group % height) * kSide, in_group / height * kSide};
}

template <In in>
inline void prefetch_tile(const Fp8Blocks& job, Corner next) {
  constexpr int64_t size = bytes_of(in);
  const int64_t rows = job.M - next.m < kSide ? job.M - next.m : kSide;
  for (int64_t r = 0; r < rows; ++r) {
    const auto* x = static_cast<const uint8_t*>(job.x) + ((next.m + r) * job.K + next.k) * size;
    for (int64_t i = 0; i < kSide * size; i += kLine) __builtin_prefetch(x + i, 0, 2);
  }
}

template <In in>
TEJIT_NOINLINE inline void block_tiles(const Fp8Blocks& job, bool squares, bool stream, int64_t begin,
                                       int64_t end) {
  constexpr int64_t size = bytes_of(in);
  alignas(kLine) uint8_t codes[kHalves * kHalves * kTile], padded[kSide * kSide * size];
  Fp8Encoder encoder(1.0f, kFp8[job.fp8]);
  for (int64_t index = begin; index < end; ++index) {
    const Corner here = corner_of_block(job, index);
    const int64_t rows = job.M - here.m < kSide ? job.M - here.m : kSide;
    const int64_t columns = job.K - here.k < kSide ? job.K - here.k : kSide;
    BlockTile<in> tile{job,          static_cast<const uint8_t*>(job.x) + (here.m * job.K + here.k) * size,
                       job.K * size, here,
                       rows,         columns,
                       stream};
    if (rows < kSide || columns < kSide) {
      std::memset(padded, 0, sizeof padded);
      for (int64_t r = 0; r < rows; ++r)
        std::memcpy(padded + r * kSide * size, tile.from + r * tile.pitch,
                    static_cast<size_t>(columns * size));
      tile.from = padded;
      tile.pitch = kSide * size;
    }
    // No hardware prefetcher follows 128 short pieces that lie far apart.
    if (index + 1 < end) prefetch_tile<in>(job, corner_of_block(job, index + 1));
    if (squares) {
      tile.square(encoder, codes);
    } else {
      if (job.row != nullptr) tile.along_rows(encoder, codes);
      if (job.col != nullptr) tile.along_columns(encoder, codes);
    }
  }
  if (stream) simd::fence();
}

// Rowwise blocks alone, rows [begin, end).
template <In in>
TEJIT_NOINLINE inline void block_rows(const Fp8Blocks& job, bool stream, int64_t begin, int64_t end) {
  constexpr int64_t size = bytes_of(in);
  Fp8Encoder encoder(1.0f, kFp8[job.fp8]);
  alignas(kLine) uint8_t padded[kSide * size], codes[kSide];
  for (int64_t m = begin; m < end; ++m) {
    for (int64_t k = 0; k < job.K; k += kSide) {
      const auto* x = static_cast<const uint8_t*>(job.x) + (m * job.K + k) * size;
      const int64_t left = job.K - k < kSide ? job.K - k : kSide;
      if (left < kSide) {
        std::memset(padded, 0, sizeof padded);
        std::memcpy(padded, x, static_cast<size_t>(left * size));
        x = padded;
      }
      const float scale = scale_of(job, row_amax<in>(x));
      float* line = job.row_scale_inv + k / kSide * job.row_pitch;
      line[m] = 1.0f / scale;
      if (m + 1 == job.M) zero(line + job.M, line + job.row_pitch);
      encoder.rescale(scale);
      for (int i = 0; i < kSide; i += Fp8Encoder::kElements)
        simd::store(codes + i, encoder.template full<in>(x + i * size));
      write_lines(job.row + m * job.K + k, 0, 1, left, stream,
                  [&](int64_t, int half) { return codes + half * kLine; });
    }
  }
  if (stream) simd::fence();
}

template <In in>
inline void quantize_blocks(const Fp8Blocks& job, bool squares) {
  const int64_t out_bytes = job.M * job.K * ((job.row != nullptr) + (job.col != nullptr));
  const bool stream = out_bytes >= kStreamBytes;
  if (!squares && job.col == nullptr) {
    constexpr int64_t group = 16;  // neighbours' scales share a cache line
    parallel_for((job.M + group - 1) / group, 1 + kBlock / group / job.K, [&](int64_t begin, int64_t end) {
      block_rows<in>(job, stream, begin * group, end * group < job.M ? end * group : job.M);
    });
    return;
  }
  const int64_t tiles = (job.M + kSide - 1) / kSide * ((job.K + kSide - 1) / kSide);
  parallel_for(tiles, kBlock / (kSide * kSide),
               [&](int64_t begin, int64_t end) { block_tiles<in>(job, squares, stream, begin, end); });
}

}  // namespace detail

// One scale for each tile of 128x128 (`squares`), or for each 1x128 (row) and each 128x1 (col).
inline void fp8_blocks(const Fp8Blocks& job, In in, bool squares) {
  if (job.M == 0 || job.K == 0 || (job.row == nullptr && job.col == nullptr)) return;
  switch (in) {
    case In::f32:
      detail::quantize_blocks<In::f32>(job, squares);
      break;
    case In::f16:
      detail::quantize_blocks<In::f16>(job, squares);
      break;
    case In::bf16:
      detail::quantize_blocks<In::bf16>(job, squares);
      break;
  }
}

}  // namespace tejit::cpu
