// bfloat16 rowwise: a block of 16 elements a thread, so that nothing is exchanged and a block's scale is
// computed once.
#pragma once

#include "nvfp4/begin.cuh"

namespace tejit {
namespace nvfp4 {

template <bool kRandom>
TEJIT_DEVICE void cast_row(const CastArgs& args) {
  __shared__ u32 scratch[32];
  if (is_noop(args.noop)) return;
  const u32 per_row = static_cast<u32>(args.cols / kBlock);
  const i64 total = args.rows * per_row;
  const u32 pitch = static_cast<u32>(pitch_of(args.cols));
  const bool swizzled = args.flags & kSwizzled;
  // Then a block's scale lies where its number says, and its row is of no interest.
  const bool linear = !swizzled && pitch == per_row;
  const u64 policy = evict_first_policy();

  const u32 step = gridDim.x * RowShape::kThreads;
  const u32 first = blockIdx.x * RowShape::kThreads + threadIdx.x;
  u32 row = first / per_row, column = first - row * per_row;
  const u32 step_rows = step / per_row, step_columns = step - step_rows * per_row;
  // A thread without a next block reads some block again: a load that is not asked for is one that nothing
  // waits for.
  const char* from =
      static_cast<const char*>(args.x) + (first < total ? static_cast<u64>(first) * (2 * kBlock) : 0);

  Packed next;
  const auto load = [&] {
    const uint4 a = load16_shared_line(from, policy), b = load16_shared_line(from + 16, policy);
    next = {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
  };
  load();
  wait_for_previous_kernel();
  const Scales scales = scales_of(begin<RowShape::kThreads>(args.row, args.e4m3_max, scratch), args.e4m3_max);
  const Random random = random_of(kRandom ? args.seed : nullptr, false);
#pragma unroll 1
  for (i64 at = first; at < total;) {
    const Packed here = next;
    const BlockScale scale = scale_of(amax_of(here), scales);
    const uint2 codes = encode<kRandom>(here, scale, random, static_cast<u64>(at));
    if (at + step < total) from += static_cast<u64>(step) * (2 * kBlock);
    load();
    store8<Store::kStream>(args.row.data + at * (kBlock / 2), codes.x, codes.y);
    if (linear) {
      args.row.scale_inv[at] = static_cast<u8>(scale.byte);
    } else {
      args.row.scale_inv[scale_at(row, column, pitch, swizzled)] = static_cast<u8>(scale.byte);
      if (column + 1 == per_row) clear_line_end(args.row.scale_inv, row, per_row, pitch, swizzled);
      row += step_rows;
      column += step_columns;
      if (column >= per_row) {
        column -= per_row;
        ++row;
      }
    }
    at += step;
  }
  clear_lines(args.row.scale_inv, args.rows, pitch, swizzled);
}

}  // namespace nvfp4
}  // namespace tejit
