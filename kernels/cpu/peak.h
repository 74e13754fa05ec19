#pragma once
#include <cstdint>

namespace baton {

struct PeakLoop {
  void (*run)(int64_t iterations);
  int64_t ops;  // multiplications and additions of one iteration
};

struct PeakOps {
  PeakLoop fma, dot8, dot16;  // float32; 8-bit products summed in 16 bits; 16-bit products summed in 32
  void (*read)(const uint8_t* data, int64_t num_bytes);
};

extern const PeakOps avx2_peaks;

}  // namespace baton
