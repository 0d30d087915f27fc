// What ops share that compute a tensor and quantize it at once: their last arguments, and the casts. `Rows`
// are the parameters of the kernel that goes over x by rows; its namespace has the launches, found by its
// type.
#pragma once

#include <tuple>
#include <vector>

#include "common/tensor.h"
#include "fp8/delayed_ops.h"
#include "fp8/ops.h"
#include "fp8_block/ops.h"
#include "fused/launch.h"
#include "fused/plain.h"
#include "mxfp8/ops.h"

namespace tejit {
namespace fused {

// Of a matrix: rows, columns.
inline Matrix checked_matrix(const char* op, const Tensor& x) {
  const Sizes sizes = x.sizes();
  if (sizes.size() != 2)
    fail(op, ": x has shape ", shape_name(sizes), ", but a matrix (rows, columns) is needed; reshape it");
  return {sizes[0], sizes[1]};
}

inline std::int64_t padded_rows(const char* op, std::int64_t rows, std::int64_t multiple) {
  if (multiple < 1) fail(op, ": multiple is ", multiple, ", but a number >= 1 is needed; 1 pads nothing");
  return pieces_of(rows, multiple) * multiple;
}

// --- CUDA ---

template <typename Rows>
Four fused_fp8(const Launcher& launch, Rows rows, const Device& device, const Cast& cast) {
  const fp8::Scaling s = fp8::scaling(cast.op, cast.fp8, cast.flag, cast.floor);
  fp8::Three tensors =
      fp8::allocate({rows.out_rows, rows.cols}, cast.rowwise, cast.columnwise, device, false);
  const fp8::Outputs out = fp8::outputs_of(tensors, cast.rowwise, cast.columnwise);
  fp8::CastArgs args = {};
  args.row = out.row;
  args.col = out.col;
  args.scale_inv = out.scale_inv;
  args.x = rows.x;
  args.rows = rows.out_rows;
  args.cols = rows.cols;
  args.fp8 = s.fp8;
  MaybeTensor partial;  // freed after the launches, which is in the stream's order
  if (cast.format == kDelayed) {
    fp8::require_state(cast.op, "scale", *cast.scale, device);
    fp8::require_state(cast.op, "amax", *cast.amax, device);
    args.scale = static_cast<const float*>(cast.scale->const_data_ptr());
    args.new_amax = static_cast<float*>(cast.amax->mutable_data_ptr());
  } else {
    const unsigned blocks = rows_blocks(launch, rows);
    partial = empty_floats(blocks, device);
    rows.partial = static_cast<float*>(partial->mutable_data_ptr());
    args.amax = rows.partial;
    args.amax_count = static_cast<int>(blocks);
    args.pow2 = s.pow2;
    args.eps = s.eps;
  }
  const bool rows_first = cast.format == kCurrent || (cast.columnwise && needs_rows(rows));
  if (rows_first) launch_rows(launch, rows);
  launch_cast(launch, rows, args, rows_first);
  return {std::get<0>(tensors), std::get<2>(tensors), std::get<1>(tensors), empty_floats(0, device)};
}

template <typename Rows>
Four fused_blocks(const Launcher& launch, const Rows& rows, const Device& device, const Cast& cast) {
  const fp8::Scaling s = fp8::scaling(cast.op, cast.fp8, cast.flag, cast.floor);
  const std::vector<std::int64_t> shape = {rows.out_rows, rows.cols};
  Four tensors = fp8_block::allocate(shape, 1, cast.rowwise, cast.columnwise, device, false);
  const fp8_block::Outputs out = fp8_block::outputs_of(tensors, cast.rowwise, cast.columnwise);
  if (needs_rows(rows)) launch_rows(launch, rows);
  launch_cast(
      launch, rows,
      fp8_block::BlockArgs{rows.x, out.row, out.col, out.row_scale_inv, out.col_scale_inv, nullptr,
                           rows.out_rows, rows.cols, fp8_block::scale_shape(rows.out_rows, rows.cols, 1)[1],
                           fp8_block::scale_shape(rows.cols, rows.out_rows, 1)[1], s.eps,
                           fp8_block::kLargest[2], s.pow2, s.fp8, 0},
      needs_rows(rows));
  return tensors;
}

template <typename Rows>
Four fused_mxfp8(const Launcher& launch, const Rows& rows, const Device& device, const Cast& cast) {
  const std::vector<std::int64_t> shape = {rows.out_rows, rows.cols};
  const int fp8 = mxfp8::checked_fp8(cast.op, cast.fp8);
  mxfp8::check_shape(shape, cast.rowwise, cast.columnwise, false);
  Four tensors = mxfp8::allocate(shape, cast.rowwise, cast.columnwise, device, false);
  const mxfp8::Outputs out = mxfp8::outputs_of(tensors, cast.rowwise, cast.columnwise);
  if (needs_rows(rows)) launch_rows(launch, rows);
  launch_cast(launch, rows,
              mxfp8::Args{rows.x, out.row, out.col, out.row_scales, out.col_scales, nullptr, rows.out_rows,
                          rows.cols, fp8, 0, cast.flag, 2, 1, 0},
              needs_rows(rows));
  return tensors;
}

// All but what the tuned kernels do not serve.
template <typename Rows>
Four quantize_on_cuda(const Device& device, const Rows& rows, const Cast& cast) {
  const Launcher launch(device.index);
  if (cast.format == kBlocks) return fused_blocks(launch, rows, device, cast);
  if (cast.format == kMxfp8) return fused_mxfp8(launch, rows, device, cast);
  return fused_fp8(launch, rows, device, cast);
}

}  // namespace fused
}  // namespace tejit
