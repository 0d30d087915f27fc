// Activations of rows: written, for their maximum, as FP8.
#pragma once

#include "activation/function.h"
#include "common/element.cuh"
#include "common/reduce.cuh"
#include "fp8/convert.cuh"
#include "fp8/scale.cuh"

namespace tejit {
namespace activation {

struct DeviceOps {
  TEJIT_DEVICE static float add(float a, float b) { return __fadd_rn(a, b); }
  TEJIT_DEVICE static float mul(float a, float b) { return __fmul_rn(a, b); }
  TEJIT_DEVICE static float reciprocal(float d) { return reciprocal_from_1(d); }
  TEJIT_DEVICE static float within(float x, float floor, float ceiling) {
    float m;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(x), "f"(ceiling));
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(m), "f"(floor));
    return m;
  }
  TEJIT_DEVICE static u32 bits(float f) { return __float_as_uint(f); }
  TEJIT_DEVICE static float of_bits(u32 bits) { return __uint_as_float(bits); }
};

using Device = Functions<DeviceOps>;

// Vector v of x, and of its gate, as a vector of bfloat16. Two elements a turn: unrolled, the compiler would
// take seconds over the kernels that hold many vectors, and other warps fill the time as well.
TEJIT_DEVICE uint4 activated(int kind, const fused::Curve& curve, bool gated, uint4 v, uint4 gate) {
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    float f[2] = {BF16::element(v.x, 0), BF16::element(v.x, 1)};
    Device::apply(kind, curve, f);
    if (gated) {
      f[0] = __fmul_rn(f[0], BF16::element(gate.x, 0));
      f[1] = __fmul_rn(f[1], BF16::element(gate.x, 1));
    }
    v = make_uint4(v.y, v.z, v.w, bf16x2_of(f[0], f[1]));
    gate = make_uint4(gate.y, gate.z, gate.w, gate.x);
  }
  return v;
}

// Rows from the last to the first, as those of norms.
template <bool kCast>
TEJIT_DEVICE void activate_rows(const RowsArgs& args, const fp8::CastArgs* cast) {
  __shared__ u32 maxima[32];
  constexpr int kVectors = RowsShape::kVectors, kThreads = RowsShape::kThreads;
  const bool gated = args.gated != 0;
  const int vectors = clamp_left(args.cols / 8);
  u32 m = 0;
  float scale = 0.0f;
  u32 so_far = 0;
  if constexpr (kCast) {
    scale = fp8::scale_of_block<kThreads>(*cast);
    so_far = fp8::amax_so_far(*cast);
  } else {
    allow_next_kernel();
  }
#pragma unroll 1
  for (i64 i = blockIdx.x; i < args.out_rows; i += gridDim.x) {
    const i64 row = args.out_rows - 1 - i;
    const bool there = row < args.rows;
    const u16* from = static_cast<const u16*>(args.x) + row * args.pitch;
#pragma unroll 1
    for (int start = threadIdx.x; start < vectors; start += kVectors * kThreads) {
      uint4 v[kVectors], gate[kVectors];
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        v[k] = gate[k] = make_uint4(0, 0, 0, 0);
        const int at = start + k * kThreads;
        if (there && at < vectors) {
          v[k] = load16<Load::kCached>(from + at * 8);
          if (gated) gate[k] = load16<Load::kCached>(from + args.cols + at * 8);
        }
      }
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const int at = start + k * kThreads;
        if (at >= vectors) break;
        uint4 y = make_uint4(0, 0, 0, 0);
        if (there) y = activated(args.kind, args.curve, gated, v[k], gate[k]);
        m = BF16::amax_step(m, y);
        if constexpr (kCast) {
          u32 word[2];
          fp8::encode_vector<BF16>(y, scale, cast->fp8 != 0, word);
          store8<Store::kStream>(cast->row + row * args.cols + at * 8, word[0], word[1]);
        } else if (args.y != nullptr) {
          store16<Store::kPlain>(static_cast<u16*>(args.y) + row * args.cols + at * 8, y);
        }
      }
    }
  }
  if constexpr (kCast) {
    fp8::collect_amax<kThreads>(*cast, BF16::amax_result(m), so_far);
  } else if (args.partial != nullptr) {
    const float amax = block_max<kThreads>(BF16::amax_result(m), maxima);
    if (threadIdx.x == 0) args.partial[blockIdx.x] = amax;
  }
}

TEJIT_DEVICE void rows(const RowsArgs& args) {
  activate_rows<false>(args, nullptr);
}

TEJIT_DEVICE void fp8_rows(const fused::CastRows<RowsArgs>& args) {
  activate_rows<true>(args.rows, &args.cast);
}

TEJIT_DEVICE void rows_any(const RowsArgs& args) {
#pragma unroll 1
  for (i64 row = blockIdx.x; row < args.out_rows; row += gridDim.x) {
#pragma unroll 1
    for (i64 at = threadIdx.x; at < args.cols; at += RowsShape::kThreads) {
      float f[1] = {0.0f};
      if (row < args.rows) {
        f[0] = load_any(args.x, args.dtype, row * args.pitch + at);
        Device::apply(args.kind, args.curve, f);
        if (args.gated)
          f[0] = __fmul_rn(f[0], load_any(args.x, args.dtype, row * args.pitch + args.cols + at));
      }
      store_any(args.y, args.dtype, row * args.cols + at, f[0]);
    }
  }
}

}  // namespace activation
}  // namespace tejit
