// The row-wise float ops with AVX2 and FMA. Sums run over fixed lanes, so a row's bits depend on the row alone.
#include "linear.h"
#include "simd_avx2.h"

#include <math.h>

namespace baton {
namespace {

constexpr int64_t LANES = 8;

void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
  __m256 squares = _mm256_setzero_ps();
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    const __m256 v = _mm256_loadu_ps(x + i);
    squares = _mm256_fmadd_ps(v, v, squares);
  }
  float sum = reduce_sum(squares);
  for (int64_t j = i; j < n; ++j) sum += x[j] * x[j];
  const float scale = 1.0f / sqrtf(sum / static_cast<float>(n) + eps);
  for (i = 0; i + LANES <= n; i += LANES)
    _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(scale)),
                                            _mm256_loadu_ps(weight + i)));
  for (; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

void add(const float* x, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES)
    _mm256_storeu_ps(out + i, _mm256_add_ps(_mm256_loadu_ps(out + i), _mm256_loadu_ps(x + i)));
  for (; i < n; ++i) out[i] += x[i];
}

// silu(g) * u = g * u / (1 + e^-g). Below -87 the exponential is held at e^87, so the result is a hair off zero
// where float32 would round it to something smaller still.
void silu_mul(const float* gate, const float* up, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    const __m256 g = _mm256_loadu_ps(gate + i);
    const __m256 down = _mm256_add_ps(_mm256_set1_ps(1.0f), exp8(_mm256_sub_ps(_mm256_setzero_ps(), g)));
    _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_div_ps(g, down), _mm256_loadu_ps(up + i)));
  }
  for (; i < n; ++i) out[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

// Its formula is in linear_scalar.cpp.
void gelu_mul(const float* gate, const float* up, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    const __m256 g = _mm256_loadu_ps(gate + i);
    const __m256 cube = _mm256_mul_ps(_mm256_mul_ps(g, g), g);
    const __m256 inner = _mm256_fmadd_ps(cube, _mm256_set1_ps(0.044715f), g);
    const __m256 down = _mm256_add_ps(_mm256_set1_ps(1.0f), exp8(_mm256_mul_ps(inner, _mm256_set1_ps(-1.5957691216f))));
    _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_div_ps(g, down), _mm256_loadu_ps(up + i)));
  }
  if (i < n) scalar_rows.gelu_mul(gate + i, up + i, n - i, out + i);
}

void softcap(float cap, int64_t n, float* x) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES)
    _mm256_storeu_ps(x + i, _mm256_mul_ps(tanh8(_mm256_div_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(cap))),
                                          _mm256_set1_ps(cap)));
  if (i < n) scalar_rows.softcap(cap, n - i, x + i);
}

void rope(const float* cos, const float* sin, int64_t half, float* x) {
  int64_t i = 0;
  for (; i + LANES <= half; i += LANES) {
    const __m256 first = _mm256_loadu_ps(x + i), second = _mm256_loadu_ps(x + i + half);
    const __m256 c = _mm256_loadu_ps(cos + i), s = _mm256_loadu_ps(sin + i);
    _mm256_storeu_ps(x + i, _mm256_sub_ps(_mm256_mul_ps(first, c), _mm256_mul_ps(second, s)));
    _mm256_storeu_ps(x + i + half, _mm256_add_ps(_mm256_mul_ps(second, c), _mm256_mul_ps(first, s)));
  }
  for (; i < half; ++i) {
    const float first = x[i], second = x[i + half];
    x[i] = first * cos[i] - second * sin[i];
    x[i + half] = second * cos[i] + first * sin[i];
  }
}

}  // namespace

const RowOps avx2_rows = {rms_norm, add, silu_mul, gelu_mul, softcap, rope};

}  // namespace baton
