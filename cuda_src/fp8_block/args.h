// What the host launches and the device compiles with. Read by g++, nvcc and NVRTC alike, so it includes
// nothing.
#pragma once

namespace tejit {
namespace fp8_block {

constexpr int kBlock = 128;

// x is rows * cols, contiguous. A direction's two pointers are null where it is not wanted. A row of scales
// has row_pitch (col_pitch) entries; those behind the last block are written as 0.
struct BlockArgs {
  const void* x;
  unsigned char* row;  // rows * cols
  unsigned char* col;  // the transpose, cols * rows
  float* row_scale_inv;
  float* col_scale_inv;
  const float* noop;  // null, or 1.0 there: nothing is written
  long long rows;
  long long cols;
  long long row_pitch;
  long long col_pitch;
  float eps;
  float limit;  // replaces a scale that overflows: the largest value of the op's input dtype
  int pow2;
  int fp8;   // 0: E4M3, 1: E5M2
  int half;  // x is float16, else float32; of no account to a kernel for bfloat16
};

static_assert(sizeof(BlockArgs) == 104, "host and device compilers must lay it out alike");

// Threads of a block, and how many blocks a multiprocessor holds, by the size of x's elements in registers: a
// thread holds eight vectors of four (float32) or eight (bfloat16) elements.
template <int kBytes>
struct RowShape {
  static constexpr int kThreads = 512;
  static constexpr int kBlocksPerSM = kBytes == 4 ? 2 : 3;
};

template <int kBytes>
struct TransposeShape {
  static constexpr int kThreads = kBytes == 4 ? 512 : 256;
  static constexpr int kBlocksPerSM = kBytes == 4 ? 2 : 4;
};

}  // namespace fp8_block
}  // namespace tejit
