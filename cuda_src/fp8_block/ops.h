// The ops of FP8 in blocks of 128: tejit::fp8_block_quantize, fp8_block_quantize_out, fp8_block_make_empty,
// each for CPU and CUDA tensors. Schemas and the reference of each are registered from Python.
#pragma once

#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "common/tensor.h"
#include "cpu/fp8.h"
#include "fp8/scaling.h"
#include "fp8_block/args.h"
#include "fp8_block/launch.h"

namespace tejit {
namespace fp8_block {

inline constexpr char kQuantizeOp[] = "tejit::fp8_block_quantize";
inline constexpr char kQuantizeOutOp[] = "tejit::fp8_block_quantize_out";
inline constexpr char kMakeEmptyOp[] = "tejit::fp8_block_make_empty";

using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Shape = std::vector<std::int64_t>;

// The largest finite value of each input dtype, in the order of input_dtype: what an overflowing scale
// becomes.
inline constexpr float kLargest[3] = {std::numeric_limits<float>::max(), 65504.0f, 0x1.FEp127f};

inline int checked_dim(const char* op, std::int64_t dim) {
  if (dim != 1 && dim != 2) fail(op, ": dim is ", dim, ", but 1 (1x128) or 2 (128x128) is needed");
  return static_cast<int>(dim);
}

// The scale buffer of an operand (rows, contracted): the rowwise one for (M, K), the columnwise for (K, M).
// The rule is that of scale_shape in Python.
inline Shape scale_shape(std::int64_t rows, std::int64_t contracted, int dim) {
  const auto aligned = [](std::int64_t n) { return pieces_of(n, 4) * 4; };
  if (dim == 1) return {pieces_of(contracted, kBlock), aligned(rows)};
  return {pieces_of(rows, kBlock), aligned(pieces_of(contracted, kBlock))};
}

inline Four allocate(const Shape& shape, int dim, bool rowwise, bool columnwise, const Device& device,
                     bool pinned) {
  const Matrix m = matrix_of(shape);
  const Shape none = {0};
  const auto floats = [&](const Shape& size) {
    return empty(size, aoti_torch_dtype_float32(), device, pinned);
  };
  return {empty_bytes(rowwise ? shape : none, device, pinned),
          floats(rowwise ? scale_shape(m.rows, m.cols, dim) : none),
          empty_bytes(columnwise ? transposed(shape) : none, device, pinned),
          floats(columnwise ? scale_shape(m.cols, m.rows, dim) : none)};
}

// What one call writes; null where a direction is not asked for.
struct Outputs {
  std::uint8_t* row = nullptr;
  float* row_scale_inv = nullptr;
  std::uint8_t* col = nullptr;
  float* col_scale_inv = nullptr;
};

inline Outputs outputs_of(const Four& tensors, bool rowwise, bool columnwise) {
  Outputs out;
  if (rowwise) {
    out.row = static_cast<std::uint8_t*>(std::get<0>(tensors).mutable_data_ptr());
    out.row_scale_inv = static_cast<float*>(std::get<1>(tensors).mutable_data_ptr());
  }
  if (columnwise) {
    out.col = static_cast<std::uint8_t*>(std::get<2>(tensors).mutable_data_ptr());
    out.col_scale_inv = static_cast<float*>(std::get<3>(tensors).mutable_data_ptr());
  }
  return out;
}

inline void check_direction(const char* name, const MaybeTensor& data, const MaybeTensor& scales,
                            const Shape& shape, const Shape& scale_shape, const Device& device) {
  if (data.has_value() != scales.has_value()) {
    fail(kQuantizeOutOp, ": ", name, data ? " is given without its scale_inv" : "_scale_inv is given alone",
         ", but both buffers of a direction are needed, or neither");
  }
  if (!data) return;
  const std::string scale_name = std::string(name) + "_scale_inv";
  require_bytes(kQuantizeOutOp, name, *data, shape, device);
  require_buffer(kQuantizeOutOp, scale_name.c_str(), *scales, aoti_torch_dtype_float32(), scale_shape,
                 device);
}

inline void check_outputs(const Tensor& x, int dim, const MaybeTensor& noop, const MaybeTensor& row,
                          const MaybeTensor& row_scale_inv, const MaybeTensor& col,
                          const MaybeTensor& col_scale_inv) {
  const Device device = device_of(x);
  const Shape shape = shape_of(x);
  const Matrix m = matrix_of(shape);
  if (noop) require_one_float(kQuantizeOutOp, "noop", *noop, device);
  check_direction("row", row, row_scale_inv, shape, scale_shape(m.rows, m.cols, dim), device);
  check_direction("col", col, col_scale_inv, transposed(shape), scale_shape(m.cols, m.rows, dim), device);
}

// --- CPU ---

inline void quantize_on_cpu(const Tensor& x, int dtype, int dim, const fp8::Scaling& s, const Outputs& out) {
  const Tensor values = as_contiguous(x);
  const Matrix m = matrix_of(shape_of(x));
  const cpu::Fp8Blocks job = {values.const_data_ptr(),
                              m.rows,
                              m.cols,
                              s.fp8,
                              s.pow2,
                              s.eps,
                              kLargest[dtype],
                              out.row,
                              out.row_scale_inv,
                              scale_shape(m.rows, m.cols, dim)[1],
                              out.col,
                              out.col_scale_inv,
                              scale_shape(m.cols, m.rows, dim)[1]};
  cpu::fp8_blocks(job, static_cast<cpu::In>(dtype), dim == 2);
}

inline Four quantize_cpu(const Tensor& x, std::int64_t fp8, std::int64_t dim, bool rowwise, bool columnwise,
                         bool pow2, double eps) {
  const fp8::Scaling s = fp8::scaling(kQuantizeOp, fp8, pow2, eps);
  const int d = checked_dim(kQuantizeOp, dim);
  const int dtype = input_dtype(kQuantizeOp, x);
  Four tensors = allocate(shape_of(x), d, rowwise, columnwise, device_of(x), false);
  quantize_on_cpu(x, dtype, d, s, outputs_of(tensors, rowwise, columnwise));
  return tensors;
}

inline Outputs outputs_of(const MaybeTensor& row, const MaybeTensor& row_scale_inv, const MaybeTensor& col,
                          const MaybeTensor& col_scale_inv) {
  return {pointer_to<std::uint8_t>(row), pointer_to<float>(row_scale_inv), pointer_to<std::uint8_t>(col),
          pointer_to<float>(col_scale_inv)};
}

inline void quantize_out_cpu(const Tensor& x, std::int64_t fp8, std::int64_t dim, bool pow2, double eps,
                             const MaybeTensor noop, const MaybeTensor row, const MaybeTensor row_scale_inv,
                             const MaybeTensor col, const MaybeTensor col_scale_inv) {
  const fp8::Scaling s = fp8::scaling(kQuantizeOutOp, fp8, pow2, eps);
  const int d = checked_dim(kQuantizeOutOp, dim);
  const int dtype = input_dtype(kQuantizeOutOp, x);
  check_outputs(x, d, noop, row, row_scale_inv, col, col_scale_inv);
  if (noop && *pointer_to<const float>(noop) == 1.0f) return;
  quantize_on_cpu(x, dtype, d, s, outputs_of(row, row_scale_inv, col, col_scale_inv));
}

// --- CUDA ---

// The device of x is current.
inline void quantize_on_cuda(const Tensor& x, int dtype, int dim, const fp8::Scaling& s, const float* noop,
                             const Outputs& out) {
  if (x.numel() == 0 || (out.row == nullptr && out.col == nullptr)) return;
  const Launcher launch(device_of(x).index);
  const Tensor values = as_contiguous(x);
  const Matrix m = matrix_of(shape_of(x));
  const BlockArgs args = {values.const_data_ptr(),
                          out.row,
                          out.col,
                          out.row_scale_inv,
                          out.col_scale_inv,
                          noop,
                          m.rows,
                          m.cols,
                          scale_shape(m.rows, m.cols, dim)[1],
                          scale_shape(m.cols, m.rows, dim)[1],
                          s.eps,
                          kLargest[dtype],
                          s.pow2,
                          s.fp8,
                          is_half(dtype)};
  launch_blocks(launch, args, dim, dtype);
}

inline Four quantize_cuda(const Tensor& x, std::int64_t fp8, std::int64_t dim, bool rowwise, bool columnwise,
                          bool pow2, double eps) {
  const fp8::Scaling s = fp8::scaling(kQuantizeOp, fp8, pow2, eps);
  const int d = checked_dim(kQuantizeOp, dim);
  const int dtype = input_dtype(kQuantizeOp, x);
  const Device device = device_of(x);
  const DeviceGuard guard(device.index);
  Four tensors = allocate(shape_of(x), d, rowwise, columnwise, device, false);
  quantize_on_cuda(x, dtype, d, s, nullptr, outputs_of(tensors, rowwise, columnwise));
  return tensors;
}

inline void quantize_out_cuda(const Tensor& x, std::int64_t fp8, std::int64_t dim, bool pow2, double eps,
                              const MaybeTensor noop, const MaybeTensor row, const MaybeTensor row_scale_inv,
                              const MaybeTensor col, const MaybeTensor col_scale_inv) {
  const fp8::Scaling s = fp8::scaling(kQuantizeOutOp, fp8, pow2, eps);
  const int d = checked_dim(kQuantizeOutOp, dim);
  const int dtype = input_dtype(kQuantizeOutOp, x);
  check_outputs(x, d, noop, row, row_scale_inv, col, col_scale_inv);
  const DeviceGuard guard(device_of(x).index);
  quantize_on_cuda(x, dtype, d, s, pointer_to<const float>(noop),
                   outputs_of(row, row_scale_inv, col, col_scale_inv));
}

// --- every device ---

inline Four make_empty(std::vector<std::int64_t> shape, std::int64_t dim, bool rowwise, bool columnwise,
                       torch::stable::Device device, bool pin_memory) {
  const int d = checked_dim(kMakeEmptyOp, dim);
  const Device where = allocation_device(kMakeEmptyOp, shape, device, pin_memory);
  return allocate(shape, d, rowwise, columnwise, where, pin_memory);
}

}  // namespace fp8_block
}  // namespace tejit
