// HiF8 codes: sign, a prefix of 2 to 4 bits that tells how many exponent bits follow, exponent as
// sign and magnitude, and the mantissa in what is left. Tables for encoding and decoding.
//
// Rounding is half away from zero at the mantissa width of the value's own exponent, so a code
// depends on no more than sign, exponent and the first 4 bits of a float's mantissa.
#pragma once

#include "common/numerics/codec.h"

namespace apex_te {

constexpr int kHif8Shift = 19;                        // of a float's bits, gives the index
constexpr int kHif8Entries = 1 << (32 - kHif8Shift);  // 8192

// Code without sign of (1 + mantissa / 2^width) * 2^exponent, exponent in [-15, 15].
constexpr uint32_t hif8_code(int exponent, uint32_t mantissa) {
  const uint32_t e = static_cast<uint32_t>(exponent < 0 ? -exponent : exponent);
  const uint32_t negative = exponent < 0 ? 1 : 0;
  if (e == 0) return 0x08 + mantissa;
  if (e == 1) return 0x10 + (negative << 3) + mantissa;
  if (e < 4) return 0x20 + (negative << 4) + ((e - 2) << 3) + mantissa;
  if (e < 8) return 0x40 + (negative << 4) + ((e - 4) << 2) + mantissa;
  return 0x60 + (negative << 4) + ((e - 8) << 1) + mantissa;
}

// Mantissa bits at an exponent: 3, 2 or 1.
constexpr int hif8_mantissa_bits(int exponent) {
  const int e = exponent < 0 ? -exponent : exponent;
  return e < 4 ? 3 : e < 8 ? 2 : 1;
}

// index: a float's bits >> kHif8Shift. A NaN whose first mantissa bits are zero would look like an
// infinity; arithmetic gives none.
constexpr uint8_t hif8_encode(uint32_t index, bool saturate) {
  const uint32_t sign = index >> 12 << 7;
  int exponent = static_cast<int>(index >> 4 & 0xFF) - 127;
  uint32_t mantissa = index & 0xF;  // in 1/16
  if (exponent == 128 && mantissa != 0) return 0x80;
  if (exponent > 15 || (exponent == 15 && mantissa >= 4))
    return static_cast<uint8_t>(sign | (saturate ? 0x6E : 0x6F));
  if (exponent < -23) return 0;
  if (exponent == -23) return static_cast<uint8_t>(sign | 0x01);
  if (exponent <= -16) {  // powers of two only
    exponent += mantissa >= 8 ? 1 : 0;
    const uint32_t code =
        exponent == -15 ? hif8_code(-15, 0) : static_cast<uint32_t>(exponent + 23);
    return static_cast<uint8_t>(sign | code);
  }
  const int dropped = 4 - hif8_mantissa_bits(exponent);
  mantissa = (mantissa + (1u << (dropped - 1))) >> dropped;
  if (mantissa >> (4 - dropped)) {
    mantissa = 0;
    exponent += 1;
  }
  return static_cast<uint8_t>(sign | hif8_code(exponent, mantissa));
}

// Bits of a code's value as a float, exact.
constexpr uint32_t hif8_decode_bits(uint32_t code) {
  const uint32_t sign = code >> 7 << 31, p = code & 0x7F;
  if (code == 0x80) return 0x7FC00000u;
  if (p == 0) return 0;
  if (p == 0x6F) return sign | 0x7F800000u;
  if (p < 0x08) return sign | (p + 127 - 23) << 23;
  for (int exponent = -15; exponent <= 15; ++exponent) {
    const int bits = hif8_mantissa_bits(exponent);
    const uint32_t mantissa = p - hif8_code(exponent, 0);
    if (p >= hif8_code(exponent, 0) && mantissa >> bits == 0)
      return sign | static_cast<uint32_t>(exponent + 127) << 23 | mantissa << (23 - bits);
  }
  return 0x7FC00000u;
}

struct Hif8EncodeTable {
  uint8_t codes[kHif8Entries];
};
constexpr Hif8EncodeTable hif8_encode_table(bool saturate) {
  Hif8EncodeTable table = {};
  for (uint32_t i = 0; i < kHif8Entries; ++i) table.codes[i] = hif8_encode(i, saturate);
  return table;
}

struct Hif8DecodeTable {
  uint32_t bits[256];
};
constexpr Hif8DecodeTable hif8_decode_table() {
  Hif8DecodeTable table = {};
  for (uint32_t i = 0; i < 256; ++i) table.bits[i] = hif8_decode_bits(i);
  return table;
}

}  // namespace apex_te
