// Launching the kernels of norms: which kernel, how many blocks.
#pragma once

#include <cstdint>

#include "common/launch.h"
#include "common/tensor.h"
#include "fused/launch.h"
#include "norm/args.h"

namespace tejit {
namespace norm {

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

inline Length length_of(const RowsArgs& args) {
  if (args.cols <= RowsShape<Length::kShort>::kLongest) return Length::kShort;
  return args.cols <= RowsShape<Length::kMiddle>::kLongest ? Length::kMiddle : Length::kAny;
}

// One of three, by the length of rows.
template <typename T>
inline T by_length(const RowsArgs& args, T of_short, T of_middle, T of_any) {
  const Length length = length_of(args);
  return length == Length::kShort ? of_short : length == Length::kMiddle ? of_middle : of_any;
}

inline unsigned rows_blocks(const Launcher& launch, const RowsArgs& args) {
  const int tuned_blocks =
      by_length(args, RowsShape<Length::kShort>::kBlocksPerSM, RowsShape<Length::kMiddle>::kBlocksPerSM,
                RowsShape<Length::kAny>::kBlocksPerSM);
  return launch.blocks(args.out_rows, tuned(args) ? tuned_blocks : AnyRowsShape::kBlocksPerSM);
}

inline void launch_rows(const Launcher& launch, const RowsArgs& args) {
  if (!tuned(args)) {
    launch("tejit_norm_rows_any", rows_blocks(launch, args), kThreads, args);
  } else if (args.y == nullptr && args.partial == nullptr) {
    launch("tejit_norm_statistics", launch.blocks(args.out_rows, StatisticsShape::kBlocksPerSM), kThreads,
           args);
  } else {
    launch(by_length(args, "tejit_norm_short_rows", "tejit_norm_middle_rows", "tejit_norm_long_rows"),
           rows_blocks(launch, args), kThreads, args);
  }
}

// FP8 in x's order. Where the kernel over the rows ran before, for the maximum of all, it left the
// statistics.
inline void launch_fp8_rows(const Launcher& launch, const RowsArgs& rows, const fp8::CastArgs& cast,
                            bool follows) {
  if (follows) {
    const std::int64_t strips = pieces_of(rows.cols, KnownShape::kThreads * 8);
    launch("tejit_norm_fp8_known", Launcher::blocks(pieces_of(rows.out_rows, KnownShape::kRows) * strips),
           KnownShape::kThreads, fused::with_source(cast, rows), true);
  } else {
    launch(by_length(rows, "tejit_norm_fp8_short_rows", "tejit_norm_fp8_middle_rows",
                     "tejit_norm_fp8_long_rows"),
           rows_blocks(launch, rows), kThreads, fused::CastRows<RowsArgs>{rows, cast});
  }
}

// Whether a cast in tiles needs the kernel over the rows before it: for the statistics it does.
inline constexpr bool needs_rows(const RowsArgs&) {
  return true;
}

}  // namespace norm
}  // namespace tejit
