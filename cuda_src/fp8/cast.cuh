// x * scale as FP8, in x's own order. Also serves the transpose of a matrix with one row or one column, whose
// bytes are the same.
#pragma once

#include "common/element.cuh"
#include "common/tile.cuh"
#include "fp8/args.h"
#include "fp8/convert.cuh"
#include "fp8/scale.cuh"

namespace tejit {
namespace fp8 {

template <int kThreads_, int kVectors_, bool kDescending_, Load kLoad_ = Load::kEvictFirst,
          Store kStore_ = Store::kStream>
struct CastPlan {
  static constexpr int kThreads = kThreads_;
  static constexpr int kVectors = kVectors_;
  static constexpr bool kDescending = kDescending_;
  static constexpr Load kLoad = kLoad_;
  static constexpr Store kStore = kStore_;
};

template <typename T, Format kFormat, typename Plan>
TEJIT_DEVICE void cast_rowwise(const CastArgs& args) {
  constexpr int kChunk = Plan::kThreads * Plan::kVectors;
  if (is_noop(args.noop)) return;
  const i64 n = args.rows * args.cols;
  const char* x = static_cast<const char*>(args.x);
  const bool wide =
      reinterpret_cast<u64>(x) % 16 == 0 && takes_vectors<T>(args.row) && takes_vectors<T>(args.col);
  // Nothing is written where no output is asked for: then only scale_inv counts.
  const i64 vectors = wide && (args.row || args.col) ? n / T::kPerVector : 0;
  const i64 whole = vectors / kChunk;
  const i64 chunks = (vectors + kChunk - 1) / kChunk;
  const int rest = static_cast<int>(vectors - whole * kChunk) - static_cast<int>(threadIdx.x);
  const u64 policy = Plan::kLoad == Load::kEvictFirst ? evict_first_policy() : 0;

  uint4 v[Plan::kVectors];
  const auto chunk_of = [&](i64 c) { return Plan::kDescending ? chunks - 1 - c : c; };
  const auto load = [&](i64 c) {
    if (c >= chunks) return;
    const i64 chunk = chunk_of(c);
    const char* from = x + (chunk * kChunk + threadIdx.x) * 16;
    if (chunk < whole) {
#pragma unroll
      for (int i = 0; i < Plan::kVectors; ++i)
        v[i] = load16<Plan::kLoad>(from + i * Plan::kThreads * 16, policy);
    } else {
#pragma unroll
      for (int i = 0; i < Plan::kVectors; ++i) {
        if (i * Plan::kThreads < rest) v[i] = load16<Plan::kLoad>(from + i * Plan::kThreads * 16, policy);
      }
    }
  };

  load(blockIdx.x);
  const float scale = scale_of_block<Plan::kThreads>(args, Traits<kFormat>::kMax);
  for (i64 c = blockIdx.x; c < chunks; c += gridDim.x) {
    const i64 chunk = chunk_of(c);
    const i64 first = (chunk * kChunk + threadIdx.x) * T::kPerVector;
#pragma unroll
    for (int i = 0; i < Plan::kVectors; ++i) {
      if (chunk < whole || i * Plan::kThreads < rest) {
        const i64 at = first + i * Plan::kThreads * T::kPerVector;
        u32 word[T::kPerVector / 4];
        encode_vector<T, kFormat>(v[i], scale, word);
        if (args.row) store_vector<T, Plan::kStore>(args.row + at, word);
        if (args.col) store_vector<T, Plan::kStore>(args.col + at, word);
      }
    }
    load(c + gridDim.x);
  }

  // The last few elements; all of them where an address is not aligned.
  if (args.row == nullptr && args.col == nullptr) return;
  const i64 stride = static_cast<i64>(gridDim.x) * Plan::kThreads;
  for (i64 i = vectors * T::kPerVector + static_cast<i64>(blockIdx.x) * Plan::kThreads + threadIdx.x; i < n;
       i += stride) {
    const u8 byte = encode<kFormat>(__fmul_rn(T::load(x, i), scale));
    if (args.row) args.row[i] = byte;
    if (args.col) args.col[i] = byte;
  }
}

}  // namespace fp8
}  // namespace tejit
