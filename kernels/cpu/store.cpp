#include "cache.h"

#include <stdexcept>
#include <string>

namespace baton {

void check_slots(const int32_t* slot_mapping, int64_t num_tokens, const LayerCache& cache) {
  for (int64_t t = 0; t < num_tokens; ++t) {
    const int64_t slot = slot_mapping[t];
    if (slot >= cache.num_slots())
      throw std::out_of_range("store_kv: slot " + std::to_string(slot) + " is outside the pool");
  }
}

void store_kv(const StoreArgs& args, const LayerCache& cache, const TileOps& ops) {
  for (int64_t t = 0; t < args.num_tokens; ++t) {
    const int64_t slot = args.slot_mapping[t];
    if (slot < 0) continue;
    for (int64_t head = 0; head < cache.num_kv_heads; ++head) {
      const int64_t offset = head * cache.head_dim;
      ops.store_row(args.k + t * args.k_stride + offset, cache.row(slot, head, 0), cache.head_dim, cache.dtype);
      ops.store_row(args.v + t * args.v_stride + offset, cache.row(slot, head, 1), cache.head_dim, cache.dtype);
    }
  }
}

}  // namespace baton
