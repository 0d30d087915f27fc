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

// The kernels over rows hold kHeld vectors of a row a thread, and where rows have no more than these also
// gamma and beta of their columns. What a longer row has more is loaded whenever it is needed, and so are its
// gamma and beta.
enum class Length { kShort, kMiddle, kAny };

template <Length kLength>
struct RowsShape {
  static constexpr int kThreads = norm::kThreads;
  static constexpr int kHeld = kLength == Length::kShort ? 2 : 4;
  static constexpr int kBlocksPerSM = kLength == Length::kMiddle ? 2 : 3;
  static constexpr long long kLongest = static_cast<long long>(kHeld) * kSums;  // but for kAny
};

// Of x, that a kernel finds in L2 when it begins with what the one before it read last; in bytes.
constexpr long long kKeptInL2 = 32 << 20;

struct StatisticsShape {
  static constexpr int kThreads = norm::kThreads;
  static constexpr int kBlocksPerSM = 4;
};

// A thread has a vector of columns, and goes down rows with it.
struct KnownShape {
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerSM = 4;
  static constexpr int kRows = 16;  // of a block
  static constexpr int kTurn = 4;   // rows that are loaded at once
};

struct AnyRowsShape {
  static constexpr int kThreads = norm::kThreads;
  static constexpr int kBlocksPerSM = 4;
};

}  // namespace norm
}  // namespace tejit
