// Launching the casts whose input is computed as it is loaded. Each follows the kernel that goes over the
// rows, except for one that needs nothing of it.
#pragma once

#include <cstdint>

#include "common/launch.h"
#include "fused/args.h"

namespace tejit {
namespace fused {

inline bool aligned(const void* p) {
  return reinterpret_cast<std::uintptr_t>(p) % 16 == 0;
}

template <typename Base, typename Rows>
With<Base> with_source(const Base& cast, const Rows& rows) {
  With<Base> args = {};
  static_cast<Base&>(args) = cast;
  args.source = source_of(rows);
  return args;
}

template <typename Rows>
void launch_cast(const Launcher& launch, const Rows& rows, const fp8::CastArgs& cast, bool follows) {
  if (cast.col == nullptr) {
    launch_fp8_rows(launch, rows, cast, follows);
    return;
  }
  using Shape = fp8::TileShape;
  const std::int64_t tiles = pieces_of(cast.rows, Shape::kRows) * pieces_of(cast.cols, Shape::kLanes * 8);
  launch("tejit_fused_fp8_tiles", Launcher::blocks(tiles), Shape::kThreads, with_source(cast, rows), follows);
}

template <typename Rows>
void launch_cast(const Launcher& launch, const Rows& rows, const fp8_block::BlockArgs& cast, bool follows) {
  constexpr int kBlock = fp8_block::kBlock;
  const unsigned tiles = Launcher::blocks(pieces_of(cast.rows, kBlock) * pieces_of(cast.cols, kBlock));
  const bool col = cast.col != nullptr;
  launch(col ? "tejit_fused_fp8_block_tiles" : "tejit_fused_fp8_block_rows", tiles,
         col ? fp8_block::TransposeShape<2>::kThreads : BlockRowShape::kThreads, with_source(cast, rows),
         follows);
}

template <typename Rows>
void launch_cast(const Launcher& launch, const Rows& rows, const mxfp8::Args& cast, bool follows) {
  using Shape = mxfp8::Bf16Shape;
  const std::int64_t down = pieces_of(cast.rows, mxfp8::kOuter) * (mxfp8::kOuter / mxfp8::kBlock);
  const std::int64_t across =
      pieces_of(cast.cols, mxfp8::kOuter) * (mxfp8::kOuter / (mxfp8::kLanes * Shape::kPer));
  launch("tejit_fused_mxfp8", Launcher::blocks(pieces_of(down * across, Shape::kThreads / 32)),
         Shape::kThreads, with_source(cast, rows), follows);
}

}  // namespace fused
}  // namespace tejit
