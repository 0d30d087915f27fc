// Everything that needs inline PTX: wide loads and stores with cache hints, packed min/max, conversions, byte
// permutation, programmatic dependent launch. No header is included, so that nvcc and NVRTC read the same
// text fast.
#pragma once

namespace tejit {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

#define TEJIT_DEVICE __device__ __forceinline__

// How a load treats the caches. Nothing here is read twice by one SM, but what passes L1 by (kPlain) is
// treated otherwise in L2 too: beside streamed stores, a cast that loads so takes 5 to 8% longer on an H200
// or does not, by what other kernels left there. kCached never did.
enum class Load { kPlain, kCached };
// kStream marks the written lines as the first to leave L2.
enum class Store { kPlain, kStream };

TEJIT_DEVICE u64 evict_first_policy() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

TEJIT_DEVICE u64 evict_normal_policy() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Volatile only to keep the order in which the kernels issue them: several loads first, then the first use.
template <Load kLoad>
TEJIT_DEVICE uint4 load16(const void* p) {
  uint4 v;
  if constexpr (kLoad == Load::kCached) {
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
  } else {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
  }
  return v;
}

TEJIT_DEVICE uint2 load8(const void* p) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}

TEJIT_DEVICE u32 load4(const void* p) {
  u32 v;
  asm("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}

TEJIT_DEVICE u16 load2(const void* p) {
  u16 v;
  asm("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(p));
  return v;
}

// A value that an earlier kernel of the same stream may still be writing when this one starts (programmatic
// dependent launch): never through the read-only path. L1 may keep it: thousands of warps that ask L2 for one
// line wait for each other.
TEJIT_DEVICE float load_shared_value(const float* p) {
  float v;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}

template <Store kStore>
TEJIT_DEVICE void store16(void* p, uint4 v) {
  if constexpr (kStore == Store::kStream) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
  } else {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
  }
}

template <Store kStore>
TEJIT_DEVICE void store8(void* p, u32 lo, u32 hi) {
  if constexpr (kStore == Store::kStream) {
    asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(lo), "r"(hi) : "memory");
  } else {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(lo), "r"(hi) : "memory");
  }
}

template <Store kStore>
TEJIT_DEVICE void store4(void* p, u32 v) {
  if constexpr (kStore == Store::kStream) {
    asm volatile("st.global.cs.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
  } else {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
  }
}

// Maxima of |a| and |b|, two packed numbers each; a NaN gives way to the other operand, subnormals count. The
// signs of the result mean nothing.
TEJIT_DEVICE u32 max_abs_bf16x2(u32 a, u32 b) {
  u32 m;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
#else
  asm("max.bf16x2 %0, %1, %2;" : "=r"(m) : "r"(a & 0x7fff7fffu), "r"(b & 0x7fff7fffu));
#endif
  return m;
}

TEJIT_DEVICE float f32_of_f16(u16 h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}

// Rounded to nearest even; beyond the largest number inf.
TEJIT_DEVICE u16 f16_of(float f) {
  u16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}

// Packed bfloat16 by magnitude. The larger |x|, a NaN before every number; its sign is left over from both.
TEJIT_DEVICE u32 max_abs_or_nan_bf16x2(u32 a, u32 b) {
  u32 m;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
#else
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(m) : "r"(a & 0x7fff7fffu), "r"(b & 0x7fff7fffu));
#endif
  return m;
}

// Products of packed bfloat16.
TEJIT_DEVICE u32 multiply_bf16x2(u32 a, u32 b) {
  u32 p;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(p) : "r"(a), "r"(b));
#else
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(p) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
  return p;
}

// a * b, and 1 where that is more; NaN becomes 0.
TEJIT_DEVICE float multiply_up_to_1(float a, float b) {
  float p;
  asm("mul.rn.sat.f32 %0, %1, %2;" : "=f"(p) : "f"(a), "f"(b));
  return p;
}

// 1 / d to nearest, for d from 1 to 2^126: the division of those numbers without the branch for others. The
// approximation is off by a unit in the last place at most; one step of Newton's then rounds right.
TEJIT_DEVICE float reciprocal_from_1(float d) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
  return __fmaf_rn(r, __fmaf_rn(-d, r, 1.0f), r);
}

// Whether |f| is from 2^-40 to below 2^101, where no step of the next function leaves the normal numbers.
TEJIT_DEVICE bool in_middle_range(float f) {
  constexpr u32 kLow = (127 - 40) << 23, kPast = (127 + 101) << 23;
  return (__float_as_uint(f) & 0x7fffffffu) - kLow < kPast - kLow;
}

// 1 / sqrt(f), root and quotient each rounded to nearest, for positive numbers in the middle range. Each
// approximation is off by a unit in the last place at most; one step of Newton's, with the residual exact,
// then rounds right.
TEJIT_DEVICE float reciprocal_root(float f) {
  float y, r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(f));
  const float near = __fmul_rn(f, y);
  const float root = __fmaf_rn(__fmaf_rn(-near, near, f), __fmul_rn(0.5f, y), near);
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(root));
  return __fmaf_rn(r, __fmaf_rn(-root, r, 1.0f), r);
}

// Rounded to nearest even; `lo` in the lower half.
TEJIT_DEVICE u32 bf16x2_of(float lo, float hi) {
  u32 w;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(hi), "f"(lo));
  return w;
}

// a * b toward zero.
TEJIT_DEVICE float multiply_down(float a, float b) {
  float p;
  asm("mul.rz.f32 %0, %1, %2;" : "=f"(p) : "f"(a), "f"(b));
  return p;
}

// The smallest of three numbers below 2^31, as one instruction where there is one.
TEJIT_DEVICE u32 min3(u32 a, u32 b, u32 c) {
  return static_cast<u32>(min(min(static_cast<int>(a), static_cast<int>(b)), static_cast<int>(c)));
}

// 16 bytes that lie beside others of the same thread: the line stays in L1 until the next load takes the
// rest.
TEJIT_DEVICE uint4 load16_shared_line(const void* p, u64 policy) {
  uint4 v;
  asm volatile("ld.global.nc.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p), "l"(policy));
  return v;
}

// 16 bytes from global to shared memory in the background, or zeros where they are not `there`.
TEJIT_DEVICE void copy16(void* shared, const void* global, bool there, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(
                   static_cast<u32>(__cvta_generic_to_shared(shared))),
               "l"(global), "r"(there ? 16 : 0), "l"(policy)
               : "memory");
}

// The address of a thread's part of shared memory. As a number and not as a pointer it stays in a register;
// of a pointer the compiler makes it anew at every use.
TEJIT_DEVICE u32 shared_address(const void* p) {
  u32 address = static_cast<u32>(__cvta_generic_to_shared(p));
  asm volatile("" : "+r"(address));
  return address;
}

TEJIT_DEVICE void copy16(u32 shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

TEJIT_DEVICE void copy16(u32 shared, const void* global, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "l"(policy)
               : "memory");
}

// Volatile keeps it behind wait_for_copies.
TEJIT_DEVICE uint4 load16_shared(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

TEJIT_DEVICE void store4_shared(u32 address, u32 v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

// The same value, of which the compiler does not know how it came about, and which it thus keeps in a
// register instead of making it anew at every use.
template <typename T>
TEJIT_DEVICE T* kept(T* p) {
  asm volatile("" : "+l"(p));
  return p;
}

TEJIT_DEVICE float kept(float f) {
  asm volatile("" : "+f"(f));
  return f;
}

TEJIT_DEVICE int kept(int i) {
  asm volatile("" : "+r"(i));
  return i;
}

// The line at an address to L2, for a load that comes later.
TEJIT_DEVICE void prefetch_line(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// What is left of a dimension, as an int: tiles and chunks are small, tensors need not be.
TEJIT_DEVICE int clamp_left(i64 left) {
  return left < (1 << 30) ? static_cast<int>(left) : (1 << 30);
}

// The same words, of which the compiler knows nothing: what it made of them before, it makes again instead of
// keeping it in registers.
TEJIT_DEVICE uint4 forgotten(uint4 v) {
  asm("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w));
  return v;
}

TEJIT_DEVICE u32 permute(u32 a, u32 b, u32 selector) {
  return __byte_perm(a, b, selector);
}

// For all copies of this thread.
TEJIT_DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Programmatic dependent launch (compute capability 9.0 and up; nothing before it).
// The kernel after this one may start, as far as there is room beside this one.
TEJIT_DEVICE void allow_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// All that the kernel before this one wrote is visible afterwards.
TEJIT_DEVICE void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace tejit
