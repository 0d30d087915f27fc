// The kernels of norms, and of casts whose input is normalised as it is loaded.
#include "fp8/transpose.cuh"
#include "fp8_block/quantize.cuh"
#include "mxfp8/quantize.cuh"
#include "norm/rows.cuh"

namespace tejit {
namespace norm {

using TileFill = TilePlan<fp8::TileShape::kThreads, fp8::TileShape::kRows, fp8::TileShape::kLanes>;

template <typename Shape, Load kLoad>
using BlockFill = fp8_block::BlockPlan<Normed, Shape::kThreads, kLoad>;

// Gamma and beta of its columns take a thread registers that the plain kernels do not need.
struct BlockRow : fp8_block::RowShape<BF16::kBytes> {
  static constexpr int kBlocksPerSM = 2;
};
using BlockTranspose = fp8_block::TransposeShape<BF16::kBytes>;

using Fp8Tiles = fp8::TileShape;
using Mxfp8Tiles = mxfp8::Bf16Shape;

// Whole vectors only, like the plain kernel for bfloat16.
struct NormedVectors : Normed {
  static constexpr bool kAny = false;
  using Normed::Normed;
};

TEJIT_DEVICE void rows(const RowsArgs& args) {
  norm_rows<false>(args, nullptr);
}

TEJIT_DEVICE void cast_rows(const CastRowsArgs& args) {
  norm_rows<true>(args.rows, &args.cast);
}

TEJIT_DEVICE void cast_tiles(const Fp8Args& args) {
  fp8::cast_transpose<Normed, TileFill>(args);
}

TEJIT_DEVICE void block_rows(const BlockArgs& args) {
  fp8_block::quantize_blocks<Normed, BlockFill<BlockRow, Load::kPlain>, 1, false>(args);
}

TEJIT_DEVICE void block_tiles(const BlockArgs& args) {
  fp8_block::quantize_blocks<Normed, BlockFill<BlockTranspose, Load::kEvictFirst>, 1, true>(args);
}

TEJIT_DEVICE void mxfp8_tiles(const Mxfp8Args& args) {
  mxfp8::Quantize<NormedVectors, Mxfp8Args>(args).run();
}

}  // namespace norm
}  // namespace tejit

#define TEJIT_NORM_KERNEL(NAME, FUNCTION, SHAPE, ARGS)                           \
  extern "C" __global__ void __launch_bounds__(tejit::norm::SHAPE::kThreads,     \
                                               tejit::norm::SHAPE::kBlocksPerSM) \
      NAME(const __grid_constant__ tejit::norm::ARGS args) {                     \
    tejit::norm::FUNCTION(args);                                                 \
  }

#define TEJIT_NORM_KERNELS(X)                                           \
  X(tejit_norm_rows_bf16, rows, RowsShape, RowsArgs)                    \
  X(tejit_norm_rows_any, norm_rows_any, RowsShape, RowsArgs)            \
  X(tejit_norm_fp8_rows, cast_rows, RowsShape, CastRowsArgs)            \
  X(tejit_norm_fp8_tiles, cast_tiles, Fp8Tiles, Fp8Args)                \
  X(tejit_norm_fp8_block_rows, block_rows, BlockRow, BlockArgs)         \
  X(tejit_norm_fp8_block_tiles, block_tiles, BlockTranspose, BlockArgs) \
  X(tejit_norm_mxfp8, mxfp8_tiles, Mxfp8Tiles, Mxfp8Args)

TEJIT_NORM_KERNELS(TEJIT_NORM_KERNEL)
