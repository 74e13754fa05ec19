// Draws tokens: one row of logits, one uniform number, one token.
#pragma once
#include <cstdint>

namespace baton {

struct Draw {
  const float* logits;  // [vocab]
  int64_t vocab;
  float temperature;    // above 0
  int64_t top_k;        // 1..vocab, vocab = off
  double top_p;         // 0..1, 1 = off
  double u;             // in [0, 1)
};

// Tokens are ranked by logit, ties by lower id. top_k keeps the first of the ranking, top_p the shortest start of
// what is left that holds its share of the weight, and u picks among the kept by inverting their cumulated weights.
// The answer is a function of the draw alone. -1: a logit is NaN or +infinity.
int64_t draw_token(const Draw& draw, bool simd);

constexpr int NUM_BUCKETS = 1920;        // the last one is the tail: all that is 12 units or more from the best
constexpr float BUCKETS_PER_UNIT = 160;  // of logit / temperature

// The weights of n logits: weight[i] = e^((x[i] - best) / temperature), and bucket[i], which slice of the ranking it
// falls into, 0 = best. Few tokens are near the best: their ids are listed, of the others only the sum is told.
struct Weights {
  float* weight;
  int32_t *bucket, *near;
  int64_t num_near;
  double tail_mass;
};

struct SampleOps {
  float (*largest)(const float* x, int64_t n);  // NaN if one is NaN
  void (*weigh)(const float* x, int64_t first, int64_t end, float best, float temperature, Weights& out);  // appends
};

extern const SampleOps scalar_sample;
#ifdef BATON_AVX2
extern const SampleOps avx2_sample;
#endif

}  // namespace baton
