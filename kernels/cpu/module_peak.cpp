// Ceilings for Python, for benchmarks. Each returns what it has done; the caller holds the watch.
#include "module.h"
#include "peak.h"
#include "threads.h"
#include "tile.h"

#include <stdexcept>

namespace {

using namespace baton;

// Operations done by `num_threads` threads, 0 where this CPU has no measured loop.
int64_t peak_ops(int kind, int64_t iterations, int num_threads) {
#ifdef BATON_AVX2
  if (cpu_has_avx2()) {
    const PeakLoop loops[] = {avx2_peaks.fma, avx2_peaks.dot8, avx2_peaks.dot16};
    if (kind < 0 || kind > 2) return 0;
    parallel_for(num_threads, num_threads, [&](int64_t) { loops[kind].run(iterations); });
    return num_threads * iterations * loops[kind].ops;
  }
#endif
  (void)kind, (void)iterations, (void)num_threads;
  return 0;
}

// Bytes read by `num_threads` threads: data in pieces of so many bytes, each of them read `passes` times over.
int64_t peak_read(const Bytes& data, int64_t piece_bytes, int64_t passes, int num_threads) {
  if (piece_bytes < 1) throw std::invalid_argument("peak_read: a piece has bytes");
#ifdef BATON_AVX2
  if (cpu_has_avx2()) {
    const int64_t pieces = static_cast<int64_t>(data.size()) / piece_bytes;
    const uint8_t* first = data.data();
    parallel_for(pieces, num_threads, [&](int64_t i) {
      for (int64_t pass = 0; pass < passes; ++pass) avx2_peaks.read(first + i * piece_bytes, piece_bytes);
    });
    return pieces * piece_bytes * passes;
  }
#endif
  (void)data, (void)passes, (void)num_threads;
  return 0;
}

}  // namespace

void bind_peak(nb::module_& m) {
  m.def("peak_ops", &peak_ops, nb::call_guard<nb::gil_scoped_release>());
  m.def("peak_read", &peak_read, nb::call_guard<nb::gil_scoped_release>());
}
