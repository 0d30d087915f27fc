// The kernels of norms that write FP8, by the plain names that the host asks for.
#include "common/find.cuh"
#include "fused/kernel.cuh"
#include "norm/known.cuh"
#include "norm/rows.cuh"

#define TEJIT_NORM_FP8_KERNELS(X)                                                                 \
  X(tejit_norm_fp8_short_rows, norm::fp8_rows<tejit::norm::Length::kShort>,                       \
    norm::RowsShape<tejit::norm::Length::kShort>, tejit::fused::CastRows<tejit::norm::RowsArgs>)  \
  X(tejit_norm_fp8_middle_rows, norm::fp8_rows<tejit::norm::Length::kMiddle>,                     \
    norm::RowsShape<tejit::norm::Length::kMiddle>, tejit::fused::CastRows<tejit::norm::RowsArgs>) \
  X(tejit_norm_fp8_long_rows, norm::fp8_rows<tejit::norm::Length::kAny>,                          \
    norm::RowsShape<tejit::norm::Length::kAny>, tejit::fused::CastRows<tejit::norm::RowsArgs>)    \
  X(tejit_norm_fp8_known, norm::fp8_known, norm::KnownShape, tejit::fused::With<tejit::fp8::CastArgs>)

TEJIT_NORM_FP8_KERNELS(TEJIT_FUSED_KERNEL)
TEJIT_FIND(norm_fp8, TEJIT_NORM_FP8_KERNELS)
