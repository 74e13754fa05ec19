// The tile's arithmetic with AVX2, FMA and F16C. head_dim is a multiple of 8. Every output element is a fixed
// chain of operations, whatever the number of queries: a row alone gets the same bits as in a batch.
#include "half.h"
#include "simd_avx2.h"
#include "tile.h"

#include <math.h>

namespace baton {
namespace {

constexpr int LANES = 8, TILE_VECS = TILE / LANES;

inline __m256 load8(const void* row, int64_t i, Dtype dtype) {
  if (dtype == Dtype::f32) return _mm256_loadu_ps(static_cast<const float*>(row) + i);
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(row) + i));
  if (dtype == Dtype::f16) return _mm256_cvtph_ps(raw);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
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

// Transposes 8 tokens x 8 dims from rows to packed[dim * TILE + token].
void transpose8(const void* const* rows, int64_t i, Dtype dtype, float* packed) {
  __m256 r[8], s[8];
  for (int t = 0; t < 8; ++t) r[t] = rows[t] ? load8(rows[t], i, dtype) : _mm256_setzero_ps();
  for (int t = 0; t < 8; t += 2) {
    s[t] = _mm256_unpacklo_ps(r[t], r[t + 1]);
    s[t + 1] = _mm256_unpackhi_ps(r[t], r[t + 1]);
  }
  for (int t = 0; t < 8; t += 4) {
    r[t] = _mm256_shuffle_ps(s[t], s[t + 2], 0x44);
    r[t + 1] = _mm256_shuffle_ps(s[t], s[t + 2], 0xee);
    r[t + 2] = _mm256_shuffle_ps(s[t + 1], s[t + 3], 0x44);
    r[t + 3] = _mm256_shuffle_ps(s[t + 1], s[t + 3], 0xee);
  }
  for (int d = 0; d < 4; ++d) {
    _mm256_storeu_ps(packed + d * TILE, _mm256_permute2f128_ps(r[d], r[d + 4], 0x20));
    _mm256_storeu_ps(packed + (d + 4) * TILE, _mm256_permute2f128_ps(r[d], r[d + 4], 0x31));
  }
}

void pack_keys(const void* const* rows, int64_t head_dim, Dtype dtype, float* packed) {
  for (int t = 0; t < TILE; t += 8)
    for (int64_t i = 0; i < head_dim; i += 8) transpose8(rows + t, i, dtype, packed + i * TILE + t);
}

void pack_values(const void* const* rows, int64_t head_dim, Dtype dtype, float* packed) {
  for (int t = 0; t < TILE; ++t)
    if (rows[t])
      for (int64_t i = 0; i < head_dim; i += 8)
        _mm256_storeu_ps(packed + t * head_dim + i, load8(rows[t], i, dtype));
}

// Scores of N queries against the tile: score[n * TILE + t] = q[n] . key[t], summed in order of dims.
template <int N>
void tile_scores(const float* q, const float* keys, int64_t head_dim, float* score) {
  __m256 acc[N][TILE_VECS];
  for (int n = 0; n < N; ++n)
    for (int v = 0; v < TILE_VECS; ++v) acc[n][v] = _mm256_setzero_ps();
  for (int64_t i = 0; i < head_dim; ++i) {
    __m256 k[TILE_VECS];
    for (int v = 0; v < TILE_VECS; ++v) k[v] = _mm256_loadu_ps(keys + i * TILE + v * LANES);
    for (int n = 0; n < N; ++n) {
      const __m256 b = _mm256_broadcast_ss(q + n * head_dim + i);
      for (int v = 0; v < TILE_VECS; ++v) acc[n][v] = _mm256_fmadd_ps(b, k[v], acc[n][v]);
    }
  }
  for (int n = 0; n < N; ++n)
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

// acc[i..i+8*V] = acc * keep + sum over visible tokens of weight * value, in order of tokens.
template <int V>
inline void add_values(float* acc, float keep, const float* weight, const float* const* values, int visible,
                       int64_t i) {
  __m256 a[V];
  for (int v = 0; v < V; ++v)
    a[v] = _mm256_mul_ps(_mm256_loadu_ps(acc + i + v * LANES), _mm256_set1_ps(keep));
  for (int t = 0; t < visible; ++t) {
    const __m256 w = _mm256_broadcast_ss(weight + t);
    for (int v = 0; v < V; ++v) a[v] = _mm256_fmadd_ps(w, _mm256_loadu_ps(values[t] + i + v * LANES), a[v]);
  }
  for (int v = 0; v < V; ++v) _mm256_storeu_ps(acc + i + v * LANES, a[v]);
}

void attend(const Queries& qs, const float* keys, const float* const* values, int64_t head_dim) {
  float score[2 * TILE];
  for (int64_t n = 0; n < qs.num; n += 2) {
    const int64_t pair = qs.num - n > 1 ? 2 : 1;
    const float* q = qs.q + n * head_dim;
    pair == 2 ? tile_scores<2>(q, keys, head_dim, score) : tile_scores<1>(q, keys, head_dim, score);
    for (int64_t j = 0; j < pair; ++j) {
      const int visible = qs.visible[n + j];
      float* weight = score + j * TILE;
      float* acc = qs.acc + (n + j) * head_dim;
      const float keep = softmax_step(weight, visible, qs.max + n + j, qs.sum + n + j);
      int64_t i = 0;
      for (; i + 64 <= head_dim; i += 64) add_values<8>(acc, keep, weight, values, visible, i);
      for (; i < head_dim; i += 8) add_values<1>(acc, keep, weight, values, visible, i);
    }
  }
}

}  // namespace

const TileOps avx2_ops = {store_row, pack_keys, pack_values, attend};

}  // namespace baton
