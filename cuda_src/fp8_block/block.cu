// The kernels of FP8 in blocks of 128, by the plain names that the host asks for.
#include "common/find.cuh"
#include "fp8_block/quantize.cuh"

#define TEJIT_FP8_BLOCK(NAME, T, BYTES, DIM, SHAPE, TRANSPOSE)                                    \
  extern "C" __global__ void __launch_bounds__(tejit::fp8_block::SHAPE<BYTES>::kThreads,          \
                                               tejit::fp8_block::SHAPE<BYTES>::kBlocksPerSM)      \
      NAME(const __grid_constant__ tejit::fp8_block::BlockArgs args) {                            \
    using Plan = tejit::fp8_block::BlockPlan<tejit::T, tejit::fp8_block::SHAPE<BYTES>::kThreads>; \
    tejit::fp8_block::quantize_blocks<tejit::T, Plan, DIM, TRANSPOSE>(args);                      \
  }

#define TEJIT_FP8_BLOCK_EVERY(X)                                         \
  X(tejit_fp8_block_1d_row_any, Any, 4, 1, RowShape, false)              \
  X(tejit_fp8_block_1d_transpose_any, Any, 4, 1, TransposeShape, true)   \
  X(tejit_fp8_block_2d_row_any, Any, 4, 2, RowShape, false)              \
  X(tejit_fp8_block_2d_transpose_any, Any, 4, 2, TransposeShape, true)   \
  X(tejit_fp8_block_1d_row_bf16, BF16, 2, 1, RowShape, false)            \
  X(tejit_fp8_block_1d_transpose_bf16, BF16, 2, 1, TransposeShape, true) \
  X(tejit_fp8_block_2d_row_bf16, BF16, 2, 2, RowShape, false)            \
  X(tejit_fp8_block_2d_transpose_bf16, BF16, 2, 2, TransposeShape, true)

TEJIT_FP8_BLOCK_EVERY(TEJIT_FP8_BLOCK)
TEJIT_FIND(fp8_block, TEJIT_FP8_BLOCK_EVERY)
