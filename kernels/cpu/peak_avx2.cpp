// What a core can do at most, with everything in registers: the ceilings that benchmarks compare with.
#include "peak.h"
#include "simd_avx2.h"

namespace baton {
namespace {

// Twelve independent chains hide every latency. The asm keeps g++ from folding the loop.
#define BATON_EACH(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)
#define BATON_STATE(i) __m256i a##i = _mm256_setzero_si256();

void fma(int64_t n) {
  BATON_EACH(BATON_STATE)
  const __m256i b = _mm256_setzero_si256();
#define BATON_FMA(i) asm volatile("vfmadd231ps %1,%1,%0" : "+x"(a##i) : "x"(b));
  for (int64_t j = 0; j < n; ++j) { BATON_EACH(BATON_FMA) }
}

void dot8(int64_t n) {
  BATON_EACH(BATON_STATE)
  __m256i b = _mm256_set1_epi8(1), t;
#define BATON_DOT8(i) \
  asm volatile("vpmaddubsw %2,%2,%1\n\tvpaddw %1,%0,%0" : "+x"(a##i), "=&x"(t) : "x"(b));
  for (int64_t j = 0; j < n; ++j) { BATON_EACH(BATON_DOT8) }
}

void dot16(int64_t n) {
  BATON_EACH(BATON_STATE)
  __m256i b = _mm256_set1_epi8(1), t;
#define BATON_DOT16(i) \
  asm volatile("vpmaddwd %2,%2,%1\n\tvpaddd %1,%0,%0" : "+x"(a##i), "=&x"(t) : "x"(b));
  for (int64_t j = 0; j < n; ++j) { BATON_EACH(BATON_DOT16) }
}

void read(const uint8_t* data, int64_t num_bytes) {
  __m256i sum[4] = {};
  for (int64_t i = 0; i + 128 <= num_bytes; i += 128)
    for (int v = 0; v < 4; ++v)
      sum[v] = _mm256_add_epi32(sum[v], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + i + 32 * v)));
  for (int v = 0; v < 4; ++v) asm volatile("" : : "x"(sum[v]));
}

}  // namespace

const PeakOps avx2_peaks = {{fma, 12 * 16}, {dot8, 12 * 64}, {dot16, 12 * 32}, read};

}  // namespace baton
