// The one unit of an architecture part: the kernels of every format, then what finds them by name.
#include "fp8/current.cu"
#include "fp8_block/block.cu"
#include "fused/fused.cu"
#include "mxfp8/mxfp8.cu"
#include "nvfp4/nvfp4.cu"

// A cubin is asked through the driver; a shared object through this function. No header is included for it:
// then NVRTC's build need not look for any.
#ifndef __CUDACC_RTC__
extern "C" __attribute__((visibility("default"))) void* tejit_part_kernel(const char* name) {
  static const struct {
    const char* name;
    const void* function;
  } kTable[] = {
#define TEJIT_ENTRY(NAME) {#NAME, reinterpret_cast<const void*>(&NAME)},
      TEJIT_FP8_KERNELS(TEJIT_ENTRY)
#undef TEJIT_ENTRY
#define TEJIT_ENTRY(NAME, ...) {#NAME, reinterpret_cast<const void*>(&NAME)},
          TEJIT_FP8_BLOCK_EVERY(TEJIT_ENTRY) TEJIT_MXFP8_EVERY(TEJIT_ENTRY) TEJIT_NVFP4_KERNELS(TEJIT_ENTRY)
              TEJIT_FUSED_KERNELS(TEJIT_ENTRY)
#undef TEJIT_ENTRY
  };
  for (const auto& entry : kTable) {
    if (__builtin_strcmp(entry.name, name) == 0) {
      cudaKernel_t kernel = nullptr;
      return cudaGetKernel(&kernel, entry.function) == cudaSuccess ? static_cast<void*>(kernel) : nullptr;
    }
  }
  return nullptr;
}
#endif
