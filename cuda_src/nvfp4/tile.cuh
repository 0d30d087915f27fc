// bfloat16 columnwise, or in both directions, or in 16x16 tiles: one reading of x, by tiles of 128x64 that
// are copied to shared memory while the tile before is worked on.
//
// Warp w takes rows 16w.. of the tile rowwise (four threads a row, each a block), then columns 8w..
// columnwise (eight threads a pair of columns, each 16 rows), so that whole sectors of both outputs are
// written at once.
#pragma once

#include "nvfp4/begin.cuh"
#include "nvfp4/hadamard.cuh"

namespace tejit {
namespace nvfp4 {

struct TileMemory {
  static constexpr int kChunks = TileShape::kCols / 8;  // 16-byte pieces of a row
  uint4 x[2][TileShape::kRows * kChunks];
  u32 amax[TileShape::kRows / kBlock][TileShape::kCols / kBlock];  // of 16x16 tiles
  u32 scratch[2][32];
};

template <bool kRht, bool kRandom>
struct TileCast {
  static constexpr int kChunks = TileMemory::kChunks;
  static constexpr int kRows = TileShape::kRows, kCols = TileShape::kCols;
  static_assert(TileShape::kThreads == 256 && kRows == 128 && kCols == 64,
                "the threads' places rest on these");

  const CastArgs& args;
  TileMemory& memory;
  const bool square, swizzled;
  const u32 rows, cols, row_pitch, col_pitch;
  const u64 policy;
  const int warp, lane;
  Scales row_scales, col_scales;
  Random row_random, col_random;
  u32 row0, col0;  // the tile's first row and column

  TEJIT_DEVICE TileCast(const CastArgs& a, TileMemory& m)
      : args(a),
        memory(m),
        square(!kRht && (a.flags & kSquare)),
        swizzled(a.flags & kSwizzled),
        rows(static_cast<u32>(a.rows)),
        cols(static_cast<u32>(a.cols)),
        row_pitch(static_cast<u32>(pitch_of(a.cols))),
        col_pitch(static_cast<u32>(pitch_of(a.rows))),
        policy(evict_first_policy()),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32) {}

  // Chunk c of row r lies at c ^ (r / 16) ^ (r % 2): then neither the threads that read two rows (every
  // second chunk of them) nor those that read one word of eight groups of rows meet in a bank.
  TEJIT_DEVICE void fetch(uint4* to, u32 first_row, u32 first_col) const {
    // A warp copies the sixteen rows that it works on rowwise, four at once: their places then differ by a
    // number that is known here.
    constexpr int kStep = 32 / kChunks;
    const int chunk = lane % kChunks, line = warp * kBlock + lane / kChunks;
    const u32 column = first_col + chunk * 8;
    const int rows = column < cols ? static_cast<int>(rows_left(first_row)) - line : 0;
    const u16* from = static_cast<const u16*>(args.x) + static_cast<u64>(first_row + line) * cols + column;
    to += line * kChunks + (chunk ^ warp ^ (line % 2));
#pragma unroll
    for (int s = 0; s < kBlock; s += kStep) {
      copy16(to + s * kChunks, from, s < rows, policy);
      from += kStep * static_cast<u64>(cols);
    }
  }

  TEJIT_DEVICE u32 rows_left(u32 first_row) const { return min(rows - first_row, static_cast<u32>(kRows)); }

  // The block of a thread: row warp * 16 + lane / 4 of the tile and, 8 rows below, another one.
  TEJIT_DEVICE Packed row_block(const uint4* x, int half) const {
    const int line = warp * kBlock + lane / 4, block = lane % 4;
    const int place = (2 * block) ^ warp ^ (lane / 4 % 2);
    x += line * kChunks;
    const uint4 *first = x + place, *second = x + (place ^ 1);
    const uint4 a = first[half * kChunks], b = second[half * kChunks];
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
  }

  // The amax of each 16x16 tile to all of the warp's threads that hold rows of it, and to `memory`.
  TEJIT_DEVICE u32 tile_amax(const uint4* x) const {
    u32 m = max(amax_of(row_block(x, 0)), amax_of(row_block(x, 8)));
#pragma unroll
    for (int step = 4; step < 32; step *= 2) m = max(m, __shfl_xor_sync(0xffffffffu, m, step));
    if (lane < 4) memory.amax[warp][lane] = m;
    return m;
  }

  TEJIT_DEVICE void rowwise(const uint4* x, u32 shared_amax) const {
    const int block = lane % 4, line = warp * kBlock + lane / 4;
    const u32 row = row0 + line, column = col0 / kBlock + block, per_row = cols / kBlock;
    u64 index = static_cast<u64>(row) * per_row + column;
    u8* to = args.row.data + index * (kBlock / 2);
    u8* scale_to = args.row.scale_inv + scale_at(row, column, row_pitch, swizzled);
    const u32 scale_step = swizzled ? 8 * 16 : 8 * row_pitch;
    const int rows = column < per_row ? static_cast<int>(rows_left(row0)) - line : 0;
    BlockScale scale;
    if (square) scale = scale_of(shared_amax, row_scales);
#pragma unroll 1
    for (int half = 0; half < kBlock; half += 8) {
      const Packed here = row_block(x, half);
      if (!square) scale = scale_of(amax_of(here), row_scales);
      const uint2 codes = encode<kRandom>(here, scale, row_scales, row_random, index);
      if (half < rows) store8<Store::kStream>(to, codes.x, codes.y);
      if (column < row_pitch) *scale_to = static_cast<u8>(scale.byte);
      index += 8 * per_row;
      to += static_cast<u64>(8 * (kBlock / 2)) * per_row;
      scale_to += scale_step;
    }
  }

  TEJIT_DEVICE void columnwise(const uint4* x) const {
    const int group = lane % 8, pair = lane / 8;  // of 16 rows; of two columns in the warp's chunk
    const u32 block = row0 / kBlock + group, column = col0 + warp * 8 + pair * 2, per_column = rows / kBlock;
    u64 index = static_cast<u64>(column) * per_column + block;
    u8* to = args.col.data + index * (kBlock / 2);
    u8* scale_to = args.col.scale_inv + scale_at(column, block, col_pitch, swizzled);
    const u32 scale_step = swizzled ? 16 : col_pitch;
    const int columns = block < per_column && column < cols ? static_cast<int>(min(cols - column, 2u)) : 0;
    x += group * kBlock * kChunks;
    const u32* even = reinterpret_cast<const u32*>(x + (warp ^ group)) + pair;
    const u32* odd = reinterpret_cast<const u32*>(x + (warp ^ group ^ 1)) + pair;
    u32 w[16];
#pragma unroll
    for (int r = 0; r < 16; ++r) w[r] = (r % 2 ? odd : even)[r * kChunks * 4];
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      Packed here;
      if constexpr (kRht) {
        float f[16];
        const u32 selector = half ? 0x3244 : 0x1044;
#pragma unroll
        for (int r = 0; r < 16; ++r) f[r] = signed_by<kSigns>(__uint_as_float(permute(w[r], 0, selector)), r);
        transform(f, here.w);
      } else {
        const u32 selector = half ? 0x7632 : 0x5410;
#pragma unroll
        for (int i = 0; i < 8; ++i) here.w[i] = permute(w[2 * i], w[2 * i + 1], selector);
      }
      const BlockScale scale = scale_of(square ? memory.amax[group][warp / 2] : amax_of(here), col_scales);
      const uint2 codes = encode<kRandom>(here, scale, col_scales, col_random, index);
      if (half < columns) store8<Store::kStream>(to, codes.x, codes.y);
      if (block < col_pitch) *scale_to = static_cast<u8>(scale.byte);
      index += per_column;
      to += static_cast<u64>(kBlock / 2) * per_column;
      scale_to += scale_step;
    }
  }

  TEJIT_DEVICE void run() {
    const bool row = args.row.data != nullptr, col = args.col.data != nullptr;
    // Tiles cover whatever the buffers of scales have behind the last one: missing elements are 0, and so is
    // the scale of a block of them.
    const u32 across = col ? static_cast<u32>(padded_lines(cols) / kCols) : (cols + kCols - 1) / kCols;
    const u32 down = (rows + kRows - 1) / kRows;
    const u32 step_down = gridDim.x / across, step_across = gridDim.x - step_down * across;
    u32 next_row = blockIdx.x / across, next_col = blockIdx.x - next_row * across;
    if (next_row < down) fetch(memory.x[0], next_row * kRows, next_col * kCols);
    wait_for_previous_kernel();
    if (row)
      row_scales =
          scales_of(begin<TileShape::kThreads>(args.row, args.e4m3_max, memory.scratch[0]), args.e4m3_max);
    if (col)
      col_scales =
          scales_of(begin<TileShape::kThreads>(args.col, args.e4m3_max, memory.scratch[1]), args.e4m3_max);
    row_random = random_of(kRandom ? args.seed : nullptr, false);
    col_random = random_of(kRandom ? args.seed : nullptr, true);
#pragma unroll 1
    for (int turn = 0; next_row < down; turn ^= 1) {
      row0 = next_row * kRows;
      col0 = next_col * kCols;
      next_row += step_down;
      next_col += step_across;
      if (next_col >= across) {
        next_col -= across;
        ++next_row;
      }
      wait_for_copies();
      __syncthreads();  // this tile is there, and nobody reads the one before any more
      if (next_row < down) fetch(memory.x[turn ^ 1], next_row * kRows, next_col * kCols);
      u32 amax = 0;
      if (square) {
        amax = tile_amax(memory.x[turn]);
        __syncthreads();
      }
      if (row) rowwise(memory.x[turn], amax);
      if (col) columnwise(memory.x[turn]);
    }
  }
};

template <bool kRht, bool kRandom>
TEJIT_DEVICE void cast_tile(const CastArgs& args) {
  alignas(16) __shared__ TileMemory memory;
  if (is_noop(args.noop)) return;
  TileCast<kRht, kRandom>(args, memory).run();
}

}  // namespace nvfp4
}  // namespace tejit
