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
inline int input_dtype(const char* op, const Tensor& x, const char* name = "x") {
  const std::int32_t dtype = dtype_of(x);
  if (dtype == aoti_torch_dtype_float32()) return 0;
  if (dtype == aoti_torch_dtype_float16()) return 1;
  if (dtype == aoti_torch_dtype_bfloat16()) return 2;
  fail(op, ": ", name, " has dtype ", dtype_name(dtype),
       ", but float32, float16 or bfloat16 is needed; convert it first, for example with ", name,
       ".to(torch.bfloat16)");
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

// A buffer that the op writes: contiguous, exactly this dtype and shape.
inline void require_buffer(const char* op, const char* name, const Tensor& t, std::int32_t dtype,
                           const std::vector<std::int64_t>& shape, const Device& device) {
  require_device(op, name, t, device);
  if (dtype_of(t) != dtype || !same_shape(t.sizes(), shape)) {
    fail(op, ": ", name, " has dtype ", dtype_name(dtype_of(t)), " and shape ", shape_name(t.sizes()),
         ", but ", dtype_name(dtype), " and shape ", shape_name(shape),
         " are needed for this x; allocate it with make_empty");
  }
  if (!t.is_contiguous()) {
    fail(op, ": ", name, " is not contiguous (strides ", shape_name(t.strides()),
         "), but it is written as one block; allocate it with make_empty or pass a contiguous tensor");
  }
}

inline void require_bytes(const char* op, const char* name, const Tensor& t,
                          const std::vector<std::int64_t>& shape, const Device& device) {
  require_buffer(op, name, t, aoti_torch_dtype_uint8(), shape, device);
}

using MaybeTensor = std::optional<Tensor>;

template <typename T>
T* pointer_to(const MaybeTensor& t) {
  return t ? static_cast<T*>(t->mutable_data_ptr()) : nullptr;
}

inline std::vector<std::int64_t> shape_of(const Tensor& x) {
  const Sizes sizes = x.sizes();
  return std::vector<std::int64_t>(sizes.begin(), sizes.end());
}

// The flattened matrix of a shape: all other dimensions against the last one.
struct Matrix {
  std::int64_t rows = 1, cols = 1;
};

inline Matrix matrix_of(const std::vector<std::int64_t>& shape) {
  Matrix m;
  if (shape.empty()) return m;
  m.cols = shape.back();
  for (std::size_t i = 0; i + 1 < shape.size(); ++i) m.rows *= shape[i];
  return m;
}

// The shape of transposed bytes: the last dimension first.
inline std::vector<std::int64_t> transposed(std::vector<std::int64_t> shape) {
  if (!shape.empty()) {
    const std::int64_t last = shape.back();
    shape.pop_back();
    shape.insert(shape.begin(), last);
  }
  return shape;
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

// Checks what a make_empty op was asked for; the device in our own terms.
inline Device allocation_device(const char* op, const std::vector<std::int64_t>& shape,
                                const torch::stable::Device& device, bool pin_memory) {
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] < 0) {
      fail(op, ": dimension ", i, " of shape ", shape_name(shape), " is negative; sizes must be >= 0");
    }
  }
  Device where;
  where.type = torch::stable::detail::to<std::int32_t>(torch::stable::detail::from(device.type()));
  where.index = where.is_cpu() ? 0 : device.index();
  if (pin_memory && !where.is_cpu()) {
    fail(op, ": pin_memory=True was asked for on ", where.name(),
         ", but only CPU memory can be pinned; pass device=\"cpu\" or pin_memory=False");
  }
  return where;
}

}  // namespace tejit
