// The decoder for Python. Weights stay the caller's: kernels/decoder.py keeps them alive.
#include "decoder.h"
#include "module.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

namespace {

using namespace baton;

void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

void new_decoder(Decoder* self, int64_t hidden, int64_t intermediate, int64_t num_heads, int64_t num_kv_heads,
                 int64_t head_dim, int64_t vocab, float rms_eps, const Floats& frequencies, const Matrix& embed,
                 const Matrix& head, const Floats& norm) {
  require(static_cast<int64_t>(frequencies.size()) * 2 == head_dim, "Decoder: one frequency per pair of a head");
  require(embed.num_outputs == vocab && embed.num_inputs == hidden, "Decoder: embedding is [vocab, hidden]");
  require(head.num_outputs == vocab && head.num_inputs == hidden, "Decoder: head is [vocab, hidden]");
  require(static_cast<int64_t>(norm.size()) == hidden, "Decoder: norm is [hidden]");
  require(num_kv_heads > 0 && num_heads % num_kv_heads == 0, "Decoder: heads are a multiple of KV heads");
  const DecoderShape shape = {hidden, intermediate, num_heads, num_kv_heads, head_dim, vocab, rms_eps};
  new (self) Decoder(shape, {frequencies.data(), frequencies.data() + frequencies.size()}, embed, head, norm.data());
}

void add_layer(Decoder& self, const Floats& attn_norm, const std::vector<std::pair<int64_t, Matrix>>& qkv,
               const Matrix& o, const Floats& mlp_norm, const Matrix& gate_up, const Matrix& down) {
  const DecoderShape& s = self.shape();
  DecoderLayer layer = {attn_norm.data(), mlp_norm.data(), {}, o, gate_up, down};
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
  nb::class_<Decoder>(m, "Decoder", "Weights and scratch of a model; see kernels/decoder.py.")
      .def("__init__", &new_decoder)
      .def("add_layer", &add_layer)
      .def("forward", &forward);
}
