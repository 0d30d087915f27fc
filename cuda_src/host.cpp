// The host part: the CPU and CUDA kernels of ops whose schemas Python registers, and what tejit/jit calls.
// Loads without CUDA, without a driver, in every torch from 2.11 on. Each file below can be compiled as a
// unit of its own, on a machine with many processors; the one that takes longest comes first.
#include "nvfp4/host.cpp"
#include "mxfp8/host.cpp"
#include "fp8_block/host.cpp"
#include "fp8/host.cpp"
#include "fp8/delayed_host.cpp"
#include "norm/host.cpp"
#include "activation/host.cpp"
#include "common/exports.cpp"
