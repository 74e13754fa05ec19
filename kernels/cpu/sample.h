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
  float least;          // of (logit - best) / temperature, in what is kept; -infinity = off (min-p: its logarithm)
  double u;             // in [0, 1)
};

// Tokens are ranked by logit, ties by lower id. `least` and top_k keep the first of the ranking, top_p the shortest start
// of what is left that holds its share of the weight, and u picks among the kept by inverting their cumulated weights.
// The answer is a function of the draw alone. -1: a logit is NaN or +infinity.
int64_t draw_token(const Draw& draw, bool simd);

// What is told of a row beside its token.
struct Told {
  float logprob;      // of `token`
  int64_t rank;       // 1 = no token has a higher logit
};

// Log-probabilities of a token and of the num_top best-ranked ones, by the logits as they are. NaN for a row that has a
// NaN or +infinity.
Told tell_logprobs(const float* logits, int64_t vocab, int64_t token, int64_t num_top, int32_t* top_ids, float* top_logprobs,
                   bool simd);

// Changes of a row's logits before a token is drawn, in this order.
struct Adjust {
  const int32_t* bias_ids;  // [num_bias]
  const float* bias;        // [num_bias], added
  int64_t num_bias;
  const int32_t* tokens;    // [num_tokens], of the seq: num_prompt of prompt, then output
  int64_t num_tokens, num_prompt;
  float repetition;         // logits of all of them: divided by it if above 0, else multiplied
  float frequency;          // taken off as often as the output has the token
  float presence;           // taken off once if the output has it
};

void adjust_logits(float* logits, int64_t vocab, const Adjust& adjust);

// -infinity for each token whose bit (t % 32 of word t / 32) is not set.
void mask_logits(float* logits, int64_t vocab, const uint32_t* allowed);

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
