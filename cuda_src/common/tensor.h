// Tensors through torch's stable ABI: what the ops check, how they allocate, which device they work on.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <dlfcn.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/error.h"

namespace tejit {

using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;
using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

// torch 2.13 and newer tell why a call through the C interface failed; older ones only print it.
inline std::string torch_reason() {
  static const auto what =
      reinterpret_cast<const char* (*)()>(dlsym(RTLD_DEFAULT, "torch_exception_get_what_without_backtrace"));
  const char* message = what ? what() : nullptr;
  return message && *message ? message : "torch printed the reason to stderr";
}

struct Device {
  std::int32_t type = 0;
  std::int32_t index = 0;

  bool operator==(const Device& other) const { return type == other.type && index == other.index; }
  bool is_cuda() const { return type == aoti_torch_device_type_cuda(); }
  bool is_cpu() const { return type == aoti_torch_device_type_cpu(); }
  std::string name() const {
    if (is_cpu()) return "cpu";
    const std::string kind = is_cuda() ? "cuda" : text("device type ", type);
    return index < 0 ? kind : text(kind, ":", index);
  }
};

inline Device device_of(AtenTensorHandle handle) {
  Device device;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle, &device.type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(handle, &device.index));
  if (device.is_cpu()) device.index = 0;  // "cpu" and "cpu:0" are one device
  return device;
}

inline Device device_of(const Tensor& t) {
  return device_of(t.get());
}

inline std::int32_t dtype_of(const Tensor& t) {
  std::int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
  return dtype;
}

inline std::string dtype_name(std::int32_t dtype) {
  const struct {
    std::int32_t dtype;
    const char* name;
  } known[] = {{aoti_torch_dtype_float32(), "float32"},
               {aoti_torch_dtype_float16(), "float16"},
               {aoti_torch_dtype_bfloat16(), "bfloat16"},
               {aoti_torch_dtype_float64(), "float64"},
               {aoti_torch_dtype_uint8(), "uint8"},
               {aoti_torch_dtype_int8(), "int8"},
               {aoti_torch_dtype_int16(), "int16"},
               {aoti_torch_dtype_int32(), "int32"},
               {aoti_torch_dtype_int64(), "int64"},
               {aoti_torch_dtype_bool(), "bool"},
               {aoti_torch_dtype_float8_e4m3fn(), "float8_e4m3fn"},
               {aoti_torch_dtype_float8_e5m2(), "float8_e5m2"}};
  for (const auto& entry : known) {
    if (entry.dtype == dtype) return entry.name;
  }
  return text("number ", dtype);
}

inline std::string shape_name(Sizes sizes) {
  std::string out = "(";
  for (std::size_t i = 0; i < sizes.size(); ++i) out += text(i ? ", " : "", sizes[i]);
  return out + (sizes.size() == 1 ? ",)" : ")");
}

inline bool same_shape(Sizes a, Sizes b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i] != b[i]) return false;
  }
  return true;
}

// The input dtypes of every quantizer, in the order in which host and device kernels count them.
inline int input_dtype(const char* op, const Tensor& x) {
  const std::int32_t dtype = dtype_of(x);
  if (dtype == aoti_torch_dtype_float32()) return 0;
  if (dtype == aoti_torch_dtype_float16()) return 1;
  if (dtype == aoti_torch_dtype_bfloat16()) return 2;
  fail(op, ": x has dtype ", dtype_name(dtype),
       ", but float32, float16 or bfloat16 is needed; convert it first, for example with "
       "x.to(torch.bfloat16)");
}

inline void require_device(const char* op, const char* name, const Tensor& t, const Device& device) {
  if (!(device_of(t) == device)) {
    fail(op, ": ", name, " is on ", device_of(t).name(), ", but x is on ", device.name(),
         "; move one of them with .to(", "device)");
  }
}

inline void require_one_float(const char* op, const char* name, const Tensor& t, const Device& device) {
  require_device(op, name, t, device);
  if (dtype_of(t) != aoti_torch_dtype_float32() || t.numel() != 1) {
    fail(op, ": ", name, " has dtype ", dtype_name(dtype_of(t)), " and shape ", shape_name(t.sizes()),
         ", but one float32 value is needed, for example of shape (1,)");
  }
}

// A buffer that the op writes: uint8, contiguous, exactly this shape.
inline void require_bytes(const char* op, const char* name, const Tensor& t,
                          const std::vector<std::int64_t>& shape, const Device& device) {
  require_device(op, name, t, device);
  if (dtype_of(t) != aoti_torch_dtype_uint8() || !same_shape(t.sizes(), shape)) {
    fail(op, ": ", name, " has dtype ", dtype_name(dtype_of(t)), " and shape ", shape_name(t.sizes()),
         ", but uint8 and shape ", shape_name(shape), " are needed for this x; allocate it with make_empty");
  }
  if (!t.is_contiguous()) {
    fail(op, ": ", name, " is not contiguous (strides ", shape_name(t.strides()),
         "), but it is written as one block; allocate it with make_empty or pass a contiguous tensor");
  }
}

inline Tensor as_contiguous(const Tensor& t) {
  return t.is_contiguous() ? t : torch::stable::contiguous(t);
}

inline Tensor empty(Sizes shape, std::int32_t dtype, const Device& device, bool pinned = false) {
  std::vector<std::int64_t> strides(shape.size(), 1);
  for (std::size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * (shape[i] > 1 ? shape[i] : 1);
  AtenTensorHandle handle = nullptr;
  const auto allocate = pinned ? aoti_torch_empty_strided_pinned : aoti_torch_empty_strided;
  if (allocate(static_cast<std::int64_t>(shape.size()), shape.data(), strides.data(), dtype, device.type,
               device.index, &handle) != TORCH_SUCCESS) {
    fail("tejit: a tensor of shape ", shape_name(shape), " and dtype ", dtype_name(dtype),
         " cannot be allocated", pinned ? " in pinned memory" : "", " on ", device.name(), ": ",
         torch_reason());
  }
  return Tensor(handle);
}

inline Tensor empty_bytes(Sizes shape, const Device& device, bool pinned = false) {
  return empty(shape, aoti_torch_dtype_uint8(), device, pinned);
}

inline Tensor empty_floats(std::int64_t count, const Device& device, bool pinned = false) {
  return empty(Sizes(&count, 1), aoti_torch_dtype_float32(), device, pinned);
}

}  // namespace tejit
