// Drawing tokens for Python: many rows in one call.
#include "module.h"
#include "sample.h"
#include "threads.h"

#include <stdexcept>

namespace {

using namespace baton;

void draw_tokens(const Rows& logits, const Floats& temperature, const Longs& top_k, const Doubles& top_p,
                 const Doubles& u, const OutLongs& tokens, int num_threads, bool simd) {
  const size_t n = logits.shape(0);
  if (temperature.size() != n || top_k.size() != n || top_p.size() != n || u.size() != n || tokens.size() != n)
    throw std::invalid_argument("draw_tokens: one entry per row");
  const int64_t vocab = static_cast<int64_t>(logits.shape(1));
  for (size_t i = 0; i < n; ++i)
    if (!(temperature.data()[i] > 0.0f) || top_k.data()[i] < 1 || top_k.data()[i] > vocab)
      throw std::invalid_argument("draw_tokens: temperature above 0 and top_k in 1..vocab");
  nb::gil_scoped_release released;
  parallel_for(static_cast<int64_t>(n), num_threads, [&](int64_t i) {
    const Draw draw = {logits.data() + i * vocab, vocab, temperature.data()[i], top_k.data()[i], top_p.data()[i], u.data()[i]};
    tokens.data()[i] = draw_token(draw, simd);
  });
}

}  // namespace

void bind_sample(nb::module_& m) { m.def("draw_tokens", &draw_tokens); }
