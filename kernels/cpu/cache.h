// One layer's view of the block-major pool, and where a token lives in it.
#pragma once
#include "tile.h"

#include <vector>

namespace baton {

struct LayerCache {  // [num_blocks, num_kv_heads, 2, block_size] rows of head_dim numbers; strides in bytes
  char* base;
  Dtype dtype;
  int64_t num_blocks, num_kv_heads, block_size, head_dim;
  int64_t block_stride, head_stride, kv_stride, token_stride;

  char* row(int64_t slot, int64_t kv_head, int kv) const {
    return base + (slot / block_size) * block_stride + kv_head * head_stride + kv * kv_stride +
           (slot % block_size) * token_stride;
  }
  int64_t num_slots() const { return num_blocks * block_size; }
};

struct StoreArgs {
  const float *k, *v;            // [num_tokens, num_kv_heads, head_dim], heads contiguous
  int64_t k_stride, v_stride;    // floats between tokens
  const int32_t* slot_mapping;   // [num_tokens], -1 pads
  int64_t num_tokens;
};

struct AttentionArgs {
  const float* q;                // [num_rows, num_heads, head_dim], heads contiguous
  float* out;                    // the same
  int64_t q_stride, out_stride;  // floats between rows
  int64_t num_heads, num_seqs;
  const int32_t* block_tables;   // [num_seqs, max_blocks]
  int64_t max_blocks;
  const int32_t* query_start;    // [num_seqs + 1], first row of each seq
  const int32_t* context_lens;   // [num_seqs], tokens of each seq, its rows included
  float scale;
  int64_t window;                // a row sees the last `window` tokens, itself included; 0: all
  float softcap;                 // see Queries
};

void store_kv(const StoreArgs& args, const LayerCache& cache, const TileOps& ops);
// A piece of attention: some rows of one seq and one KV head.
struct AttentionItem {
  int64_t seq, kv_head, first_row, num_rows, first_position;
};

// Checks the tables against the pool and cuts the step into items; the same for all layers.
// Throws std::out_of_range.
std::vector<AttentionItem> plan_attention(const AttentionArgs& args, const LayerCache& cache);
void run_attention(const AttentionArgs& args, const LayerCache& cache, const TileOps& ops,
                   const std::vector<AttentionItem>& items, int num_threads);

void check_slots(const int32_t* slot_mapping, int64_t num_tokens, const LayerCache& cache);  // throws the same

}  // namespace baton
