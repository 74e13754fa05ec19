// Conversions between float32 and the 16-bit formats, by bits, for compilers without a half type.
// `static`: each file gets its own copy, see tile.h.
#pragma once
#include <cstdint>
#include <cstring>

namespace baton {

static inline uint32_t float_bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}

static inline float bits_float(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

static inline uint16_t to_bf16(float x) {
  const uint32_t u = float_bits(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);  // NaN stays NaN
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

static inline float from_bf16(uint16_t h) { return bits_float(static_cast<uint32_t>(h) << 16); }

static inline uint16_t to_f16(float x) {
  const uint32_t u = float_bits(x);
  const uint32_t sign = (u >> 16) & 0x8000u, mag = u & 0x7fffffffu;
  if (mag > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((mag >> 13) & 0x1ffu));  // NaN
  if (mag >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to infinity
  if (mag < 0x38800000u) {
    // Subnormal: adding 0.5 aligns the mantissa to units of 2^-24, and the FPU rounds to nearest even.
    const float aligned = bits_float(mag) + 0.5f;
    return static_cast<uint16_t>(sign | (float_bits(aligned) - 0x3f000000u));
  }
  const uint32_t rounded = mag + 0xfffu + ((mag >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

static inline float from_f16(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, exp = (h >> 10) & 0x1fu, frac = h & 0x3ffu;
  if (exp == 0x1fu) return bits_float(sign | 0x7f800000u | (frac << 13));
  if (exp == 0) {
    const float mag = static_cast<float>(frac) * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -mag : mag;
  }
  return bits_float(sign | ((exp + 112u) << 23) | (frac << 13));
}

}  // namespace baton
