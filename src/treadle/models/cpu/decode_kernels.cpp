// What a decode step does besides its matmuls, each in one pass over few rows, and for very few rows a layer's matmuls too.
// decode_kernels.py compiles this for a dtype and a shape of heads, and calls it.
//
// Sums are in float32, and results are rounded once. What is computed of a row depends on no other row.
//
// Axis letters: N rows, D hidden size, F units of the MLP, K key/value heads, Q query heads per key/value head, E head size.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512BF16__) && ITEM_SIZE == 2
#include <immintrin.h>
#define HAS_DOT
#endif

using i64 = int64_t;
using Floats = float __attribute__((vector_size(64)));
using Words = uint32_t __attribute__((vector_size(64)));
using Halves = uint16_t __attribute__((vector_size(32)));
using Eight = float __attribute__((vector_size(32)));
using Four = float __attribute__((vector_size(16)));

constexpr i64 LANES = 16;
constexpr i64 WORTH_A_THREAD = 1 << 15;  // numbers

struct bfloat16 {
  uint16_t bits;
};

using T = DTYPE;
constexpr i64 Q = HEADS_PER_KV_HEAD, E = HEAD_SIZE;

static inline Floats load(const float* p) {
  Floats x;
  memcpy(&x, p, sizeof x);
  return x;
}

static inline Floats load(const bfloat16* p) {
  Halves h;
  memcpy(&h, p, sizeof h);
  return (Floats)(__builtin_convertvector(h, Words) << 16);
}

static inline float value_of(float x) { return x; }

static inline float value_of(bfloat16 x) {
  const uint32_t bits = (uint32_t)x.bits << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline void store(float* p, Floats x) { memcpy(p, &x, sizeof x); }

static inline void store(bfloat16* p, Floats x) {
  Words bits = (Words)x, nan = (Words)(x != x);
  Words even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  Halves h = __builtin_convertvector((even & ~nan) | (0x7fc0 & nan), Halves);
  memcpy(p, &h, sizeof h);
}

static inline float total(Floats x) {
  Eight half[2];
  memcpy(half, &x, sizeof x);
  half[0] += half[1];
  Four quarter[2];
  memcpy(quarter, half, sizeof quarter);
  quarter[0] += quarter[1];
  return (quarter[0][0] + quarter[0][2]) + (quarter[0][1] + quarter[0][3]);
}

#if defined(__clang__) || __GNUC__ >= 12
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (Words){__VA_ARGS__})
#endif

// The totals of four.
static inline Four totals(Floats a, Floats b, Floats c, Floats d) {
  const Floats ab = PICK(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
                    PICK(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  const Floats cd = PICK(c, d, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
                    PICK(c, d, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  const Floats all = PICK(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                     PICK(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  Four part[4];
  memcpy(part, &all, sizeof part);
  return (part[0] + part[2]) + (part[1] + part[3]);
}

// 2^x for x of at most 0, to 2 parts in 10^7; 0 below 2^-126.
static inline Floats exp2(Floats x) {
  const Words low = (Words)(x < -126.0f);
  x = (Floats)(((Words)x & ~low) | ((Words)(Floats{} - 126.0f) & low));
  const Floats magic = Floats{} + 12582912.0f;  // adding it rounds to an integer, kept in the lowest bits
  const Floats shifted = x + magic;
  const Floats y = (x - (shifted - magic)) * 0.6931471805599453f;
  Floats sum = Floats{} + 1.0f / 5040;
  for (float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) sum = sum * y + term;
  const Words power = ((Words)shifted - 0x4b400000 + 127) << 23;
  return (Floats)((Words)(sum * (Floats)power) & ~low);
}

constexpr float LOG2_E = 1.4426950408889634f;

// Scores, base 2, to shares of the softmax but for a division by the total of what is returned.
static Floats softmax(float* scores, i64 count) {
  for (i64 t = count; t % LANES; t++) scores[t] = -__builtin_inff();
  Floats most = load(scores), sum{};
  for (i64 t = LANES; t < count; t += LANES) {
    const Floats next = load(scores + t);
    most = next > most ? next : most;
  }
  float highest = most[0];
  for (i64 i = 1; i < LANES; i++) highest = most[i] > highest ? most[i] : highest;
  for (i64 t = 0; t < count; t += LANES) {
    const Floats share = exp2(load(scores + t) - highest);
    sum += share;
    store(scores + t, share);
  }
  return sum;
}

static inline Floats rounded(Floats x) {
  T kept[LANES];
  store(kept, x);
  return load(kept);
}

// x w / sqrt(mean(x^2) + eps) of one row.
template <typename Out>
static void norm_row(Out* out, const T* x, const float* weight, i64 size, float eps) {
  Floats squares{};
  for (i64 i = 0; i < size; i += LANES) {
    const Floats part = load(x + i);
    squares += part * part;
  }
  const float inverse = 1.0f / __builtin_sqrtf(total(squares) / size + eps);
  for (i64 i = 0; i < size; i += LANES) store(out + i, rounded(load(x + i) * inverse * load(weight + i)));
}

static inline Floats silu(Floats x) {
  const Floats small = exp2((x > 0 ? -x : x) * LOG2_E);
  return x * ((x > 0 ? Floats{} + 1.0f : small) / (1.0f + small));
}

// Rotary positions of one head; cos and sin [E], the first half of sin negated.
static void rotate_head(T* out, const T* x, const T* cos, const T* sin) {
  for (i64 i = 0; i < E / 2; i += LANES) {
    const i64 j = i + E / 2;
    const Floats one = load(x + i), other = load(x + j);
    store(out + i, one * load(cos + i) + other * load(sin + i));
    store(out + j, other * load(cos + j) + one * load(sin + j));
  }
}

// x [N, D] with `stride` numbers from row to row.
extern "C" void rms_norm(T* out, const T* x, const float* weight, i64 rows, i64 size, i64 stride, float eps) {
#pragma omp parallel for if (rows * size >= WORTH_A_THREAD)
  for (i64 n = 0; n < rows; n++) norm_row(out + n * size, x + n * stride, weight, size, eps);
}

// silu(gate) up; both side by side in x [N, 2F].
extern "C" void silu_times(T* out, const T* x, i64 rows, i64 size) {
#pragma omp parallel for if (rows * size >= WORTH_A_THREAD)
  for (i64 n = 0; n < rows; n++)
    for (i64 i = 0; i < size; i += LANES)
      store(out + n * size + i, silu(load(x + 2 * n * size + i)) * load(x + (2 * n + 1) * size + i));
}

// x [N, heads, E] with `stride` from row to row; cos and sin [N, E].
extern "C" void rotate(T* out, const T* x, const T* cos, const T* sin, i64 rows, i64 heads, i64 stride) {
#pragma omp parallel for if (rows * heads * E >= WORTH_A_THREAD)
  for (i64 n = 0; n < rows; n++)
    for (i64 h = 0; h < heads; h++)
      rotate_head(out + (n * heads + h) * E, x + n * stride + h * E, cos + n * E, sin + n * E);
}

// One new token for each of N rows. decode_kernels.py reads the fields from here.
struct Decode {
  const T *query, *key, *value;                // [N, K, Q, E], [N, K, E], [N, K, E], each with a stride from row to row
  T *row_keys, *row_values;                    // [>= N, K, row_span, E]
  const T *prompt_keys, *prompt_values;        // [slots, K, prompt_span, E]
  const T* of_prompt;                          // [N, K, Q, E] what prompts came to where they were attended to before,
  const float* prompt_totals;                  // [N, K, Q] with the logs of the sums of their softmax; or null
  T* out;                                      // [N, K, Q, E]
  const i64 *places, *slots, *prompt_lengths;  // [N] where the new token goes, [N] the row's prompt, [slots]
  i64 query_stride, key_stride, value_stride, row_span, prompt_span;
  i64 rows, kv_heads, window;  // no window: 0
  float scale;
};

// Tokens first..count of a sequence: keys and values of one head.
struct Span {
  const T *keys, *values;
  i64 first, count;
  i64 length() const { return count - first; }
};

// Four tokens at a time; what is written past the last one is nobody's.
static void scores_of(float* scores, i64 stride, const float (*query)[E], Span span) {
  for (i64 t = span.first; t < span.count; t += 4, scores += 4) {
    Floats sums[Q][4] = {};
    for (i64 i = 0; i < E; i += LANES) {
      for (i64 j = 0; j < 4; j++) {
        const i64 token = t + j < span.count ? t + j : span.count - 1;
        const Floats key = load(span.keys + token * E + i);
        for (i64 q = 0; q < Q; q++) sums[q][j] += load(query[q] + i) * key;
      }
    }
    for (i64 q = 0; q < Q; q++) {
      const Four four = totals(sums[q][0], sums[q][1], sums[q][2], sums[q][3]);
      memcpy(scores + q * stride, &four, sizeof four);
    }
  }
}

static void add_values(Floats (*sums)[E / LANES], const float* shares, i64 stride, Span span) {
  for (i64 t = span.first; t < span.count; t++, shares++)
    for (i64 i = 0; i < E / LANES; i++) {
      const Floats value = load(span.values + t * E + i * LANES);
      for (i64 q = 0; q < Q; q++) sums[q][i] += shares[q * stride] * value;
    }
}

// One more score and value for each query.
struct More {
  const T* values;
  const float* scores;
};

// The queries of one key/value head of one row.
static void attend_one(T* out, const T* query, Span prompt, Span row, More more, float scale, std::vector<float>& scores) {
  const i64 tokens = prompt.length() + row.length(), count = tokens + (more.scores ? 1 : 0);
  const i64 stride = (count + 4 + LANES) / LANES * LANES;
  if ((i64)scores.size() < Q * stride) scores.resize(Q * stride);
  float scaled[Q][E];
  for (i64 q = 0; q < Q; q++)
    for (i64 i = 0; i < E; i += LANES) store(scaled[q] + i, load(query + q * E + i) * (scale * LOG2_E));
  scores_of(scores.data(), stride, scaled, prompt);
  scores_of(scores.data() + prompt.length(), stride, scaled, row);
  Floats sum[Q], sums[Q][E / LANES] = {};
  for (i64 q = 0; q < Q; q++) {
    if (more.scores) scores[q * stride + tokens] = more.scores[q] * LOG2_E;
    sum[q] = softmax(scores.data() + q * stride, count);
  }
  add_values(sums, scores.data(), stride, prompt);
  add_values(sums, scores.data() + prompt.length(), stride, row);
  for (i64 q = 0; q < Q; q++) {
    const float inverse = 1.0f / total(sum[q]);
    for (i64 i = 0; i < E / LANES; i++) {
      if (more.scores) sums[q][i] += scores[q * stride + tokens] * load(more.values + q * E + i * LANES);
      store(out + q * E + i * LANES, sums[q][i] * inverse);
    }
  }
}

extern "C" void attend(const Decode* given) {
  const Decode& d = *given;
#pragma omp parallel
  {
    std::vector<float> scores;
#pragma omp for collapse(2) schedule(dynamic)
    for (i64 n = 0; n < d.rows; n++) {
      for (i64 k = 0; k < d.kv_heads; k++) {
        const i64 place = d.places[n], slot = d.slots[n], length = d.prompt_lengths[slot], head = n * d.kv_heads + k;
        T *keys = d.row_keys + head * d.row_span * E, *values = d.row_values + head * d.row_span * E;
        memcpy(keys + place * E, d.key + n * d.key_stride + k * E, E * sizeof(T));
        memcpy(values + place * E, d.value + n * d.value_stride + k * E, E * sizeof(T));
        const i64 hidden = d.window > 0 && length + place + 1 > d.window ? length + place + 1 - d.window : 0;
        const i64 of_prompt = (slot * d.kv_heads + k) * d.prompt_span * E;
        const bool is_known = d.of_prompt != nullptr;
        const Span prompt{d.prompt_keys + of_prompt, d.prompt_values + of_prompt,
                          is_known || hidden > length ? length : hidden, length};
        const Span row{keys, values, hidden > length ? hidden - length : 0, place + 1};
        const More more = is_known ? More{d.of_prompt + head * Q * E, d.prompt_totals + head * Q} : More{};
        attend_one(d.out + head * Q * E, d.query + n * d.query_stride + k * Q * E, prompt, row, more, d.scale, scores);
      }
    }
  }
}

// Few rows: a matmul is reading its weights. Each thread reads its share of them, 4 outputs at a time, as they lie in the
// module, and asks for what it needs next.

#ifdef HAS_DOT
using Input = T;  // two neighbouring products at a time, as they lie in memory
constexpr i64 CHUNK = 2 * LANES;
using Chunk = __m512bh;
static inline Chunk chunk(const T* p) { return (Chunk)_mm512_loadu_si512(p); }
static inline Floats plus_products(Floats sum, Chunk x, Chunk y) { return (Floats)_mm512_dpbf16_ps((__m512)sum, x, y); }
#else
using Input = float;
constexpr i64 CHUNK = LANES;
using Chunk = Floats;
template <typename Number>
static inline Chunk chunk(const Number* p) { return load(p); }
static inline Floats plus_products(Floats sum, Chunk x, Chunk y) { return sum + x * y; }
#endif

constexpr i64 MOST_ROWS = 8, AT_ONCE = 4, AHEAD = 8192 / sizeof(T);

// x [M, size] times 4 rows of weights.
template <int M>
static void products_of(Four* out, const Input* x, const T* weight, i64 size) {
  Floats sums[M][AT_ONCE] = {};
  for (i64 i = 0; i < size; i += CHUNK) {
    Chunk w[AT_ONCE];
    for (i64 a = 0; a < AT_ONCE; a++) {
      __builtin_prefetch(weight + a * size + i + AHEAD, 0, 2);
      w[a] = chunk(weight + a * size + i);
    }
    for (i64 m = 0; m < M; m++) {
      const Chunk part = chunk(x + m * size + i);
      for (i64 a = 0; a < AT_ONCE; a++) sums[m][a] = plus_products(sums[m][a], w[a], part);
    }
  }
  for (i64 m = 0; m < M; m++) out[m] = totals(sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
}

struct Linear {
  const T *weight, *bias;  // [outputs, inputs], [outputs] or null
};

// LANES outputs from `first` on, of each row: x [N, size].
static void products(Floats* out, const Input* x, Linear linear, i64 first, i64 rows, i64 size) {
  for (i64 a = 0; a < LANES; a += AT_ONCE) {
    const T* weight = linear.weight + (first + a) * size;
    Four found[MOST_ROWS];
    switch (rows) {
      case 1: products_of<1>(found, x, weight, size); break;
      case 2: products_of<2>(found, x, weight, size); break;
      case 3: products_of<3>(found, x, weight, size); break;
      case 4: products_of<4>(found, x, weight, size); break;
      case 5: products_of<5>(found, x, weight, size); break;
      case 6: products_of<6>(found, x, weight, size); break;
      case 7: products_of<7>(found, x, weight, size); break;
      case 8: products_of<8>(found, x, weight, size); break;
    }
    for (i64 n = 0; n < rows; n++) memcpy((float*)(out + n) + a, found + n, sizeof(Four));
  }
  if (linear.bias)
    for (i64 n = 0; n < rows; n++) out[n] += load(linear.bias + first);
}

// A decoder layer. decode_kernels.py reads the fields from here.
struct Layer {
  Linear query, key, value, out, gate, up, down;
  const float *norm_in, *norm_mlp, *norm_query, *norm_key;  // the last two [E], or null
  i64 size, heads, kv_heads, units;                         // D, K Q, K, F
  float eps_in, eps_mlp, eps_query, eps_key;
};

// x [N, D] → queries, keys and values [N, H + 2K, E] of the layer, positions applied; cos and sin [N, E].
extern "C" void project(T* out, const Layer* layer, const T* x, const T* cos, const T* sin, i64 rows) {
  const Layer& l = *layer;
  const i64 heads = l.heads + 2 * l.kv_heads;
#pragma omp parallel
  {
    static thread_local std::vector<Input> normed;
    normed.resize(rows * l.size);
    for (i64 n = 0; n < rows; n++) norm_row(&normed[n * l.size], x + n * l.size, l.norm_in, l.size, l.eps_in);
#pragma omp for
    for (i64 o = 0; o < heads * E; o += LANES) {
      const i64 first_key = l.heads * E, first_value = first_key + l.kv_heads * E;
      const Linear linear = o < first_key ? l.query : o < first_value ? l.key : l.value;
      Floats found[MOST_ROWS];
      products(found, normed.data(), linear, o - (o < first_key ? 0 : o < first_value ? first_key : first_value), rows, l.size);
      for (i64 n = 0; n < rows; n++) store(out + n * heads * E + o, found[n]);
    }
#pragma omp for
    for (i64 n = 0; n < rows; n++)
      for (i64 h = 0; h < l.heads + l.kv_heads; h++) {
        const bool is_query = h < l.heads;
        const float* norm = is_query ? l.norm_query : l.norm_key;
        T* head = out + (n * heads + h) * E;
        if (norm) norm_row(head, head, norm, E, is_query ? l.eps_query : l.eps_key);
        rotate_head(head, head, cos + n * E, sin + n * E);
      }
  }
}

// What follows attention: x [N, D] and what was attended to [N, H, E] → the layer's output [N, D].
extern "C" void finish(T* out, const Layer* layer, const T* x, const T* attended, i64 rows) {
  const Layer& l = *layer;
  static thread_local std::vector<Input> kept;
  kept.resize(rows * l.units);
  Input* gated = kept.data();
#pragma omp parallel
  {
    static thread_local std::vector<Input> own;
    Floats found[MOST_ROWS], other[MOST_ROWS];
    own.resize(rows * l.heads * E);
    for (i64 i = 0; i < rows * l.heads * E; i += LANES) store(&own[i], load(attended + i));
#pragma omp for
    for (i64 o = 0; o < l.size; o += LANES) {
      products(found, own.data(), l.out, o, rows, l.heads * E);
      for (i64 n = 0; n < rows; n++) store(out + n * l.size + o, found[n] + load(x + n * l.size + o));
    }
    own.resize(rows * l.size);
    for (i64 n = 0; n < rows; n++) norm_row(&own[n * l.size], out + n * l.size, l.norm_mlp, l.size, l.eps_mlp);
#pragma omp for
    for (i64 o = 0; o < l.units; o += LANES) {
      products(found, own.data(), l.gate, o, rows, l.size);
      products(other, own.data(), l.up, o, rows, l.size);
      for (i64 n = 0; n < rows; n++)
        store(gated + n * l.units + o, rounded(silu(rounded(found[n])) * rounded(other[n])));
    }
#pragma omp for
    for (i64 o = 0; o < l.size; o += LANES) {
      products(found, gated, l.down, o, rows, l.units);
      for (i64 n = 0; n < rows; n++) store(out + n * l.size + o, found[n] + load(out + n * l.size + o));
    }
  }
}

constexpr i64 BLOCK = 256;

// Weights of a row's tokens from `first` on, BLOCK of them, and their total; 0 past the last token.
static float weights_of(float* weights, const T* logits, i64 first, i64 vocab, float highest, float scale) {
  Floats sum{};
  for (i64 i = first; i < first + BLOCK && i < vocab; i += LANES) {
    Floats x = Floats{} - __builtin_inff();
    if (i + LANES <= vocab)
      x = load(logits + i);
    else
      for (i64 j = 0; i + j < vocab; j++) x[j] = value_of(logits[i + j]);
    const Floats weight = exp2((x - highest) * scale);
    sum += weight;
    if (weights) store(weights + (i - first), weight);
  }
  return total(sum);
}

// The first of `count` weights whose running sum, from `sum` on, passes the target; moved to the nearest positive one
// before it (or else after) where rounding landed on a weight of zero.
static i64 where_passed(const float* weights, i64 count, double& sum, double target) {
  i64 i = 0;
  for (; i < count - 1 && sum + weights[i] <= target; i++) sum += weights[i];
  for (; i > 0 && weights[i] == 0; i--) sum -= weights[i - 1];
  for (; i < count - 1 && weights[i] == 0; i++) sum += weights[i];
  return i;
}

static float highest_of(const T* logits, i64 vocab) {
  Floats most = Floats{} - __builtin_inff();
  i64 i = 0;
  for (; i + LANES <= vocab; i += LANES) {
    const Floats next = load(logits + i);
    most = next > most ? next : most;
  }
  float highest = value_of(logits[0]);
  for (i64 j = 0; j < LANES; j++) highest = most[j] > highest ? most[j] : highest;
  for (; i < vocab; i++) highest = value_of(logits[i]) > highest ? value_of(logits[i]) : highest;
  return highest;
}

static i64 first_of(float value, const T* logits, i64 vocab) {
  i64 i = 0;
  while (i < vocab - 1 && value_of(logits[i]) != value) i++;
  return i;
}

// One token for each row of logits [N, vocab] by inverse CDF, and its logprob; returns how many rows are not finite.
extern "C" i64 draw(i64* tokens, float* logprobs, const T* logits, const float* temperature, const bool* greedy,
                    const double* uniform, i64 rows, i64 vocab) {
  i64 damaged = 0;
#pragma omp parallel reduction(+ : damaged)
  {
    std::vector<float> sums((vocab + BLOCK - 1) / BLOCK), inside(BLOCK);
#pragma omp for
    for (i64 n = 0; n < rows; n++) {
      const T* row = logits + n * vocab;
      const float highest = highest_of(row, vocab), scale = LOG2_E / temperature[n];
      double mass = 0, before = 0;
      for (i64 b = 0; b < (i64)sums.size(); b++) mass += sums[b] = weights_of(nullptr, row, b * BLOCK, vocab, highest, scale);
      damaged += !std::isfinite(mass);
      const double target = uniform[n] * mass;
      const i64 first = where_passed(sums.data(), sums.size(), before, target) * BLOCK;
      weights_of(inside.data(), row, first, vocab, highest, scale);
      const i64 count = vocab - first < BLOCK ? vocab - first : BLOCK;
      tokens[n] = greedy[n] ? first_of(highest, row, vocab) : first + where_passed(inside.data(), count, before, target);
      logprobs[n] = ((double)value_of(row[tokens[n]]) - highest) / temperature[n] - std::log(mass);
    }
  }
  return damaged;
}
