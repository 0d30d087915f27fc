// The ops of norms: tejit::norm and tejit::norm_quantize, each for CPU and CUDA tensors. What norm_quantize
// writes is what the format's own op would make of norm's output.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "common/alignment.h"
#include "common/tensor.h"
#include "cpu/norm.h"
#include "fp8/delayed_ops.h"
#include "fp8/ops.h"
#include "fp8_block/ops.h"
#include "mxfp8/ops.h"
#include "norm/launch.h"

namespace tejit {
namespace norm {

inline constexpr char kNormOp[] = "tejit::norm";
inline constexpr char kQuantizeOp[] = "tejit::norm_quantize";

using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Six = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// What comes out of a fused op; the numbers are those of FORMATS in Python.
enum Format { kCurrent = 0, kDelayed = 1, kBlocks = 2, kMxfp8 = 3 };

// How the output is to be quantized.
struct Cast {
  const char* op;
  std::int64_t format, fp8;
  bool rowwise, columnwise;
  bool flag;  // FP8: scales are powers of two; MXFP8: scales in the order of the GEMM
  double floor;
  const MaybeTensor& scale;  // of delayed scaling, else none
  const MaybeTensor& amax;
};

inline void check_cast(const Cast& cast) {
  if (cast.format < kCurrent || cast.format > kMxfp8)
    fail(cast.op, ": format is ", cast.format,
         ", but 0 (current), 1 (delayed), 2 (blocks) or 3 (MXFP8) is needed");
  if ((cast.format == kDelayed) != (cast.scale && cast.amax))
    fail(cast.op, ": format ", cast.format, " needs scale and amax ",
         cast.format == kDelayed ? "both" : "not to be given", "; they belong to delayed scaling (1)");
}

// Quantizes what was written to memory.
template <bool kCuda>
inline Four quantize_plain(const Tensor& y, const Cast& cast) {
  const auto ordered = [](fp8::Three three, const Device& device) -> Four {
    return {std::get<0>(three), std::get<2>(three), std::get<1>(three), empty_floats(0, device)};
  };
  const Device device = device_of(y);
  if (cast.format == kCurrent) {
    const auto run = kCuda ? fp8::quantize_cuda : fp8::quantize_cpu;
    return ordered(run(y, cast.fp8, cast.rowwise, cast.columnwise, cast.flag, cast.floor, {}), device);
  }
  if (cast.format == kDelayed) {
    const auto run = kCuda ? fp8::quantize_delayed_cuda : fp8::quantize_delayed_cpu;
    return ordered(run(y, cast.fp8, cast.rowwise, cast.columnwise, *cast.scale, *cast.amax), device);
  }
  if (cast.format == kBlocks) {
    const auto run = kCuda ? fp8_block::quantize_cuda : fp8_block::quantize_cpu;
    return run(y, cast.fp8, 1, cast.rowwise, cast.columnwise, cast.flag, cast.floor);
  }
  const auto run = kCuda ? mxfp8::quantize_cuda : mxfp8::quantize_cpu;
  return run(y, cast.fp8, cast.rowwise, cast.columnwise, false, cast.flag);
}

// The input of a norm, checked, and what it always writes.
struct Norm {
  Tensor x;
  MaybeTensor weight, bias;
  std::int64_t rows, cols;
  int dtype;
  float eps;
  bool zero_centered;
  Tensor mean, rstd;
};

inline MaybeTensor checked_parameter(const char* op, const char* name, const MaybeTensor& t,
                                     std::int64_t cols, const Device& device) {
  if (!t) return {};
  require_device(op, name, *t, device);
  const std::vector<std::int64_t> shape = {cols};
  if (!same_shape(t->sizes(), shape))
    fail(op, ": ", name, " has shape ", shape_name(t->sizes()), ", but ", shape_name(shape),
         " is needed: one number for each column of x");
  input_dtype(op, *t);
  return as_contiguous(*t);
}

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

inline Norm norm_of(const char* op, const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
                    double eps, bool rms, bool zero_centered) {
  const Device device = device_of(x);
  const Matrix m = checked_matrix(op, x);
  if (!(eps >= 0)) fail(op, ": eps is ", eps, ", but a number >= 0 is needed");
  const auto column = [&](std::int64_t rows) {
    return empty(std::vector<std::int64_t>{rows, 1}, aoti_torch_dtype_float32(), device);
  };
  return {as_contiguous(x),
          checked_parameter(op, "weight", weight, m.cols, device),
          checked_parameter(op, "bias", bias, m.cols, device),
          m.rows,
          m.cols,
          input_dtype(op, x),
          static_cast<float>(eps),
          zero_centered,
          rms ? empty_floats(0, device) : column(m.rows),
          column(m.rows)};
}

inline Tensor empty_like_padded(const Norm& n, std::int64_t rows) {
  return empty(std::vector<std::int64_t>{rows, n.cols}, dtype_of(n.x), device_of(n.x));
}

inline float* mean_of(const Norm& n) {
  return n.mean.numel() == 0 && n.mean.sizes().size() == 1 ? nullptr
                                                           : static_cast<float*>(n.mean.mutable_data_ptr());
}

// --- CPU ---

// Gamma (one more than the weight where that is centered on 0) or beta as float32; empty where there is none.
inline std::vector<float> parameter_on_cpu(const MaybeTensor& t, std::int64_t cols, bool zero_centered) {
  std::vector<float> values;
  if (!t && !zero_centered) return values;
  values.assign(static_cast<std::size_t>(cols), 0.0f);
  if (t)
    cpu::widen(t->const_data_ptr(), static_cast<cpu::In>(input_dtype(kNormOp, *t)), 0, cols, values.data());
  if (zero_centered) {
    for (float& value : values) value += 1.0f;
  }
  return values;
}

inline Tensor norm_on_cpu(const Norm& n, std::int64_t out_rows) {
  Tensor y = empty_like_padded(n, out_rows);
  cpu::DefaultFloatModes modes;
  const std::vector<float> gamma = parameter_on_cpu(n.weight, n.cols, n.zero_centered);
  const std::vector<float> beta = parameter_on_cpu(n.bias, n.cols, false);
  auto* bytes = static_cast<char*>(y.mutable_data_ptr());
  const auto in = static_cast<cpu::In>(n.dtype);
  const std::int64_t done = n.rows * n.cols * cpu::bytes_of(in);
  std::memset(bytes + done, 0, static_cast<std::size_t>((out_rows - n.rows) * n.cols * cpu::bytes_of(in)));
  // Empty vectors stand for no parameter, also where there are no columns.
  cpu::norm_rows({n.x.const_data_ptr(), in, n.rows, n.cols, gamma.empty() ? nullptr : gamma.data(),
                  beta.empty() ? nullptr : beta.data(), n.eps, mean_of(n),
                  static_cast<float*>(n.rstd.mutable_data_ptr()), bytes});
  return y;
}

// --- CUDA ---

inline RowsArgs rows_args(const Norm& n, std::int64_t out_rows) {
  const auto dtype = [](const MaybeTensor& t) { return t ? input_dtype(kNormOp, *t) : 0; };
  RowsArgs args = {};
  args.x = n.x.const_data_ptr();
  args.parameters = {pointer_to<const void>(n.weight),
                     pointer_to<const void>(n.bias),
                     dtype(n.weight),
                     dtype(n.bias),
                     n.zero_centered,
                     0};
  args.mean = mean_of(n);
  args.rstd = static_cast<float*>(n.rstd.mutable_data_ptr());
  args.rows = n.rows;
  args.out_rows = out_rows;
  args.cols = n.cols;
  args.eps = n.eps;
  args.dtype = n.dtype;
  return args;
}

inline Tensor norm_on_cuda(const Norm& n, std::int64_t out_rows) {
  Tensor y = empty_like_padded(n, out_rows);
  RowsArgs args = rows_args(n, out_rows);
  args.y = y.mutable_data_ptr();
  if (out_rows > 0) launch_rows(Launcher(device_of(n.x).index), args);
  return y;
}

inline Four fused_fp8(const Launcher& launch, RowsArgs rows, const Device& device, const Cast& cast) {
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
  if (cast.format == kCurrent || cast.columnwise) launch_rows(launch, rows);
  launch_cast(launch, rows, args);
  return {std::get<0>(tensors), std::get<2>(tensors), std::get<1>(tensors), empty_floats(0, device)};
}

inline Four fused_blocks(const Launcher& launch, const RowsArgs& rows, const Device& device,
                         const Cast& cast) {
  const fp8::Scaling s = fp8::scaling(cast.op, cast.fp8, cast.flag, cast.floor);
  const std::vector<std::int64_t> shape = {rows.out_rows, rows.cols};
  Four tensors = fp8_block::allocate(shape, 1, cast.rowwise, cast.columnwise, device, false);
  const fp8_block::Outputs out = fp8_block::outputs_of(tensors, cast.rowwise, cast.columnwise);
  launch_rows(launch, rows);
  launch_cast(
      launch, rows,
      fp8_block::BlockArgs{rows.x, out.row, out.col, out.row_scale_inv, out.col_scale_inv, nullptr,
                           rows.out_rows, rows.cols, fp8_block::scale_shape(rows.out_rows, rows.cols, 1)[1],
                           fp8_block::scale_shape(rows.cols, rows.out_rows, 1)[1], s.eps,
                           fp8_block::kLargest[2], s.pow2, s.fp8, 0});
  return tensors;
}

inline Four fused_mxfp8(const Launcher& launch, const RowsArgs& rows, const Device& device,
                        const Cast& cast) {
  const std::vector<std::int64_t> shape = {rows.out_rows, rows.cols};
  const int fp8 = mxfp8::checked_fp8(cast.op, cast.fp8);
  mxfp8::check_shape(shape, cast.rowwise, cast.columnwise, false);
  Four tensors = mxfp8::allocate(shape, cast.rowwise, cast.columnwise, device, false);
  const mxfp8::Outputs out = mxfp8::outputs_of(tensors, cast.rowwise, cast.columnwise);
  launch_rows(launch, rows);
  launch_cast(launch, rows,
              mxfp8::Args{rows.x, out.row, out.col, out.row_scales, out.col_scales, nullptr, rows.out_rows,
                          rows.cols, fp8, 0, cast.flag, 2, 1, 0});
  return tensors;
}

// --- the ops ---

template <bool kCuda>
Three norm(const Tensor& x, const MaybeTensor weight, const MaybeTensor bias, double eps, bool rms,
           bool zero_centered) {
  std::optional<DeviceGuard> guard;
  if constexpr (kCuda) guard.emplace(device_of(x).index);
  const Norm n = norm_of(kNormOp, x, weight, bias, eps, rms, zero_centered);
  return {kCuda ? norm_on_cuda(n, n.rows) : norm_on_cpu(n, n.rows), n.mean, n.rstd};
}

template <bool kCuda>
Six norm_quantize(const Tensor& x, const MaybeTensor weight, const MaybeTensor bias, double eps, bool rms,
                  bool zero_centered, std::int64_t multiple, std::int64_t format, std::int64_t fp8,
                  bool rowwise, bool columnwise, bool flag, double floor, const MaybeTensor scale,
                  const MaybeTensor amax) {
  std::optional<DeviceGuard> guard;
  if constexpr (kCuda) guard.emplace(device_of(x).index);
  const Cast cast = {kQuantizeOp, format, fp8, rowwise, columnwise, flag, floor, scale, amax};
  check_cast(cast);
  const Norm n = norm_of(kQuantizeOp, x, weight, bias, eps, rms, zero_centered);
  const std::int64_t out_rows = padded_rows(kQuantizeOp, n.rows, multiple);
  const auto with = [&](const Four& four) -> Six {
    return std::tuple_cat(four, std::make_tuple(n.mean, n.rstd));
  };
  if constexpr (kCuda) {
    const RowsArgs rows = rows_args(n, out_rows);
    if (tuned(rows) && rows.rows > 0 && rows.cols > 0 && (rowwise || columnwise)) {
      const Device device = device_of(x);
      const Launcher launch(device.index);
      if (format == kBlocks) return with(fused_blocks(launch, rows, device, cast));
      if (format == kMxfp8) return with(fused_mxfp8(launch, rows, device, cast));
      return with(fused_fp8(launch, rows, device, cast));
    }
    return with(quantize_plain<true>(norm_on_cuda(n, out_rows), cast));
  } else {
    return with(quantize_plain<false>(norm_on_cpu(n, out_rows), cast));
  }
}

}  // namespace norm
}  // namespace tejit
