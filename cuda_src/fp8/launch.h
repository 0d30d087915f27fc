// Launching the kernels of FP8 current scaling: which kernel, how many blocks, in which order.
#pragma once

#include <cstdint>

#include "common/launch.h"
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
