// FP8 in blocks of 128: maxima, scales and bytes of both directions from one reading of x.
//
// A block of threads moves a tile of 128x128, so that every block of elements lies inside one tile. Of 1x128
// blocks the maximum stays among the threads of a row; of 128x1 and 128x128 blocks it goes through shared
// memory, before the bytes do.
#pragma once

#include "common/reduce.cuh"
#include "common/tile.cuh"
#include "fp8/convert.cuh"
#include "fp8/scale.cuh"
#include "fp8_block/args.h"

namespace tejit {
namespace fp8_block {

template <typename T, int kThreads_, Load kLoad_ = Load::kCached, Store kStore_ = Store::kStream>
using BlockPlan = TilePlan<kThreads_, kBlock, kBlock / T::kPerVector, kLoad_, kStore_>;

// Column maxima of every warp, in shared memory.
template <typename T, int kThreads>
struct Maxima {
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kWords = kBlock / T::kWordElements;  // a tile's row as words
  // Four rows that are read at once then lie in different banks.
  static constexpr int kPitch = kWords + kWords / 16;
};

template <typename T, typename Plan, bool kTranspose>
struct BlockCast : Tile<T, Plan, BlockArgs> {
  using Base = Tile<T, Plan, BlockArgs>;
  using Memory = Maxima<T, Plan::kThreads>;
  using Base::args;
  using Base::kPer;
  using Base::lane;
  using Base::quad;
  using Base::v;
  static constexpr int kSteps = Base::kSteps;
  static constexpr u32 kAll = 0xffffffffu;

  TEJIT_DEVICE explicit BlockCast(const BlockArgs& a) : Base(a) {}

  TEJIT_DEVICE float scale_of(float amax) const {
    return fp8::scale_from_amax(amax, fp8::largest(args.fp8 != 0), args.pow2 != 0, args.eps, args.limit);
  }

  // Of a line of scales, entry i where the matrix has such a block, and zeros behind the last one.
  TEJIT_DEVICE static void put_scale(float* line, i64 i, i64 blocks, i64 pitch, float scale) {
    if (i < blocks) {
      line[i] = fp8::reciprocal(scale);
    } else if (i < pitch) {
      line[i] = 0.0f;
    }
  }

  // --- 128x128 ---

  TEJIT_DEVICE void put_square_scale(Place p, float scale) const {
    // The threads of the first warp: one for the tile's own scale and up to three for zeros behind the last.
    const int i = threadIdx.x;
    if (args.row != nullptr && (i == 0 || p.col + 1 == this->tile_cols)) {
      put_scale(args.row_scale_inv + p.row * args.row_pitch, p.col + i, this->tile_cols, args.row_pitch,
                scale);
    }
    if (kTranspose && (i == 0 || p.row + 1 == this->tile_rows)) {
      put_scale(args.col_scale_inv + p.col * args.col_pitch, p.row + i, this->tile_rows, args.col_pitch,
                scale);
    }
  }

  TEJIT_DEVICE void convert_square(Place p, float scale, u32* codes) const {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      u32 word[4][kPer / 4];
#pragma unroll
      for (int r = 0; r < 4; ++r) fp8::encode_vector<T>(v[s][r], scale, args.fp8 != 0, word[r]);
      if (args.row != nullptr) this->store_rows(p, s, word);
      if constexpr (kTranspose) this->put_squares(codes, s, word);
    }
  }

  TEJIT_DEVICE void squares(u32* codes, u32* maxima) {
    const Place here = this->place();
    this->load(here);
    u32 m = 0;
    this->settle();
    this->each_vector([&](int s, int r, int) { m = T::amax_step(m, v[s][r]); });
    const float scale = scale_of(block_max<Plan::kThreads>(T::amax_result(m), maxima));
    if (threadIdx.x < 4) put_square_scale(here, scale);
    convert_square(here, scale, codes);
    if constexpr (kTranspose) {
      __syncthreads();
      this->store_transpose(here, codes, this->col_alignment());
    }
  }

  // --- 1x128 and 128x1 ---

  // The scale of row `lane % 4` of the thread's four in step s, known to all threads of these rows.
  TEJIT_DEVICE float row_scale(Place p, int s) const {
    u32 a[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) a[r] = __float_as_uint(T::amax_result(T::amax_step(0, v[s][r])));
    // Each exchange halves the rows that a thread looks after.
    const bool odd = lane & 1, upper = lane & 2;
    u32 even_rows = max(odd ? a[1] : a[0], __shfl_xor_sync(kAll, odd ? a[0] : a[1], 1));
    u32 odd_rows = max(odd ? a[3] : a[2], __shfl_xor_sync(kAll, odd ? a[2] : a[3], 1));
    u32 m = max(upper ? odd_rows : even_rows, __shfl_xor_sync(kAll, upper ? even_rows : odd_rows, 2));
#pragma unroll
    for (int step = 4; step < Plan::kLanes; step *= 2) m = max(m, __shfl_xor_sync(kAll, m, step));
    const float scale = scale_of(__uint_as_float(m));
    if (lane < 4) {
      const i64 row = this->row0(p) + (s * Base::kQuadStep + quad) * 4 + lane;
      put_scale(args.row_scale_inv + p.col * args.row_pitch, row, args.rows, args.row_pitch, scale);
    }
    return scale;
  }

  TEJIT_DEVICE void column_maxima(u32* maxima) const {
    u32 c[4] = {0, 0, 0, 0};
    this->each_vector([&](int s, int r, int) {
      c[0] = T::amax_word(c[0], v[s][r].x);
      c[1] = T::amax_word(c[1], v[s][r].y);
      c[2] = T::amax_word(c[2], v[s][r].z);
      c[3] = T::amax_word(c[3], v[s][r].w);
    });
    if constexpr (Plan::kLanes == 16) {
#pragma unroll
      for (int w = 0; w < 4; ++w) c[w] = T::amax_word(c[w], __shfl_xor_sync(kAll, c[w], 16));
    }
    if (threadIdx.x % 32 < Plan::kLanes) {
      u32* to = maxima + threadIdx.x / 32 * Memory::kPitch + lane * 4;
      *reinterpret_cast<uint4*>(to) = make_uint4(c[0], c[1], c[2], c[3]);
    }
  }

  // Every warp finishes some columns: kGroups threads a column, each over four warps' maxima.
  TEJIT_DEVICE void column_scales(Place p, const u32* maxima, float* scales) const {
    constexpr int kColumns = kBlock / Memory::kWarps, kGroups = 32 / kColumns;
    static_assert(kGroups * 4 == Memory::kWarps, "four warps' maxima a thread");
    const int in_warp = threadIdx.x % 32;
    const int group = in_warp % kGroups, column = threadIdx.x / 32 * kColumns + in_warp / kGroups;
    u32 m = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      m = T::amax_word(m, maxima[(i * kGroups + group) * Memory::kPitch + column / T::kWordElements]);
    m = __float_as_uint(fabsf(T::element(m, column % T::kWordElements)));
#pragma unroll
    for (int step = 1; step < kGroups; step *= 2) m = max(m, __shfl_xor_sync(kAll, m, step));
    const float scale = scale_of(__uint_as_float(m));
    if (group == 0) {
      scales[column] = scale;
      put_scale(args.col_scale_inv + p.row * args.col_pitch, this->col0(p) + column, args.cols,
                args.col_pitch, scale);
    }
  }

  TEJIT_DEVICE void convert_vectors(Place p, const float (&row_scales)[kSteps], const float* scales,
                                    u32* codes) const {
    const bool e5m2 = args.fp8 != 0;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      u32 word[4][kPer / 4];
      if (args.row != nullptr) {
#pragma unroll
        for (int r = 0; r < 4; ++r)
          fp8::encode_vector<T>(v[s][r], __shfl_sync(kAll, row_scales[s], r, 4), e5m2, word[r]);
        this->store_rows(p, s, word);
      }
      if constexpr (kTranspose) {
        float column_scale[kPer];  // read again for each step: a thread has no registers to keep them in
#pragma unroll
        for (int i = 0; i < kPer; i += 4) {
          const float4 four = *reinterpret_cast<const float4*>(scales + lane * kPer + i);
          column_scale[i] = four.x;
          column_scale[i + 1] = four.y;
          column_scale[i + 2] = four.z;
          column_scale[i + 3] = four.w;
        }
#pragma unroll
        for (int r = 0; r < 4; ++r) fp8::encode_vector<T>(forgotten(v[s][r]), column_scale, e5m2, word[r]);
        this->put_squares(codes, s, word);
      }
    }
  }

  TEJIT_DEVICE void vectors(u32* codes, u32* maxima, float* scales) {
    const Place here = this->place();
    this->load(here);
    this->settle();
    if constexpr (kTranspose) {
      column_maxima(maxima);
      __syncthreads();
      column_scales(here, maxima, scales);
    }
    float row_scales[kSteps] = {};
    if (args.row != nullptr) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) row_scales[s] = row_scale(here, s);
    }
    if constexpr (kTranspose) __syncthreads();
    convert_vectors(here, row_scales, scales, codes);
    if constexpr (kTranspose) {
      __syncthreads();
      this->store_transpose(here, codes, this->col_alignment());
    }
  }
};

// Shared memory by kind of block and whether there is a transpose.
template <typename T, int kThreads, int kDim, bool kTranspose>
struct Shared;

template <typename T, int kThreads>
struct Shared<T, kThreads, 1, false> {};

template <typename T, int kThreads>
struct Shared<T, kThreads, 1, true> {
  alignas(16) u32 codes[kBlock * kBlock / 4];
  alignas(16) u32 maxima[Maxima<T, kThreads>::kWarps * Maxima<T, kThreads>::kPitch];
  alignas(16) float scales[kBlock];
};

template <typename T, int kThreads>
struct Shared<T, kThreads, 2, false> {
  u32 maxima[32];
};

template <typename T, int kThreads>
struct Shared<T, kThreads, 2, true> {
  alignas(16) u32 codes[kBlock * kBlock / 4];
  u32 maxima[32];
};

// kDim: 1 for 1x128 and 128x1, 2 for 128x128.
template <typename T, typename Plan, int kDim, bool kTranspose>
TEJIT_DEVICE void quantize_blocks(const BlockArgs& args) {
  __shared__ Shared<T, Plan::kThreads, kDim, kTranspose> memory;
  if (fp8::is_noop(args.noop)) return;
  BlockCast<T, Plan, kTranspose> cast(args);
  if constexpr (kDim == 1 && kTranspose) {
    cast.vectors(memory.codes, memory.maxima, memory.scales);
  } else if constexpr (kDim == 1) {
    cast.vectors(nullptr, nullptr, nullptr);
  } else if constexpr (kTranspose) {
    cast.squares(memory.codes, memory.maxima);
  } else {
    cast.squares(nullptr, memory.maxima);
  }
}

}  // namespace fp8_block
}  // namespace tejit
