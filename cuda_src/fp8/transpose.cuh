// x * scale as FP8, transposed, and in x's own order as well where that is asked for.
#pragma once

#include "common/tile.cuh"
#include "fp8/args.h"
#include "fp8/convert.cuh"
#include "fp8/scale.cuh"

namespace tejit {
namespace fp8 {

template <typename T, typename Plan>
struct TileCast : Tile<T, Plan, CastArgs> {
  using Base = Tile<T, Plan, CastArgs>;
  using Base::args;
  using Base::kPer;
  using Base::v;

  TEJIT_DEVICE explicit TileCast(const CastArgs& a) : Base(a) {}

  TEJIT_DEVICE void convert(Place p, float scale, u32* buffer) const {
    u8* to = args.row + this->first_element(p);
    const int rows = args.row != nullptr ? this->rows_left_here(p) : 0;
    const int cols = this->cols_left(p) - this->lane * kPer;
#pragma unroll
    for (int s = 0; s < Base::kSteps; ++s) {
      u32 word[4][kPer / 4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        encode_vector<T>(v[s][r], scale, args.fp8 != 0, word[r]);
        this->store_row(to, s, r, word[r], rows, cols);
      }
      this->put_squares(buffer, s, word);
    }
  }

  // `buffer` holds a tile's codes, and words for maxima before the first and after the last.
  TEJIT_DEVICE void run(u32* buffer) {
    const Place step = this->place(gridDim.x);
    Place here = this->place(blockIdx.x);
    u32 m = 0;
    this->load(here, v);
    const float scale = scale_of_block<Plan::kThreads>(args, buffer);
    while (here.row < this->tile_rows()) {
      this->settle();
      this->each_vector([&](int s, int r, int) { m = T::amax_step(m, v[s][r]); });
      const Place next = this->after(here, step);
      __syncthreads();
      this->load_ahead(next);
      convert(here, scale, buffer);
      this->load_after(next);
      __syncthreads();
      this->store_transpose(here, buffer);
      this->advance(next);
      here = next;
    }
    __syncthreads();
    collect_amax<Plan::kThreads>(args, T::amax_result(m), buffer);
  }
};

template <typename T, typename Plan>
TEJIT_DEVICE void cast_transpose(const CastArgs& args) {
  using Cast = TileCast<T, Plan>;
  alignas(16) __shared__ u32 buffer[Cast::kCols * Cast::kQuads];
  if (is_noop(args.noop)) return;
  Cast(args).run(buffer);
}

}  // namespace fp8
}  // namespace tejit
