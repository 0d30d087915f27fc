// MXFP8: maxima, exponents and bytes of both directions from one reading of x.
//
// Every warp works for itself: its tile is 32 rows by 8 threads' elements, so that each 1x32, 32x1 and 32x32
// block lies inside it and a maximum needs shuffles only, no shared memory and no barrier. A thread holds
// eight rows (every fourth one) of its columns. Tiles cover the padded sizes: what lies outside x counts as
// 0, whose exponent is the 0 that the padding of scales must hold.
#pragma once

#include "common/element.cuh"
#include "fp8/convert.cuh"
#include "fp8/scale.cuh"
#include "mxfp8/args.h"

namespace tejit {
namespace mxfp8 {

// Two bytes, the first in the low one. Volatile keeps encode's branch a branch: as selects both conversions
// would run, and the instruction that joins two conversions into a word would not be used.
template <bool kE5M2>
TEJIT_DEVICE u32 encode2(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  u16 pair;
  if constexpr (kE5M2) {
    asm volatile("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  } else {
    asm volatile("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  }
  return pair;
#else
  return fp8::encode2(first, second, kE5M2);
#endif
}

template <bool kE5M2, int kWords>
TEJIT_DEVICE void encode_as(const float* q, u32 (&word)[kWords]) {
#pragma unroll
  for (int w = 0; w < kWords; ++w, q += 4)
    word[w] = encode2<kE5M2>(q[0], q[1]) | (encode2<kE5M2>(q[2], q[3]) << 16);
}

// The element type is known at run time only, but to a whole grid.
template <int kWords>
TEJIT_DEVICE void encode(bool e5m2, const float* q, u32 (&word)[kWords]) {
  if (e5m2) {
    encode_as<true>(q, word);
  } else {
    encode_as<false>(q, word);
  }
}

// The exponent of amax / max, rounded up to a power of two, as an E8M0 byte. What is added carries into the
// exponent where the number is above its power of two; that of a subnormal number is 2^-127.
TEJIT_DEVICE u32 exponent_of(float amax, float inverse_max) {
  const u32 bits = __float_as_uint(__fmul_rn(amax, inverse_max));
  const u32 exponent = (bits + (bits < 0x00800000u ? 0x003fffffu : 0x007fffffu)) >> 23;
  return exponent < 254u ? exponent : 254u;
}

// 2^(127 - exponent)
TEJIT_DEVICE float multiplier_of(u32 exponent) {
  return __uint_as_float(exponent == 254u ? 0x00400000u : (254u - exponent) << 23);
}

// Where the exponent of outer index i and block j lies in a buffer of `outer` by `blocks` (padded sizes).
// `across`: how far consecutive blocks lie apart where the order is not the GEMM's.
TEJIT_DEVICE i64 scale_at(bool swizzled, i64 i, i64 j, i64 blocks, i64 pitch, i64 across) {
  if (swizzled) {
    const u32 in_piece = static_cast<u32>(i) % kOuter;
    return (i / kOuter * (blocks / kInner) + j / kInner) * (kOuter * kInner) + in_piece % 32 * 16 +
           in_piece / 32 * 4 + static_cast<u32>(j) % kInner;
  }
  return i * pitch + j * across;
}

TEJIT_DEVICE i64 padded(i64 n, int multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// How bfloat16 comes in where whole vectors can move.
struct Vectors : BF16 {
  static constexpr bool kAny = false;
};

// Any dtype at any address, as float32.
struct Words : F32 {
  static constexpr bool kAny = true;
  static constexpr bool kFused = false;
};

template <typename T, typename Args, Load kLoad = Load::kCached, Store kStore = Store::kStream>
struct Quantize {
  static constexpr u32 kAll = 0xffffffffu;
  static constexpr int kPer = T::kPerVector;
  static constexpr int kCols = kLanes * kPer;
  static constexpr int kGroups = 32 / kLanes;     // threads that hold different rows of the same columns
  static constexpr int kRows = kBlock / kGroups;  // rows of a thread
  static constexpr int kShare = kBlock / kPer;    // threads that share a row's block
  static constexpr int kOwn = kRows / kShare;     // rows whose scale a thread finds
  static_assert(kRows == 8 && (kShare == 4 || kShare == 8), "the exchanges below are written for these");

  const Args& args;
  const i64 down, across;  // tiles, counted over the padded sizes
  const int lane, group;
  const float inverse_max;
  i64 m0, k0;      // the first of the thread's rows, the first of its columns
  int rows, cols;  // what is left of x from there
  uint4 v[kRows];

  TEJIT_DEVICE explicit Quantize(const Args& a)
      : args(a),
        down(padded(a.rows, kOuter) / kBlock),
        across(padded(a.cols, kOuter) / kCols),
        lane(threadIdx.x % kLanes),
        group(threadIdx.x % 32 / kLanes),
        inverse_max(a.fp8 ? 1.0f / 57344.0f : 1.0f / 448.0f) {}

  // Below 2^32 for whatever fits a GPU.
  TEJIT_DEVICE u32 tiles() const { return static_cast<u32>(down * across); }

  TEJIT_DEVICE void load(u32 t) {
    const u32 row = t / static_cast<u32>(across);
    m0 = static_cast<i64>(row) * kBlock + group;
    k0 = static_cast<i64>(t - row * static_cast<u32>(across)) * kCols + lane * kPer;
    cols = clamp_left(args.cols - k0);
    rows = cols > 0 ? clamp_left(args.rows - m0) : 0;
    const int size = T::kAny && args.dtype != 0 ? 2 : T::kBytes;
    i64 elements = args.cols;  // from row to row
    if constexpr (T::kFused) elements = args.source.pitch;
    const char* from = static_cast<const char*>(args.x) + (m0 * elements + k0) * size;
    const i64 pitch = elements * kGroups * size;
    if constexpr (T::kAny) {
      if (size == 2) return load_halves(from, pitch);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      v[r] = make_uint4(0, 0, 0, 0);
      if (r * kGroups < x_rows()) {
        if (!T::kAny || args.wide) {
          v[r] = load16<kLoad>(from + r * pitch);
        } else {
          const u32* at = reinterpret_cast<const u32*>(from + r * pitch);
          v[r].x = load4(at);
          if (cols > 1) v[r].y = load4(at + 1);
          if (cols > 2) v[r].z = load4(at + 2);
          if (cols > 3) v[r].w = load4(at + 3);
        }
      }
    }
  }

  // How many of the thread's rows lie in x, which a fused cast pads.
  TEJIT_DEVICE int x_rows() const {
    if constexpr (T::kFused) {
      return cols > 0 ? clamp_left(args.source.rows - m0) : 0;
    } else {
      return rows;
    }
  }

  // Four elements of 16 bits in the first two words; widen_halves makes float32 of them when they are there.
  TEJIT_DEVICE void load_halves(const char* from, i64 pitch) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      v[r] = make_uint4(0, 0, 0, 0);
      if (r * kGroups < rows) {
        const char* at = from + r * pitch;
        if (args.wide) {
          v[r].x = load4(at);
          v[r].y = load4(at + 4);
        } else {
          v[r].x = load2(at);
          if (cols > 1) v[r].x |= static_cast<u32>(load2(at + 2)) << 16;
          if (cols > 2) v[r].y = load2(at + 4);
          if (cols > 3) v[r].y |= static_cast<u32>(load2(at + 6)) << 16;
        }
      }
    }
  }

  TEJIT_DEVICE void widen_halves() {
    const bool bf16 = args.dtype == 2;
    const auto lower = [&](u32 w) {
      return bf16 ? w << 16 : __float_as_uint(f32_of_f16(static_cast<u16>(w & 0xffffu)));
    };
    const auto upper = [&](u32 w) {
      return bf16 ? w & 0xffff0000u : __float_as_uint(f32_of_f16(static_cast<u16>(w >> 16)));
    };
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      v[r] = make_uint4(lower(v[r].x), upper(v[r].x), lower(v[r].y), upper(v[r].y));
  }

  // What a thread knows of its scales: multipliers of the rows it looks after and of its columns, and their
  // exponents.
  struct Scales {
    u32 row[kOwn];
    float row_multiplier[kOwn];
    u32 col[kPer / 4];  // a byte a column
    float col_multiplier[kPer];
  };

  // Row r of the thread belongs to thread r % kShare of those that share its block, as its number r / kShare.
  TEJIT_DEVICE void along_rows(Scales& s) const {
    const bool odd = lane & 1, second = lane & 2;
    u32 a[kRows], b[kRows / 2], c[kRows / 4];
#pragma unroll
    for (int r = 0; r < kRows; ++r) a[r] = T::amax_step(0, v[r]);
    // Each exchange halves the rows that a thread looks after.
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
      const u32 given = odd ? a[2 * i] : a[2 * i + 1];
      b[i] = T::amax_word(odd ? a[2 * i + 1] : a[2 * i], __shfl_xor_sync(kAll, given, 1));
    }
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
      const u32 given = second ? b[2 * i] : b[2 * i + 1];
      c[i] = T::amax_word(second ? b[2 * i + 1] : b[2 * i], __shfl_xor_sync(kAll, given, 2));
    }
    if constexpr (kShare == 8) {
      const bool third = lane & 4;
      c[0] = T::amax_word(third ? c[1] : c[0], __shfl_xor_sync(kAll, third ? c[0] : c[1], 4));
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      s.row[i] = exponent_of(T::amax_result(c[i]), inverse_max);
      s.row_multiplier[i] = multiplier_of(s.row[i]);
    }
  }

  // max |x| of the thread's columns, known to all of its groups.
  TEJIT_DEVICE void column_maxima(u32 (&c)[4]) const {
#pragma unroll
    for (int w = 0; w < 4; ++w) c[w] = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      c[0] = T::amax_word(c[0], v[r].x);
      c[1] = T::amax_word(c[1], v[r].y);
      c[2] = T::amax_word(c[2], v[r].z);
      c[3] = T::amax_word(c[3], v[r].w);
    }
#pragma unroll
    for (int step = kLanes; step < 32; step *= 2) {
#pragma unroll
      for (int w = 0; w < 4; ++w) c[w] = T::amax_word(c[w], __shfl_xor_sync(kAll, c[w], step));
    }
  }

  TEJIT_DEVICE void along_columns(Scales& s, const u32 (&c)[4]) const {
#pragma unroll
    for (int w = 0; w < kPer / 4; ++w) s.col[w] = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const u32 exponent = exponent_of(fabsf(T::element(c[i * 4 / kPer], i % (kPer / 4))), inverse_max);
      s.col[i / 4] |= exponent << (8 * (i % 4));
      s.col_multiplier[i] = multiplier_of(exponent);
    }
  }

  TEJIT_DEVICE void square(Scales& s, const u32 (&c)[4]) const {
    u32 m = T::amax_step(0, make_uint4(c[0], c[1], c[2], c[3]));
#pragma unroll
    for (int step = 1; step < kShare; step *= 2) m = T::amax_word(m, __shfl_xor_sync(kAll, m, step));
    const u32 exponent = exponent_of(T::amax_result(m), inverse_max);
    const float multiplier = multiplier_of(exponent);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      s.row[i] = exponent;
      s.row_multiplier[i] = multiplier;
    }
#pragma unroll
    for (int w = 0; w < kPer / 4; ++w) s.col[w] = exponent * 0x01010101u;
#pragma unroll
    for (int i = 0; i < kPer; ++i) s.col_multiplier[i] = multiplier;
  }

  // Every thread writes single bytes, those of a warp side by side where the layout has them so.
  TEJIT_DEVICE void put_scales(const Scales& s) const {
    const bool swizzled = args.swizzled != 0;
    if (args.row != nullptr) {
      const i64 j = k0 / kBlock, blocks = padded(args.cols / kBlock, kInner);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const i64 m = m0 + (i * kShare + lane % kShare) * kGroups;
        args.row_scales[scale_at(swizzled, m, j, blocks, blocks, 1)] = static_cast<u8>(s.row[i]);
      }
    }
    if (args.col != nullptr) {
      constexpr int kBytes = kPer / kGroups;  // that each group writes
      const i64 j = m0 / kBlock, pitch = padded(args.cols, kOuter);
      const u32 word = kPer == 8 && group >= kGroups / 2 ? s.col[kPer / 4 - 1] : s.col[0];
#pragma unroll
      for (int i = 0; i < kBytes; ++i) {
        const int own = group * kBytes + i;
        args.col_scales[scale_at(swizzled, k0 + own, j, down, 1, pitch)] =
            static_cast<u8>(word >> (8 * (own % 4)));
      }
    }
  }

  TEJIT_DEVICE void store(u8* at, const u32 (&word)[kPer / 4]) const {
    if constexpr (!T::kAny) {
      store8<kStore>(at, word[0], word[kPer / 4 - 1]);
    } else if (args.wide) {
      store4<kStore>(at, word[0]);
    } else {
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        if (i < cols) at[i] = static_cast<u8>(word[0] >> (8 * i));
      }
    }
  }

  TEJIT_DEVICE void convert(const Scales& s) const {
    const bool e5m2 = args.fp8 != 0;
    const i64 first = m0 * args.cols + k0, pitch = args.cols * kGroups;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float f[kPer], q[kPer];
      u32 word[kPer / 4];
      T::widen(v[r], f);
      const bool inside = r * kGroups < rows;
      if (args.row != nullptr) {
        const float multiplier = __shfl_sync(kAll, s.row_multiplier[r / kShare], r % kShare, kShare);
#pragma unroll
        for (int i = 0; i < kPer; ++i) q[i] = __fmul_rn(f[i], multiplier);
        encode(e5m2, q, word);
        if (inside) store(args.row + first + r * pitch, word);
      }
      if (args.col != nullptr) {
#pragma unroll
        for (int i = 0; i < kPer; ++i) q[i] = __fmul_rn(f[i], s.col_multiplier[i]);
        encode(e5m2, q, word);
        if (inside) store(args.col + first + r * pitch, word);
      }
    }
  }

  // What lies behind x's last row in a padded output is 0.
  TEJIT_DEVICE void fuse(const T& type) {
    const int there = x_rows();
    auto columns = type.columns(k0, there > 0);
    wait_for_previous_kernel();
    auto shared = type.row(m0 - group + threadIdx.x % 32, true);
    type.settle(shared, columns);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      v[r] =
          type.finish(v[r], shared, r * kGroups + group, columns, m0 + r * kGroups, k0, r * kGroups < there);
    }
  }

  TEJIT_DEVICE void run() {
    const u32 t = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (t >= tiles()) return;
    load(t);
    if constexpr (T::kAny) {
      if (args.dtype != 0) widen_halves();
    }
    if constexpr (T::kFused) fuse(T(args.source));
    Scales s;
    u32 c[4];
    if (args.col != nullptr || args.square) column_maxima(c);
    if (args.square) {
      square(s, c);
    } else {
      if (args.row != nullptr) along_rows(s);
      if (args.col != nullptr) along_columns(s, c);
    }
    put_scales(s);
    convert(s);
  }
};

}  // namespace mxfp8
}  // namespace tejit
