// Launching the kernels of FP8 current scaling: which kernel, how many blocks, in which order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "common/parts.h"
#include "common/tensor.h"
#include "fp8/args.h"

namespace tejit {
namespace fp8 {

inline constexpr const char* kAmaxKernel[3] = {"tejit_fp8_amax_f32", "tejit_fp8_amax_f16",
                                               "tejit_fp8_amax_bf16"};
inline constexpr const char* kCastKernel[3][2] = {{"tejit_fp8_cast_f32_e4m3", "tejit_fp8_cast_f32_e5m2"},
                                                  {"tejit_fp8_cast_f16_e4m3", "tejit_fp8_cast_f16_e5m2"},
                                                  {"tejit_fp8_cast_bf16_e4m3", "tejit_fp8_cast_bf16_e5m2"}};
inline constexpr const char* kCastTransposeKernel[3][2] = {
    {"tejit_fp8_cast_transpose_f32_e4m3", "tejit_fp8_cast_transpose_f32_e5m2"},
    {"tejit_fp8_cast_transpose_f16_e4m3", "tejit_fp8_cast_transpose_f16_e5m2"},
    {"tejit_fp8_cast_transpose_bf16_e4m3", "tejit_fp8_cast_transpose_bf16_e5m2"}};

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

// 16-byte vectors of n elements, rounded up.
inline std::int64_t vectors_of(std::int64_t n, int dtype) {
  return pieces_of(n, dtype == 0 ? 4 : 8);
}

// Partial maxima of |x|, one for each block; their number is the tensor's size.
inline Tensor launch_amax(const Launcher& launch, const Tensor& x, int dtype, const Device& device,
                          const float* noop) {
  const std::int64_t n = x.numel();
  const unsigned blocks = launch.blocks(
      pieces_of(vectors_of(n, dtype), AmaxShape::kThreads * AmaxShape::kVectors), AmaxShape::kBlocksPerSM);
  Tensor partial = empty_floats(blocks, device);
  const AmaxArgs args = {x.const_data_ptr(), static_cast<float*>(partial.mutable_data_ptr()), noop, n};
  launch(kAmaxKernel[dtype], blocks, AmaxShape::kThreads, args);
  return partial;
}

inline void launch_cast(const Launcher& launch, const CastArgs& args, int dtype, int fp8, bool follows) {
  // One row or one column: its transpose is the same bytes in the same order.
  if (args.col != nullptr && args.rows > 1 && args.cols > 1) {
    const std::int64_t tile_cols = TileShape::kLanes * (dtype == 0 ? 4 : 8);
    const std::int64_t tiles = pieces_of(args.rows, TileShape::kRows) * pieces_of(args.cols, tile_cols);
    launch(kCastTransposeKernel[dtype][fp8], launch.blocks(tiles, TileShape::kBlocksPerSM),
           TileShape::kThreads, args, follows);
  } else {
    const std::int64_t vectors = args.row || args.col ? vectors_of(args.rows * args.cols, dtype) : 1;
    launch(
        kCastKernel[dtype][fp8],
        launch.blocks(pieces_of(vectors, CastShape::kThreads * CastShape::kVectors), CastShape::kBlocksPerSM),
        CastShape::kThreads, args, follows);
  }
}

}  // namespace fp8
}  // namespace tejit
