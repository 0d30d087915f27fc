// NVFP4 on the host, one direction at a time: the rows of a matrix in blocks of 16 (or tiles of 16x16).
//
// A row goes by panels that stay in the first-level cache: maxima of the blocks, their scales, then the
// codes, all of a panel in vectors when they round to nearest. The rarer modes go element by element.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "elements.h"
#include "fp8_amax.h"
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

// The multipliers of the register number r of a panel whose blocks have these.
template <In in>
inline simd::Float multiplier_of(const float* multipliers, int r) {
  constexpr int elements = static_cast<int>(simd::kBytes / bytes_of(in));
#if defined(TEJIT_CPU_AVX512)
  if constexpr (elements == 2 * kFp4Block)
    return _mm512_insertf32x8(_mm512_set1_ps(multipliers[2 * r]), _mm256_set1_ps(multipliers[2 * r + 1]), 1);
#endif
  return simd::fill(multipliers[r * elements / kFp4Block]);
}

// Lanes of |x| to codes without sign, in the low three bits. What Fp8Encoder does, for E2M1.
inline simd::Int nearest_lanes(simd::Int magnitude, simd::Float multiplier) {
  const simd::Float y = simd::min(simd::mul(simd::as_float(magnitude), multiplier), simd::fill(kE2m1.max));
  const simd::Int power = simd::as_int(simd::max(y, simd::fill(1.0f))) & simd::fill32(0x7F800000u);
  const simd::Int rounded = simd::as_int(simd::mul_add(simd::as_float(power), simd::fill(0x1p22f), y));
  return simd::add32(simd::add32(rounded, simd::shr32<22>(power)), simd::fill32(2)) & simd::fill32(7);
}

// 2 * kBytes elements from register r of the panel at x to packed codes.
template <In in>
inline simd::Int nearest_bytes(const uint8_t* x, const float* multipliers, int r) {
  const auto lanes = [&](int i) {
    const simd::Int v = simd::load(x + (r + i) * simd::kBytes);
    const simd::Float m = multiplier_of<in>(multipliers, r + i);
    if constexpr (in == In::f32) {
      return simd::or_and(nearest_lanes(v & simd::fill32(0x7FFFFFFFu), m), simd::shr32<28>(v),
                          simd::fill32(8));
    } else {  // a lane holds two elements, which become one byte
      const simd::Int even = nearest_lanes(simd::shl32<16>(v & simd::fill32(0x7FFF)), m);
      const simd::Int odd = nearest_lanes(v & simd::fill32(0x7FFF0000u), m);
      const simd::Int both = simd::or_and(even, simd::shl32<4>(odd), simd::fill32(0x70));
      return simd::or_and(simd::or_and(both, simd::shr32<12>(v), simd::fill32(8)), simd::shr32<24>(v),
                          simd::fill32(0x80));
    }
  };
  const auto four = [&](int i) { return simd::pack32(lanes(i), lanes(i + 1), lanes(i + 2), lanes(i + 3)); };
  if constexpr (in == In::f32) {
    const auto pairs = [](simd::Int w) {
      return simd::or_and(w & simd::fill16(0x0F), simd::shr16<4>(w), simd::fill16(0xF0));
    };
    return simd::pack16(pairs(four(0)), pairs(four(4)));
  } else {
    return four(0);
  }
}

// `count` <= kPanel blocks at x to nearest, each with its multiplier. `multipliers` can be read beyond count.
template <In in>
inline void encode_nearest(const uint8_t* x, int count, const float* multipliers, uint8_t* to) {
  constexpr int64_t size = bytes_of(in);
  constexpr int blocks = 2 * simd::kBytes / kFp4Block, registers = static_cast<int>(2 * size);
  int j = 0, r = 0;
  for (; j + blocks <= count; j += blocks, r += registers)
    simd::store(to + j * (kFp4Block / 2), nearest_bytes<in>(x, multipliers, r));
  if (j < count) {
    alignas(64) uint8_t padded[2 * simd::kBytes * size] = {}, codes[simd::kBytes];
    std::memcpy(padded, x + j * kFp4Block * size, static_cast<size_t>((count - j) * kFp4Block * size));
    simd::store(codes, nearest_bytes<in>(padded, multipliers + j, 0));
    std::memcpy(to + j * (kFp4Block / 2), codes, static_cast<size_t>((count - j) * (kFp4Block / 2)));
  }
}

// E4M3 scales of a panel of blocks, from their maxima, and the multipliers that follow.
template <In in>
inline void panel_scales(const uint32_t* largest, const Fp4Scales& s, uint8_t* scales, float* multipliers) {
  constexpr uint32_t min_normal = static_cast<uint32_t>(kE4m3.min_exponent) << 23;
  uint32_t wide[kPanel];
  for (int j = 0; j < kPanel; ++j) {  // all of them: a fixed count is vectorised
    float v = (in == In::f32 ? float_of(largest[j]) : float_of(largest[j] << 16)) * s.sixth;
    v = v < kE4m3.max ? v : kE4m3.max;
    const uint32_t bits = bits_of(v), power = (bits > min_normal ? bits : min_normal) & 0x7F800000u;
    const float unit = float_of(power) * 0x1p20f, rounded = unit + v;
    wide[j] = (bits_of(rounded) + (power >> 20) - (min_normal >> 20)) & 0x7Fu;
    const float t = 1.0f / ((rounded - unit) * s.decode), most = std::numeric_limits<float>::max();
    multipliers[j] = t < most ? t : most;
  }
  for (int j = 0; j < kPanel; ++j) scales[j] = static_cast<uint8_t>(wide[j]);
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
  constexpr int packed = kFp4Block / 2;
  const int height = job.square ? kFp4Block : 1;
  const bool better_of_two = job.four_over_six != kNoFourOverSix;
  const int64_t blocks = job.cols / kFp4Block, pitch = job.cols * size;
  Fp4Scales s = fp4_scales(job.amax[0], job.e4m3_max);
  for (int64_t row = begin * height; row < end * height; row += height) {
    if (job.row_scaled) s = fp4_scales(job.amax[row], job.e4m3_max);
    for (int64_t first = 0; first < blocks; first += kPanel) {
      const int count = static_cast<int>(blocks - first < kPanel ? blocks - first : kPanel);
      const uint8_t* x = static_cast<const uint8_t*>(job.x) + row * pitch + first * kFp4Block * size;
      uint8_t* to = job.data + (row * blocks + first) * packed;
      uint32_t largest[kPanel] = {};
      bool any_nan = false;
      for (int r = 0; r < height; ++r) {
        for (int j = 0; j < count; ++j) {
          const uint32_t bits = block_largest<in>(x + r * pitch + j * kFp4Block * size);
          largest[j] = bits > largest[j] ? bits : largest[j];
          any_nan |= bits > infinity_bits(in);
        }
      }
      uint8_t scales[kPanel];
      float multipliers[kPanel];
      panel_scales<in>(largest, s, scales, multipliers);
      for (int j = 0; better_of_two && j < count; ++j)
        scales[j] = encode_four_over_six<in>(job, s, to_float(in, largest[j]), x + j * kFp4Block * size,
                                             pitch, height, to + j * packed);
      for (int r = 0; r < height; ++r) {
        const uint8_t* line = x + r * pitch;
        uint8_t* codes = to + r * blocks * packed;
        if (job.seed != nullptr) {
          for (int j = 0; j < count; ++j)
            encode_stochastic<in>(job, row + r, first + j, line + j * kFp4Block * size, multipliers[j],
                                  codes + j * packed);
        } else if (!better_of_two) {
          encode_nearest<in>(line, count, multipliers, codes);
        }
        for (int j = 0; any_nan && j < count; ++j) {
          if (largest[j] <= infinity_bits(in)) continue;
          scales[j] = static_cast<uint8_t>(kNanCode);
          std::memset(codes + j * packed, 0, packed);
        }
        job.scales.write(row + r, first, scales, count);
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
