// The ops of activations: tejit::activation and tejit::activation_quantize, each for CPU and CUDA tensors.
// What activation_quantize writes is what the format's own op would make of activation's output.
#pragma once

#include <cstring>
#include <optional>
#include <vector>

#include "activation/curve.h"
#include "activation/launch.h"
#include "common/tensor.h"
#include "cpu/activation.h"
#include "fused/ops.h"

namespace tejit {
namespace activation {

inline constexpr char kActivationOp[] = "tejit::activation";
inline constexpr char kQuantizeOp[] = "tejit::activation_quantize";

// The input of an activation, checked; x is contiguous.
struct Input {
  Tensor x;
  std::int64_t rows, cols;  // of the output
  int dtype, kind;
  bool gated;
};

inline Input input_of(const char* op, const Tensor& x, std::int64_t kind, bool gated) {
  const Matrix m = fused::checked_matrix(op, x);
  if (kind < 0 || kind >= kKinds)
    fail(op, ": kind is ", kind,
         ", but 0 (GELU), 1 (ReLU), 2 (SiLU), 3 (squared ReLU), 4 (quick GELU) or 5 (sigmoid) is needed");
  if (gated && m.cols % 2 != 0)
    fail(op, ": x has ", m.cols, " columns, but a gated activation needs two halves; pass an even number");
  return {as_contiguous(x),       m.rows, gated ? m.cols / 2 : m.cols, input_dtype(op, x),
          static_cast<int>(kind), gated};
}

inline Tensor empty_output(const Input& in, std::int64_t rows) {
  return empty(std::vector<std::int64_t>{rows, in.cols}, dtype_of(in.x), device_of(in.x));
}

inline Tensor activate_on_cpu(const Input& in, std::int64_t out_rows) {
  Tensor y = empty_output(in, out_rows);
  auto* bytes = static_cast<char*>(y.mutable_data_ptr());
  const auto dtype = static_cast<cpu::In>(in.dtype);
  const std::int64_t row_bytes = in.cols * cpu::bytes_of(dtype);
  const std::int64_t padding = (out_rows - in.rows) * row_bytes;
  if (padding > 0) std::memset(bytes + in.rows * row_bytes, 0, static_cast<std::size_t>(padding));
  cpu::activate({in.x.const_data_ptr(), dtype, in.rows, in.cols, in.kind, in.gated, bytes});
  return y;
}

inline RowsArgs rows_args(const Input& in, std::int64_t out_rows) {
  RowsArgs args = {};
  args.x = in.x.const_data_ptr();
  args.rows = in.rows;
  args.out_rows = out_rows;
  args.cols = in.cols;
  args.pitch = in.gated ? 2 * in.cols : in.cols;
  args.kind = in.kind;
  args.gated = in.gated;
  args.dtype = in.dtype;
  args.curve = curve_of(in.kind);
  return args;
}

inline Tensor activate_on_cuda(const Input& in, std::int64_t out_rows) {
  Tensor y = empty_output(in, out_rows);
  RowsArgs args = rows_args(in, out_rows);
  args.y = y.mutable_data_ptr();
  if (y.numel() > 0) launch_rows(Launcher(device_of(in.x).index), args);
  return y;
}

template <bool kCuda>
Tensor activate(const Tensor& x, std::int64_t kind, bool gated) {
  std::optional<DeviceGuard> guard;
  if constexpr (kCuda) guard.emplace(device_of(x).index);
  const Input in = input_of(kActivationOp, x, kind, gated);
  return kCuda ? activate_on_cuda(in, in.rows) : activate_on_cpu(in, in.rows);
}

template <bool kCuda>
fused::Four activation_quantize(const Tensor& x, std::int64_t kind, bool gated, std::int64_t multiple,
                                std::int64_t format, std::int64_t fp8, bool rowwise, bool columnwise,
                                bool flag, double floor, const MaybeTensor scale, const MaybeTensor amax) {
  std::optional<DeviceGuard> guard;
  if constexpr (kCuda) guard.emplace(device_of(x).index);
  const fused::Cast cast = {kQuantizeOp, format, fp8, rowwise, columnwise, flag, floor, scale, amax};
  fused::check_cast(cast);
  const Input in = input_of(kQuantizeOp, x, kind, gated);
  const std::int64_t out_rows = fused::padded_rows(kQuantizeOp, in.rows, multiple);
  if constexpr (kCuda) {
    const RowsArgs rows = rows_args(in, out_rows);
    if (tuned(rows) && rows.rows > 0 && rows.cols > 0 && (rowwise || columnwise))
      return fused::quantize_on_cuda(device_of(x), rows, cast);
    return fused::quantize_plain<true>(activate_on_cuda(in, out_rows), cast);
  } else {
    return fused::quantize_plain<false>(activate_on_cpu(in, out_rows), cast);
  }
}

}  // namespace activation
}  // namespace tejit
