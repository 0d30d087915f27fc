// Threads and floating-point state of the host kernels.
#pragma once

#include <cstdint>

#include <torch/csrc/stable/ops.h>

#if defined(__SSE__) || defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace tejit::cpu {

// Round to nearest even, subnormals kept, nothing trapped, for as long as the object lives.
// torch.set_flush_denormal changes these modes in one thread only, so without this a result would depend on
// who calls and on how many threads work. A compiler knows nothing of the modes and may move arithmetic
// across the change. So what is computed under this object stands in a function that writes to memory and is
// not inlined (TEJIT_NOINLINE), or between two calls of pin.
class DefaultFloatModes {
 public:
  DefaultFloatModes() : saved_(read()) { write(kDefault); }
  ~DefaultFloatModes() { write(saved_); }
  DefaultFloatModes(const DefaultFloatModes&) = delete;
  DefaultFloatModes& operator=(const DefaultFloatModes&) = delete;

 private:
#if defined(__SSE__) || defined(__x86_64__)
  using Register = uint32_t;
  static constexpr Register kDefault = 0x1F80;  // MXCSR at process start: all exceptions masked
  static Register read() { return _mm_getcsr(); }
  static void write(Register value) { _mm_setcsr(value); }
#elif defined(__aarch64__)
  using Register = uint64_t;
  static constexpr Register kDefault = 0;
  static Register read() {
    Register value;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void write(Register value) { asm volatile("msr fpcr, %0" : : "r"(value)); }
#else
  using Register = int;
  static constexpr Register kDefault = 0;
  static Register read() { return 0; }
  static void write(Register) {}
#endif
  Register saved_;
};

#define TEJIT_NOINLINE __attribute__((noinline))

// What comes after cannot be computed before, what came before not after.
inline void pin(float& value) {
  asm volatile("" : "+m"(value));
}

// f(begin, end) over parts of [0, n) in torch's own threads; a thread gets one part, of at least `grain`
// items. For equal n and grain the parts are the same in every call: what a thread read in one pass is in its
// cache in the next. f must not throw.
template <class F>
inline void parallel_for(int64_t n, int64_t grain, const F& f) {
  torch::stable::parallel_for(0, n, grain, [&f](int64_t begin, int64_t end) {
    DefaultFloatModes modes;
    f(begin, end);
  });
}

}  // namespace tejit::cpu
