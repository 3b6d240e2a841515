// CPU kernels of bias_dropout_add: tiles of 64 rows and 512 columns, one thread each.
#include <algorithm>

#include "bias_dropout_add/bias_dropout_add.h"
#include "common/cpu/column_sums.h"
#include "common/cpu/parallel.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr bool is_known_answer(Philox4 counter, uint32_t key_low, uint32_t key_high,
                               Philox4 answer) {
  const Philox4 r = philox4x32(counter, key_low, key_high);
  return r.x == answer.x && r.y == answer.y && r.z == answer.z && r.w == answer.w;
}
// The known answers that the authors publish with the generator.
static_assert(is_known_answer({0, 0, 0, 0}, 0, 0,
                              {0x6627E8D5u, 0xE169C58Du, 0xBC57AC4Cu, 0x9B00DBD8u}));
static_assert(is_known_answer({~0u, ~0u, ~0u, ~0u}, ~0u, ~0u,
                              {0x408F276Du, 0x41C83B0Eu, 0xA20BC7C6u, 0x6D5451FDu}));
static_assert(is_known_answer({0x243F6A88u, 0x85A308D3u, 0x13198A2Eu, 0x03707344u}, 0xA4093822u,
                              0x299F31D0u, {0xD16CFE09u, 0x94FDCCEBu, 0x5001E420u, 0x24126EA1u}));

constexpr int64_t kVec = 8;
constexpr int64_t kTileRows = kBiasDropoutAddTileRows;
constexpr int64_t kTileCols = 512;
constexpr int64_t kRows = kBiasDropoutAddRowsPerThread;
constexpr int64_t kAhead = 8;  // rows
// Columns of a thread's turn: two threads that are the first to write to the same page of memory
// have both to wait.
constexpr int64_t kStripCols = 8 * kTileCols;

// A byte for each of `vecs` vectors from v on: bit i is set if element i is kept. Written in steps
// of kVecsAtOnce.
constexpr int64_t kVecsAtOnce = 8;
APEX_TE_TARGET_PORTABLE void keep_bytes_portable(uint32_t threshold, uint64_t seed, int64_t row,
                                                 int64_t v, int64_t vecs, uint8_t* bytes) {
  for (int64_t i = 0; i < vecs; ++i) {
    const Philox4 r = dropout_bits(seed, row, v + i);
    const uint32_t words[4] = {r.x, r.y, r.z, r.w};
    uint32_t byte = 0;
    for (int k = 0; k < kVec; ++k)
      byte |= ((words[k / 2] >> 16 * (k % 2) & 0xFFFFu) >= threshold ? 1u : 0u) << k;
    bytes[i] = static_cast<uint8_t>(byte);
  }
}

#if defined(__x86_64__)
// A vector in each 64-bit lane: the low word of a product is taken as it lies.
APEX_TE_TARGET_AVX2 void keep_bytes_avx2(uint32_t threshold, uint64_t seed, int64_t row, int64_t v,
                                         int64_t vecs, uint8_t* bytes) {
  constexpr int kGroups = kVecsAtOnce / 4;
  const __m256i thresholds = _mm256_set1_epi16(static_cast<int16_t>(threshold));
  for (int64_t i = 0; i < vecs; i += kVecsAtOnce) {
    __m256i x[kGroups], y[kGroups], z[kGroups], w[kGroups];
    for (int g = 0; g < kGroups; ++g) {
      x[g] = _mm256_add_epi64(_mm256_set1_epi64x(v + i + 4 * g), _mm256_set_epi64x(3, 2, 1, 0));
      y[g] = _mm256_set1_epi64x(row);
      z[g] = _mm256_srli_epi64(y[g], 32);
      w[g] = _mm256_srli_epi64(x[g], 32);
    }
    __m256i key_low = _mm256_set1_epi64x(static_cast<int64_t>(seed));
    __m256i key_high = _mm256_srli_epi64(key_low, 32);
    for (int round = 0; round < 10; ++round) {
      for (int g = 0; g < kGroups; ++g) {
        const __m256i a = _mm256_mul_epu32(x[g], _mm256_set1_epi64x(kPhiloxFactorX));
        const __m256i b = _mm256_mul_epu32(z[g], _mm256_set1_epi64x(kPhiloxFactorZ));
        x[g] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(b, 32), y[g]), key_low);
        y[g] = b;
        z[g] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(a, 32), w[g]), key_high);
        w[g] = a;
      }
      key_low = _mm256_add_epi32(key_low, _mm256_set1_epi64x(kPhiloxStepLow));
      key_high = _mm256_add_epi32(key_high, _mm256_set1_epi64x(kPhiloxStepHigh));
    }
    for (int g = 0; g < kGroups; ++g) {
      const __m256i xy = _mm256_blend_epi32(x[g], _mm256_slli_epi64(y[g], 32), 0xAA);
      const __m256i zw = _mm256_blend_epi32(z[g], _mm256_slli_epi64(w[g], 32), 0xAA);
      // The 8 halves of vectors 0 and 2, of 1 and 3; a half is kept if the maximum is itself.
      __m256i even = _mm256_unpacklo_epi64(xy, zw), odd = _mm256_unpackhi_epi64(xy, zw);
      even = _mm256_cmpeq_epi16(_mm256_max_epu16(even, thresholds), even);
      odd = _mm256_cmpeq_epi16(_mm256_max_epu16(odd, thresholds), odd);
      const int four = _mm256_movemask_epi8(_mm256_packs_epi16(even, odd));
      memcpy(bytes + i + 4 * g, &four, sizeof(four));
    }
  }
}

// Factors of elements: scale where their bit is set, else 0.
APEX_TE_TARGET_AVX512 void expand_avx512(const uint8_t* bytes, int64_t vecs, float scale,
                                         float* factors) {
  for (int64_t v = 0; v < vecs; v += 2) {
    const bool both = v + 1 < vecs;
    const int kept = bytes[v] | (both ? bytes[v + 1] << 8 : 0);
    _mm512_mask_storeu_ps(factors + v * kVec, static_cast<__mmask16>(both ? 0xFFFF : 0xFF),
                          _mm512_maskz_mov_ps(static_cast<__mmask16>(kept), _mm512_set1_ps(scale)));
  }
}
#else
constexpr auto keep_bytes_avx2 = keep_bytes_portable;
#endif

// Factors of the elements for each byte of a mask.
struct Factors {
  float of_byte[256][kVec];

  explicit Factors(const Dropout& dropout) {
    for (int byte = 0; byte < 256; ++byte)
      for (int i = 0; i < kVec; ++i) of_byte[byte][i] = byte >> i & 1 ? dropout.scale : 0.0f;
  }
};

// The factors of n elements from col0 on of a row, and their bytes of the mask where one is kept.
APEX_TE_INLINE void factors_of(const BiasDropoutAdd& p, const Factors& all, int64_t row,
                               int64_t col0, int64_t n, float* factors) {
  const int64_t vecs = (n + kVec - 1) / kVec,
                mask_at = row * ((p.cols + kVec - 1) / kVec) + col0 / kVec;
  uint8_t made[kTileCols / kVec];
  const uint8_t* bytes = made;
  if (p.kept) {
    bytes = p.kept + mask_at;
  } else {
    (use_avx2() ? keep_bytes_avx2 : keep_bytes_portable)(p.dropout.threshold, p.seed(), row,
                                                         col0 / kVec, vecs, made);
    if (p.mask) memcpy(p.mask + mask_at, made, vecs);
  }
#if defined(__x86_64__)
  if (use_avx512()) return expand_avx512(bytes, vecs, p.dropout.scale, factors);
#endif
  for (int64_t v = 0; v < vecs; ++v)
    memcpy(factors + v * kVec, all.of_byte[bytes[v]], sizeof(all.of_byte[0]));
}

APEX_TE_INLINE void fwd_tile(const BiasDropoutAdd& p, const Factors& all, int64_t row0,
                             int64_t col0) {
  const int64_t rows = std::min(kTileRows, p.rows - row0);
  const int64_t n = std::min(kTileCols, p.cols - col0);
  struct Scratch {
    float bias[kTileCols], values[kTileCols], residual[kTileCols], factors[kTileCols];
  };
  Scratch& scratch = thread_scratch<Scratch>();
  float *const bias = scratch.bias, *const values = scratch.values;
  float *const residual = scratch.residual, *const factors = scratch.factors;
  const RowDType dtype(p.dtype), wide(p.wide);
  if (p.bias) RowDType(p.bias_dtype).widen(p.bias, col0, n, bias);
  std::fill_n(factors, n, p.dropout.scale);
  for (int64_t r = row0; r < row0 + rows; ++r) {
    const int64_t at = r * p.cols + col0;
    if (p.dropout.is_random) factors_of(p, all, r, col0, n, factors);
    dtype.widen(p.x, at, n, values);
    wide.widen(p.residual, at, n, residual);
    if (p.bias)
      for (int64_t c = 0; c < n; ++c) values[c] += bias[c];
    for (int64_t c = 0; c < n; ++c) values[c] = residual[c] + values[c] * factors[c];
    wide.narrow(values, n, p.out, at);
  }
}

APEX_TE_INLINE void bwd_tile(const BiasDropoutAdd& p, const Factors& all, int64_t row0,
                             int64_t col0) {
  const int64_t end = std::min(p.rows, row0 + kTileRows);
  const int64_t n = std::min(kTileCols, p.cols - col0);
  struct Scratch {
    float values[kRows][kTileCols], factors[kTileCols], sums[kTileCols];
  };
  Scratch& scratch = thread_scratch<Scratch>();
  auto& values = scratch.values;
  float *const factors = scratch.factors, *const sums = scratch.sums;
  std::fill_n(sums, n, 0.0f);
  const float* addends[kRows];
  const RowDType dtype(p.dtype), wide(p.wide);
  std::fill_n(factors, n, p.dropout.scale);
  const bool is_scaled = p.dropout.is_random || p.dropout.scale != 1.0f;
  for (int64_t r0 = row0; r0 < end; r0 += kRows) {
    for (int64_t r = 0; r < kRows; ++r) {
      const int64_t row = r0 + r, at = row * p.cols + col0;
      addends[r] = values[r];
      if (row >= end) {
        std::fill_n(values[r], n, 0.0f);
        continue;
      }
      if (row + kAhead < p.rows)
        prefetch_row(static_cast<const char*>(wide.at(p.dout, at + kAhead * p.cols)),
                     n * wide.size());
      if (p.dropout.is_random) factors_of(p, all, row, col0, n, factors);
      if (wide.is_float() && !is_scaled && !p.dx) {
        addends[r] = static_cast<const float*>(p.dout) + at;
        continue;
      }
      wide.widen(p.dout, at, n, values[r]);
      if (is_scaled)
        for (int64_t c = 0; c < n; ++c) values[r][c] *= factors[c];
      if (p.dx) dtype.narrow(values[r], n, p.dx, at);
    }
    if (!p.dbias) continue;
    for (int64_t c = 0; c < n; ++c) {
      float sum = addends[0][c];
      for (int64_t r = 1; r < kRows; ++r) sum += addends[r][c];
      sums[c] += sum;
    }
  }
  if (p.dbias) std::copy_n(sums, n, p.workspace + row0 / kTileRows * p.cols + col0);
}

APEX_TE_TARGET_PORTABLE void fwd_portable(const BiasDropoutAdd& p, const Factors& all, int64_t row0,
                                          int64_t col0) {
  fwd_tile(p, all, row0, col0);
}
APEX_TE_TARGET_AVX2 void fwd_avx2(const BiasDropoutAdd& p, const Factors& all, int64_t row0,
                                  int64_t col0) {
  fwd_tile(p, all, row0, col0);
}
APEX_TE_TARGET_PORTABLE void bwd_portable(const BiasDropoutAdd& p, const Factors& all, int64_t row0,
                                          int64_t col0) {
  bwd_tile(p, all, row0, col0);
}
APEX_TE_TARGET_AVX2 void bwd_avx2(const BiasDropoutAdd& p, const Factors& all, int64_t row0,
                                  int64_t col0) {
  bwd_tile(p, all, row0, col0);
}

void run_tiles(const BiasDropoutAdd& p) {
  if (p.rows == 0 || p.cols == 0) return;
  const auto fwd = use_avx2() ? fwd_avx2 : fwd_portable;
  const auto bwd = use_avx2() ? bwd_avx2 : bwd_portable;
  const auto tile = p.out ? fwd : bwd;
  const auto all = std::make_unique<Factors>(p.dropout);  // 8 KiB
  const int64_t row_tiles = (p.rows + kTileRows - 1) / kTileRows;
  const int64_t strips = (p.cols + kStripCols - 1) / kStripCols;
  parallel_for(row_tiles * strips, [&](int64_t i) {
    const int64_t begin = i % strips * kStripCols, end = std::min(p.cols, begin + kStripCols);
    for (int64_t col0 = begin; col0 < end; col0 += kTileCols)
      tile(p, *all, i / strips * kTileRows, col0);
  });
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(bias_dropout_add_fwd) {
  apex_te::run_tiles(apex_te::check_bias_dropout_add_fwd(args));
}

APEX_TE_DEFINE(bias_dropout_add_bwd) {
  using namespace apex_te;
  const BiasDropoutAdd p = check_bias_dropout_add_bwd(args);
  run_tiles(p);
  if (!p.dbias) return;
  const int64_t lines = (p.rows + kTileRows - 1) / kTileRows;
  add_lines(p.workspace, lines, p.cols, p.bias_dtype, p.dbias);
}
