// Statistics of rows, with what else a row in registers can give: the norm itself, its maximum, its FP8
// bytes.
#pragma once

#include "common/element.cuh"
#include "common/reduce.cuh"
#include "fp8/convert.cuh"
#include "fp8/scale.cuh"
#include "norm/source.cuh"

namespace tejit {
namespace norm {

// The last steps of the fixed order (see args.h), for the block's rows at once. Every thread gets its row's
// sum. `scratch` must not be written again before the barrier after the next.
TEJIT_DEVICE float sum_of_row(const float (&s)[kThreadSums], float (*scratch)[kGroup / 32]) {
  float t = __fadd_rn(__fadd_rn(__fadd_rn(s[0], s[4]), __fadd_rn(s[2], s[6])),
                      __fadd_rn(__fadd_rn(s[1], s[5]), __fadd_rn(s[3], s[7])));
#pragma unroll
  for (int stride = 16; stride > 0; stride /= 2) t = __fadd_rn(t, __shfl_xor_sync(0xffffffffu, t, stride));
  float* mine = scratch[threadIdx.x / kGroup];
  if (threadIdx.x % 32 == 0) mine[threadIdx.x % kGroup / 32] = t;
  __syncthreads();
  return __fadd_rn(__fadd_rn(mine[0], mine[2]), __fadd_rn(mine[1], mine[3]));
}

// each(f): f(x, j) for all of a thread's elements, j their place among its eight sums.
template <typename Each>
TEJIT_DEVICE void statistics(const RowsArgs& args, i64 row, const Each& each, float& mean, float& rstd) {
  __shared__ float scratch[2][RowsShape::kRows][kGroup / 32];
  const float count = static_cast<float>(args.cols);
  mean = 0.0f;
  if (args.mean != nullptr) {
    float s[kThreadSums] = {};
    each([&](float x, int j) { s[j] = __fadd_rn(s[j], x); });
    mean = __fdiv_rn(sum_of_row(s, scratch[0]), count);
  }
  float s[kThreadSums] = {};
  each([&](float x, int j) {
    const float d = __fsub_rn(x, mean);
    s[j] = __fadd_rn(s[j], __fmul_rn(d, d));
  });
  const float variance = __fdiv_rn(sum_of_row(s, scratch[1]), count);
  rstd = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(variance, args.eps)));
  if (threadIdx.x % kGroup == 0 && row < args.rows) {
    if (args.mean != nullptr) args.mean[row] = mean;
    args.rstd[row] = rstd;
  }
  // RMSNorm has one barrier a row; without this the next row's sums could overtake a reader of these.
  if (args.mean == nullptr) __syncthreads();
}

// --- bfloat16 in whole vectors ---

struct Row {
  static constexpr int kHeld = RowsShape::kHeld;

  const char* x;
  const int vectors;  // of the row, from the thread's first on: it has every kGroup-th
  const u64 policy;
  uint4 v[kHeld];

  TEJIT_DEVICE Row(const RowsArgs& args, i64 row, int thread, u64 policy_)
      : x(static_cast<const char*>(args.x) + (row * args.cols + thread * 8) * 2),
        vectors(row < args.rows ? clamp_left(args.cols / 8) - thread : 0),
        policy(policy_) {
#pragma unroll
    for (int c = 0; c < kHeld; ++c) {
      v[c] = make_uint4(0, 0, 0, 0);
      if (c * kGroup < vectors) v[c] = at(c);
    }
  }

  TEJIT_DEVICE uint4 at(int c) const {
    return load16<Load::kPlain>(x + static_cast<i64>(c) * (kGroup * 16), policy);
  }

  template <typename F>
  TEJIT_DEVICE void each_vector(const F& f) const {
#pragma unroll
    for (int c = 0; c < kHeld; ++c) {
      if (c * kGroup < vectors) f(v[c], c);
    }
#pragma unroll 1
    for (int c = kHeld; c * kGroup < vectors; ++c) f(at(c), c);
  }

  template <typename F>
  TEJIT_DEVICE void each(const F& f) const {
    each_vector([&](uint4 vector, int) {
      float e[8];
      BF16::widen(vector, e);
#pragma unroll
      for (int j = 0; j < 8; ++j) f(e[j], j);
    });
  }
};

// Rows from the last to the first: the kernel after this one goes forwards, and finds in L2 what was read
// last.
template <bool kCast>
TEJIT_DEVICE void norm_rows(const RowsArgs& args, const fp8::CastArgs* cast) {
  __shared__ u32 maxima[32];
  const u64 policy = evict_first_policy();
  const int thread = threadIdx.x % kGroup;
  u32 m = 0;
  float scale = 0.0f;
  u32 so_far = 0;
  if constexpr (kCast) {
    scale = fp8::scale_of_block<RowsShape::kThreads>(*cast);
    so_far = fp8::amax_so_far(*cast);
  } else {
    allow_next_kernel();
  }
  const i64 pieces = (args.out_rows + RowsShape::kRows - 1) / RowsShape::kRows;
#pragma unroll 1
  for (i64 i = blockIdx.x; i < pieces; i += gridDim.x) {
    const i64 row = (pieces - 1 - i) * RowsShape::kRows + threadIdx.x / kGroup;
    const Row x(args, row, thread, policy);
    float mean, rstd;
    statistics(args, row, [&](const auto& f) { x.each(f); }, mean, rstd);
    const i64 first = row * args.cols + thread * 8;
    x.each_vector([&](uint4 v, int c) {
      const int column = c * kSums;
      Affine affine;
      load_affine(args.parameters, thread * 8 + column, policy, affine);
      const uint4 y = normalised(v, mean, rstd, affine);
      m = BF16::amax_step(m, y);
      if constexpr (kCast) {
        u32 word[2];
        fp8::encode_vector<BF16>(y, scale, cast->fp8 != 0, word);
        store8<Store::kStream>(cast->row + first + column, word[0], word[1]);
      } else if (args.y != nullptr) {
        store16<Store::kPlain>(static_cast<u16*>(args.y) + first + column, y);
      }
    });
    if (row >= args.rows && row < args.out_rows) {
      for (i64 at = thread * 8; at < args.cols; at += kSums) {
        if constexpr (kCast) {
          store8<Store::kStream>(cast->row + row * args.cols + at, 0, 0);
        } else if (args.y != nullptr) {
          store16<Store::kPlain>(static_cast<u16*>(args.y) + row * args.cols + at, make_uint4(0, 0, 0, 0));
        }
      }
    }
  }
  if constexpr (kCast) {
    fp8::collect_amax<RowsShape::kThreads>(*cast, BF16::amax_result(m), so_far);
  } else if (args.partial != nullptr) {
    const float amax = block_max<RowsShape::kThreads>(BF16::amax_result(m), maxima);
    if (threadIdx.x == 0) args.partial[blockIdx.x] = amax;
  }
}

// --- any dtype at any address ---

TEJIT_DEVICE float load_any(const void* p, int dtype, i64 i) {
  if (dtype == 0) return F32::load(p, i);
  return dtype == 1 ? F16::load(p, i) : BF16::load(p, i);
}

TEJIT_DEVICE void store_any(void* p, int dtype, i64 i, float f) {
  if (dtype == 0) {
    static_cast<float*>(p)[i] = f;
  } else {
    static_cast<u16*>(p)[i] = dtype == 1 ? f16_of(f) : static_cast<u16>(bf16x2_of(f, 0.0f) & 0xffffu);
  }
}

TEJIT_DEVICE void norm_rows_any(const RowsArgs& args) {
  const Parameters& p = args.parameters;
  const int thread = threadIdx.x % kGroup;
  const i64 pieces = (args.out_rows + RowsShape::kRows - 1) / RowsShape::kRows;
#pragma unroll 1
  for (i64 i = blockIdx.x; i < pieces; i += gridDim.x) {
    const i64 row = i * RowsShape::kRows + threadIdx.x / kGroup;
    const i64 first = row * args.cols;
    const i64 cols = row < args.rows ? args.cols : 0;
    const auto each = [&](const auto& f) {
#pragma unroll 1
      for (i64 at = thread * kThreadSums; at < cols; at += kSums) {
#pragma unroll
        for (int j = 0; j < kThreadSums; ++j) {
          if (at + j < cols) f(load_any(args.x, args.dtype, first + at + j), j);
        }
      }
    };
    float mean, rstd;
    statistics(args, row, each, mean, rstd);
    if (args.y == nullptr || row >= args.out_rows) continue;
#pragma unroll 1
    for (i64 at = thread; at < args.cols; at += kGroup) {
      float y = 0.0f;
      if (row < args.rows) {
        float gamma = p.weight != nullptr ? load_any(p.weight, p.weight_dtype, at)
                      : p.zero_centered   ? 0.0f
                                          : 1.0f;
        if (p.zero_centered) gamma = __fadd_rn(1.0f, gamma);
        const float beta = p.bias != nullptr ? load_any(p.bias, p.bias_dtype, at) : kNothing;
        y = normalised(load_any(args.x, args.dtype, first + at), mean, rstd, gamma, beta);
      }
      store_any(args.y, args.dtype, first + at, y);
    }
  }
}

}  // namespace norm
}  // namespace tejit
