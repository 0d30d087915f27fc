// The kernels of casts whose input is a norm or an activation, by the plain names that the host asks for.
#include "common/find.cuh"
#include "fused/kernel.cuh"
#include "fused/kernels.cuh"

// The kernels of activations alone stay in this unit: without them the compiler inlines otherwise here, and
// tejit_fused_fp8_tiles becomes another kernel.
#include "activation/activation.cu"

#define TEJIT_FUSED_KERNELS(X)                                                                       \
  X(tejit_fused_fp8_tiles, fused::fp8_tiles, fused::Tiles, tejit::fused::With<tejit::fp8::CastArgs>) \
  X(tejit_fused_fp8_block_rows, fused::block_rows, fused::BlockRowShape,                             \
    tejit::fused::With<tejit::fp8_block::BlockArgs>)                                                 \
  X(tejit_fused_fp8_block_tiles, fused::block_tiles, fused::BlockTiles,                              \
    tejit::fused::With<tejit::fp8_block::BlockArgs>)                                                 \
  X(tejit_fused_mxfp8, fused::mxfp8_tiles, fused::Mxfp8Tiles, tejit::fused::With<tejit::mxfp8::Args>)

TEJIT_FUSED_KERNELS(TEJIT_FUSED_KERNEL)
TEJIT_FIND(fused, TEJIT_FUSED_KERNELS)
