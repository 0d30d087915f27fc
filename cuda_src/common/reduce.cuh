// The maximum over a block of threads, for numbers that are not negative and not NaN: their bits order as
// integers do.
#pragma once

#include "common/ptx.cuh"

namespace tejit {

// Every thread gets the result. `scratch` holds one word a warp, kStride words apart, and must not be reused
// before the next barrier.
template <int kThreads, int kStride = 1>
TEJIT_DEVICE float block_max(float value, u32* scratch) {
  static_assert(kThreads % 32 == 0 && kThreads <= 1024, "whole warps, at most 32 of them");
  constexpr int kWarps = kThreads / 32;
  u32 m = __reduce_max_sync(0xffffffffu, __float_as_uint(value));
  if constexpr (kWarps > 1) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) scratch[threadIdx.x / 32 * kStride] = m;
    __syncthreads();
    m = __reduce_max_sync(0xffffffffu, lane < kWarps ? scratch[lane * kStride] : 0u);
  }
  return __uint_as_float(m);
}

}  // namespace tejit
