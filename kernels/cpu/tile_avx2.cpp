// The tile's arithmetic with AVX2, FMA and F16C. head_dim is a multiple of 8. Every output element is a fixed
// chain of operations, whatever the number of queries: a row alone gets the same bits as in a batch.
#include "half.h"
#include "simd_avx2.h"
#include "tile.h"

#include <math.h>

namespace baton {
namespace {

constexpr int LANES = 8, TILE_VECS = TILE / LANES;

template <Dtype D>
inline __m256 widen(__m128i halves) {
  if (D == Dtype::f16) return _mm256_cvtph_ps(halves);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

inline __m128i load_halves(const void* row, int64_t i) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(row) + i));
}

template <Dtype D>
inline __m256 load8(const void* row, int64_t i) {
  return D == Dtype::f32 ? _mm256_loadu_ps(static_cast<const float*>(row) + i) : widen<D>(load_halves(row, i));
}

void store_row(const float* src, void* dst, int64_t n, Dtype dtype) {
  if (dtype == Dtype::f16) {
    uint16_t* half = static_cast<uint16_t*>(dst);
    for (int64_t i = 0; i < n; i += LANES)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(half + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    return;
  }
  scalar_ops.store_row(src, dst, n, dtype);
}

// Transposes 8 tokens x 8 dims of float32 rows to packed[dim * TILE + token].
inline void transpose32(const void* const* rows, int64_t i, float* packed) {
  __m256 r[8], s[8];
#pragma GCC unroll 8
  for (int t = 0; t < 8; ++t) r[t] = load8<Dtype::f32>(rows[t], i);
#pragma GCC unroll 8
  for (int t = 0; t < 8; t += 2) {
    s[t] = _mm256_unpacklo_ps(r[t], r[t + 1]);
    s[t + 1] = _mm256_unpackhi_ps(r[t], r[t + 1]);
  }
#pragma GCC unroll 8
  for (int t = 0; t < 8; t += 4) {
    r[t] = _mm256_shuffle_ps(s[t], s[t + 2], 0x44);
    r[t + 1] = _mm256_shuffle_ps(s[t], s[t + 2], 0xee);
    r[t + 2] = _mm256_shuffle_ps(s[t + 1], s[t + 3], 0x44);
    r[t + 3] = _mm256_shuffle_ps(s[t + 1], s[t + 3], 0xee);
  }
#pragma GCC unroll 8
  for (int d = 0; d < 4; ++d) {
    _mm256_storeu_ps(packed + d * TILE, _mm256_permute2f128_ps(r[d], r[d + 4], 0x20));
    _mm256_storeu_ps(packed + (d + 4) * TILE, _mm256_permute2f128_ps(r[d], r[d + 4], 0x31));
  }
}

// Transposes 16 tokens x 8 dims of 16-bit rows, and widens them. Tokens 0-7 travel in the lower lanes, 8-15 in
// the upper ones.
template <Dtype D>
inline void transpose16(const void* const* rows, int64_t i, float* packed) {
  __m256i r[8], s[8];
#pragma GCC unroll 8
  for (int t = 0; t < 8; ++t)
    r[t] = _mm256_inserti128_si256(_mm256_castsi128_si256(load_halves(rows[t], i)), load_halves(rows[t + 8], i), 1);
#pragma GCC unroll 8
  for (int t = 0; t < 8; t += 2) {  // s[t]: dims 0-3 of tokens t and t + 1 in turns, s[t + 1]: dims 4-7
    s[t] = _mm256_unpacklo_epi16(r[t], r[t + 1]);
    s[t + 1] = _mm256_unpackhi_epi16(r[t], r[t + 1]);
  }
#pragma GCC unroll 8
  for (int t = 0; t < 8; t += 4)
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {  // r[t + 2 h]: dims 4 h and 4 h + 1 of four tokens, r[t + 2 h + 1]: the next two dims
      r[t + 2 * h] = _mm256_unpacklo_epi32(s[t + h], s[t + 2 + h]);
      r[t + 2 * h + 1] = _mm256_unpackhi_epi32(s[t + h], s[t + 2 + h]);
    }
#pragma GCC unroll 8
  for (int d = 0; d < 8; ++d) {
    const __m256i dim = d % 2 ? _mm256_unpackhi_epi64(r[d / 2], r[d / 2 + 4]) : _mm256_unpacklo_epi64(r[d / 2], r[d / 2 + 4]);
    _mm256_storeu_ps(packed + d * TILE, widen<D>(_mm256_castsi256_si128(dim)));
    _mm256_storeu_ps(packed + d * TILE + 8, widen<D>(_mm256_extracti128_si256(dim, 1)));
  }
}

template <Dtype D>
void pack_keys_of(const void* const* rows, int64_t head_dim, float* packed) {
  for (int t = 0; t < TILE; t += D == Dtype::f32 ? 8 : 16)
    for (int64_t i = 0; i < head_dim; i += 8)
      D == Dtype::f32 ? transpose32(rows + t, i, packed + i * TILE + t)
                      : transpose16<D == Dtype::f32 ? Dtype::f16 : D>(rows + t, i, packed + i * TILE + t);
}

void pack_keys(const void* const* rows, int64_t head_dim, Dtype dtype, float* packed) {
  switch (dtype) {
    case Dtype::f32: return pack_keys_of<Dtype::f32>(rows, head_dim, packed);
    case Dtype::f16: return pack_keys_of<Dtype::f16>(rows, head_dim, packed);
    case Dtype::bf16: return pack_keys_of<Dtype::bf16>(rows, head_dim, packed);
  }
}

template <Dtype D>
void pack_values_of(const void* const* rows, int64_t head_dim, float* packed) {
  for (int t = 0; t < TILE; ++t)
    for (int64_t i = 0; i < head_dim; i += 8) _mm256_storeu_ps(packed + t * head_dim + i, load8<D>(rows[t], i));
}

void pack_values(const void* const* rows, int64_t head_dim, Dtype dtype, float* packed) {
  switch (dtype) {
    case Dtype::f32: return pack_values_of<Dtype::f32>(rows, head_dim, packed);
    case Dtype::f16: return pack_values_of<Dtype::f16>(rows, head_dim, packed);
    case Dtype::bf16: return pack_values_of<Dtype::bf16>(rows, head_dim, packed);
  }
}

// Scores of N queries against the tile: score[n * TILE + t] = q[n] . key[t], summed in order of dims.
template <int N>
void tile_scores(const float* q, const float* keys, int64_t head_dim, float* score) {
  __m256 acc[N][TILE_VECS];
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
    for (int v = 0; v < TILE_VECS; ++v) acc[n][v] = _mm256_setzero_ps();
  for (int64_t i = 0; i < head_dim; ++i) {
    __m256 b[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) b[n] = _mm256_broadcast_ss(q + n * head_dim + i);
#pragma GCC unroll 8
    for (int v = 0; v < TILE_VECS; ++v) {
      const __m256 k = _mm256_loadu_ps(keys + i * TILE + v * LANES);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[n][v] = _mm256_fmadd_ps(b[n], k, acc[n][v]);
    }
  }
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
    for (int v = 0; v < TILE_VECS; ++v) _mm256_storeu_ps(score + n * TILE + v * LANES, acc[n][v]);
}

// Turns scores into weights in place, moves max and sum on; returns what the old accumulator is worth now.
float softmax_step(float* score, int visible, float* max, float* sum) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  __m256 s[TILE_VECS], seen[TILE_VECS];
  __m256 top8 = _mm256_set1_ps(*max);
  for (int v = 0; v < TILE_VECS; ++v) {
    seen[v] = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(visible - v * LANES), lane));
    s[v] = _mm256_loadu_ps(score + v * LANES);
    top8 = _mm256_max_ps(top8, _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), s[v], seen[v]));
  }
  const float top = reduce_max(top8);
  __m256 total = _mm256_setzero_ps();
  for (int v = 0; v < TILE_VECS; ++v) {
    const __m256 w = _mm256_and_ps(exp8(_mm256_sub_ps(s[v], _mm256_set1_ps(top))), seen[v]);
    total = _mm256_add_ps(total, w);
    _mm256_storeu_ps(score + v * LANES, w);
  }
  const float keep = isinf(*max) ? 0.0f : expf(*max - top);
  *sum = *sum * keep + reduce_sum(total);
  *max = top;
  return keep;
}

// acc[n][i..i+8*V] = acc * keep[n] + sum over tokens of weight * value, in order of tokens. Tokens that a query may
// not see have weight 0.
template <int N, int V>
inline void add_values(float* acc, int64_t head_dim, const float* keep, const float* weight, const float* const* values,
                       int num_tokens, int64_t i) {
  __m256 a[N][V];
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v)
      a[n][v] = _mm256_mul_ps(_mm256_loadu_ps(acc + n * head_dim + i + v * LANES), _mm256_set1_ps(keep[n]));
  for (int t = 0; t < num_tokens; ++t) {
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

template <int N>
void attend_some(const Queries& qs, int64_t first, const float* keys, const float* const* values, int64_t head_dim) {
  float score[N * TILE], keep[N];
  int num_tokens = 0;
  tile_scores<N>(qs.q + first * head_dim, keys, head_dim, score);
  for (int n = 0; n < N; ++n) {
    const int visible = qs.visible[first + n];
    keep[n] = softmax_step(score + n * TILE, visible, qs.max + first + n, qs.sum + first + n);
    num_tokens = visible > num_tokens ? visible : num_tokens;
  }
  float* acc = qs.acc + first * head_dim;
  int64_t i = 0;
  for (; i + 4 * LANES <= head_dim; i += 4 * LANES)
    add_values<N, 4>(acc, head_dim, keep, score, values, num_tokens, i);
  for (; i < head_dim; i += LANES) add_values<N, 1>(acc, head_dim, keep, score, values, num_tokens, i);
}

void attend(const Queries& qs, const float* keys, const float* const* values, int64_t head_dim) {
  int64_t n = 0;
  for (; n + 3 <= qs.num; n += 3) attend_some<3>(qs, n, keys, values, head_dim);
  if (qs.num - n == 2) attend_some<2>(qs, n, keys, values, head_dim);
  if (qs.num - n == 1) attend_some<1>(qs, n, keys, values, head_dim);
}

}  // namespace

const TileOps avx2_ops = {store_row, pack_keys, pack_values, attend};

}  // namespace baton
