// Statistics of rows, with what else a row in registers can give: the norm itself, its maximum, its FP8
// bytes.
#pragma once

#include "common/element.cuh"
#include "common/reduce.cuh"
#include "fp8/convert.cuh"
#include "fp8/scale.cuh"
#include "fused/args.h"
#include "norm/source.cuh"

namespace tejit {
namespace norm {

// The last steps of the fixed order (see args.h): a thread's own sums.
TEJIT_DEVICE float sum_of_thread(const float (&s)[kThreadSums]) {
  return __fadd_rn(__fadd_rn(__fadd_rn(s[0], s[4]), __fadd_rn(s[2], s[6])),
                   __fadd_rn(__fadd_rn(s[1], s[5]), __fadd_rn(s[3], s[7])));
}

// Those of a block's warps, as they lie in memory.
TEJIT_DEVICE float sum_of_warps(uint4 a, uint4 b) {
  const auto add = [](u32 one, u32 other) { return __fadd_rn(__uint_as_float(one), __uint_as_float(other)); };
  return __fadd_rn(__fadd_rn(add(a.x, b.x), add(a.z, b.z)), __fadd_rn(add(a.y, b.y), add(a.w, b.w)));
}

// A warp's part for two sums at once: threads 0 to 15 get the first, the `upper` ones the second.
TEJIT_DEVICE float sum_of_warp(float first, float second, bool upper) {
  float t = __fadd_rn(upper ? second : first, __shfl_xor_sync(0xffffffffu, upper ? first : second, 16));
#pragma unroll
  for (int stride = 8; stride > 0; stride /= 2) t = __fadd_rn(t, __shfl_xor_sync(0xffffffffu, t, stride));
  return t;
}

// What a kernel over rows makes beside their statistics.
enum class Makes { kNothing, kNorm, kCast };

template <Makes kMakes>
struct OutputOf {
  using Type = u16;
};
template <>
struct OutputOf<Makes::kCast> {
  using Type = u8;
};

// A row needs its mean before its squares and these before its output, and both are sums over all threads. In
// one turn a block squares a row, of which it knows the mean, and adds up the next one, so that there is one
// barrier a row; the row after that is on its way meanwhile.
template <Makes kMakes, Length kLength>
struct NormRows {
  using Out = typename OutputOf<kMakes>::Type;
  static constexpr int kHeld = RowsShape<kLength>::kHeld;
  static constexpr bool kNormalises = kMakes != Makes::kNothing;
  static constexpr bool kReadAgain = kMakes == Makes::kNothing;  // x, by the next kernel
  static constexpr bool kKeepsAffine = kNormalises && kLength != Length::kAny;

  struct Shared {
    uint4 slots[2][kHeld][kThreads];        // of rows; each thread reads only what it copied itself
    alignas(128) float sums[2][2][kWarps];  // of the next row, and of this one's squares; turns alternate
  };

  const RowsArgs& args;
  const fp8::CastArgs* const cast;
  Shared& shared;
  const int thread;
  const int vectors;                // of a row, from the thread's first on: it has every kThreads-th
  const u64 ordinary, first_to_go;  // policies of L2
  const bool centered, upper;       // of a warp's threads the lower half has the mean, the upper one rstd
  const float count;                // of a row's elements
  float inverse;                    // of it
  float scale = 0.0f;
  u32 m = 0;
  Affine affine[kKeepsAffine ? kHeld : 1];

  TEJIT_DEVICE NormRows(const RowsArgs& a, const fp8::CastArgs* c, Shared& s)
      : args(a),
        cast(c),
        shared(s),
        thread(kept(static_cast<int>(threadIdx.x))),
        vectors(static_cast<int>(a.cols / 8) - thread),
        ordinary(evict_normal_policy()),
        first_to_go(evict_first_policy()),
        centered(args.mean != nullptr),
        upper(thread % 32 >= 16),
        count(static_cast<float>(args.cols)) {
    inverse = kept(__frcp_rn(count));
    for (int c = 0; c < kHeld; ++c) {
      if (!has(c)) s.slots[0][c][thread] = s.slots[1][c][thread] = make_uint4(0, 0, 0, 0);
    }
    if constexpr (kKeepsAffine) {
#pragma unroll
      for (int c = 0; c < kHeld; ++c) affine[c] = affine_of(c);
    }
  }

  TEJIT_DEVICE bool has(int c) const { return c * kThreads < vectors; }

  // 0 where the row has no such vector.
  TEJIT_DEVICE Affine affine_of(int c) const {
    Affine a = {};
    if (!has(c)) return a;
    load_affine(args.parameters, thread * 8 + c * kSums, a);
    settle_affine(args.parameters, a);
    return a;
  }

  // Rows of which L2 will keep nothing until the next kernel comes to them should not push out those it can.
  TEJIT_DEVICE void fetch(const u16* x, u32 slot) const {
    const bool once = x >= static_cast<const u16*>(args.x) + kKeptInL2 / 2;
    const u64 policy = once ? first_to_go : ordinary;
#pragma unroll
    for (int c = 0; c < kHeld; ++c) {
      if (!has(c)) continue;
      if constexpr (kReadAgain) {
        copy16(slot + c * kThreads * 16, x + c * kSums, policy);
      } else {
        copy16(slot + c * kThreads * 16, x + c * kSums);
      }
    }
  }

  // The vectors in a slot, which is given by the address of the thread's first. Those that a row has not are
  // 0 from the beginning: no branch is needed that would let one vector wait for another.
  TEJIT_DEVICE static void load(u32 slot, uint4 (&v)[kHeld]) {
#pragma unroll
    for (int c = 0; c < kHeld; ++c) v[c] = load16_shared(slot + c * kThreads * 16);
  }

  // f(v, c) for the vectors of a long row that no slot holds.
  template <typename F>
  TEJIT_DEVICE void each_other(const u16* x, const F& f) const {
    if constexpr (kLength == Length::kAny) {
#pragma unroll 1
      for (int c = kHeld; has(c); ++c) f(load16<Load::kCached>(x + c * kSums), c);
    }
  }

  TEJIT_DEVICE static void add(float (&s)[kThreadSums], uint4 v) {
    float f[8];
    BF16::widen(v, f);
#pragma unroll
    for (int j = 0; j < 8; ++j) s[j] = __fadd_rn(s[j], f[j]);
  }

  TEJIT_DEVICE static void add_squares(float (&s)[kThreadSums], uint4 v, float mean) {
    float f[8];
    BF16::widen(v, f);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float d = __fsub_rn(f[j], mean);
      s[j] = __fmaf_rn(d, d, s[j]);
    }
  }

  TEJIT_DEVICE float sum(const u16* x, u32 slot) const {
    float s[kThreadSums] = {};
    uint4 v[kHeld];
    load(slot, v);
#pragma unroll
    for (int c = 0; c < kHeld; ++c) add(s, v[c]);
    each_other(x, [&](uint4 w, int) { add(s, w); });
    return sum_of_thread(s);
  }

  TEJIT_DEVICE float squares(const u16* x, const uint4 (&v)[kHeld], float mean) const {
    float s[kThreadSums] = {};
#pragma unroll
    for (int c = 0; c < kHeld; ++c) add_squares(s, v[c], has(c) ? mean : 0.0f);
    each_other(x, [&](uint4 w, int) { add_squares(s, w, mean); });
    return sum_of_thread(s);
  }

  struct Statistic {
    float mean;  // or the variance
    float rstd;  // only for the threads that have it
  };

  // sum / count and 1 / sqrt(sum / count + eps), each step rounded to nearest; of a mean no root, it may be
  // negative. Rows hardly ever leave the range where the steps need no branches of their own: there the
  // residual of the quotient is exact, or too small beside eps to count.
  TEJIT_DEVICE Statistic divided(float sum) const {
    const float quotient = __fmul_rn(sum, inverse);
    Statistic s;
    s.mean = __fmaf_rn(__fmaf_rn(-count, quotient, sum), inverse, quotient);
    const float variance = __fadd_rn(s.mean, args.eps);
    s.rstd = reciprocal_root(variance);
    if (!in_middle_range(upper || !centered ? variance : sum)) {
      s.mean = __fdiv_rn(sum, count);
      s.rstd = __frcp_rn(__fsqrt_rn(__fadd_rn(upper ? s.mean : 1.0f, args.eps)));
    }
    return s;
  }

  // `type` is whether FP8 is E5M2; of a kernel that makes none, whether it writes.
  template <typename Type>
  TEJIT_DEVICE void put(Out* to, uint4 y, bool there, Type type) {
    m = BF16::amax_step(m, y);
    if constexpr (kMakes == Makes::kCast) {
      u32 word[2];
      fp8::encode_vector<BF16>(y, scale, type, word);
      if (there) store8<Store::kStream>(to, word[0], word[1]);
    } else if (type && there) {
      store16<Store::kPlain>(to, y);
    }
  }

  template <typename Type>
  TEJIT_DEVICE void write(const u16* x, Out* to, const uint4 (&v)[kHeld], float rstd, float shift,
                          Type type) {
#pragma unroll
    for (int c = 0; c < kHeld; ++c) {
      const Affine& a = kKeepsAffine ? affine[kKeepsAffine ? c : 0] : affine_of(c);
      put(to + c * kSums, normalised(forgotten(v[c]), rstd, shift, a), has(c), type);
    }
    each_other(x, [&](uint4 w, int c) {
      put(to + c * kSums, normalised(w, rstd, shift, affine_of(c)), true, type);
    });
  }

  TEJIT_DEVICE void write_zeros(Out* to) {
#pragma unroll 1
    for (int c = 0; has(c); ++c)
      put(to + c * kSums, make_uint4(0, 0, 0, 0), kMakes == Makes::kCast || args.y != nullptr,
          fp8::Known<kMakes != Makes::kCast>());
  }

  // Rows from the last to the first: the kernel after this one goes forwards, and finds in L2 what was read
  // last. `n` of them are this block's, the first `pad` only padding. Turn k is that of row k: before row 0
  // there is one that only adds up.
  TEJIT_DEVICE void run() {
    const i64 step = gridDim.x, pitch = step * args.cols;
    const i64 row = args.out_rows - 1 - static_cast<i64>(blockIdx.x);
    const int n = static_cast<int>((row + step) / step);
    const int pad = row < args.rows ? 0 : static_cast<int>((row - args.rows + step) / step);
    const auto real = [&](int k) { return k >= pad && k < n; };
    const bool writes = thread % 16 == 0 && thread < 32 && (upper || centered);
    // Threads 0 to 15 of a warp have the mean of the next row, the others this one's rstd.
    float* statistic = kept(upper ? args.rstd + row + step : args.mean + row);
    const int ahead = upper ? 0 : 1;
    const i64 first = row * args.cols + thread * 8;
    const u16* x = kept(static_cast<const u16*>(args.x) + first - pitch);  // of row k + 2
    Out* to = kept(output() + first + pitch);                              // of row k
    u32 slot = shared_address(&shared.slots[1][0][thread]);
    u32 next = shared_address(&shared.slots[0][0][thread]);
    u32 sums = shared_address(&shared.sums[0][upper][0]);
    const u32 own_sum = kept(thread / 32 * 4);
    float mean = 0.0f;
    if (real(0)) fetch(x + pitch, next);
#pragma unroll 1
    for (int k = -1; k < n; ++k) {
      wait_for_copies();
      uint4 v[kHeld];
      float values = 0.0f, from_mean = 0.0f;
      load(slot, v);
      if (real(k + 2)) fetch(x, slot);
      if (real(k)) from_mean = squares(x + 2 * pitch, v, mean);
      if (centered && real(k + 1)) values = sum(x + pitch, next);
      const float t = sum_of_warp(values, from_mean, upper);
      if (thread % 16 == 0) store4_shared(sums + own_sum, __float_as_uint(t));
      __syncthreads();
      const Statistic of = divided(sum_of_warps(load16_shared(sums), load16_shared(sums + 16)));
      const float found = of.mean, root = of.rstd;
      if (writes && real(k + ahead)) *statistic = upper ? root : found;
      if constexpr (kNormalises) {
        if (real(k)) {
          const float rstd = __shfl_sync(0xffffffffu, root, 16);
          const float shift = shift_of(mean, rstd);
          // Asked once a row: between the vectors a branch would make one wait for the other.
          if (kMakes == Makes::kCast ? cast->fp8 != 0 : args.y != nullptr) {
            write(x + 2 * pitch, to, v, rstd, shift, fp8::Known<true>());
          } else {
            write(x + 2 * pitch, to, v, rstd, shift, fp8::Known<false>());
          }
        } else if (k >= 0) {
          write_zeros(to);
        }
      }
      mean = __shfl_sync(0xffffffffu, centered ? found : 0.0f, 0);
      statistic -= step;
      x = kept(x - pitch);
      to = kept(to - pitch);
      sums ^= static_cast<u32>(sizeof shared.sums[0]);
      const u32 free = slot;
      slot = next;
      next = free;
    }
  }

 private:
  TEJIT_DEVICE Out* output() const {
    if constexpr (kMakes == Makes::kCast) {
      return cast->row;
    } else {
      return static_cast<u16*>(args.y);
    }
  }
};

template <Makes kMakes, Length kLength>
TEJIT_DEVICE void norm_rows(const RowsArgs& args, const fp8::CastArgs* cast) {
  constexpr bool kCast = kMakes == Makes::kCast;
  using Rows = NormRows<kMakes, kLength>;
  __shared__ typename Rows::Shared shared;
  __shared__ u32 maxima[32];
  if constexpr (!kCast) allow_next_kernel();
  Rows norm(args, cast, shared);
  u32 so_far = 0;
  if constexpr (kCast) {
    norm.scale = fp8::scale_of_block<kThreads>(*cast);
    so_far = fp8::amax_so_far(*cast);
  }
  norm.run();
  if constexpr (kCast) {
    fp8::collect_amax<kThreads>(*cast, BF16::amax_result(norm.m), so_far);
  } else if (args.partial != nullptr) {
    const float amax = block_max<kThreads>(BF16::amax_result(norm.m), maxima);
    if (threadIdx.x == 0) args.partial[blockIdx.x] = amax;
  }
}

TEJIT_DEVICE void only_statistics(const RowsArgs& args) {
  norm_rows<Makes::kNothing, Length::kAny>(args, nullptr);
}

template <Length kLength>
TEJIT_DEVICE void rows(const RowsArgs& args) {
  norm_rows<Makes::kNorm, kLength>(args, nullptr);
}

template <Length kLength>
TEJIT_DEVICE void fp8_rows(const fused::CastRows<RowsArgs>& args) {
  norm_rows<Makes::kCast, kLength>(args.rows, &args.cast);
}

}  // namespace norm
}  // namespace tejit
