// Row-wise ops for Python (tests and benchmarks; a model's step calls the same functions from decoder.cpp). What is done
// `passes` times over, each time shared among the threads anew, outlasts the call from Python.
#include "linear.h"
#include "module.h"
#include "threads.h"

#include <nanobind/stl/optional.h>
#include <stdexcept>
#include <string>

namespace {

using namespace baton;
using ByteRows = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

template <typename A, typename B>
bool same_shape(const A& a, const B& b) {
  return a.shape(0) == b.shape(0) && a.shape(1) == b.shape(1);
}

template <typename Body>
void repeat(int passes, int64_t num_rows, int num_threads, const Body& body) {
  nb::gil_scoped_release released;
  for (int pass = 0; pass < passes; ++pass) each_row(num_rows, num_threads, body);
}

void py_rms_norm(const Rows& x, const Floats& weight, float eps, const OutRows& out, int passes, int num_threads,
                 bool simd) {
  const int64_t num_rows = static_cast<int64_t>(x.shape(0)), n = static_cast<int64_t>(x.shape(1));
  require(same_shape(x, out) && weight.size() == x.shape(1), "rms_norm: shapes do not fit");
  const RowOps& ops = row_ops(simd);
  repeat(passes, num_rows, num_threads,
         [&](int64_t r) { ops.rms_norm(x.data() + r * n, weight.data(), n, eps, out.data() + r * n); });
}

void py_gate_mul(const Rows& gate, const Rows& up, bool gelu, const OutRows& out, int passes, int num_threads, bool simd) {
  const int64_t num_rows = static_cast<int64_t>(gate.shape(0)), n = static_cast<int64_t>(gate.shape(1));
  require(same_shape(gate, up) && same_shape(gate, out), "gate_mul: shapes do not fit");
  const auto op = gelu ? row_ops(simd).gelu_mul : row_ops(simd).silu_mul;
  repeat(passes, num_rows, num_threads,
         [&](int64_t r) { op(gate.data() + r * n, up.data() + r * n, n, out.data() + r * n); });
}

// x [num_rows, num_heads * head_dim], changed; cos, sin [num_rows, head_dim / 2].
void py_rope(const OutRows& x, const Rows& cos, const Rows& sin, int passes, int num_threads, bool simd) {
  const int64_t num_rows = static_cast<int64_t>(x.shape(0)), n = static_cast<int64_t>(x.shape(1));
  const int64_t half = static_cast<int64_t>(cos.shape(1));
  require(same_shape(cos, sin) && cos.shape(0) == x.shape(0) && half > 0 && n % (2 * half) == 0,
          "rope: shapes do not fit");
  const RowOps& ops = row_ops(simd);
  repeat(passes, num_rows, num_threads, [&](int64_t r) {
    for (int64_t at = 0; at < n; at += 2 * half)
      ops.rope(cos.data() + r * half, sin.data() + r * half, half, x.data() + r * n + at);
  });
}

void py_prepare_rows(int format, const Rows& x, const std::optional<Floats>& norm, float eps, const ByteRows& out,
                     int passes, int num_threads, bool simd) {
  require(format >= 0 && format <= 2, "prepare_rows: no such format");
  const Format kind = static_cast<Format>(format);
  const int64_t num_rows = static_cast<int64_t>(x.shape(0)), n = static_cast<int64_t>(x.shape(1));
  require(out.shape(0) == x.shape(0) && static_cast<int64_t>(out.shape(1)) == prepared_bytes(kind, n) &&
              (!norm || norm->size() == x.shape(1)),
          "prepare_rows: shapes do not fit");
  nb::gil_scoped_release released;
  for (int pass = 0; pass < passes; ++pass)
    prepare_rows({kind, x.data(), n, norm ? norm->data() : nullptr, eps, num_rows, nullptr, out.data()},
                 linear_ops(simd), row_ops(simd), num_threads);
}

// One pass for each row of `ids` [num_passes, num_rows]; `out` [num_rows, num_inputs] has the last one's rows.
void py_read_rows(const Matrix& w, const IntRows& ids, const OutRows& out, int num_threads) {
  const int64_t passes = static_cast<int64_t>(ids.shape(0)), num_rows = static_cast<int64_t>(ids.shape(1));
  require(out.shape(0) == ids.shape(1) && static_cast<int64_t>(out.shape(1)) == w.num_inputs,
          "read_rows: shapes do not fit");
  for (int64_t i = 0; i < passes * num_rows; ++i)
    if (ids.data()[i] < 0 || ids.data()[i] >= w.num_outputs)
      throw std::out_of_range("read_rows: no row " + std::to_string(ids.data()[i]));
  nb::gil_scoped_release released;
  for (int64_t pass = 0; pass < passes; ++pass)
    each_row(num_rows, num_threads,
             [&](int64_t r) { read_row(w, ids.data()[pass * num_rows + r], out.data() + r * w.num_inputs); });
}

}  // namespace

void bind_rows(nb::module_& m) {
  m.def("rms_norm", &py_rms_norm);
  m.def("gate_mul", &py_gate_mul);
  m.def("rope", &py_rope);
  m.def("prepare_rows", &py_prepare_rows, nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(),
        nb::arg(), nb::arg());
  m.def("read_rows", &py_read_rows);
}
