// A whole forward pass of a decoder in one call: RMS norms before (and, for some, behind) attention and a gated MLP,
// RoPE, grouped heads, sliding windows.
#pragma once
#include "cache.h"
#include "linear.h"

#include <mutex>
#include <new>
#include <vector>

namespace baton {

// Memory that begins with a cache line, so that the outputs of two threads never meet in one.
template <typename T>
struct LineAllocator {
  using value_type = T;
  static constexpr std::align_val_t LINE{64};

  LineAllocator() = default;
  template <typename U>
  LineAllocator(const LineAllocator<U>&) {}
  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), LINE)); }
  void deallocate(T* p, size_t) { ::operator delete(p, LINE); }
  friend bool operator==(const LineAllocator&, const LineAllocator&) { return true; }
  friend bool operator!=(const LineAllocator&, const LineAllocator&) { return false; }
};
template <typename T>
using Lines = std::vector<T, LineAllocator<T>>;

struct Rope {
  std::vector<float> inverse_frequencies;  // [head_dim / 2]
  float scale;                             // of cosines and sines
};

struct DecoderShape {
  int64_t hidden, intermediate, num_heads, num_kv_heads, head_dim, vocab;
  float rms_eps, embed_scale, attention_scale;
  float attention_softcap, logit_softcap;  // x becomes cap * tanh(x / cap); 0: it stays
  Finish gate;                             // what becomes of gate and up: silu_mul or gelu_mul

  int64_t qkv_width() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
  int64_t attention_width() const { return num_heads * head_dim; }
};

struct Projection {  // some columns of the joint query, key and value row
  Matrix w;
  int64_t first_column;
};

struct DecoderLayer {
  const float *attn_norm, *mlp_norm;            // [hidden]
  std::vector<Projection> qkv;
  Matrix o, gate_up, down;                      // gate_up: blocks of gate and up in turns
  const float* qkv_bias;                        // [qkv_width]; this and the following may be null
  const float *q_norm, *k_norm;                 // [head_dim], of each head, before RoPE
  const float *attn_post_norm, *mlp_post_norm;  // [hidden], of what is added to the residual
  int64_t window;                               // see AttentionArgs
  int64_t rope;                                 // which of the model's; -1: none
};

struct Step {
  int64_t num_rows;
  const int32_t *token_ids, *positions, *slot_mapping;  // [num_rows]
  AttentionArgs attention;                              // q and out are filled in
  const int32_t* logit_rows;                            // [num_logits]
  int64_t num_logits;
  float* logits;                                        // [num_logits, vocab]
};

class Decoder {
 public:
  Decoder(const DecoderShape& shape, std::vector<Rope> ropes, const Matrix& embed, const Matrix& head,
          const float* norm);

  void add_layer(DecoderLayer layer) { layers_.push_back(std::move(layer)); }
  const DecoderShape& shape() const { return shape_; }
  int64_t num_ropes() const { return static_cast<int64_t>(ropes_.size()); }

  // Writes the KV of all rows to the pool, then the wanted logits. `cache` is layer 0's view, further layers
  // lie `layer_stride` bytes apart. One call at a time. Throws std::out_of_range before anything is written.
  void forward(const Step& step, const LayerCache& cache, int64_t layer_stride, int num_threads, bool simd);

 private:
  struct Run;  // one call's view of everything

  void fit(int64_t num_rows);

  const DecoderShape shape_;
  const std::vector<Rope> ropes_;
  const Matrix embed_, head_;
  const float* const norm_;
  std::vector<DecoderLayer> layers_;

  std::mutex one_call_;
  // Scratch, grown to the largest step so far.
  Lines<float> x_, qkv_, attended_, gated_, branch_;
  Lines<float> cos_, sin_;  // [num_ropes, num_rows, head_dim / 2]
  Lines<uint8_t> prepared_;
};

}  // namespace baton
