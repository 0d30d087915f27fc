// Gives a function of the device a plain name, under which the host asks for it as a kernel.
#pragma once

#define TEJIT_FUSED_KERNEL(NAME, FUNCTION, SHAPE, ...)                                             \
  extern "C" __global__ void __launch_bounds__(tejit::SHAPE::kThreads, tejit::SHAPE::kBlocksPerSM) \
      NAME(const __grid_constant__ __VA_ARGS__ args) {                                             \
    tejit::FUNCTION(args);                                                                         \
  }
