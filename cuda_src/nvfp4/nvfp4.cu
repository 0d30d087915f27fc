// The kernels of NVFP4, by the plain names that the host asks for.
#include "common/find.cuh"
#include "nvfp4/amax.cuh"
#include "nvfp4/any.cuh"
#include "nvfp4/row.cuh"
#include "nvfp4/tile.cuh"

#define TEJIT_NVFP4_KERNEL(NAME, FUNCTION, SHAPE, ARGS)                           \
  extern "C" __global__ void __launch_bounds__(tejit::nvfp4::SHAPE::kThreads,     \
                                               tejit::nvfp4::SHAPE::kBlocksPerSM) \
      NAME(const __grid_constant__ tejit::nvfp4::ARGS args) {                     \
    using namespace tejit::nvfp4;                                                 \
    FUNCTION(args);                                                               \
  }

#define TEJIT_NVFP4_KERNELS(X)                                                            \
  X(tejit_nvfp4_amax_rht_bf16, amax_rht, RhtAmaxShape, AmaxArgs)                          \
  X(tejit_nvfp4_amax_rht_any, amax_rht_any, RhtAmaxShape, AmaxArgs)                       \
  X(tejit_nvfp4_amax_lines, amax_lines, LineShape, AmaxArgs)                              \
  X(tejit_nvfp4_cast_row, cast_row<false>, RowShape, CastArgs)                            \
  X(tejit_nvfp4_cast_row_random, cast_row<true>, RandomRowShape, CastArgs)                \
  X(tejit_nvfp4_cast_tile, (cast_tile<false, false>), TileShape, CastArgs)                \
  X(tejit_nvfp4_cast_tile_random, (cast_tile<false, true>), RandomTileShape, CastArgs)    \
  X(tejit_nvfp4_cast_tile_rht, (cast_tile<true, false>), TileShape, CastArgs)             \
  X(tejit_nvfp4_cast_tile_rht_random, (cast_tile<true, true>), RandomTileShape, CastArgs) \
  X(tejit_nvfp4_cast_any, cast_any, AnyShape, CastArgs)

TEJIT_NVFP4_KERNELS(TEJIT_NVFP4_KERNEL)
TEJIT_FIND(nvfp4, TEJIT_NVFP4_KERNELS)
