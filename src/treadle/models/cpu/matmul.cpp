// The gradient of a linear layer's weights in bfloat16 on tiles: gradᵀ x, where both lie token by token. matmul.py compiles
// and calls it.
//
// torch's matmul takes twice as long for a left side that lies in columns as for one that lies in rows. Here the wider of
// the two is turned while it is packed, some tokens at a time, and the sums of a chunk of outputs stay in cache.
//
// Axis letters: N tokens.

#include "tiles.h"

#ifdef HAS_BLOCKS

#include <omp.h>

constexpr i64 TOKENS = 288;                      // that are summed at once
constexpr i64 MOST_ROWS = 384, MOST_COLUMNS = 576;  // of a chunk of outputs

struct Matrix {
  const bfloat16* at;
  i64 stride, width;
  Part part(i64 token, i64 tokens, i64 column) const { return {at + token * stride + column, stride, tokens, width - column}; }
};

// Parts of like size, each whole blocks.
struct Split {
  i64 size, count;
  Split(i64 total, i64 most, i64 multiple) {
    count = (total + most - 1) / most;
    count = (count + multiple - 1) / multiple * multiple;
    size = blocks_of((total + count - 1) / count) * SIDE;
    count = (total + size - 1) / size;
  }
};

static void store_block(bfloat16* out, i64 stride, const float* sums, i64 rows, i64 columns) {
  for (i64 r = 0; r < std::min(SIDE, rows); r++, out += stride, sums += SIDE) store_row(out, sums, std::min(SIDE, columns));
}

// The transpose of a block.
static void store_turned(bfloat16* out, i64 stride, const float* sums, i64 rows, i64 columns) {
  alignas(64) bfloat16 kept[BLOCK], turned[BLOCK];
  store_block(kept, SIDE, sums, SIDE, SIDE);
  left_turned(turned, {kept, SIDE, SIDE, SIDE});
  for (i64 c = 0; c < std::min(SIDE, columns); c++)
    _mm512_mask_storeu_epi16(out + c * stride, lowest_bits(rows), _mm512_load_si512(turned + c * SIDE));
}

// oneᵀ other, [one.width, other.width], or its transpose.
static void multiply_turned(bfloat16* out, Matrix one, Matrix other, i64 tokens, bool is_turned) {
  const int threads = omp_get_max_threads();
  const Split times(tokens, TOKENS, 1), rows(one.width, MOST_ROWS, threads), columns(other.width, MOST_COLUMNS, 1);
  const i64 all_columns = blocks_of(other.width), steps = times.size / SIDE;
  static thread_local Memory<bfloat16> right_m;
  bfloat16* const packed = right_m.of(times.count * steps * all_columns * BLOCK);
#pragma omp parallel
  {
    const Tiles tiles;
    static thread_local Memory<bfloat16> left_m;
    static thread_local Memory<float> sums_m;
    bfloat16* ones = left_m.of(rows.size * times.size);
    float* sums = sums_m.of(rows.size * columns.size);
#pragma omp for collapse(2)
    for (i64 t = 0; t < times.count; t++)
      for (i64 s = 0; s < steps; s++)
        for (i64 c = 0; c < all_columns; c++) {
          const i64 token = t * times.size + s * SIDE;
          right(packed + ((t * all_columns + c) * steps + s) * BLOCK, other.part(token, tokens - token, c * SIDE));
        }
#pragma omp for collapse(2) schedule(dynamic)
    for (i64 i = 0; i < rows.count; i++)
      for (i64 j = 0; j < columns.count; j++) {
        const i64 row = i * rows.size, column = j * columns.size, width = std::min(columns.size, other.width - column);
        const i64 row_blocks = blocks_of(std::min(rows.size, one.width - row)), column_blocks = blocks_of(width);
        for (i64 t = 0; t < times.count; t++) {
          for (i64 s = 0; s < steps; s++)
            for (i64 r = 0; r < row_blocks; r++) {
              const i64 token = t * times.size + s * SIDE;
              left_turned(ones + (r * steps + s) * BLOCK, one.part(token, tokens - token, row + r * SIDE));
            }
          const bfloat16* others = packed + (t * all_columns + column / SIDE) * steps * BLOCK;
          for (i64 c = 0; c < column_blocks; c++)
            for (i64 r = 0; r < row_blocks; r++) {
              float* sum = sums + (c * row_blocks + r) * BLOCK;
              multiply(sum, ones + r * steps * BLOCK, others + c * steps * BLOCK, steps, t > 0);
              if (t + 1 < times.count) continue;
              const i64 from_row = row + r * SIDE, from_column = column + c * SIDE, rest = one.width - from_row, more = other.width - from_column;
              if (is_turned)
                store_turned(out + from_column * one.width + from_row, one.width, sum, rest, more);
              else
                store_block(out + from_row * other.width + from_column, other.width, sum, rest, more);
            }
        }
      }
  }
}

// grad [N, outputs] and x [N, inputs], each with a stride from token to token → [outputs, inputs].
extern "C" void weight_gradient(bfloat16* out, const bfloat16* grad, const bfloat16* x, i64 grad_stride, i64 x_stride, i64 tokens,
                                i64 outputs, i64 inputs) {
  const Matrix of_outputs{grad, grad_stride, outputs}, given{x, x_stride, inputs};
  if (outputs >= inputs)
    multiply_turned(out, of_outputs, given, tokens, false);
  else
    multiply_turned(out, given, of_outputs, tokens, true);
}

#endif
