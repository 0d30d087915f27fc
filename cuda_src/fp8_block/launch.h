// Launching the kernels of FP8 in blocks: which kernel, how many blocks.
#pragma once

#include <cstdint>

#include "common/launch.h"
#include "common/tensor.h"
#include "fp8_block/args.h"

namespace tejit {
namespace fp8_block {

// By dim - 1, whether there is a transpose, whether the input is bfloat16.
inline constexpr const char* kKernel[2][2][2] = {
    {{"tejit_fp8_block_1d_row_any", "tejit_fp8_block_1d_row_bf16"},
     {"tejit_fp8_block_1d_transpose_any", "tejit_fp8_block_1d_transpose_bf16"}},
    {{"tejit_fp8_block_2d_row_any", "tejit_fp8_block_2d_row_bf16"},
     {"tejit_fp8_block_2d_transpose_any", "tejit_fp8_block_2d_transpose_bf16"}}};

inline void launch_blocks(const Launcher& launch, const BlockArgs& args, int dim, int dtype) {
  const bool transpose = args.col != nullptr, bf16 = is_bf16(dtype);
  const std::int64_t tiles = pieces_of(args.rows, kBlock) * pieces_of(args.cols, kBlock);
  const char* kernel = kKernel[dim - 1][transpose][bf16];
  const auto with = [&](auto shape) {
    launch(kernel, launch.blocks(tiles, shape.kBlocksPerSM), shape.kThreads, args);
  };
  if (dim == 2 && bf16) {
    with(SquareShape());
  } else if (transpose) {
    bf16 ? with(TransposeShape<2>()) : with(TransposeShape<4>());
  } else {
    bf16 ? with(RowShape<2>()) : with(RowShape<4>());
  }
}

}  // namespace fp8_block
}  // namespace tejit
