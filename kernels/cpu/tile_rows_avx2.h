// Numbers of a row of the pool, widened to float32, for the files that are compiled for AVX2, FMA and F16C.
// `static`: each file gets its own copy (tile.h says why).
#pragma once
#include "simd_avx2.h"
#include "tile.h"

#include <string.h>

namespace baton {

constexpr int LANES = 8, TILE_VECS = TILE / LANES;

template <Dtype D>
static inline __m256 widen(__m128i halves) {
  if (D == Dtype::f16) return _mm256_cvtph_ps(halves);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

static inline __m128i load_halves(const void* row, int64_t i) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(row) + i));
}

static constexpr bool scaled(Dtype dtype) { return dtype == Dtype::i8 || dtype == Dtype::f8; }

static inline __m128i load_bytes8(const void* row, int64_t i) {
  return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(static_cast<const char*>(row) + i));
}

// What a row's numbers are multiplied by: its scale, and what `load8` leaves out of an e4m3 number's exponent.
template <Dtype D>
static inline __m256 row_factor(const void* row, int64_t n) {
  if (!scaled(D)) return _mm256_set1_ps(1.0f);
  float scale;
  memcpy(&scale, static_cast<const char*>(row) + n, 4);
  return _mm256_set1_ps(D == Dtype::f8 ? 256.0f * scale : scale);
}

// Numbers i .. i + 7 of a row, not yet multiplied by its factor.
template <Dtype D>
static inline __m256 load8(const void* row, int64_t i) {
  if (D == Dtype::f32) return _mm256_loadu_ps(static_cast<const float*>(row) + i);
  if (D == Dtype::i8) return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_bytes8(row, i)));
  if (D == Dtype::f8) {  // the bits of a float16 that is 2^8 times smaller
    const __m128i wide = _mm_cvtepu8_epi16(load_bytes8(row, i));
    const __m128i sign = _mm_and_si128(_mm_slli_epi16(wide, 8), _mm_set1_epi16(static_cast<int16_t>(0x8000)));
    return _mm256_cvtph_ps(_mm_or_si128(sign, _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x7f)), 7)));
  }
  return widen<D>(load_halves(row, i));
}

// Parts of `avx2_ops`, see TileOps (tile_pack_avx2.cpp).
void avx2_store_row(const float* src, void* dst, int64_t n, Dtype dtype);
void avx2_pack_keys(const void* const* rows, int64_t head_dim, Dtype dtype, float* packed);
void avx2_pack_values(const void* const* rows, int64_t head_dim, Dtype dtype, float* packed);

}  // namespace baton
