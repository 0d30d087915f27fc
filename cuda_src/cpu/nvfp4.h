// NVFP4 on the host, one direction at a time: the rows of a matrix in blocks of 16 (or tiles of 16x16).
//
// A row goes by panels that stay in the first-level cache: maxima of the blocks, their scales, then the
// codes, all of a panel in vectors when they round to nearest. The rarer modes go element by element.
#pragma once

#include <cstdint>
#include <cstring>

#include "elements.h"
#include "fp8_amax.h"
#include "fp8_encode.h"
#include "nvfp4_rules.h"
#include "nvfp4_turn.h"
#include "parallel.h"
#include "simd.h"

#if defined(__SSE4_1__)
#include <smmintrin.h>
#endif

namespace tejit::cpu {

enum FourOverSix : int { kNoFourOverSix = 0, kMeanAbsolute = 1, kMeanSquare = 2 };

// One direction: a matrix (rows, cols), contracted dimension last, and where its results go.
struct Nvfp4 {
  const void* x;
  In in;  // bf16 or f32
  int64_t rows, cols;
  bool columnwise;    // it is the transpose of the tensor
  bool square;        // a scale for 16x16 elements
  bool row_scaled;    // an amax for each row
  int four_over_six;  // FourOverSix
  float e4m3_max;
  const int64_t* seed;  // seed and offset; null: to nearest
  const float* amax;    // one, or one a row
  uint8_t* data;        // rows * cols / 2
  Fp4ScaleMap scales;
};

namespace detail {

constexpr int kPanel = 64;  // blocks of a row that are worked on together

// The largest magnitude of a block, as bits; above infinity's where there is a NaN.
template <In in>
inline uint32_t block_largest(const uint8_t* x) {
  if constexpr (in == In::f32) {
    simd::Int acc = simd::fill32(0);
    const simd::Int magnitude = simd::fill32(0x7FFFFFFFu);
    for (int i = 0; i < kFp4Block * 4; i += simd::kBytes)
      acc = simd::max_upto32(acc, simd::load(x + i) & magnitude, magnitude);
    return simd::largest32(acc);
  } else {
#if defined(__SSE4_1__)
    const __m128i magnitude = _mm_set1_epi16(0x7FFF);
    const auto half = [&](int i) {
      return _mm_and_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x) + i), magnitude);
    };
    // The smallest of the complements; unsigned.
    const __m128i flipped = _mm_xor_si128(_mm_max_epi16(half(0), half(1)), _mm_set1_epi16(-1));
    return 0xFFFFu & ~static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_minpos_epu16(flipped)));
#else
    uint32_t largest = 0;
    for (int i = 0; i < kFp4Block; ++i) {
      const uint32_t bits = element_bits(x, in, i) & 0x7FFFu;
      largest = bits > largest ? bits : largest;
    }
    return largest;
#endif
  }
}

// kBytes pairs of elements, one a byte with its sign in bit 7, to as many packed bytes.
inline simd::Int packed_nibbles(simd::Int low, simd::Int high) {
  const auto nibbles = [](simd::Int pairs) {
    simd::Int w = simd::or_and(pairs & simd::fill16(0x7), simd::shr16<4>(pairs), simd::fill16(0x78));
    return simd::or_and(w, simd::shr16<8>(pairs), simd::fill16(0x80));
  };
  return simd::pack16(nibbles(low), nibbles(high));
}

// `count` <= kPanel blocks at x to nearest, each with its multiplier. `multipliers` can be read beyond count.
template <In in>
inline void encode_nearest(const Fp8Encoder& encoder, const uint8_t* x, int count, const float* multipliers,
                           uint8_t* to) {
  constexpr int64_t size = bytes_of(in);
  constexpr int step = 2 * Fp8Encoder::kElements, blocks = step / kFp4Block;
  for (int j = 0; j < count; j += blocks) {
    alignas(64) float scales[step];
    for (int b = 0; b < blocks; ++b) {
      const int first = b * kFp4Block, base = first / Fp8Encoder::kElements * Fp8Encoder::kElements;
#pragma GCC unroll 16
      for (int i = 0; i < kFp4Block; ++i)
        scales[base + Fp8Encoder::scale_lane<in>(first - base + i)] = multipliers[j + b];
    }
    const uint8_t* from = x + j * kFp4Block * size;
    alignas(64) uint8_t padded[step * size], codes[simd::kBytes];
    const int left = count - j;
    if (left < blocks) {
      std::memset(padded, 0, sizeof padded);
      std::memcpy(padded, from, static_cast<size_t>(left * kFp4Block * size));
      from = padded;
    }
    const simd::Int packed = packed_nibbles(
        encoder.template full<in>(from, scales),
        encoder.template full<in>(from + Fp8Encoder::kElements * size, scales + Fp8Encoder::kElements));
    uint8_t* out = to + j * (kFp4Block / 2);
    if (left < blocks) {
      simd::store(codes, packed);
      std::memcpy(out, codes, static_cast<size_t>(left * (kFp4Block / 2)));
    } else {
      simd::store(out, packed);
    }
  }
}

template <In in>
inline void block_values(const uint8_t* x, Fp4Floats& values) {
  for (int i = 0; i < kFp4Block; ++i) values[i] = to_float(in, element_bits(x, in, i));
}

template <In in>
inline void encode_stochastic(const Nvfp4& job, int64_t row, int64_t block, const uint8_t* x,
                              float multiplier, uint8_t* to) {
  Fp4Codes random, codes;
  Fp4Floats values;
  fp4_random(job.seed, job.columnwise, static_cast<uint64_t>(row * (job.cols / kFp4Block) + block), random);
  block_values<in>(x, values);
  fp4_stochastic(values, multiplier, random, codes);
  fp4_pack(codes, to);
}

// One of the two scales that 4over6 tries, for a block or for the rows of a tile.
struct Candidate {
  uint8_t scale;
  float multiplier, factor;
  float errors[kFp4Block];
  uint8_t packed[kFp4Block][kFp4Block / 2];

  Candidate(float wanted, float decode)
      : scale(e4m3_byte(wanted)), multiplier(fp4_multiplier(scale, decode)), factor(e4m3_value(scale)) {}

  void add_row(int row, const Fp4Floats& x, bool squares, float amax, float full) {
    Fp4Codes codes;
    Fp4Floats each;
    fp4_nearest(x, multiplier, codes, each);
    fp4_pack(codes, packed[row]);
    for (int i = 0; i < kFp4Block; ++i) {
      const float difference = each[i] * factor * amax / full - x[i];
      each[i] = squares ? difference * difference : float_of(bits_of(difference) & 0x7FFFFFFFu);
    }
    float sum = 0.0f;
    for (int i = 0; i < kFp4Block; ++i) sum += each[i];
    errors[row] = sum;
  }

  float error(int height) {
    for (int half = height / 2; half > 0; half /= 2) {
      for (int r = 0; r < half; ++r) errors[r] += errors[half + r];
    }
    return errors[0];
  }
};

// A block, or a tile of `height` rows: the better of two scales. Its rows are `pitch` bytes apart.
template <In in>
inline uint8_t encode_four_over_six(const Nvfp4& job, const Fp4Scales& s, float largest, const uint8_t* x,
                                    int64_t pitch, int height, uint8_t* to) {
  const float base = largest / kE2m1.max * s.encode, full = kE2m1.max * job.e4m3_max;
  const bool squares = job.four_over_six == kMeanSquare;
  Candidate six(base, s.decode), four(base * 1.5f, s.decode);
  for (int r = 0; r < height; ++r) {
    Fp4Floats values;
    block_values<in>(x + r * pitch, values);
    six.add_row(r, values, squares, s.amax, full);
    four.add_row(r, values, squares, s.amax, full);
  }
  const float error_of_six = six.error(height);
  const Candidate& taken = four.error(height) < error_of_six ? four : six;
  for (int r = 0; r < height; ++r)
    std::memcpy(to + r * (job.cols / 2), taken.packed[r], sizeof taken.packed[r]);
  return taken.scale;
}

// Rows of blocks, or rows of tiles, [begin, end).
template <In in>
TEJIT_NOINLINE inline void nvfp4_rows(const Nvfp4& job, int64_t begin, int64_t end) {
  constexpr int64_t size = bytes_of(in);
  constexpr uint8_t nan = static_cast<uint8_t>(kNanCode);
  const int height = job.square ? kFp4Block : 1;
  const int64_t blocks = job.cols / kFp4Block, pitch = job.cols * size;
  const Fp8Encoder encoder(1.0f, kE2m1);
  Fp4Scales s = fp4_scales(job.amax[0], job.e4m3_max);
  float table[128];
  for (int i = 0; i < 128; ++i) table[i] = fp4_multiplier(static_cast<uint8_t>(i), s.decode);
  for (int64_t row = begin * height; row < end * height; row += height) {
    if (job.row_scaled) s = fp4_scales(job.amax[row], job.e4m3_max);
    for (int64_t first = 0; first < blocks; first += kPanel) {
      const int count = static_cast<int>(blocks - first < kPanel ? blocks - first : kPanel);
      const uint8_t* x = static_cast<const uint8_t*>(job.x) + row * pitch + first * kFp4Block * size;
      uint8_t* to = job.data + (row * blocks + first) * (kFp4Block / 2);
      uint32_t largest[kPanel] = {};
      for (int r = 0; r < height; ++r) {
        for (int j = 0; j < count; ++j) {
          const uint32_t bits = block_largest<in>(x + r * pitch + j * kFp4Block * size);
          largest[j] = bits > largest[j] ? bits : largest[j];
        }
      }
      uint8_t scales[kPanel];
      float multipliers[kPanel] = {};
      bool any_nan = false;
      for (int j = 0; j < count; ++j) {
        if (largest[j] > infinity_bits(in)) {
          scales[j] = nan;
          multipliers[j] = 1.0f;
          any_nan = true;
        } else if (job.four_over_six != kNoFourOverSix) {
          scales[j] = encode_four_over_six<in>(job, s, to_float(in, largest[j]), x + j * kFp4Block * size,
                                               pitch, height, to + j * (kFp4Block / 2));
        } else {
          scales[j] = e4m3_byte(to_float(in, largest[j]) * s.sixth);
          multipliers[j] = job.row_scaled ? fp4_multiplier(scales[j], s.decode) : table[scales[j]];
        }
      }
      for (int r = 0; r < height; ++r) {
        const uint8_t* line = x + r * pitch;
        uint8_t* codes = to + r * blocks * (kFp4Block / 2);
        if (job.four_over_six == kNoFourOverSix && job.seed == nullptr)
          encode_nearest<in>(encoder, line, count, multipliers, codes);
        for (int j = 0; j < count; ++j) {
          job.scales.at(row + r, first + j) = scales[j];
          if (job.seed != nullptr)
            encode_stochastic<in>(job, row + r, first + j, line + j * kFp4Block * size, multipliers[j],
                                  codes + j * (kFp4Block / 2));
        }
        for (int j = 0; any_nan && j < count; ++j) {
          if (scales[j] == nan) std::memset(codes + j * (kFp4Block / 2), 0, kFp4Block / 2);
        }
      }
    }
    for (int r = 0; r < height; ++r) job.scales.zero(row + r, blocks);
  }
}

}  // namespace detail

// Codes and scales of one direction, the padding of the scales included. Rows and columns are not 0.
inline void nvfp4_encode(const Nvfp4& job) {
  const int64_t height = job.square ? kFp4Block : 1, groups = job.rows / height;
  const auto run = [&](auto rows) {
    parallel_for(groups, 1 + kBlock / (job.cols * height),
                 [&](int64_t begin, int64_t end) { rows(job, begin, end); });
  };
  job.in == In::bf16 ? run(detail::nvfp4_rows<In::bf16>) : run(detail::nvfp4_rows<In::f32>);
  for (int64_t i = job.rows; i < job.scales.rows; ++i) job.scales.zero(i, 0);
}

// max |x| of a matrix, or of each of its rows; NaN does not enter.
inline void nvfp4_amax(const void* x, In in, int64_t rows, int64_t cols, bool row_scaled, float* amax) {
  if (rows == 0 || cols == 0) {
    for (int64_t i = 0; i < (row_scaled ? rows : 1); ++i) amax[i] = 0.0f;
  } else if (!row_scaled) {
    *amax = fp8_amax(x, in, rows * cols);
  } else {
    parallel_for(rows, 1 + kBlock / cols, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const auto* row = static_cast<const uint8_t*>(x) + i * cols * bytes_of(in);
        amax[i] = to_float(in, in == In::f32 ? detail::amax_bits<true>(row, cols, infinity_bits(in))
                                             : detail::amax_bits<false>(row, cols, infinity_bits(in)));
      }
    });
  }
}

// What the amax buffers hold after a quantization.
inline void nvfp4_store_amax(const float* amax, int64_t count, float e4m3_max, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = fp4_scales(amax[i], e4m3_max).amax;
}

}  // namespace tejit::cpu
