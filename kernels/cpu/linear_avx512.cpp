// Micro-kernels of the linear layers with AVX-512 and VNNI: up to 12 rows times 16 outputs, one 512-bit accumulator for
// all outputs of a row. What is added to what, and in which order, is as in linear_avx2.cpp: the bits are the same.
// `tests/kernels/variant avx512` runs this file through SIMDe on a CPU without AVX-512.
#include "linear.h"

#ifdef BATON_SIMDE
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#else
#include <immintrin.h>
#endif
#include <string.h>

namespace baton {
namespace {

inline __m512i broadcast4(const void* p) {
  int32_t bits;
  memcpy(&bits, p, 4);
  return _mm512_set1_epi32(bits);
}

inline __m512 join(__m256 low, __m256 high) {
  return _mm512_castpd_ps(
      _mm512_insertf64x4(_mm512_castps_pd(_mm512_castps256_ps512(low)), _mm256_castps_pd(high), 1));
}

inline __m512 load_halves(const uint8_t* p) {
  return join(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
              _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16))));
}

inline __m512 to_floats(__m512i v) {
#ifdef BATON_SIMDE  // which lacks the conversion
  int32_t from[16];
  float to[16];
  _mm512_storeu_si512(from, v);
  for (int i = 0; i < 16; ++i) to[i] = static_cast<float>(from[i]);
  return _mm512_loadu_ps(to);
#else
  return _mm512_cvtepi32_ps(v);
#endif
}

inline __m512 add_group(__m512 sum, __m512i dots, __m512 weight_scale, float scale) {
  return _mm512_fmadd_ps(to_floats(dots), _mm512_mul_ps(weight_scale, _mm512_set1_ps(scale)), sum);
}

template <int R>
inline void write(const __m512* sums, float* out, int64_t out_stride) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) _mm512_storeu_ps(out + r * out_stride, sums[r]);
}

// R rows times a 4-bit block: outputs 0-7 from the low nibbles, 8-15 from the high ones.
template <int R>
void q4_tile(const uint8_t* w, int64_t groups, const uint8_t* x, int64_t row_bytes, float* out, int64_t out_stride) {
  constexpr int64_t TILE_BYTES = OUTS * GROUP / 2 + 4 * OUTS;
  const __m256i low = _mm256_set1_epi8(15);
  __m512 sums[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) sums[r] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; ++g, w += TILE_BYTES, x += sizeof(Group8)) {
    __m512i acc[R];
    prefetch(w + 8 * TILE_BYTES, TILE_BYTES);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) acc[r] = _mm512_setzero_si512();
#pragma GCC unroll 16
    for (int s = 0; s < 8; ++s) {
      const __m256i q = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 32 * s));
      const __m256i q0 = _mm256_and_si256(q, low), q1 = _mm256_and_si256(_mm256_srli_epi16(q, 4), low);
      const __m512i weights = _mm512_inserti64x4(_mm512_castsi256_si512(q0), q1, 1);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
        acc[r] = _mm512_dpbusd_epi32(acc[r], weights, broadcast4(x + r * row_bytes + 8 + 4 * s));
    }
    const __m512 scale = load_halves(w + 256), minimum = load_halves(w + 288);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      float head[2];
      memcpy(head, x + r * row_bytes, sizeof head);
      sums[r] = add_group(sums[r], acc[r], scale, head[0]);
      sums[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(head[1]), sums[r]);
    }
  }
  write<R>(sums, out, out_stride);
}

// R rows times an 8-bit block.
template <int R>
void q8_tile(const uint8_t* w, int64_t groups, const uint8_t* x, int64_t row_bytes, float* out, int64_t out_stride) {
  constexpr int64_t TILE_BYTES = OUTS * GROUP + 2 * OUTS;
  __m512 sums[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) sums[r] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; ++g, w += TILE_BYTES, x += sizeof(Group16)) {
    __m512i acc[R];
    prefetch(w + 4 * TILE_BYTES, TILE_BYTES);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) acc[r] = _mm512_setzero_si512();
#pragma GCC unroll 16
    for (int s = 0; s < 16; ++s) {
      const __m128i w0 = _mm_loadu_si128(reinterpret_cast<const __m128i*>(w + 16 * s));
      const __m128i w1 = _mm_loadu_si128(reinterpret_cast<const __m128i*>(w + 256 + 16 * s));
      const __m512i weights = _mm512_cvtepi8_epi16(_mm256_inserti128_si256(_mm256_castsi128_si256(w0), w1, 1));
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
        acc[r] = _mm512_dpwssd_epi32(acc[r], weights, broadcast4(x + r * row_bytes + 8 + 4 * s));
    }
    const __m512 scale = load_halves(w + 512);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      float head;
      memcpy(&head, x + r * row_bytes, sizeof head);
      sums[r] = add_group(sums[r], acc[r], scale, head);
    }
  }
  write<R>(sums, out, out_stride);
}

// R rows times a float32 block.
template <int R>
void f32_tile(const float* w, int64_t num_inputs, const uint8_t* x, int64_t row_bytes, float* out,
              int64_t out_stride) {
  __m512 sums[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) sums[r] = _mm512_setzero_ps();
  for (int64_t k = 0; k < num_inputs; ++k, w += OUTS, x += 4) {
    const __m512 weights = _mm512_loadu_ps(w);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      float a;
      memcpy(&a, x + r * row_bytes, sizeof a);
      sums[r] = _mm512_fmadd_ps(_mm512_set1_ps(a), weights, sums[r]);
    }
  }
  write<R>(sums, out, out_stride);
}

template <int R>
void tile(const Matrix& w, int64_t block, const uint8_t* x, int64_t row_bytes, float* out, int64_t out_stride) {
  const uint8_t* data = w.block(block);
  const int64_t groups = w.num_groups();
  switch (w.format) {
    case Format::q4: return q4_tile<R>(data, groups, x, row_bytes, out, out_stride);
    case Format::q8: return q8_tile<R>(data, groups, x, row_bytes, out, out_stride);
    case Format::f32:
      return f32_tile<R>(reinterpret_cast<const float*>(data), w.num_inputs, x, row_bytes, out, out_stride);
  }
}

}  // namespace

void avx512_multiply(const Matrix& w, int64_t block, const uint8_t* x, int64_t row_bytes, int64_t num_rows, float* out,
                     int64_t out_stride) {
#ifdef BATON_SIMDE  // emulated, each further shape takes minutes to compile
  static constexpr RowsTile tiles[] = {nullptr, tile<1>, tile<2>, tile<3>};
#else
  static constexpr RowsTile tiles[] = {nullptr, tile<1>, tile<2>, tile<3>,  tile<4>,  tile<5>, tile<6>,
                                       tile<7>, tile<8>, tile<9>, tile<10>, tile<11>, tile<12>};
#endif
  multiply_in_shares(tiles, w, block, x, row_bytes, num_rows, out, out_stride);
}

}  // namespace baton
