// The ops of MXFP8: tejit::mxfp8_quantize, mxfp8_quantize_out, mxfp8_make_empty, each for CPU and CUDA
// tensors. Schemas and the reference of each are registered from Python.
#pragma once

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "common/alignment.h"
#include "common/tensor.h"
#include "cpu/mxfp8.h"
#include "mxfp8/args.h"
#include "mxfp8/launch.h"

namespace tejit {
namespace mxfp8 {

inline constexpr char kQuantizeOp[] = "tejit::mxfp8_quantize";
inline constexpr char kQuantizeOutOp[] = "tejit::mxfp8_quantize_out";
inline constexpr char kMakeEmptyOp[] = "tejit::mxfp8_make_empty";

using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Shape = std::vector<std::int64_t>;

inline int checked_fp8(const char* op, std::int64_t fp8) {
  if (fp8 != 0 && fp8 != 1) fail(op, ": fp8 is ", fp8, ", but 0 (E4M3) or 1 (E5M2) is needed");
  return static_cast<int>(fp8);
}

inline void check_shape(const Shape& shape, bool rowwise, bool columnwise, bool square) {
  require_alignment("MXFP8", shape, kBlock, rowwise || (square && columnwise), columnwise || (square && rowwise));
}

// The rule is that of scale_shapes in Python.
inline std::int64_t padded(std::int64_t n, std::int64_t multiple) {
  return pieces_of(n, multiple) * multiple;
}
inline Shape row_scale_shape(const Matrix& m) {
  return {padded(m.rows, kOuter), padded(m.cols / kBlock, kInner)};
}
inline Shape col_scale_shape(const Matrix& m) {
  return {padded(m.rows / kBlock, kInner), padded(m.cols, kOuter)};
}

inline Four allocate(const Shape& shape, bool rowwise, bool columnwise, const Device& device, bool pinned) {
  const Matrix m = matrix_of(shape);
  const auto bytes = [&](bool wanted, const Shape& size) {
    return empty_bytes(wanted ? size : Shape{0}, device, pinned);
  };
  return {bytes(rowwise, shape), bytes(rowwise, row_scale_shape(m)), bytes(columnwise, shape),
          bytes(columnwise, col_scale_shape(m))};
}

// What one call writes; null where a direction is not asked for.
struct Outputs {
  std::uint8_t* row = nullptr;
  std::uint8_t* row_scales = nullptr;
  std::uint8_t* col = nullptr;
  std::uint8_t* col_scales = nullptr;
};

inline Outputs outputs_of(const Four& tensors, bool rowwise, bool columnwise) {
  const auto pointer = [](bool wanted, const Tensor& t) {
    return wanted ? static_cast<std::uint8_t*>(t.mutable_data_ptr()) : nullptr;
  };
  return {pointer(rowwise, std::get<0>(tensors)), pointer(rowwise, std::get<1>(tensors)),
          pointer(columnwise, std::get<2>(tensors)), pointer(columnwise, std::get<3>(tensors))};
}

inline Outputs outputs_of(const MaybeTensor& row, const MaybeTensor& row_scales, const MaybeTensor& col,
                          const MaybeTensor& col_scales) {
  return {pointer_to<std::uint8_t>(row), pointer_to<std::uint8_t>(row_scales), pointer_to<std::uint8_t>(col),
          pointer_to<std::uint8_t>(col_scales)};
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
  require_bytes(kQuantizeOutOp, scale_name.c_str(), *scales, scale_shape, device);
}

inline void check_outputs(const Tensor& x, bool square, const MaybeTensor& noop, const MaybeTensor& row,
                          const MaybeTensor& row_scales, const MaybeTensor& col,
                          const MaybeTensor& col_scales) {
  const Device device = device_of(x);
  const Shape shape = shape_of(x);
  const Matrix m = matrix_of(shape);
  check_shape(shape, row.has_value(), col.has_value(), square);
  if (noop) require_one_float(kQuantizeOutOp, "noop", *noop, device);
  check_direction("row", row, row_scales, shape, row_scale_shape(m), device);
  check_direction("col", col, col_scales, shape, col_scale_shape(m), device);
}

// How a tensor is to be quantized, checked.
struct Form {
  int fp8;
  int dtype;
  bool square;
  bool swizzled;
};

inline Form form_of(const char* op, const Tensor& x, std::int64_t fp8, bool square, bool swizzled) {
  return {checked_fp8(op, fp8), input_dtype(op, x), square, swizzled};
}

// --- CPU ---

inline void quantize_on_cpu(const Tensor& x, const Form& form, const Outputs& out) {
  const Tensor values = as_contiguous(x);
  const Matrix m = matrix_of(shape_of(x));
  const std::int64_t across = m.cols / kBlock, down = m.rows / kBlock;
  const auto pieces = [&](std::int64_t blocks) { return form.swizzled ? pieces_of(blocks, kInner) : 0; };
  const cpu::Mxfp8 job = {
      values.const_data_ptr(),
      m.rows,
      m.cols,
      form.fp8,
      out.row,
      out.col,
      {out.row_scales, m.rows, across, padded(across, kInner), 1, pieces(across)},
      {out.col_scales, m.cols, down, 1, padded(m.cols, kOuter), pieces(down)},
  };
  cpu::mxfp8(job, static_cast<cpu::In>(form.dtype), form.square);
}

inline Four quantize_cpu(const Tensor& x, std::int64_t fp8, bool rowwise, bool columnwise, bool square,
                         bool swizzled) {
  const Form form = form_of(kQuantizeOp, x, fp8, square, swizzled);
  const Shape shape = shape_of(x);
  check_shape(shape, rowwise, columnwise, square);
  Four tensors = allocate(shape, rowwise, columnwise, device_of(x), false);
  quantize_on_cpu(x, form, outputs_of(tensors, rowwise, columnwise));
  return tensors;
}

inline void quantize_out_cpu(const Tensor& x, std::int64_t fp8, bool square, bool swizzled,
                             const MaybeTensor noop, const MaybeTensor row, const MaybeTensor row_scales,
                             const MaybeTensor col, const MaybeTensor col_scales) {
  const Form form = form_of(kQuantizeOutOp, x, fp8, square, swizzled);
  check_outputs(x, square, noop, row, row_scales, col, col_scales);
  if (noop && *pointer_to<const float>(noop) == 1.0f) return;
  quantize_on_cpu(x, form, outputs_of(row, row_scales, col, col_scales));
}

// --- CUDA ---

// The device of x is current.
inline void quantize_on_cuda(const Tensor& x, const Form& form, const float* noop, const Outputs& out) {
  if (x.numel() == 0 || (out.row == nullptr && out.col == nullptr)) return;
  const Launcher launch(device_of(x).index);
  const Tensor values = as_contiguous(x);
  const Matrix m = matrix_of(shape_of(x));
  launch_quantize(launch, {values.const_data_ptr(), out.row, out.col, out.row_scales, out.col_scales, noop,
                           m.rows, m.cols, form.fp8, form.square, form.swizzled, form.dtype, 0, 0});
}

inline Four quantize_cuda(const Tensor& x, std::int64_t fp8, bool rowwise, bool columnwise, bool square,
                          bool swizzled) {
  const Form form = form_of(kQuantizeOp, x, fp8, square, swizzled);
  const Shape shape = shape_of(x);
  check_shape(shape, rowwise, columnwise, square);
  const Device device = device_of(x);
  const DeviceGuard guard(device.index);
  Four tensors = allocate(shape, rowwise, columnwise, device, false);
  quantize_on_cuda(x, form, nullptr, outputs_of(tensors, rowwise, columnwise));
  return tensors;
}

inline void quantize_out_cuda(const Tensor& x, std::int64_t fp8, bool square, bool swizzled,
                              const MaybeTensor noop, const MaybeTensor row, const MaybeTensor row_scales,
                              const MaybeTensor col, const MaybeTensor col_scales) {
  const Form form = form_of(kQuantizeOutOp, x, fp8, square, swizzled);
  check_outputs(x, square, noop, row, row_scales, col, col_scales);
  const DeviceGuard guard(device_of(x).index);
  quantize_on_cuda(x, form, pointer_to<const float>(noop), outputs_of(row, row_scales, col, col_scales));
}

// --- every device ---

inline Four make_empty(std::vector<std::int64_t> shape, bool rowwise, bool columnwise,
                       torch::stable::Device device, bool pin_memory) {
  const Device where = allocation_device(kMakeEmptyOp, shape, device, pin_memory);
  check_shape(shape, rowwise, columnwise, false);
  return allocate(shape, rowwise, columnwise, where, pin_memory);
}

}  // namespace mxfp8
}  // namespace tejit
