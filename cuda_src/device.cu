// An architecture part: the kernels of every format, and what finds them by name. Each file below can be
// compiled as a unit of its own, on a machine with many processors; the one that takes longest comes first.
#include "norm/norm_fp8.cu"
#include "norm/norm.cu"
#include "nvfp4/nvfp4.cu"
#include "fused/fused.cu"
#include "fp8_block/block.cu"
#include "fp8/current.cu"
#include "mxfp8/mxfp8.cu"
#include "common/part.cu"
