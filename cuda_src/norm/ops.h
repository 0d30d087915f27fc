// The ops of norms: tejit::norm and tejit::norm_quantize, each for CPU and CUDA tensors. What norm_quantize
// writes is what the format's own op would make of norm's output.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "common/tensor.h"
#include "cpu/norm.h"
#include "fused/ops.h"
#include "norm/launch.h"

namespace tejit {
namespace norm {

inline constexpr char kNormOp[] = "tejit::norm";
inline constexpr char kQuantizeOp[] = "tejit::norm_quantize";

using Three = std::tuple<Tensor, Tensor, Tensor>;
using Six = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

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
  input_dtype(op, *t, name);
  return as_contiguous(*t);
}

inline Norm norm_of(const char* op, const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
                    double eps, bool rms, bool zero_centered) {
  const Device device = device_of(x);
  const Matrix m = fused::checked_matrix(op, x);
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
  const fused::Cast cast = {kQuantizeOp, format, fp8, rowwise, columnwise, flag, floor, scale, amax};
  fused::check_cast(cast);
  const Norm n = norm_of(kQuantizeOp, x, weight, bias, eps, rms, zero_centered);
  const std::int64_t out_rows = fused::padded_rows(kQuantizeOp, n.rows, multiple);
  const auto with = [&](const fused::Four& four) -> Six {
    return std::tuple_cat(four, std::make_tuple(n.mean, n.rstd));
  };
  if constexpr (kCuda) {
    const RowsArgs rows = rows_args(n, out_rows);
    if (tuned(rows) && rows.rows > 0 && rows.cols > 0 && (rowwise || columnwise)) {
      return with(fused::quantize_on_cuda(device_of(x), rows, cast));
    }
    return with(fused::quantize_plain<true>(norm_on_cuda(n, out_rows), cast));
  } else {
    return with(fused::quantize_plain<false>(norm_on_cpu(n, out_rows), cast));
  }
}

}  // namespace norm
}  // namespace tejit
