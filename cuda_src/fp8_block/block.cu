// The kernels of FP8 in blocks of 128, by the plain names that the host asks for.
#include "fp8_block/quantize.cuh"

// A 128x128 block's scale needs all of the tile: only tiles that are loaded ahead keep memory busy meanwhile.
// Of float32 a tile is too large for that.
#define TEJIT_FP8_BLOCK(NAME, T, DIM, SHAPE, TRANSPOSE, AHEAD)                                         \
  extern "C" __global__ void __launch_bounds__(tejit::fp8_block::SHAPE::kThreads,                      \
                                               tejit::fp8_block::SHAPE::kBlocksPerSM)                  \
      NAME(const __grid_constant__ tejit::fp8_block::BlockArgs args) {                                 \
    using Plan =                                                                                       \
        tejit::fp8_block::BlockPlan<tejit::T, tejit::fp8_block::SHAPE::kThreads, tejit::Ahead::AHEAD>; \
    tejit::fp8_block::quantize_blocks<tejit::T, Plan, DIM, TRANSPOSE>(args);                           \
  }

#define TEJIT_FP8_BLOCK_EVERY(X)                                                 \
  X(tejit_fp8_block_1d_row_any, Any, 1, RowShape<4>, false, kAfter)              \
  X(tejit_fp8_block_1d_transpose_any, Any, 1, TransposeShape<4>, true, kAfter)   \
  X(tejit_fp8_block_2d_row_any, Any, 2, RowShape<4>, false, kAfter)              \
  X(tejit_fp8_block_2d_transpose_any, Any, 2, TransposeShape<4>, true, kAfter)   \
  X(tejit_fp8_block_1d_row_bf16, BF16, 1, RowShape<2>, false, kAfter)            \
  X(tejit_fp8_block_1d_transpose_bf16, BF16, 1, TransposeShape<2>, true, kAfter) \
  X(tejit_fp8_block_2d_row_bf16, BF16, 2, SquareShape, false, kShared)           \
  X(tejit_fp8_block_2d_transpose_bf16, BF16, 2, SquareShape, true, kShared)

TEJIT_FP8_BLOCK_EVERY(TEJIT_FP8_BLOCK)
