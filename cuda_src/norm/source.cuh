// bfloat16 rows that a cast normalises as it loads them. Every step rounds once and in the order that the
// reference has, so the cast sees what it would see had the norm been written to memory.
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
TEJIT_DEVICE void load_eight(const void* from, int dtype, i64 column, u64 policy, float (&f)[8]) {
  if (dtype == 2) {
    BF16::widen(load16_shared_line(static_cast<const u16*>(from) + column, policy), f);
  } else {
    const float* at = static_cast<const float*>(from) + column;
    const uint4 a = load16_shared_line(at, policy), b = load16_shared_line(at + 4, policy);
    const u32 w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) f[i] = __uint_as_float(w[i]);
  }
}

TEJIT_DEVICE void load_affine(const Parameters& p, i64 column, u64 policy, Affine& a) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    a.gamma[i] = p.zero_centered ? 0.0f : 1.0f;
    a.beta[i] = kNothing;
  }
  if (p.weight != nullptr) load_eight(p.weight, p.weight_dtype, column, policy, a.gamma);
  if (p.bias != nullptr) load_eight(p.bias, p.bias_dtype, column, policy, a.beta);
  if (p.zero_centered) {
#pragma unroll
    for (int i = 0; i < 8; ++i) a.gamma[i] = __fadd_rn(1.0f, a.gamma[i]);
  }
}

TEJIT_DEVICE float normalised(float x, float mean, float rstd, float gamma, float beta) {
  return __fadd_rn(__fmul_rn(__fmul_rn(__fsub_rn(x, mean), rstd), gamma), beta);
}

TEJIT_DEVICE uint4 normalised(uint4 v, float mean, float rstd, const Affine& a) {
  float f[8];
  BF16::widen(v, f);
#pragma unroll
  for (int i = 0; i < 8; ++i) f[i] = normalised(f[i], mean, rstd, a.gamma[i], a.beta[i]);
  return make_uint4(bf16x2_of(f[0], f[1]), bf16x2_of(f[2], f[3]), bf16x2_of(f[4], f[5]),
                    bf16x2_of(f[6], f[7]));
}

// As an element type of the cast kernels: a vector of bfloat16 that becomes another one when it has come in.
// Whole vectors at aligned addresses only.
struct Normed : BF16 {
  static constexpr bool kFused = true;

  const Source& source;

  TEJIT_DEVICE explicit Normed(const Source& s) : BF16(0), source(s) {}

  // What a row needs beside x. Of a warp, each thread loads that of one row, and hands it to whoever asks.
  struct Row {
    float mean, rstd;
  };

  // After the kernel before has written the statistics.
  TEJIT_DEVICE Row row(i64 row, bool wanted) const {
    Row r = {0.0f, 0.0f};
    if (!wanted || row >= source.rows) return r;
    if (source.mean != nullptr) r.mean = load_shared_value(source.mean + row);
    r.rstd = load_shared_value(source.rstd + row);
    return r;
  }

  TEJIT_DEVICE Affine columns(i64 column, bool wanted) const {
    Affine a = {};
    if (wanted) load_affine(source.parameters, column, evict_first_policy(), a);
    return a;
  }

  // The norm of vector v of x where it is `there`, else 0; `from` is the thread that knows the row. From all
  // threads of a warp.
  TEJIT_DEVICE uint4 finish(uint4 v, const Row& r, int from, const Affine& a, i64, bool there) const {
    const float mean = __shfl_sync(0xffffffffu, r.mean, from);
    const float rstd = __shfl_sync(0xffffffffu, r.rstd, from);
    return there ? normalised(v, mean, rstd, a) : make_uint4(0, 0, 0, 0);
  }
};

}  // namespace norm
}  // namespace tejit
