// bfloat16 columnwise, or in both directions, or in 16x16 tiles: one reading of x, by tiles of 128x128 that
// go through shared memory. While one block of threads waits for its tile, the others of the multiprocessor
// work.
//
// Warp w takes rows 16w.. of the tile rowwise (eight threads a row, each a block), then columns 16w..
// columnwise (eight threads a pair of columns, each 16 rows), so that whole sectors of both outputs are
// written at once.
#pragma once

#include "nvfp4/begin.cuh"
#include "nvfp4/hadamard.cuh"

namespace tejit {
namespace nvfp4 {

struct TileMemory {
  static constexpr int kChunks = TileShape::kCols / 8;  // 16-byte pieces of a row
  uint4 x[TileShape::kRows * kChunks];
  u32 amax[TileShape::kRows / kBlock][TileShape::kCols / kBlock];  // of 16x16 tiles
  u32 scratch[2][32];
};

template <bool kRht, bool kRandom>
struct TileCast {
  static constexpr int kChunks = TileMemory::kChunks;
  static constexpr int kRows = TileShape::kRows, kCols = TileShape::kCols;
  static_assert(TileShape::kThreads == 256 && kRows == 128 && kCols == 128,
                "the threads' places rest on these");

  static constexpr int kUnroll = kRandom ? 1 : 2;

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

  // Where chunk c of a row in the 16 rows `group` lies: then neither the threads that read a row (every
  // second chunk) nor those that read one word of eight groups meet in a bank.
  TEJIT_DEVICE static int place(int group, int chunk) { return chunk ^ group ^ (chunk / 8); }

  // How many rows or columns of the tile from `first` on exist, less `skipped`.
  TEJIT_DEVICE static int left(u32 size, u32 first, int skipped) {
    return static_cast<int>(min(size - first, static_cast<u32>(kRows))) - skipped;
  }

  // A warp copies the sixteen rows that it works on rowwise, two at once.
  TEJIT_DEVICE void fetch() const {
    constexpr int kStep = 32 / kChunks;
    const int chunk = lane % kChunks, line = warp * kBlock + lane / kChunks;
    const u32 column = col0 + chunk * 8;
    const int there = column < cols ? left(rows, row0, line) : 0;
    const u16* from = static_cast<const u16*>(args.x) + (static_cast<u64>(row0 + line) * cols + column);
    uint4* to = memory.x + line * kChunks + place(warp, chunk);
#pragma unroll
    for (int i = 0; i < kBlock; i += kStep) {
      copy16(to + i * kChunks, from, i < there, policy);
      from += kStep * static_cast<u64>(cols);
    }
  }

  // Half a row of a later tile to L2: memory has work while this block of threads computes.
  TEJIT_DEVICE void prefetch(u32 first_row, u32 first_col) const {
    const u32 row = first_row + threadIdx.x / 2, column = first_col + threadIdx.x % 2 * (kCols / 2);
    if (row < rows && column < cols)
      prefetch_line(static_cast<const u16*>(args.x) + (static_cast<u64>(row) * cols + column));
  }

  // Where a thread's block begins: of row warp * 16 + lane / 8, and of every fourth row below it.
  TEJIT_DEVICE int own_block() const {
    return (warp * kBlock + lane / 8) * kChunks + place(warp, lane % 8 * 2);
  }

  TEJIT_DEVICE Packed load_block(int at) const {
    const uint4 a = memory.x[at], b = memory.x[at ^ 1];
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
  }

  // The amax of each 16x16 tile to all of the warp's threads that hold rows of it, and to `memory`.
  TEJIT_DEVICE u32 tile_amax() const {
    int at = own_block();
    u32 m = 0;
#pragma unroll 1
    for (int i = 0; i < kBlock; i += 4, at += 4 * kChunks) m = max(m, amax_of(load_block(at)));
    m = max(m, __shfl_xor_sync(0xffffffffu, m, 8));
    m = max(m, __shfl_xor_sync(0xffffffffu, m, 16));
    if (lane < 8) memory.amax[warp][lane] = m;
    return m;
  }

  TEJIT_DEVICE void rowwise(u32 shared_amax) const {
    const int block = lane % 8, line = warp * kBlock + lane / 8;
    const u32 row = row0 + line, column = col0 / kBlock + block, per_row = cols / kBlock;
    u64 index = static_cast<u64>(row) * per_row + column;
    u8* to = args.row.data + index * (kBlock / 2);
    u8* scale_to = args.row.scale_inv + scale_at(row, column, row_pitch, swizzled);
    const u32 scale_step = swizzled ? 4 * 16 : 4 * row_pitch;
    const u64 step = static_cast<u64>(4 * (kBlock / 2)) * per_row;
    const int there = column < per_row ? left(rows, row0, line) : 0;
    const bool scale_there = column < row_pitch;
    int at = own_block();
    BlockScale scale;
    if (square) scale = scale_of(shared_amax, row_scales);
#pragma unroll kUnroll
    for (int i = 0; i < kBlock; i += 4) {
      const Packed here = load_block(at);
      if (!square) scale = scale_of(amax_of(here), row_scales);
      const uint2 codes = encode<kRandom>(here, scale, row_random, index);
      if (i < there) store8<Store::kStream>(to, codes.x, codes.y);
      if (scale_there) *scale_to = static_cast<u8>(scale.byte);
      if constexpr (kRandom) index += 4 * per_row;
      at += 4 * kChunks;
      to += step;
      scale_to += scale_step;
    }
  }

  TEJIT_DEVICE void columnwise() const {
    const int group = lane % 8;  // of 16 rows
    const int first = warp * 16 + lane / 8 * 2;
    const u32 block = row0 / kBlock + group, per_column = rows / kBlock, step = per_column * (kBlock / 2);
    const int there = block < per_column ? left(cols, col0, first) : 0;
    const bool scale_there = block < col_pitch;
    const u32 scale_step = swizzled ? 16 : col_pitch;
    u64 index = static_cast<u64>(col0 + first) * per_column + block;
    u8* to = args.col.data + index * (kBlock / 2);
    u8* scale_to = args.col.scale_inv + scale_at(col0 + first, block, col_pitch, swizzled);
    int at = group * kBlock * kChunks + place(group, 2 * warp);
    // The warp's two chunks lie side by side, in one order or the other.
#pragma unroll 1
    for (int chunk = 0; chunk < 16; chunk += 8) {
      u32 w[16];
#pragma unroll
      for (int r = 0; r < 16; ++r)
        w[r] = reinterpret_cast<const u32*>(memory.x + at)[r * kChunks * 4 + lane / 8];
#pragma unroll kUnroll
      for (int half = 0; half < 2; ++half) {
        Packed here;
        if constexpr (kRht) {
          float f[16];
          const u32 selector = half ? 0x3244 : 0x1044;
#pragma unroll
          for (int r = 0; r < 16; ++r)
            f[r] = signed_by<kSigns>(__uint_as_float(permute(w[r], 0, selector)), r);
          transform(f, here.w);
        } else {
          const u32 selector = half ? 0x7632 : 0x5410;
#pragma unroll
          for (int i = 0; i < 8; ++i) here.w[i] = permute(w[2 * i], w[2 * i + 1], selector);
        }
        const BlockScale scale = scale_of(square ? memory.amax[group][warp] : amax_of(here), col_scales);
        const uint2 codes = encode<kRandom>(here, scale, col_random, index);
        if (chunk + half < there) store8<Store::kStream>(to, codes.x, codes.y);
        if (scale_there) *scale_to = static_cast<u8>(scale.byte);
        if constexpr (kRandom) index += per_column;
        to += step;
        scale_to += scale_step;
      }
      if constexpr (kRandom) index += 6 * per_column;
      to += 6 * static_cast<u64>(step);
      scale_to += 6 * scale_step;
      at ^= 1;
    }
  }

  TEJIT_DEVICE void run() {
    const bool row = args.row.data != nullptr, col = args.col.data != nullptr;
    // Tiles cover whatever the buffers of scales have behind the last one: missing elements are 0, and so is
    // the scale of a block of them.
    const u32 across = (cols + kCols - 1) / kCols, down = (rows + kRows - 1) / kRows;
    const u32 step_down = gridDim.x / across, step_across = gridDim.x - step_down * across;
    u32 tile_row = blockIdx.x / across, tile_col = blockIdx.x - tile_row * across;
    if (tile_row >= down) return;
    row0 = tile_row * kRows;
    col0 = tile_col * kCols;
    fetch();
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
    for (;;) {
      tile_row += step_down;
      tile_col += step_across;
      if (tile_col >= across) {
        tile_col -= across;
        ++tile_row;
      }
      const bool more = tile_row < down;
      wait_for_copies();
      __syncthreads();
      if (more) prefetch(tile_row * kRows, tile_col * kCols);
      u32 amax = 0;
      if (square) {
        amax = tile_amax();
        __syncthreads();
      }
      if (row) rowwise(amax);
      if (col) columnwise();
      if (!more) return;
      __syncthreads();  // nobody reads this tile any more
      row0 = tile_row * kRows;
      col0 = tile_col * kCols;
      fetch();
    }
  }
};

template <bool kRht, bool kRandom>
TEJIT_DEVICE void cast_tile(const CastArgs& args) {
  alignas(32) __shared__ TileMemory memory;
  if (is_noop(args.noop)) return;
  TileCast<kRht, kRandom>(args, memory).run();
}

}  // namespace nvfp4
}  // namespace tejit
