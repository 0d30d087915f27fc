// The ops of FP8 with a scale that is given (delayed scaling): tejit::fp8_quantize_delayed and
// fp8_quantize_delayed_out, each for CPU and CUDA tensors. One pass over x casts it and keeps a running amax.
#pragma once

#include <vector>

#include "fp8/ops.h"

namespace tejit {
namespace fp8 {

inline constexpr char kDelayedOp[] = "tejit::fp8_quantize_delayed";
inline constexpr char kDelayedOutOp[] = "tejit::fp8_quantize_delayed_out";

inline void require_state(const char* op, const char* name, const Tensor& t, const Device& device) {
  require_device(op, name, t, device);
  const std::vector<std::int64_t> shape = {1};
  if (dtype_of(t) != aoti_torch_dtype_float32() || !same_shape(t.sizes(), shape)) {
    fail(op, ": ", name, " has dtype ", dtype_name(dtype_of(t)), " and shape ", shape_name(t.sizes()),
         ", but float32 and shape (1,) are needed: one value a tensor, for example torch.ones(1, "
         "device=x.device)");
  }
}

// What the scale and the running amax of a call are, checked.
struct State {
  const float* scale;
  float* amax;
};

inline State state_of(const char* op, const Tensor& x, const Tensor& scale, const Tensor& amax) {
  require_state(op, "scale", scale, device_of(x));
  require_state(op, "amax", amax, device_of(x));
  return {static_cast<const float*>(scale.const_data_ptr()), static_cast<float*>(amax.mutable_data_ptr())};
}

// --- CPU ---

inline void delayed_on_cpu(const Tensor& x, int dtype, int fp8, const State& state, const Outputs& out) {
  const float scale = *state.scale;
  *out.scale_inv = cpu::scale_inverse(scale);
  if (x.numel() == 0) return;
  const auto in = static_cast<cpu::In>(dtype);
  const Tensor values = as_contiguous(x);
  const float seen = cpu::fp8_amax(values.const_data_ptr(), in, x.numel());
  if (seen > *state.amax) *state.amax = seen;  // a NaN there stays, as in torch.maximum
  const Matrix m = matrix_of(shape_of(x));
  if (out.row || out.col)
    cpu::fp8_cast(values.const_data_ptr(), in, m.rows, m.cols, scale, fp8, out.row, out.col);
}

inline Three quantize_delayed_cpu(const Tensor& x, std::int64_t fp8, bool data, bool transpose,
                                  const Tensor& scale, const Tensor& amax) {
  const Scaling s = scaling(kDelayedOp, fp8, false, 0.0);
  const int dtype = input_dtype(kDelayedOp, x);
  const State state = state_of(kDelayedOp, x, scale, amax);
  Three tensors = allocate(shape_of(x), data, transpose, device_of(x), false);
  delayed_on_cpu(x, dtype, s.fp8, state, outputs_of(tensors, data, transpose));
  return tensors;
}

inline void quantize_delayed_out_cpu(const Tensor& x, std::int64_t fp8, const Tensor& scale,
                                     const Tensor& amax, const MaybeTensor noop, const MaybeTensor data,
                                     const MaybeTensor transpose, const Tensor& scale_inv) {
  const Scaling s = scaling(kDelayedOutOp, fp8, false, 0.0);
  const int dtype = input_dtype(kDelayedOutOp, x);
  const State state = state_of(kDelayedOutOp, x, scale, amax);
  check_outputs(kDelayedOutOp, x, noop, data, transpose, scale_inv);
  if (noop && *pointer_to<const float>(noop) == 1.0f) return;
  delayed_on_cpu(x, dtype, s.fp8, state, outputs_of(data, transpose, scale_inv));
}

// --- CUDA ---

// The device of x is current. One launch, also where there are no elements: scale_inv follows from the scale.
inline void delayed_on_cuda(const Tensor& x, int dtype, int fp8, const State& state, const float* noop,
                            const Outputs& out) {
  const Tensor values = as_contiguous(x);
  CastArgs args = cast_args(values, dtype, fp8, noop, out);
  args.scale = state.scale;
  args.new_amax = x.numel() == 0 ? nullptr : state.amax;
  launch_cast(Launcher(device_of(x).index), args, dtype, false);
}

inline Three quantize_delayed_cuda(const Tensor& x, std::int64_t fp8, bool data, bool transpose,
                                   const Tensor& scale, const Tensor& amax) {
  const Scaling s = scaling(kDelayedOp, fp8, false, 0.0);
  const int dtype = input_dtype(kDelayedOp, x);
  const State state = state_of(kDelayedOp, x, scale, amax);
  const Device device = device_of(x);
  const DeviceGuard guard(device.index);
  Three tensors = allocate(shape_of(x), data, transpose, device, false);
  delayed_on_cuda(x, dtype, s.fp8, state, nullptr, outputs_of(tensors, data, transpose));
  return tensors;
}

inline void quantize_delayed_out_cuda(const Tensor& x, std::int64_t fp8, const Tensor& scale,
                                      const Tensor& amax, const MaybeTensor noop, const MaybeTensor data,
                                      const MaybeTensor transpose, const Tensor& scale_inv) {
  const Scaling s = scaling(kDelayedOutOp, fp8, false, 0.0);
  const int dtype = input_dtype(kDelayedOutOp, x);
  const State state = state_of(kDelayedOutOp, x, scale, amax);
  check_outputs(kDelayedOutOp, x, noop, data, transpose, scale_inv);
  const DeviceGuard guard(device_of(x).index);
  delayed_on_cuda(x, dtype, s.fp8, state, pointer_to<const float>(noop),
                  outputs_of(data, transpose, scale_inv));
}

}  // namespace fp8
}  // namespace tejit
