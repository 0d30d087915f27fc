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

// The last steps of the fixed order (see args.h). Every thread gets the row's sum. `scratch` must not be
// written again before the barrier after the next.
TEJIT_DEVICE float sum_of_row(const float (&s)[kThreadSums], float* scratch) {
  float t = __fadd_rn(__fadd_rn(__fadd_rn(s[0], s[4]), __fadd_rn(s[2], s[6])),
                      __fadd_rn(__fadd_rn(s[1], s[5]), __fadd_rn(s[3], s[7])));
#pragma unroll
  for (int stride = 16; stride > 0; stride /= 2) t = __fadd_rn(t, __shfl_xor_sync(0xffffffffu, t, stride));
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = t;
  __syncthreads();
  const float4 a = *reinterpret_cast<const float4*>(scratch),
               b = *reinterpret_cast<const float4*>(scratch + 4);
  return __fadd_rn(__fadd_rn(__fadd_rn(a.x, b.x), __fadd_rn(a.z, b.z)),
                   __fadd_rn(__fadd_rn(a.y, b.y), __fadd_rn(a.w, b.w)));
}

struct Scratch {
  alignas(16) float sums[2][kWarps];
};

// The two statistics of a row, one after the other: `mean` may change what the second one sums.
template <typename Values, typename Squares>
TEJIT_DEVICE void statistics(const RowsArgs& args, i64 row, Scratch& scratch, const Values& add_values,
                             const Squares& add_squares, float& mean, float& rstd) {
  const float count = static_cast<float>(args.cols);
  mean = 0.0f;
  if (args.mean != nullptr) {
    float s[kThreadSums] = {};
    add_values(s);
    mean = __fdiv_rn(sum_of_row(s, scratch.sums[0]), count);
  }
  float s[kThreadSums] = {};
  add_squares(s, mean);
  const float variance = __fdiv_rn(sum_of_row(s, scratch.sums[1]), count);
  rstd = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(variance, args.eps)));
  if (threadIdx.x == 0 && row < args.rows) {
    if (args.mean != nullptr) args.mean[row] = mean;
    args.rstd[row] = rstd;
  }
  // RMSNorm has one barrier a row; without this the next row's sums could overtake a reader of these.
  if (args.mean == nullptr) __syncthreads();
}

TEJIT_DEVICE void add_squares(float (&s)[kThreadSums], const float (&d)[8]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) s[j] = __fadd_rn(s[j], __fmul_rn(d[j], d[j]));
}

// --- bfloat16 in whole vectors ---

TEJIT_DEVICE uint4 packed(const float (&f)[8]) {
  return make_uint4(bf16x2_of(f[0], f[1]), bf16x2_of(f[2], f[3]), bf16x2_of(f[4], f[5]),
                    bf16x2_of(f[6], f[7]));
}

// What a kernel over rows makes beside their statistics.
enum class Makes { kNothing, kNorm, kCast };

template <Makes kMakes>
struct NormRows {
  static constexpr int kHeld = RowsShape::kHeld;
  static constexpr bool kNormalises = kMakes != Makes::kNothing;

  const RowsArgs& args;
  const fp8::CastArgs* const cast;
  const int vectors;  // of a row, from the thread's first on: it has every kThreads-th
  float scale = 0.0f;
  u32 m = 0;
  Affine affine[kNormalises ? kHeld : 1];

  TEJIT_DEVICE NormRows(const RowsArgs& a, const fp8::CastArgs* c)
      : args(a), cast(c), vectors(static_cast<int>(a.cols / 8) - static_cast<int>(threadIdx.x)) {
    if constexpr (kNormalises) {
#pragma unroll
      for (int c = 0; c < kHeld; ++c) {
        affine[c] = {};
        if (has(c)) load_affine(args.parameters, column(c), affine[c]);
      }
    }
  }

  TEJIT_DEVICE bool has(int c) const { return c * kThreads < vectors; }
  TEJIT_DEVICE static int column(int c) { return c * kSums + static_cast<int>(threadIdx.x) * 8; }

  TEJIT_DEVICE uint4 at(i64 row, int c) const {
    return load16<Load::kCached>(static_cast<const u16*>(args.x) + row * args.cols + column(c));
  }

  TEJIT_DEVICE void load(i64 row, uint4 (&v)[kHeld]) const {
#pragma unroll
    for (int c = 0; c < kHeld; ++c) {
      v[c] = make_uint4(0, 0, 0, 0);
      if (row >= 0 && row < args.rows && has(c)) v[c] = at(row, c);
    }
  }

  TEJIT_DEVICE void put(i64 row, int c, uint4 y) {
    m = BF16::amax_step(m, y);
    const i64 to = row * args.cols + column(c);
    if constexpr (kMakes == Makes::kCast) {
      u32 word[2];
      fp8::encode_vector<BF16>(y, scale, cast->fp8 != 0, word);
      store8<Store::kStream>(cast->row + to, word[0], word[1]);
    } else if (args.y != nullptr) {
      store16<Store::kPlain>(static_cast<u16*>(args.y) + to, y);
    }
  }

  // f(d, c) for the vectors of a long row that the thread does not keep, d = x - mean.
  template <typename F>
  TEJIT_DEVICE void each_other(i64 row, float mean, const F& f) const {
#pragma unroll 1
    for (int c = kHeld; has(c); ++c) {
      float d[8];
      BF16::widen(at(row, c), d);
#pragma unroll
      for (int j = 0; j < 8; ++j) d[j] = __fsub_rn(d[j], mean);
      f(d, c);
    }
  }

  TEJIT_DEVICE void one_row(i64 row, const uint4 (&v)[kHeld], Scratch& scratch) {
    float f[kHeld][8], mean, rstd;
#pragma unroll
    for (int c = 0; c < kHeld; ++c) BF16::widen(v[c], f[c]);
    const auto values = [&](float (&s)[kThreadSums]) {
    // A vector that is not there is 0, which changes no sum.
#pragma unroll
      for (int c = 0; c < kHeld; ++c) {
#pragma unroll
        for (int j = 0; j < 8; ++j) s[j] = __fadd_rn(s[j], f[c][j]);
      }
      each_other(row, 0.0f, [&](const float (&x)[8], int) {
#pragma unroll
        for (int j = 0; j < 8; ++j) s[j] = __fadd_rn(s[j], x[j]);
      });
    };
    const auto squares = [&](float (&s)[kThreadSums], float from) {
#pragma unroll
      for (int c = 0; c < kHeld; ++c) {
#pragma unroll
        for (int j = 0; j < 8; ++j) f[c][j] = __fsub_rn(f[c][j], from);
        if (has(c)) add_squares(s, f[c]);
      }
      each_other(row, from, [&](const float (&d)[8], int) { add_squares(s, d); });
    };
    statistics(args, row, scratch, values, squares, mean, rstd);
    if constexpr (kNormalises) {
#pragma unroll
      for (int c = 0; c < kHeld; ++c) {
#pragma unroll
        for (int j = 0; j < 8; ++j) f[c][j] = scaled(f[c][j], rstd, affine[c].gamma[j], affine[c].beta[j]);
        if (has(c)) put(row, c, packed(f[c]));
      }
      each_other(row, mean, [&](float (&d)[8], int c) {
        Affine other;
        load_affine(args.parameters, column(c), other);
#pragma unroll
        for (int j = 0; j < 8; ++j) d[j] = scaled(d[j], rstd, other.gamma[j], other.beta[j]);
        put(row, c, packed(d));
      });
    }
  }

  // From the last row to the first: the kernel after this one goes forwards, and finds in L2 what was read
  // last.
  TEJIT_DEVICE void run(Scratch& scratch) {
    i64 row = args.out_rows - 1 - static_cast<i64>(blockIdx.x);
    uint4 v[kHeld];
    load(row, v);
#pragma unroll 1
    while (row >= 0) {
      const i64 next = row - static_cast<i64>(gridDim.x);
      uint4 ahead[kHeld];
      load(next, ahead);
      if (row < args.rows) {
        one_row(row, v, scratch);
      } else if constexpr (kNormalises) {
#pragma unroll 1
        for (int c = 0; has(c); ++c) put(row, c, make_uint4(0, 0, 0, 0));
      }
#pragma unroll
      for (int c = 0; c < kHeld; ++c) v[c] = ahead[c];
      row = next;
    }
  }
};

template <Makes kMakes>
TEJIT_DEVICE void norm_rows(const RowsArgs& args, const fp8::CastArgs* cast) {
  constexpr bool kCast = kMakes == Makes::kCast;
  __shared__ Scratch scratch;
  __shared__ u32 maxima[32];
  if constexpr (!kCast) allow_next_kernel();
  NormRows<kMakes> norm(args, cast);
  u32 so_far = 0;
  if constexpr (kCast) {
    norm.scale = fp8::scale_of_block<RowsShape::kThreads>(*cast);
    so_far = fp8::amax_so_far(*cast);
  }
  norm.run(scratch);
  if constexpr (kCast) {
    fp8::collect_amax<RowsShape::kThreads>(*cast, BF16::amax_result(norm.m), so_far);
  } else if (args.partial != nullptr) {
    const float amax = block_max<RowsShape::kThreads>(BF16::amax_result(norm.m), maxima);
    if (threadIdx.x == 0) args.partial[blockIdx.x] = amax;
  }
}

TEJIT_DEVICE void rows(const RowsArgs& args) {
  norm_rows<Makes::kNorm>(args, nullptr);
}

TEJIT_DEVICE void only_statistics(const RowsArgs& args) {
  norm_rows<Makes::kNothing>(args, nullptr);
}

TEJIT_DEVICE void fp8_rows(const fused::CastRows<RowsArgs>& args) {
  norm_rows<Makes::kCast>(args.rows, &args.cast);
}

// --- any dtype at any address ---

TEJIT_DEVICE void rows_any(const RowsArgs& args) {
  __shared__ Scratch scratch;
  const fused::Parameters& p = args.parameters;
#pragma unroll 1
  for (i64 row = blockIdx.x; row < args.out_rows; row += gridDim.x) {
    const i64 first = row * args.cols;
    const i64 cols = row < args.rows ? args.cols : 0;
    const auto add_from = [&](float (&s)[kThreadSums], float from, bool squared) {
#pragma unroll 1
      for (i64 at = threadIdx.x * kThreadSums; at < cols; at += kSums) {
#pragma unroll
        for (int j = 0; j < kThreadSums; ++j) {
          if (at + j < cols) {
            const float d = __fsub_rn(load_any(args.x, args.dtype, first + at + j), from);
            s[j] = __fadd_rn(s[j], squared ? __fmul_rn(d, d) : d);
          }
        }
      }
    };
    float mean, rstd;
    statistics(
        args, row, scratch, [&](float (&s)[kThreadSums]) { add_from(s, 0.0f, false); },
        [&](float (&s)[kThreadSums], float from) { add_from(s, from, true); }, mean, rstd);
    if (args.y == nullptr) continue;
#pragma unroll 1
    for (i64 at = threadIdx.x; at < args.cols; at += kThreads) {
      float y = 0.0f;
      if (row < args.rows) {
        float gamma = p.weight != nullptr ? load_any(p.weight, p.weight_dtype, at)
                      : p.zero_centered   ? 0.0f
                                          : 1.0f;
        if (p.zero_centered) gamma = __fadd_rn(1.0f, gamma);
        const float beta = p.bias != nullptr ? load_any(p.bias, p.bias_dtype, at) : kNothing;
        y = scaled(__fsub_rn(load_any(args.x, args.dtype, first + at), mean), rstd, gamma, beta);
      }
      store_any(args.y, args.dtype, first + at, y);
    }
  }
}

}  // namespace norm
}  // namespace tejit
