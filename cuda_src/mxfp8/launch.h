// Launching the kernels of MXFP8: which kernel, how many blocks.
#pragma once

#include <cstdint>

#include "common/launch.h"
#include "mxfp8/args.h"

namespace tejit {
namespace mxfp8 {

// Whether `per` elements at a time can move, of x and of the bytes of both directions.
inline bool moves_at_once(const Args& args, int per) {
  const auto aligned = [](const void* p, int bytes) {
    return reinterpret_cast<std::uintptr_t>(p) % static_cast<unsigned>(bytes) == 0;
  };
  return args.cols % per == 0 && aligned(args.x, per * (args.dtype == 0 ? 4 : 2)) && aligned(args.row, per) &&
         aligned(args.col, per);
}

// bfloat16 has a kernel of its own where whole vectors can move; everything else goes through the other one.
inline void launch_quantize(const Launcher& launch, Args args) {
  const auto with = [&](const char* kernel, auto shape) {
    const std::int64_t down = pieces_of(args.rows, kOuter) * (kOuter / kBlock);
    const std::int64_t across = pieces_of(args.cols, kOuter) * (kOuter / (kLanes * shape.kPer));
    const std::int64_t pieces = pieces_of(down * across, shape.kThreads / 32);
    args.wide = moves_at_once(args, shape.kPer);
    launch(kernel, launch.blocks(pieces, shape.kBlocksPerSM), shape.kThreads, args);
  };
  if (args.dtype == 2 && moves_at_once(args, Bf16Shape::kPer)) {
    with("tejit_mxfp8_bf16", Bf16Shape());
  } else {
    with("tejit_mxfp8_any", AnyShape());
  }
}

}  // namespace mxfp8
}  // namespace tejit
