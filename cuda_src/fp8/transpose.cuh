// x * scale as FP8, transposed, and in x's own order as well where that is asked for.
#pragma once

#include "common/tile.cuh"
#include "fp8/args.h"
#include "fp8/convert.cuh"
#include "fp8/scale.cuh"

namespace tejit {
namespace fp8 {

template <typename T, typename Plan, typename Args>
struct TileCast : Tile<T, Plan, Args> {
  using Base = Tile<T, Plan, Args>;
  using Base::args;
  using Base::kPer;
  using Base::v;

  TEJIT_DEVICE explicit TileCast(const Args& a) : Base(a) {}

  TEJIT_DEVICE void convert(Place p, float scale, u32* buffer) const {
#pragma unroll
    for (int s = 0; s < Base::kSteps; ++s) {
      u32 word[4][kPer / 4];
#pragma unroll
      for (int r = 0; r < 4; ++r) encode_vector<T>(v[s][r], scale, args.fp8 != 0, word[r]);
      if (args.row != nullptr) this->store_rows(p, s, word);
      this->put_squares(buffer, s, word);
    }
  }

  // The tile is settled when it returns.
  TEJIT_DEVICE float settled_scale(Place here, u32& so_far) {
    if constexpr (T::kFused) {
      __shared__ u32 scratch[32];
      const ScaleInSteps<Plan::kThreads> scale(args);
      const auto beside = this->beside(here);
      so_far = amax_so_far(args);
      const float found = scale.get(scratch);
      this->settle(here, beside);
      return found;
    } else {
      const float found = scale_of_block<Plan::kThreads>(args);
      so_far = amax_so_far(args);
      this->settle(here);
      return found;
    }
  }

  TEJIT_DEVICE void run(u32* buffer) {
    const Place here = this->place();
    this->load(here);
    u32 so_far;
    const float scale = settled_scale(here, so_far);
    u32 m = 0;
    this->each_vector([&](int s, int r, int) { m = T::amax_step(m, v[s][r]); });
    convert(here, scale, buffer);
    __syncthreads();
    this->store_transpose(here, buffer, this->col_alignment());
    collect_amax<Plan::kThreads>(args, T::amax_result(m), so_far);
  }
};

template <typename T, typename Plan, typename Args>
TEJIT_DEVICE void cast_transpose(const Args& args) {
  using Cast = TileCast<T, Plan, Args>;
  alignas(16) __shared__ u32 buffer[Cast::kCols * Cast::kQuads];
  if (is_noop(args.noop)) return;
  Cast(args).run(buffer);
}

}  // namespace fp8
}  // namespace tejit
