// The decoder for Python. Weights stay the caller's: kernels/decoder.py keeps them alive.
#include "decoder.h"
#include "module.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>

namespace {

using namespace baton;

void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

using MaybeFloats = std::optional<Floats>;

const float* data_or_null(const MaybeFloats& values, int64_t size, const char* what) {
  if (!values) return nullptr;
  require(static_cast<int64_t>(values->size()) == size, what);
  return values->data();
}

void new_decoder(Decoder* self, const DecoderShape& shape, const Rows& frequencies, const Floats& rope_scales,
                 const Matrix& embed, const Matrix& head, const Floats& norm) {
  require(static_cast<int64_t>(frequencies.shape(1)) * 2 == shape.head_dim, "Decoder: one frequency per pair of a head");
  require(rope_scales.size() == frequencies.shape(0), "Decoder: one scale per RoPE");
  require(embed.num_outputs == shape.vocab && embed.num_inputs == shape.hidden, "Decoder: embedding is [vocab, hidden]");
  require(head.num_outputs == shape.vocab && head.num_inputs == shape.hidden, "Decoder: head is [vocab, hidden]");
  require(static_cast<int64_t>(norm.size()) == shape.hidden, "Decoder: norm is [hidden]");
  std::vector<Rope> ropes;
  for (size_t i = 0; i < frequencies.shape(0); ++i) {
    const float* first = frequencies.data() + i * frequencies.shape(1);
    ropes.push_back({{first, first + frequencies.shape(1)}, rope_scales.data()[i]});
  }
  new (self) Decoder(shape, std::move(ropes), embed, head, norm.data());
}

void new_shape(DecoderShape* self, int64_t hidden, int64_t intermediate, int64_t num_heads, int64_t num_kv_heads,
               int64_t head_dim, int64_t vocab, float rms_eps, float embed_scale, float attention_scale,
               float attention_softcap, float logit_softcap, bool gelu) {
  require(num_kv_heads > 0 && num_heads % num_kv_heads == 0, "Decoder: heads are a multiple of KV heads");
  new (self) DecoderShape{hidden,      intermediate,    num_heads,         num_kv_heads,  head_dim, vocab, rms_eps,
                          embed_scale, attention_scale, attention_softcap, logit_softcap,
                          gelu ? Finish::gelu_mul : Finish::silu_mul};
}

void add_layer(Decoder& self, const Floats& attn_norm, const std::vector<std::pair<int64_t, Matrix>>& qkv,
               const Matrix& o, const Floats& mlp_norm, const Matrix& gate_up, const Matrix& down,
               const MaybeFloats& qkv_bias, const MaybeFloats& q_norm, const MaybeFloats& k_norm,
               const MaybeFloats& attn_post_norm, const MaybeFloats& mlp_post_norm, int64_t window, int64_t rope) {
  const DecoderShape& s = self.shape();
  DecoderLayer layer = {attn_norm.data(), mlp_norm.data(), {}, o, gate_up, down, nullptr, nullptr, nullptr, nullptr,
                        nullptr, window, rope};
  layer.qkv_bias = data_or_null(qkv_bias, s.qkv_width(), "Decoder: the bias is as wide as the projections");
  layer.q_norm = data_or_null(q_norm, s.head_dim, "Decoder: norms of heads are [head_dim]");
  layer.k_norm = data_or_null(k_norm, s.head_dim, "Decoder: norms of heads are [head_dim]");
  layer.attn_post_norm = data_or_null(attn_post_norm, s.hidden, "Decoder: norms are [hidden]");
  layer.mlp_post_norm = data_or_null(mlp_post_norm, s.hidden, "Decoder: norms are [hidden]");
  int64_t column = 0;
  for (const auto& [first, w] : qkv) {
    require(first == column && w.num_inputs == s.hidden, "Decoder: projections are [columns, hidden], in order");
    layer.qkv.push_back({w, first});
    column += w.num_outputs;
  }
  require(column == s.qkv_width(), "Decoder: projections do not fill a row");
  require(static_cast<int64_t>(attn_norm.size()) == s.hidden && static_cast<int64_t>(mlp_norm.size()) == s.hidden,
          "Decoder: norms are [hidden]");
  require(o.num_outputs == s.hidden && o.num_inputs == s.attention_width(), "Decoder: o is [hidden, heads * head_dim]");
  require(down.num_outputs == s.hidden && down.num_inputs == s.intermediate, "Decoder: down is [hidden, intermediate]");
  require(gate_up.num_inputs == s.hidden && gate_up.num_blocks() == 2 * ((s.intermediate + OUTS - 1) / OUTS),
          "Decoder: gate_up has two blocks for every 16 columns");
  require(window >= 0 && rope >= -1 && rope < self.num_ropes(), "Decoder: no such window or RoPE");
  self.add_layer(std::move(layer));
}

void forward(Decoder& self, const LayerCache& cache, int64_t layer_stride, const Ints& token_ids, const Ints& positions,
             const Ints& slot_mapping, const IntRows& block_tables, const Ints& query_start, const Ints& context_lens,
             const Ints& logit_rows, const OutRows& logits, int num_threads, bool simd) {
  const DecoderShape& s = self.shape();
  const size_t rows = token_ids.size(), seqs = context_lens.size();
  require(positions.size() == rows && slot_mapping.size() == rows, "forward: one position and slot per row");
  require(block_tables.shape(0) == seqs && query_start.size() == seqs + 1, "forward: one table and start per seq");
  require(query_start.data()[0] == 0 && query_start.data()[seqs] == static_cast<int64_t>(rows),
          "forward: query_start runs from 0 to the number of rows");
  require(logits.shape(0) == logit_rows.size() && static_cast<int64_t>(logits.shape(1)) == s.vocab,
          "forward: logits is [num_logits, vocab]");
  require(cache.head_dim == s.head_dim && cache.num_kv_heads == s.num_kv_heads, "forward: the pool has other heads");
  Step step = {};
  step.num_rows = static_cast<int64_t>(rows);
  step.token_ids = token_ids.data(), step.positions = positions.data(), step.slot_mapping = slot_mapping.data();
  step.attention.num_heads = s.num_heads, step.attention.num_seqs = static_cast<int64_t>(seqs);
  step.attention.block_tables = block_tables.data();
  step.attention.max_blocks = static_cast<int64_t>(block_tables.shape(1));
  step.attention.query_start = query_start.data(), step.attention.context_lens = context_lens.data();
  step.logit_rows = logit_rows.data(), step.num_logits = static_cast<int64_t>(logit_rows.size());
  step.logits = logits.data();
  nb::gil_scoped_release released;
  self.forward(step, cache, layer_stride * item_bytes(cache.dtype), num_threads, simd);
}

}  // namespace

void bind_decoder(nb::module_& m) {
  nb::class_<DecoderShape>(m, "DecoderShape", "Sizes and constants of a model.").def("__init__", &new_shape);
  nb::class_<Decoder>(m, "Decoder", "Weights and scratch of a model; see kernels/decoder.py.")
      .def("__init__", &new_decoder)
      .def("add_layer", &add_layer, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg(),
           nb::arg())
      .def("forward", &forward);
}
