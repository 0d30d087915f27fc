// What the host launches and the device compiles with. Read by g++, nvcc and NVRTC alike, so it includes
// nothing.
#pragma once

namespace tejit {
namespace nvfp4 {

constexpr int kBlock = 16;       // elements that share a scale
constexpr int kScaleRows = 128;  // what a buffer of scales is padded to
constexpr int kScaleCols = 4;

// Modes of a call, as bits of `flags`.
constexpr int kRht = 1;         // columnwise data is of the transformed x
constexpr int kSquare = 2;      // one scale for 16x16 elements
constexpr int kSwizzled = 4;    // scales in the order of the GEMM
constexpr int kLineScaled = 8;  // an amax for each row (columnwise: column), not for the tensor

enum Dtype { kF32 = 0, kF16 = 1, kBF16 = 2 };

// A direction's results: packed codes, scales, and the amax that they mean. data is null where it is not
// wanted.
struct Direction {
  unsigned char* data;
  unsigned char* scale_inv;
  const float* amax;  // `count` partial maxima, or one for each line
  float* amax_out;
  int count;
};

// x is rows * cols, contiguous.
struct CastArgs {
  const void* x;
  Direction row;
  Direction col;
  const long long* seed;  // (seed, offset) of stochastic rounding; null: to nearest
  const float* noop;      // null, or 1.0 there: nothing is written
  long long rows;
  long long cols;
  float e4m3_max;
  unsigned sign_mask;
  int flags;
  int four_over_six;  // 0 no, 1 mean absolute error, 2 mean square error
  int dtype;
};

// Partial maxima of |x|, and of the transformed |x|: partial[blockIdx.x] of each. A null is not wanted.
// kLineScaled: the maximum of each row in row[], of each column in col[].
struct AmaxArgs {
  const void* x;
  float* row;
  float* col;
  const float* noop;
  long long rows;
  long long cols;
  unsigned sign_mask;
  int flags;
  int dtype;
};

static_assert(sizeof(Direction) == 40 && sizeof(CastArgs) == 144 && sizeof(AmaxArgs) == 64,
              "host and device compilers must lay these out alike");

// A thread holds one block of 16 elements and the next one.
struct RowShape {
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerSM = 5;
};

// Tiles of 128 rows of x by 64 columns: whole tiles of swizzled scales, and whole sectors of both outputs.
struct TileShape {
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerSM = 3;
  static constexpr int kRows = 128;
  static constexpr int kCols = 64;
};

// 16 rows of x by 128 columns a warp.
struct RhtAmaxShape {
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerSM = 3;
  static constexpr int kCols = 128;
};

// One block of elements a thread, in any mode, of any dtype, at any address.
struct AnyShape {
  static constexpr int kThreads = 128;
  static constexpr int kBlocksPerSM = 6;
};

// 32 rows at once (or, of columns, 32 columns).
struct LineShape {
  static constexpr int kThreads = 1024;
  static constexpr int kBlocksPerSM = 2;
  static constexpr int kLines = 32;
};

}  // namespace nvfp4
}  // namespace tejit
