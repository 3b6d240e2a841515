// CPU kernel of rope: the angles of a position are computed once and used for all heads, and for
// all sequences that share them.
#include <algorithm>

#include "common/cpu/parallel.h"
#include "common/cpu/vec.h"
#include "common/numerics/with_dtype.h"
#include "rope/rope.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int64_t kPairs = 64;               // pairs of one step
constexpr int64_t kChunkElements = 1 << 15;  // about the work of one chunk

APEX_TE_INLINE uint64_t double_bits(double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}
APEX_TE_INLINE double bits_double(uint64_t bits) {
  double value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// cos and sin within 1 ulp, without a branch so that the loop is vectorized. The reduction by
// multiples of pi / 2 runs in double and is exact enough while their number fits 20 bits; larger
// angles take the C library's functions. Polynomials: Taylor to 1e-11 on [-pi / 4, pi / 4].
APEX_TE_INLINE void cos_sin(const float* angles, int64_t n, float* cosines, float* sines) {
  constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52: an addition rounds to an integer
  constexpr double kHigh = 1.57079632673412561417, kLow = 6.07710050650619224932e-11;  // pi / 2
  constexpr float kLimit = 1e6f;
  for (int64_t i = 0; i < n; ++i) {
    const double x = angles[i];
    const double shifted = x * 0.63661977236758134308 + kRound;
    const double quarters = shifted - kRound;
    const double r = (x - quarters * kHigh) - quarters * kLow;
    const double z = r * r;
    double s = 1.0 / 362880 - z * (1.0 / 39916800);
    s = -1.0 / 5040 + z * s;
    s = 1.0 / 120 + z * s;
    s = -1.0 / 6 + z * s;
    s = r + r * z * s;
    double c = -1.0 / 3628800 + z * (1.0 / 479001600);
    c = 1.0 / 40320 + z * c;
    c = -1.0 / 720 + z * c;
    c = 1.0 / 24 + z * c;
    c = -0.5 + z * c;
    c = 1.0 + z * c;
    // Odd quadrants swap the two; the second bits are the signs.
    const uint64_t quadrant = double_bits(shifted), swap = 0 - (quadrant & 1);
    const uint64_t changed = (double_bits(s) ^ double_bits(c)) & swap;
    const uint64_t sine = double_bits(s) ^ changed ^ (quadrant & 2) << 62;
    const uint64_t cosine = double_bits(c) ^ changed ^ ((quadrant + 1) & 2) << 62;
    sines[i] = static_cast<float>(bits_double(sine));
    cosines[i] = static_cast<float>(bits_double(cosine));
  }
  int large = 0;
  for (int64_t i = 0; i < n; ++i) large |= !(std::fabs(angles[i]) <= kLimit);
  if (!large) return;
  for (int64_t i = 0; i < n; ++i) {
    if (std::fabs(angles[i]) <= kLimit) continue;
    sines[i] = sinf(angles[i]);
    cosines[i] = cosf(angles[i]);
  }
}

// cos and sin of pairs [pair, pair + n) at a row of the table.
APEX_TE_INLINE void table_entries(const Rope& p, int64_t position, int64_t pair, int64_t n,
                                  float* cosines, float* sines) {
  if (position == Rope::kNoSequence || position < 0 || position >= p.table_rows) {
    const bool is_outside = position != Rope::kNoSequence;
    std::fill_n(cosines, n, is_outside ? NAN : 1.0f);
    std::fill_n(sines, n, is_outside ? NAN : 0.0f);
    return;
  }
  const int64_t begin = position * p.table_cols + pair * p.pair_step;
  if (p.freqs) {
    float angles[kPairs];
    for (int64_t i = 0; i < n; ++i) angles[i] = p.freqs[begin + i * p.pair_step];
    cos_sin(angles, n, cosines, sines);
  } else {
    for (int64_t i = 0; i < n; ++i) {
      cosines[i] = p.cos[begin + i * p.pair_step];
      sines[i] = p.sin[begin + i * p.pair_step];
    }
  }
  for (int64_t i = 0; i < n; ++i) sines[i] *= p.sign;
}

APEX_TE_INLINE void rotate(float* a, float* b, int64_t n, const float* cosines,
                           const float* sines) {
  for (int64_t i = 0; i < n; ++i) {
    const float x = a[i], y = b[i];
    a[i] = x * cosines[i] - y * sines[i];
    b[i] = y * cosines[i] + x * sines[i];
  }
}

template <typename T>
APEX_TE_INLINE void rotate_pairs(const Rope& p, const T* x, T* out, int64_t pair, int64_t n,
                                 const float* cosines, const float* sines) {
  float a[kPairs], b[kPairs];
  if (p.interleaved) {
    float values[2 * kPairs];
    widen(x + 2 * pair, 2 * n, values);
    for (int64_t i = 0; i < n; ++i) {
      a[i] = values[2 * i];
      b[i] = values[2 * i + 1];
    }
    rotate(a, b, n, cosines, sines);
    for (int64_t i = 0; i < n; ++i) {
      values[2 * i] = a[i];
      values[2 * i + 1] = b[i];
    }
    narrow(values, 2 * n, out + 2 * pair);
    return;
  }
  const int64_t half = p.rotary_dim / 2;
  widen(x + pair, n, a);
  widen(x + half + pair, n, b);
  rotate(a, b, n, cosines, sines);
  narrow(a, n, out + pair);
  narrow(b, n, out + half + pair);
}

// Tokens [token, token_end) of sequences [first, last).
template <typename T>
APEX_TE_INLINE void rope_chunk(const Rope& p, int64_t token, int64_t token_end, int64_t first,
                               int64_t last) {
  const int64_t pairs = p.rotary_dim / 2, rest = p.head_dim - p.rotary_dim;
  const bool is_shared = !p.starts && !p.cu_seqlens;
  float cosines[kPairs], sines[kPairs];
  for (; token < token_end; ++token) {
    for (int64_t pair = 0; pair == 0 || pair < pairs; pair += kPairs) {
      const int64_t n = std::min(kPairs, pairs - pair);
      for (int64_t sequence = first; sequence < last; ++sequence) {
        const int64_t o = p.inner_is_token ? sequence : token;
        const int64_t i = p.inner_is_token ? token : sequence;
        if (sequence == first || !is_shared)
          table_entries(p, p.position(o, i), pair, n, cosines, sines);
        const T* x = static_cast<const T*>(p.x) + o * p.x_outer + i * p.x_inner;
        T* out = static_cast<T*>(p.out) + o * p.out_outer + i * p.out_inner;
        for (int64_t h = 0; h < p.heads; ++h, x += p.x_head, out += p.out_head) {
          rotate_pairs(p, x, out, pair, n, cosines, sines);
          if (rest && pair == 0 && p.x != p.out)
            std::copy_n(x + p.rotary_dim, rest, out + p.rotary_dim);
        }
      }
    }
  }
}

template <typename T>
APEX_TE_TARGET_PORTABLE void rope_chunk_portable(const Rope& p, int64_t token, int64_t token_end,
                                                 int64_t first, int64_t last) {
  rope_chunk<T>(p, token, token_end, first, last);
}
template <typename T>
APEX_TE_TARGET_AVX2 void rope_chunk_avx2(const Rope& p, int64_t token, int64_t token_end,
                                         int64_t first, int64_t last) {
  rope_chunk<T>(p, token, token_end, first, last);
}

template <typename T>
void rope_all(const Rope& p) {
  const int64_t tokens = p.inner_is_token ? p.inner : p.outer;
  const int64_t batch = p.inner_is_token ? p.outer : p.inner;
  const int64_t row = p.heads * p.head_dim;
  if (tokens * batch * row == 0) return;
  const int64_t chunk_batch = std::clamp<int64_t>(kChunkElements / row, 1, batch);
  const int64_t chunk_tokens = std::clamp<int64_t>(kChunkElements / (row * chunk_batch), 1, tokens);
  const int64_t batches = (batch + chunk_batch - 1) / chunk_batch;
  const auto run = use_avx2() ? rope_chunk_avx2<T> : rope_chunk_portable<T>;
  parallel_for((tokens + chunk_tokens - 1) / chunk_tokens * batches, [&](int64_t chunk) {
    const int64_t token = chunk / batches * chunk_tokens, first = chunk % batches * chunk_batch;
    run(p, token, std::min(tokens, token + chunk_tokens), first,
        std::min(batch, first + chunk_batch));
  });
}

void rope(const Rope& p) {
  with_dtype(p.dtype, [&](auto zero) { rope_all<decltype(zero)>(p); });
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(rope_fwd) { apex_te::rope(apex_te::check_rope(args, false)); }
APEX_TE_DEFINE(rope_bwd) { apex_te::rope(apex_te::check_rope(args, true)); }
