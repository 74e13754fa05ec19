// Conversions between float32 and the 16- and 8-bit formats, by bits, for compilers without a half type.
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

// e4m3: 4 bits of exponent (bias 7), 3 of mantissa, no infinity (Micikevicius et al. 2022). |x| is at most 448.
static inline uint8_t to_f8(float x) {
  const uint32_t u = float_bits(x), sign = (u >> 24) & 0x80u, mag = u & 0x7fffffffu;
  if (mag < 0x3c800000u)  // below 2^-6: adding 2^14 aligns the mantissa to units of 2^-9
    return static_cast<uint8_t>(sign | (float_bits(bits_float(mag) + 16384.0f) - 0x46800000u));
  return static_cast<uint8_t>(sign | (((mag + 0x7ffffu + ((mag >> 20) & 1u)) >> 20) - 960u));
}

// Its bits, moved, are those of a float16 that is 2^8 times smaller.
static inline float from_f8(uint8_t f) {
  return 256.0f * from_f16(static_cast<uint16_t>((f & 0x80u) << 8 | (f & 0x7fu) << 7));
}

// What a scaled row's numbers are multiplied by before they are rounded, and what its reader multiplies them by.
// `most` is the row's largest magnitude, `top` the type's largest number. Rows too near 0 are kept as 0.
struct RowScale {
  float inverse, scale;
};
static inline RowScale row_scale(float most, float top) {
  if (most <= 1e-30f) return {0.0f, 0.0f};
  if (!(most <= 3.4028235e38f)) return {0.0f, most};
  return {top / most, most / top};
}
constexpr float I8_TOP = 127.0f, F8_TOP = 448.0f;

}  // namespace baton
