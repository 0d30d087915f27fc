// Casts of bfloat16 whose input is a norm or an activation of what they load. The cast sees what it would see
// had that been written to memory.
#pragma once

#include "activation/rows.cuh"
#include "fp8/transpose.cuh"
#include "fp8_block/quantize.cuh"
#include "fused/args.h"
#include "mxfp8/quantize.cuh"
#include "norm/source.cuh"

namespace tejit {
namespace fused {

// As an element type of the cast kernels: a vector of bfloat16 that becomes another one when it has come in.
// Whole vectors at aligned addresses only. kAsksOnce: a warp asks once whether all its vectors are there and
// not for each of them, which is faster where the registers suffice for both ways.
template <bool kOnce>
struct Loaded : BF16 {
  static constexpr bool kFused = true;
  static constexpr bool kAsksOnce = kOnce;
  static constexpr bool kAny = false;

  const Source& source;

  TEJIT_DEVICE explicit Loaded(const Source& s) : BF16(0), source(s) {}

  // What a row needs beside x. Of a warp, each thread loads that of one row, and hands it to whoever asks.
  struct Row {
    float mean, rstd, shift;
  };

  // After the kernel before has written the statistics; to be settled before it is used, as columns are.
  TEJIT_DEVICE Row row(i64 row, bool wanted) const {
    Row r = {};
    if (!wanted || row >= source.rows || source.rstd == nullptr) return r;
    if (source.mean != nullptr) r.mean = load_shared_value(source.mean + row);
    r.rstd = load_shared_value(source.rstd + row);
    return r;
  }

  // From memory that no kernel before writes.
  TEJIT_DEVICE norm::Affine columns(i64 column, bool wanted) const {
    norm::Affine a = {};
    if (wanted && is_norm()) norm::load_affine(source.parameters, column, a);
    return a;
  }

  struct Beside {
    Row row;
    norm::Affine columns;
  };

  TEJIT_DEVICE Beside beside(i64 own_row, bool wants_row, i64 column, bool wants_columns) const {
    return {row(own_row, wants_row), columns(column, wants_columns)};
  }

  TEJIT_DEVICE void settle(Row& r, norm::Affine& a) const {
    if (!is_norm()) return;
    norm::settle_affine(source.parameters, a);
    r.shift = norm::shift_of(r.mean, r.rstd);
  }

  TEJIT_DEVICE bool is_norm() const { return source.activation == kNorm; }

  // Of a norm, where v is there. From all threads of a warp, as the next.
  TEJIT_DEVICE uint4 normalised(uint4 v, const Row& r, int from, const norm::Affine& a) const {
    const float rstd = __shfl_sync(0xffffffffu, r.rstd, from);
    const float shift = __shfl_sync(0xffffffffu, r.shift, from);
    return norm::normalised(v, rstd, shift, a);
  }

  // What vector v of x becomes, at `row` and `column`, or 0 where it is not `there`; `from` is the thread
  // that knows the row.
  TEJIT_DEVICE uint4 finish(uint4 v, const Row& r, int from, const norm::Affine& a, i64 row, i64 column,
                            bool there) const {
    if (is_norm()) {
      const uint4 y = normalised(v, r, from, a);
      return there ? y : make_uint4(0, 0, 0, 0);
    }
    if (!there) return make_uint4(0, 0, 0, 0);
    const u16* gate = static_cast<const u16*>(source.gate);
    uint4 g = make_uint4(0, 0, 0, 0);
    if (gate != nullptr) g = load16<Load::kCached>(gate + row * source.pitch + column);
    return activation::activated(source.activation, source.curve, gate != nullptr, v, g);
  }
};

using Mxfp8Tiles = mxfp8::Bf16Shape;

using TileFill = TilePlan<Tiles::kThreads, Tiles::kRows, Tiles::kLanes>;

template <typename Shape>
using BlockFill = fp8_block::BlockPlan<Loaded<true>, Shape::kThreads>;

TEJIT_DEVICE void fp8_tiles(const With<fp8::CastArgs>& args) {
  fp8::cast_transpose<Loaded<false>, TileFill>(args);
}

TEJIT_DEVICE void block_rows(const With<fp8_block::BlockArgs>& args) {
  fp8_block::quantize_blocks<Loaded<true>, BlockFill<BlockRowShape>, 1, false>(args);
}

TEJIT_DEVICE void block_tiles(const With<fp8_block::BlockArgs>& args) {
  fp8_block::quantize_blocks<Loaded<true>, BlockFill<BlockTiles>, 1, true>(args);
}

TEJIT_DEVICE void mxfp8_tiles(const With<mxfp8::Args>& args) {
  mxfp8::Quantize<Loaded<false>, With<mxfp8::Args>>(args).run();
}

}  // namespace fused
}  // namespace tejit
