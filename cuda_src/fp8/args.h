// What the host launches and the device compiles with: one parameter block a kernel, and the shapes of blocks
// and tiles. Read by g++, nvcc and NVRTC alike, so it includes nothing.
#pragma once

namespace tejit {
namespace fp8 {

// A partial maximum of |x| for every block: partial[blockIdx.x]. With one block that is the amax itself.
struct AmaxArgs {
  const void* x;
  float* partial;
  const float* noop;  // null, or 1.0 there: nothing is written
  long long n;
  int half;  // x is float16, else float32; of no account to a kernel for bfloat16
};

// The maximum of `count` partial maxima.
struct AmaxFinishArgs {
  const float* partial;
  float* amax;
  int count;
};

struct ScaleArgs {
  const float* amax;
  float* scale;
  float* scale_inv;
  float fp8_max;
  float eps;
  int pow2;
};

// x is rows * cols, contiguous. amax[0..amax_count) are partial maxima (one: the amax itself, which may be
// NaN), from which the scale follows; or `scale` is given, and new_amax becomes max(new_amax, max|x|).
struct CastArgs {
  const void* x;
  unsigned char* row;  // rows * cols, or null
  unsigned char* col;  // the transpose, cols * rows, or null
  const float* amax;
  const float* scale;  // null where amax counts
  float* new_amax;     // null where amax counts
  float* scale_inv;
  const float* noop;  // null, or 1.0 there: nothing is written
  long long rows;
  long long cols;
  int amax_count;
  int pow2;
  float eps;
  int half;  // as in AmaxArgs
  int fp8;   // 0: E4M3, 1: E5M2
};

static_assert(sizeof(AmaxArgs) == 40 && sizeof(AmaxFinishArgs) == 24 && sizeof(ScaleArgs) == 40 &&
                  sizeof(CastArgs) == 104,
              "host and device compilers must lay these out alike");

// Reads of x go backwards in the first pass and forwards in the second: an input that was just written is
// still partly in L2 at its end, and what the first pass read last is what the second reads first.
struct AmaxShape {
  static constexpr int kThreads = 1024;
  static constexpr int kVectors = 4;  // 16-byte loads in flight a thread
  static constexpr int kBlocksPerSM = 1;
};

// A block of threads moves one chunk.
struct CastShape {
  static constexpr int kThreads = 256;
  static constexpr int kVectors = 8;
  static constexpr int kBlocksPerSM = 4;
};

// A block of threads moves one tile of kRows rows by kLanes 16-byte vectors.
struct TileShape {
  static constexpr int kThreads = 256;
  static constexpr int kRows = 128;
  static constexpr int kLanes = 16;
  static constexpr int kBlocksPerSM = 4;
};

}  // namespace fp8
}  // namespace tejit
