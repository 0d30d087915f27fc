// The CUDA driver and torch's current stream, looked up at the first CUDA op: the host part links against
// neither, so that one binary also loads where there is no CUDA.
#pragma once

#include <dlfcn.h>

#include <array>
#include <cstdint>
#include <mutex>
#include <string>

#include "common/error.h"

namespace tejit {

// The driver's C interface, as far as it is used here. Handles are opaque pointers, a result of 0 is success.
namespace driver {

using Handle = void*;

struct LaunchAttribute {
  unsigned id;
  unsigned unused;
  union {
    std::uint64_t words[8];
    int number;
  } value;
};

struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  Handle stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

static_assert(sizeof(LaunchAttribute) == 72 && sizeof(LaunchConfig) == 56, "these cross a binary interface");

constexpr unsigned kProgrammaticStreamSerialization = 6;
constexpr int kMultiprocessorCount = 16;
constexpr int kComputeCapabilityMajor = 75;
constexpr int kComputeCapabilityMinor = 76;

struct Functions {
  int (*error_string)(int result, const char** text) = nullptr;
  int (*driver_version)(int* version) = nullptr;
  int (*device_get)(int* device, int ordinal) = nullptr;
  int (*device_attribute)(int* value, int attribute, int device) = nullptr;
  int (*context_get)(Handle* context) = nullptr;
  int (*context_set)(Handle context) = nullptr;
  int (*primary_retain)(Handle* context, int device) = nullptr;
  int (*library_load)(Handle* library, const void* code, void* jit_options, void** jit_values,
                      unsigned jit_count, void* options, void** values, unsigned count) = nullptr;
  int (*library_kernel)(Handle* kernel, Handle library, const char* name) = nullptr;
  int (*launch)(Handle kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                unsigned block_y, unsigned block_z, unsigned shared_bytes, Handle stream, void** arguments,
                void** extra) = nullptr;
  // Null in drivers before CUDA 11.8 or so; then kernels are launched one after the other.
  int (*launch_with)(const LaunchConfig* config, Handle kernel, void** arguments, void** extra) = nullptr;
  int version = 0;
};

inline Functions look_up() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    fail("tejit: the CUDA driver's library libcuda.so.1 cannot be loaded (", why ? why : "no reason given",
         "). A CUDA tensor needs it: install the NVIDIA driver or add its folder to LD_LIBRARY_PATH");
  }
  const auto find = [library](auto& function, const char* name, bool needed = true) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr && needed) {
      fail("tejit: the CUDA driver has no function ", name,
           ". A driver for CUDA 12.0 or newer is needed: update it");
    }
  };
  Functions f;
  find(f.error_string, "cuGetErrorString");
  find(f.driver_version, "cuDriverGetVersion");
  find(f.device_get, "cuDeviceGet");
  find(f.device_attribute, "cuDeviceGetAttribute");
  find(f.context_get, "cuCtxGetCurrent");
  find(f.context_set, "cuCtxSetCurrent");
  find(f.primary_retain, "cuDevicePrimaryCtxRetain");
  find(f.library_load, "cuLibraryLoadData");
  find(f.library_kernel, "cuLibraryGetKernel");
  find(f.launch, "cuLaunchKernel");
  find(f.launch_with, "cuLaunchKernelEx", false);
  f.driver_version(&f.version);
  return f;
}

// A failure is thrown and tried again at the next call.
inline const Functions& functions() {
  static const Functions found = look_up();
  return found;
}

inline std::string describe(int result) {
  const char* message = nullptr;
  functions().error_string(result, &message);
  return text("CUDA error ", result, ", ", message ? message : "unknown to this driver");
}

}  // namespace driver

struct DeviceFacts {
  int cc = 0;  // 10 * major + minor
  int multiprocessors = 0;
};

inline DeviceFacts ask_device(int ordinal) {
  const driver::Functions& f = driver::functions();
  int device = 0, major = 0, minor = 0;
  DeviceFacts facts;
  int result = f.device_get(&device, ordinal);
  if (result == 0) result = f.device_attribute(&major, driver::kComputeCapabilityMajor, device);
  if (result == 0) result = f.device_attribute(&minor, driver::kComputeCapabilityMinor, device);
  if (result == 0) result = f.device_attribute(&facts.multiprocessors, driver::kMultiprocessorCount, device);
  if (result != 0)
    fail("tejit: device cuda:", ordinal, " cannot be asked for its properties: ", driver::describe(result));
  facts.cc = 10 * major + minor;
  return facts;
}

inline DeviceFacts device_facts(int ordinal) {
  constexpr int kKept = 64;
  static std::array<std::once_flag, kKept> asked;
  static std::array<DeviceFacts, kKept> known;
  if (ordinal < 0 || ordinal >= kKept) return ask_device(ordinal);
  std::call_once(asked[ordinal], [ordinal] { known[ordinal] = ask_device(ordinal); });
  return known[ordinal];
}

// A thread that made no CUDA call yet has no context, and torch's device guard does not give it one when the
// device is the one torch takes for current. torch's own launches bind it; the driver's need it bound.
inline void bind_context(int ordinal) {
  const driver::Functions& f = driver::functions();
  driver::Handle context = nullptr;
  int result = f.context_get(&context);
  if (result == 0 && context != nullptr) return;
  int device = 0;
  result = f.device_get(&device, ordinal);
  // Kept, like torch's own hold on it; this happens once a thread at most.
  if (result == 0) result = f.primary_retain(&context, device);
  if (result == 0) result = f.context_set(context);
  if (result != 0)
    fail("tejit: cuda:", ordinal, " cannot be made current in this thread: ", driver::describe(result));
}

// torch's current stream on a device. The function lives in libtorch_cuda.so, which a CPU build of torch does
// not have.
inline driver::Handle current_stream(int device) {
  using Getter = std::int32_t (*)(std::int32_t, void**);
  static const Getter getter = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* found = library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
    if (found == nullptr) {
      fail(
          "tejit: torch's libtorch_cuda.so is not loaded or has no aoti_torch_get_current_cuda_stream; a "
          "CUDA tensor "
          "needs a CUDA build of torch, 2.11 or newer");
    }
    return reinterpret_cast<Getter>(found);
  }();
  void* stream = nullptr;
  if (getter(device, &stream) != 0) fail("tejit: torch does not tell its current stream on cuda:", device);
  return stream;
}

}  // namespace tejit
