// FP8 of the norm of rows whose statistics an earlier kernel has found, in x's order and, if wanted,
// transposed.
#pragma once

#include "common/element.cuh"
#include "fp8/convert.cuh"
#include "fp8/scale.cuh"
#include "fused/args.h"
#include "norm/source.cuh"

namespace tejit {
namespace norm {

TEJIT_DEVICE void fp8_known(const fused::With<fp8::CastArgs>& args) {
  constexpr int kThreads = KnownShape::kThreads, kTurn = KnownShape::kTurn, kRows = KnownShape::kRows;
  const fused::Source& source = args.source;
  const u32 strips = static_cast<u32>((args.cols + kThreads * 8 - 1) / (kThreads * 8));
  const i64 column = static_cast<i64>(blockIdx.x % strips * kThreads + threadIdx.x) * 8;
  const i64 first = static_cast<i64>(blockIdx.x / strips) * kRows;
  const int rows = clamp_left(args.rows - first), there = clamp_left(source.rows - first);
  const bool has = column < args.cols;
  Affine affine = {};
  if (has) load_affine(source.parameters, column, affine);
  const u16* from = static_cast<const u16*>(args.x) + first * args.cols + column;
  uint4 v[kTurn];
  const auto load = [&](int row) {
#pragma unroll
    for (int k = 0; k < kTurn; ++k) {
      v[k] = make_uint4(0, 0, 0, 0);
      if (has && row + k < there) v[k] = load16<Load::kCached>(from + (row + k) * args.cols);
    }
  };
  load(0);
  const float scale = fp8::scale_of_warp(args);
  settle_affine(source.parameters, affine);
#pragma unroll 1
  for (int row = 0; row < kRows && row < rows; row += kTurn) {
    float rstd[kTurn], shift[kTurn];
#pragma unroll
    for (int k = 0; k < kTurn; ++k) {
      float mean = 0.0f;
      rstd[k] = 0.0f;
      if (row + k < there) {
        if (source.mean != nullptr) mean = load_shared_value(source.mean + first + row + k);
        rstd[k] = load_shared_value(source.rstd + first + row + k);
      }
      shift[k] = shift_of(mean, rstd[k]);
    }
#pragma unroll
    for (int k = 0; k < kTurn; ++k) {
      if (!has || row + k >= rows) break;
      uint4 y = make_uint4(0, 0, 0, 0);
      if (row + k < there) y = normalised(v[k], rstd[k], shift[k], affine);
      u32 word[2];
      fp8::encode_vector<BF16>(y, scale, args.fp8 != 0, word);
      store8<Store::kStream>(args.row + (first + row + k) * args.cols + column, word[0], word[1]);
    }
    if (row + kTurn < kRows) load(row + kTurn);
  }
}

}  // namespace norm
}  // namespace tejit
