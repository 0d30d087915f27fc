// How the host part finds a kernel by its name: a cubin is asked through the driver, a shared object through
// the functions made here, one a file of kernels. No header is included for them: then NVRTC's build need not
// look for any.
#pragma once

#ifndef __CUDACC_RTC__
#define TEJIT_ENTRY(NAME, ...) {#NAME, reinterpret_cast<const void*>(&NAME)},

// find_FILE(name): the handle of a kernel of LIST, which names each as X(NAME, ...); null where it has no
// such one.
#define TEJIT_FIND(FILE, LIST)                                                                             \
  namespace tejit {                                                                                        \
  __attribute__((visibility("hidden"))) void* find_##FILE(const char* name) {                              \
    static const struct {                                                                                  \
      const char* name;                                                                                    \
      const void* function;                                                                                \
    } kTable[] = {LIST(TEJIT_ENTRY)};                                                                      \
    for (const auto& entry : kTable) {                                                                     \
      if (__builtin_strcmp(entry.name, name) != 0) continue;                                               \
      cudaKernel_t kernel = nullptr;                                                                       \
      return cudaGetKernel(&kernel, entry.function) == cudaSuccess ? static_cast<void*>(kernel) : nullptr; \
    }                                                                                                      \
    return nullptr;                                                                                        \
  }                                                                                                        \
  }
#else
#define TEJIT_FIND(FILE, LIST)
#endif
