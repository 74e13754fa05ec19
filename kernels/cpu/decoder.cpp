#include "decoder.h"
#include "threads.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace baton {
namespace {

void check_ids(const Step& step, int64_t vocab) {
  for (int64_t r = 0; r < step.num_rows; ++r)
    if (step.token_ids[r] < 0 || step.token_ids[r] >= vocab)
      throw std::out_of_range("forward: token " + std::to_string(step.token_ids[r]) + " is not in the vocabulary");
  for (int64_t i = 0; i < step.num_logits; ++i)
    if (step.logit_rows[i] < 0 || step.logit_rows[i] >= step.num_rows)
      throw std::out_of_range("forward: no row " + std::to_string(step.logit_rows[i]));
}

}  // namespace

struct Decoder::Run {
  Decoder& d;
  const Step& step;
  const LinearOps& linear;
  const RowOps& rows;
  const TileOps& tiles;
  int num_threads;

  template <typename Body>
  void each_row(int64_t num_rows, const Body& body) const {
    baton::each_row(num_rows, num_threads, body);
  }

  void embed() const {
    const DecoderShape& s = d.shape_;
    const int64_t half = s.head_dim / 2;
    each_row(step.num_rows, [&](int64_t r) {
      float* x = &d.x_[r * s.hidden];
      read_row(d.embed_, step.token_ids[r], x);
      if (s.embed_scale != 1.0f)
        for (int64_t i = 0; i < s.hidden; ++i) x[i] *= s.embed_scale;
      for (int64_t which = 0; which < d.num_ropes(); ++which) {
        const Rope& rope = d.ropes_[which];
        const int64_t at = angles(which, r);
        for (int64_t i = 0; i < half; ++i) {
          const float angle = static_cast<float>(step.positions[r]) * rope.inverse_frequencies[i];
          d.cos_[at + i] = std::cos(angle) * rope.scale;
          d.sin_[at + i] = std::sin(angle) * rope.scale;
        }
      }
    });
  }

  // Where a row's cosines and sines begin.
  int64_t angles(int64_t rope, int64_t row) const { return (rope * step.num_rows + row) * (d.shape_.head_dim / 2); }

  // Prepares rows of x for matrices of this format, normalised if `norm` is given.
  void prepare(Format format, const float* x, int64_t width, const float* norm, int64_t num_rows,
               const int32_t* picked = nullptr) const {
    prepare_rows({format, x, width, norm, d.shape_.rms_eps, num_rows, picked, d.prepared_.data()}, linear, rows,
                 num_threads);
  }

  void product(const Matrix& w, int64_t num_rows, float* out, int64_t width, int64_t stride, Finish finish) const {
    multiply({w, d.prepared_.data(), num_rows, out, width, stride, finish}, linear, rows, num_threads);
  }

  void project(const DecoderLayer& layer) const {
    const DecoderShape& s = d.shape_;
    const int64_t width = s.qkv_width();
    for (size_t i = 0; i < layer.qkv.size(); ++i) {
      const Projection& part = layer.qkv[i];
      if (i == 0 || part.w.format != layer.qkv[i - 1].w.format)
        prepare(part.w.format, d.x_.data(), s.hidden, layer.attn_norm, step.num_rows);
      product(part.w, step.num_rows, &d.qkv_[part.first_column], part.w.num_outputs, width, Finish::store);
    }
  }

  // Finishes queries, keys and values: bias, norms of heads, rotation; and puts keys and values into the pool.
  void rotate_and_store(const DecoderLayer& layer, const LayerCache& cache) const {
    const DecoderShape& s = d.shape_;
    const int64_t half = s.head_dim / 2, keys = s.attention_width(), values = keys + s.num_kv_heads * s.head_dim;
    each_row(step.num_rows, [&](int64_t r) {
      float* row = &d.qkv_[r * s.qkv_width()];
      if (layer.qkv_bias) rows.add(layer.qkv_bias, s.qkv_width(), row);
      for (int64_t h = 0; h < s.num_heads + s.num_kv_heads; ++h) {
        float* head = row + h * s.head_dim;
        const float* norm = h < s.num_heads ? layer.q_norm : layer.k_norm;
        if (norm) rows.rms_norm(head, norm, s.head_dim, s.rms_eps, head);
        if (layer.rope >= 0) rows.rope(&d.cos_[angles(layer.rope, r)], &d.sin_[angles(layer.rope, r)], half, head);
      }
      store_kv({row + keys, row + values, 0, 0, step.slot_mapping + r, 1}, cache, tiles);
    });
  }

  void attend(const DecoderLayer& layer, const LayerCache& cache, const std::vector<AttentionItem>& items) const {
    const DecoderShape& s = d.shape_;
    AttentionArgs args = step.attention;
    args.q = d.qkv_.data(), args.out = d.attended_.data();
    args.q_stride = s.qkv_width(), args.out_stride = s.attention_width();
    args.num_heads = s.num_heads;
    args.scale = s.attention_scale, args.softcap = s.attention_softcap, args.window = layer.window;
    run_attention(args, cache, tiles, items, num_threads);
  }

  // Adds the product of the prepared rows to the residual, normalised first where the model has such a norm.
  void add_branch(const Matrix& w, const float* post_norm) const {
    const DecoderShape& s = d.shape_;
    if (!post_norm) return product(w, step.num_rows, d.x_.data(), s.hidden, s.hidden, Finish::add);
    product(w, step.num_rows, d.branch_.data(), s.hidden, s.hidden, Finish::store);
    each_row(step.num_rows, [&](int64_t r) {
      float* branch = &d.branch_[r * s.hidden];
      rows.rms_norm(branch, post_norm, s.hidden, s.rms_eps, branch);
      rows.add(branch, s.hidden, &d.x_[r * s.hidden]);
    });
  }

  void layer(const DecoderLayer& layer, const LayerCache& cache, const std::vector<AttentionItem>& items) const {
    const DecoderShape& s = d.shape_;
    const int64_t n = step.num_rows;
    project(layer);
    rotate_and_store(layer, cache);
    attend(layer, cache, items);
    prepare(layer.o.format, d.attended_.data(), s.attention_width(), nullptr, n);
    add_branch(layer.o, layer.attn_post_norm);
    prepare(layer.gate_up.format, d.x_.data(), s.hidden, layer.mlp_norm, n);
    product(layer.gate_up, n, d.gated_.data(), s.intermediate, s.intermediate, s.gate);
    prepare(layer.down.format, d.gated_.data(), s.intermediate, nullptr, n);
    add_branch(layer.down, layer.mlp_post_norm);
  }

  void logits() const {
    const DecoderShape& s = d.shape_;
    prepare(d.head_.format, d.x_.data(), s.hidden, d.norm_, step.num_logits, step.logit_rows);
    product(d.head_, step.num_logits, step.logits, s.vocab, s.vocab, Finish::store);
    if (s.logit_softcap > 0.0f)
      each_row(step.num_logits, [&](int64_t r) { rows.softcap(s.logit_softcap, s.vocab, step.logits + r * s.vocab); });
  }
};

Decoder::Decoder(const DecoderShape& shape, std::vector<Rope> ropes, const Matrix& embed, const Matrix& head,
                 const float* norm)
    : shape_(shape), ropes_(std::move(ropes)), embed_(embed), head_(head), norm_(norm) {}

void Decoder::fit(int64_t num_rows) {
  const int64_t widest = std::max({shape_.hidden, shape_.intermediate, shape_.attention_width()});
  const size_t n = static_cast<size_t>(num_rows);
  if (x_.size() >= n * shape_.hidden) return;
  x_.resize(n * shape_.hidden);
  qkv_.resize(n * shape_.qkv_width());
  attended_.resize(n * shape_.attention_width());
  gated_.resize(n * shape_.intermediate);
  cos_.resize(n * ropes_.size() * (shape_.head_dim / 2));
  sin_.resize(cos_.size());
  const auto has_post_norm = [](const DecoderLayer& layer) { return layer.attn_post_norm || layer.mlp_post_norm; };
  if (std::any_of(layers_.begin(), layers_.end(), has_post_norm)) branch_.resize(n * shape_.hidden);
  prepared_.resize(n * std::max({prepared_bytes(Format::f32, widest), prepared_bytes(Format::q8, widest)}));
}

void Decoder::forward(const Step& step, const LayerCache& cache, int64_t layer_stride, int num_threads, bool simd) {
  std::lock_guard<std::mutex> lock(one_call_);
  check_ids(step, shape_.vocab);
  check_slots(step.slot_mapping, step.num_rows, cache);
  const std::vector<AttentionItem> items = plan_attention(step.attention, cache);
  fit(step.num_rows);
  const Run run = {*this, step, linear_ops(simd), row_ops(simd), tile_ops(simd, cache.head_dim), num_threads};
  run.embed();
  LayerCache view = cache;
  for (const DecoderLayer& layer : layers_) {
    run.layer(layer, view, items);
    view.base += layer_stride;
  }
  if (step.num_logits > 0) run.logits();
}

}  // namespace baton
