// Softmax attention of a packed row, forward and backward, in bfloat16. packed_attention.py compiles and calls it.
//
// The part of a family for one key/value head is a unit: it is computed by one thread, in blocks of 32 rows (queries; the heads of
// a key lie in rows) and 32 columns (keys). Scores live in cache only, and are made again in the backward pass (Dao et al.
// 2022, "FlashAttention", arXiv 2205.14135). Columns that a row may not attend to are masked, blocks of them left out. A prompt's
// columns are prepared once for all that continue it.
//
// Axis letters: N tokens, K key/value heads, Q query heads per key/value head, E head size.

#include "tiles.h"

#ifdef HAS_BLOCKS

#include <cmath>

constexpr i64 Q = HEADS_PER_KV_HEAD, E = HEAD_SIZE, PARTS = E / SIDE;
constexpr i64 PANELS = 16;  // blocks of columns whose scores are computed together
constexpr i64 PIECE = 8;    // blocks of rows whose part in the gradients of keys and values is summed at once
constexpr float LOWEST = -1e30f;

// packed_attention.py reads the fields from here.
struct Row {
  const bfloat16 *query, *key, *value;  // [N, K Q, E], [N, K, E], [N, K, E], each with a stride from token to token
  bfloat16* out;                        // [N, K Q, E]
  float* log_sums;                      // [N, K Q], of the softmax, base 2
  const bfloat16* of_out;               // backward, as all that follow: [N, K Q, E]
  bfloat16 *of_query, *of_key, *of_value;
  const i64 *families, *suffixes;  // [F, 3] first token, tokens of the prefix, number of suffixes; [sum] their tokens
  i64 query_stride, key_stride, value_stride;
  i64 num_families, kv_heads, window;  // no window: 0
  float scale;
};

// A prefix or a suffix: tokens that lie together.
struct Run {
  i64 first, count, position, panel;  // its first panel among the unit's
  i64 panels() const { return blocks_of(count); }
};

// 32 columns.
struct Panel {
  i64 index, position, count;
};

// 32 rows of a run, from `first` on.
struct Rows {
  i64 first, count, position, window;
  i64 at(i64 row) const { return position + (first + row) / Q; }
  uint32_t seen(i64 row, const Panel& panel) const {
    const i64 end = at(row) + 1 - panel.position;
    return lowest_bits(std::min(end, panel.count)) & ~lowest_bits(window ? end - window : 0);
  }
  bool see_some(const Panel& panel) const {
    return panel.position <= at(count - 1) && (!window || panel.position + panel.count > at(0) + 1 - window);
  }
};

struct Unit {
  const Row& row;
  i64 head;  // of K
  std::vector<Run> runs;
  i64 panels;

  Unit(const Row& row, i64 family, const i64* suffixes, i64 head) : row(row), head(head) {
    const i64* given = row.families + 3 * family;
    runs.push_back({given[0], given[1], 0, 0});
    for (i64 j = 0; j < given[2]; j++) {
      const Run& last = runs.back();
      runs.push_back({last.first + last.count, suffixes[j], given[1], last.panel + last.panels()});
    }
    panels = runs.back().panel + runs.back().panels();
  }

  // The columns that the rows of a run may attend to.
  std::vector<Panel> seen_by(i64 run) const {
    std::vector<Panel> found;
    for (const Run* part : {&runs[0], &runs[run]}) {
      for (i64 i = 0; i < part->panels(); i++)
        found.push_back({part->panel + i, part->position + i * SIDE, std::min(SIDE, part->count - i * SIDE)});
      if (run == 0) break;
    }
    return found;
  }

  Part columns(const bfloat16* x, i64 stride, const Run& run, i64 panel, i64 part) const {
    return {x + (run.first + panel * SIDE) * stride + head * E + part * SIDE, stride, run.count - panel * SIDE, SIDE};
  }

  // Where row `r` of a run is among the N K Q heads.
  i64 place(const Run& run, i64 r) const { return ((run.first + r / Q) * row.kv_heads + head) * Q + r % Q; }

  // All rows of a run [count Q, E].
  void copy_rows(bfloat16* out, const bfloat16* x, i64 stride, const Run& run) const {
    for (i64 t = 0; t < run.count; t++)
      memcpy(out + t * Q * E, x + (run.first + t) * stride + head * Q * E, Q * E * sizeof(bfloat16));
  }
};

// For each panel, the transpose of x as the right side of a product: columns as columns.
static void turned_columns(bfloat16* out, const Unit& unit, const bfloat16* x, i64 stride) {
  for (const Run& run : unit.runs)
    for (i64 p = 0; p < run.panels(); p++)
      for (i64 e = 0; e < PARTS; e++)
        right_turned(out + ((run.panel + p) * PARTS + e) * BLOCK, unit.columns(x, stride, run, p, e));
}

// For each part of a head, x as the right side of a product that sums over columns.
static void summed_columns(bfloat16* out, const Unit& unit, const bfloat16* x, i64 stride) {
  for (const Run& run : unit.runs)
    for (i64 p = 0; p < run.panels(); p++)
      for (i64 e = 0; e < PARTS; e++) right(out + (e * unit.panels + run.panel + p) * BLOCK, unit.columns(x, stride, run, p, e));
}

// sums [PARTS] blocks, or more of them: shares of some panels times what the panels hold.
static void add_columns(float* sums, const bfloat16* shares, const Panel* panels, i64 count, const bfloat16* held, i64 total, bool is_more) {
  for (i64 p = 0, end; p < count; p = end, is_more = true) {  // those that lie together at once
    for (end = p + 1; end < count && panels[end].index == panels[end - 1].index + 1;) end++;
    for (i64 e = 0; e < PARTS; e++)
      multiply(sums + e * BLOCK, shares + p * BLOCK, held + (e * total + panels[p].index) * BLOCK, end - p, is_more);
  }
}

// What 32 rows have found so far.
struct Softmax {
  float highest[SIDE], sum[SIDE];

  Softmax() { std::fill(highest, highest + SIDE, LOWEST), std::fill(sum, sum + SIDE, 0.0f); }

  // Scores of some panels to shares of a softmax, for one row; returns what its earlier shares are to be multiplied by.
  float take_in(i64 r, const float* scores, bfloat16* shares, const uint32_t* seen, i64 panels, float factor) {
    __m512 most = _mm512_set1_ps(-INFINITY), found = _mm512_setzero_ps();
    for (i64 p = 0; p < panels; p++)
      for (i64 half = 0; half < 2; half++)
        most = _mm512_mask_max_ps(most, (__mmask16)(seen[p] >> HALF * half), most, _mm512_load_ps(scores + p * BLOCK + half * HALF));
    const float before = highest[r];
    highest[r] = std::max(before, _mm512_reduce_max_ps(most) * factor);
    for (i64 p = 0; p < panels; p++) {
      __m512 share[2];
      for (i64 half = 0; half < 2; half++) {
        const __m512 x = _mm512_load_ps(scores + p * BLOCK + half * HALF) * factor - highest[r];
        share[half] = _mm512_maskz_mov_ps((__mmask16)(seen[p] >> HALF * half), power(x));
        found += share[half];
      }
      _mm512_store_si512(shares + p * BLOCK, rounded(share[0], share[1]));
    }
    const float factor_before = std::exp2(before - highest[r]);
    sum[r] = sum[r] * factor_before + _mm512_reduce_add_ps(found);
    return factor_before;
  }
};

struct Forward {
  Memory<bfloat16> keys, values, rows, asked, shares;
  Memory<float> scores, sums;

  void compute(const Unit& unit) {
    const Row& row = unit.row;
    const i64 size = unit.panels * PARTS * BLOCK;
    turned_columns(keys.of(size), unit, row.key, row.key_stride);
    summed_columns(values.of(size), unit, row.value, row.value_stride);
    for (i64 i = 0; i < (i64)unit.runs.size(); i++) {
      const Run& run = unit.runs[i];
      const std::vector<Panel> panels = unit.seen_by(i);
      unit.copy_rows(rows.of(run.count * Q * E), row.query, row.query_stride, run);
      for (i64 first = 0; first < run.count * Q; first += SIDE)
        attend(unit, run, {first, std::min(SIDE, run.count * Q - first), run.position, row.window}, panels);
    }
  }

  void attend(const Unit& unit, const Run& run, Rows block, const std::vector<Panel>& panels) {
    bfloat16* ask = asked.of(PARTS * BLOCK);
    float* found = sums.of(PARTS * BLOCK);
    for (i64 e = 0; e < PARTS; e++)
      left(ask + e * BLOCK, {rows.of(0) + block.first * E + e * SIDE, E, block.count, SIDE});
    std::vector<Panel> seen;
    std::copy_if(panels.begin(), panels.end(), std::back_inserter(seen), [&](const Panel& panel) { return block.see_some(panel); });
    Softmax softmax;
    for (i64 start = 0; start < (i64)seen.size(); start += PANELS)
      look(unit, block, ask, &seen[start], std::min<i64>(PANELS, seen.size() - start), softmax, start > 0);
    for (i64 r = 0; r < block.count; r++) {
      const i64 place = unit.place(run, block.first + r);
      const __m512 inverse = _mm512_set1_ps(1.0f / softmax.sum[r]);
      for (i64 e = 0; e < PARTS; e++) {
        const float* x = found + e * BLOCK + r * SIDE;
        _mm512_storeu_si512(unit.row.out + place * E + e * SIDE, rounded(_mm512_load_ps(x) * inverse, _mm512_load_ps(x + HALF) * inverse));
      }
      unit.row.log_sums[place] = softmax.highest[r] + std::log2(softmax.sum[r]);
    }
  }

  // Rows at some panels.
  void look(const Unit& unit, Rows block, const bfloat16* ask, const Panel* panels, i64 count, Softmax& softmax, bool is_more) {
    bfloat16* share = shares.of(PANELS * BLOCK);
    float *score = scores.of(PANELS * BLOCK), *found = sums.of(0);
    for (i64 p = 0; p < count; p++)
      multiply(score + p * BLOCK, ask, keys.of(0) + panels[p].index * PARTS * BLOCK, PARTS, false);
    for (i64 r = 0; r < block.count; r++) {
      uint32_t seen[PANELS];
      for (i64 p = 0; p < count; p++) seen[p] = block.seen(r, panels[p]);
      const float before = softmax.take_in(r, score + r * SIDE, share + r * SIDE, seen, count, unit.row.scale * LOG2_E);
      if (!is_more) continue;
      for (i64 e = 0; e < PARTS; e++)
        for (float* x = found + e * BLOCK + r * SIDE; x < found + e * BLOCK + r * SIDE + SIDE; x += HALF)
          _mm512_store_ps(x, _mm512_load_ps(x) * before);
    }
    add_columns(found, share, panels, count, values.of(0), unit.panels, is_more);
  }
};

struct Backward {
  Memory<bfloat16> turned_keys, keys, turned_values;         // of all panels
  Memory<float> of_keys, of_values;                          // sums
  Memory<bfloat16> rows, of_rows;                            // of a run
  Memory<bfloat16> asked, of_asked, summed, of_summed;       // of a piece, as left and as right sides
  Memory<bfloat16> slopes, shares_turned, slopes_turned;     // gradients of scores, and shares
  Memory<float> of_asked_sums;
  std::vector<float> known;  // of a run: each row's gradient times its output, and the log of its sum

  void compute(const Unit& unit) {
    const Row& row = unit.row;
    const i64 size = unit.panels * PARTS * BLOCK;
    turned_columns(turned_keys.of(size), unit, row.key, row.key_stride);
    turned_columns(turned_values.of(size), unit, row.value, row.value_stride);
    summed_columns(keys.of(size), unit, row.key, row.key_stride);
    std::fill_n(of_keys.of(size), size, 0.0f), std::fill_n(of_values.of(size), size, 0.0f);
    for (i64 i = 0; i < (i64)unit.runs.size(); i++) {
      const Run& run = unit.runs[i];
      const std::vector<Panel> panels = unit.seen_by(i);
      prepare(unit, run);
      for (i64 first = 0; first < run.count * Q; first += PIECE * SIDE) add_piece(unit, run, first, panels);
    }
    for (const Run& run : unit.runs)
      for (i64 t = 0; t < run.count; t++) {
        const i64 from = (run.panel + t / SIDE) * PARTS * BLOCK + t % SIDE * SIDE, to = ((run.first + t) * row.kv_heads + unit.head) * E;
        store_row(row.of_key + to, of_keys.of(0) + from, E), store_row(row.of_value + to, of_values.of(0) + from, E);
      }
  }

  void prepare(const Unit& unit, const Run& run) {
    const i64 count = run.count * Q;
    unit.copy_rows(rows.of(count * E), unit.row.query, unit.row.query_stride, run);
    unit.copy_rows(of_rows.of(count * E), unit.row.of_out, unit.row.kv_heads * Q * E, run);
    known.resize(2 * count);
    for (i64 r = 0; r < count; r++) {
      const i64 place = unit.place(run, r);
      __m512 dot = _mm512_setzero_ps();
      for (i64 i = 0; i < E; i += SIDE)
        dot = _mm512_dpbf16_ps(dot, (__m512bh)_mm512_loadu_si512(of_rows.of(0) + r * E + i), (__m512bh)_mm512_loadu_si512(unit.row.out + place * E + i));
      known[2 * r] = _mm512_reduce_add_ps(dot), known[2 * r + 1] = unit.row.log_sums[place];
    }
  }

  // The gradients of some rows, and their part in those of keys and values.
  void add_piece(const Unit& unit, const Run& run, i64 first, const std::vector<Panel>& panels) {
    const i64 count = std::min(PIECE * SIDE, run.count * Q - first), blocks = blocks_of(count), size = PIECE * PARTS * BLOCK;
    bfloat16 *ask = asked.of(size), *of_ask = of_asked.of(size), *sum = summed.of(size), *of_sum = of_summed.of(size);
    for (i64 b = 0; b < blocks; b++)
      for (i64 e = 0; e < PARTS; e++) {
        const i64 from = (first + b * SIDE) * E + e * SIDE;
        const Part part{rows.of(0) + from, E, count - b * SIDE, SIDE}, of_part{of_rows.of(0) + from, E, count - b * SIDE, SIDE};
        left(ask + (b * PARTS + e) * BLOCK, part), left(of_ask + (b * PARTS + e) * BLOCK, of_part);
        right(sum + (e * PIECE + b) * BLOCK, part), right(of_sum + (e * PIECE + b) * BLOCK, of_part);
      }
    bool has_seen[PIECE] = {};
    for (i64 start = 0; start < (i64)panels.size(); start += PANELS) {
      const Panel* some = &panels[start];
      const i64 num_panels = std::min<i64>(PANELS, panels.size() - start);
      i64 begin[PANELS], end[PANELS] = {};  // the blocks of rows that attend to a panel
      for (i64 b = 0; b < blocks; b++) {
        const Rows block{first + b * SIDE, std::min(SIDE, count - b * SIDE), run.position, unit.row.window};
        i64 low = num_panels, high = 0;
        for (i64 p = 0; p < num_panels; p++) {
          if (!block.see_some(some[p])) continue;
          low = std::min(low, p), high = p + 1;
          begin[p] = end[p] ? begin[p] : b, end[p] = b + 1;
          look(unit, block, b, some[p], p);
        }
        if (low >= high) continue;
        add_columns(of_asked_sums.of(size) + b * PARTS * BLOCK, slopes.of(0) + low * BLOCK, some + low, high - low, keys.of(0), unit.panels, has_seen[b]);
        has_seen[b] = true;
      }
      for (i64 p = 0; p < num_panels; p++)
        if (end[p]) add_rows(some[p], p, begin[p], end[p]);
    }
    for (i64 r = 0; r < count; r++)
      store_row(unit.row.of_query + unit.place(run, first + r) * E, of_asked_sums.of(0) + r / SIDE * PARTS * BLOCK + r % SIDE * SIDE, E);
  }

  // Shares and gradients of the scores of block `b` of a piece at panel `p` of those that are computed together.
  void look(const Unit& unit, Rows block, i64 b, const Panel& panel, i64 p) {
    alignas(64) float scores[BLOCK], of_shares[BLOCK];
    alignas(64) bfloat16 shares[BLOCK];
    bfloat16* slope = slopes.of(PANELS * BLOCK) + p * BLOCK;
    multiply(scores, asked.of(0) + b * PARTS * BLOCK, turned_keys.of(0) + panel.index * PARTS * BLOCK, PARTS, false);
    multiply(of_shares, of_asked.of(0) + b * PARTS * BLOCK, turned_values.of(0) + panel.index * PARTS * BLOCK, PARTS, false);
    const float factor = unit.row.scale * LOG2_E;
    for (i64 r = 0; r < block.count; r++) {
      const uint32_t seen = block.seen(r, panel);
      const float along = known[2 * (block.first + r)], log_sum = known[2 * (block.first + r) + 1];
      __m512 share[2], of_score[2];
      for (i64 half = 0; half < 2; half++) {
        const i64 at = r * SIDE + half * HALF;
        share[half] = _mm512_maskz_mov_ps((__mmask16)(seen >> HALF * half), power(_mm512_load_ps(scores + at) * factor - log_sum));
        of_score[half] = share[half] * (_mm512_load_ps(of_shares + at) - along) * unit.row.scale;
      }
      _mm512_store_si512(shares + r * SIDE, rounded(share[0], share[1]));
      _mm512_store_si512(slope + r * SIDE, rounded(of_score[0], of_score[1]));
    }
    const i64 turned = (p * PIECE + b) * BLOCK;
    left_turned(shares_turned.of(PANELS * PIECE * BLOCK) + turned, {shares, SIDE, block.count, SIDE});
    left_turned(slopes_turned.of(PANELS * PIECE * BLOCK) + turned, {slope, SIDE, block.count, SIDE});
  }

  // What blocks `begin` to `end` of a piece add to the gradients of a panel.
  void add_rows(const Panel& panel, i64 p, i64 begin, i64 end) {
    const i64 turned = (p * PIECE + begin) * BLOCK;
    for (i64 e = 0; e < PARTS; e++) {
      const i64 to = (panel.index * PARTS + e) * BLOCK, by = (e * PIECE + begin) * BLOCK;
      multiply(of_keys.of(0) + to, slopes_turned.of(0) + turned, summed.of(0) + by, end - begin, true);
      multiply(of_values.of(0) + to, shares_turned.of(0) + turned, of_summed.of(0) + by, end - begin, true);
    }
  }
};

template <typename Pass>
static void for_each_unit(const Row& row) {
  std::vector<const i64*> suffixes{row.suffixes};
  for (i64 f = 0; f < row.num_families; f++) suffixes.push_back(suffixes.back() + row.families[3 * f + 2]);
#pragma omp parallel
  {
    const Tiles tiles;
    static thread_local Pass pass;
#pragma omp for collapse(2) schedule(dynamic)
    for (i64 f = 0; f < row.num_families; f++)
      for (i64 k = 0; k < row.kv_heads; k++) pass.compute(Unit(row, f, suffixes[f], k));
  }
}

extern "C" void attend(const Row* row) { for_each_unit<Forward>(*row); }

extern "C" void attend_backward(const Row* row) { for_each_unit<Backward>(*row); }

#endif
