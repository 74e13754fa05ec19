#include "sample.h"
#include "tile.h"

#include <algorithm>
#include <cmath>
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
  void load(const Draw& draw, float best, const SampleOps& ops) {
    logits_ = draw.logits, vocab_ = draw.vocab;
    weight_.resize(vocab_), bucket_.resize(vocab_), near_.resize(vocab_);
    Weights weights = {weight_.data(), bucket_.data(), near_.data(), 0, 0.0};
    ops.weigh(draw.logits, 0, vocab_, best, draw.temperature, weights);
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

int64_t draw_token(const Draw& draw, bool simd) {
  const SampleOps* ops = &scalar_sample;
#ifdef BATON_AVX2
  if (simd && cpu_has_avx2()) ops = &avx2_sample;
#endif
  (void)simd;
  const float best = ops->largest(draw.logits, draw.vocab);
  if (!std::isfinite(best)) return -1;
  static thread_local Ranking ranking;
  ranking.load(draw, best, *ops);
  int64_t kept = draw.top_k;
  double mass = kept < draw.vocab ? ranking.mass_before(kept) : ranking.total();
  if (draw.top_p < 1.0) {
    const Ranking::Place end = ranking.find(draw.top_p * mass, true);
    if (end.rank + 1 < kept) kept = end.rank + 1, mass = end.mass;
  }
  const Ranking::Place drawn = ranking.find(draw.u * mass, false);
  // Sums in another order may differ by a rounding, and step over the last token kept.
  return drawn.rank < kept ? drawn.token : ranking.at(kept - 1);
}

}  // namespace baton
