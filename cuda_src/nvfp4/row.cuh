// bfloat16 rowwise: a block of 16 elements a thread, so that nothing is exchanged and a block's scale is
// computed once.
#pragma once

#include "nvfp4/begin.cuh"

namespace tejit {
namespace nvfp4 {

TEJIT_DEVICE void cast_row(const CastArgs& args) {
  __shared__ u32 scratch[32];
  if (is_noop(args.noop)) return;
  const i64 per_row = args.cols / kBlock, total = args.rows * per_row;
  const i64 pitch = pitch_of(args.cols);
  const bool swizzled = args.flags & kSwizzled;
  const u64 policy = evict_first_policy();
  const char* x = static_cast<const char*>(args.x);

  const i64 step = static_cast<i64>(gridDim.x) * RowShape::kThreads;
  i64 at = static_cast<i64>(blockIdx.x) * RowShape::kThreads + threadIdx.x;
  i64 row = at / per_row, column = at - row * per_row;
  const i64 step_rows = step / per_row, step_columns = step - step_rows * per_row;

  uint4 next[2];
  const auto load = [&](i64 block) {
    if (block >= total) return;
    next[0] = load16_shared_line(x + block * (2 * kBlock), policy);
    next[1] = load16_shared_line(x + block * (2 * kBlock) + 16, policy);
  };
  load(at);
  wait_for_previous_kernel();
  const Scales scales = scales_of(begin<RowShape::kThreads>(args.row, args.e4m3_max, scratch), args.e4m3_max);
  const Random random = random_of(args.seed, false);
  while (at < total) {
    const Packed here = {
        {next[0].x, next[0].y, next[0].z, next[0].w, next[1].x, next[1].y, next[1].z, next[1].w}};
    load(at + step);
    const BlockScale scale = scale_of(amax_of(here), scales);
    const uint2 codes = encode(here, scale, random, static_cast<u64>(at));
    store8<Store::kStream>(args.row.data + at * (kBlock / 2), codes.x, codes.y);
    args.row.scale_inv[scale_at(row, column, pitch, swizzled)] = static_cast<u8>(scale.byte);
    if (column + 1 == per_row) clear_line_end(args.row.scale_inv, row, per_row, pitch, swizzled);
    at += step;
    row += step_rows;
    column += step_columns;
    if (column >= per_row) {
      column -= per_row;
      ++row;
    }
  }
  clear_lines(args.row.scale_inv, args.rows, pitch, swizzled);
}

}  // namespace nvfp4
}  // namespace tejit
