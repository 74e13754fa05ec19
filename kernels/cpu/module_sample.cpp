// Drawing tokens for Python: many rows in one call.
#include "module.h"
#include "sample.h"
#include "threads.h"

#include <algorithm>
#include <stdexcept>

namespace {

using namespace baton;

void draw_tokens(const Rows& logits, const Floats& temperature, const Longs& top_k, const Doubles& top_p,
                 const Floats& least, const Doubles& u, const OutLongs& tokens, int num_threads, bool simd) {
  const size_t n = logits.shape(0);
  if (temperature.size() != n || top_k.size() != n || top_p.size() != n || least.size() != n || u.size() != n ||
      tokens.size() != n)
    throw std::invalid_argument("draw_tokens: one entry per row");
  const int64_t vocab = static_cast<int64_t>(logits.shape(1));
  for (size_t i = 0; i < n; ++i)
    if (!(temperature.data()[i] > 0.0f) || top_k.data()[i] < 1 || top_k.data()[i] > vocab)
      throw std::invalid_argument("draw_tokens: temperature above 0 and top_k in 1..vocab");
  nb::gil_scoped_release released;
  parallel_for(static_cast<int64_t>(n), num_threads, [&](int64_t i) {
    const Draw draw = {logits.data() + i * vocab, vocab,           temperature.data()[i], top_k.data()[i],
                       top_p.data()[i],           least.data()[i], u.data()[i]};
    tokens.data()[i] = draw_token(draw, simd);
  });
}

void check_ids(const Ints& ids, int64_t vocab) {
  for (size_t i = 0; i < ids.size(); ++i)
    if (ids.data()[i] < 0 || ids.data()[i] >= vocab) throw nb::index_error("sampling: a token beyond the vocabulary");
}

void check_starts(const Longs& starts, size_t num_rows, size_t num_items) {
  if (starts.size() != num_rows + 1 || starts.data()[0] != 0 || starts.data()[num_rows] != static_cast<int64_t>(num_items))
    throw std::invalid_argument("sampling: starts run from 0 to the number of items");
  for (size_t i = 0; i < num_rows; ++i)
    if (starts.data()[i] > starts.data()[i + 1]) throw std::invalid_argument("sampling: starts must ascend");
}

void check_rows(const Longs& rows, size_t num_rows) {
  for (size_t i = 0; i < rows.size(); ++i)
    if (rows.data()[i] < 0 || rows.data()[i] >= static_cast<int64_t>(num_rows))
      throw nb::index_error("sampling: a row that does not exist");
}

void py_mask_logits(const OutRows& logits, const WordRows& allowed, int num_threads) {
  const int64_t vocab = static_cast<int64_t>(logits.shape(1)), words = static_cast<int64_t>(allowed.shape(1));
  if (allowed.shape(0) != logits.shape(0) || words != (vocab + 31) / 32)
    throw std::invalid_argument("mask_logits: one bit per token");
  nb::gil_scoped_release released;
  parallel_for(static_cast<int64_t>(logits.shape(0)), num_threads,
               [&](int64_t i) { mask_logits(logits.data() + i * vocab, vocab, allowed.data() + i * words); });
}

void py_adjust_logits(const OutRows& logits, const Longs& rows, const Longs& bias_start, const Ints& bias_ids,
                      const Floats& bias, const Longs& token_start, const Ints& tokens, const Longs& num_prompt,
                      const Floats& repetition, const Floats& frequency, const Floats& presence, int num_threads) {
  const size_t n = rows.size();
  const int64_t vocab = static_cast<int64_t>(logits.shape(1));
  if (num_prompt.size() != n || repetition.size() != n || frequency.size() != n || presence.size() != n ||
      bias.size() != bias_ids.size())
    throw std::invalid_argument("adjust_logits: one entry per row");
  check_rows(rows, logits.shape(0));
  check_starts(bias_start, n, bias_ids.size());
  check_starts(token_start, n, tokens.size());
  check_ids(bias_ids, vocab);
  check_ids(tokens, vocab);
  nb::gil_scoped_release released;
  parallel_for(static_cast<int64_t>(n), num_threads, [&](int64_t i) {
    const int64_t b = bias_start.data()[i], t = token_start.data()[i];
    const Adjust adjust = {bias_ids.data() + b,       bias.data() + b,
                           bias_start.data()[i + 1] - b, tokens.data() + t,
                           token_start.data()[i + 1] - t, num_prompt.data()[i],
                           repetition.data()[i],      frequency.data()[i],
                           presence.data()[i]};
    adjust_logits(logits.data() + rows.data()[i] * vocab, vocab, adjust);
  });
}

void py_tell_logprobs(const Rows& logits, const Longs& rows, const Longs& tokens, const Longs& num_top,
                      const OutFloats& logprobs, const OutLongs& ranks, const OutIntRows& top_ids, const OutRows& top_logprobs,
                      int num_threads, bool simd) {
  const size_t n = rows.size();
  const int64_t vocab = static_cast<int64_t>(logits.shape(1)), width = static_cast<int64_t>(top_ids.shape(1));
  if (tokens.size() != n || num_top.size() != n || logprobs.size() != n || ranks.size() != n || top_ids.shape(0) != n ||
      top_logprobs.shape(0) != n || top_logprobs.shape(1) != top_ids.shape(1))
    throw std::invalid_argument("tell_logprobs: one entry per row");
  check_rows(rows, logits.shape(0));
  for (size_t i = 0; i < n; ++i) {
    if (tokens.data()[i] < 0 || tokens.data()[i] >= vocab) throw nb::index_error("tell_logprobs: a token beyond the vocabulary");
    if (num_top.data()[i] < 0 || num_top.data()[i] > std::min(width, vocab))
      throw std::invalid_argument("tell_logprobs: num_top is at most the width of the outputs");
  }
  nb::gil_scoped_release released;
  parallel_for(static_cast<int64_t>(n), num_threads, [&](int64_t i) {
    const Told told = tell_logprobs(logits.data() + rows.data()[i] * vocab, vocab, tokens.data()[i], num_top.data()[i],
                                    top_ids.data() + i * width, top_logprobs.data() + i * width, simd);
    logprobs.data()[i] = told.logprob, ranks.data()[i] = told.rank;
  });
}

}  // namespace

void bind_sample(nb::module_& m) {
  m.def("draw_tokens", &draw_tokens);
  m.def("mask_logits", &py_mask_logits);
  m.def("adjust_logits", &py_adjust_logits);
  m.def("tell_logprobs", &py_tell_logprobs);
}
