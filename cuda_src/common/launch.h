// Launching a kernel of an architecture part: how many blocks, on which stream.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "common/driver.h"
#include "common/parts.h"

namespace tejit {

// Everything a launch needs to know of a tensor's device. The device must be the current one while it is
// used.
class Launcher {
 public:
  explicit Launcher(std::int32_t device)
      : facts_(device_facts(device)),
        part_(Parts::of_process().find(facts_.cc)),
        stream_(current_stream(device)) {
    if (part_ == nullptr) {
      fail("tejit: there are no kernels for cuda:", device, ", compute capability ", facts_.cc / 10, ".",
           facts_.cc % 10, "; build them with python -m tejit warm, or set TEJIT_BACKEND=torch");
    }
    bind_context(device);
  }

  // Blocks that are enough for so many pieces of work, and no more than the GPU holds at once.
  unsigned blocks(std::int64_t pieces, int per_multiprocessor) const {
    const std::int64_t most = static_cast<std::int64_t>(facts_.multiprocessors) * per_multiprocessor;
    return static_cast<unsigned>(std::clamp<std::int64_t>(pieces, 1, most));
  }

  // `follows`: the kernel waits by itself for what the one before it in the stream wrote, so it may start
  // while that one ends. Captured graphs take such an edge from CUDA 12.4 on.
  template <typename Args>
  void operator()(const char* kernel, unsigned blocks, unsigned threads, const Args& args,
                  bool follows = false) const {
    const driver::Functions& f = driver::functions();
    const driver::Handle handle = part_->kernel(kernel);
    Args copy = args;
    void* pointers[] = {&copy};
    int result;
    if (follows && facts_.cc >= 90 && f.launch_with != nullptr && f.version >= 12040) {
      driver::LaunchAttribute attribute = {};
      attribute.id = driver::kProgrammaticStreamSerialization;
      attribute.value.number = 1;
      const driver::LaunchConfig config = {{blocks, 1, 1}, {threads, 1, 1}, 0, stream_, &attribute, 1};
      result = f.launch_with(&config, handle, pointers, nullptr);
    } else {
      result = f.launch(handle, blocks, 1, 1, threads, 1, 1, 0, stream_, pointers, nullptr);
    }
    if (result != 0) {
      fail("tejit: kernel ", kernel, " cannot be launched (", blocks, " blocks of ", threads,
           " threads): ", driver::describe(result));
    }
  }

 private:
  DeviceFacts facts_;
  std::shared_ptr<Part> part_;
  driver::Handle stream_;
};

inline std::int64_t pieces_of(std::int64_t work, std::int64_t piece) {
  return (work + piece - 1) / piece;
}

// Input dtypes in the order of input_dtype: float32 and float16 share their kernels, bfloat16 has its own.
inline bool is_half(int dtype) {
  return dtype == 1;
}

inline bool is_bf16(int dtype) {
  return dtype == 2;
}

// Elements of one vector in the kernels for an input dtype.
inline int vector_elements(int dtype) {
  return is_bf16(dtype) ? 8 : 4;
}

// Vectors of n elements, rounded up.
inline std::int64_t vectors_of(std::int64_t n, int dtype) {
  return pieces_of(n, vector_elements(dtype));
}

}  // namespace tejit
