// Paged attention with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022), rows of many seqs in
// one call. A work item is up to ROWS rows of one seq and one KV head; it walks the seq's KV tiles from
// position 0 on, always in this order, so neither chunking nor neighbours nor threads change a row's bits.
#include "cache.h"
#include "threads.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

namespace baton {

const TileOps& tile_ops(bool simd, int64_t head_dim) {
#ifdef BATON_AVX2
  if (simd && head_dim % 8 == 0 && cpu_has_avx2()) return avx2_ops;
#endif
  (void)simd, (void)head_dim;
  return scalar_ops;
}

#ifdef BATON_AVX2
bool cpu_has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          __builtin_cpu_supports("f16c");
  return has;
}
#endif

namespace {

constexpr int64_t ROWS = 32;

using Item = AttentionItem;

struct Scratch {
  std::vector<float> q, acc, max, sum, keys, values, zeros;
  std::vector<int> first, visible;

  void fit(int64_t num_queries, int64_t head_dim) {
    q.resize(num_queries * head_dim);
    acc.assign(num_queries * head_dim, 0.0f);
    max.assign(num_queries, -INFINITY);
    sum.assign(num_queries, 0.0f);
    first.resize(num_queries);
    visible.resize(num_queries);
    keys.resize(TILE * head_dim);
    values.resize(TILE * head_dim);
    zeros.resize(head_dim + 1);  // stands for the rows behind a seq's last token, in any dtype
  }
};

void check_tables(const AttentionArgs& args, const LayerCache& cache) {
  for (int64_t s = 0; s < args.num_seqs; ++s) {
    const int64_t rows = args.query_start[s + 1] - args.query_start[s], context = args.context_lens[s];
    const int64_t blocks = (context + cache.block_size - 1) / cache.block_size;
    if (rows < 0 || rows > context || blocks > args.max_blocks)
      throw std::out_of_range("paged_attention: seq " + std::to_string(s) + " has no such rows or blocks");
    for (int64_t b = 0; b < blocks; ++b) {
      const int32_t block = args.block_tables[s * args.max_blocks + b];
      if (block < 0 || block >= cache.num_blocks)
        throw std::out_of_range("paged_attention: block " + std::to_string(block) + " is outside the pool");
    }
  }
}

std::vector<Item> split(const AttentionArgs& args, int64_t num_kv_heads) {
  std::vector<Item> items;
  for (int64_t s = 0; s < args.num_seqs; ++s) {
    const int64_t start = args.query_start[s], end = args.query_start[s + 1];
    const int64_t shift = args.context_lens[s] - end;  // position of a row = its index + shift
    for (int64_t row = start; row < end; row += ROWS)
      for (int64_t head = 0; head < num_kv_heads; ++head)
        items.push_back({s, head, row, std::min(ROWS, end - row), row + shift});
  }
  return items;
}

// Finds the rows of tokens first .. first + TILE - 1.
void find_rows(const AttentionArgs& args, const LayerCache& cache, const Item& item, int64_t first, const Scratch& s,
               TileRows& rows) {
  const int32_t* table = args.block_tables + item.seq * args.max_blocks;
  const int64_t end = std::min<int64_t>(TILE, item.first_position + item.num_rows - first);
  int64_t t = 0;
  while (t < end) {
    const int64_t block = (first + t) / cache.block_size, offset = (first + t) % cache.block_size;
    const char* key = cache.row(table[block] * cache.block_size + offset, item.kv_head, 0);
    for (const int64_t last = std::min(end, t + cache.block_size - offset); t < last; ++t) {
      rows.keys[t] = key, rows.values[t] = key + cache.kv_stride;
      key += cache.token_stride;
    }
  }
  for (; t < TILE; ++t) rows.keys[t] = rows.values[t] = reinterpret_cast<const char*>(s.zeros.data());
}

// Asks the CPU to fetch half a tile's keys or values: a block's run is too short for the hardware to see it coming,
// and asking for a whole tile at once would wait for the CPU's few fill buffers.
void fetch(const char* const* rows, int64_t row_bytes) {
  for (int64_t t = 0; t < TILE / 2; ++t)
    for (int64_t byte = 0; byte < row_bytes; byte += 64) __builtin_prefetch(rows[t] + byte);
}

// The queries of an item that see any of the tile from `first_token` on; mutates first and visible of the scratch.
Queries queries_of(const AttentionArgs& args, const LayerCache& cache, const Item& item, int64_t first_token,
                   Scratch& s) {
  const int64_t group = args.num_heads / cache.num_kv_heads;
  // Rows before the tile see none of it, nor do rows whose window begins behind it.
  const int64_t skip = std::max<int64_t>(0, first_token - item.first_position);
  int64_t end = item.num_rows;
  if (args.window > 0) end = std::min(end, first_token + TILE + args.window - 1 - item.first_position);
  const bool whole = args.window == 0 && first_token + TILE <= item.first_position + 1;
  for (int64_t row = skip; !whole && row < end; ++row) {
    const int64_t position = item.first_position + row;
    const int64_t oldest = args.window > 0 ? position - args.window + 1 : 0;
    const int64_t at = (row - skip) * group;
    std::fill_n(&s.first[at], group, static_cast<int>(std::max<int64_t>(0, oldest - first_token)));
    std::fill_n(&s.visible[at], group, static_cast<int>(std::min<int64_t>(TILE, position - first_token + 1)));
  }
  const int64_t at = skip * group;
  return {&s.q[at * cache.head_dim], &s.acc[at * cache.head_dim], &s.max[at], &s.sum[at],
          s.first.data(), s.visible.data(), (end - skip) * group, args.softcap, whole};
}

// Packs the tile, then lets all queries see it.
void attend_packed(const Queries& queries, const LayerCache& cache, const TileOps& ops, const TileRows& rows,
                   const TileRows& next, Scratch& s) {
  const int64_t head_dim = cache.head_dim, bytes = row_bytes(cache.dtype, head_dim);
  const auto untyped = [](const char* const* p) { return reinterpret_cast<const void* const*>(p); };
  fetch(next.keys, bytes);
  ops.pack_keys(untyped(rows.keys), head_dim, cache.dtype, s.keys.data());
  fetch(next.keys + TILE / 2, bytes);
  const float* value_rows[TILE];
  if (cache.dtype != Dtype::f32) ops.pack_values(untyped(rows.values), head_dim, cache.dtype, s.values.data());
  for (int64_t t = 0; t < TILE; ++t)
    value_rows[t] = cache.dtype == Dtype::f32 ? reinterpret_cast<const float*>(rows.values[t]) : &s.values[t * head_dim];
  fetch(next.values, bytes);
  ops.attend(queries, s.keys.data(), value_rows, head_dim);
  fetch(next.values + TILE / 2, bytes);
}

void run_item(const AttentionArgs& args, const LayerCache& cache, const TileOps& ops, const Item& item) {
  static thread_local Scratch s;
  const int64_t group = args.num_heads / cache.num_kv_heads, head_dim = cache.head_dim;
  const int64_t width = group * head_dim, offset = item.kv_head * width;
  s.fit(item.num_rows * group, head_dim);
  for (int64_t r = 0; r < item.num_rows; ++r) {
    const float* q = args.q + (item.first_row + r) * args.q_stride + offset;
    for (int64_t i = 0; i < width; ++i) s.q[r * width + i] = q[i] * args.scale;
  }
  TileRows rows[2];  // this tile's and the next one's, in turns
  // Tiles are counted from the start of the seq, wherever the window begins.
  const int64_t first = args.window > 0 ? std::max<int64_t>(0, item.first_position - args.window + 1) / TILE * TILE : 0;
  find_rows(args, cache, item, first, s, rows[first / TILE % 2]);
  for (int64_t token = first; token < item.first_position + item.num_rows; token += TILE) {
    const int64_t now = token / TILE % 2;
    find_rows(args, cache, item, token + TILE, s, rows[1 - now]);
    const Queries queries = queries_of(args, cache, item, token, s);
    if (ops.attend_rows && queries.num <= FEW)
      ops.attend_rows(queries, rows[now], rows[1 - now], head_dim, cache.dtype);
    else
      attend_packed(queries, cache, ops, rows[now], rows[1 - now], s);
  }
  for (int64_t r = 0; r < item.num_rows; ++r) {
    float* out = args.out + (item.first_row + r) * args.out_stride + offset;
    for (int64_t g = 0; g < group; ++g) {
      const float sum = s.sum[r * group + g], *acc = &s.acc[(r * group + g) * head_dim];
      for (int64_t i = 0; i < head_dim; ++i) out[g * head_dim + i] = acc[i] / sum;
    }
  }
}

}  // namespace

std::vector<Item> plan_attention(const AttentionArgs& args, const LayerCache& cache) {
  check_tables(args, cache);
  return split(args, cache.num_kv_heads);
}

void run_attention(const AttentionArgs& args, const LayerCache& cache, const TileOps& ops,
                   const std::vector<Item>& items, int num_threads) {
  parallel_for(static_cast<int64_t>(items.size()), num_threads,
               [&](int64_t i) { run_item(args, cache, ops, items[i]); });
}

}  // namespace baton
