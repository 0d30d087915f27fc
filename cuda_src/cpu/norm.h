// LayerNorm and RMSNorm of the rows of a matrix, in the fixed order of sums that norm/args.h states.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "elements.h"
#include "norm/args.h"
#include "parallel.h"

namespace tejit::cpu {

inline uint16_t bf16_of(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFF;
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// Below the smallest normal number a sum whose last place is the subnormal step rounds to that step.
inline uint16_t f16_of(float value) {
  const uint32_t bits = bits_of(value), magnitude = bits & 0x7FFFFFFFu, sign = (bits >> 16) & 0x8000u;
  uint32_t half;
  if (magnitude > 0x7F800000u) return 0x7FFF;
  if (magnitude >= 0x477FF000u) {
    half = 0x7C00u;
  } else if (magnitude < 0x38800000u) {
    half = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;
  } else {
    half = (magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return static_cast<uint16_t>(half | sign);
}

// n elements from `first` on, as float32.
template <In in>
inline void widen(const void* x, int64_t first, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = to_float(in, element_bits(x, in, first + i));
}

inline void widen(const void* x, In in, int64_t first, int64_t n, float* out) {
  if (in == In::f32) return widen<In::f32>(x, first, n, out);
  return in == In::f16 ? widen<In::f16>(x, first, n, out) : widen<In::bf16>(x, first, n, out);
}

inline void narrow(const float* values, In in, int64_t first, int64_t n, void* out) {
  if (in == In::f32) {
    std::memcpy(static_cast<float*>(out) + first, values, static_cast<size_t>(n) * sizeof(float));
  } else if (in == In::f16) {
    for (int64_t i = 0; i < n; ++i) static_cast<uint16_t*>(out)[first + i] = f16_of(values[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) static_cast<uint16_t*>(out)[first + i] = bf16_of(values[i]);
  }
}

struct Norm {
  const void* x;
  In in;
  int64_t rows, cols;
  const float* gamma;  // cols; null: 1
  const float* beta;   // cols; null: none
  float eps;
  float* mean;  // rows; null: RMSNorm
  float* rstd;  // rows
  void* y;      // rows * cols
};

namespace detail {

// Over a row of n elements; add(s, x) is s with one more of them.
template <typename Add>
inline float sum_of_row(const float* x, int64_t n, const Add& add) {
  constexpr int64_t sums = norm::kSums;
  alignas(64) float s[sums] = {};
  int64_t i = 0;
  for (; i + sums <= n; i += sums) {
    for (int64_t j = 0; j < sums; ++j) s[j] = add(s[j], x[i + j]);
  }
  for (int64_t j = 0; j < n - i; ++j) s[j] = add(s[j], x[i + j]);
  const auto halve = [](float* e, int64_t n) {
    for (int64_t stride = n / 2; stride > 0; stride /= 2) {
      for (int64_t i = 0; i < stride; ++i) e[i] += e[i + stride];
    }
    return e[0];
  };
  for (int64_t t = 0; t < norm::kThreads; ++t) s[t] = halve(s + t * norm::kThreadSums, norm::kThreadSums);
  for (int64_t w = 0; w < norm::kWarps; ++w) s[w] = halve(s + w * 32, 32);
  return halve(s, norm::kWarps);
}

TEJIT_NOINLINE inline void norm_row(const Norm& job, int64_t row, float* values) {
  const int64_t n = job.cols;
  const float count = static_cast<float>(n);
  widen(job.x, job.in, row * n, n, values);
  float mean = 0.0f;
  if (job.mean) mean = sum_of_row(values, n, [](float s, float v) { return s + v; }) / count;
  const float squares =
      sum_of_row(values, n, [mean](float s, float v) { return std::fma(v - mean, v - mean, s); });
  const float rstd = 1.0f / std::sqrt(squares / count + job.eps);
  if (job.mean) job.mean[row] = mean;
  job.rstd[row] = rstd;
  const float shift = mean == 0.0f ? -0.0f : -(mean * rstd);
  for (int64_t i = 0; i < n; ++i) values[i] = std::fma(values[i], rstd, shift);
  if (job.gamma && job.beta) {
    for (int64_t i = 0; i < n; ++i) values[i] = std::fma(values[i], job.gamma[i], job.beta[i]);
  } else if (job.gamma) {
    for (int64_t i = 0; i < n; ++i) values[i] *= job.gamma[i];
  } else if (job.beta) {
    for (int64_t i = 0; i < n; ++i) values[i] += job.beta[i];
  }
  narrow(values, job.in, row * n, n, job.y);
}

}  // namespace detail

inline void norm_rows(const Norm& job) {
  constexpr int64_t kGrain = 64 * 1024;
  parallel_for(job.rows, job.cols < kGrain ? kGrain / (job.cols + 1) + 1 : 1,
               [&](int64_t begin, int64_t end) {
                 std::vector<float> values(static_cast<size_t>(job.cols));
                 for (int64_t row = begin; row < end; ++row) detail::norm_row(job, row, values.data());
               });
}

}  // namespace tejit::cpu
