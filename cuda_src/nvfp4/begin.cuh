// What every cast begins with: a direction's amax out of partial maxima, and zeros behind the last scale.
#pragma once

#include "common/reduce.cuh"
#include "nvfp4/args.h"
#include "nvfp4/encode.cuh"

namespace tejit {
namespace nvfp4 {

TEJIT_DEVICE bool is_noop(const float* noop) {
  return noop != nullptr && load_shared_value(noop) == 1.0f;
}

// Scale entries that a line of `length` elements has in its buffer.
TEJIT_DEVICE i64 pitch_of(i64 length) {
  return (length / kBlock + kScaleCols - 1) / kScaleCols * kScaleCols;
}

TEJIT_DEVICE i64 padded_lines(i64 lines) {
  return (lines + kScaleRows - 1) / kScaleRows * kScaleRows;
}

// The amax, as it is stored; every block of threads finds it for itself. From all threads, after
// wait_for_previous_kernel.
template <int kThreads>
TEJIT_DEVICE float begin(const Direction& d, float e4m3_max, u32* scratch) {
  float amax;
  if (d.count == 1) {
    amax = load_shared_value(d.amax);  // a caller's own amax may be NaN, which a maximum would lose
  } else {
    float m = 0.0f;
#pragma unroll 1
    for (int i = threadIdx.x; i < d.count; i += kThreads) m = fmaxf(m, load_shared_value(d.amax + i));
    amax = block_max<kThreads>(m, scratch);
  }
  amax = stored_amax(amax, e4m3_max);
  if (d.amax_out != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *d.amax_out = amax;
  return amax;
}

// Zeros behind the last block of a line.
TEJIT_DEVICE void clear_line_end(u8* scale_inv, u32 line, u32 blocks, u32 pitch, bool swizzled) {
#pragma unroll 1
  for (u32 j = blocks; j < pitch; ++j) scale_inv[scale_at(line, j, pitch, swizzled)] = 0;
}

// Zeros behind the last line; all threads of the grid share them.
TEJIT_DEVICE void clear_lines(u8* scale_inv, i64 lines, u32 pitch, bool swizzled) {
  const u32 more = static_cast<u32>(padded_lines(lines) - lines);
#pragma unroll 1
  for (u32 i = blockIdx.x; i < more; i += gridDim.x) {
#pragma unroll 1
    for (u32 j = threadIdx.x; j < pitch; j += blockDim.x)
      scale_inv[scale_at(static_cast<u32>(lines) + i, j, pitch, swizzled)] = 0;
  }
}

}  // namespace nvfp4
}  // namespace tejit
