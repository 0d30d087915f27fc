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
  const u32 row_pitch, col_pitch;
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
        row_pitch(static_cast<u32>(pitch_of(a.cols))),
        col_pitch(static_cast<u32>(pitch_of(a.rows))),
        policy(evict_first_policy()),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32) {}

  // Chunk c of a row lies at another place in every 16 rows and in odd rows: then neither the threads that
  // read two rows (every second chunk of them) nor those that read one word of eight rows meet in a bank.
  TEJIT_DEVICE static int place(int row, int chunk) {
    return row * kChunks + (chunk ^ (row >> 4) ^ (row & 1));
  }

  TEJIT_DEVICE void fetch(uint4* to, u32 first_row, u32 first_col) const {
    constexpr int kStep = TileShape::kThreads / kChunks;
    const int chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks;
    const u32 row = first_row + first, column = first_col + chunk * 8;
    const u16* from = static_cast<const u16*>(args.x) + static_cast<i64>(row) * args.cols + column;
#pragma unroll
    for (int s = 0; s < kRows; s += kStep) {
      copy16(to + place(first + s, chunk), from, row + s < args.rows && column < args.cols, policy);
      from += kStep * args.cols;
    }
  }

  TEJIT_DEVICE static Packed row_block(const uint4* x, int row, int block) {
    const uint4 a = x[place(row, 2 * block)], b = x[place(row, 2 * block + 1)];
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
  }

  // The amax of each 16x16 tile to all of the warp's threads that hold rows of it, and to `memory`.
  TEJIT_DEVICE u32 tile_amax(const uint4* x) const {
    const int row = warp * kBlock + lane / 4, block = lane % 4;
    u32 m = max(amax_of(row_block(x, row, block)), amax_of(row_block(x, row + 8, block)));
#pragma unroll
    for (int step = 4; step < 32; step *= 2) m = max(m, __shfl_xor_sync(0xffffffffu, m, step));
    if (lane < 4) memory.amax[warp][lane] = m;
    return m;
  }

  TEJIT_DEVICE void rowwise(const uint4* x, u32 shared_amax) const {
    const int block = lane % 4, first = warp * kBlock + lane / 4;
    const u32 row = row0 + first, column = col0 / kBlock + block;
    const u32 per_row = static_cast<u32>(args.cols / kBlock);
    i64 index = static_cast<i64>(row) * per_row + column;
    u8* scale_to = args.row.scale_inv + scale_at(row, column, row_pitch, swizzled);
    const i64 scale_step = swizzled ? 8 * 16 : 8 * static_cast<i64>(row_pitch);
    BlockScale scale;
    if (square) scale = scale_of(shared_amax, row_scales);
#pragma unroll 1
    for (int half = 0; half < kBlock; half += 8) {
      const Packed here = row_block(x, first + half, block);
      if (!square) scale = scale_of(amax_of(here), row_scales);
      const uint2 codes = encode<kRandom>(here, scale, row_random, static_cast<u64>(index));
      if (row + half < args.rows && column < per_row)
        store8<Store::kStream>(args.row.data + index * (kBlock / 2), codes.x, codes.y);
      if (column < row_pitch) *scale_to = static_cast<u8>(scale.byte);
      index += 8 * static_cast<i64>(per_row);
      scale_to += scale_step;
    }
  }

  TEJIT_DEVICE void columnwise(const uint4* x) const {
    const int group = lane % 8, pair = lane / 8;  // of 16 rows; of two columns in the warp's chunk
    const u32 block = row0 / kBlock + group, column = col0 + warp * 8 + pair * 2;
    const u32 per_column = static_cast<u32>(args.rows / kBlock);
    i64 index = static_cast<i64>(column) * per_column + block;
    u8* scale_to = args.col.scale_inv + scale_at(column, block, col_pitch, swizzled);
    const u32 scale_step = swizzled ? 16 : col_pitch;
    u32 w[16];
#pragma unroll
    for (int r = 0; r < 16; ++r)
      w[r] = reinterpret_cast<const u32*>(x)[place(group * kBlock + r, warp) * 4 + pair];
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
      const uint2 codes = encode<kRandom>(here, scale, col_random, static_cast<u64>(index));
      if (column + half < args.cols && block < per_column)
        store8<Store::kStream>(args.col.data + index * (kBlock / 2), codes.x, codes.y);
      if (block < col_pitch) *scale_to = static_cast<u8>(scale.byte);
      index += per_column;
      scale_to += scale_step;
    }
  }

  TEJIT_DEVICE void run() {
    const bool row = args.row.data != nullptr, col = args.col.data != nullptr;
    // Tiles cover whatever the buffers of scales have behind the last one: missing elements are 0, and so is
    // the scale of a block of them.
    const u32 across =
        static_cast<u32>(col ? padded_lines(args.cols) / kCols : (args.cols + kCols - 1) / kCols);
    const u32 tiles = across * static_cast<u32>((args.rows + kRows - 1) / kRows);
    const auto fetch_tile = [&](u32 tile, int turn) {
      if (tile < tiles) fetch(memory.x[turn], tile / across * kRows, tile % across * kCols);
    };
    u32 tile = blockIdx.x;
    fetch_tile(tile, 0);
    wait_for_previous_kernel();
    if (row)
      row_scales =
          scales_of(begin<TileShape::kThreads>(args.row, args.e4m3_max, memory.scratch[0]), args.e4m3_max);
    if (col)
      col_scales =
          scales_of(begin<TileShape::kThreads>(args.col, args.e4m3_max, memory.scratch[1]), args.e4m3_max);
    row_random = random_of(kRandom ? args.seed : nullptr, false);
    col_random = random_of(kRandom ? args.seed : nullptr, true);
    for (int turn = 0; tile < tiles; tile += gridDim.x, turn ^= 1) {
      wait_for_copies();
      __syncthreads();  // this tile is there, and nobody reads the one before any more
      fetch_tile(tile + gridDim.x, turn ^ 1);
      row0 = tile / across * kRows;
      col0 = tile % across * kCols;
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
