#include "sample.h"
#include "tile.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace baton {
namespace {

float largest(const float* x, int64_t n) {
  float best = -INFINITY;
  for (int64_t i = 0; i < n; ++i) {
    if (x[i] != x[i]) return x[i];
    best = x[i] > best ? x[i] : best;
  }
  return best;
}

void weigh(const float* x, int64_t first, int64_t end, float best, float temperature, Weights& out) {
  for (int64_t i = first; i < end; ++i) {
    const float d = (x[i] - best) / temperature;
    out.weight[i] = x[i] > -INFINITY ? std::exp(std::max(d, -87.0f)) : 0.0f;
    out.bucket[i] = static_cast<int32_t>(std::min(-d * BUCKETS_PER_UNIT, static_cast<float>(NUM_BUCKETS - 1)));
    if (out.bucket[i] < NUM_BUCKETS - 1) out.near[out.num_near++] = static_cast<int32_t>(i);
    else out.tail_mass += static_cast<double>(out.weight[i]);
  }
}

// The ranking of a row, known bucket by bucket; a bucket is put in order only when an answer lies in it.
class Ranking {
 public:
  void load(const float* logits, int64_t vocab, float best, float temperature, const SampleOps& ops) {
    logits_ = logits, vocab_ = vocab;
    weight_.resize(vocab_), bucket_.resize(vocab_), near_.resize(vocab_);
    Weights weights = {weight_.data(), bucket_.data(), near_.data(), 0, 0.0};
    ops.weigh(logits, 0, vocab_, best, temperature, weights);
    num_near_ = weights.num_near;
    mass_.assign(NUM_BUCKETS, 0.0), count_.assign(NUM_BUCKETS, 0);
    for (int64_t i = 0; i < num_near_; ++i) {
      const int32_t id = near_[i];
      mass_[bucket_[id]] += static_cast<double>(weight_[id]);
      ++count_[bucket_[id]];
    }
    mass_[NUM_BUCKETS - 1] = weights.tail_mass, count_[NUM_BUCKETS - 1] = vocab_ - num_near_;
    sorted_ = -1;
  }

  double total() const {
    double sum = 0.0;
    for (double mass : mass_) sum += mass;
    return sum;
  }

  // The weight of the first `rank` tokens.
  double mass_before(int64_t rank) {
    double sum = 0.0;
    for (int b = 0; b < NUM_BUCKETS; ++b) {
      if (rank < count_[b]) {
        sort(b);
        for (int64_t i = 0; i < rank; ++i) sum += static_cast<double>(weight_[ids_[i]]);
        return sum;
      }
      rank -= count_[b];
      sum += mass_[b];
    }
    return sum;
  }

  struct Place {
    int64_t token, rank;
    double mass;  // of the ranking up to and with this token
  };

  // The first token at which the cumulated weight is above `target`, or at least that if `reach`; else the last
  // token that has any weight.
  Place find(double target, bool reach) {
    double sum = 0.0;
    int64_t rank = 0;
    Place last = {-1, -1, 0.0};
    for (int b = 0; b < NUM_BUCKETS; ++b) {
      const double end = sum + mass_[b];
      if (count_[b] > 0 && (end > target || (reach && end >= target) || b == NUM_BUCKETS - 1 || !more_after(b))) {
        sort(b);
        double running = sum;
        for (size_t i = 0; i < ids_.size(); ++i) {
          const double weight = static_cast<double>(weight_[ids_[i]]);
          running += weight;
          if (weight > 0.0) last = {ids_[i], rank + static_cast<int64_t>(i), running};
          if (running > target || (reach && running >= target)) return last;
        }
      }
      sum = end;
      rank += count_[b];
    }
    return last;
  }

  // The token at a rank.
  int64_t at(int64_t rank) {
    for (int b = 0; b < NUM_BUCKETS; ++b) {
      if (rank < count_[b]) {
        sort(b);
        return ids_[rank];
      }
      rank -= count_[b];
    }
    return -1;
  }

 private:
  bool more_after(int b) const {
    for (int next = b + 1; next < NUM_BUCKETS; ++next)
      if (mass_[next] > 0.0) return true;
    return false;
  }

  void sort(int b) {
    if (sorted_ == b) return;
    sorted_ = b;
    ids_.clear();
    if (b < NUM_BUCKETS - 1) {
      for (int64_t i = 0; i < num_near_; ++i)
        if (bucket_[near_[i]] == b) ids_.push_back(near_[i]);
    } else {
      for (int64_t i = 0; i < vocab_; ++i)
        if (bucket_[i] == b) ids_.push_back(static_cast<int32_t>(i));
    }
    std::sort(ids_.begin(), ids_.end(), [this](int32_t a, int32_t c) {
      return logits_[a] != logits_[c] ? logits_[a] > logits_[c] : a < c;
    });
  }

  const float* logits_ = nullptr;
  int64_t vocab_ = 0;
  std::vector<float> weight_;
  std::vector<int32_t> bucket_, near_, ids_;  // ids_: of the bucket `sorted_`, in order
  int64_t num_near_ = 0;
  std::vector<double> mass_;
  std::vector<int64_t> count_;
  int sorted_ = -1;
};

}  // namespace

const SampleOps scalar_sample = {largest, weigh};

namespace {

const SampleOps& sample_ops(bool simd) {
#ifdef BATON_AVX2
  if (simd && cpu_has_avx2()) return avx2_sample;
#endif
  (void)simd;
  return scalar_sample;
}

Ranking& scratch() {
  static thread_local Ranking ranking;
  return ranking;
}

}  // namespace

int64_t draw_token(const Draw& draw, bool simd) {
  const SampleOps& ops = sample_ops(simd);
  const float best = ops.largest(draw.logits, draw.vocab);
  if (!std::isfinite(best)) return -1;
  Ranking& ranking = scratch();
  ranking.load(draw.logits, draw.vocab, best, draw.temperature, ops);
  int64_t kept = draw.top_k;
  if (draw.least > -INFINITY) {
    int64_t enough = 0;
    for (int64_t i = 0; i < draw.vocab; ++i) enough += (draw.logits[i] - best) / draw.temperature >= draw.least;
    kept = std::min(kept, std::max<int64_t>(enough, 1));
  }
  double mass = kept < draw.vocab ? ranking.mass_before(kept) : ranking.total();
  if (draw.top_p < 1.0) {
    const Ranking::Place end = ranking.find(draw.top_p * mass, true);
    if (end.rank + 1 < kept) kept = end.rank + 1, mass = end.mass;
  }
  const Ranking::Place drawn = ranking.find(draw.u * mass, false);
  // Sums in another order may differ by a rounding, and step over the last token kept.
  return drawn.rank < kept ? drawn.token : ranking.at(kept - 1);
}

Told tell_logprobs(const float* logits, int64_t vocab, int64_t token, int64_t num_top, int32_t* top_ids, float* top_logprobs,
                   bool simd) {
  const SampleOps& ops = sample_ops(simd);
  const float best = ops.largest(logits, vocab);
  if (!std::isfinite(best)) {
    std::fill(top_ids, top_ids + num_top, 0);
    std::fill(top_logprobs, top_logprobs + num_top, NAN);
    return {NAN, 0};
  }
  Ranking& ranking = scratch();
  ranking.load(logits, vocab, best, 1.0f, ops);
  const double log_total = std::log(ranking.total());
  const auto logprob = [&](int64_t id) { return static_cast<float>(static_cast<double>(logits[id]) - best - log_total); };
  for (int64_t i = 0; i < num_top; ++i) {
    top_ids[i] = static_cast<int32_t>(ranking.at(i));
    top_logprobs[i] = logprob(top_ids[i]);
  }
  int64_t rank = 1;
  for (int64_t i = 0; i < vocab; ++i) rank += logits[i] > logits[token];
  return {logprob(token), rank};
}

void adjust_logits(float* logits, int64_t vocab, const Adjust& adjust) {
  for (int64_t i = 0; i < adjust.num_bias; ++i) logits[adjust.bias_ids[i]] += adjust.bias[i];
  if (!adjust.num_tokens) return;
  static thread_local std::vector<int32_t> count;  // 0 = not seen, else 1 + times in the output; all 0 between calls
  if (static_cast<int64_t>(count.size()) < vocab) count.assign(vocab, 0);
  for (int64_t i = 0; i < adjust.num_tokens; ++i) {
    int32_t& n = count[adjust.tokens[i]];
    n = std::max(n, 1) + (i >= adjust.num_prompt);
  }
  for (int64_t i = 0; i < adjust.num_tokens; ++i) {
    const int32_t id = adjust.tokens[i];
    if (!count[id]) continue;  // done already
    float x = logits[id];
    x = x > 0.0f ? x / adjust.repetition : x * adjust.repetition;
    const float times = static_cast<float>(count[id] - 1);
    x -= adjust.frequency * times;
    if (times > 0.0f) x -= adjust.presence;
    logits[id] = x;
    count[id] = 0;
  }
}

constexpr uint32_t MINUS_INFINITY = 0xFF800000u;  // its bits as a float32

void mask_logits(float* logits, int64_t vocab, const uint32_t* allowed) {
  for (int64_t first = 0; first < vocab; first += 32) {
    const uint32_t word = allowed[first / 32];
    if (word == 0xFFFFFFFFu) continue;
    const int64_t end = std::min<int64_t>(first + 32, vocab);
    if (word == 0) {
      std::fill(logits + first, logits + end, -INFINITY);
      continue;
    }
    // No branch: which tokens a grammar allows is not for a processor to guess.
    for (int64_t i = first; i < end; ++i) {
      const uint32_t keep = 0u - (word >> (i - first) & 1u);
      uint32_t bits;
      std::memcpy(&bits, logits + i, 4);
      bits = (bits & keep) | (MINUS_INFINITY & ~keep);
      std::memcpy(logits + i, &bits, 4);
    }
  }
}

}  // namespace baton
