// What the host part asks a shared object for, by kernel; each file of kernels knows its own.
#ifndef __CUDACC_RTC__
#define TEJIT_FILES(X) X(norm_fp8) X(norm) X(nvfp4) X(fused) X(fp8_block) X(fp8) X(activation) X(mxfp8)

namespace tejit {
#define TEJIT_DECLARE(FILE) __attribute__((visibility("hidden"))) void* find_##FILE(const char* name);
TEJIT_FILES(TEJIT_DECLARE)
#undef TEJIT_DECLARE
}  // namespace tejit

extern "C" __attribute__((visibility("default"))) void* tejit_part_kernel(const char* name) {
#define TEJIT_ASK(FILE) \
  if (void* kernel = tejit::find_##FILE(name)) return kernel;
  TEJIT_FILES(TEJIT_ASK)
#undef TEJIT_ASK
  return nullptr;
}
#endif
