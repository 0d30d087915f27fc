// Every mode, every dtype, any address: a block of 16 elements a thread, out of one small kernel. What is
// rare runs here; what training runs all the time has kernels of its own.
#pragma once

#include "common/element.cuh"
#include "nvfp4/amax.cuh"

namespace tejit {
namespace nvfp4 {

TEJIT_DEVICE float load_any(const void* x, int dtype, i64 i) {
  if (dtype == kF32) return F32::load(x, i);
  return dtype == kF16 ? F16::load(x, i) : BF16::load(x, i);
}

template <typename T>
TEJIT_DEVICE void load_sixteen(const void* x, i64 first, i64 stride, float (&f)[16]) {
  const char* from = static_cast<const char*>(x) + first * T::kBytes;
  if (stride == 1 && reinterpret_cast<u64>(from) % 16 == 0) {
#pragma unroll
    for (int v = 0; v < 16 / T::kPerVector; ++v) {
      float part[T::kPerVector];
      T::widen(load16_shared_line(from + 16 * v, evict_first_policy()), part);
#pragma unroll
      for (int i = 0; i < T::kPerVector; ++i) f[v * T::kPerVector + i] = part[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i) f[i] = T::load(from, i * stride);
  }
}

TEJIT_DEVICE void load_block(const void* x, int dtype, i64 first, i64 stride, float (&f)[16]) {
  if (dtype == kF32) return load_sixteen<F32>(x, first, stride, f);
  if (dtype == kF16) return load_sixteen<F16>(x, first, stride, f);
  load_sixteen<BF16>(x, first, stride, f);
}

TEJIT_DEVICE void flip(u32 mask, float (&f)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) f[i] = __uint_as_float(__float_as_uint(f[i]) ^ flipped(mask, i, 0x80000000u));
}

// --- maxima ---

// Partial maxima of x and of its transform: 16 rows of a column a thread.
TEJIT_DEVICE void amax_rht_any(const AmaxArgs& args) {
  __shared__ u32 scratch[2][32];
  allow_next_kernel();
  if (is_noop(args.noop)) return;
  const i64 total = args.rows / kBlock * args.cols;
  float row = 0.0f, col = 0.0f;
#pragma unroll 1
  for (i64 at = static_cast<i64>(blockIdx.x) * RhtAmaxShape::kThreads + threadIdx.x; at < total;
       at += static_cast<i64>(gridDim.x) * RhtAmaxShape::kThreads) {
    const i64 group = at / args.cols;
    float f[16];
    load_block(args.x, args.dtype, group * kBlock * args.cols + (at - group * args.cols), args.cols, f);
#pragma unroll
    for (int i = 0; i < 16; ++i) row = fmaxf(row, fabsf(f[i]));
    flip(args.sign_mask, f);
    col = transform_amax(col, f);
  }
  put_partial<RhtAmaxShape::kThreads>(args, row, col, scratch);
}

// The maximum of each row: a warp each; and of each column: 32 columns a block, every 32nd row a warp.
TEJIT_DEVICE void amax_lines(const AmaxArgs& args) {
  constexpr int kLines = LineShape::kLines;
  static_assert(LineShape::kThreads == kLines * 32, "a warp for each line");
  __shared__ float maxima[kLines][kLines + 1];
  allow_next_kernel();
  if (is_noop(args.noop)) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const i64 row_units = args.row != nullptr ? (args.rows + kLines - 1) / kLines : 0;
  const i64 col_units = args.col != nullptr ? (args.cols + kLines - 1) / kLines : 0;
#pragma unroll 1
  for (i64 unit = blockIdx.x; unit < row_units + col_units; unit += gridDim.x) {
    const bool columns = unit >= row_units;
    const i64 first = (columns ? unit - row_units : unit) * kLines;
    // A thread looks at every 32nd element of a row, or of a column.
    const i64 line = first + (columns ? lane : warp);
    const i64 step = columns ? args.cols : 1;
    const i64 lines = columns ? args.cols : args.rows, length = columns ? args.rows : args.cols;
    const i64 from = columns ? line : line * args.cols;
    float m = 0.0f;
    if (line < lines) {
#pragma unroll 4
      for (i64 i = columns ? warp : lane; i < length; i += 32)
        m = fmaxf(m, fabsf(load_any(args.x, args.dtype, from + i * step)));
    }
    if (columns) {
      maxima[warp][lane] = m;
      __syncthreads();
      m = maxima[lane][warp];
      __syncthreads();
    }
    m = __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(m)));
    if (lane == 0 && first + warp < lines) (columns ? args.col : args.row)[first + warp] = m;
  }
}

// --- the cast ---

struct Values {
  float f[16];
  u32 amax;  // bits of the largest |x| of the block or tile, NaN where it has one
};

TEJIT_DEVICE float eighth_of(float f, float multiplier) {
  return __fmul_rn(fminf(__fmul_rn(fabsf(f), multiplier), 6.0f), 0.125f);
}

TEJIT_DEVICE uint2 nearest_codes(const float (&f)[16], float multiplier) {
  u32 codes[2] = {0, 0};
#pragma unroll
  for (int i = 15; i >= 0; --i) {
    const u32 code = nearest_code(eighth_of(f[i], multiplier)) & 7u;
    codes[i / 8] = codes[i / 8] * 16 + code + ((__float_as_uint(f[i]) >> 28) & 8u);
  }
  return make_uint2(codes[0], codes[1]);
}

TEJIT_DEVICE uint2 stochastic_codes(const float (&f)[16], float multiplier, uint4 random) {
  const u32 word[4] = {random.x, random.y, random.z, random.w};
  u32 codes[2] = {0, 0};
#pragma unroll
  for (int i = 15; i >= 0; --i) {
    const u32 code = stochastic_code(eighth_of(f[i], multiplier), random_of(word[i / 4], i % 4));
    codes[i / 8] = codes[i / 8] * 16 + code + ((__float_as_uint(f[i]) >> 28) & 8u);
  }
  return make_uint2(codes[0], codes[1]);
}

// The summed error of codes, element by element. `own` is this thread's column of the block's elements.
TEJIT_DEVICE float error_of(const float (*own)[AnyShape::kThreads], uint2 codes, u32 byte, float amax,
                            float full, bool squared) {
  const float scale = e4m3_value(byte);
  float sum = 0.0f;
#pragma unroll 1
  for (int i = 0; i < 16; ++i) {
    const u32 code = (i < 8 ? codes.x : codes.y) >> (i % 8 * 4);
    const float value = __uint_as_float(__float_as_uint(e2m1_value(code)) | ((code & 8u) << 28));
    const float back = __fdiv_rn(__fmul_rn(__fmul_rn(value, scale), amax), full);
    const float error = __fadd_rn(back, -own[i][0]);
    sum = __fadd_rn(sum, squared ? __fmul_rn(error, error) : fabsf(error));
  }
  return sum;
}

struct AnyCast {
  static constexpr u32 kAll = 0xffffffffu;
  const CastArgs& args;
  float (*const shared)[AnyShape::kThreads];

  // The sum over the sixteen lines of a tile, by halves.
  TEJIT_DEVICE static float tile_sum(float s) {
#pragma unroll
    for (int half = 8; half > 0; half /= 2) s = __fadd_rn(s, __shfl_xor_sync(kAll, s, half));
    return s;
  }

  // Both candidates, the block's maximum at 6 and at 4; the second one where its error is less.
  TEJIT_DEVICE uint2 four_over_six(const Values& v, const Scales& s, float amax, u32& byte) const {
#pragma unroll
    for (int i = 0; i < 16; ++i) shared[i][threadIdx.x] = v.f[i];
    const float full = __fmul_rn(6.0f, args.e4m3_max);
    const float base = __fmul_rn(__fdiv_rn(__uint_as_float(v.amax), 6.0f), s.encode);
    uint2 codes = make_uint2(0, 0);
    float least = 0.0f;
#pragma unroll 1
    for (int candidate = 0; candidate < 2; ++candidate) {
      const BlockScale b = with_byte(e4m3_of(candidate ? __fmul_rn(base, 1.5f) : base), s);
      const uint2 c = nearest_codes(v.f, b.multiplier);
      float error = error_of(reinterpret_cast<const float (*)[AnyShape::kThreads]>(&shared[0][threadIdx.x]),
                             c, b.byte, amax, full, args.four_over_six == 2);
      if (args.flags & kSquare) error = tile_sum(error);
      if (candidate == 0 || error < least) {
        codes = c;
        byte = b.byte;
        least = error;
      }
    }
    return codes;
  }

  TEJIT_DEVICE static void store(u8* to, uint2 codes) {
    if (reinterpret_cast<u64>(to) % 8 == 0) return store8<Store::kStream>(to, codes.x, codes.y);
#pragma unroll 1
    for (int i = 0; i < 8; ++i) to[i] = static_cast<u8>((i < 4 ? codes.x : codes.y) >> (i % 4 * 8));
  }

  // One direction: its lines are x's rows or columns.
  TEJIT_DEVICE void run(const Direction& d, bool columns, u32* scratch) const {
    const bool random = args.seed != nullptr;
    const bool square = args.flags & kSquare, swizzled = args.flags & kSwizzled;
    const bool by_line = args.flags & kLineScaled;
    const i64 lines = columns ? args.cols : args.rows, length = columns ? args.rows : args.cols;
    const i64 line_step = columns ? 1 : args.cols, step = columns ? args.cols : 1;
    const i64 blocks = length / kBlock, total = lines * blocks;
    const u32 pitch = static_cast<u32>(pitch_of(length));
    // Neighbours in memory are a warp's neighbours, and so are the lines of a tile.
    const bool across = columns || square;
    const i64 inner = across ? lines : blocks;
    const Random bits = random_of(args.seed, columns);
    float amax = 0.0f;
    Scales scales = {};
    if (!by_line) {
      amax = begin<AnyShape::kThreads>(d, args.e4m3_max, scratch);
      scales = scales_of(amax, args.e4m3_max);
    }
#pragma unroll 1
    for (i64 first = static_cast<i64>(blockIdx.x) * AnyShape::kThreads; first < total;
         first += static_cast<i64>(gridDim.x) * AnyShape::kThreads) {
      // All threads of a warp stay together; what is past the end works on the last block and stores nothing.
      const bool there = first + threadIdx.x < total;
      const i64 at = there ? first + threadIdx.x : total - 1;
      const i64 outer = at / inner, rest = at - outer * inner;
      const i64 line = across ? rest : outer, block = across ? outer : rest;
      Values v;
      load_block(args.x, args.dtype, line * line_step + block * kBlock * step, step, v.f);
      if (columns && (args.flags & kRht)) {
        u32 w[8];
        flip(args.sign_mask, v.f);
        transform(v.f, w);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          v.f[2 * i] = lower(w[i]);
          v.f[2 * i + 1] = upper(w[i]);
        }
      }
      v.amax = 0;
#pragma unroll
      for (int i = 0; i < 16; ++i) v.amax = max(v.amax, __float_as_uint(v.f[i]) & 0x7fffffffu);
      if (square) {
#pragma unroll
        for (int half = 8; half > 0; half /= 2) v.amax = max(v.amax, __shfl_xor_sync(kAll, v.amax, half));
      }
      if (by_line) {
        amax = stored_amax(load_shared_value(d.amax + line), args.e4m3_max);
        scales = scales_of(amax, args.e4m3_max);
        // Other threads may read an infinite one before or after: it means the same.
        if (there && block == 0 && d.amax_out != nullptr) d.amax_out[line] = amax;
      }
      u32 byte;
      uint2 codes;
      if (args.four_over_six != 0) {
        codes = four_over_six(v, scales, amax, byte);
      } else {
        const BlockScale b = scale_of(v.amax, scales);
        byte = b.byte;
        codes = random ? stochastic_codes(v.f, b.multiplier,
                                          random_bytes(bits, static_cast<u64>(line * blocks + block)))
                       : nearest_codes(v.f, b.multiplier);
      }
      if (v.amax > kInfinity) {
        codes = make_uint2(0, 0);
        byte = kNan;
      }
      if (!there) continue;
      store(d.data + (line * blocks + block) * (kBlock / 2), codes);
      d.scale_inv[scale_at(static_cast<u32>(line), static_cast<u32>(block), pitch, swizzled)] =
          static_cast<u8>(byte);
      if (block + 1 == blocks)
        clear_line_end(d.scale_inv, static_cast<u32>(line), static_cast<u32>(blocks), pitch, swizzled);
    }
    clear_lines(d.scale_inv, lines, pitch, swizzled);
  }
};

TEJIT_DEVICE void cast_any(const CastArgs& args) {
  __shared__ u32 scratch[2][32];
  __shared__ float values[16][AnyShape::kThreads];
  if (is_noop(args.noop)) return;
  wait_for_previous_kernel();
  const AnyCast cast = {args, values};
#pragma unroll 1
  for (int d = 0; d < 2; ++d) {
    const Direction& direction = d ? args.col : args.row;
    if (direction.data != nullptr) cast.run(direction, d != 0, scratch[d]);
  }
}

}  // namespace nvfp4
}  // namespace tejit
