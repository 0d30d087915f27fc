// Tiles of a matrix that become bytes, in the matrix' own order and transposed.
//
// A block of threads moves one tile of kRows rows by kLanes vectors; while it waits for its loads, the other
// blocks of its multiprocessor make bytes and write them. A thread holds four rows of one vector in each
// step. Of the bytes it makes of them it turns every 4x4 square in registers, and puts the words (four rows
// of one column) into shared memory column by column; from there whole columns of the tile, kRows bytes long,
// go to the transpose.
#pragma once

#include "common/element.cuh"

namespace tejit {

template <typename T, Store kStore>
TEJIT_DEVICE void store_vector(u8* out, const u32 (&word)[T::kPerVector / 4]) {
  if constexpr (T::kPerVector == 8) {
    store8<kStore>(out, word[0], word[1]);
  } else {
    store4<kStore>(out, word[0]);
  }
}

// The bytes of two neighbours at once.
template <typename T, Store kStore>
TEJIT_DEVICE void store_pair(u8* out, const u32 (&first)[T::kPerVector / 4],
                             const u32 (&second)[T::kPerVector / 4]) {
  if constexpr (T::kPerVector == 8) {
    store16<kStore>(out, make_uint4(first[0], first[1], second[0], second[1]));
  } else {
    store8<kStore>(out, first[0], second[0]);
  }
}

// Whether a whole vector of T's bytes can be written at once there (or nothing is written at all).
template <typename T>
TEJIT_DEVICE bool takes_vectors(const u8* out) {
  return reinterpret_cast<u64>(out) % T::kPerVector == 0;
}

template <int kThreads_, int kRows_, int kLanes_, Load kLoad_ = Load::kCached, Store kStore_ = Store::kStream>
struct TilePlan {
  static constexpr int kThreads = kThreads_;
  static constexpr int kRows = kRows_;
  static constexpr int kLanes = kLanes_;
  static constexpr Load kLoad = kLoad_;
  static constexpr Store kStore = kStore_;
};

// Four words of four bytes, each a row of a square, into the square's columns.
TEJIT_DEVICE void transpose_square(u32 (&w)[4]) {
  const u32 a = permute(w[0], w[1], 0x5140), b = permute(w[2], w[3], 0x5140);
  const u32 c = permute(w[0], w[1], 0x7362), d = permute(w[2], w[3], 0x7362);
  w[0] = permute(a, b, 0x5410);
  w[1] = permute(a, b, 0x7632);
  w[2] = permute(c, d, 0x5410);
  w[3] = permute(c, d, 0x7632);
}

// A tile, counted in tiles.
struct Place {
  u32 row, col;
};

template <typename T, typename Plan, typename Args>
struct Tile {
  static constexpr int kPer = T::kPerVector;
  static constexpr int kCols = Plan::kLanes * kPer;  // columns of a tile
  static constexpr int kQuads = Plan::kRows / 4;     // words of a column of a tile
  static constexpr int kQuadStep =
      Plan::kThreads / Plan::kLanes;  // quads that the block's threads cover at once
  static constexpr int kSteps = kQuads / kQuadStep;
  static constexpr int kTwist = 32 / Plan::kLanes;
  static_assert(kQuads % 32 == 0, "the twist needs every column to start at bank 0");
  static_assert(kQuads % kQuadStep == 0 && Plan::kThreads % 32 == 0 && 32 % Plan::kLanes == 0,
                "whole warps and steps");

  using Vectors = uint4[kSteps][4];

  const Args& args;
  const T type;
  const u32 tile_cols, tile_rows;
  const int lane, quad;
  const bool wide_x, wide_row;  // rows of x, and of the bytes in its order, are whole vectors
  Vectors v;

  TEJIT_DEVICE explicit Tile(const Args& a)
      : args(a),
        type(type_of<T>(a)),
        tile_cols(static_cast<u32>((a.cols + kCols - 1) / kCols)),
        tile_rows(static_cast<u32>((a.rows + Plan::kRows - 1) / Plan::kRows)),
        lane(threadIdx.x % Plan::kLanes),
        quad(threadIdx.x / Plan::kLanes),
        wide_x(T::kFused || (a.cols % kPer == 0 && reinterpret_cast<u64>(a.x) % (kPer * type.bytes()) == 0)),
        wide_row(a.cols % kPer == 0 && takes_vectors<T>(a.row)) {}

  // Of this block.
  TEJIT_DEVICE Place place() const {
    const u32 row = blockIdx.x / tile_cols;
    return {row, blockIdx.x - row * tile_cols};
  }

  TEJIT_DEVICE static i64 row0(Place p) { return static_cast<i64>(p.row) * Plan::kRows; }
  TEJIT_DEVICE static i64 col0(Place p) { return static_cast<i64>(p.col) * kCols; }
  TEJIT_DEVICE int rows_left(Place p) const { return clamp_left(args.rows - row0(p)); }
  TEJIT_DEVICE int cols_left(Place p) const { return clamp_left(args.cols - col0(p)); }

  // A thread's own elements: four rows from each of quads quad, quad + kQuadStep, ...; the columns of vector
  // `lane`.
  TEJIT_DEVICE i64 first_element(Place p) const {
    return (row0(p) + quad * 4) * args.cols + col0(p) + lane * kPer;
  }

  TEJIT_DEVICE const char* first_address(Place p) const {
    const i64 first = (row0(p) + quad * 4) * x_pitch() + col0(p) + lane * kPer;
    return static_cast<const char*>(args.x) + first * type.bytes();
  }

  // Elements from row to row of x.
  TEJIT_DEVICE i64 x_pitch() const {
    if constexpr (T::kFused) {
      return args.source.pitch;
    } else {
      return args.cols;
    }
  }

  // How many rows of the tile a thread has from its own first one on: none where its columns are past the
  // end.
  TEJIT_DEVICE int rows_left_here(Place p) const {
    return cols_left(p) > lane * kPer ? rows_left(p) - quad * 4 : 0;
  }

  // The same of x, which a fused cast pads.
  TEJIT_DEVICE int x_rows_left_here(Place p) const {
    if constexpr (T::kFused) {
      return cols_left(p) > lane * kPer ? clamp_left(args.source.rows - row0(p)) - quad * 4 : 0;
    } else {
      return rows_left_here(p);
    }
  }

  static constexpr int kQuadsHere = 32 / Plan::kLanes, kRowsHere = kQuadsHere * 4;  // of a warp, in a step

  // The last row of a thread, counted from its first.
  static constexpr int kReach = (kSteps - 1) * kQuadStep * 4 + 3;

  // Past the edges 0, which no maximum notices. What was loaded is to be settled before it is used.
  TEJIT_DEVICE void load(Place p) {
    const int rows = x_rows_left_here(p);
    const char* from = first_address(p);
    const i64 pitch = x_pitch() * type.bytes();
    if (wide_x && rows > kReach) {
      each_vector([&](int s, int r, int row) {
        v[s][r] = type.template load_vector<Plan::kLoad>(from + row * pitch);
      });
      return;
    }
    each_vector([&](int s, int r, int) { v[s][r] = make_uint4(0, 0, 0, 0); });
    if (wide_x) {
      each_vector([&](int s, int r, int row) {
        if (row < rows) v[s][r] = type.template load_vector<Plan::kLoad>(from + row * pitch);
      });
    } else if (!T::kFused && rows > 0) {
      const int cols = cols_left(p) - lane * kPer;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const char* step = from + s * kQuadStep * 4 * pitch;
        const int left = rows - s * kQuadStep * 4;
#pragma unroll 1
        for (int i = 0; i < kPer; ++i) {
          const int there = i < cols ? left : 0;
          u32 word[4];  // loaded all before the first is used
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            word[r] = 0;
            if (r < there) word[r] = type.load_word(step + r * pitch, i);
          }
#pragma unroll
          for (int r = 0; r < 4; ++r) v[s][r] = T::push(v[s][r], word[r]);
        }
      }
    }
  }

  // What a fused cast needs beside x. It is on its way when this returns, and the kernel before has ended.
  TEJIT_DEVICE auto beside(Place p) const {
    if constexpr (T::kFused) {
      wait_for_previous_kernel();
      const int in_warp = threadIdx.x % 32;
      const i64 own = row0(p) + in_warp / kRowsHere * (kQuadStep * 4) + threadIdx.x / 32 * kRowsHere +
                      in_warp % kRowsHere;
      return type.beside(own, in_warp < kSteps * kRowsHere, col0(p) + lane * kPer, x_rows_left_here(p) > 0);
    } else {
      return 0;
    }
  }

  TEJIT_DEVICE void settle(Place p) { settle(p, beside(p)); }

  template <typename Beside>
  TEJIT_DEVICE void settle(Place p, Beside beside) {
    if constexpr (T::kFused) {
      static_assert(kSteps * kRowsHere <= 32, "a thread for each row of a warp");
      const int rows = x_rows_left_here(p);
      type.settle(beside.row, beside.columns);
      const auto knows = [&](int s, int r) { return s * kRowsHere + quad % kQuadsHere * 4 + r; };
      if (T::kAsksOnce && type.is_norm() && __all_sync(0xffffffffu, rows > kReach)) {
        each_vector([&](int s, int r, int) {
          v[s][r] = type.normalised(v[s][r], beside.row, knows(s, r), beside.columns);
        });
        return;
      }
      each_vector([&](int s, int r, int row) {
        v[s][r] = type.finish(v[s][r], beside.row, knows(s, r), beside.columns, row0(p) + quad * 4 + row,
                              col0(p) + lane * kPer, row < rows);
      });
    } else {
      if (wide_x) each_vector([&](int s, int r, int) { v[s][r] = type.settled(v[s][r]); });
    }
  }

  // f(step, row of the step's four, row counted from the thread's first)
  template <typename F>
  TEJIT_DEVICE static void each_vector(const F& f) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int r = 0; r < 4; ++r) f(s, r, s * kQuadStep * 4 + r);
    }
  }

  // Word q of a column lies at q ^ twist: then neither the threads that write (one word each, 32 / kLanes
  // quads of kLanes vectors) nor those that read (16 bytes each, along a column) meet in a bank.
  TEJIT_DEVICE static int twist(int column) { return (column / kPer) * kTwist; }

  // The bytes of a thread's rows of step s, to x's own order.
  TEJIT_DEVICE void store_rows(Place p, int s, const u32 (&word)[4][kPer / 4]) const {
    const int rows = rows_left_here(p);
    u8* to = args.row + first_element(p);
    const int first = s * kQuadStep * 4;
    if (wide_row && rows > kReach) {
#pragma unroll
      for (int r = 0; r < 4; ++r) store_vector<T, Plan::kStore>(to + (first + r) * args.cols, word[r]);
      return;
    }
#pragma unroll 1
    for (int r = 0; r < 4 && first + r < rows; ++r) {
      u8* at = to + (first + r) * args.cols;
      u32 own[kPer / 4];
#pragma unroll
      for (int h = 0; h < kPer / 4; ++h)
        own[h] = r < 2 ? (r == 0 ? word[0][h] : word[1][h]) : (r == 2 ? word[2][h] : word[3][h]);
      if (wide_row) {
        store_vector<T, Plan::kStore>(at, own);
      } else {
        const int cols = cols_left(p) - lane * kPer;
#pragma unroll 1
        for (int i = 0; i < kPer && i < cols; ++i)
          at[i] = static_cast<u8>(permute(own[0], own[kPer / 4 - 1], i));
      }
    }
  }

  // Four rows' bytes of step s to the columns of the buffer.
  TEJIT_DEVICE void put_squares(u32* buffer, int s, const u32 (&word)[4][kPer / 4]) const {
    const int q = s * kQuadStep + quad;
#pragma unroll
    for (int h = 0; h < kPer / 4; ++h) {
      u32 square[4] = {word[0][h], word[1][h], word[2][h], word[3][h]};
      transpose_square(square);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        buffer[(lane * kPer + h * 4 + j) * kQuads + (q ^ (lane * kTwist))] = square[j];
      }
    }
  }

  // Columns of the tile to rows of the transpose, kUnit bytes a thread: neighbours in a warp write
  // neighbouring bytes.
  template <int kUnit>
  TEJIT_DEVICE void store_columns(Place p, const u32* buffer) const {
    constexpr int kUnits = Plan::kRows / kUnit;           // units of a column
    constexpr int kColumnStep = Plan::kThreads / kUnits;  // columns that the block's threads cover at once
    static_assert(Plan::kThreads % kUnits == 0 && kCols % kColumnStep == 0, "whole columns and steps");
    const int unit = threadIdx.x % kUnits;
    const int start = threadIdx.x / kUnits;
    if (unit * kUnit >= rows_left(p)) return;
    const int cols = cols_left(p);
    u8* to = args.col + (col0(p) + start) * args.rows + row0(p) + unit * kUnit;
#pragma unroll(kUnit == 16 ? 4 : 1)
    for (int i = 0; i < kCols; i += kColumnStep) {
      const int column = start + i;
      const int by = twist(column);
      const u32* from = buffer + column * kQuads;
      u8* at = to + i * args.rows;
      // Read in any case, so that several reads of shared memory are under way before the first store.
      if constexpr (kUnit == 16) {
        const uint4 w = *reinterpret_cast<const uint4*>(from + 4 * (unit ^ (by >> 2)));
        if (column < cols) store16<Plan::kStore>(at, kTwist < 4 ? untwist(w, by & 3) : w);
      } else if constexpr (kUnit == 4) {
        const u32 w = from[unit ^ by];
        if (column < cols) store4<Plan::kStore>(at, w);
      } else {
        const u32 w = from[(unit / 4) ^ by];
        if (column < cols) *at = static_cast<u8>(w >> (8 * (unit % 4)));
      }
    }
  }

  TEJIT_DEVICE static uint4 untwist(uint4 w, int by) {
    if (by & 1) w = make_uint4(w.y, w.x, w.w, w.z);
    if (by & 2) w = make_uint4(w.z, w.w, w.x, w.y);
    return w;
  }

  // As wide as addresses and sizes allow.
  TEJIT_DEVICE void store_transpose(Place p, const u32* buffer, u64 col_bits) const {
    if (col_bits % 16 == 0) {
      store_columns<16>(p, buffer);
    } else if (col_bits % 4 == 0) {
      store_columns<4>(p, buffer);
    } else {
      store_columns<1>(p, buffer);
    }
  }

  TEJIT_DEVICE u64 col_alignment() const {
    return reinterpret_cast<u64>(args.col) | static_cast<u64>(args.rows);
  }
};

}  // namespace tejit
