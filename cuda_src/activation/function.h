// The functions of activations in float32, for host and device alike: sums, products and reciprocals that
// round once each, so that all find the same bits. No libm: exp is a polynomial.
//
// GELU by tanh is x * sigmoid(2 u), u = sqrt(2 / pi) * (x + 0.044715 x^3); SiLU is x * sigmoid(x), and the
// quick GELU x * sigmoid(1.702 x).
#pragma once

#include "activation/args.h"

#ifdef __CUDACC__
#define TEJIT_FUNCTION __device__ __forceinline__
#else
#define TEJIT_FUNCTION inline
#endif

namespace tejit {
namespace activation {

constexpr float kTwoRoot = 1.5957691216057308f;  // 2 * sqrt(2 / pi)
constexpr float kCubic = 0.07135481282553376f;   // that times 0.044715
constexpr float kQuick = 1.702f;
constexpr float kLargest = 3.402823466e+38f;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2High = 0.693359375f;  // few bits: exact times every exponent
constexpr float kLn2Low = -0.00021219444005469057f;
constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: a sum's last place is 1
constexpr float kNearOne = 80.0f;        // 1 + exp of its negative is 1
constexpr float kHighest = 87.0f;        // exp of it has a reciprocal that is a normal number

// Arithmetic is that of the type Ops: add, mul, bits, of_bits; within, a number or the bound that it is
// beyond, where a NaN stays one; and reciprocal, of numbers from 1 to 2^126.
template <typename Ops>
struct Functions {
  // exp(t) for t from -kNearOne to kHighest, within 2 units in the last place.
  TEJIT_FUNCTION static float exp(float t) {
    const float shifted = Ops::add(Ops::mul(t, kLog2E), kRounder);
    const float n = Ops::add(shifted, -kRounder);
    float r = Ops::add(t, Ops::mul(n, -kLn2High));
    r = Ops::add(r, Ops::mul(n, -kLn2Low));
    float p = Ops::add(Ops::mul(r, 1.0f / 720.0f), 1.0f / 120.0f);
    p = Ops::add(Ops::mul(p, r), 1.0f / 24.0f);
    p = Ops::add(Ops::mul(p, r), 1.0f / 6.0f);
    p = Ops::add(Ops::mul(p, r), 0.5f);
    p = Ops::add(Ops::mul(p, r), 1.0f);
    p = Ops::add(Ops::mul(p, r), 1.0f);
    // The lower bits of `shifted` are n.
    return Ops::of_bits(Ops::bits(p) + (Ops::bits(shifted) << 23));
  }

  // x * sigmoid(z); where z is below -kHighest, x * 0.
  TEJIT_FUNCTION static float gated(float x, float z) {
    const float t = -(z < kNearOne ? z : kNearOne);  // a NaN comes back with x
    const float sigmoid = Ops::reciprocal(Ops::add(1.0f, exp(t < kHighest ? t : kHighest)));
    return Ops::mul(x, t < kHighest ? sigmoid : 0.0f);
  }

  TEJIT_FUNCTION static float relu(float x) { return x <= 0.0f ? 0.0f : x; }

  // f[0..count) in place; kind and curve are the same for a whole grid.
  template <int kCount>
  TEJIT_FUNCTION static void apply(int kind, const fused::Curve& curve, float (&f)[kCount]) {
    if (kind != kRelu && kind != kSquaredRelu) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        float square = Ops::mul(f[i], f[i]);
        square = square < kLargest ? square : kLargest;
        const float z = Ops::mul(f[i], Ops::add(Ops::mul(square, curve.cubic), curve.linear));
        f[i] = gated(Ops::within(f[i], curve.floor, curve.ceiling), z);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) f[i] = relu(f[i]);
      if (kind == kRelu) return;
#pragma unroll
      for (int i = 0; i < kCount; ++i) f[i] = Ops::mul(f[i], f[i]);
    }
  }
};

}  // namespace activation
}  // namespace tejit
