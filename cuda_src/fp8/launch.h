// Launching the kernels of FP8 with one scale a tensor: which kernel, how many blocks, in which order.
#pragma once

#include <cstdint>

#include "common/launch.h"
#include "common/tensor.h"
#include "fp8/args.h"

namespace tejit {
namespace fp8 {

// By whether the input is bfloat16.
inline constexpr const char* kAmaxKernel[2] = {"tejit_fp8_amax_any", "tejit_fp8_amax_bf16"};
inline constexpr const char* kCastKernel[2] = {"tejit_fp8_cast_any", "tejit_fp8_cast_bf16"};
inline constexpr const char* kCastTransposeKernel[2] = {"tejit_fp8_cast_transpose_any",
                                                        "tejit_fp8_cast_transpose_bf16"};

// Partial maxima of |x|, one for each block; their number is the tensor's size.
inline Tensor launch_amax(const Launcher& launch, const Tensor& x, int dtype, const Device& device,
                          const float* noop) {
  const std::int64_t n = x.numel();
  const unsigned blocks = launch.blocks(
      pieces_of(vectors_of(n, dtype), AmaxShape::kThreads * AmaxShape::kVectors), AmaxShape::kBlocksPerSM);
  Tensor partial = empty_floats(blocks, device);
  const AmaxArgs args = {x.const_data_ptr(), static_cast<float*>(partial.mutable_data_ptr()), noop, n,
                         is_half(dtype)};
  launch(kAmaxKernel[is_bf16(dtype)], blocks, AmaxShape::kThreads, args);
  return partial;
}

inline void launch_cast(const Launcher& launch, const CastArgs& args, int dtype, bool follows) {
  // One row or one column: its transpose is the same bytes in the same order.
  if (args.col != nullptr && args.rows > 1 && args.cols > 1) {
    const auto with = [&](auto shape) {
      const std::int64_t tile_cols = shape.kLanes * vector_elements(dtype);
      const std::int64_t tiles = pieces_of(args.rows, shape.kRows) * pieces_of(args.cols, tile_cols);
      launch(kCastTransposeKernel[is_bf16(dtype)], launch.blocks(tiles, shape.kBlocksPerSM), shape.kThreads,
             args, follows);
    };
    is_bf16(dtype) ? with(TileShape<2>()) : with(TileShape<4>());
  } else {
    const std::int64_t vectors =
        args.row || args.col || args.new_amax ? vectors_of(args.rows * args.cols, dtype) : 1;
    launch(
        kCastKernel[is_bf16(dtype)],
        launch.blocks(pieces_of(vectors, CastShape::kThreads * CastShape::kVectors), CastShape::kBlocksPerSM),
        CastShape::kThreads, args, follows);
  }
}

}  // namespace fp8
}  // namespace tejit
