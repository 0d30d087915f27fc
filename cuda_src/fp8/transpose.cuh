// x * scale as FP8, transposed, and in x's own order as well where that is asked for.
//
// The loads of the next tile are issued before a tile is written, and two buffers make one barrier a tile
// enough.
#pragma once

#include "common/tile.cuh"
#include "fp8/args.h"
#include "fp8/convert.cuh"
#include "fp8/scale.cuh"

namespace tejit {
namespace fp8 {

template <typename T, Format kFormat, typename Plan, bool kWide>
struct TileCast : Tile<T, Plan, kWide, CastArgs> {
  using Base = Tile<T, Plan, kWide, CastArgs>;
  using Base::args;
  using Base::kPer;

  TEJIT_DEVICE explicit TileCast(const CastArgs& a) : Base(a) {}

  TEJIT_DEVICE void convert(Place p, float scale, u32* buffer) const {
    const bool wide = kWide || (args.cols % kPer == 0 && takes_vectors<T>(args.row));
    u8* to = args.row + this->first_element(p);
    const int cols = this->cols_left(p) - this->lane * kPer;
    const int rows = args.row != nullptr && cols > 0 ? this->rows_left(p) - this->quad * 4 : 0;
#pragma unroll
    for (int s = 0; s < Base::kSteps; ++s) {
      u32 word[4][kPer / 4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        encode_vector<T, kFormat>(this->v[s][r], scale, word[r]);
        this->store_row(to, s, r, word[r], rows, cols, wide);
      }
      this->put_squares(buffer, s, word);
    }
  }

  TEJIT_DEVICE void run(u32 (*buffers)[Base::kCols * Base::kQuads]) {
    const u64 col_bits = this->col_alignment();
    u32 t = blockIdx.x;
    Place here = this->place(t);
    this->load(here);
    const float scale = scale_of_block<Plan::kThreads>(args, Traits<kFormat>::kMax);
    for (int turn = 0; t < this->tiles(); turn ^= 1) {
      u32* buffer = buffers[turn];
      convert(here, scale, buffer);
      t += gridDim.x;
      const Place next = this->place(t);
      this->load(next);
      __syncthreads();
      this->store_transpose(here, buffer, col_bits);
      here = next;
    }
  }
};

template <typename T, Format kFormat, typename Plan>
TEJIT_DEVICE void cast_transpose(const CastArgs& args) {
  using Wide = TileCast<T, kFormat, Plan, true>;
  using Any = TileCast<T, kFormat, Plan, false>;
  alignas(16) __shared__ u32 buffers[2][Wide::kCols * Wide::kQuads];
  if (is_noop(args.noop)) return;
  if (all_wide<T>(args)) {
    Wide(args).run(buffers);
  } else {
    Any(args).run(buffers);
  }
}

}  // namespace fp8
}  // namespace tejit
