// Launching the kernels of FP8 in blocks: which kernel, how many blocks.
#pragma once

#include <cstdint>

#include "common/launch.h"
#include "common/tensor.h"
#include "fp8_block/args.h"

namespace tejit {
namespace fp8_block {

// By dim - 1, whether there is a transpose, whether the input is bfloat16 (else float32), element type.
#define TEJIT_NAMES(DIM, KIND)                                                                     \
  {{"tejit_fp8_block_" #DIM "_" #KIND "_f32_e4m3", "tejit_fp8_block_" #DIM "_" #KIND "_f32_e5m2"}, \
   {"tejit_fp8_block_" #DIM "_" #KIND "_bf16_e4m3", "tejit_fp8_block_" #DIM "_" #KIND "_bf16_e5m2"}}
inline constexpr const char* kKernel[2][2][2][2] = {{TEJIT_NAMES(1d, row), TEJIT_NAMES(1d, transpose)},
                                                    {TEJIT_NAMES(2d, row), TEJIT_NAMES(2d, transpose)}};
#undef TEJIT_NAMES

inline void launch_blocks(const Launcher& launch, const BlockArgs& args, int dim, bool bf16, int fp8) {
  const bool transpose = args.col != nullptr;
  const std::int64_t tiles = pieces_of(args.rows, kBlock) * pieces_of(args.cols, kBlock);
  const char* kernel = kKernel[dim - 1][transpose][bf16][fp8];
  const auto with = [&](auto shape) {
    launch(kernel, launch.blocks(tiles, shape.kBlocksPerSM), shape.kThreads, args);
  };
  if (transpose) {
    bf16 ? with(TransposeShape<2>()) : with(TransposeShape<4>());
  } else {
    bf16 ? with(RowShape<2>()) : with(RowShape<4>());
  }
}

}  // namespace fp8_block
}  // namespace tejit
