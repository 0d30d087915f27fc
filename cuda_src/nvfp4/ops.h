// The ops of NVFP4: tejit::nvfp4_quantize, nvfp4_quantize_out, nvfp4_amax, nvfp4_make_empty, each for CPU and
// CUDA tensors. Schemas and the reference of each are registered from Python.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "common/tensor.h"
#include "cpu/nvfp4.h"
#include "nvfp4/args.h"
#include "nvfp4/launch.h"

// Tensors of the stable ABI are hidden, so what holds them must be.
#pragma GCC visibility push(hidden)

namespace tejit {
namespace nvfp4 {

inline constexpr char kQuantizeOp[] = "tejit::nvfp4_quantize";
inline constexpr char kQuantizeOutOp[] = "tejit::nvfp4_quantize_out";
inline constexpr char kAmaxOp[] = "tejit::nvfp4_amax";
inline constexpr char kMakeEmptyOp[] = "tejit::nvfp4_make_empty";

using Shape = std::vector<std::int64_t>;
using Six = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using Two = std::tuple<Tensor, Tensor>;

// --- shapes: the rules of kernels/nvfp4/reference.py ---

// The scale buffer of an operand (rows, contracted): the rowwise one for (M, K), the columnwise for (K, M).
inline Shape scale_shape(std::int64_t rows, std::int64_t contracted) {
  return {pieces_of(rows, kScaleRows) * kScaleRows, pieces_of(contracted / kBlock, kScaleCols) * kScaleCols};
}

inline Shape packed(Shape shape) {
  shape.back() /= 2;
  return shape;
}

inline void check_size(const char* op, const char* name, const char* which, std::int64_t size,
                       const Shape& shape) {
  if (size % kBlock == 0) return;
  fail(op, ": NVFP4 needs ", name, " (", which, ") to be a multiple of ", kBlock, ", but ", name, " = ", size,
       " in shape ", shape_name(shape), "; pad it to ", pieces_of(size, kBlock) * kBlock);
}

inline void check_shape(const char* op, const Shape& shape, bool rowwise, bool columnwise, bool square) {
  const Matrix m = matrix_of(shape);
  const bool both = square && (rowwise || columnwise);
  if (rowwise || both) check_size(op, "K", "the last dimension", m.cols, shape);
  if (columnwise || both) check_size(op, "M", "all dimensions but the last together", m.rows, shape);
}

inline Six allocate(const Shape& shape, bool rowwise, bool columnwise, bool row_scaled, const Device& device,
                    bool pinned) {
  const Matrix m = matrix_of(shape);
  const Shape none = {0};
  const auto lines = [&](bool wanted, std::int64_t count) {
    return empty_floats(!wanted ? 0 : row_scaled ? count : 1, device, pinned);
  };
  return {empty_bytes(rowwise ? packed(shape) : none, device, pinned),
          empty_bytes(rowwise ? scale_shape(m.rows, m.cols) : none, device, pinned),
          empty_bytes(columnwise ? Shape{m.cols, m.rows / 2} : none, device, pinned),
          empty_bytes(columnwise ? scale_shape(m.cols, m.rows) : none, device, pinned),
          lines(rowwise, m.rows),
          lines(columnwise, m.cols)};
}

// --- arguments ---

struct Mode {
  bool rht, square, row_scaled, swizzled;
  int sign_mask, four_over_six, e4m3_max;
  MaybeTensor seed, row_amax, col_amax;
};

inline void check_amax(const char* op, const char* name, const MaybeTensor& amax, bool row_scaled,
                       std::int64_t rows, const Device& device) {
  if (amax) require_buffer(op, name, *amax, aoti_torch_dtype_float32(), {row_scaled ? rows : 1}, device);
}

inline Mode checked_mode(const char* op, const Tensor& x, bool rht, std::int64_t sign_mask, bool square,
                         bool row_scaled, std::int64_t four_over_six, std::int64_t e4m3_max, bool swizzled,
                         const MaybeTensor& seed, const MaybeTensor& row_amax, const MaybeTensor& col_amax) {
  const auto exclude = [op](bool both, const char* one, const char* other) {
    if (both) fail(op, ": ", one, " does not go with ", other, "; switch one of them off");
  };
  exclude(row_scaled && rht, "row-scaled NVFP4", "RHT");
  exclude(row_scaled && square, "row-scaled NVFP4", "2D");
  exclude(row_scaled && seed, "row-scaled NVFP4", "stochastic rounding");
  exclude(four_over_six != 0 && rht, "4over6", "RHT");
  exclude(four_over_six != 0 && seed, "4over6", "stochastic rounding");
  if (four_over_six < 0 || four_over_six > 2) {
    fail(op, ": four_over_six is ", four_over_six, ", but 0 (none), 1 (MAE) or 2 (MSE) is needed");
  }
  if (e4m3_max != 448 && e4m3_max != 256) {
    fail(op, ": e4m3_max is ", e4m3_max, ", but 448 or 256 is needed");
  }
  if (sign_mask < 0 || sign_mask > 0xFFFF) {
    fail(op, ": sign_mask is ", sign_mask, ", but a number of 16 bits is needed");
  }
  const Device device = device_of(x);
  const Matrix m = matrix_of(shape_of(x));
  if (seed) require_buffer(op, "seed", *seed, aoti_torch_dtype_int64(), {2}, device);
  check_amax(op, "row_amax", row_amax, row_scaled, m.rows, device);
  check_amax(op, "col_amax", col_amax, row_scaled, m.cols, device);
  return {rht,
          square,
          row_scaled,
          swizzled,
          static_cast<int>(sign_mask),
          static_cast<int>(four_over_six),
          static_cast<int>(e4m3_max),
          seed,
          row_amax,
          col_amax};
}

inline Output output_of(const MaybeTensor& data, const MaybeTensor& scales, const MaybeTensor& amax,
                        const MaybeTensor& given) {
  return {pointer_to<std::uint8_t>(data), pointer_to<std::uint8_t>(scales), pointer_to<float>(amax),
          pointer_to<const float>(given)};
}

// A buffer of no elements has no address, but is wanted all the same.
struct Wanted {
  bool row, col;
};

inline void check_direction(const char* name, const MaybeTensor& data, const MaybeTensor& scales,
                            const MaybeTensor& amax, const Shape& shape, const Shape& scale_shape,
                            std::int64_t amaxes, const Device& device) {
  if (data.has_value() != scales.has_value() || data.has_value() != amax.has_value()) {
    fail(kQuantizeOutOp, ": of ", name, ", ", name, "_scale_inv and amax_", name,
         " only some are given, but all three buffers of a direction are needed, or none");
  }
  if (!data) return;
  const std::string scale_name = std::string(name) + "_scale_inv", amax_name = std::string("amax_") + name;
  require_bytes(kQuantizeOutOp, name, *data, shape, device);
  require_bytes(kQuantizeOutOp, scale_name.c_str(), *scales, scale_shape, device);
  require_buffer(kQuantizeOutOp, amax_name.c_str(), *amax, aoti_torch_dtype_float32(), {amaxes}, device);
}

// --- a tensor without elements, on either device ---

template <typename... Args>
inline Tensor call_aten(const char* name, const char* overload, const Args&... args) {
  StableIValue stack[] = {torch::stable::detail::from(args)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, overload, stack, TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

inline Tensor one_float(double value, const Device& device) {
  Tensor t = empty_floats(1, device);
  return torch::stable::fill_(t, value);
}

// What is left to write is the amax: 0 or what was given, as `stored_amax` has it. The flag is read where it
// lies, so that nothing waits for the device and a captured graph obeys it.
inline void write_empty_amax(const MaybeTensor& amax, const MaybeTensor& given, int e4m3_max,
                             const MaybeTensor& noop) {
  if (!amax) return;
  const Device device = device_of(*amax);
  Tensor to = *amax, value = one_float(0.0, device);
  if (given) {
    const Tensor full = one_float(static_cast<double>(cpu::kE2m1.max) * e4m3_max, device);
    value = call_aten("aten::where", "self", call_aten("aten::isinf", "", *given), full, *given);
  }
  if (noop) {
    const Tensor skip = call_aten("aten::eq", "Tensor", *noop, one_float(1.0, device));
    value = call_aten("aten::where", "self", skip, to, value);
  }
  torch::stable::copy_(to, value);
}

// Whether x has no elements; then everything is written.
inline bool wrote_empty(const Tensor& x, const Mode& mode, const MaybeTensor& amax_row,
                        const MaybeTensor& amax_col, const MaybeTensor& noop) {
  if (x.numel() != 0) return false;
  write_empty_amax(amax_row, mode.row_amax, mode.e4m3_max, noop);
  write_empty_amax(amax_col, mode.col_amax, mode.e4m3_max, noop);
  return true;
}

// --- CPU ---

// Where the columnwise direction needs it: the transpose of x, or of its rotation.
struct Turned {
  Tensor buffer;
  cpu::In in;
};

inline Turned turn(const void* x, cpu::In in, const Matrix& m, bool rht, int sign_mask,
                   const Device& device) {
  const cpu::In kind = rht ? cpu::In::bf16 : in;
  Tensor buffer = empty_bytes(Shape{m.cols, m.rows * cpu::bytes_of(kind)}, device);
  void* to = buffer.mutable_data_ptr();
  if (rht) {
    cpu::nvfp4_rotate(x, in, m.rows, m.cols, static_cast<std::uint32_t>(sign_mask),
                      static_cast<std::uint16_t*>(to));
  } else {
    cpu::nvfp4_turn(x, in, m.rows, m.cols, to);
  }
  return {buffer, kind};
}

inline void direction_on_cpu(const Mode& mode, const void* x, cpu::In in, std::int64_t rows,
                             std::int64_t cols, bool columnwise, const Output& out) {
  const std::int64_t count = mode.row_scaled ? rows : 1;
  const float* amax = out.given;
  if (amax == nullptr) {
    cpu::nvfp4_amax(x, in, rows, cols, mode.row_scaled, out.amax);
    amax = out.amax;
  }
  const auto e4m3_max = static_cast<float>(mode.e4m3_max);
  const Shape padded = scale_shape(rows, cols);
  cpu::nvfp4_encode({x,
                     in,
                     rows,
                     cols,
                     columnwise,
                     mode.square,
                     mode.row_scaled,
                     mode.four_over_six,
                     e4m3_max,
                     pointer_to<const std::int64_t>(mode.seed),
                     amax,
                     out.data,
                     {out.scale_inv, padded[0], padded[1], mode.swizzled}});
  cpu::nvfp4_store_amax(amax, count, e4m3_max, out.amax);
}

// float16 is exact in float32, whose kernels serve it: kernels of its own would cost every first import more
// than they save the few who train in it.
struct Input {
  Tensor values;
  cpu::In in;
};

inline Input input_on_cpu(const Tensor& x, int dtype) {
  const auto in = static_cast<cpu::In>(dtype);
  if (in != cpu::In::f16) return {as_contiguous(x), in};
  return {as_contiguous(torch::stable::to(x, torch::headeronly::ScalarType::Float)), cpu::In::f32};
}

inline void quantize_on_cpu(const Tensor& x, int dtype, const Mode& mode, Wanted wanted, const Output& row,
                            const Output& col) {
  const auto [values, in] = input_on_cpu(x, dtype);
  const void* from = values.const_data_ptr();
  const Matrix m = matrix_of(shape_of(x));
  if (wanted.row) direction_on_cpu(mode, from, in, m.rows, m.cols, false, row);
  if (wanted.col) {
    const Turned turned = turn(from, in, m, mode.rht, mode.sign_mask, device_of(x));
    direction_on_cpu(mode, turned.buffer.const_data_ptr(), turned.in, m.cols, m.rows, true, col);
  }
}

inline Two amax_on_cpu(const Tensor& x, int dtype, bool rowwise, bool columnwise, bool rht, int sign_mask,
                       bool row_scaled, Two out) {
  const auto [values, in] = input_on_cpu(x, dtype);
  const void* from = values.const_data_ptr();
  const Matrix m = matrix_of(shape_of(x));
  auto* row = static_cast<float*>(std::get<0>(out).mutable_data_ptr());
  auto* col = static_cast<float*>(std::get<1>(out).mutable_data_ptr());
  if (rowwise) cpu::nvfp4_amax(from, in, m.rows, m.cols, row_scaled, row);
  if (columnwise && !rht && !row_scaled) cpu::nvfp4_amax(from, in, m.rows, m.cols, false, col);
  if (columnwise && (rht || row_scaled)) {
    const Turned turned = turn(from, in, m, rht, sign_mask, device_of(x));
    cpu::nvfp4_amax(turned.buffer.const_data_ptr(), turned.in, m.cols, m.rows, row_scaled, col);
  }
  return out;
}

// --- CUDA ---

inline Call call_of(const Tensor& x, const Matrix& m, int dtype, const Mode& mode, const float* noop,
                    const Output& row, const Output& col) {
  return {x,
          m.rows,
          m.cols,
          dtype,
          mode.rht,
          mode.square,
          mode.row_scaled,
          mode.swizzled,
          mode.sign_mask,
          mode.four_over_six,
          mode.e4m3_max,
          pointer_to<const std::int64_t>(mode.seed),
          noop,
          row,
          col};
}

// The device of x is current.
inline void quantize_on_cuda(const Tensor& x, int dtype, const Mode& mode, const float* noop,
                             const Output& row, const Output& col) {
  const Device device = device_of(x);
  const Tensor values = as_contiguous(x);
  launch_quantize(Launcher(device.index), device,
                  call_of(values, matrix_of(shape_of(x)), dtype, mode, noop, row, col));
}

// --- the ops, whose two devices share checks and allocation ---

template <bool kCuda>
inline Six quantize(const Tensor& x, bool rowwise, bool columnwise, bool rht, std::int64_t sign_mask,
                    bool square, bool row_scaled, std::int64_t four_over_six, std::int64_t e4m3_max,
                    bool swizzled, const MaybeTensor seed, const MaybeTensor row_amax,
                    const MaybeTensor col_amax) {
  const int dtype = input_dtype(kQuantizeOp, x);
  check_shape(kQuantizeOp, shape_of(x), rowwise, columnwise, square);
  const Mode mode = checked_mode(kQuantizeOp, x, rht, sign_mask, square, row_scaled, four_over_six, e4m3_max,
                                 swizzled, seed, row_amax, col_amax);
  const Device device = device_of(x);
  const auto run = [&] {
    Six out = allocate(shape_of(x), rowwise, columnwise, row_scaled, device, false);
    const auto held = [](bool wanted, const Tensor& t) { return wanted ? MaybeTensor(t) : MaybeTensor(); };
    const MaybeTensor a = held(rowwise, std::get<4>(out)), b = held(columnwise, std::get<5>(out));
    const Output row =
        output_of(held(rowwise, std::get<0>(out)), held(rowwise, std::get<1>(out)), a, row_amax);
    const Output col =
        output_of(held(columnwise, std::get<2>(out)), held(columnwise, std::get<3>(out)), b, col_amax);
    if (wrote_empty(x, mode, a, b, {})) return out;
    if constexpr (kCuda) {
      quantize_on_cuda(x, dtype, mode, nullptr, row, col);
    } else {
      quantize_on_cpu(x, dtype, mode, {rowwise, columnwise}, row, col);
    }
    return out;
  };
  if constexpr (kCuda) {
    const DeviceGuard guard(device.index);
    return run();
  }
  return run();
}

template <bool kCuda>
inline void quantize_out(const Tensor& x, bool rht, std::int64_t sign_mask, bool square, bool row_scaled,
                         std::int64_t four_over_six, std::int64_t e4m3_max, bool swizzled,
                         const MaybeTensor seed, const MaybeTensor row_amax, const MaybeTensor col_amax,
                         const MaybeTensor noop, const MaybeTensor row, const MaybeTensor row_scale_inv,
                         const MaybeTensor col, const MaybeTensor col_scale_inv, const MaybeTensor amax_row,
                         const MaybeTensor amax_col) {
  const char* op = kQuantizeOutOp;
  const int dtype = input_dtype(op, x);
  const Shape shape = shape_of(x);
  check_shape(op, shape, row.has_value(), col.has_value(), square);
  const Mode mode = checked_mode(op, x, rht, sign_mask, square, row_scaled, four_over_six, e4m3_max, swizzled,
                                 seed, row_amax, col_amax);
  const Device device = device_of(x);
  const Matrix m = matrix_of(shape);
  if (noop) require_one_float(op, "noop", *noop, device);
  if (row) {
    check_direction("row", row, row_scale_inv, amax_row, packed(shape), scale_shape(m.rows, m.cols),
                    row_scaled ? m.rows : 1, device);
  } else {
    check_direction("row", row, row_scale_inv, amax_row, {}, {}, 0, device);
  }
  check_direction("col", col, col_scale_inv, amax_col, {m.cols, m.rows / 2}, scale_shape(m.cols, m.rows),
                  row_scaled ? m.cols : 1, device);
  const Output to_row = output_of(row, row_scale_inv, amax_row, row_amax);
  const Output to_col = output_of(col, col_scale_inv, amax_col, col_amax);
  if constexpr (kCuda) {
    const DeviceGuard guard(device.index);
    if (wrote_empty(x, mode, amax_row, amax_col, noop)) return;
    quantize_on_cuda(x, dtype, mode, pointer_to<const float>(noop), to_row, to_col);
  } else {
    if (wrote_empty(x, mode, amax_row, amax_col, noop)) return;
    if (noop && *pointer_to<const float>(noop) == 1.0f) return;
    quantize_on_cpu(x, dtype, mode, {row.has_value(), col.has_value()}, to_row, to_col);
  }
}

template <bool kCuda>
inline Two amax(const Tensor& x, bool rowwise, bool columnwise, bool rht, std::int64_t sign_mask,
                bool row_scaled) {
  const int dtype = input_dtype(kAmaxOp, x);
  const Shape shape = shape_of(x);
  check_shape(kAmaxOp, shape, false, columnwise && rht, false);
  const Mode mode = checked_mode(kAmaxOp, x, rht, sign_mask, false, row_scaled, 0, 448, false, {}, {}, {});
  const Device device = device_of(x);
  const Matrix m = matrix_of(shape);
  const auto room = [&] {
    return Two{empty_floats(!rowwise     ? 0
                            : row_scaled ? m.rows
                                         : 1,
                            device),
               empty_floats(!columnwise  ? 0
                            : row_scaled ? m.cols
                                         : 1,
                            device)};
  };
  if constexpr (kCuda) {
    const DeviceGuard guard(device.index);
    Two out = room();
    const MaybeTensor a = rowwise ? MaybeTensor(std::get<0>(out)) : MaybeTensor();
    const MaybeTensor b = columnwise ? MaybeTensor(std::get<1>(out)) : MaybeTensor();
    if (wrote_empty(x, mode, a, b, {})) return out;
    const Tensor values = as_contiguous(x);
    launch_amax(Launcher(device.index), device,
                call_of(values, m, dtype, mode, nullptr, output_of({}, {}, a, {}), output_of({}, {}, b, {})));
    return out;
  } else {
    return amax_on_cpu(x, dtype, rowwise, columnwise, rht, mode.sign_mask, row_scaled, room());
  }
}

// --- every device ---

inline Six make_empty(std::vector<std::int64_t> shape, bool rowwise, bool columnwise, bool row_scaled,
                      torch::stable::Device device, bool pin_memory) {
  const Device where = allocation_device(kMakeEmptyOp, shape, device, pin_memory);
  check_shape(kMakeEmptyOp, shape, rowwise, columnwise, false);
  return allocate(shape, rowwise, columnwise, row_scaled, where, pin_memory);
}

}  // namespace nvfp4
}  // namespace tejit

#pragma GCC visibility pop
