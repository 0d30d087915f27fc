// What the host launches and the device compiles with. Read by g++, nvcc and NVRTC alike.
#pragma once

#include "fp8/args.h"
#include "fp8_block/args.h"
#include "mxfp8/args.h"

namespace tejit {
namespace norm {

// The sums over a row have a fixed order, so that every implementation finds the same bits. Element i is
// added to sum i % 1024, in order; then thread t's eight sums (t * 8 + j) become one by a tree of strides 4,
// 2, 1 in j, those of 32 threads one by strides 16, 8, 4, 2, 1, and the four that are left by 2, 1.
constexpr int kThreadSums = 8;
constexpr int kGroup = 128;  // threads of a row
constexpr int kSums = kThreadSums * kGroup;

// dtypes: 0 float32, 1 float16, 2 bfloat16
struct Parameters {
  const void* weight;  // null: 1
  const void* bias;    // null: none is added
  int weight_dtype;
  int bias_dtype;
  int zero_centered;  // the weight holds gamma - 1
  int unused;
};

// x is rows * cols, contiguous; what comes out has out_rows >= rows, those behind x's are 0.
struct RowsArgs {
  const void* x;
  Parameters parameters;
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

// Where a cast kernel finds its input: the rows of x, which it normalises as it loads them.
struct Source {
  Parameters parameters;
  const float* mean;  // null: 0
  const float* rstd;
  long long rows;  // of x: less than the cast's where it pads
};

struct Fp8Args : fp8::CastArgs {
  Source source;
};

struct BlockArgs : fp8_block::BlockArgs {
  Source source;
};

struct Mxfp8Args : mxfp8::Args {
  Source source;
};

// FP8 in x's order, where the row's statistics are found by the kernel that casts it.
struct CastRowsArgs {
  RowsArgs rows;
  fp8::CastArgs cast;
};

static_assert(sizeof(Parameters) == 32 && sizeof(RowsArgs) == 104 && sizeof(Source) == 56 &&
                  sizeof(Fp8Args) == 160 && sizeof(BlockArgs) == 160 && sizeof(Mxfp8Args) == 144 &&
                  sizeof(CastRowsArgs) == 208,
              "host and device compilers must lay these out alike");

// A block of threads takes kRows rows at once.
struct RowsShape {
  static constexpr int kRows = 2;
  static constexpr int kThreads = kRows * kGroup;
  static constexpr int kBlocksPerSM = 4;
  static constexpr int kHeld = 8;  // vectors of a row that a thread keeps; it loads more of them again
};

}  // namespace norm
}  // namespace tejit
