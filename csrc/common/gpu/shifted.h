// Vectors of 8 elements or codes at addresses of any alignment, such as rows of an odd length:
// whole aligned words around them and shifts instead of an access for each element.
#pragma once

#include "common/gpu/vec.h"

namespace apex_te {

// out[i] = bytes shift + 4 i to shift + 4 i + 3 of the words, for a shift of less than 16.
template <int kOut>
__device__ __forceinline__ void shift_words(uint32_t (&words)[kOut + 4], unsigned shift,
                                            uint32_t* out) {
#pragma unroll
  for (int i = 0; i < kOut + 2; ++i) words[i] = shift & 8 ? words[i + 2] : words[i];
#pragma unroll
  for (int i = 0; i < kOut + 1; ++i) words[i] = shift & 4 ? words[i + 1] : words[i];
#pragma unroll
  for (int i = 0; i < kOut; ++i) out[i] = __funnelshift_r(words[i], words[i + 1], 8 * (shift & 3));
}

// The vector that begins `shift` bytes into the words, of which n elements are kept.
template <typename T>
__device__ __forceinline__ Vec8<T> shifted_vec(uint32_t (&words)[2 * sizeof(T) + 4], unsigned shift,
                                               int64_t n) {
  constexpr int kWords = 2 * sizeof(T), kPerWord = 4 / sizeof(T);
  Vec8<T> v;
  shift_words<kWords>(words, shift, v.words);
  if (n < kVec) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int64_t left = n - i * kPerWord;
      if (left <= 0) v.words[i] = 0;
      if (kPerWord == 2 && left == 1) v.words[i] &= 0xFFFFu;
    }
  }
  return v;
}

// The first n of 8 elements, zeros behind them. begin, end: the memory that may be read.
template <typename T>
__device__ __forceinline__ Vec8<T> load_shifted(const T* p, int64_t n, const T* begin,
                                                const T* end) {
  constexpr int kParts = sizeof(T) / 2, kWords = 4 * kParts;  // of 16 bytes, of 4 bytes
  const auto address = reinterpret_cast<uintptr_t>(p);
  const unsigned shift = address % 16;
  const uintptr_t base = address - shift;
  if (n <= 0) return Vec8<T>{};
  if (base < reinterpret_cast<uintptr_t>(begin) ||
      base + 16 * (kParts + 1) > reinterpret_cast<uintptr_t>(end))
    return load_partial(p, n);
  uint32_t words[kWords + 4];
#pragma unroll
  for (int i = 0; i <= kParts; ++i) {
    const uint4 part = reinterpret_cast<const uint4*>(base)[i];
    words[4 * i] = part.x, words[4 * i + 1] = part.y;
    words[4 * i + 2] = part.z, words[4 * i + 3] = part.w;
  }
  return shifted_vec<T>(words, shift, n);
}

// kCount such vectors, number i at address(i) with left(i) elements: without a branch between
// their loads, so that all of them are in flight at once.
template <int kCount, typename T, typename Address, typename Left>
__device__ __forceinline__ void load_all_shifted(const Address& address, const Left& left,
                                                 const T* begin, const T* end, Vec8<T>* out) {
  constexpr int kParts = sizeof(T) / 2, kWords = 4 * kParts;
  const auto shift_of = [&](int i) {
    return static_cast<unsigned>(reinterpret_cast<uintptr_t>(address(i)) % 16);
  };
  const auto base_of = [&](int i) {
    return reinterpret_cast<const uint8_t*>(address(i)) - shift_of(i);
  };
  const auto may_read = [&](int i) {
    return base_of(i) >= reinterpret_cast<const uint8_t*>(begin) &&
           base_of(i) + 16 * (kParts + 1) <= reinterpret_cast<const uint8_t*>(end);
  };
  uint32_t words[kCount][kWords + 4];
  bool is_edge = false;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const bool loads = left(i) > 0 && may_read(i);
    is_edge |= left(i) > 0 && !may_read(i);
#pragma unroll
    for (int k = 0; k <= kParts; ++k) {
      uint4 part = make_uint4(0, 0, 0, 0);
      if (loads) part = reinterpret_cast<const uint4*>(base_of(i))[k];
      words[i][4 * k] = part.x, words[i][4 * k + 1] = part.y;
      words[i][4 * k + 2] = part.z, words[i][4 * k + 3] = part.w;
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) out[i] = shifted_vec<T>(words[i], shift_of(i), left(i));
  if (!is_edge) return;
#pragma unroll 1
  for (int i = 0; i < kCount; ++i) {
    if (left(i) <= 0 || may_read(i)) continue;
    const Vec8<T> v = load_partial(address(i), left(i));
#pragma unroll
    for (int k = 0; k < kCount; ++k)
      if (k == i) out[k] = v;
  }
}

// Writes bytes lo to hi - 1 of the 8 at an aligned address, in the largest accesses that fit.
__device__ __forceinline__ void store_bytes(uint8_t* out, uint64_t bytes, int lo, int hi) {
  if (lo == 0 && hi >= 8) {
    *reinterpret_cast<uint64_t*>(out) = bytes;
    return;
  }
  hi = hi < 8 ? hi : 8;
  int at = lo;
  const auto put = [&](auto zero) {
    using Unit = decltype(zero);
    *reinterpret_cast<Unit*>(out + at) = static_cast<Unit>(bytes >> 8 * at);
    at += sizeof(Unit);
  };
  if (at & 1 && at < hi) put(uint8_t{});
  if (at & 2 && at + 2 <= hi) put(uint16_t{});
  if (at + 4 <= hi) put(uint32_t{});
  if (at + 2 <= hi) put(uint16_t{});
  if (at < hi) put(uint8_t{});
}

// The same of 16 bytes.
__device__ __forceinline__ void store_bytes(uint8_t* out, const uint32_t* words, int lo, int hi) {
  if (lo == 0 && hi >= 16) {
    store_16(reinterpret_cast<uint4*>(out), make_uint4(words[0], words[1], words[2], words[3]));
    return;
  }
#pragma unroll 1
  for (int half = 0; half < 2; ++half, lo -= 8, hi -= 8) {
    const uint64_t bytes =
        half ? uint64_t{words[3]} << 32 | words[2] : uint64_t{words[1]} << 32 | words[0];
    store_bytes(out + 8 * half, bytes, lo > 0 ? lo : 0, hi);
  }
}

// kCount vectors of codes, number i the first left(i) of 8 at address(i), zeros behind them. All
// loads are in flight. begin, end: the memory that may be read.
template <int kCount, typename Address, typename Left>
__device__ __forceinline__ void load_all_codes_shifted(const Address& address, const Left& left,
                                                       const uint8_t* begin, const uint8_t* end,
                                                       uint2* out) {
  const auto shift_of = [&](int i) {
    return static_cast<unsigned>(reinterpret_cast<uintptr_t>(address(i)) % 8);
  };
  const auto may_read = [&](int i) {
    const uint8_t* base = address(i) - shift_of(i);
    return base >= begin && base + 16 <= end;
  };
  uint2 high[kCount];
  bool is_edge = false;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const bool loads = left(i) > 0 && may_read(i);
    is_edge |= left(i) > 0 && !may_read(i);
    const uint8_t* base = address(i) - shift_of(i);
    out[i] = high[i] = make_uint2(0, 0);
    if (loads) out[i] = *reinterpret_cast<const uint2*>(base);
    if (loads) high[i] = *reinterpret_cast<const uint2*>(base + 8);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const unsigned shift = shift_of(i), bits = 8 * (shift & 3);
    const uint32_t a = shift & 4 ? out[i].y : out[i].x, b = shift & 4 ? high[i].x : out[i].y;
    const uint32_t c = shift & 4 ? high[i].y : high[i].x;
    out[i] =
        first_codes(make_uint2(__funnelshift_r(a, b, bits), __funnelshift_r(b, c, bits)), left(i));
  }
  if (!is_edge) return;
#pragma unroll 1
  for (int i = 0; i < kCount; ++i) {
    if (left(i) <= 0 || may_read(i)) continue;
    const uint2 codes = load_codes_partial(address(i), left(i));
#pragma unroll
    for (int k = 0; k < kCount; ++k)
      if (k == i) out[k] = codes;
  }
}

// Where the bytes of a row that begins `shift` bytes behind an aligned unit of kUnit bytes lie:
// whole units, number k from byte kUnit k - shift of the row on, and fewer than 2 kUnit bytes
// before and behind these.
template <int kUnit>
struct ShiftedRow {
  int shift, length, head, tail;  // tail: the first byte behind the whole units
  __device__ __forceinline__ ShiftedRow(const uint8_t* row, int64_t bytes, int most)
      : shift(static_cast<int>(reinterpret_cast<uintptr_t>(row) % kUnit)),
        length(static_cast<int>(bytes < most ? bytes : most)) {
    head = shift ? min(kUnit - shift, length) : 0;
    tail = max((length + shift) / kUnit * kUnit - shift, head);
  }
  __device__ __forceinline__ bool has_unit(int k) const {
    const int first = k * kUnit - shift;
    return first >= 0 && first + kUnit <= length;
  }
  // Byte number i of those outside the units; `length` or more if there are not so many.
  __device__ __forceinline__ int edge(int i) const { return i < head ? i : tail + i - head; }
};

// Stores 8 codes of each of kLanes neighbouring lanes, which share a row that has `left` codes from
// p, where the first lane's begin, or none. All lanes of a warp call it. A lane stores the 8 bytes
// around its own, the first of them of the lane before it, and a byte outside such units.
template <int kLanes>
__device__ __forceinline__ void store_codes_of_lanes(uint8_t* p, uint2 codes, int64_t left,
                                                     int lane) {
  constexpr uint32_t kAll = 0xFFFFFFFFu;
  const ShiftedRow<8> row(p, left > 0 ? left : 0, kLanes * kVec);
  const uint32_t before_x = __shfl_up_sync(kAll, codes.x, 1, kLanes),
                 before_y = __shfl_up_sync(kAll, codes.y, 1, kLanes);
  const int back = (8 - row.shift) % 8, bits = 8 * (back & 3);
  // Bytes back to back + 7 of (before, codes), or codes themselves.
  const uint32_t first = row.shift ? before_x : codes.x, second = row.shift ? before_y : codes.y,
                 third = codes.x, fourth = codes.y;
  const uint32_t a = back & 4 ? second : first, b = back & 4 ? third : second,
                 c = back & 4 ? fourth : third;
  const uint2 unit = make_uint2(__funnelshift_r(a, b, bits), __funnelshift_r(b, c, bits));
  if (row.has_unit(lane)) *reinterpret_cast<uint2*>(p - row.shift + lane * kVec) = unit;
#pragma unroll
  for (int round = 0; round < (16 + kLanes - 1) / kLanes; ++round) {
    const int byte = row.edge(lane + round * kLanes), from = byte / kVec;
    const uint32_t x = __shfl_sync(kAll, codes.x, from, kLanes),
                   y = __shfl_sync(kAll, codes.y, from, kLanes);
    if (byte < row.length) p[byte] = static_cast<uint8_t>((byte & 4 ? y : x) >> 8 * (byte & 3));
  }
}

// Stores a vector of each of neighbouring lanes, of which `lanes` (a power of two) share a row that
// has `left` elements from a lane's own on; all lanes of a warp call it. A lane stores the 16 bytes
// around its address, the first of them of the lane before it.
template <typename T>
__device__ __forceinline__ void store_shifted(T* p, const Vec8<T>& v, int64_t left, int lane,
                                              int lanes, bool is_present) {
  constexpr int kWords = 2 * sizeof(T), kBytes = 4 * kWords;
  uint32_t words[kWords + 4], out[kWords];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    words[i] = __shfl_up_sync(0xFFFFFFFFu, v.words[kWords - 4 + i], 1, lanes);
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[4 + i] = out[i] = v.words[i];
  if (!is_present) return;
  const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(p) % 16);
  const int64_t whole = left + lane * kVec;
  const int length = static_cast<int>(whole < lanes * kVec ? whole : lanes * kVec) * sizeof(T);
  const int hi = length + shift - lane * kBytes;
  uint8_t* base = reinterpret_cast<uint8_t*>(p) - shift;
  if (shift) shift_words<kWords>(words, 16 - shift, out);
#pragma unroll
  for (int part = 0; part < kBytes / 16; ++part)
    store_bytes(base + 16 * part, out + 4 * part, lane || part ? 0 : shift, hi - 16 * part);
  if (lane < lanes - 1 || hi <= kBytes) return;
  uint32_t end[8] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) end[i] = v.words[kWords - 4 + i];
  shift_words<4>(end, 16 - shift, out);
  store_bytes(base + kBytes, out, 0, hi - kBytes);
}

}  // namespace apex_te
