// Weights of a row of logits with AVX2 and FMA.
#include "sample.h"
#include "simd_avx2.h"

#include <math.h>

namespace baton {
namespace {

float largest(const float* x, int64_t n) {
  __m256 top = _mm256_set1_ps(-INFINITY), odd = _mm256_setzero_ps();
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 v = _mm256_loadu_ps(x + i);
    top = _mm256_max_ps(v, top);
    odd = _mm256_or_ps(odd, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  }
  float best = reduce_max(top);
  bool nan = _mm256_movemask_ps(odd) != 0;
  for (; i < n; ++i) {
    nan |= x[i] != x[i];
    best = x[i] > best ? x[i] : best;
  }
  return nan ? NAN : best;
}

void weigh(const float* x, int64_t first, int64_t end, float best, float temperature, Weights& out) {
  const __m256 top = _mm256_set1_ps(best), t = _mm256_set1_ps(temperature), least = _mm256_set1_ps(-INFINITY);
  const __m256 scale = _mm256_set1_ps(BUCKETS_PER_UNIT), most = _mm256_set1_ps(NUM_BUCKETS - 1);
  __m256d tail[2] = {_mm256_setzero_pd(), _mm256_setzero_pd()};
  int64_t i = first;
  for (; i + 8 <= end; i += 8) {
    const __m256 v = _mm256_loadu_ps(x + i), d = _mm256_div_ps(_mm256_sub_ps(v, top), t);
    // A logit of -infinity has no weight at all.
    const __m256 weight = _mm256_and_ps(exp8(d), _mm256_cmp_ps(v, least, _CMP_GT_OQ));
    const __m256 slice = _mm256_min_ps(_mm256_mul_ps(_mm256_sub_ps(_mm256_setzero_ps(), d), scale), most);
    const __m256 is_near = _mm256_cmp_ps(slice, most, _CMP_LT_OQ), rest = _mm256_andnot_ps(is_near, weight);
    _mm256_storeu_ps(out.weight + i, weight);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out.bucket + i), _mm256_cvttps_epi32(slice));
    tail[0] = _mm256_add_pd(tail[0], _mm256_cvtps_pd(_mm256_castps256_ps128(rest)));
    tail[1] = _mm256_add_pd(tail[1], _mm256_cvtps_pd(_mm256_extractf128_ps(rest, 1)));
    for (unsigned bits = static_cast<unsigned>(_mm256_movemask_ps(is_near)); bits; bits &= bits - 1)
      out.near[out.num_near++] = static_cast<int32_t>(i) + __builtin_ctz(bits);
  }
  double lanes[8];
  _mm256_storeu_pd(lanes, tail[0]);
  _mm256_storeu_pd(lanes + 4, tail[1]);
  for (double lane : lanes) out.tail_mass += lane;
  if (i < end) scalar_sample.weigh(x, i, end, best, temperature, out);
}

}  // namespace

const SampleOps avx2_sample = {largest, weigh};

}  // namespace baton
