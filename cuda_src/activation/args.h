// What the host launches and the device compiles with. Read by g++, nvcc and NVRTC alike.
#pragma once

#include "fused/args.h"

namespace tejit {
namespace activation {

// The numbers are those of KINDS in Python; a gated one multiplies f(first half of the columns) by the
// second.
enum Kind { kGelu = 0, kRelu = 1, kSilu = 2, kSquaredRelu = 3, kQuickGelu = 4, kSigmoid = 5 };
constexpr int kKinds = 6;

// x is rows * pitch, contiguous; what comes out is out_rows * cols, the rows behind x's are 0.
struct RowsArgs {
  const void* x;
  void* y;         // in x's dtype, or null
  float* partial;  // maxima of |y|, one for each block of threads, or null
  long long rows;
  long long out_rows;
  long long cols;
  long long pitch;  // 2 * cols where gated
  int kind;
  int gated;
  int dtype;  // 0 float32, 1 float16, 2 bfloat16
  int unused;
  fused::Curve curve;
};

static_assert(sizeof(RowsArgs) == 88 && sizeof(fused::CastRows<RowsArgs>) == 192,
              "host and device compilers must lay these out alike");

// A block of threads takes a row at once, kVectors vectors a thread before the first is used.
struct RowsShape {
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerSM = 4;
  static constexpr int kVectors = 4;
};

}  // namespace activation
}  // namespace tejit
