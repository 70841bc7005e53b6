// The head of a model in bfloat16 without its logits: what a softmax over the vocabulary comes to for each row, and the
// gradients of hidden states and weights. head.py compiles and calls it.
//
// Each thread goes over columns of its own, a chunk of the vocabulary at a time that stays in its cache, for all rows; what
// threads found of the rows is added up in their order. Logits are made again in the backward pass (Wijmans et al. 2024, "Cut
// Your Losses in Large-Vocabulary Language Models", arXiv 2411.09009).
//
// Axis letters: N rows, D hidden size, V vocabulary.

#include "tiles.h"

#ifdef HAS_BLOCKS

#include <cmath>
#include <omp.h>

constexpr i64 PANELS = 8, CHUNK = PANELS * SIDE;  // of the vocabulary
constexpr i64 PIECE = 8;                          // blocks of rows whose part in the gradient of a chunk of weights is summed at once
constexpr i64 MOST_SUMS = 1 << 28;                // of all threads for the gradient of hidden states, 1 GiB: fewer threads where they need more
constexpr float LN_2 = 0.6931471805599453f;

// head.py reads the fields from here.
struct Head {
  const bfloat16 *hidden, *weight;  // [N, D] and [V, D], each dense
  const float* known;               // [N, 2]: factor on the scores, target
  float* sums;                      // [N, 3]: log of the sum, the target's logit, the mean logit
  const float* slopes;              // backward, as all that follow: [N, 5], see `of_scores`
  bfloat16 *of_hidden, *of_weight;  // either may be null
  i64 rows, size, vocab;
};

// What a thread has found of a row: its highest logit h, in powers of 2; the sum of 2^(x - h), and that of 2^(x - h) (x - h).
struct Found {
  float highest = -INFINITY, sum = 0, along = 0, target = 0;

  void raise(float now) {
    if (now <= highest) return;
    const float keep = highest == -INFINITY ? 0 : std::exp2(highest - now);
    along = keep * (sum ? along + sum * (highest - now) : 0), sum *= keep, highest = now;
  }
  void add(Found other) {
    const float now = std::max(highest, other.highest);
    raise(now), other.raise(now);
    sum += other.sum, along += other.along, target += other.target;
  }
};

// hidden as the left side of scores, and as the right side of the gradient of weights.
struct Hidden {
  Memory<bfloat16> left_m, right_m;
  bfloat16 *as_left, *as_right = nullptr;
  i64 blocks, parts;

  Hidden(const Head& head, bool both) : blocks(blocks_of(head.rows)), parts(blocks_of(head.size)) {
    as_left = left_m.of(blocks * parts * BLOCK);
    if (both) as_right = right_m.of(blocks * parts * BLOCK);
#pragma omp parallel for collapse(2)
    for (i64 b = 0; b < blocks; b++)
      for (i64 e = 0; e < parts; e++) {
        const Part part{head.hidden + b * SIDE * head.size + e * SIDE, head.size, head.rows - b * SIDE, head.size - e * SIDE};
        left(as_left + (b * parts + e) * BLOCK, part);
        if (both) right(as_right + (e * blocks + b) * BLOCK, part);
      }
  }
};

// A chunk of the vocabulary.
struct Chunk {
  i64 first, count;
  Chunk(const Head& head, i64 index) : first(index * CHUNK), count(std::min(CHUNK, head.vocab - index * CHUNK)) {}
  i64 panels() const { return blocks_of(count); }
  Part part(const Head& head, i64 panel, i64 e) const {
    return {head.weight + (first + panel * SIDE) * head.size + e * SIDE, head.size, count - panel * SIDE, head.size - e * SIDE};
  }
};

static void turned_columns(bfloat16* out, const Head& head, const Chunk& chunk, i64 parts) {
  for (i64 p = 0; p < chunk.panels(); p++)
    for (i64 e = 0; e < parts; e++) right_turned(out + (p * parts + e) * BLOCK, chunk.part(head, p, e));
}

// Takes in the scores of a row at a chunk.
static void take_in(Found& found, const float* scores, const float* known, const Chunk& chunk) {
  const float factor = known[0] * LOG2_E;
  __m512 most = _mm512_set1_ps(-INFINITY);
  const auto mask = [&](i64 p, i64 half) { return (__mmask16)(lowest_bits(chunk.count - p * SIDE) >> HALF * half); };
  for (i64 p = 0; p < chunk.panels(); p++)
    for (i64 half = 0; half < 2; half++)
      most = _mm512_mask_max_ps(most, mask(p, half), most, _mm512_load_ps(scores + p * BLOCK + half * HALF) * factor);
  found.raise(_mm512_reduce_max_ps(most));
  __m512 sum = _mm512_setzero_ps(), along = sum;
  for (i64 p = 0; p < chunk.panels(); p++)
    for (i64 half = 0; half < 2; half++) {
      const __m512 x = _mm512_load_ps(scores + p * BLOCK + half * HALF) * factor - found.highest;
      const __m512 share = _mm512_maskz_mov_ps(mask(p, half), power(x));
      sum += share, along = _mm512_fmadd_ps(share, x, along);
    }
  found.sum += _mm512_reduce_add_ps(sum), found.along += _mm512_reduce_add_ps(along);
  const i64 target = (i64)known[1] - chunk.first;
  if (target >= 0 && target < chunk.count) found.target = scores[target / SIDE * BLOCK + target % SIDE] * known[0];
}

extern "C" void head_sums(const Head* given) {
  const Head& head = *given;
  const Hidden hidden(head, false);
  const i64 chunks = (head.vocab + CHUNK - 1) / CHUNK;
  std::vector<std::vector<Found>> of_threads(omp_get_max_threads());
#pragma omp parallel
  {
    const Tiles tiles;
    static thread_local Memory<bfloat16> columns_m;
    static thread_local Memory<float> scores_m;
    bfloat16* columns = columns_m.of(PANELS * hidden.parts * BLOCK);
    float* scores = scores_m.of(PANELS * BLOCK);
    std::vector<Found>& found = of_threads[omp_get_thread_num()];
    found.resize(head.rows);
#pragma omp for schedule(static)
    for (i64 c = 0; c < chunks; c++) {
      const Chunk chunk(head, c);
      turned_columns(columns, head, chunk, hidden.parts);
      for (i64 b = 0; b < hidden.blocks; b++) {
        for (i64 p = 0; p < chunk.panels(); p++)
          multiply(scores + p * BLOCK, hidden.as_left + b * hidden.parts * BLOCK, columns + p * hidden.parts * BLOCK, hidden.parts, false);
        for (i64 n = b * SIDE; n < std::min(head.rows, (b + 1) * SIDE); n++)
          take_in(found[n], scores + n % SIDE * SIDE, head.known + 2 * n, chunk);
      }
    }
  }
#pragma omp parallel for
  for (i64 n = 0; n < head.rows; n++) {
    Found all;
    for (const auto& found : of_threads)
      if (!found.empty()) all.add(found[n]);
    float* out = head.sums + 3 * n;
    out[0] = (all.highest + std::log2(all.sum)) * LN_2, out[1] = all.target;
    out[2] = (all.highest + all.along / all.sum) * LN_2;
  }
}

// Gradients of the scores of a row at 32 columns: share of the softmax times (its log times `slope` + `offset`), less `share` at the target.
static __m512i of_scores(const float* scores, const float* known, const float* slopes, i64 first, i64 count) {
  const float log_sum = slopes[0], share = slopes[1], slope = slopes[2], offset = slopes[3], factor = slopes[4];
  __m512 found[2];
  for (i64 half = 0; half < 2; half++) {
    const __m512 log_share = _mm512_load_ps(scores + half * HALF) * known[0] - log_sum;
    const __m512 x = power(log_share * LOG2_E) * (log_share * slope + offset) * factor;
    found[half] = _mm512_maskz_mov_ps((__mmask16)(lowest_bits(count) >> HALF * half), x);
  }
  const i64 target = (i64)known[1] - first;
  if (target >= 0 && target < std::min(count, SIDE)) {
    const __mmask16 here = 1u << target % HALF;
    found[target / HALF] = _mm512_mask_sub_ps(found[target / HALF], here, found[target / HALF], _mm512_set1_ps(share * factor));
  }
  return rounded(found[0], found[1]);
}

// What a thread needs for the gradients of a chunk of weights.
struct Gradients {
  Memory<bfloat16> turned_m, columns_m, slopes_m, turned_slopes_m;
  Memory<float> scores_m, of_weight_m;

  void add_chunk(const Head& head, const Hidden& hidden, const Chunk& chunk, float* of_hidden) {
    const i64 parts = hidden.parts, size = PANELS * parts * BLOCK;
    bfloat16 *turned = turned_m.of(size), *columns = columns_m.of(size), *turned_slopes = turned_slopes_m.of(PANELS * PIECE * BLOCK);
    float* of_weight = of_weight_m.of(size);
    turned_columns(turned, head, chunk, parts);
    if (of_hidden)
      for (i64 p = 0; p < chunk.panels(); p++)
        for (i64 e = 0; e < parts; e++) right(columns + (e * PANELS + p) * BLOCK, chunk.part(head, p, e));
    for (i64 piece = 0; piece < hidden.blocks; piece += PIECE) {
      const i64 count = std::min(PIECE, hidden.blocks - piece);
      for (i64 b = 0; b < count; b++) {
        const bfloat16* slopes = slopes_of(head, hidden, chunk, piece + b);
        if (of_hidden)
          for (i64 e = 0; e < parts; e++)
            multiply(of_hidden + ((piece + b) * parts + e) * BLOCK, slopes, columns + e * PANELS * BLOCK, chunk.panels(), true);
        if (head.of_weight)
          for (i64 p = 0; p < chunk.panels(); p++)
            left_turned(turned_slopes + (p * PIECE + b) * BLOCK, {slopes + p * BLOCK, SIDE, head.rows - (piece + b) * SIDE, SIDE});
      }
      if (head.of_weight)
        for (i64 e = 0; e < parts; e++)
          for (i64 p = 0; p < chunk.panels(); p++)
            multiply(of_weight + (p * parts + e) * BLOCK, turned_slopes + p * PIECE * BLOCK, hidden.as_right + (e * hidden.blocks + piece) * BLOCK, count, piece > 0);
    }
    if (head.of_weight)
      for (i64 i = 0; i < chunk.count; i++)
        store_row(head.of_weight + (chunk.first + i) * head.size, of_weight + i / SIDE * parts * BLOCK + i % SIDE * SIDE, head.size);
  }

  // Gradients of the scores of a block of rows, as the left side of a product.
  const bfloat16* slopes_of(const Head& head, const Hidden& hidden, const Chunk& chunk, i64 block) {
    bfloat16* slopes = slopes_m.of(PANELS * BLOCK);
    float* scores = scores_m.of(PANELS * BLOCK);
    for (i64 p = 0; p < chunk.panels(); p++)
      multiply(scores + p * BLOCK, hidden.as_left + block * hidden.parts * BLOCK, turned_m.of(0) + p * hidden.parts * BLOCK, hidden.parts, false);
    for (i64 n = block * SIDE; n < std::min(head.rows, (block + 1) * SIDE); n++)
      for (i64 p = 0; p < chunk.panels(); p++) {
        const i64 at = p * BLOCK + n % SIDE * SIDE;
        _mm512_store_si512(slopes + at, of_scores(scores + at, head.known + 2 * n, head.slopes + 5 * n, chunk.first + p * SIDE, chunk.count - p * SIDE));
      }
    return slopes;
  }
};

extern "C" void head_gradients(const Head* given) {
  const Head& head = *given;
  const Hidden hidden(head, true);
  const i64 chunks = (head.vocab + CHUNK - 1) / CHUNK, size = hidden.blocks * hidden.parts * BLOCK;
  const int threads = head.of_hidden ? std::clamp<i64>(MOST_SUMS / size, 1, omp_get_max_threads()) : omp_get_max_threads();
  std::vector<Memory<float>> of_threads(threads);
  std::vector<float*> sums;
#pragma omp parallel num_threads(threads)
  {
    const Tiles tiles;
    static thread_local Gradients gradients;
    float* of_hidden = nullptr;
    if (head.of_hidden) std::fill_n(of_hidden = of_threads[omp_get_thread_num()].of(size), size, 0.0f);
#pragma omp for schedule(static)
    for (i64 c = 0; c < chunks; c++) gradients.add_chunk(head, hidden, Chunk(head, c), of_hidden);
#pragma omp single
    for (i64 thread = 0; head.of_hidden && thread < omp_get_num_threads(); thread++) sums.push_back(of_threads[thread].of(0));
#pragma omp for
    for (i64 b = 0; b < (i64)(head.of_hidden ? hidden.blocks : 0); b++) {
      float* all = sums[0] + b * hidden.parts * BLOCK;
      for (i64 thread = 1; thread < (i64)sums.size(); thread++)
        for (i64 i = 0; i < hidden.parts * BLOCK; i++) all[i] += sums[thread][b * hidden.parts * BLOCK + i];
      for (i64 n = b * SIDE; n < std::min(head.rows, (b + 1) * SIDE); n++) store_row(head.of_hidden + n * head.size, all + n % SIDE * SIDE, head.size);
    }
  }
}

#endif
