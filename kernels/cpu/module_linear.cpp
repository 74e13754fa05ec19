// Linear layers for Python: a packed matrix, and its product with float rows (tests and benchmarks; a model's
// step calls the same functions from decoder.cpp).
#include "linear.h"
#include "module.h"

#include <stdexcept>
#include <vector>

namespace {

using namespace baton;

Matrix make_matrix(int format, int64_t num_outputs, int64_t num_inputs, const Bytes& data) {
  if (format < 0 || format > 2 || num_outputs <= 0 || num_inputs <= 0)
    throw std::invalid_argument("Matrix: no such format or size");
  const Matrix m = {static_cast<Format>(format), num_outputs, num_inputs, data.data()};
  if (static_cast<int64_t>(data.size()) != m.num_blocks() * m.block_bytes())
    throw std::invalid_argument("Matrix: the packed data has another size");
  return m;
}

void py_linear(const Matrix& w, const Rows& x, const OutRows& out, int finish, int num_threads, bool simd) {
  const int64_t num_rows = static_cast<int64_t>(x.shape(0)), row_bytes = prepared_bytes(w.format, w.num_inputs);
  const Finish kind = static_cast<Finish>(finish);
  const int64_t width = is_gated(kind) ? (w.num_outputs + 1) / 2 : w.num_outputs;
  if (static_cast<int64_t>(x.shape(1)) != w.num_inputs || out.shape(0) != x.shape(0) ||
      static_cast<int64_t>(out.shape(1)) > width || finish < 0 || finish > 3)
    throw std::invalid_argument("linear: shapes do not fit");
  nb::gil_scoped_release released;
  const LinearOps& ops = linear_ops(simd);
  std::vector<uint8_t> prepared(static_cast<size_t>(num_rows * row_bytes));
  prepare_rows({w.format, x.data(), w.num_inputs, nullptr, 0.0f, num_rows, nullptr, prepared.data()}, ops, row_ops(simd),
               num_threads);
  multiply({w, prepared.data(), num_rows, out.data(), static_cast<int64_t>(out.shape(1)),
            static_cast<int64_t>(out.shape(1)), kind}, ops, row_ops(simd), num_threads);
}

}  // namespace

void bind_linear(nb::module_& m) {
  nb::class_<Matrix>(m, "Matrix", "Packed weights. Keeps the array that it was made from.")
      .def("__init__",
           [](Matrix* self, int format, int64_t num_outputs, int64_t num_inputs, const Bytes& data) {
             new (self) Matrix(make_matrix(format, num_outputs, num_inputs, data));
           },
           nb::keep_alive<1, 5>());
  m.def("linear", &py_linear);
}
