// The arguments that every FP8 quantization takes, checked.
#pragma once

#include <cstdint>

#include "common/error.h"

namespace tejit {
namespace fp8 {

// How a tensor is to be scaled.
struct Scaling {
  int fp8;
  float fp8_max;
  bool pow2;
  float eps;
};

inline Scaling scaling(const char* op, std::int64_t fp8, bool pow2, double eps) {
  if (fp8 != 0 && fp8 != 1) fail(op, ": fp8 is ", fp8, ", but 0 (E4M3) or 1 (E5M2) is needed");
  if (!(eps >= 0)) fail(op, ": eps is ", eps, ", but a number >= 0 is needed; 0 puts no bound on amax");
  return {static_cast<int>(fp8), fp8 == 0 ? 448.0f : 57344.0f, pow2, static_cast<float>(eps)};
}

}  // namespace fp8
}  // namespace tejit
