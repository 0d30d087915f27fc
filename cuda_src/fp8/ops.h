// The ops of FP8 current scaling: tejit::fp8_amax, fp8_scale, fp8_quantize_current, fp8_quantize_current_out,
// fp8_make_empty, each for CPU and CUDA tensors. Schemas and the reference of each are registered from
// Python.
#pragma once

#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "common/tensor.h"
#include "cpu/fp8.h"
#include "fp8/args.h"
#include "fp8/launch.h"
#include "fp8/scaling.h"

namespace tejit {
namespace fp8 {

inline constexpr char kAmaxOp[] = "tejit::fp8_amax";
inline constexpr char kScaleOp[] = "tejit::fp8_scale";
inline constexpr char kQuantizeOp[] = "tejit::fp8_quantize_current";
inline constexpr char kQuantizeOutOp[] = "tejit::fp8_quantize_current_out";
inline constexpr char kMakeEmptyOp[] = "tejit::fp8_make_empty";

using Three = std::tuple<Tensor, Tensor, Tensor>;

// What one call writes; `row` and `col` null where that direction is not asked for.
struct Outputs {
  std::uint8_t* row;
  std::uint8_t* col;
  float* scale_inv;
};

inline Three allocate(const std::vector<std::int64_t>& shape, bool data, bool transpose, const Device& device,
                      bool pinned) {
  const std::int64_t none = 0;
  return {data ? empty_bytes(shape, device, pinned) : empty_bytes(Sizes(&none, 1), device, pinned),
          transpose ? empty_bytes(transposed(shape), device, pinned)
                    : empty_bytes(Sizes(&none, 1), device, pinned),
          empty_floats(1, device, pinned)};
}

inline Outputs outputs_of(const Three& tensors, bool data, bool transpose) {
  return {data ? static_cast<std::uint8_t*>(std::get<0>(tensors).mutable_data_ptr()) : nullptr,
          transpose ? static_cast<std::uint8_t*>(std::get<1>(tensors).mutable_data_ptr()) : nullptr,
          static_cast<float*>(std::get<2>(tensors).mutable_data_ptr())};
}

// The checks that quantize_current and quantize_current_out share; returns the input dtype's number.
inline int check_input(const char* op, const Tensor& x, const MaybeTensor& amax) {
  if (amax) require_one_float(op, "amax", *amax, device_of(x));
  return input_dtype(op, x);
}

inline Outputs outputs_of(const MaybeTensor& data, const MaybeTensor& transpose, const Tensor& scale_inv) {
  return {pointer_to<std::uint8_t>(data), pointer_to<std::uint8_t>(transpose),
          static_cast<float*>(scale_inv.mutable_data_ptr())};
}

inline void check_outputs(const char* op, const Tensor& x, const MaybeTensor& noop, const MaybeTensor& data,
                          const MaybeTensor& transpose, const Tensor& scale_inv) {
  const Device device = device_of(x);
  const std::vector<std::int64_t> shape = shape_of(x);
  if (noop) require_one_float(op, "noop", *noop, device);
  if (data) require_bytes(op, "data", *data, shape, device);
  if (transpose) require_bytes(op, "transpose", *transpose, transposed(shape), device);
  require_one_float(op, "scale_inv", scale_inv, device);
}

// --- CPU ---

constexpr float kLimit = std::numeric_limits<float>::max();

inline Tensor amax_cpu(const Tensor& x) {
  const auto in = static_cast<cpu::In>(input_dtype(kAmaxOp, x));
  const Tensor values = as_contiguous(x);
  Tensor amax = empty_floats(1, device_of(x));
  *static_cast<float*>(amax.mutable_data_ptr()) =
      x.numel() == 0 ? 0.0f : cpu::fp8_amax(values.const_data_ptr(), in, x.numel());
  return amax;
}

inline std::tuple<Tensor, Tensor> scale_cpu(const Tensor& amax, std::int64_t fp8, bool pow2, double eps) {
  const Scaling s = scaling(kScaleOp, fp8, pow2, eps);
  const Device device = device_of(amax);
  require_one_float(kScaleOp, "amax", amax, device);
  Tensor scale = empty_floats(1, device), scale_inv = empty_floats(1, device);
  const float value = cpu::scale_from_amax(*static_cast<const float*>(amax.const_data_ptr()), s.fp8_max,
                                           s.pow2, s.eps, kLimit);
  *static_cast<float*>(scale.mutable_data_ptr()) = value;
  *static_cast<float*>(scale_inv.mutable_data_ptr()) = cpu::scale_inverse(value);
  return {scale, scale_inv};
}

inline void quantize_on_cpu(const Tensor& x, int dtype, const Scaling& s, const MaybeTensor& amax,
                            const Outputs& out) {
  if (x.numel() == 0) {
    *out.scale_inv = 1.0f;
    return;
  }
  const auto in = static_cast<cpu::In>(dtype);
  const Tensor values = as_contiguous(x);
  const void* from = values.const_data_ptr();
  const float largest = amax ? *pointer_to<const float>(amax) : cpu::fp8_amax(from, in, x.numel());
  const float scale = cpu::scale_from_amax(largest, s.fp8_max, s.pow2, s.eps, kLimit);
  *out.scale_inv = cpu::scale_inverse(scale);
  const Matrix m = matrix_of(shape_of(x));
  if (out.row || out.col) cpu::fp8_cast(from, in, m.rows, m.cols, scale, s.fp8, out.row, out.col);
}

inline Three quantize_cpu(const Tensor& x, std::int64_t fp8, bool data, bool transpose, bool pow2, double eps,
                          const MaybeTensor amax) {
  const Scaling s = scaling(kQuantizeOp, fp8, pow2, eps);
  const int dtype = check_input(kQuantizeOp, x, amax);
  Three tensors = allocate(shape_of(x), data, transpose, device_of(x), false);
  quantize_on_cpu(x, dtype, s, amax, outputs_of(tensors, data, transpose));
  return tensors;
}

inline void quantize_out_cpu(const Tensor& x, std::int64_t fp8, bool pow2, double eps, const MaybeTensor amax,
                             const MaybeTensor noop, const MaybeTensor data, const MaybeTensor transpose,
                             const Tensor& scale_inv) {
  const Scaling s = scaling(kQuantizeOutOp, fp8, pow2, eps);
  const int dtype = check_input(kQuantizeOutOp, x, amax);
  check_outputs(kQuantizeOutOp, x, noop, data, transpose, scale_inv);
  if (noop && *pointer_to<const float>(noop) == 1.0f) return;
  quantize_on_cpu(x, dtype, s, amax, outputs_of(data, transpose, scale_inv));
}

// --- CUDA ---

inline Tensor amax_cuda(const Tensor& x) {
  const int dtype = input_dtype(kAmaxOp, x);
  const Device device = device_of(x);
  const DeviceGuard guard(device.index);
  if (x.numel() == 0) {
    Tensor amax = empty_floats(1, device);
    return torch::stable::zero_(amax);
  }
  const Tensor values = as_contiguous(x);
  const Launcher launch(device.index);
  Tensor partial = launch_amax(launch, values, dtype, device, nullptr);
  if (partial.numel() == 1) return partial;
  Tensor amax = empty_floats(1, device);
  const AmaxFinishArgs args = {static_cast<const float*>(partial.const_data_ptr()),
                               static_cast<float*>(amax.mutable_data_ptr()),
                               static_cast<int>(partial.numel())};
  launch("tejit_fp8_amax_finish", 1, 1024, args, true);
  return amax;
}

inline std::tuple<Tensor, Tensor> scale_cuda(const Tensor& amax, std::int64_t fp8, bool pow2, double eps) {
  const Scaling s = scaling(kScaleOp, fp8, pow2, eps);
  const Device device = device_of(amax);
  require_one_float(kScaleOp, "amax", amax, device);
  const DeviceGuard guard(device.index);
  Tensor scale = empty_floats(1, device), scale_inv = empty_floats(1, device);
  const ScaleArgs args = {static_cast<const float*>(amax.const_data_ptr()),
                          static_cast<float*>(scale.mutable_data_ptr()),
                          static_cast<float*>(scale_inv.mutable_data_ptr()),
                          s.fp8_max,
                          s.eps,
                          s.pow2};
  Launcher(device.index)("tejit_fp8_scale", 1, 32, args);
  return {scale, scale_inv};
}

// What every cast of `values` (x, contiguous) needs; the rest, from which the scale follows, is null.
inline CastArgs cast_args(const Tensor& values, int dtype, int fp8, const float* noop, const Outputs& out) {
  const Matrix m = matrix_of(shape_of(values));
  CastArgs args = {};
  args.x = values.const_data_ptr();
  args.row = out.row;
  args.col = out.col;
  args.scale_inv = out.scale_inv;
  args.noop = noop;
  args.rows = m.rows;
  args.cols = m.cols;
  args.half = is_half(dtype);
  args.fp8 = fp8;
  return args;
}

// The device of x is current.
inline void quantize_on_cuda(const Tensor& x, int dtype, const Scaling& s, const MaybeTensor& amax,
                             const float* noop, const Outputs& out) {
  const Device device = device_of(x);
  const Launcher launch(device.index);
  const Tensor values = as_contiguous(x);
  CastArgs args = cast_args(values, dtype, s.fp8, noop, out);
  args.pow2 = s.pow2;
  args.eps = s.eps;
  // No elements: no maxima to reduce and nothing to cast, which leaves a scale of 1 (eps must not change
  // that).
  if (x.numel() == 0) {
    args.eps = 0.0f;
    return launch_cast(launch, args, dtype, false);
  }
  MaybeTensor partial;  // freed after the launches, which is in the stream's order
  if (!amax) partial = launch_amax(launch, values, dtype, device, noop);
  args.amax = pointer_to<const float>(amax ? amax : partial);
  args.amax_count = amax ? 1 : static_cast<int>(partial->numel());
  launch_cast(launch, args, dtype, !amax);
}

inline Three quantize_cuda(const Tensor& x, std::int64_t fp8, bool data, bool transpose, bool pow2,
                           double eps, const MaybeTensor amax) {
  const Scaling s = scaling(kQuantizeOp, fp8, pow2, eps);
  const int dtype = check_input(kQuantizeOp, x, amax);
  const Device device = device_of(x);
  const DeviceGuard guard(device.index);
  Three tensors = allocate(shape_of(x), data, transpose, device, false);
  if (x.numel() == 0) {
    torch::stable::fill_(std::get<2>(tensors), 1.0);
  } else {
    quantize_on_cuda(x, dtype, s, amax, nullptr, outputs_of(tensors, data, transpose));
  }
  return tensors;
}

inline void quantize_out_cuda(const Tensor& x, std::int64_t fp8, bool pow2, double eps,
                              const MaybeTensor amax, const MaybeTensor noop, const MaybeTensor data,
                              const MaybeTensor transpose, const Tensor& scale_inv) {
  const Scaling s = scaling(kQuantizeOutOp, fp8, pow2, eps);
  const int dtype = check_input(kQuantizeOutOp, x, amax);
  check_outputs(kQuantizeOutOp, x, noop, data, transpose, scale_inv);
  const DeviceGuard guard(device_of(x).index);
  if (x.numel() == 0 && !noop) {
    torch::stable::fill_(scale_inv, 1.0);
    return;
  }
  quantize_on_cuda(x, dtype, s, amax, pointer_to<const float>(noop), outputs_of(data, transpose, scale_inv));
}

// --- every device ---

inline Three make_empty(std::vector<std::int64_t> shape, bool data, bool transpose,
                        torch::stable::Device device, bool pin_memory) {
  const Device where = allocation_device(kMakeEmptyOp, shape, device, pin_memory);
  return allocate(shape, data, transpose, where, pin_memory);
}

}  // namespace fp8
}  // namespace tejit
