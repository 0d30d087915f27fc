// The kernels of MXFP8, by the plain names that the host asks for.
#include "common/find.cuh"
#include "mxfp8/quantize.cuh"

#define TEJIT_MXFP8(NAME, T, SHAPE)                                               \
  extern "C" __global__ void __launch_bounds__(tejit::mxfp8::SHAPE::kThreads,     \
                                               tejit::mxfp8::SHAPE::kBlocksPerSM) \
      NAME(const __grid_constant__ tejit::mxfp8::Args args) {                     \
    if (tejit::fp8::is_noop(args.noop)) return;                                   \
    tejit::mxfp8::Quantize<tejit::mxfp8::T, tejit::mxfp8::Args>(args).run();      \
  }

#define TEJIT_MXFP8_EVERY(X)              \
  X(tejit_mxfp8_bf16, Vectors, Bf16Shape) \
  X(tejit_mxfp8_any, Words, AnyShape)

TEJIT_MXFP8_EVERY(TEJIT_MXFP8)
TEJIT_FIND(mxfp8, TEJIT_MXFP8_EVERY)
