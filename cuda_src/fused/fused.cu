// The kernels of norms and activations, and of casts whose input is one of them.
#include "fused/kernels.cuh"
#include "norm/any.cuh"
#include "norm/known.cuh"
#include "norm/rows.cuh"

#define TEJIT_FUSED_KERNEL(NAME, FUNCTION, SHAPE, ...)                                             \
  extern "C" __global__ void __launch_bounds__(tejit::SHAPE::kThreads, tejit::SHAPE::kBlocksPerSM) \
      NAME(const __grid_constant__ __VA_ARGS__ args) {                                             \
    tejit::FUNCTION(args);                                                                         \
  }

#define TEJIT_FUSED_KERNELS(X)                                                                               \
  X(tejit_norm_statistics, norm::only_statistics, norm::StatisticsShape, tejit::norm::RowsArgs)              \
  X(tejit_norm_short_rows, norm::rows<tejit::norm::Length::kShort>,                                          \
    norm::RowsShape<tejit::norm::Length::kShort>, tejit::norm::RowsArgs)                                     \
  X(tejit_norm_middle_rows, norm::rows<tejit::norm::Length::kMiddle>,                                        \
    norm::RowsShape<tejit::norm::Length::kMiddle>, tejit::norm::RowsArgs)                                    \
  X(tejit_norm_long_rows, norm::rows<tejit::norm::Length::kAny>, norm::RowsShape<tejit::norm::Length::kAny>, \
    tejit::norm::RowsArgs)                                                                                   \
  X(tejit_norm_rows_any, norm::rows_any, norm::AnyRowsShape, tejit::norm::RowsArgs)                          \
  X(tejit_norm_fp8_short_rows, norm::fp8_rows<tejit::norm::Length::kShort>,                                  \
    norm::RowsShape<tejit::norm::Length::kShort>, tejit::fused::CastRows<tejit::norm::RowsArgs>)             \
  X(tejit_norm_fp8_middle_rows, norm::fp8_rows<tejit::norm::Length::kMiddle>,                                \
    norm::RowsShape<tejit::norm::Length::kMiddle>, tejit::fused::CastRows<tejit::norm::RowsArgs>)            \
  X(tejit_norm_fp8_long_rows, norm::fp8_rows<tejit::norm::Length::kAny>,                                     \
    norm::RowsShape<tejit::norm::Length::kAny>, tejit::fused::CastRows<tejit::norm::RowsArgs>)               \
  X(tejit_norm_fp8_known, norm::fp8_known, norm::KnownShape, tejit::fused::With<tejit::fp8::CastArgs>)       \
  X(tejit_activation_rows_bf16, activation::rows, activation::RowsShape, tejit::activation::RowsArgs)        \
  X(tejit_activation_rows_any, activation::rows_any, activation::RowsShape, tejit::activation::RowsArgs)     \
  X(tejit_activation_fp8_rows, activation::fp8_rows, activation::RowsShape,                                  \
    tejit::fused::CastRows<tejit::activation::RowsArgs>)                                                     \
  X(tejit_fused_fp8_tiles, fused::fp8_tiles, fused::Tiles, tejit::fused::With<tejit::fp8::CastArgs>)         \
  X(tejit_fused_fp8_block_rows, fused::block_rows, fused::BlockRowShape,                                     \
    tejit::fused::With<tejit::fp8_block::BlockArgs>)                                                         \
  X(tejit_fused_fp8_block_tiles, fused::block_tiles, fused::BlockTiles,                                      \
    tejit::fused::With<tejit::fp8_block::BlockArgs>)                                                         \
  X(tejit_fused_mxfp8, fused::mxfp8_tiles, fused::Mxfp8Tiles, tejit::fused::With<tejit::mxfp8::Args>)

TEJIT_FUSED_KERNELS(TEJIT_FUSED_KERNEL)
