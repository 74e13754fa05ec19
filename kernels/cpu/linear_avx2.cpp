// Micro-kernels of the linear layers with AVX2, FMA and F16C: up to 6 rows times 16 outputs, accumulators in
// registers. 4-bit weights are the unsigned operand of vpmaddubsw: eight of its results, each at most 2 * 15 * 127,
// fit in 16 bits, so a group of 32 inputs is widened once.
#include "linear.h"
#include "simd_avx2.h"

#include <string.h>

namespace baton {
namespace {

inline __m256i load_bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

inline __m256 load_halves(const uint8_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

inline __m256i broadcast4(const void* p) {
  int32_t bits;
  memcpy(&bits, p, 4);
  return _mm256_set1_epi32(bits);
}

// Keeps a value in a register at this point. Without it g++ moves the loads of a group's eight steps together and
// spills the accumulators (seen in the disassembly; 12 accumulators, a weight and an activation fit in 16 registers).
template <typename V>
inline void pin(V& value) {
  asm volatile("" : "+x"(value));
}

// Adds a group's integer dot products to the running sum.
inline __m256 add_group(__m256 sum, __m256i dots, __m256 weight_scale, float scale) {
  return _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), _mm256_mul_ps(weight_scale, _mm256_set1_ps(scale)), sum);
}

// Sums of R rows times 16 outputs over a block's groups. Up to three rows they stay in registers; more rows leave
// those to the integer accumulators, and the sums are in memory, touched once per group.
template <int R>
struct Sums {
  static constexpr bool IN_REGISTERS = R <= 3;
  __m256 kept[R][2];
  alignas(32) float stored[R][OUTS];

  Sums() {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
      for (int h = 0; h < 2; ++h) set(r, h, _mm256_setzero_ps());
  }
  __m256 get(int r, int h) const { return IN_REGISTERS ? kept[r][h] : _mm256_load_ps(&stored[r][8 * h]); }
  void set(int r, int h, __m256 value) {
    if (IN_REGISTERS) kept[r][h] = value;
    else _mm256_store_ps(&stored[r][8 * h], value);
  }
  void settle() {
    if (!IN_REGISTERS) asm volatile("" : : "r"(stored) : "memory");  // or g++ would hold them in registers it lacks
  }
  void write(float* out, int64_t out_stride) const {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
      for (int h = 0; h < 2; ++h) _mm256_storeu_ps(out + r * out_stride + 8 * h, get(r, h));
  }
};

// R rows times a 4-bit block.
template <int R>
void q4_tile(const uint8_t* w, int64_t groups, const uint8_t* x, int64_t row_bytes, float* out, int64_t out_stride) {
  constexpr int64_t TILE_BYTES = OUTS * GROUP / 2 + 4 * OUTS;
  const __m256i low = _mm256_set1_epi8(15);
  Sums<R> sums;
  for (int64_t g = 0; g < groups; ++g, w += TILE_BYTES, x += sizeof(Group8)) {
    __m256i acc[R][2];
    prefetch(w + 8 * TILE_BYTES, TILE_BYTES);
#pragma GCC unroll 16
    for (int s = 0; s < 8; ++s) {
      const __m256i q = load_bytes(w + 32 * s);
      const __m256i q0 = _mm256_and_si256(q, low), q1 = _mm256_and_si256(_mm256_srli_epi16(q, 4), low);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const __m256i a = broadcast4(x + r * row_bytes + 8 + 4 * s);
        const __m256i p0 = _mm256_maddubs_epi16(q0, a), p1 = _mm256_maddubs_epi16(q1, a);
        acc[r][0] = s ? _mm256_add_epi16(acc[r][0], p0) : p0;
        acc[r][1] = s ? _mm256_add_epi16(acc[r][1], p1) : p1;
        pin(acc[r][0]), pin(acc[r][1]);
      }
    }
#pragma GCC unroll 16
    for (int h = 0; h < 2; ++h) {
      const __m256 scale = load_halves(w + 256 + 16 * h), minimum = load_halves(w + 288 + 16 * h);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const float* head = reinterpret_cast<const float*>(x + r * row_bytes);
        const __m256 sum =
            add_group(sums.get(r, h), _mm256_madd_epi16(acc[r][h], _mm256_set1_epi16(1)), scale, head[0]);
        sums.set(r, h, _mm256_fmadd_ps(minimum, _mm256_set1_ps(head[1]), sum));
      }
    }
    sums.settle();
  }
  sums.write(out, out_stride);
}

inline __m256i widen_pairs(const uint8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// R rows times an 8-bit block.
template <int R>
void q8_tile(const uint8_t* w, int64_t groups, const uint8_t* x, int64_t row_bytes, float* out, int64_t out_stride) {
  constexpr int64_t TILE_BYTES = OUTS * GROUP + 2 * OUTS;
  Sums<R> sums;
  for (int64_t g = 0; g < groups; ++g, w += TILE_BYTES, x += sizeof(Group16)) {
    __m256i acc[R][2];
    prefetch(w + 4 * TILE_BYTES, TILE_BYTES);
#pragma GCC unroll 16
    for (int s = 0; s < 16; ++s) {
      const __m256i w0 = widen_pairs(w + 16 * s), w1 = widen_pairs(w + 256 + 16 * s);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const __m256i a = broadcast4(x + r * row_bytes + 8 + 4 * s);
        const __m256i d0 = _mm256_madd_epi16(w0, a), d1 = _mm256_madd_epi16(w1, a);
        acc[r][0] = s ? _mm256_add_epi32(acc[r][0], d0) : d0;
        acc[r][1] = s ? _mm256_add_epi32(acc[r][1], d1) : d1;
        pin(acc[r][0]), pin(acc[r][1]);
      }
    }
#pragma GCC unroll 16
    for (int h = 0; h < 2; ++h) {
      const __m256 scale = load_halves(w + 512 + 16 * h);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const float* head = reinterpret_cast<const float*>(x + r * row_bytes);
        sums.set(r, h, add_group(sums.get(r, h), acc[r][h], scale, head[0]));
      }
    }
    sums.settle();
  }
  sums.write(out, out_stride);
}

// R rows times a float32 block.
template <int R>
void f32_tile(const float* w, int64_t num_inputs, const uint8_t* x, int64_t row_bytes, float* out,
              int64_t out_stride) {
  __m256 sum[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_ps();
  for (int64_t k = 0; k < num_inputs; ++k, w += OUTS, x += 4) {
    const __m256 w0 = _mm256_loadu_ps(w), w1 = _mm256_loadu_ps(w + 8);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const __m256 a = _mm256_broadcast_ss(reinterpret_cast<const float*>(x + r * row_bytes));
      sum[r][0] = _mm256_fmadd_ps(a, w0, sum[r][0]);
      sum[r][1] = _mm256_fmadd_ps(a, w1, sum[r][1]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int h = 0; h < 2; ++h) _mm256_storeu_ps(out + r * out_stride + 8 * h, sum[r][h]);
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

void multiply_block(const Matrix& w, int64_t block, const uint8_t* x, int64_t row_bytes, int64_t num_rows, float* out,
                    int64_t out_stride) {
  static constexpr RowsTile tiles[] = {nullptr, tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>};
  multiply_in_shares(tiles, w, block, x, row_bytes, num_rows, out, out_stride);
}

// The largest magnitude of 32 floats, NaN if one is NaN: magnitudes compare like the integers of their bits.
inline float largest(const __m256 v[4]) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i top = _mm256_setzero_si256();
  for (int i = 0; i < 4; ++i) top = _mm256_max_epi32(top, _mm256_and_si256(_mm256_castps_si256(v[i]), magnitude));
  __m128i t = _mm_max_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
  t = _mm_max_epi32(t, _mm_shuffle_epi32(t, 0x4e));
  t = _mm_max_epi32(t, _mm_shuffle_epi32(t, 0xb1));
  return _mm_cvtss_f32(_mm_castsi128_ps(t));
}

// Quantises 32 floats: q in -127..127, rounded to nearest even. An all-zero group has scale 0; infinities and NaN
// end up in the scale, so that they reach every product.
inline void quantise(const float* x, __m256i q[4], float* scale, float* sum) {
  __m256 v[4];
  for (int i = 0; i < 4; ++i) v[i] = _mm256_loadu_ps(x + 8 * i);
  const float most = largest(v);
  *scale = most / 127.0f;
  const __m256 inverse = _mm256_set1_ps(most > 0.0f ? 127.0f / most : 0.0f);
  __m256i total = _mm256_setzero_si256();
  for (int i = 0; i < 4; ++i) {
    q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
    total = _mm256_add_epi32(total, q[i]);
  }
  __m128i t = _mm_add_epi32(_mm256_castsi256_si128(total), _mm256_extracti128_si256(total, 1));
  t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0x4e));
  t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0xb1));
  *sum = *scale * static_cast<float>(_mm_cvtsi128_si32(t));
}

void prepare(Format format, const float* x, int64_t n, void* dst) {
  if (format == Format::f32) {
    memcpy(dst, x, static_cast<size_t>(n) * 4);
    return;
  }
  float padded[GROUP];
  for (int64_t k = 0, g = 0; k < n; k += GROUP, ++g) {
    const float* from = x + k;
    if (n - k < GROUP) {
      memset(padded, 0, sizeof padded);
      memcpy(padded, from, static_cast<size_t>(n - k) * 4);
      from = padded;
    }
    __m256i q[4];
    float scale, sum;
    quantise(from, q, &scale, &sum);
    // Packing works within 128-bit lanes; the permutation puts the quarters back in order.
    const __m256i s01 = _mm256_permute4x64_epi64(_mm256_packs_epi32(q[0], q[1]), 0xd8);
    const __m256i s23 = _mm256_permute4x64_epi64(_mm256_packs_epi32(q[2], q[3]), 0xd8);
    if (format == Format::q8) {
      Group16* group = static_cast<Group16*>(dst) + g;
      group->scale = scale, group->sum = sum;
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(group->q), s01);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(group->q + 16), s23);
    } else {
      Group8* group = static_cast<Group8*>(dst) + g;
      group->scale = scale, group->sum = sum;
      const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(s01, s23), 0xd8);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(group->q), bytes);
    }
  }
}

}  // namespace

const LinearOps avx2_linear = {prepare, multiply_block};

}  // namespace baton
