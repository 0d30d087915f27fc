// The kernels of norms, by the plain names that the host asks for.
#include "common/find.cuh"
#include "fused/kernel.cuh"
#include "norm/any.cuh"
#include "norm/rows.cuh"

#define TEJIT_NORM_KERNELS(X)                                                                                \
  X(tejit_norm_statistics, norm::only_statistics, norm::StatisticsShape, tejit::norm::RowsArgs)              \
  X(tejit_norm_short_rows, norm::rows<tejit::norm::Length::kShort>,                                          \
    norm::RowsShape<tejit::norm::Length::kShort>, tejit::norm::RowsArgs)                                     \
  X(tejit_norm_middle_rows, norm::rows<tejit::norm::Length::kMiddle>,                                        \
    norm::RowsShape<tejit::norm::Length::kMiddle>, tejit::norm::RowsArgs)                                    \
  X(tejit_norm_long_rows, norm::rows<tejit::norm::Length::kAny>, norm::RowsShape<tejit::norm::Length::kAny>, \
    tejit::norm::RowsArgs)                                                                                   \
  X(tejit_norm_rows_any, norm::rows_any, norm::AnyRowsShape, tejit::norm::RowsArgs)

TEJIT_NORM_KERNELS(TEJIT_FUSED_KERNEL)
TEJIT_FIND(norm, TEJIT_NORM_KERNELS)
