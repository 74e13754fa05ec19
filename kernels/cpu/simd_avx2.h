// Helpers of the files that are compiled for AVX2, FMA and F16C. `static`: each file gets its own copy (tile.h says why).
#pragma once
#include <immintrin.h>

namespace baton {

// e^x: 2^n * e^r with |r| <= ln(2)/2, e^r by its Taylor series to the 7th power (error < 2^-26). x is clamped to
// -87..88, so the result is never 0 nor infinite.
static inline __m256 exp8(__m256 x) {
  x = _mm256_min_ps(_mm256_max_ps(x, _mm256_set1_ps(-87.0f)), _mm256_set1_ps(88.0f));
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)),
                                   _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);  // ln 2 in two parts, the first exact
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  const float inverse_factorial[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  __m256 p = _mm256_set1_ps(1.0f / 5040);
  for (float c : inverse_factorial) p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c));
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(p, _mm256_castsi256_ps(power));
}

// 2^x: 2^n * 2^r with |r| <= 1/2, 2^r by the polynomial of 5th degree whose largest relative error is least (9.2e-8)
// among those that give 1 for r = 0. x is clamped to -125..126, so the result is never 0 nor infinite; NaN stays.
static inline __m256 exp2_8(__m256 x) {
  const __m256 shift = _mm256_set1_ps(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
  x = _mm256_min_ps(_mm256_set1_ps(126.0f), _mm256_max_ps(_mm256_set1_ps(-125.0f), x));  // of a NaN, the second operand
  const __m256 t = _mm256_add_ps(x, shift), r = _mm256_sub_ps(x, _mm256_sub_ps(t, shift));
  __m256 p = _mm256_set1_ps(1.3264727e-3f);
  const float coefficients[] = {9.671513e-3f, 5.5507336e-2f, 0.24022242f, 0.69314700f, 1.0f};
  for (float c : coefficients) p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c));
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_castps_si256(t), 23)));
}

// tanh x = 1 - 2 / (e^2x + 1); off by some 1e-7 at most, also where tanh itself is smaller. NaN gives NaN.
static inline __m256 tanh8(__m256 x) {
  const __m256 down = _mm256_add_ps(exp8(_mm256_add_ps(x, x)), _mm256_set1_ps(1.0f));
  const __m256 value = _mm256_sub_ps(_mm256_set1_ps(1.0f), _mm256_div_ps(_mm256_set1_ps(2.0f), down));
  return _mm256_blendv_ps(value, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

static inline float reduce_max(__m256 v) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

static inline float reduce_sum(__m256 v) {
  __m128 m = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_add_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_add_ss(m, _mm_movehdup_ps(m)));
}

}  // namespace baton
