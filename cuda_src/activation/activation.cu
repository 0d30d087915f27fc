// The kernels of activations, by the plain names that the host asks for.
#include "activation/rows.cuh"
#include "common/find.cuh"
#include "fused/kernel.cuh"

#define TEJIT_ACTIVATION_KERNELS(X)                                                                      \
  X(tejit_activation_rows_bf16, activation::rows, activation::RowsShape, tejit::activation::RowsArgs)    \
  X(tejit_activation_rows_any, activation::rows_any, activation::RowsShape, tejit::activation::RowsArgs) \
  X(tejit_activation_fp8_rows, activation::fp8_rows, activation::RowsShape,                              \
    tejit::fused::CastRows<tejit::activation::RowsArgs>)

TEJIT_ACTIVATION_KERNELS(TEJIT_FUSED_KERNEL)
TEJIT_FIND(activation, TEJIT_ACTIVATION_KERNELS)
