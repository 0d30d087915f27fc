// Activations of the rows of a matrix.
#pragma once

#include <cstdint>
#include <vector>

#include "activation/curve.h"
#include "elements.h"
#include "norm.h"
#include "parallel.h"

namespace tejit::cpu {

struct HostOps {
  static float add(float a, float b) { return a + b; }
  static float mul(float a, float b) { return a * b; }
  static float reciprocal(float d) { return 1.0f / d; }
  static float within(float x, float floor, float ceiling) {
    const float m = x > ceiling ? ceiling : x;
    return m < floor ? floor : m;
  }
  static uint32_t bits(float f) { return bits_of(f); }
  static float of_bits(uint32_t bits) { return float_of(bits); }
};

struct Activation {
  const void* x;  // rows * cols, or rows * 2 cols where gated
  In in;
  int64_t rows, cols;
  int kind;
  bool gated;
  void* y;  // rows * cols
};

namespace detail {

TEJIT_NOINLINE inline void activate_row(const Activation& job, int64_t row) {
  constexpr int kPiece = 256;
  float f[kPiece], gate[kPiece];
  const fused::Curve curve = activation::curve_of(job.kind);
  const int64_t first = row * job.cols * (job.gated ? 2 : 1);
  for (int64_t at = 0; at < job.cols; at += kPiece) {
    const int64_t n = job.cols - at < kPiece ? job.cols - at : kPiece;
    for (int64_t i = n; i < kPiece; ++i) f[i] = 0.0f;
    widen(job.x, job.in, first + at, n, f);
    activation::Functions<HostOps>::apply(job.kind, curve, f);
    if (job.gated) {
      widen(job.x, job.in, first + job.cols + at, n, gate);
      for (int64_t i = 0; i < n; ++i) f[i] *= gate[i];
    }
    narrow(f, job.in, row * job.cols + at, n, job.y);
  }
}

}  // namespace detail

inline void activate(const Activation& job) {
  constexpr int64_t kGrain = 32 * 1024;
  parallel_for(job.rows, kGrain / (job.cols + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) detail::activate_row(job, row);
  });
}

}  // namespace tejit::cpu
