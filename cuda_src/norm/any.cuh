// Norms of rows of any dtype at any address, with their statistics.
#pragma once

#include "common/element.cuh"
#include "norm/rows.cuh"
#include "norm/source.cuh"

namespace tejit {
namespace norm {

// All sums of a row as one. Every thread gets the row's sum. `scratch` must not be written again before the
// barrier after the next.
TEJIT_DEVICE float sum_of_row(const float (&s)[kThreadSums], float* scratch) {
  float t = sum_of_thread(s);
#pragma unroll
  for (int stride = 16; stride > 0; stride /= 2) t = __fadd_rn(t, __shfl_xor_sync(0xffffffffu, t, stride));
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = t;
  __syncthreads();
  const uint4* const sums = reinterpret_cast<const uint4*>(scratch);
  return sum_of_warps(sums[0], sums[1]);
}

struct Scratch {
  alignas(16) float sums[2][kWarps];
};

// The two statistics of a row, one after the other: `mean` may change what the second one sums.
template <typename Values, typename Squares>
TEJIT_DEVICE void statistics(const RowsArgs& args, i64 row, Scratch& scratch, const Values& add_values,
                             const Squares& add_squares, float& mean, float& rstd) {
  const float count = static_cast<float>(args.cols);
  mean = 0.0f;
  if (args.mean != nullptr) {
    float s[kThreadSums] = {};
    add_values(s);
    mean = __fdiv_rn(sum_of_row(s, scratch.sums[0]), count);
  }
  float s[kThreadSums] = {};
  add_squares(s, mean);
  const float variance = __fdiv_rn(sum_of_row(s, scratch.sums[1]), count);
  rstd = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(variance, args.eps)));
  if (threadIdx.x == 0 && row < args.rows) {
    if (args.mean != nullptr) args.mean[row] = mean;
    args.rstd[row] = rstd;
  }
  // RMSNorm has one barrier a row; without this the next row's sums could overtake a reader of these.
  if (args.mean == nullptr) __syncthreads();
}

TEJIT_DEVICE void rows_any(const RowsArgs& args) {
  __shared__ Scratch scratch;
  const fused::Parameters& p = args.parameters;
#pragma unroll 1
  for (i64 row = blockIdx.x; row < args.out_rows; row += gridDim.x) {
    const i64 first = row * args.cols;
    const i64 cols = row < args.rows ? args.cols : 0;
    const auto add_from = [&](float (&s)[kThreadSums], float from, bool squared) {
#pragma unroll 1
      for (i64 at = threadIdx.x * kThreadSums; at < cols; at += kSums) {
#pragma unroll
        for (int j = 0; j < kThreadSums; ++j) {
          if (at + j < cols) {
            const float d = __fsub_rn(load_any(args.x, args.dtype, first + at + j), from);
            s[j] = squared ? __fmaf_rn(d, d, s[j]) : __fadd_rn(s[j], d);
          }
        }
      }
    };
    float mean, rstd;
    statistics(
        args, row, scratch, [&](float (&s)[kThreadSums]) { add_from(s, 0.0f, false); },
        [&](float (&s)[kThreadSums], float from) { add_from(s, from, true); }, mean, rstd);
    if (args.y == nullptr) continue;
#pragma unroll 1
    for (i64 at = threadIdx.x; at < args.cols; at += kThreads) {
      float y = 0.0f;
      if (row < args.rows) {
        float gamma = p.weight != nullptr ? load_any(p.weight, p.weight_dtype, at)
                      : p.zero_centered   ? 0.0f
                                          : 1.0f;
        if (p.zero_centered) gamma = __fadd_rn(1.0f, gamma);
        const float beta = p.bias != nullptr ? load_any(p.bias, p.bias_dtype, at) : kNothing;
        y = normalised(load_any(args.x, args.dtype, first + at), rstd, shift_of(mean, rstd), gamma, beta);
      }
      store_any(args.y, args.dtype, first + at, y);
    }
  }
}

}  // namespace norm
}  // namespace tejit
