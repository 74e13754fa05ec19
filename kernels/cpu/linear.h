// Linear layers on packed weights: out[m, n] = sum over k of x[m, k] * w[n, k].
//
// A matrix is packed once into blocks of OUTS outputs; a block is contiguous and is read from front to back, group
// of 32 inputs after group. Activations are prepared once per row (`prepare`), row by row, in the form that the
// weights' format wants, so that nothing depends on the other rows. Every out element is one chain of operations
// over k in ascending order, the same in every kernel shape: a row has the same bits alone and in any batch.
#pragma once
#include <cstdint>

namespace baton {

constexpr int64_t OUTS = 16, GROUP = 32;

// Packed block, per group of 32 inputs (float32: per input):
//   f32  16 floats, one per output
//   q8   512 int8 [half 2][step 16][output 8][input 2], 16 half-precision scales
//   q4   256 bytes [step 8][output 8][input 4]: low 4 bits outputs 0-7, high 4 bits outputs 8-15;
//        16 half-precision scales, 16 half-precision minima: w = scale * q + minimum
enum class Format : int { f32 = 0, q8 = 1, q4 = 2 };

struct Matrix {
  Format format;
  int64_t num_outputs, num_inputs;
  const uint8_t* data;  // aligned to 64

  int64_t num_blocks() const { return (num_outputs + OUTS - 1) / OUTS; }
  int64_t num_groups() const { return (num_inputs + GROUP - 1) / GROUP; }
  int64_t block_bytes() const {
    switch (format) {
      case Format::q8: return num_groups() * (OUTS * GROUP + 2 * OUTS);
      case Format::q4: return num_groups() * (OUTS * GROUP / 2 + 4 * OUTS);
      default: return num_inputs * OUTS * 4;
    }
  }
  const uint8_t* block(int64_t i) const { return data + i * block_bytes(); }
};

// A row's group, quantised on its own: x ~ scale * q, q in -127..127; `sum` is scale * (sum of q).
struct Group8 {
  float scale, sum;
  int8_t q[GROUP];
};
struct Group16 {  // the same numbers, for 8-bit weights, whose products need 16-bit operands
  float scale, sum;
  int16_t q[GROUP];
};

inline int64_t prepared_bytes(Format format, int64_t num_inputs) {
  const int64_t groups = (num_inputs + GROUP - 1) / GROUP;
  switch (format) {
    case Format::q8: return groups * static_cast<int64_t>(sizeof(Group16));
    case Format::q4: return groups * static_cast<int64_t>(sizeof(Group8));
    default: return num_inputs * 4;
  }
}

struct LinearOps {
  // One row of n floats to `prepared_bytes` at dst. Inputs behind n count as zeros.
  void (*prepare)(Format format, const float* x, int64_t n, void* dst);
  // One block: out[r * out_stride + 0..15] for r < num_rows; rows of x are `row_bytes` apart.
  void (*multiply)(const Matrix& w, int64_t block, const uint8_t* x, int64_t row_bytes, int64_t num_rows, float* out,
                   int64_t out_stride);
};

// What bodies of `multiply` share. `static`: each file gets its own copy, compiled for its own processor (tile.h says why).
using RowsTile = void (*)(const Matrix& w, int64_t block, const uint8_t* x, int64_t row_bytes, float* out,
                          int64_t out_stride);

// A block for all rows; tiles[r] takes r at once. Rows in equal shares: 16 as 6 + 5 + 5, not 6 + 6 + 4.
template <int64_t N>
static inline void multiply_in_shares(const RowsTile (&tiles)[N], const Matrix& w, int64_t block, const uint8_t* x,
                                      int64_t row_bytes, int64_t num_rows, float* out, int64_t out_stride) {
  constexpr int64_t MOST = N - 1;
  for (int64_t left = (num_rows + MOST - 1) / MOST; left > 0; --left) {
    const int64_t take = (num_rows + left - 1) / left;
    tiles[take](w, block, x, row_bytes, out, out_stride);
    x += take * row_bytes;
    out += take * out_stride;
    num_rows -= take;
  }
}

static inline void prefetch(const uint8_t* p, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(p + line);
}

// Row-wise float ops; n is the row's length.
struct RowOps {
  void (*rms_norm)(const float* x, const float* weight, int64_t n, float eps, float* out);
  void (*add)(const float* x, int64_t n, float* out);                          // out += x
  void (*silu_mul)(const float* gate, const float* up, int64_t n, float* out);  // out = silu(gate) * up
  void (*gelu_mul)(const float* gate, const float* up, int64_t n, float* out);  // the same with GELU's tanh form
  void (*softcap)(float cap, int64_t n, float* x);                              // x = cap * tanh(x / cap), in place
  void (*rope)(const float* cos, const float* sin, int64_t half, float* x);     // pairs (i, i + half), in place
};

extern const LinearOps scalar_linear;
extern const RowOps scalar_rows;
#ifdef BATON_AVX2
extern const LinearOps avx2_linear;
extern const RowOps avx2_rows;
#endif
#ifdef BATON_AVX512
void avx512_multiply(const Matrix& w, int64_t block, const uint8_t* x, int64_t row_bytes, int64_t num_rows, float* out,
                     int64_t out_stride);
#endif

const LinearOps& linear_ops(bool simd);
const char* linear_body();  // which one `linear_ops(true)` is: avx512, avx2 or scalar
const RowOps& row_ops(bool simd);

// Row `row` of the matrix, widened to float32 (embedding lookup).
void read_row(const Matrix& w, int64_t row, float* out);

struct Preparation {
  Format format;
  const float* x;         // [.., width]
  int64_t width;
  const float* norm;      // RMS norm's weights, or null: rows are taken as they are
  float eps;
  int64_t num_rows;
  const int32_t* picked;  // which rows of x, or null: the first ones
  uint8_t* out;           // `prepared_bytes` a row
};

void prepare_rows(const Preparation& what, const LinearOps& linear, const RowOps& rows, int num_threads);

// What happens to a product: it replaces out, or is added to it; or its blocks are pairs of gate (2 b) and up
// (2 b + 1), of which silu(gate) * up, or gelu(gate) * up, becomes columns 16 b .. 16 b + 15.
enum class Finish : int { store = 0, add = 1, silu_mul = 2, gelu_mul = 3 };

inline bool is_gated(Finish finish) { return finish == Finish::silu_mul || finish == Finish::gelu_mul; }

struct Product {
  const Matrix& w;
  const uint8_t* x;  // prepared rows, `prepared_bytes` apart
  int64_t num_rows;
  float* out;        // [num_rows, out_stride], of which `width` columns are written
  int64_t width, out_stride;
  Finish finish;
};

void multiply(const Product& product, const LinearOps& linear, const RowOps& rows, int num_threads);

}  // namespace baton
