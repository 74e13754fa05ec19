// What a KV tile's arithmetic must offer, and who offers it. A tile is TILE consecutive tokens of one KV head,
// counted from the start of the seq: the same for every row, chunk and batch, so that a row's result does not
// depend on its neighbours. Files that implement `TileOps` include no standard templates: code compiled for
// AVX2 must not leak, through a shared inline function, into a process on a CPU without it.
#pragma once
#include <cstdint>

namespace baton {

// How a row of a head's keys or values is kept. i8 and f8 (e4m3): a byte per number, then the row's float32 scale.
enum class Dtype : int { f32 = 0, f16 = 1, bf16 = 2, i8 = 3, f8 = 4 };

constexpr int TILE = 32, FEW = 8;

inline bool is_scaled(Dtype dtype) { return dtype == Dtype::i8 || dtype == Dtype::f8; }
inline int64_t item_bytes(Dtype dtype) { return dtype == Dtype::f32 ? 4 : is_scaled(dtype) ? 1 : 2; }
inline int64_t row_bytes(Dtype dtype, int64_t n) { return n * item_bytes(dtype) + (is_scaled(dtype) ? 4 : 0); }

// The running softmax of `num` queries of one KV head. All arrays are the caller's scratch, float32.
struct Queries {
  const float* q;      // [num, head_dim], already multiplied by the softmax scale
  float* acc;          // [num, head_dim], sum of weights times values so far
  float* max;          // [num], largest score so far, -inf at first
  float* sum;          // [num], sum of weights so far
  const int* first;    // [num], the first of the tile's tokens that each query may see, below `visible`
  const int* visible;  // [num], where what it may see ends, 1..TILE
  int64_t num;
  float softcap;       // scores become softcap * tanh(score / softcap); 0: they stay
  bool whole;          // every query sees the whole tile; `first` and `visible` are not looked at
};

// Where a tile's tokens live in the pool: `row_bytes` each. Rows behind the last token are zeros somewhere.
struct TileRows {
  const char *keys[TILE], *values[TILE];
};

struct TileOps {
  // Writes n floats as `dtype`, rounding to nearest even. A scaled row's largest magnitude becomes the largest number
  // of the type; what is not finite goes into the scale, so that the whole row is read as NaN.
  void (*store_row)(const float* src, void* dst, int64_t n, Dtype dtype);
  // Packs TILE keys to [head_dim, TILE]. Rows behind the last token are zeros somewhere.
  void (*pack_keys)(const void* const* rows, int64_t head_dim, Dtype dtype, float* packed);
  // Widens TILE values to float32 rows [TILE, head_dim].
  void (*pack_values)(const void* const* rows, int64_t head_dim, Dtype dtype, float* packed);
  // Adds the tile to every query's running softmax. `values[t]` is a float32 row, finite where a query sees it.
  void (*attend)(const Queries& queries, const float* keys, const float* const* values, int64_t head_dim);
  // The same, to the bit, for at most FEW queries, from the rows as they are in the pool: packing is not worth it
  // then. Meanwhile the CPU is asked to fetch the next tile's rows. Null: this body has none.
  void (*attend_rows)(const Queries& queries, const TileRows& rows, const TileRows& next, int64_t head_dim, Dtype dtype);
};

extern const TileOps scalar_ops;
#ifdef BATON_AVX2
extern const TileOps avx2_ops;
bool cpu_has_avx2();
#endif

// The best body for this CPU and head dim, or the scalar one if `simd` is false.
const TileOps& tile_ops(bool simd, int64_t head_dim);

}  // namespace baton
