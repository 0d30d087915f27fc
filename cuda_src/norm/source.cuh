// The norm of a vector, given its row's statistics. Every step rounds once and in the order that the
// reference has.
#pragma once

#include "common/element.cuh"
#include "norm/args.h"

namespace tejit {
namespace norm {

// A missing bias is -0, which leaves every number what it is when it is added.
constexpr float kNothing = -0.0f;

// Gamma and beta of the columns of one vector. As loaded they are what lies in memory; nothing that needs
// them waits for the loads until they are settled.
struct Affine {
  float gamma[8], beta[8];
};

constexpr int kBF16 = 2;  // as a dtype of Parameters; the other one served here is float32

// Eight of a vector of parameters that many rows share: they stay in L1.
TEJIT_DEVICE void load_eight(const void* from, int dtype, i64 column, float (&f)[8]) {
  const char* at = static_cast<const char*>(from) + column * (dtype == kBF16 ? 2 : 4);
  const uint4 a = load16<Load::kCached>(at);
  uint4 b = make_uint4(0, 0, 0, 0);
  if (dtype != kBF16) b = load16<Load::kCached>(at + 16);
  const u32 w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) f[i] = __uint_as_float(w[i]);
}

TEJIT_DEVICE void settle_eight(int dtype, float (&f)[8]) {
  if (dtype != kBF16) return;
  BF16::widen(
      make_uint4(__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]), __float_as_uint(f[3])),
      f);
}

TEJIT_DEVICE void load_affine(const fused::Parameters& p, i64 column, Affine& a) {
  if (p.weight != nullptr) load_eight(p.weight, p.weight_dtype, column, a.gamma);
  if (p.bias != nullptr) load_eight(p.bias, p.bias_dtype, column, a.beta);
}

TEJIT_DEVICE void settle_affine(const fused::Parameters& p, Affine& a) {
  if (p.weight != nullptr) {
    settle_eight(p.weight_dtype, a.gamma);
    if (p.zero_centered) {
#pragma unroll
      for (int i = 0; i < 8; ++i) a.gamma[i] = __fadd_rn(1.0f, a.gamma[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) a.gamma[i] = 1.0f;
  }
  if (p.bias != nullptr) {
    settle_eight(p.bias_dtype, a.beta);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) a.beta[i] = kNothing;
  }
}

// What takes a row's mean away once its numbers are multiplied by rstd. For a mean of 0 it is -0, which
// changes nothing, also where rstd is inf.
TEJIT_DEVICE float shift_of(float mean, float rstd) {
  return mean == 0.0f ? -0.0f : -__fmul_rn(mean, rstd);
}

TEJIT_DEVICE float normalised(float x, float rstd, float shift, float gamma, float beta) {
  return __fmaf_rn(__fmaf_rn(x, rstd, shift), gamma, beta);
}

TEJIT_DEVICE uint4 normalised(uint4 v, float rstd, float shift, const Affine& a) {
  float f[8];
  BF16::widen(v, f);
#pragma unroll
  for (int i = 0; i < 8; ++i) f[i] = normalised(f[i], rstd, shift, a.gamma[i], a.beta[i]);
  return make_uint4(bf16x2_of(f[0], f[1]), bf16x2_of(f[2], f[3]), bf16x2_of(f[4], f[5]),
                    bf16x2_of(f[6], f[7]));
}

}  // namespace norm
}  // namespace tejit
