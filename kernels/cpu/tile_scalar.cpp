// The tile's arithmetic in plain C++: for any CPU and any head dim. Same order of operations as the AVX2 body
// where that is cheap, but not the same bits (no promise of FMA here).
#include "half.h"
#include "tile.h"

#include <math.h>

namespace baton {
namespace {

float scale_of(const void* row, int64_t n, Dtype dtype) {
  float scale = 1.0f;
  if (is_scaled(dtype)) std::memcpy(&scale, static_cast<const char*>(row) + n, 4);
  return scale;
}

void widen(const void* src, int64_t n, Dtype dtype, float scale, float* dst) {
  const uint16_t* half = static_cast<const uint16_t*>(src);
  const uint8_t* byte = static_cast<const uint8_t*>(src);
  const int8_t* signed_byte = static_cast<const int8_t*>(src);
  switch (dtype) {
    case Dtype::f32: std::memcpy(dst, src, static_cast<size_t>(n) * 4); break;
    case Dtype::f16: for (int64_t i = 0; i < n; ++i) dst[i] = from_f16(half[i]); break;
    case Dtype::bf16: for (int64_t i = 0; i < n; ++i) dst[i] = from_bf16(half[i]); break;
    case Dtype::i8: for (int64_t i = 0; i < n; ++i) dst[i] = static_cast<float>(signed_byte[i]) * scale; break;
    case Dtype::f8: for (int64_t i = 0; i < n; ++i) dst[i] = from_f8(byte[i]) * scale; break;
  }
}

void store_scaled(const float* src, uint8_t* dst, int64_t n, Dtype dtype) {
  float most = 0.0f;
  for (int64_t i = 0; i < n; ++i) {
    const float size = fabsf(src[i]);
    if (size > most || size != size) most = size;  // NaN stays
  }
  const RowScale by = row_scale(most, dtype == Dtype::i8 ? I8_TOP : F8_TOP);
  for (int64_t i = 0; i < n; ++i) {
    const float x = by.inverse == 0.0f ? 0.0f : src[i] * by.inverse;
    dst[i] = dtype == Dtype::i8 ? static_cast<uint8_t>(static_cast<int8_t>(nearbyintf(x))) : to_f8(x);
  }
  std::memcpy(dst + n, &by.scale, 4);
}

void store_row(const float* src, void* dst, int64_t n, Dtype dtype) {
  uint16_t* half = static_cast<uint16_t*>(dst);
  switch (dtype) {
    case Dtype::f32: std::memcpy(dst, src, static_cast<size_t>(n) * 4); break;
    case Dtype::f16: for (int64_t i = 0; i < n; ++i) half[i] = to_f16(src[i]); break;
    case Dtype::bf16: for (int64_t i = 0; i < n; ++i) half[i] = to_bf16(src[i]); break;
    default: store_scaled(src, static_cast<uint8_t*>(dst), n, dtype);
  }
}

void pack_keys(const void* const* rows, int64_t head_dim, Dtype dtype, float* packed) {
  constexpr int64_t PART = 64;
  float wide[PART];
  for (int t = 0; t < TILE; ++t) {
    const char* row = static_cast<const char*>(rows[t]);
    const float scale = scale_of(row, head_dim, dtype);
    for (int64_t first = 0; first < head_dim; first += PART) {
      const int64_t count = head_dim - first < PART ? head_dim - first : PART;
      widen(row + first * item_bytes(dtype), count, dtype, scale, wide);
      for (int64_t i = 0; i < count; ++i) packed[(first + i) * TILE + t] = wide[i];
    }
  }
}

void pack_values(const void* const* rows, int64_t head_dim, Dtype dtype, float* packed) {
  for (int t = 0; t < TILE; ++t)
    widen(rows[t], head_dim, dtype, scale_of(rows[t], head_dim, dtype), packed + t * head_dim);
}

void attend(const Queries& qs, const float* keys, const float* const* values, int64_t head_dim) {
  for (int64_t n = 0; n < qs.num; ++n) {
    const float* q = qs.q + n * head_dim;
    float* acc = qs.acc + n * head_dim;
    const int first = qs.whole ? 0 : qs.first[n], visible = qs.whole ? TILE : qs.visible[n];
    float score[TILE] = {0};
    for (int64_t i = 0; i < head_dim; ++i)
      for (int t = 0; t < TILE; ++t) score[t] += q[i] * keys[i * TILE + t];
    if (qs.softcap > 0.0f)
      for (int t = 0; t < TILE; ++t) score[t] = qs.softcap * tanhf(score[t] / qs.softcap);
    float top = qs.max[n];
    for (int t = first; t < visible; ++t) top = score[t] > top ? score[t] : top;
    const float keep = isinf(qs.max[n]) ? 0.0f : expf(qs.max[n] - top);
    float sum = qs.sum[n] * keep;
    for (int64_t i = 0; i < head_dim; ++i) acc[i] *= keep;
    for (int t = first; t < visible; ++t) {
      const float weight = expf(score[t] - top);
      sum += weight;
      for (int64_t i = 0; i < head_dim; ++i) acc[i] += weight * values[t][i];
    }
    qs.max[n] = top;
    qs.sum[n] = sum;
  }
}

}  // namespace

const TileOps scalar_ops = {store_row, pack_keys, pack_values, attend, nullptr};

}  // namespace baton
