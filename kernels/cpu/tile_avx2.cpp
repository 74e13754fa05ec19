// The tile's arithmetic with AVX2, FMA and F16C. head_dim is a multiple of 8. Every output element is a fixed
// chain of operations, whatever the number of queries: a row alone gets the same bits as in a batch.
#include "tile_rows_avx2.h"

#include <math.h>

namespace baton {
namespace {

// Scores of N queries against the tile: score[n * TILE + t] = q[n] . key[t]. A score is eight sums, the first over
// dims 0, 8, 16, ..., the second over dims 1, 9, 17, ..., added up in pairs: what `row_scores` gets from lanes.
template <int N>
void tile_scores(const float* q, const float* keys, int64_t head_dim, float* score) {
  for (int half = 0; half < TILE; half += 2 * LANES) {
    __m256 done[2][N][2];  // of lanes 0 to 3, and 4 and 5
#pragma GCC unroll 4
    for (int pair = 0; pair < 4; ++pair) {
      __m256 acc[2][N][2];
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[0][n][0] = acc[0][n][1] = acc[1][n][0] = acc[1][n][1] = _mm256_setzero_ps();
      for (int64_t i = 2 * pair; i < head_dim; i += LANES) {
#pragma GCC unroll 2
        for (int lane = 0; lane < 2; ++lane) {
          const float* key = keys + (i + lane) * TILE + half;
          const __m256 k0 = _mm256_loadu_ps(key), k1 = _mm256_loadu_ps(key + LANES);
#pragma GCC unroll 8
          for (int n = 0; n < N; ++n) {
            const __m256 b = _mm256_broadcast_ss(q + n * head_dim + i + lane);
            acc[lane][n][0] = _mm256_fmadd_ps(b, k0, acc[lane][n][0]);
            acc[lane][n][1] = _mm256_fmadd_ps(b, k1, acc[lane][n][1]);
          }
        }
      }
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n)
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          const __m256 sum = _mm256_add_ps(acc[0][n][v], acc[1][n][v]);
          if (pair == 0) done[0][n][v] = sum;
          if (pair == 1) done[0][n][v] = _mm256_add_ps(done[0][n][v], sum);
          if (pair == 2) done[1][n][v] = sum;
          if (pair == 3)
            _mm256_storeu_ps(score + n * TILE + half + v * LANES,
                             _mm256_add_ps(done[0][n][v], _mm256_add_ps(done[1][n][v], sum)));
        }
    }
  }
}

inline void prefetch_row(const char* row, int64_t bytes) {
  for (int64_t byte = 0; byte < bytes; byte += 64) _mm_prefetch(row + byte, _MM_HINT_T0);
}

// The sums of each of four vectors' lanes.
inline __m128 sum_lanes4(const __m256 v[4]) {
  const __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}

// What `tile_scores` gives, from the rows of the keys, four tokens at a time.
template <Dtype D, int N>
void row_scores(const float* q, const char* const* keys, const char* const* next, int64_t head_dim, float* score) {
  for (int t = 0; t < TILE; t += 4) {
    __m256 acc[N][4], factor[4];
#pragma GCC unroll 8
    for (int j = 0; j < 4; ++j) {
      prefetch_row(next[t + j], row_bytes(D, head_dim));
      if (scaled(D)) factor[j] = row_factor<D>(keys[t + j], head_dim);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[n][j] = _mm256_setzero_ps();
    }
    for (int64_t i = 0; i < head_dim; i += LANES) {
      __m256 b[N];
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) b[n] = _mm256_loadu_ps(q + n * head_dim + i);
#pragma GCC unroll 8
      for (int j = 0; j < 4; ++j) {
        __m256 k = load8<D>(keys[t + j], i);
        if (scaled(D)) k = _mm256_mul_ps(k, factor[j]);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) acc[n][j] = _mm256_fmadd_ps(b[n], k, acc[n][j]);
      }
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) _mm_storeu_ps(score + n * TILE + t, sum_lanes4(acc[n]));
  }
}

// score = cap * tanh(score / cap), in place.
void cap_scores(float* score, float cap) {
  for (int v = 0; v < TILE_VECS; ++v) {
    const __m256 x = _mm256_div_ps(_mm256_loadu_ps(score + v * LANES), _mm256_set1_ps(cap));
    _mm256_storeu_ps(score + v * LANES, _mm256_mul_ps(tanh8(x), _mm256_set1_ps(cap)));
  }
}

// acc[n][i..i+8*V] = acc * keep[n] + sum over tokens of weight * value, in order of tokens. Tokens that a query may
// not see have weight 0.
template <int N, int V>
inline void add_values(float* acc, int64_t head_dim, const float* keep, const float* weight, const float* const* values,
                       int first, int end, int64_t i) {
  __m256 a[N][V];
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v)
      a[n][v] = _mm256_mul_ps(_mm256_loadu_ps(acc + n * head_dim + i + v * LANES), _mm256_set1_ps(keep[n]));
  for (int t = first; t < end; ++t) {
    __m256 w[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) w[n] = _mm256_broadcast_ss(weight + n * TILE + t);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const __m256 value = _mm256_loadu_ps(values[t] + i + v * LANES);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) a[n][v] = _mm256_fmadd_ps(w[n], value, a[n][v]);
    }
  }
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) _mm256_storeu_ps(acc + n * head_dim + i + v * LANES, a[n][v]);
}

// The same from the rows of the values.
template <Dtype D, int N, int V>
inline void add_rows(float* acc, int64_t head_dim, const float* keep, const float* weight, const TileRows& rows,
                     const TileRows& next, int first, int end, int64_t i) {
  __m256 a[N][V];
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v)
      a[n][v] = _mm256_mul_ps(_mm256_loadu_ps(acc + n * head_dim + i + v * LANES), _mm256_set1_ps(keep[n]));
  for (int t = first; t < end; ++t) {
    prefetch_row(next.values[t] + i * item_bytes(D), V * LANES * item_bytes(D));
    __m256 w[N], factor;
    if (scaled(D)) factor = row_factor<D>(rows.values[t], head_dim);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) w[n] = _mm256_broadcast_ss(weight + n * TILE + t);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      __m256 value = load8<D>(rows.values[t], i + v * LANES);
      if (scaled(D)) value = _mm256_mul_ps(value, factor);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) a[n][v] = _mm256_fmadd_ps(w[n], value, a[n][v]);
    }
  }
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) _mm256_storeu_ps(acc + n * head_dim + i + v * LANES, a[n][v]);
}

// Which of the tile's tokens N queries see, all together.
struct Range {
  int first, end;
};

// Scores of N queries to weights, in place; moves max and sum on, and tells what the old accumulators are worth now.
// e^(s - max) is taken as 2^(s * log2 e - top) with one rounding; all that is left of max's own is in `top`, and the same
// `top` says what older sums are worth. `WHOLE`: every query sees the whole tile.
template <int N, bool WHOLE>
Range weigh_some(const Queries& qs, int64_t at, float* score, float* keep) {
  static_assert(N <= LANES, "one vector holds what the old accumulators are worth");
  constexpr float LOG2_E = 1.44269504f;
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  Range range = {WHOLE ? 0 : TILE, WHOLE ? TILE : 0};
  __m256 seen[N][TILE_VECS];
  alignas(32) float moved[LANES] = {0}, top[N];
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) {
    float& max = qs.max[at + n];
    if (!WHOLE) {
      const int first = qs.first[at + n], end = qs.visible[at + n];
      range.first = first < range.first ? first : range.first;
      range.end = end > range.end ? end : range.end;
      for (int v = 0; v < TILE_VECS; ++v)
        seen[n][v] = _mm256_castsi256_ps(
            _mm256_and_si256(_mm256_cmpgt_epi32(lane, _mm256_set1_epi32(first - 1 - v * LANES)),
                             _mm256_cmpgt_epi32(_mm256_set1_epi32(end - v * LANES), lane)));
    }
    __m256 most = _mm256_set1_ps(max);
#pragma GCC unroll 8
    for (int v = 0; v < TILE_VECS; ++v) {
      const __m256 s = _mm256_loadu_ps(score + n * TILE + v * LANES);
      most = _mm256_max_ps(most, WHOLE ? s : _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), s, seen[n][v]));
    }
    const float before = max * LOG2_E;
    max = reduce_max(most);
    top[n] = max * LOG2_E;
    moved[n] = before - top[n];
  }
  _mm256_store_ps(moved, exp2_8(_mm256_load_ps(moved)));
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) {
    __m256 total = _mm256_setzero_ps();
#pragma GCC unroll 8
    for (int v = 0; v < TILE_VECS; ++v) {
      float* part = score + n * TILE + v * LANES;
      __m256 weight =
          exp2_8(_mm256_fmsub_ps(_mm256_loadu_ps(part), _mm256_set1_ps(LOG2_E), _mm256_set1_ps(top[n])));
      if (!WHOLE) weight = _mm256_and_ps(weight, seen[n][v]);
      total = _mm256_add_ps(total, weight);
      _mm256_storeu_ps(part, weight);
    }
    keep[n] = moved[n];
    qs.sum[at + n] = qs.sum[at + n] * keep[n] + reduce_sum(total);
  }
  return range;
}

template <int N>
Range weigh(const Queries& qs, int64_t at, float* score, float* keep) {
  if (qs.softcap > 0.0f)
    for (int n = 0; n < N; ++n) cap_scores(score + n * TILE, qs.softcap);
  return qs.whole ? weigh_some<N, true>(qs, at, score, keep) : weigh_some<N, false>(qs, at, score, keep);
}

template <int N>
void attend_some(const Queries& qs, int64_t at, const float* keys, const float* const* values, int64_t head_dim) {
  float score[N * TILE], keep[N];
  tile_scores<N>(qs.q + at * head_dim, keys, head_dim, score);
  const Range seen = weigh<N>(qs, at, score, keep);
  float* acc = qs.acc + at * head_dim;
  int64_t i = 0;
  for (; i + 4 * LANES <= head_dim; i += 4 * LANES)
    add_values<N, 4>(acc, head_dim, keep, score, values, seen.first, seen.end, i);
  for (; i < head_dim; i += LANES) add_values<N, 1>(acc, head_dim, keep, score, values, seen.first, seen.end, i);
}

void attend(const Queries& qs, const float* keys, const float* const* values, int64_t head_dim) {
  int64_t n = 0;
  for (; n + 3 <= qs.num; n += 3) attend_some<3>(qs, n, keys, values, head_dim);
  if (qs.num - n == 2) attend_some<2>(qs, n, keys, values, head_dim);
  if (qs.num - n == 1) attend_some<1>(qs, n, keys, values, head_dim);
}

template <Dtype D, int N>
void attend_some_rows(const Queries& qs, int64_t at, const TileRows& rows, const TileRows& next, int64_t head_dim) {
  float score[N * TILE], keep[N];
  row_scores<D, N>(qs.q + at * head_dim, rows.keys, next.keys, head_dim, score);
  const Range seen = weigh<N>(qs, at, score, keep);
  float* acc = qs.acc + at * head_dim;
  int64_t i = 0;
  for (; i + 4 * LANES <= head_dim; i += 4 * LANES)
    add_rows<D, N, 4>(acc, head_dim, keep, score, rows, next, seen.first, seen.end, i);
  for (; i < head_dim; i += LANES) add_rows<D, N, 1>(acc, head_dim, keep, score, rows, next, seen.first, seen.end, i);
}

template <Dtype D>
void attend_rows_of(const Queries& qs, const TileRows& rows, const TileRows& next, int64_t head_dim) {
  int64_t n = 0;
  for (; n + 3 <= qs.num && qs.num - n != 4; n += 3) attend_some_rows<D, 3>(qs, n, rows, next, head_dim);
  for (; n + 2 <= qs.num; n += 2) attend_some_rows<D, 2>(qs, n, rows, next, head_dim);
  if (n < qs.num) attend_some_rows<D, 1>(qs, n, rows, next, head_dim);
}

void attend_rows(const Queries& qs, const TileRows& rows, const TileRows& next, int64_t head_dim, Dtype dtype) {
  switch (dtype) {
    case Dtype::f32: return attend_rows_of<Dtype::f32>(qs, rows, next, head_dim);
    case Dtype::f16: return attend_rows_of<Dtype::f16>(qs, rows, next, head_dim);
    case Dtype::bf16: return attend_rows_of<Dtype::bf16>(qs, rows, next, head_dim);
    case Dtype::i8: return attend_rows_of<Dtype::i8>(qs, rows, next, head_dim);
    case Dtype::f8: return attend_rows_of<Dtype::f8>(qs, rows, next, head_dim);
  }
}

}  // namespace

const TileOps avx2_ops = {avx2_store_row, avx2_pack_keys, avx2_pack_values, attend, attend_rows};

}  // namespace baton
