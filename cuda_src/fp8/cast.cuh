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

template <typename T, typename Plan>
TEJIT_DEVICE void cast_rowwise(const CastArgs& args) {
  constexpr int kChunk = Plan::kThreads * Plan::kVectors;
  __shared__ u32 scratch[2][32];  // of the scale, and of the amax
  if (is_noop(args.noop)) return;
  const i64 n = args.rows * args.cols;
  const T type(args.half);
  const bool e5m2 = args.fp8 != 0;
  const int vector_bytes = T::kPerVector * type.bytes(), step = Plan::kThreads * vector_bytes;
  const char* x = static_cast<const char*>(args.x);
  const bool wide = reinterpret_cast<u64>(x) % vector_bytes == 0 && takes_vectors<T>(args.row) &&
                    takes_vectors<T>(args.col);
  // Where no output is asked for, only scale_inv and new_amax count.
  const bool used = args.row || args.col || args.new_amax;
  const i64 vectors = wide && used ? n / T::kPerVector : 0;
  const i64 whole = vectors / kChunk;
  const i64 chunks = (vectors + kChunk - 1) / kChunk;
  const int rest = static_cast<int>(vectors - whole * kChunk) - static_cast<int>(threadIdx.x);
  const u64 policy = Plan::kLoad == Load::kEvictFirst ? evict_first_policy() : 0;

  uint4 v[Plan::kVectors];
  const auto chunk_of = [&](i64 c) { return Plan::kDescending ? chunks - 1 - c : c; };
  const auto load = [&](i64 c) {
    if (c >= chunks) return;
    const i64 chunk = chunk_of(c);
    const char* from = x + (chunk * kChunk + threadIdx.x) * vector_bytes;
    if (chunk < whole) {
#pragma unroll
      for (int i = 0; i < Plan::kVectors; ++i)
        v[i] = type.template load_vector<Plan::kLoad>(from + i * step, policy);
    } else {
#pragma unroll
      for (int i = 0; i < Plan::kVectors; ++i) {
        if (i * Plan::kThreads < rest) v[i] = type.template load_vector<Plan::kLoad>(from + i * step, policy);
      }
    }
  };

  load(blockIdx.x);
  const float scale = scale_of_block<Plan::kThreads>(args, scratch[0]);
  u32 m = 0;
  for (i64 c = blockIdx.x; c < chunks; c += gridDim.x) {
    const i64 chunk = chunk_of(c);
    const i64 first = (chunk * kChunk + threadIdx.x) * T::kPerVector;
#pragma unroll
    for (int i = 0; i < Plan::kVectors; ++i) {
      if (chunk < whole || i * Plan::kThreads < rest) {
        const i64 at = first + i * Plan::kThreads * T::kPerVector;
        u32 word[T::kPerVector / 4];
        const uint4 values = type.settled(v[i]);
        m = T::amax_step(m, values);
        encode_vector<T>(values, scale, e5m2, word);
        if (args.row) store_vector<T, Plan::kStore>(args.row + at, word);
        if (args.col) store_vector<T, Plan::kStore>(args.col + at, word);
      }
    }
    load(c + gridDim.x);
  }

  // The last few elements; all of them where an address is not aligned.
  float amax = T::amax_result(m);
  const i64 stride = static_cast<i64>(gridDim.x) * Plan::kThreads;
  const i64 first = static_cast<i64>(blockIdx.x) * Plan::kThreads + threadIdx.x;
  for (i64 i = vectors * T::kPerVector + first; used && i < n; i += stride) {
    const float value = type.load(x, i);
    amax = fmaxf(amax, fabsf(value));
    const u8 byte = encode(__fmul_rn(value, scale), e5m2);
    if (args.row) args.row[i] = byte;
    if (args.col) args.col[i] = byte;
  }
  collect_amax<Plan::kThreads>(args, amax, scratch[1]);
}

}  // namespace fp8
}  // namespace tejit
