// The linear layers in plain C++: for any CPU. Same numbers as the AVX2 body up to the rounding of its FMA.
#include "half.h"
#include "linear.h"

#include <math.h>

namespace baton {
namespace {

float half_at(const uint8_t* p, int64_t i) {
  uint16_t bits;
  std::memcpy(&bits, p + 2 * i, 2);
  return from_f16(bits);
}

// Where weight (output o of the block, input i of the group) lies in a tile.
int64_t q8_at(int64_t o, int64_t i) { return 256 * (o / 8) + 16 * (i / 2) + 2 * (o % 8) + i % 2; }
int64_t q4_at(int64_t o, int64_t i) { return 32 * (i / 4) + 4 * (o % 8) + i % 4; }

int q4_value(const uint8_t* tile, int64_t o, int64_t i) {
  const uint8_t both = tile[q4_at(o, i)];
  return o < 8 ? both & 15 : both >> 4;
}

float dot_q4(const uint8_t* w, int64_t o, int64_t groups, const uint8_t* x) {
  float sum = 0.0f;
  for (int64_t g = 0; g < groups; ++g, w += 320) {
    const Group8* a = reinterpret_cast<const Group8*>(x) + g;
    int dot = 0;
    for (int64_t i = 0; i < GROUP; ++i) dot += q4_value(w, o, i) * a->q[i];
    sum += static_cast<float>(dot) * (half_at(w + 256, o) * a->scale);
    sum += half_at(w + 288, o) * a->sum;
  }
  return sum;
}

float dot_q8(const uint8_t* w, int64_t o, int64_t groups, const uint8_t* x) {
  float sum = 0.0f;
  for (int64_t g = 0; g < groups; ++g, w += 544) {
    const Group16* a = reinterpret_cast<const Group16*>(x) + g;
    int dot = 0;
    for (int64_t i = 0; i < GROUP; ++i) dot += static_cast<int8_t>(w[q8_at(o, i)]) * a->q[i];
    sum += static_cast<float>(dot) * (half_at(w + 512, o) * a->scale);
  }
  return sum;
}

float dot_f32(const uint8_t* w, int64_t o, int64_t num_inputs, const uint8_t* x) {
  const float *weights = reinterpret_cast<const float*>(w) + o, *inputs = reinterpret_cast<const float*>(x);
  float sum = 0.0f;
  for (int64_t k = 0; k < num_inputs; ++k) sum += inputs[k] * weights[k * OUTS];
  return sum;
}

void multiply_block(const Matrix& w, int64_t block, const uint8_t* x, int64_t row_bytes, int64_t num_rows, float* out,
                    int64_t out_stride) {
  const uint8_t* data = w.block(block);
  for (int64_t r = 0; r < num_rows; ++r, x += row_bytes, out += out_stride)
    for (int64_t o = 0; o < OUTS; ++o) switch (w.format) {
        case Format::q4: out[o] = dot_q4(data, o, w.num_groups(), x); break;
        case Format::q8: out[o] = dot_q8(data, o, w.num_groups(), x); break;
        case Format::f32: out[o] = dot_f32(data, o, w.num_inputs, x); break;
      }
}

void prepare(Format format, const float* x, int64_t n, void* dst) {
  if (format == Format::f32) {
    std::memcpy(dst, x, static_cast<size_t>(n) * 4);
    return;
  }
  for (int64_t g = 0; g * GROUP < n; ++g) {
    const int64_t first = g * GROUP, count = n - first < GROUP ? n - first : GROUP;
    float most = 0.0f;
    for (int64_t i = 0; i < count; ++i) {
      const float size = fabsf(x[first + i]);
      if (size > most || size != size) most = size;  // NaN stays
    }
    const bool finite = most <= 3.4028235e38f;
    const float scale = most / 127.0f, inverse = finite && most > 0.0f ? 127.0f / most : 0.0f;
    int total = 0, q[GROUP] = {0};
    for (int64_t i = 0; finite && i < count; ++i)
      total += q[i] = static_cast<int>(nearbyintf(x[first + i] * inverse));
    const float sum = scale * static_cast<float>(total);
    if (format == Format::q8) {
      Group16* group = static_cast<Group16*>(dst) + g;
      group->scale = scale, group->sum = sum;
      for (int64_t i = 0; i < GROUP; ++i) group->q[i] = static_cast<int16_t>(q[i]);
    } else {
      Group8* group = static_cast<Group8*>(dst) + g;
      group->scale = scale, group->sum = sum;
      for (int64_t i = 0; i < GROUP; ++i) group->q[i] = static_cast<int8_t>(q[i]);
    }
  }
}

void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
  float sum = 0.0f;
  for (int64_t i = 0; i < n; ++i) sum += x[i] * x[i];
  const float scale = 1.0f / sqrtf(sum / static_cast<float>(n) + eps);
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

void add(const float* x, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] += x[i];
}

void silu_mul(const float* gate, const float* up, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

// GELU by tanh (Hendrycks and Gimpel 2016): g/2 (1 + tanh u) = g / (1 + e^-2u), u = sqrt(2/pi) (g + 0.044715 g^3).
void gelu_mul(const float* gate, const float* up, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) {
    const float g = gate[i], u = 0.7978845608f * (g + 0.044715f * g * g * g);
    out[i] = g / (1.0f + expf(-2.0f * u)) * up[i];
  }
}

void softcap(float cap, int64_t n, float* x) {
  for (int64_t i = 0; i < n; ++i) x[i] = cap * tanhf(x[i] / cap);
}

void rope(const float* cos, const float* sin, int64_t half, float* x) {
  for (int64_t i = 0; i < half; ++i) {
    const float first = x[i], second = x[i + half];
    x[i] = first * cos[i] - second * sin[i];
    x[i + half] = second * cos[i] + first * sin[i];
  }
}

}  // namespace

void read_row(const Matrix& w, int64_t row, float* out) {
  const uint8_t* data = w.block(row / OUTS);
  const int64_t o = row % OUTS;
  for (int64_t k = 0; k < w.num_inputs; ++k) {
    const int64_t g = k / GROUP, i = k % GROUP;
    switch (w.format) {
      case Format::f32: out[k] = reinterpret_cast<const float*>(data)[k * OUTS + o]; break;
      case Format::q8: {
        const uint8_t* tile = data + g * 544;
        out[k] = static_cast<float>(static_cast<int8_t>(tile[q8_at(o, i)])) * half_at(tile + 512, o);
        break;
      }
      case Format::q4: {
        const uint8_t* tile = data + g * 320;
        out[k] = static_cast<float>(q4_value(tile, o, i)) * half_at(tile + 256, o) + half_at(tile + 288, o);
        break;
      }
    }
  }
}

const LinearOps scalar_linear = {prepare, multiply_block};
const RowOps scalar_rows = {rms_norm, add, silu_mul, gelu_mul, softcap, rope};

}  // namespace baton
