// The kernels of FP8 with one scale a tensor, by the plain names that the host asks for.
#include "common/find.cuh"
#include "fp8/amax.cuh"
#include "fp8/cast.cuh"
#include "fp8/transpose.cuh"

namespace tejit {
namespace fp8 {

using AmaxFill = AmaxPlan<AmaxShape::kThreads, AmaxShape::kVectors, true>;
using CastFill = CastPlan<CastShape::kThreads, CastShape::kVectors>;
using TileFill = TilePlan<TileShape::kThreads, TileShape::kRows, TileShape::kLanes>;

}  // namespace fp8
}  // namespace tejit

#define TEJIT_FP8_AMAX(NAME, T)                                                     \
  extern "C" __global__ void __launch_bounds__(tejit::fp8::AmaxShape::kThreads,     \
                                               tejit::fp8::AmaxShape::kBlocksPerSM) \
      NAME(const __grid_constant__ tejit::fp8::AmaxArgs args) {                     \
    tejit::fp8::amax_partial<tejit::T, tejit::fp8::AmaxFill>(args);                 \
  }

#define TEJIT_FP8_CAST(NAME, T)                                                     \
  extern "C" __global__ void __launch_bounds__(tejit::fp8::CastShape::kThreads,     \
                                               tejit::fp8::CastShape::kBlocksPerSM) \
      NAME(const __grid_constant__ tejit::fp8::CastArgs args) {                     \
    tejit::fp8::cast_rowwise<tejit::T, tejit::fp8::CastFill>(args);                 \
  }

#define TEJIT_FP8_TILE(NAME, T)                                                     \
  extern "C" __global__ void __launch_bounds__(tejit::fp8::TileShape::kThreads,     \
                                               tejit::fp8::TileShape::kBlocksPerSM) \
      NAME(const __grid_constant__ tejit::fp8::CastArgs args) {                     \
    tejit::fp8::cast_transpose<tejit::T, tejit::fp8::TileFill>(args);               \
  }

TEJIT_FP8_AMAX(tejit_fp8_amax_any, Any)
TEJIT_FP8_AMAX(tejit_fp8_amax_bf16, BF16)
TEJIT_FP8_CAST(tejit_fp8_cast_any, Any)
TEJIT_FP8_CAST(tejit_fp8_cast_bf16, BF16)
TEJIT_FP8_TILE(tejit_fp8_cast_transpose_any, Any)
TEJIT_FP8_TILE(tejit_fp8_cast_transpose_bf16, BF16)

extern "C" __global__ void __launch_bounds__(1024)
    tejit_fp8_amax_finish(const __grid_constant__ tejit::fp8::AmaxFinishArgs args) {
  tejit::fp8::amax_finish<1024>(args);
}

extern "C" __global__ void tejit_fp8_scale(const __grid_constant__ tejit::fp8::ScaleArgs args) {
  tejit::fp8::scale_of_amax(args);
}

#define TEJIT_FP8_KERNELS(X)      \
  X(tejit_fp8_amax_any)           \
  X(tejit_fp8_amax_bf16)          \
  X(tejit_fp8_amax_finish)        \
  X(tejit_fp8_scale)              \
  X(tejit_fp8_cast_any)           \
  X(tejit_fp8_cast_bf16)          \
  X(tejit_fp8_cast_transpose_any) \
  X(tejit_fp8_cast_transpose_bf16)

TEJIT_FIND(fp8, TEJIT_FP8_KERNELS)
