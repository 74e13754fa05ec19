#include "linear.h"
#include "threads.h"
#include "tile.h"

#include <algorithm>
#include <vector>

namespace baton {

namespace {

bool cpu_has_avx512() {
#if defined(BATON_SIMDE)
  return cpu_has_avx2();
#elif defined(BATON_AVX512)
  static const bool has = cpu_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
  return has;
#else
  return false;
#endif
}

}  // namespace

const char* linear_body() {
  const LinearOps* ops = &linear_ops(true);
  return ops == &scalar_linear ? "scalar" : cpu_has_avx512() ? "avx512" : "avx2";
}

const LinearOps& linear_ops(bool simd) {
#ifdef BATON_AVX512
  static const LinearOps avx512 = {avx2_linear.prepare, avx512_multiply};
  if (simd && cpu_has_avx512()) return avx512;
#endif
#ifdef BATON_AVX2
  if (simd && cpu_has_avx2()) return avx2_linear;
#endif
  (void)simd;
  return scalar_linear;
}

const RowOps& row_ops(bool simd) {
#ifdef BATON_AVX2
  if (simd && cpu_has_avx2()) return avx2_rows;
#endif
  (void)simd;
  return scalar_rows;
}

namespace {

constexpr int64_t ROWS = 96;  // whose prepared activations stay in a core's second-level cache

// One block of outputs for some rows, by way of a small buffer where the product is not simply stored.
void run_item(const Product& p, const LinearOps& linear, const RowOps& rows, int64_t item, int64_t first_row,
              int64_t num_rows) {
  const int64_t row_bytes = prepared_bytes(p.w.format, p.w.num_inputs), columns = std::min(OUTS, p.width - item * OUTS);
  const uint8_t* x = p.x + first_row * row_bytes;
  float* out = p.out + first_row * p.out_stride + item * OUTS;
  if (p.finish == Finish::store && columns == OUTS)
    return linear.multiply(p.w, item, x, row_bytes, num_rows, out, p.out_stride);
  alignas(64) float first[ROWS * OUTS], second[ROWS * OUTS];
  if (is_gated(p.finish)) {
    linear.multiply(p.w, 2 * item, x, row_bytes, num_rows, first, OUTS);
    linear.multiply(p.w, 2 * item + 1, x, row_bytes, num_rows, second, OUTS);
    (p.finish == Finish::silu_mul ? rows.silu_mul : rows.gelu_mul)(first, second, num_rows * OUTS, first);
  } else {
    linear.multiply(p.w, item, x, row_bytes, num_rows, first, OUTS);
  }
  const float* from = first;
  for (int64_t r = 0; r < num_rows; ++r, from += OUTS, out += p.out_stride) {
    if (p.finish != Finish::add)
      std::copy_n(from, columns, out);
    else if (columns == OUTS)
      for (int64_t i = 0; i < OUTS; ++i) out[i] += from[i];  // of a known length: the compiler unrolls it
    else
      for (int64_t i = 0; i < columns; ++i) out[i] += from[i];
  }
}

}  // namespace

void multiply(const Product& p, const LinearOps& linear, const RowOps& rows, int num_threads) {
  const int64_t blocks = (p.width + OUTS - 1) / OUTS, panels = (p.num_rows + ROWS - 1) / ROWS;
  // Few rows make short pieces: take several blocks at once, but leave enough pieces to share them evenly.
  const int64_t batch = std::max<int64_t>(1, std::min(blocks / (8 * num_threads), 64 / std::max<int64_t>(1, p.num_rows)));
  const int64_t per_panel = (blocks + batch - 1) / batch;
  parallel_for(panels * per_panel, num_threads, [&](int64_t piece) {
    const int64_t panel = piece / per_panel, first = piece % per_panel * batch;
    const int64_t row = panel * ROWS, num_rows = std::min(ROWS, p.num_rows - row);
    for (int64_t i = first; i < std::min(first + batch, blocks); ++i) run_item(p, linear, rows, i, row, num_rows);
  });
}

void prepare_rows(const Preparation& p, const LinearOps& linear, const RowOps& rows, int num_threads) {
  const int64_t bytes = prepared_bytes(p.format, p.width);
  each_row(p.num_rows, num_threads, [&](int64_t r) {
    static thread_local std::vector<float> normed;
    const float* row = p.x + (p.picked ? p.picked[r] : r) * p.width;
    if (p.norm) {
      normed.resize(p.width);
      rows.rms_norm(row, p.norm, p.width, p.eps, normed.data());
      row = normed.data();
    }
    linear.prepare(p.format, row, p.width, p.out + r * bytes);
  });
}

}  // namespace baton
