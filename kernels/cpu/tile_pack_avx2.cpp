// Rows of keys and values to and from the pool, with AVX2, FMA and F16C. head_dim is a multiple of 8.
#include "half.h"
#include "tile_rows_avx2.h"

namespace baton {
namespace {

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

}  // namespace

void avx2_store_row(const float* src, void* dst, int64_t n, Dtype dtype) {
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

namespace {

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

}  // namespace

void avx2_pack_keys(const void* const* rows, int64_t head_dim, Dtype dtype, float* packed) {
  switch (dtype) {
    case Dtype::f32: return pack_keys_of<Dtype::f32>(rows, head_dim, packed);
    case Dtype::f16: return pack_keys_of<Dtype::f16>(rows, head_dim, packed);
    case Dtype::bf16: return pack_keys_of<Dtype::bf16>(rows, head_dim, packed);
    case Dtype::i8: return pack_keys_of<Dtype::i8>(rows, head_dim, packed);
    case Dtype::f8: return pack_keys_of<Dtype::f8>(rows, head_dim, packed);
  }
}

namespace {

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

}  // namespace

void avx2_pack_values(const void* const* rows, int64_t head_dim, Dtype dtype, float* packed) {
  switch (dtype) {
    case Dtype::f32: return pack_values_of<Dtype::f32>(rows, head_dim, packed);
    case Dtype::f16: return pack_values_of<Dtype::f16>(rows, head_dim, packed);
    case Dtype::bf16: return pack_values_of<Dtype::bf16>(rows, head_dim, packed);
    case Dtype::i8: return pack_values_of<Dtype::i8>(rows, head_dim, packed);
    case Dtype::f8: return pack_values_of<Dtype::f8>(rows, head_dim, packed);
  }
}

}  // namespace baton
