// From the maximum of a tensor to its scale, and the part of every cast that does so.
#pragma once

#include "common/element.cuh"
#include "common/reduce.cuh"
#include "fp8/args.h"
#include "fp8/convert.cuh"

namespace tejit {
namespace fp8 {

TEJIT_DEVICE bool is_noop(const float* noop) {
  return noop != nullptr && load_shared_value(noop) == 1.0f;
}

// `limit` takes the place of a quotient that overflows. The division must be IEEE's, and its result must not
// be flushed: hence the intrinsics.
TEJIT_DEVICE float scale_from_amax(float amax, float fp8_max, bool pow2, float eps,
                                   float limit = Any::kLargest) {
  if (amax < eps) amax = eps;
  // Neither 0 nor inf nor NaN; written so that NaN fails it too.
  const bool usable = amax > 0.0f && amax <= Any::kLargest;
  float scale = usable ? __fdiv_rn(fp8_max, amax) : 1.0f;
  if (scale > Any::kLargest) scale = limit;
  return pow2 ? __uint_as_float(__float_as_uint(scale) & 0xff800000u) : scale;
}

TEJIT_DEVICE float reciprocal(float scale) {
  return __fdiv_rn(1.0f, scale);
}

TEJIT_DEVICE float scale_from_amax(const CastArgs& args, float amax) {
  return scale_from_amax(amax, largest(args.fp8 != 0), args.pow2 != 0, args.eps);
}

TEJIT_DEVICE void store_scale_inv(const CastArgs& args, float scale) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *args.scale_inv = reciprocal(scale);
}

// The scale that is given, or that of the partial maxima, of which kTogether threads load a part each.
template <int kTogether, int kAtOnce>
TEJIT_DEVICE float scale_of(const CastArgs& args, int thread, u32* scratch) {
  wait_for_previous_kernel();
  float scale;
  if (args.scale != nullptr) {
    scale = load_shared_value(args.scale);
  } else {
    float amax;
    if (args.amax_count == 1) {
      amax = load_shared_value(args.amax);  // a caller's own amax may be NaN, which a maximum would lose
    } else {
      float m = 0.0f;
#pragma unroll(kAtOnce)
      for (int i = thread; i < args.amax_count; i += kTogether)
        m = fmaxf(m, load_shared_value(args.amax + i));
      amax = block_max<kTogether>(m, scratch);
    }
    scale = scale_from_amax(args, amax);
  }
  store_scale_inv(args, scale);
  return scale;
}

// Every block finds its scale for itself: a few kilobytes from L2, instead of one more launch. Call it once a
// kernel, from all threads, after the first loads of x were issued.
template <int kThreads>
TEJIT_DEVICE float scale_of_block(const CastArgs& args) {
  __shared__ u32 scratch[32];
  return scale_of<kThreads, 2>(args, static_cast<int>(threadIdx.x), scratch);
}

// The same by every warp, without a barrier, for which warps would wait that have more to load.
TEJIT_DEVICE float scale_of_warp(const CastArgs& args) {
  return scale_of<32, 8>(args, static_cast<int>(threadIdx.x % 32), nullptr);
}

// scale_of_block in two steps. The loads are on their way once it is made; what a kernel loads between the
// steps does not wait for the block to agree on a maximum (a fused cast takes 10% less).
template <int kThreads>
struct ScaleInSteps {
  static constexpr int kOwn = 2;  // partial maxima of a thread that are loaded at once

  const CastArgs& args;
  float own[kOwn];  // the first is the scale, or the amax, where there is but one

  TEJIT_DEVICE explicit ScaleInSteps(const CastArgs& a) : args(a), own{} {
    wait_for_previous_kernel();
    if (args.scale != nullptr || args.amax_count == 1) {
      own[0] = load_shared_value(args.scale != nullptr ? args.scale : args.amax);
      return;
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * kThreads;
      if (at < args.amax_count) own[i] = load_shared_value(args.amax + at);
    }
  }

  TEJIT_DEVICE float get(u32* scratch) const {
    float scale = own[0];
    if (args.scale == nullptr) {
      float amax = own[0];
      if (args.amax_count != 1) {
        static_assert(kOwn == 2, "the maximum of both");
        float m = fmaxf(own[0], own[1]);
#pragma unroll 1
        for (int i = static_cast<int>(threadIdx.x) + kOwn * kThreads; i < args.amax_count; i += kThreads)
          m = fmaxf(m, load_shared_value(args.amax + i));
        amax = block_max<kThreads>(m, scratch);
      }
      scale = scale_from_amax(args, amax);
    }
    store_scale_inv(args, scale);
    return scale;
  }
};

// What new_amax was when this block read it: less only than what it is at the end.
TEJIT_DEVICE u32 amax_so_far(const CastArgs& args) {
  return args.new_amax != nullptr ? __float_as_uint(load_shared_value(args.new_amax)) : 0;
}

// The kernel's last act, from all threads: `amax` is what each has seen. Floats that are not negative order
// as integers do, and a maximum does not depend on the order in which blocks arrive. Most blocks find nothing
// new.
template <int kThreads>
TEJIT_DEVICE void collect_amax(const CastArgs& args, float amax, u32 so_far) {
  __shared__ u32 scratch[32];
  if (args.new_amax == nullptr) return;
  if (!__syncthreads_or(static_cast<int>(__float_as_uint(amax)) > static_cast<int>(so_far))) return;
  amax = block_max<kThreads>(amax, scratch);
  if (threadIdx.x == 0)
    atomicMax(reinterpret_cast<int*>(args.new_amax), static_cast<int>(__float_as_uint(amax)));
}

}  // namespace fp8
}  // namespace tejit
