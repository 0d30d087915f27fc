// Casts whose input is computed as it is loaded: the parameters of the format's kernel, and where the input
// comes from. Read by g++, nvcc and NVRTC alike.
#pragma once

#include "fp8/args.h"
#include "fp8_block/args.h"
#include "mxfp8/args.h"

namespace tejit {
namespace fused {

// Of a norm. dtypes: 0 float32, 1 float16, 2 bfloat16
struct Parameters {
  const void* weight;  // null: 1
  const void* bias;    // null: none is added
  int weight_dtype;
  int bias_dtype;
  int zero_centered;  // the weight holds gamma - 1
  int unused;
};

// A smooth activation in numbers: m * sigmoid(x * (cubic * x^2 + linear)), m being x, no less than `floor`
// and no more than `ceiling`. The host chooses them, so the device need not choose for each element.
struct Curve {
  float cubic, linear;
  float floor, ceiling;
};

// What a cast reads of x: the norm of its rows, or an activation. One set of kernels serves both, which the
// compiler has to go over once.
struct Source {
  Parameters parameters;
  const float* mean;  // null: 0
  const float* rstd;
  const void* gate;  // the second half of x's first row, where the activation is gated, or null
  long long rows;    // of x: less than the cast's where it pads
  long long pitch;   // elements from row to row of x
  int activation;    // its kind, or kNorm
  int unused;
  Curve curve;  // of an activation
};

constexpr int kNorm = -1;

template <typename Base>
struct With : Base {
  Source source;
};

// FP8 in x's order, by a kernel that takes whole rows.
template <typename Rows>
struct CastRows {
  Rows rows;
  fp8::CastArgs cast;
};

static_assert(sizeof(Parameters) == 32 && sizeof(Source) == 96 && sizeof(With<fp8::CastArgs>) == 200 &&
                  sizeof(With<fp8_block::BlockArgs>) == 200 && sizeof(With<mxfp8::Args>) == 184,
              "host and device compilers must lay these out alike");

// Gamma and beta, or what an activation needs, take a thread registers that plain kernels do not need.
struct BlockRowShape : fp8_block::RowShape<2> {
  static constexpr int kBlocksPerSM = 2;
};
struct BlockTiles : fp8_block::TransposeShape<2> {
  static constexpr int kBlocksPerSM = 3;
};
struct Tiles : fp8::TileShape {
  static constexpr int kBlocksPerSM = 3;
};

}  // namespace fused
}  // namespace tejit
