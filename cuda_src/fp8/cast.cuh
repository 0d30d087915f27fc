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

template <int kThreads_, int kVectors_, Load kLoad_ = Load::kCached, Store kStore_ = Store::kStream>
struct CastPlan {
  static constexpr int kThreads = kThreads_;
  static constexpr int kVectors = kVectors_;
  static_assert(kVectors % 2 == 0, "a thread takes neighbours in pairs");
  static constexpr Load kLoad = kLoad_;
  static constexpr Store kStore = kStore_;
};

template <typename T, typename Plan>
TEJIT_DEVICE void cast_rowwise(const CastArgs& args) {
  constexpr int kChunk = Plan::kThreads * Plan::kVectors;
  if (is_noop(args.noop)) return;
  const i64 n = args.rows * args.cols;
  const T type(args.half);
  const bool e5m2 = args.fp8 != 0;
  const int vector_bytes = T::kPerVector * type.bytes();
  const char* x = static_cast<const char*>(args.x);
  const bool wide = reinterpret_cast<u64>(x) % vector_bytes == 0 && takes_vectors<T>(args.row) &&
                    takes_vectors<T>(args.col);
  // Where no output is asked for, only scale_inv and new_amax count.
  const bool used = args.row || args.col || args.new_amax;
  const i64 vectors = wide && used ? n / T::kPerVector : 0;
  const i64 start = static_cast<i64>(blockIdx.x) * kChunk + threadIdx.x * 2;
  // Of the block's vectors, from the thread's first on.
  const int left = start < vectors ? clamp_left(vectors - start) : 0;

  // Vector i of a thread: two neighbours, and the next two where the other threads' are over.
  const auto at = [](int i) { return i / 2 * (2 * Plan::kThreads) + i % 2; };
  uint4 v[Plan::kVectors];
  const char* from = x + start * vector_bytes;
#pragma unroll
  for (int i = 0; i < Plan::kVectors; ++i) {
    v[i] = make_uint4(0, 0, 0, 0);
    if (at(i) < left) v[i] = type.template load_vector<Plan::kLoad>(from + at(i) * vector_bytes);
  }
  const float scale = scale_of_block<Plan::kThreads>(args);
  const u32 so_far = amax_so_far(args);
  u32 m = 0;
#pragma unroll
  for (int i = 0; i < Plan::kVectors; ++i) {
    v[i] = type.settled(v[i]);
    m = T::amax_step(m, v[i]);
  }
  u32 word[Plan::kVectors][T::kPerVector / 4];
#pragma unroll
  for (int i = 0; i < Plan::kVectors; ++i) encode_vector<T>(v[i], scale, e5m2, word[i]);
  const auto store = [&](u8* out) {
    if (out == nullptr) return;
    const bool pairs = reinterpret_cast<u64>(out) % (2 * T::kPerVector) == 0;
    out += start * T::kPerVector;
#pragma unroll
    for (int i = 0; i < Plan::kVectors; i += 2) {
      u8* to = out + at(i) * T::kPerVector;
      if (pairs && at(i + 1) < left) {
        store_pair<T, Plan::kStore>(to, word[i], word[i + 1]);
      } else if (at(i) < left) {
        store_vector<T, Plan::kStore>(to, word[i]);
        if (at(i + 1) < left) store_vector<T, Plan::kStore>(to + T::kPerVector, word[i + 1]);
      }
    }
  };
  store(args.row);
  store(args.col);

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
  collect_amax<Plan::kThreads>(args, amax, so_far);
}

}  // namespace fp8
}  // namespace tejit
