// What the host launches and the device compiles with. Read by g++, nvcc and NVRTC alike.
#pragma once

#include "fused/args.h"

namespace tejit {
namespace norm {

// The sums over a row have a fixed order, so that every implementation finds the same bits. Element i is
// added to sum i % 2048, in order; then thread t's eight sums (t * 8 + j) become one by a tree of strides 4,
// 2, 1 in j, those of 32 threads one by strides 16, 8, 4, 2, 1, and the eight that are left by 4, 2, 1.
constexpr int kThreadSums = 8;
constexpr int kThreads = 256;  // of a row
constexpr int kWarps = kThreads / 32;
constexpr int kSums = kThreadSums * kThreads;

// x is rows * cols, contiguous; what comes out has out_rows >= rows, those behind x's are 0.
struct RowsArgs {
  const void* x;
  fused::Parameters parameters;
  float* mean;     // null for RMSNorm, which has none
  float* rstd;     // rows
  void* y;         // out_rows * cols in x's dtype, or null
  float* partial;  // maxima of |y|, one for each block of threads, or null
  long long rows;
  long long out_rows;
  long long cols;
  float eps;
  int dtype;
};

static_assert(sizeof(RowsArgs) == 104 && sizeof(fused::CastRows<RowsArgs>) == 208,
              "host and device compilers must lay these out alike");

// A block of threads takes a row at a time. Of a row a thread keeps kHeld vectors, as float32 with gamma and
// beta of their columns, while those of the next row are on their way; what a longer row has more it loads
// again.
struct RowsShape {
  static constexpr int kThreads = norm::kThreads;
  static constexpr int kBlocksPerSM = 2;
  static constexpr int kHeld = 4;
};

// Where only the statistics are wanted there is no gamma and no beta to keep.
struct StatisticsShape : RowsShape {
  static constexpr int kBlocksPerSM = 3;
};

struct AnyRowsShape {
  static constexpr int kThreads = norm::kThreads;
  static constexpr int kBlocksPerSM = 4;
};

}  // namespace norm
}  // namespace tejit
