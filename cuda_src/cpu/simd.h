// The few vector operations that the host kernels are written in, at the instruction level this build is for.
// Each level gives the same bits. Every operation is the same small function at all levels:
//
// - Int, Float, kBytes: a register of kBytes bytes, seen as integers or as float32.
// - load, store: any address.
// - stream, fence: a store past the caches, address a multiple of kBytes; a thread that streamed calls fence.
// - fill16, fill32, fill: one value in every lane.
// - as_int, as_float: the same bits.
// - mul, min, max, mul_add: float32; min and max give b where a is NaN; mul_add(a, b, c) is a * b + c for an
//   exact a * b.
// - add32, sub16, sub32, shl32<n>, shr32<n>, shr16<n>, shr32(v, n): integer lanes; the last n is a
//   register of equal lanes.
// - or_and(a, b, mask): a | (b & mask).
// - where_gt16/32(a, b, yes, no): yes where a > b, as signed lanes.
// - max_upto16/32(acc, a, limit): the larger of acc and a in lanes with a <= limit, acc elsewhere, as signed
//   lanes >= 0.
// - merge_odd(even, odd): 16-bit lanes: the even ones of `even`, and in the odd places those of
//   `odd`.
// - pack16(a, b), pack32(a, b, c, d): lanes of 16 or 32 bits to bytes, in order; every lane is < 256.
// - load_lanes(p, stride): 16 bytes each from p, p + stride, ... side by side.
// - largest32(v): the largest of the 32-bit lanes, all >= 0 as signed numbers.
// - zip_lo, zip_hi: interleave the bytes of the lower (upper) halves of each 16-byte part.
#pragma once

#if defined(TEJIT_CPU_AVX512)
#include "simd_avx512.h"
#elif defined(TEJIT_CPU_AVX2)
#include "simd_avx2.h"
#else
#include "simd_plain.h"
#endif
