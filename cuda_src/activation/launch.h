// Launching the kernels of activations: which kernel, how many blocks.
#pragma once

#include <cstdint>

#include "activation/args.h"
#include "common/launch.h"
#include "fused/launch.h"

namespace tejit {
namespace activation {

inline fused::Source source_of(const RowsArgs& rows) {
  const void* gate = rows.gated ? static_cast<const char*>(rows.x) + rows.cols * 2 : nullptr;
  return {{}, nullptr, nullptr, gate, rows.rows, rows.pitch, rows.kind, 0, rows.curve};
}

// Nothing of a row is needed to compute its elements.
inline constexpr bool needs_rows(const RowsArgs&) {
  return false;
}

// Whether the kernels serve it that move whole vectors of bfloat16.
inline bool tuned(const RowsArgs& args) {
  return is_bf16(args.dtype) && args.cols % 8 == 0 && args.cols < (std::int64_t{1} << 30) &&
         fused::aligned(args.x);
}

inline unsigned rows_blocks(const Launcher& launch, const RowsArgs& args) {
  return launch.blocks(args.out_rows, RowsShape::kBlocksPerSM);
}

inline void launch_rows(const Launcher& launch, const RowsArgs& args) {
  launch(tuned(args) ? "tejit_activation_rows_bf16" : "tejit_activation_rows_any", rows_blocks(launch, args),
         RowsShape::kThreads, args);
}

// FP8 in x's order.
inline void launch_fp8_rows(const Launcher& launch, const RowsArgs& rows, const fp8::CastArgs& cast,
                            bool follows) {
  launch("tejit_activation_fp8_rows", rows_blocks(launch, rows), RowsShape::kThreads,
         fused::CastRows<RowsArgs>{rows, cast}, follows);
}

}  // namespace activation
}  // namespace tejit
