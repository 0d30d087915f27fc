// The norm of a vector, given its row's statistics. Every step rounds once and in the order that the
// reference has.
#pragma once

#include "common/element.cuh"
#include "norm/args.h"

namespace tejit {
namespace norm {

// A missing bias is -0, which leaves every number what it is when it is added.
constexpr float kNothing = -0.0f;

// Gamma and beta of the columns of one vector.
struct Affine {
  float gamma[8], beta[8];
};

// Eight of a vector of parameters, in float32 or bfloat16, that many rows share: they stay in L1.
TEJIT_DEVICE void load_eight(const void* from, int dtype, i64 column, float (&f)[8]) {
  if (dtype == 2) {
    BF16::widen(load16<Load::kCached>(static_cast<const u16*>(from) + column), f);
  } else {
    const float* at = static_cast<const float*>(from) + column;
    const uint4 a = load16<Load::kCached>(at), b = load16<Load::kCached>(at + 4);
    const u32 w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) f[i] = __uint_as_float(w[i]);
  }
}

TEJIT_DEVICE void load_affine(const fused::Parameters& p, i64 column, Affine& a) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    a.gamma[i] = p.zero_centered ? 0.0f : 1.0f;
    a.beta[i] = kNothing;
  }
  if (p.weight != nullptr) load_eight(p.weight, p.weight_dtype, column, a.gamma);
  if (p.bias != nullptr) load_eight(p.bias, p.bias_dtype, column, a.beta);
  if (p.zero_centered) {
#pragma unroll
    for (int i = 0; i < 8; ++i) a.gamma[i] = __fadd_rn(1.0f, a.gamma[i]);
  }
}

// Of d = x - mean.
TEJIT_DEVICE float scaled(float d, float rstd, float gamma, float beta) {
  return __fadd_rn(__fmul_rn(__fmul_rn(d, rstd), gamma), beta);
}

TEJIT_DEVICE uint4 normalised(uint4 v, float mean, float rstd, const Affine& a) {
  float f[8];
  BF16::widen(v, f);
#pragma unroll
  for (int i = 0; i < 8; ++i) f[i] = scaled(__fsub_rn(f[i], mean), rstd, a.gamma[i], a.beta[i]);
  return make_uint4(bf16x2_of(f[0], f[1]), bf16x2_of(f[2], f[3]), bf16x2_of(f[4], f[5]),
                    bf16x2_of(f[6], f[7]));
}

}  // namespace norm
}  // namespace tejit
