// MXFP8 on the host: amax, exponents and bytes of both directions from one reading of x.
//
// Rowwise blocks lie one behind the other in memory, so alone they go through x as a flat list of blocks. What
// needs maxima down columns goes by tiles of 32 rows, which are copied beside each other first: rows of x that
// lie a power of two apart would push each other out of the first-level cache between the passes.
#pragma once

#include <cstdint>
#include <cstring>

#include "fp8_block.h"
#include "fp8_encode.h"
#include "parallel.h"
#include "simd.h"

namespace tejit::cpu {

// Where the exponent of outer index i (a row of x for rowwise scales, a column for columnwise ones) and block j
// lies: at i * pitch + j * step or, swizzled, in the order that the GEMM reads.
struct Mxfp8Scales {
  uint8_t* to = nullptr;  // null: this direction is not wanted
  int64_t outer = 0, blocks = 0;
  int64_t pitch = 0, step = 1;
  int64_t pieces = 0;  // pieces of 4 blocks in a row of pieces; 0: not swizzled

  int64_t at(int64_t i, int64_t j) const {
    if (pieces == 0) return i * pitch + j * step;
    return (i / 128 * pieces + j / 4) * 512 + i % 32 * 16 + i % 128 / 32 * 4 + j % 4;
  }
};

// x of M rows and K columns, and what one call writes.
struct Mxfp8 {
  const void* x;
  int64_t M, K;
  int fp8;
  uint8_t* row;
  uint8_t* col;
  Mxfp8Scales row_scales, col_scales;
};

namespace mx {

constexpr int kBlock = 32;
constexpr int kColumns = 256;               // of a tile
constexpr int kAcross = kColumns / kBlock;  // blocks in a row of it
constexpr int64_t kFlat = 128;              // blocks that the flat list takes at once

// 1 / max, rounded to float32.
constexpr float kInverseMax[2] = {1.0f / 448.0f, 1.0f / 57344.0f};

struct Rule {
  simd::Int exponent;      // the E8M0 byte in 32-bit lanes
  simd::Float multiplier;  // 2^(127 - byte)
};

// The exponent of amax / max, rounded up to a power of two. What is added carries into the exponent where the
// number is above its power of two; that of a subnormal number is 2^-127.
inline Rule rule(simd::Float amax, simd::Float inverse_max) {
  const simd::Int bits = simd::as_int(simd::mul(amax, inverse_max));
  const simd::Int below = simd::where_gt32(simd::fill32(0x00800000u), bits, simd::fill32(0x003FFFFFu),
                                           simd::fill32(0x007FFFFFu));
  const simd::Int largest = simd::fill32(254);
  simd::Int exponent = simd::shr32<23>(simd::add32(bits, below));
  exponent = simd::where_gt32(exponent, largest, largest, exponent);
  const simd::Int power = simd::shl32<23>(simd::sub32(largest, exponent));
  return {exponent, simd::as_float(simd::where_gt32(exponent, simd::fill32(253), simd::fill32(0x00400000u),
                                                    power))};
}

// `count` amaxes, in arrays that reach to the next multiple of kBytes.
inline void rules(const float* amax, int64_t count, float inverse_max, float* multipliers, uint8_t* bytes) {
  constexpr int lanes = simd::kBytes / 4;
  for (int64_t i = 0; i < count; i += simd::kBytes) {
    simd::Int exponents[4];
    for (int q = 0; q < 4; ++q) {
      const Rule r =
          rule(simd::as_float(simd::load(amax + i + q * lanes)), simd::fill(inverse_max));
      exponents[q] = r.exponent;
      simd::store(multipliers + i + q * lanes, simd::as_int(r.multiplier));
    }
    simd::store(bytes + i, simd::pack32(exponents[0], exponents[1], exponents[2], exponents[3]));
  }
}

template <In in>
inline float block_amax(const uint8_t* x) {
  simd::Int acc = simd::fill32(0);
  for (int i = 0; i < kBlock * bytes_of(in); i += simd::kBytes)
    acc = detail::join_amax<in>(acc, simd::load(x + i));
  return detail::largest<in>(acc);
}

inline void put(uint8_t* to, simd::Int codes, bool stream) {
  if (stream) {
    simd::stream(to, codes);
  } else {
    simd::store(to, codes);
  }
}

// `blocks` blocks that lie one behind the other, each with its own multiplier. `stream` needs a `to` on a
// multiple of kBytes.
template <In in>
inline void encode_blocks(const Fp8Encoder& encoder, const uint8_t* x, const float* multipliers,
                          int64_t blocks, uint8_t* to, bool stream) {
  constexpr int64_t size = bytes_of(in), step = Fp8Encoder::kElements;
  constexpr int64_t half = step / 2;
  const int64_t n = blocks * kBlock;
  int64_t i = 0;
  for (; i + step <= n; i += step) {
    const simd::Float first = simd::fill(multipliers[i / kBlock]);
    const simd::Float second = simd::fill(multipliers[(i + half) / kBlock]);
    put(to + i, encoder.template full<in>(x + i * size, first, second), stream);
  }
  if (i < n) {  // half a register: only where a register holds two blocks
    alignas(64) uint8_t padded[step * size] = {}, codes[step];
    std::memcpy(padded, x + i * size, static_cast<size_t>((n - i) * size));
    const simd::Float only = simd::fill(multipliers[i / kBlock]);
    simd::store(codes, encoder.template full<in>(padded, only, only));
    std::memcpy(to + i, codes, static_cast<size_t>(n - i));
  }
}

// Exponents of blocks j to j + n of outer index i.
inline void put_exponents(const Mxfp8Scales& scales, int64_t i, int64_t j, int64_t n, const uint8_t* bytes) {
  if (scales.pieces == 0 && scales.step == 1) {
    std::memcpy(scales.to + scales.at(i, j), bytes, static_cast<size_t>(n));
  } else {
    for (int64_t b = 0; b < n; ++b) scales.to[scales.at(i, j + b)] = bytes[b];
  }
}

// --- rowwise alone ---

template <In in>
TEJIT_NOINLINE inline void flat_blocks(const Mxfp8& job, bool stream, int64_t begin, int64_t end) {
  constexpr int64_t size = bytes_of(in);
  const Fp8Encoder encoder(1.0f, kFp8[job.fp8]);
  const int64_t in_row = job.K / kBlock;
  alignas(64) float amax[kFlat], multipliers[kFlat];
  alignas(64) uint8_t bytes[kFlat];
  std::memset(amax, 0, sizeof amax);
  for (int64_t first = begin; first < end; first += kFlat) {
    const int64_t n = end - first < kFlat ? end - first : kFlat;
    const auto* x = static_cast<const uint8_t*>(job.x) + first * kBlock * size;
    for (int64_t b = 0; b < n; ++b) amax[b] = block_amax<in>(x + b * kBlock * size);
    rules(amax, n, kInverseMax[job.fp8], multipliers, bytes);
    encode_blocks<in>(encoder, x, multipliers, n, job.row + first * kBlock, stream);
    int64_t i = first / in_row, j = first % in_row;
    for (int64_t b = 0; b < n;) {
      const int64_t run = in_row - j < n - b ? in_row - j : n - b;
      put_exponents(job.row_scales, i, j, run, bytes + b);
      b += run, ++i, j = 0;
    }
  }
  if (stream) simd::fence();
}

// --- columnwise, both, and tiles of 32x32 ---

template <In in>
struct Mxfp8Tile {
  static constexpr int64_t kSize = bytes_of(in);
  static constexpr int64_t kPitch = kColumns * kSize;
  static constexpr int kStep = Fp8Encoder::kElements;
  static constexpr int kRegisters = static_cast<int>(kPitch / simd::kBytes);

  const Mxfp8& job;
  const Fp8Encoder& encoder;
  bool stream;
  int64_t m = 0, k = 0, columns = 0;
  alignas(64) uint8_t x[kBlock * kPitch];   // zeros where the matrix ends
  alignas(64) uint8_t magnitudes[kPitch];  // max |x| of every column, in x's dtype
  alignas(64) float multipliers[kBlock * kAcross];
  alignas(64) float column_multipliers[kColumns];
  alignas(64) uint8_t bytes[kColumns];

  Mxfp8Tile(const Mxfp8& j, const Fp8Encoder& e, bool s) : job(j), encoder(e), stream(s) {}

  void take(int64_t at_m, int64_t at_k) {
    m = at_m, k = at_k;
    columns = job.K - k < kColumns ? job.K - k : kColumns;
    const auto* from = static_cast<const uint8_t*>(job.x) + (m * job.K + k) * kSize;
    if (columns < kColumns) {
      std::memset(x, 0, sizeof x);
      for (int r = 0; r < kBlock; ++r)
        std::memcpy(x + r * kPitch, from + r * job.K * kSize, static_cast<size_t>(columns * kSize));
      maxima(x, kPitch, false);
    } else {
      maxima(from, job.K * kSize, true);
    }
  }

  void maxima(const uint8_t* from, int64_t pitch, bool copy) {
    for (int i = 0; i < kRegisters; i += 4) {
      simd::Int acc[4] = {simd::fill32(0), simd::fill32(0), simd::fill32(0), simd::fill32(0)};
      for (int r = 0; r < kBlock; ++r) {
        const uint8_t* piece = from + r * pitch + i * simd::kBytes;
        uint8_t* to = x + r * kPitch + i * simd::kBytes;
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          const simd::Int v = simd::load(piece + j * simd::kBytes);
          if (copy) simd::store(to + j * simd::kBytes, v);
          acc[j] = detail::join_amax<in>(acc[j], v);
        }
      }
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) simd::store(magnitudes + (i + j) * simd::kBytes, acc[j]);
    }
  }

  // A row of codes to its place, made by encode(k) for kStep columns from k on.
  template <class Encode>
  void put_row(uint8_t* out, int r, const Encode& encode) const {
    uint8_t* to = out + (m + r) * job.K + k;
    if (columns == kColumns) {
      for (int i = 0; i < kColumns; i += kStep) put(to + i, encode(i), stream);
    } else {
      alignas(64) uint8_t codes[kColumns];
      for (int i = 0; i < columns; i += kStep) simd::store(codes + i, encode(i));
      std::memcpy(to, codes, static_cast<size_t>(columns));
    }
  }

  // Rows of blocks; `same` where all rows share one row of multipliers.
  void put_blocks(uint8_t* out, bool same) const {
    for (int r = 0; r < kBlock; ++r) {
      const float* of_row = multipliers + (same ? 0 : r * kAcross);
      put_row(out, r, [&](int i) {
        return encoder.template full<in>(x + r * kPitch + i * kSize, simd::fill(of_row[i / kBlock]),
                                         simd::fill(of_row[(i + kStep / 2) / kBlock]));
      });
    }
  }

  void along_rows() {
    alignas(64) float amax[kBlock * kAcross];
    for (int b = 0; b < kBlock * kAcross; ++b) amax[b] = block_amax<in>(x + b * kBlock * kSize);
    rules(amax, kBlock * kAcross, kInverseMax[job.fp8], multipliers, bytes);
    for (int r = 0; r < kBlock; ++r)
      put_exponents(job.row_scales, m + r, k / kBlock, columns / kBlock, bytes + r * kAcross);
    put_blocks(job.row, false);
  }

  // The maxima of one register of columns as float32, even and odd ones apart for 16-bit elements, which is
  // the order of Fp8Encoder::scale_lane.
  static simd::Float widened(simd::Int v, bool odd) {
    if constexpr (in == In::f32) return simd::as_float(v);
    const simd::Int upper = odd ? v & simd::fill32(0xFFFF0000u) : simd::shl32<16>(v);
    if constexpr (in == In::bf16) return simd::as_float(upper);
    const simd::Int wide =
        simd::as_int(simd::mul(simd::as_float(simd::shr32<3>(upper)), simd::fill(0x1p112f)));
    // float16's inf has become 65536
    return simd::as_float(simd::where_gt32(wide, simd::fill32(bits_of(65504.0f)),
                                           simd::fill32(infinity_bits(In::f32)), wide));
  }

  void along_columns() {
    constexpr int lanes = simd::kBytes / 4;
    const simd::Float inverse = simd::fill(kInverseMax[job.fp8]);
    const auto of = [&](int reg, bool odd, float* to) {
      const Rule r = rule(widened(simd::load(magnitudes + reg * simd::kBytes), odd), inverse);
      simd::store(to, simd::as_int(r.multiplier));
      return r.exponent;
    };
    float* to = column_multipliers;
    for (int i = 0, reg = 0; i < kColumns; i += kStep) {
      if constexpr (in == In::f32) {
        simd::Int e[4];
        for (int q = 0; q < 4; ++q) e[q] = of(reg++, false, to + q * lanes);
        simd::store(bytes + i, simd::pack32(e[0], e[1], e[2], e[3]));
      } else {
        simd::Int e[2];
        for (int q = 0; q < 2; ++q, ++reg) {
          const simd::Int even = of(reg, false, to + 2 * q * lanes);
          e[q] = simd::merge_odd(even, of(reg, true, to + (2 * q + 1) * lanes));
        }
        simd::store(bytes + i, simd::pack16(e[0], e[1]));
      }
      to += 4 * lanes;
    }
    put_column_exponents();
    for (int r = 0; r < kBlock; ++r) {
      put_row(job.col, r, [&](int i) {
        return encoder.template full<in>(x + r * kPitch + i * kSize, column_multipliers + i);
      });
    }
  }

  void put_column_exponents() const {
    const Mxfp8Scales& scales = job.col_scales;
    if (scales.pieces == 0) {
      std::memcpy(scales.to + scales.at(k, m / kBlock), bytes, static_cast<size_t>(columns));
    } else {
      for (int64_t c = 0; c < columns; ++c) scales.to[scales.at(k + c, m / kBlock)] = bytes[c];
    }
  }

  void squares() {
    alignas(64) float amax[simd::kBytes < kAcross ? kAcross : simd::kBytes] = {};
    alignas(64) uint8_t of_tiles[sizeof amax / sizeof(float)];
    alignas(64) float made[sizeof amax / sizeof(float)];
    for (int b = 0; b < kAcross; ++b) amax[b] = block_amax<in>(magnitudes + b * kBlock * kSize);
    rules(amax, kAcross, kInverseMax[job.fp8], made, of_tiles);
    std::memcpy(multipliers, made, kAcross * sizeof(float));
    if (job.row != nullptr) {
      for (int r = 0; r < kBlock; ++r)
        put_exponents(job.row_scales, m + r, k / kBlock, columns / kBlock, of_tiles);
      put_blocks(job.row, true);
    }
    if (job.col != nullptr) {
      for (int c = 0; c < kColumns; ++c) bytes[c] = of_tiles[c / kBlock];
      put_column_exponents();
      put_blocks(job.col, true);
    }
  }

  void prefetch(int64_t at_m, int64_t at_k) const {
    const auto* next = static_cast<const uint8_t*>(job.x) + (at_m * job.K + at_k) * kSize;
    const int64_t left = job.K - at_k < kColumns ? job.K - at_k : kColumns;
    for (int r = 0; r < kBlock; ++r) {
      for (int64_t i = 0; i < left * kSize; i += 64) __builtin_prefetch(next + r * job.K * kSize + i, 0, 2);
    }
  }
};

template <In in>
TEJIT_NOINLINE inline void tiles(const Mxfp8& job, bool square, bool stream, int64_t begin, int64_t end) {
  const Fp8Encoder encoder(1.0f, kFp8[job.fp8]);
  Mxfp8Tile<in> tile(job, encoder, stream);
  const int64_t across = (job.K + kColumns - 1) / kColumns;
  for (int64_t t = begin; t < end; ++t) {
    tile.take(t / across * kBlock, t % across * kColumns);
    if (t + 1 < end) tile.prefetch((t + 1) / across * kBlock, (t + 1) % across * kColumns);
    if (square) {
      tile.squares();
    } else {
      if (job.row != nullptr) tile.along_rows();
      if (job.col != nullptr) tile.along_columns();
    }
  }
  if (stream) simd::fence();
}

// What the GEMM reads beyond the last block.
inline void zero_padding(const Mxfp8Scales& scales) {
  if (scales.to == nullptr) return;
  const int64_t rows = (scales.outer + 127) / 128 * 128, blocks = (scales.blocks + 3) / 4 * 4;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = i < scales.outer ? scales.blocks : 0; j < blocks; ++j) scales.to[scales.at(i, j)] = 0;
  }
}

inline bool streams(const uint8_t* to, int64_t pitch) {
  return to == nullptr || (reinterpret_cast<uintptr_t>(to) % simd::kBytes == 0 && pitch % simd::kBytes == 0);
}

template <In in>
inline void quantize(const Mxfp8& job, bool square) {
  const int64_t out_bytes = job.M * job.K * ((job.row != nullptr) + (job.col != nullptr));
  const bool large = out_bytes >= detail::kStreamBytes;
  if (!square && job.col == nullptr) {
    const int64_t blocks = job.M * job.K / kBlock, group = 16 * kFlat;
    parallel_for((blocks + group - 1) / group, 1, [&](int64_t begin, int64_t end) {
      flat_blocks<in>(job, large && streams(job.row, 0), begin * group,
                      end * group < blocks ? end * group : blocks);
    });
    return;
  }
  const bool stream = large && streams(job.row, job.K) && streams(job.col, job.K);
  const int64_t count = job.M / kBlock * ((job.K + kColumns - 1) / kColumns);
  parallel_for(count, 8, [&](int64_t begin, int64_t end) { tiles<in>(job, square, stream, begin, end); });
}

}  // namespace mx

// One exponent for each 1x32 (row) and each 32x1 (col), or for each tile of 32x32 (`square`). Sizes are
// multiples of 32 where a direction needs it.
inline void mxfp8(const Mxfp8& job, In in, bool square) {
  if (job.M == 0 || job.K == 0 || (job.row == nullptr && job.col == nullptr)) return;
  mx::zero_padding(job.row_scales);
  mx::zero_padding(job.col_scales);
  switch (in) {
    case In::f32:
      mx::quantize<In::f32>(job, square);
      break;
    case In::f16:
      mx::quantize<In::f16>(job, square);
      break;
    case In::bf16:
      mx::quantize<In::bf16>(job, square);
      break;
  }
}

}  // namespace tejit::cpu
