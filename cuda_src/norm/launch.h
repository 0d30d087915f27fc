// Launching the kernels of norms: which kernel, how many blocks.
#pragma once

#include <cstdint>

#include "common/launch.h"
#include "common/tensor.h"
#include "fp8/launch.h"
#include "mxfp8/args.h"
#include "norm/args.h"

namespace tejit {
namespace norm {

inline bool aligned(const void* p) {
  return reinterpret_cast<std::uintptr_t>(p) % 16 == 0;
}

// Whether the kernels serve it that move whole vectors of bfloat16.
inline bool tuned(const RowsArgs& args) {
  const auto fits = [](const void* p, int dtype) { return p == nullptr || (dtype != 1 && aligned(p)); };
  const Parameters& p = args.parameters;
  return is_bf16(args.dtype) && args.cols % 8 == 0 && args.cols < (std::int64_t{1} << 30) &&
         aligned(args.x) && fits(p.weight, p.weight_dtype) && fits(p.bias, p.bias_dtype);
}

inline unsigned rows_blocks(const Launcher& launch, const RowsArgs& args) {
  return launch.blocks(pieces_of(args.out_rows, RowsShape::kRows), RowsShape::kBlocksPerSM);
}

inline void launch_rows(const Launcher& launch, const RowsArgs& args) {
  launch(tuned(args) ? "tejit_norm_rows_bf16" : "tejit_norm_rows_any", rows_blocks(launch, args),
         RowsShape::kThreads, args);
}

// Every cast below follows the kernel that finds the statistics, except for cast_rows with a given scale.

inline void launch_cast(const Launcher& launch, const RowsArgs& rows, const fp8::CastArgs& cast) {
  if (cast.col == nullptr) {
    launch("tejit_norm_fp8_rows", rows_blocks(launch, rows), RowsShape::kThreads, CastRowsArgs{rows, cast},
           cast.scale == nullptr);
    return;
  }
  using Shape = fp8::TileShape;
  const std::int64_t tiles = pieces_of(cast.rows, Shape::kRows) * pieces_of(cast.cols, Shape::kLanes * 8);
  Fp8Args args = {};
  static_cast<fp8::CastArgs&>(args) = cast;
  args.source = {rows.parameters, rows.mean, rows.rstd, rows.rows};
  launch("tejit_norm_fp8_tiles", Launcher::blocks(tiles), Shape::kThreads, args, true);
}

inline void launch_cast(const Launcher& launch, const RowsArgs& rows, const fp8_block::BlockArgs& cast) {
  constexpr int kBlock = fp8_block::kBlock;
  BlockArgs args = {};
  static_cast<fp8_block::BlockArgs&>(args) = cast;
  args.source = {rows.parameters, rows.mean, rows.rstd, rows.rows};
  const unsigned tiles = Launcher::blocks(pieces_of(cast.rows, kBlock) * pieces_of(cast.cols, kBlock));
  if (cast.col != nullptr) {
    launch("tejit_norm_fp8_block_tiles", tiles, fp8_block::TransposeShape<2>::kThreads, args, true);
  } else {
    launch("tejit_norm_fp8_block_rows", tiles, fp8_block::RowShape<2>::kThreads, args, true);
  }
}

inline void launch_cast(const Launcher& launch, const RowsArgs& rows, const mxfp8::Args& cast) {
  using Shape = mxfp8::Bf16Shape;
  Mxfp8Args args = {};
  static_cast<mxfp8::Args&>(args) = cast;
  args.wide = 1;
  args.source = {rows.parameters, rows.mean, rows.rstd, rows.rows};
  const std::int64_t down = pieces_of(cast.rows, mxfp8::kOuter) * (mxfp8::kOuter / mxfp8::kBlock);
  const std::int64_t across =
      pieces_of(cast.cols, mxfp8::kOuter) * (mxfp8::kOuter / (mxfp8::kLanes * Shape::kPer));
  launch("tejit_norm_mxfp8", Launcher::blocks(pieces_of(down * across, Shape::kThreads / 32)),
         Shape::kThreads, args, true);
}

}  // namespace norm
}  // namespace tejit
