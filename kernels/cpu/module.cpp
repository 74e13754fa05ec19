// The Python side. Tensors come as addresses with strides: kernels/ops.py has checked them, and no tensor
// library's headers are needed. The GIL is released while a kernel runs.
#include "cache.h"
#include "linear.h"
#include "module.h"

using namespace baton;

namespace {

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

LayerCache make_cache(uintptr_t base, int dtype, int64_t num_blocks, int64_t num_kv_heads, int64_t block_size,
                      int64_t head_dim, int64_t block_stride, int64_t head_stride, int64_t kv_stride,
                      int64_t token_stride) {
  const Dtype kind = static_cast<Dtype>(dtype);
  const int64_t size = item_bytes(kind);
  return {pointer<char>(base), kind,         num_blocks,         num_kv_heads,       block_size,
          head_dim,            block_stride * size, head_stride * size, kv_stride * size, token_stride * size};
}

void py_store_kv(const LayerCache& cache, uintptr_t k, uintptr_t v, int64_t k_stride, int64_t v_stride,
                 uintptr_t slot_mapping, int64_t num_tokens, bool simd) {
  check_slots(pointer<int32_t>(slot_mapping), num_tokens, cache);
  store_kv({pointer<float>(k), pointer<float>(v), k_stride, v_stride, pointer<int32_t>(slot_mapping), num_tokens},
           cache, tile_ops(simd, cache.head_dim));
}

void py_paged_attention(const LayerCache& cache, uintptr_t out, uintptr_t q, int64_t out_stride, int64_t q_stride,
                        int64_t num_heads, uintptr_t block_tables, int64_t num_seqs, int64_t max_blocks,
                        uintptr_t query_start, uintptr_t context_lens, float scale, int64_t window, float softcap,
                        int num_threads, bool simd) {
  AttentionArgs args = {};
  args.q = pointer<float>(q), args.out = pointer<float>(out);
  args.q_stride = q_stride, args.out_stride = out_stride;
  args.num_heads = num_heads, args.num_seqs = num_seqs, args.max_blocks = max_blocks;
  args.block_tables = pointer<int32_t>(block_tables), args.query_start = pointer<int32_t>(query_start);
  args.context_lens = pointer<int32_t>(context_lens), args.scale = scale;
  args.window = window, args.softcap = softcap;
  run_attention(args, cache, tile_ops(simd, cache.head_dim), plan_attention(args, cache), num_threads);
}

const char* simd_name() { return &tile_ops(true, 8) == &scalar_ops ? "scalar" : "avx2"; }

}  // namespace

NB_MODULE(_kernels, m) {
  using release = nb::call_guard<nb::gil_scoped_release>;
  m.attr("TILE") = TILE;
  m.def("linear_body", &linear_body, "What runs the linear layers on this CPU: avx512, avx2 or scalar.");
  m.def("simd_name", &simd_name, "Instruction set that the kernels use on this CPU: avx2 or scalar.");
  nb::class_<LayerCache>(m, "LayerCache", "One layer's view of the pool; strides in elements. Does not own it.")
      .def("__init__", [](LayerCache* self, uintptr_t base, int dtype, int64_t num_blocks, int64_t num_kv_heads,
                          int64_t block_size, int64_t head_dim, int64_t block_stride, int64_t head_stride,
                          int64_t kv_stride, int64_t token_stride) {
        new (self) LayerCache(make_cache(base, dtype, num_blocks, num_kv_heads, block_size, head_dim, block_stride,
                                         head_stride, kv_stride, token_stride));
      });
  m.def("store_kv", &py_store_kv, release());
  m.def("paged_attention", &py_paged_attention, release());
  bind_linear(m);
  bind_decoder(m);
  bind_peak(m);
  bind_rows(m);
  bind_sample(m);
}
