// The kernels of FP8 in blocks of 128, by the plain names that the host asks for.
#include "fp8_block/quantize.cuh"

#define TEJIT_FP8_BLOCK(NAME, T, FORMAT, DIM, SHAPE, TRANSPOSE)                                         \
  extern "C" __global__ void __launch_bounds__(tejit::fp8_block::SHAPE<tejit::T::kBytes>::kThreads,     \
                                               tejit::fp8_block::SHAPE<tejit::T::kBytes>::kBlocksPerSM) \
      NAME(const __grid_constant__ tejit::fp8_block::BlockArgs args) {                                  \
    using Shape = tejit::fp8_block::SHAPE<tejit::T::kBytes>;                                            \
    using Plan = tejit::fp8_block::BlockPlan<tejit::T, Shape::kThreads>;                                \
    tejit::fp8_block::quantize_blocks<tejit::T, tejit::fp8::FORMAT, Plan, DIM, TRANSPOSE>(args);        \
  }

#define TEJIT_FP8_BLOCK_OF(X, T, TNAME, FORMAT, FNAME)                                  \
  X(tejit_fp8_block_1d_row_##TNAME##_##FNAME, T, FORMAT, 1, RowShape, false)            \
  X(tejit_fp8_block_1d_transpose_##TNAME##_##FNAME, T, FORMAT, 1, TransposeShape, true) \
  X(tejit_fp8_block_2d_row_##TNAME##_##FNAME, T, FORMAT, 2, RowShape, false)            \
  X(tejit_fp8_block_2d_transpose_##TNAME##_##FNAME, T, FORMAT, 2, TransposeShape, true)

#define TEJIT_FP8_BLOCK_EVERY(X)                 \
  TEJIT_FP8_BLOCK_OF(X, F32, f32, kE4M3, e4m3)   \
  TEJIT_FP8_BLOCK_OF(X, BF16, bf16, kE4M3, e4m3) \
  TEJIT_FP8_BLOCK_OF(X, F32, f32, kE5M2, e5m2)   \
  TEJIT_FP8_BLOCK_OF(X, BF16, bf16, kE5M2, e5m2)

TEJIT_FP8_BLOCK_EVERY(TEJIT_FP8_BLOCK)
