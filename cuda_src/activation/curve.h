// What the host tells the smooth activations' one text to compute.
#pragma once

#include <limits>

#include "activation/function.h"

namespace tejit {
namespace activation {

// Sigmoid is 1 * sigmoid(x).
inline fused::Curve curve_of(int kind) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  fused::Curve curve = {0.0f, 1.0f, -kInfinity, kInfinity};
  if (kind == kGelu) {
    curve.cubic = kCubic;
    curve.linear = kTwoRoot;
  }
  if (kind == kQuickGelu) curve.linear = kQuick;
  if (kind == kSigmoid) curve.floor = curve.ceiling = 1.0f;
  return curve;
}

}  // namespace activation
}  // namespace tejit
