// Maxima of |x| and of the transformed |x|, in one reading of a bfloat16 matrix.
#pragma once

#include "common/element.cuh"
#include "common/reduce.cuh"
#include "nvfp4/begin.cuh"
#include "nvfp4/hadamard.cuh"

namespace tejit {
namespace nvfp4 {

// A block's maxima to where the next kernel finds them; either may be unwanted.
template <int kThreads>
TEJIT_DEVICE void put_partial(const AmaxArgs& args, float row, float col, u32 (*scratch)[32]) {
  if (args.row != nullptr) {
    row = block_max<kThreads>(row, scratch[0]);
    if (threadIdx.x == 0) args.row[blockIdx.x] = row;
  }
  if (args.col != nullptr) {
    col = block_max<kThreads>(finish_transform_amax(col), scratch[1]);
    if (threadIdx.x == 0) args.col[blockIdx.x] = col;
  }
}

// A warp takes 16 rows of 128 columns, four columns a thread. Backwards, so that the cast, which goes
// forwards, finds in L2 what was read last.
TEJIT_DEVICE void amax_rht(const AmaxArgs& args) {
  __shared__ u32 scratch[2][32];
  allow_next_kernel();
  if (is_noop(args.noop)) return;
  constexpr int kWarps = RhtAmaxShape::kThreads / 32;
  const u32 across = static_cast<u32>((args.cols + RhtAmaxShape::kCols - 1) / RhtAmaxShape::kCols);
  const i64 units = args.rows / kBlock * across;
  u32 row = 0;
  float col = 0.0f;
#pragma unroll 1
  for (i64 u = static_cast<i64>(blockIdx.x) * kWarps + threadIdx.x / 32; u < units;
       u += static_cast<i64>(gridDim.x) * kWarps) {
    const i64 unit = units - 1 - u;
    const i64 group = unit / across;
    const i64 first = (unit - group * across) * RhtAmaxShape::kCols + threadIdx.x % 32 * 4;
    if (first >= args.cols) continue;
    const u16* from = static_cast<const u16*>(args.x) + group * kBlock * args.cols + first;
    uint2 w[16];
#pragma unroll
    for (int r = 0; r < 16; ++r) w[r] = load8(from + r * args.cols);
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      row = BF16::amax_word(row, w[r].x);
      row = BF16::amax_word(row, w[r].y);
    }
#pragma unroll 1
    for (u32 selector = 0x1044; selector <= 0x3244; selector += 0x2200) {
      float f[16];
#pragma unroll
      for (int r = 0; r < 16; ++r) f[r] = signed_by<kSigns>(__uint_as_float(permute(w[r].x, 0, selector)), r);
      col = transform_amax(col, f);
#pragma unroll
      for (int r = 0; r < 16; ++r) f[r] = signed_by<kSigns>(__uint_as_float(permute(w[r].y, 0, selector)), r);
      col = transform_amax(col, f);
    }
  }
  put_partial<RhtAmaxShape::kThreads>(args, BF16::amax_result(row), col, scratch);
}

}  // namespace nvfp4
}  // namespace tejit
