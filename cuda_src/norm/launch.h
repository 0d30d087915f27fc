// Launching the kernels of norms: which kernel, how many blocks.
#pragma once

#include <cstdint>

#include "common/launch.h"
#include "common/tensor.h"
#include "fused/launch.h"
#include "norm/args.h"

namespace tejit {
namespace norm {

inline constexpr fused::Names kNames = {"tejit_norm_rows_bf16", "tejit_norm_rows_any", "tejit_norm_fp8_rows"};

inline const fused::Names& names_of(const RowsArgs&) {
  return kNames;
}

inline unsigned threads_of(const RowsArgs&) {
  return RowsShape::kThreads;
}

inline fused::Source source_of(const RowsArgs& rows) {
  return {rows.parameters, rows.mean, rows.rstd, nullptr, rows.rows, rows.cols, fused::kNorm, 0};
}

// Whether the kernels serve it that move whole vectors of bfloat16.
inline bool tuned(const RowsArgs& args) {
  const auto fits = [](const void* p, int dtype) {
    return p == nullptr || (dtype != 1 && fused::aligned(p));
  };
  const fused::Parameters& p = args.parameters;
  return is_bf16(args.dtype) && args.cols % 8 == 0 && args.cols < (std::int64_t{1} << 30) &&
         fused::aligned(args.x) && fits(p.weight, p.weight_dtype) && fits(p.bias, p.bias_dtype);
}

inline unsigned rows_blocks(const Launcher& launch, const RowsArgs& args) {
  return launch.blocks(args.out_rows, tuned(args) ? RowsShape::kBlocksPerSM : AnyRowsShape::kBlocksPerSM);
}

inline void launch_rows(const Launcher& launch, const RowsArgs& args) {
  if (tuned(args) && args.y == nullptr && args.partial == nullptr) {
    launch("tejit_norm_statistics_bf16", launch.blocks(args.out_rows, StatisticsShape::kBlocksPerSM),
           kThreads, args);
  } else {
    launch(tuned(args) ? kNames.rows : kNames.rows_any, rows_blocks(launch, args), kThreads, args);
  }
}

// Whether a cast in tiles needs the kernel over the rows before it: for the statistics it does.
inline constexpr bool needs_rows(const RowsArgs&) {
  return true;
}

}  // namespace norm
}  // namespace tejit
