// Launching the kernels of NVFP4: maxima first, then the cast; which kernel, how many blocks.
#pragma once

#include <cstdint>
#include <optional>

#include "common/launch.h"
#include "common/tensor.h"
#include "fp8/launch.h"
#include "nvfp4/args.h"

namespace tejit {
namespace nvfp4 {

// A direction's outputs; data null: not wanted. `given` replaces the tensor's own amax ((1,), or one a line).
struct Output {
  std::uint8_t* data = nullptr;
  std::uint8_t* scale_inv = nullptr;
  float* amax = nullptr;
  const float* given = nullptr;
};

// One call. x is contiguous and not empty, as a matrix rows * cols; sizes and modes were checked.
struct Call {
  const Tensor& x;
  std::int64_t rows = 0, cols = 0;
  int dtype = 0;  // of input_dtype: float32, float16, bfloat16
  bool rht = false, square = false, row_scaled = false, swizzled = false;
  int sign_mask = 0, four_over_six = 0, e4m3_max = 448;
  const std::int64_t* seed = nullptr;  // (seed, offset) on the device; null: to nearest
  const float* noop = nullptr;
  Output row, col;
};

inline int flags_of(const Call& call) {
  return (call.rht ? kRht : 0) | (call.square ? kSquare : 0) | (call.swizzled ? kSwizzled : 0) |
         (call.row_scaled ? kLineScaled : 0);
}

inline bool aligned(const void* p, int bytes) {
  return reinterpret_cast<std::uintptr_t>(p) % bytes == 0;
}

// Whether whole vectors of bfloat16 can be read.
inline bool vectors_only(const Call& call) {
  return call.dtype == kBF16 && call.cols % 8 == 0 && aligned(call.x.const_data_ptr(), 16);
}

// Partial maxima of x (row) and of its transform (col); null: not wanted.
inline void launch_rht_amax(const Launcher& launch, const Call& call, unsigned blocks, float* row,
                            float* col) {
  const AmaxArgs args = {call.x.const_data_ptr(),
                         row,
                         col,
                         call.noop,
                         call.rows,
                         call.cols,
                         static_cast<unsigned>(call.sign_mask),
                         0,
                         call.dtype};
  launch(vectors_only(call) ? "tejit_nvfp4_amax_rht_bf16" : "tejit_nvfp4_amax_rht_any", blocks,
         RhtAmaxShape::kThreads, args);
}

inline unsigned rht_amax_blocks(const Launcher& launch, const Call& call) {
  const std::int64_t units = call.rows / kBlock * pieces_of(call.cols, RhtAmaxShape::kCols);
  return launch.blocks(pieces_of(units, RhtAmaxShape::kThreads / 32), RhtAmaxShape::kBlocksPerSM);
}

// The maximum of each row, of each column.
inline void launch_line_amax(const Launcher& launch, const Call& call, float* row, float* col) {
  const AmaxArgs args = {
      call.x.const_data_ptr(), row, col, call.noop, call.rows, call.cols, 0, kLineScaled, call.dtype};
  const std::int64_t work = (row ? pieces_of(call.rows, LineShape::kLines) : 0) +
                            (col ? pieces_of(call.cols, LineShape::kLines) : 0);
  launch("tejit_nvfp4_amax_lines", launch.blocks(work, LineShape::kBlocksPerSM), LineShape::kThreads, args);
}

// The partial maxima that a cast starts from, or a tensor with one element a line.
struct Maxima {
  std::optional<Tensor> row, col;  // freed after the launches, which is in the stream's order
  const float* row_data = nullptr;
  const float* col_data = nullptr;
  int row_count = 0, col_count = 0;
};

inline Maxima launch_maxima(const Launcher& launch, const Device& device, const Call& call, bool row,
                            bool col) {
  Maxima m;
  const auto room = [&](std::optional<Tensor>& tensor, std::int64_t count) {
    tensor = empty_floats(count, device);
    return static_cast<float*>(tensor->mutable_data_ptr());
  };
  if (!row && !col) return m;
  if (call.row_scaled) {
    float* to_row = row ? call.row.amax : nullptr;
    float* to_col = col ? call.col.amax : nullptr;
    launch_line_amax(launch, call, to_row, to_col);
    m.row_data = to_row;
    m.col_data = to_col;
  } else if (call.rht && col) {
    const unsigned blocks = rht_amax_blocks(launch, call);
    float* to_row = row ? room(m.row, blocks) : nullptr;
    float* to_col = room(m.col, blocks);
    launch_rht_amax(launch, call, blocks, to_row, to_col);
    m.row_data = to_row;
    m.col_data = to_col;
    m.row_count = row ? static_cast<int>(blocks) : 0;
    m.col_count = static_cast<int>(blocks);
  } else {
    m.row = fp8::launch_amax(launch, call.x, call.dtype, device, call.noop);
    const auto* partial = static_cast<const float*>(m.row->const_data_ptr());
    const int count = static_cast<int>(m.row->numel());
    if (row) m.row_data = partial, m.row_count = count;
    if (col) m.col_data = partial, m.col_count = count;
  }
  return m;
}

inline void launch_cast(const Launcher& launch, const CastArgs& args, const Call& call, bool follows) {
  const bool row = args.row.data != nullptr, col = args.col.data != nullptr;
  const bool tuned = vectors_only(call) && !call.row_scaled && call.four_over_six == 0 &&
                     aligned(args.row.data, 8) && aligned(args.row.scale_inv, 4) && aligned(args.col.data, 8);
  if (!tuned) {
    const std::int64_t units =
        (row ? call.rows * (call.cols / kBlock) : 0) + (col ? call.cols * (call.rows / kBlock) : 0);
    launch("tejit_nvfp4_cast_any",
           launch.blocks(pieces_of(units, AnyShape::kThreads), AnyShape::kBlocksPerSM), AnyShape::kThreads,
           args, follows);
  } else if (col || call.square) {
    const std::int64_t tiles = pieces_of(call.rows, TileShape::kRows) *
                               (pieces_of(call.cols, kScaleRows) * (kScaleRows / TileShape::kCols));
    launch("tejit_nvfp4_cast_tile", launch.blocks(tiles, TileShape::kBlocksPerSM), TileShape::kThreads, args,
           follows);
  } else {
    launch("tejit_nvfp4_cast_row",
           launch.blocks(pieces_of(call.rows * (call.cols / kBlock), RowShape::kThreads),
                         RowShape::kBlocksPerSM),
           RowShape::kThreads, args, follows);
  }
}

// Everything of one quantization. The device of x is current.
inline void launch_quantize(const Launcher& launch, const Device& device, const Call& call) {
  const bool row = call.row.data != nullptr, col = call.col.data != nullptr;
  if (!row && !col) return;
  const Maxima m = launch_maxima(launch, device, call, row && !call.row.given, col && !call.col.given);
  const auto direction = [](const Output& out, const float* amax, int count) -> Direction {
    if (out.data == nullptr) return {};
    return {out.data, out.scale_inv, out.given ? out.given : amax, out.amax, out.given ? 1 : count};
  };
  const CastArgs args = {call.x.const_data_ptr(),
                         direction(call.row, m.row_data, m.row_count),
                         direction(call.col, m.col_data, m.col_count),
                         reinterpret_cast<const long long*>(call.seed),
                         call.noop,
                         call.rows,
                         call.cols,
                         static_cast<float>(call.e4m3_max),
                         static_cast<unsigned>(call.sign_mask),
                         flags_of(call),
                         call.four_over_six,
                         call.dtype};
  launch_cast(launch, args, call, m.row_data != nullptr || m.col_data != nullptr);
}

// The amaxes alone, as the op returns them: of the directions whose `amax` is not null.
inline void launch_amax(const Launcher& launch, const Device& device, const Call& call) {
  const Maxima m = launch_maxima(launch, device, call, call.row.amax != nullptr, call.col.amax != nullptr);
  if (call.row_scaled) return;
  const auto finish = [&](const float* partial, int count, float* amax) {
    if (amax) launch("tejit_fp8_amax_finish", 1, 1024, fp8::AmaxFinishArgs{partial, amax, count}, true);
  };
  finish(m.row_data, m.row_count, call.row.amax);
  finish(m.col_data, m.col_count, call.col.amax);
}

}  // namespace nvfp4
}  // namespace tejit
