// The tile's arithmetic with AVX2, FMA and F16C. head_dim is a multiple of 8. Every output element is a fixed
// chain of operations, whatever the number of queries: a row alone gets the same bits as in a batch.
#include "half.h"
#include "simd_avx2.h"
#include "tile.h"

#include <math.h>
#include <string.h>

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

constexpr bool scaled(Dtype dtype) { return dtype == Dtype::i8 || dtype == Dtype::f8; }

inline __m128i load_bytes8(const void* row, int64_t i) {
  return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(static_cast<const char*>(row) + i));
}

// What a row's numbers are multiplied by: its scale, and what `load8` leaves out of an e4m3 number's exponent.
template <Dtype D>
inline __m256 row_factor(const void* row, int64_t n) {
  if (!scaled(D)) return _mm256_set1_ps(1.0f);
  float scale;
  memcpy(&scale, static_cast<const char*>(row) + n, 4);
  return _mm256_set1_ps(D == Dtype::f8 ? 256.0f * scale : scale);
}

// Numbers i .. i + 7 of a row, not yet multiplied by its factor.
template <Dtype D>
inline __m256 load8(const void* row, int64_t i) {
  if (D == Dtype::f32) return _mm256_loadu_ps(static_cast<const float*>(row) + i);
  if (D == Dtype::i8) return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_bytes8(row, i)));
  if (D == Dtype::f8) {  // the bits of a float16 that is 2^8 times smaller
    const __m128i wide = _mm_cvtepu8_epi16(load_bytes8(row, i));
    const __m128i sign = _mm_and_si128(_mm_slli_epi16(wide, 8), _mm_set1_epi16(static_cast<int16_t>(0x8000)));
    return _mm256_cvtph_ps(_mm_or_si128(sign, _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x7f)), 7)));
  }
  return widen<D>(load_halves(row, i));
}

inline __m256i to_i8(__m256 x) { return _mm256_cvtps_epi32(x); }

// e4m3, see half.h.
inline __m256i to_f8_8(__m256 x) {
  const __m256i u = _mm256_castps_si256(x), mag = _mm256_and_si256(u, _mm256_set1_epi32(0x7fffffff));
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(u, 24), _mm256_set1_epi32(0x80));
  const __m256 aligned = _mm256_add_ps(_mm256_castsi256_ps(mag), _mm256_set1_ps(16384.0f));
  const __m256i small = _mm256_sub_epi32(_mm256_castps_si256(aligned), _mm256_set1_epi32(0x46800000));
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(mag, 20), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(mag, _mm256_set1_epi32(0x7ffff)), odd);
  const __m256i large = _mm256_sub_epi32(_mm256_srli_epi32(rounded, 20), _mm256_set1_epi32(960));
  const __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x3c800000), mag);
  return _mm256_or_si256(sign, _mm256_blendv_epi8(large, small, is_small));
}

template <Dtype D>
void store_scaled(const float* src, char* dst, int64_t n) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i top = _mm256_setzero_si256();  // magnitudes compare like the integers of their bits, NaN above all
  for (int64_t i = 0; i < n; i += LANES)
    top = _mm256_max_epi32(top, _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(src + i)), magnitude));
  __m128i t = _mm_max_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
  t = _mm_max_epi32(t, _mm_shuffle_epi32(t, 0x4e));
  t = _mm_max_epi32(t, _mm_shuffle_epi32(t, 0xb1));
  const RowScale by = row_scale(_mm_cvtss_f32(_mm_castsi128_ps(t)), D == Dtype::i8 ? I8_TOP : F8_TOP);
  const __m256 inverse = _mm256_set1_ps(by.inverse);
  for (int64_t i = 0; i < n; i += LANES) {
    __m256i q = _mm256_setzero_si256();
    if (by.inverse != 0.0f) {
      const __m256 x = _mm256_mul_ps(_mm256_loadu_ps(src + i), inverse);
      q = D == Dtype::i8 ? to_i8(x) : to_f8_8(x);
    }
    const __m128i low = _mm256_castsi256_si128(q), high = _mm256_extracti128_si256(q, 1);
    const __m128i words = D == Dtype::i8 ? _mm_packs_epi32(low, high) : _mm_packus_epi32(low, high);
    const __m128i bytes = D == Dtype::i8 ? _mm_packs_epi16(words, words) : _mm_packus_epi16(words, words);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(dst + i), bytes);
  }
  memcpy(dst + n, &by.scale, 4);
}

void store_row(const float* src, void* dst, int64_t n, Dtype dtype) {
  if (dtype == Dtype::i8) return store_scaled<Dtype::i8>(src, static_cast<char*>(dst), n);
  if (dtype == Dtype::f8) return store_scaled<Dtype::f8>(src, static_cast<char*>(dst), n);
  if (dtype == Dtype::f16) {
    uint16_t* half = static_cast<uint16_t*>(dst);
    for (int64_t i = 0; i < n; i += LANES)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(half + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    return;
  }
  scalar_ops.store_row(src, dst, n, dtype);
}

// Transposes 8 tokens x 8 dims of float32 or 8-bit rows to packed[dim * TILE + token].
template <Dtype D>
inline void transpose32(const void* const* rows, int64_t i, const __m256* factor, float* packed) {
  __m256 r[8], s[8];
#pragma GCC unroll 8
  for (int t = 0; t < 8; ++t) r[t] = scaled(D) ? _mm256_mul_ps(load8<D>(rows[t], i), factor[t]) : load8<D>(rows[t], i);
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
  constexpr bool HALVES = D == Dtype::f16 || D == Dtype::bf16;
  for (int t = 0; t < TILE; t += HALVES ? 16 : 8) {
    __m256 factor[8];
    for (int r = 0; scaled(D) && r < 8; ++r) factor[r] = row_factor<D>(rows[t + r], head_dim);
    for (int64_t i = 0; i < head_dim; i += 8)
      HALVES ? transpose16<HALVES ? D : Dtype::f16>(rows + t, i, packed + i * TILE + t)
             : transpose32<D>(rows + t, i, factor, packed + i * TILE + t);
  }
}

void pack_keys(const void* const* rows, int64_t head_dim, Dtype dtype, float* packed) {
  switch (dtype) {
    case Dtype::f32: return pack_keys_of<Dtype::f32>(rows, head_dim, packed);
    case Dtype::f16: return pack_keys_of<Dtype::f16>(rows, head_dim, packed);
    case Dtype::bf16: return pack_keys_of<Dtype::bf16>(rows, head_dim, packed);
    case Dtype::i8: return pack_keys_of<Dtype::i8>(rows, head_dim, packed);
    case Dtype::f8: return pack_keys_of<Dtype::f8>(rows, head_dim, packed);
  }
}

template <Dtype D>
void pack_values_of(const void* const* rows, int64_t head_dim, float* packed) {
  for (int t = 0; t < TILE; ++t) {
    const __m256 factor = row_factor<D>(rows[t], head_dim);
    for (int64_t i = 0; i < head_dim; i += 8) {
      const __m256 x = load8<D>(rows[t], i);
      _mm256_storeu_ps(packed + t * head_dim + i, scaled(D) ? _mm256_mul_ps(x, factor) : x);
    }
  }
}

void pack_values(const void* const* rows, int64_t head_dim, Dtype dtype, float* packed) {
  switch (dtype) {
    case Dtype::f32: return pack_values_of<Dtype::f32>(rows, head_dim, packed);
    case Dtype::f16: return pack_values_of<Dtype::f16>(rows, head_dim, packed);
    case Dtype::bf16: return pack_values_of<Dtype::bf16>(rows, head_dim, packed);
    case Dtype::i8: return pack_values_of<Dtype::i8>(rows, head_dim, packed);
    case Dtype::f8: return pack_values_of<Dtype::f8>(rows, head_dim, packed);
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

// score = cap * tanh(score / cap), in place.
void cap_scores(float* score, float cap) {
  for (int v = 0; v < TILE_VECS; ++v) {
    const __m256 x = _mm256_div_ps(_mm256_loadu_ps(score + v * LANES), _mm256_set1_ps(cap));
    _mm256_storeu_ps(score + v * LANES, _mm256_mul_ps(tanh8(x), _mm256_set1_ps(cap)));
  }
}

// Turns scores into weights in place, moves max and sum on; returns what the old accumulator is worth now.
float softmax_step(float* score, int first, int visible, float* max, float* sum) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  __m256 s[TILE_VECS], seen[TILE_VECS];
  __m256 top8 = _mm256_set1_ps(*max);
  for (int v = 0; v < TILE_VECS; ++v) {
    const __m256i begun = _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(first - 1 - v * LANES));
    seen[v] = _mm256_castsi256_ps(
        _mm256_and_si256(begun, _mm256_cmpgt_epi32(_mm256_set1_epi32(visible - v * LANES), lane)));
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

template <int N>
void attend_some(const Queries& qs, int64_t at, const float* keys, const float* const* values, int64_t head_dim) {
  float score[N * TILE], keep[N];
  int first = TILE, end = 0;
  tile_scores<N>(qs.q + at * head_dim, keys, head_dim, score);
  for (int n = 0; n < N; ++n) {
    const int from = qs.first[at + n], to = qs.visible[at + n];
    if (qs.softcap > 0.0f) cap_scores(score + n * TILE, qs.softcap);
    keep[n] = softmax_step(score + n * TILE, from, to, qs.max + at + n, qs.sum + at + n);
    first = from < first ? from : first;
    end = to > end ? to : end;
  }
  float* acc = qs.acc + at * head_dim;
  int64_t i = 0;
  for (; i + 4 * LANES <= head_dim; i += 4 * LANES)
    add_values<N, 4>(acc, head_dim, keep, score, values, first, end, i);
  for (; i < head_dim; i += LANES) add_values<N, 1>(acc, head_dim, keep, score, values, first, end, i);
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
