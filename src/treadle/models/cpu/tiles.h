// Matmuls of blocks of 32 x 32 numbers in bfloat16, summed in float32: on AMX tiles, or with AVX-512's dot products.
//
// The left side of a product is kept as rows; the right side in two halves of 16 columns, each with two neighbouring rows
// side by side, as both instructions read it. What is outside a matrix is filled with 0.

#pragma once

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define HAS_BLOCKS

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AMX_BF16__) && !defined(WITHOUT_TILES)
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_TILES
#endif

using i64 = int64_t;
using bfloat16 = uint16_t;

constexpr i64 SIDE = 32, HALF = SIDE / 2, BLOCK = SIDE * SIDE;
constexpr float LOG2_E = 1.4426950408889634f;

static inline i64 blocks_of(i64 count) { return (count + SIDE - 1) / SIDE; }

static inline uint32_t lowest_bits(i64 count) { return count >= SIDE ? ~0u : count <= 0 ? 0u : (1u << count) - 1; }

// Memory whose rows of a block are cache lines; not shrunk.
template <typename Number>
class Memory {
  std::vector<char> bytes;

 public:
  Number* of(i64 count) {
    constexpr i64 LINE = 64;
    if ((i64)bytes.size() < count * (i64)sizeof(Number) + LINE) bytes.resize(count * sizeof(Number) + LINE);
    return (Number*)(((uintptr_t)bytes.data() + LINE - 1) / LINE * LINE);
  }
};

// A part of a matrix whose rows lie `stride` numbers apart: some of its rows and columns, of which 32 are read.
struct Part {
  const bfloat16* at;
  i64 stride, rows, columns;

  __m512i row(i64 r) const {
    const i64 count = r < rows ? columns : 0;
    if (count >= SIDE) return _mm512_loadu_si512(at + r * stride);
    return count <= 0 ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi16(lowest_bits(count), at + r * stride);
  }
};

// Two rows with their numbers side by side: columns 0 to 15, and 16 to 31.
struct Sides {
  __m512i low, high;
};

static inline Sides side_by_side(__m512i one, __m512i other) {
  static constexpr struct alignas(64) Order {
    uint16_t at[2][SIDE] = {};
    constexpr Order() {
      for (int half = 0; half < 2; half++)
        for (int i = 0; i < HALF; i++) at[half][2 * i] = half * HALF + i, at[half][2 * i + 1] = SIDE + half * HALF + i;
    }
  } ORDER;
  return {_mm512_permutex2var_epi16(one, _mm512_load_si512(ORDER.at[0]), other),
          _mm512_permutex2var_epi16(one, _mm512_load_si512(ORDER.at[1]), other)};
}

// 16 x 16 pairs of numbers, in place.
static inline void transpose(__m512i* x) {
  __m512i y[HALF];
  for (int i = 0; i < HALF; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < HALF; i += 4)
    for (int j = 0; j < 2; j++) {
      x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
      x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
    }
  for (int i = 0; i < 4; i++) {
    y[i] = _mm512_shuffle_i32x4(x[i], x[4 + i], 0x88);
    y[4 + i] = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0x88);
    y[8 + i] = _mm512_shuffle_i32x4(x[i], x[4 + i], 0xdd);
    y[12 + i] = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    x[i] = _mm512_shuffle_i32x4(y[i], y[4 + i], 0x88);
    x[4 + i] = _mm512_shuffle_i32x4(y[8 + i], y[12 + i], 0x88);
    x[8 + i] = _mm512_shuffle_i32x4(y[i], y[4 + i], 0xdd);
    x[12 + i] = _mm512_shuffle_i32x4(y[8 + i], y[12 + i], 0xdd);
  }
}

static inline void keep(bfloat16* out, const __m512i* rows) {
  for (i64 r = 0; r < HALF; r++) _mm512_store_si512(out + r * SIDE, rows[r]);
}

// x as the left side of a product.
static inline void left(bfloat16* out, Part x) {
  for (i64 r = 0; r < SIDE; r++) _mm512_store_si512(out + r * SIDE, x.row(r));
}

// The transpose of x as the left side.
static inline void left_turned(bfloat16* out, Part x) {
  __m512i low[HALF], high[HALF];
  for (i64 r = 0; r < HALF; r++) {
    const Sides sides = side_by_side(x.row(2 * r), x.row(2 * r + 1));
    low[r] = sides.low, high[r] = sides.high;
  }
  transpose(low), keep(out, low);
  transpose(high), keep(out + BLOCK / 2, high);
}

// x as the right side.
static inline void right(bfloat16* out, Part x) {
  for (i64 r = 0; r < HALF; r++) {
    const Sides sides = side_by_side(x.row(2 * r), x.row(2 * r + 1));
    _mm512_store_si512(out + r * SIDE, sides.low);
    _mm512_store_si512(out + BLOCK / 2 + r * SIDE, sides.high);
  }
}

// The transpose of x as the right side.
static inline void right_turned(bfloat16* out, Part x) {
  for (i64 half = 0; half < 2; half++) {
    __m512i rows[HALF];
    for (i64 r = 0; r < HALF; r++) rows[r] = x.row(half * HALF + r);
    transpose(rows), keep(out + half * BLOCK / 2, rows);
  }
}

// 32 numbers, rounded.
static inline __m512i rounded(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

// A row of numbers that lies in blocks side by side, rounded.
static inline void store_row(bfloat16* out, const float* x, i64 size) {
  for (i64 i = 0; i < size; i += SIDE, x += BLOCK) {
    _mm512_mask_storeu_epi16(out + i, lowest_bits(size - i), rounded(_mm512_load_ps(x), _mm512_load_ps(x + HALF)));
  }
}

// 2^x, to 2 parts in 10^7.
static inline __m512 power(__m512 x) {
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), y = x - whole;
  __m512 sum = _mm512_set1_ps(1.5403530e-4f);
  for (float term : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f})
    sum = _mm512_fmadd_ps(sum, y, _mm512_set1_ps(term));
  return _mm512_scalef_ps(sum, whole);
}

#ifdef HAS_TILES

extern "C" bool has_tiles() { return true; }

// Asks the system once for the use of tiles in this process.
extern "C" bool ready() {
  constexpr int ASK_FOR_COMPONENT = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, ASK_FOR_COMPONENT, TILE_DATA) == 0;
}

// While one lives, its thread's eight tiles are of 16 rows of 64 bytes.
struct Tiles {
  Tiles() {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, none[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = HALF;
    _tile_loadconfig(&shape);
  }
  ~Tiles() { _tile_release(); }
};

// A row of `steps` blocks times a column of them into a block of sums, or added to it.
static inline void multiply(float* sums, const bfloat16* one, const bfloat16* other, i64 steps, bool is_more) {
  constexpr i64 LINE = SIDE * sizeof(float), LOWER = HALF * SIDE;
  if (is_more) {
    _tile_loadd(0, sums, LINE);
    _tile_loadd(1, sums + HALF, LINE);
    _tile_loadd(2, sums + LOWER, LINE);
    _tile_loadd(3, sums + LOWER + HALF, LINE);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (i64 s = 0; s < steps; s++, one += BLOCK, other += BLOCK) {
    _tile_loadd(4, one, 64);
    _tile_loadd(6, other, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, other + BLOCK / 2, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, one + BLOCK / 2, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, LINE);
  _tile_stored(1, sums + HALF, LINE);
  _tile_stored(2, sums + LOWER, LINE);
  _tile_stored(3, sums + LOWER + HALF, LINE);
}

#else

extern "C" bool has_tiles() { return false; }

extern "C" bool ready() { return true; }

struct Tiles {
  ~Tiles() {}
};

static inline void multiply(float* sums, const bfloat16* one, const bfloat16* other, i64 steps, bool is_more) {
  constexpr i64 ROWS = 8;
  for (i64 first = 0; first < SIDE; first += ROWS, sums += ROWS * SIDE) {
    __m512 sum[ROWS][2];
    for (i64 r = 0; r < ROWS; r++)
      for (i64 half = 0; half < 2; half++)
        sum[r][half] = is_more ? _mm512_load_ps(sums + r * SIDE + half * HALF) : _mm512_setzero_ps();
    for (i64 i = 0; i < steps * HALF; i++) {
      const bfloat16 *rows = one + i / HALF * BLOCK + first * SIDE + i % HALF * 2, *columns = other + i / HALF * BLOCK + i % HALF * SIDE;
      const auto low = (__m512bh)_mm512_load_si512(columns), high = (__m512bh)_mm512_load_si512(columns + BLOCK / 2);
      for (i64 r = 0; r < ROWS; r++) {
        int pair;
        memcpy(&pair, rows + r * SIDE, sizeof pair);
        const auto both = (__m512bh)_mm512_set1_epi32(pair);
        sum[r][0] = _mm512_dpbf16_ps(sum[r][0], both, low);
        sum[r][1] = _mm512_dpbf16_ps(sum[r][1], both, high);
      }
    }
    for (i64 r = 0; r < ROWS; r++)
      for (i64 half = 0; half < 2; half++) _mm512_store_ps(sums + r * SIDE + half * HALF, sum[r][half]);
  }
}

#endif

#else

extern "C" bool has_tiles() { return false; }

extern "C" bool ready() { return false; }

#endif
