// max |x| in two steps: a maximum for every block of a grid that fills the GPU once, then the maximum of
// those.
#pragma once

#include "common/element.cuh"
#include "common/reduce.cuh"
#include "fp8/args.h"
#include "fp8/scale.cuh"

namespace tejit {
namespace fp8 {

template <int kThreads_, int kVectors_, bool kDescending_, Load kLoad_ = Load::kPlain>
struct AmaxPlan {
  static constexpr int kThreads = kThreads_;
  static constexpr int kVectors = kVectors_;
  static constexpr bool kDescending = kDescending_;
  static constexpr Load kLoad = kLoad_;
};

template <typename T, typename Plan>
TEJIT_DEVICE void amax_partial(const AmaxArgs& args) {
  constexpr int kChunk = Plan::kThreads * Plan::kVectors;
  __shared__ u32 scratch[32];
  // Early, so that the cast's blocks take the place of ours one by one; they wait before they read what we
  // write.
  allow_next_kernel();
  if (is_noop(args.noop)) return;

  // A view may start at any element: single elements up to the first 16-byte boundary and after the last
  // whole vector.
  const T type(args.half);
  const int bytes = type.bytes(), vector_bytes = T::kPerVector * bytes;
  const char* x = static_cast<const char*>(args.x);
  const i64 to_boundary = static_cast<i64>((16 - (reinterpret_cast<u64>(x) & 15)) & 15) / bytes;
  const i64 head = to_boundary < args.n ? to_boundary : args.n;
  const i64 vectors = (args.n - head) / T::kPerVector;
  const char* aligned = x + head * bytes;

  u32 m = 0;
  const i64 whole = vectors / kChunk;
  const i64 chunks = (vectors + kChunk - 1) / kChunk;
  for (i64 c = blockIdx.x; c < chunks; c += gridDim.x) {
    const i64 chunk = Plan::kDescending ? chunks - 1 - c : c;
    const i64 first = chunk * kChunk + threadIdx.x;
    const char* from = aligned + first * vector_bytes;
    const int step = Plan::kThreads * vector_bytes;
    uint4 v[Plan::kVectors];
    if (chunk < whole) {
#pragma unroll
      for (int i = 0; i < Plan::kVectors; ++i) v[i] = type.template load_vector<Plan::kLoad>(from + i * step);
    } else {
      const int left = static_cast<int>(vectors - whole * kChunk) - static_cast<int>(threadIdx.x);
#pragma unroll
      for (int i = 0; i < Plan::kVectors; ++i) {
        v[i] = make_uint4(0, 0, 0, 0);
        if (i * Plan::kThreads < left) v[i] = type.template load_vector<Plan::kLoad>(from + i * step);
      }
    }
#pragma unroll
    for (int i = 0; i < Plan::kVectors; ++i) m = T::amax_step(m, type.settled(v[i]));
  }
  float amax = T::amax_result(m);

  // At most two vectors' worth: one for a thread.
  const i64 loose = args.n - vectors * T::kPerVector;
  if (blockIdx.x == 0 && threadIdx.x < loose) {
    const i64 at = threadIdx.x < head ? threadIdx.x : vectors * T::kPerVector + threadIdx.x;
    amax = fmaxf(amax, fabsf(type.load(x, at)));
  }
  amax = block_max<Plan::kThreads>(amax, scratch);
  if (threadIdx.x == 0) args.partial[blockIdx.x] = amax;
}

template <int kThreads>
TEJIT_DEVICE void amax_finish(const AmaxFinishArgs& args) {
  __shared__ u32 scratch[32];
  wait_for_previous_kernel();
  float m = 0.0f;
#pragma unroll 2
  for (int i = threadIdx.x; i < args.count; i += kThreads) m = fmaxf(m, load_shared_value(args.partial + i));
  m = block_max<kThreads>(m, scratch);
  if (threadIdx.x == 0) *args.amax = m;
}

TEJIT_DEVICE void scale_of_amax(const ScaleArgs& args) {
  if (threadIdx.x != 0 || blockIdx.x != 0) return;
  const float scale = scale_from_amax(load_shared_value(args.amax), args.fp8_max, args.pow2 != 0, args.eps);
  *args.scale = scale;
  *args.scale_inv = reciprocal(scale);
}

}  // namespace fp8
}  // namespace tejit
