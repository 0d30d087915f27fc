// What the host launches and the device compiles with. Read by g++, nvcc and NVRTC alike, so it includes
// nothing.
#pragma once

namespace tejit {
namespace mxfp8 {

constexpr int kBlock = 32;
// A buffer of scales is padded to multiples of these, along the outer dimension and along the blocks.
constexpr int kOuter = 128;
constexpr int kInner = 4;

// x is rows * cols, contiguous. A direction's two pointers are null where it is not wanted. Scales fill their
// padded buffers; what lies behind the last row, column or block is written as 0.
struct Args {
  const void* x;
  unsigned char* row;  // rows * cols
  unsigned char* col;  // the same order
  unsigned char* row_scales;
  unsigned char* col_scales;
  const float* noop;  // null, or 1.0 there: nothing is written
  long long rows;
  long long cols;
  int fp8;       // 0 E4M3, 1 E5M2
  int square;    // one scale for 32x32
  int swizzled;  // scales in the order that the GEMM reads
  int dtype;     // 0 float32, 1 float16, 2 bfloat16
  int wide;      // whether all addresses allow a thread's elements to move at once
  int unused;
};

static_assert(sizeof(Args) == 88, "host and device compilers must lay it out alike");

// A warp moves tiles of 32 rows by 8 threads' elements: 8 of bfloat16 or, in the kernel for the rest, 4.
constexpr int kLanes = 8;

struct Bf16Shape {
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerSM = 3;
  static constexpr int kPer = 8;
};

struct AnyShape {
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerSM = 2;
  static constexpr int kPer = 4;
};

}  // namespace mxfp8
}  // namespace tejit
