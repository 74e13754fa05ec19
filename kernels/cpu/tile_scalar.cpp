// The tile's arithmetic in plain C++: for any CPU and any head dim. Same order of operations as the AVX2 body
// where that is cheap, but not the same bits (no promise of FMA here).
#include "half.h"
#include "tile.h"

#include <math.h>

namespace baton {
namespace {

void widen(const void* src, int64_t n, Dtype dtype, float* dst) {
  const uint16_t* half = static_cast<const uint16_t*>(src);
  switch (dtype) {
    case Dtype::f32: std::memcpy(dst, src, static_cast<size_t>(n) * 4); break;
    case Dtype::f16: for (int64_t i = 0; i < n; ++i) dst[i] = from_f16(half[i]); break;
    case Dtype::bf16: for (int64_t i = 0; i < n; ++i) dst[i] = from_bf16(half[i]); break;
  }
}

void store_row(const float* src, void* dst, int64_t n, Dtype dtype) {
  uint16_t* half = static_cast<uint16_t*>(dst);
  switch (dtype) {
    case Dtype::f32: std::memcpy(dst, src, static_cast<size_t>(n) * 4); break;
    case Dtype::f16: for (int64_t i = 0; i < n; ++i) half[i] = to_f16(src[i]); break;
    case Dtype::bf16: for (int64_t i = 0; i < n; ++i) half[i] = to_bf16(src[i]); break;
  }
}

float at(const void* row, int64_t i, Dtype dtype) {
  switch (dtype) {
    case Dtype::f16: return from_f16(static_cast<const uint16_t*>(row)[i]);
    case Dtype::bf16: return from_bf16(static_cast<const uint16_t*>(row)[i]);
    default: return static_cast<const float*>(row)[i];
  }
}

void pack_keys(const void* const* rows, int64_t head_dim, Dtype dtype, float* packed) {
  for (int t = 0; t < TILE; ++t)
    for (int64_t i = 0; i < head_dim; ++i) packed[i * TILE + t] = at(rows[t], i, dtype);
}

void pack_values(const void* const* rows, int64_t head_dim, Dtype dtype, float* packed) {
  for (int t = 0; t < TILE; ++t) widen(rows[t], head_dim, dtype, packed + t * head_dim);
}

void attend(const Queries& qs, const float* keys, const float* const* values, int64_t head_dim) {
  for (int64_t n = 0; n < qs.num; ++n) {
    const float* q = qs.q + n * head_dim;
    float* acc = qs.acc + n * head_dim;
    const int visible = qs.visible[n];
    float score[TILE] = {0};
    for (int64_t i = 0; i < head_dim; ++i)
      for (int t = 0; t < TILE; ++t) score[t] += q[i] * keys[i * TILE + t];
    float top = qs.max[n];
    for (int t = 0; t < visible; ++t) top = score[t] > top ? score[t] : top;
    const float keep = isinf(qs.max[n]) ? 0.0f : expf(qs.max[n] - top);
    float sum = qs.sum[n] * keep;
    for (int64_t i = 0; i < head_dim; ++i) acc[i] *= keep;
    for (int t = 0; t < visible; ++t) {
      const float weight = expf(score[t] - top);
      sum += weight;
      for (int64_t i = 0; i < head_dim; ++i) acc[i] += weight * values[t][i];
    }
    qs.max[n] = top;
    qs.sum[n] = sum;
  }
}

}  // namespace

const TileOps scalar_ops = {store_row, pack_keys, pack_values, attend};

}  // namespace baton
