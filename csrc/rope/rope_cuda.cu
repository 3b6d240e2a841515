// CUDA kernel of rope.
//
// A block takes some heads of a row (token, sequence), or several short rows. A thread has 8 pairs,
// in two vectors, of one or two heads. It loads its share of the row's angles and then x; while x
// is under way the block computes the cos and sin of its rows into shared memory, each once.
//
// Blocks are small and many, and what comes before the loads is short: a thread's place comes from
// blockIdx and threadIdx, and one division. Larger blocks or more heads for a thread are slower.
#include <algorithm>

#include "common/gpu/vec.h"
#include "common/numerics/with_dtype.h"
#include "rope/rope.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int kThreads = 64;             // of a block, at most
constexpr int kBlocks = 16;              // of a multiprocessor
constexpr int kMaxTableVecs = kThreads;  // of 8 pairs in a block's table: 64 bytes each
constexpr int kMaxRows = 64;             // of a block: the largest blockDim.z
constexpr int64_t kFewBlocks = 1056;     // eight for each multiprocessor of a large GPU

// Heads of one thread; aligned, 64 bytes in flight.
template <typename T, bool kAligned>
constexpr int kHeads = kAligned && sizeof(T) == 2 ? 2 : 1;

// Division of integers below 2^31 by a constant of the launch.
struct Divisor {
  uint32_t divisor, multiplier, shift;
  explicit Divisor(int64_t d) : divisor(static_cast<uint32_t>(d)), shift(31) {
    while (int64_t{1} << (shift - 31) < d) ++shift;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << shift) + d - 1) / d);
  }
  __device__ __forceinline__ uint32_t divide(uint32_t n) const {
    return static_cast<uint32_t>(uint64_t{n} * multiplier >> shift);
  }
};

// Division of rows and heads into blocks and threads. threadIdx.z is the row; threadIdx.y the
// group, which has heads y, y + blockDim.y, ... of the block's; threadIdx.x the vector. Vectors are
// numbered along a head, each with its partner; the first `rotated` of them are rotated, the others
// copied.
struct Split {
  Divisor chunks;  // blocks to (rows, heads)
  Divisor inner;   // rows to (outer, inner)
  int64_t rows;
  const float* angles;       // freqs or cos
  int64_t x_step, out_step;  // from one head of a thread to its next
  uint32_t vecs, rotated, pairs;
  int heads;       // of a block
  uint32_t parts;  // blocks that share out the vectors of a head
  bool is_known;   // positions are within the table
};

// Vector `vec` of a head and its partner: elements from first, and from first + delta.
struct Place {
  int first, delta;
  int n[2];  // elements of each, at most 8; 0 or less if there is none
};

__device__ __forceinline__ Place place_of(const Rope& p, const Split& s, uint32_t vec) {
  const int dim = static_cast<int>(p.rotary_dim);
  Place place;
  if (vec < s.rotated) {
    // Interleaved pairs lie within a vector: halves of whole vectors.
    place.first = kVec * static_cast<int>(vec);
    place.delta = p.interleaved ? kVec * static_cast<int>(s.rotated) : dim / 2;
    place.n[0] = min(kVec, (p.interleaved ? dim : dim / 2) - place.first);
    place.n[1] = p.interleaved ? min(kVec, dim - place.first - place.delta) : place.n[0];
  } else {
    place.first = dim + 2 * kVec * static_cast<int>(vec - s.rotated);
    place.delta = kVec;
    place.n[0] = min(kVec, static_cast<int>(p.head_dim) - place.first);
    place.n[1] = min(kVec, static_cast<int>(p.head_dim) - place.first - kVec);
  }
  return place;
}

template <bool kAligned, typename T>
__device__ __forceinline__ Vec8<T> load(const T* x, int n) {
  if (!kAligned) return load_partial(x, n);
  if (n > 0) return load_vec(x);
  return {};
}
template <bool kAligned, typename T>
__device__ __forceinline__ void store(T* out, const Vec8<T>& v, int n) {
  if (!kAligned)
    store_partial(out, v, n);
  else if (n > 0)
    store_vec_whole(out, v);
}

// A call, so that the reduction of large angles costs no registers elsewhere.
__device__ __noinline__ float2 cos_sin_of_large(float angle) {
  float2 result;
  sincosf(angle, &result.y, &result.x);
  return result;
}

// (cos, sin) within 1.5 ulp: the angle less a multiple of pi / 2 in three parts, whose first
// product is exact up to the limit, and polynomials near the minimax ones on [-pi / 4, pi / 4].
__device__ __forceinline__ float2 cos_sin(float angle) {
  if (!(fabsf(angle) <= 1e5f)) return cos_sin_of_large(angle);
  const float quarters = rintf(angle * 0.636619747f);
  float r = fmaf(-quarters, 1.57079625129699707f, angle);
  r = fmaf(-quarters, 7.54979013e-08f, r);
  r = fmaf(-quarters, -1.71509942e-15f, r);
  const float z = r * r;
  const float s = fmaf(fmaf(fmaf(-1.95874469e-04f, z, 8.3327461e-03f), z, -0.166666642f), r * z, r);
  const float c =
      fmaf(fmaf(fmaf(fmaf(2.45474876e-05f, z, -1.38883013e-03f), z, 4.16666642e-02f), z, -0.5f), z,
           1.0f);
  const int quadrant = static_cast<int>(quarters);
  const float sine = quadrant & 1 ? c : s, cosine = quadrant & 1 ? s : c;
  return make_float2((quadrant + 1) & 2 ? -cosine : cosine, quadrant & 2 ? -sine : sine);
}

// Source of the table of cos and sin of one row, entry by entry.
struct Angles {
  const float *angles, *sines;  // of the row: freqs, or cos and sin; null where it has none
  float cosine;                 // where angles is null; the sine is one less

  __device__ __forceinline__ Angles(const Rope& p, const Split& s, uint32_t o, uint32_t i) {
    int64_t position = p.start + (p.inner_is_token ? i : o);
    angles = sines = nullptr;
    cosine = 1.0f;
    if (!s.is_known) {
      position = p.position(o, i);
      if (position == Rope::kNoSequence) return;
      cosine = __uint_as_float(0x7FC00000u);
      if (position < 0 || position >= p.table_rows) return;
    }
    angles = s.angles + position * p.table_cols;
    if (p.sin) sines = p.sin + position * p.table_cols;
  }

  // The angle, or cos and sin, of a pair; anything where there is none.
  __device__ __forceinline__ float2 load(const Rope& p, const Split& s, uint32_t pair) const {
    float2 entry = make_float2(cosine, cosine - 1.0f);
    if (pair < s.pairs && angles) entry.x = angles[pair * static_cast<uint32_t>(p.pair_step)];
    if (pair < s.pairs && sines) entry.y = sines[pair * static_cast<uint32_t>(p.pair_step)];
    return entry;
  }
};

// Writes an entry to its row's part of the table, [cos 0-3, cos 4-7, sin 0-3, sin 4-7][vector of 8
// pairs], so that threads with consecutive vectors read consecutive 16 bytes. Interleaved, pairs 4
// to 7 are those of the vector's partner.
__device__ __forceinline__ void store_entry(const Rope& p, const Split& s, uint32_t pair,
                                            float2 entry, float* table) {
  const uint32_t quad = pair / 4, is_partner = quad >= s.rotated;
  const uint32_t vec = p.interleaved ? quad - is_partner * s.rotated : quad / 2;
  const uint32_t plane = p.interleaved ? is_partner : quad % 2;
  float* target = table + (plane * s.rotated + vec) * 4 + pair % 4;
  target[0] = entry.x;
  target[2 * s.rotated * 4] = entry.y * p.sign;
}

__device__ __forceinline__ void rotate(float& a, float& b, float cosine, float sine) {
  const float x = a, y = b;
  a = fmaf(x, cosine, -(y * sine));
  b = fmaf(y, cosine, x * sine);
}

template <bool kInterleaved, typename T>
__device__ __forceinline__ void rotate_vecs(Vec8<T>& first, Vec8<T>& second, const float* cosines,
                                            const float* sines) {
  float a[kVec], b[kVec];
  unpack(first, a);
  unpack(second, b);
  if (kInterleaved) {
#pragma unroll
    for (int i = 0; i < kVec / 2; ++i) {
      rotate(a[2 * i], a[2 * i + 1], cosines[i], sines[i]);
      rotate(b[2 * i], b[2 * i + 1], cosines[kVec / 2 + i], sines[kVec / 2 + i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVec; ++i) rotate(a[i], b[i], cosines[i], sines[i]);
  }
  pack(a, &first);
  pack(b, &second);
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocks) rope_kernel(const Rope p, const Split s) {
  extern __shared__ float4 table[];
  constexpr int kSteps = kHeads<T, kAligned>;
  const uint32_t group = threadIdx.y, groups = blockDim.y;
  const uint32_t block_row = s.chunks.divide(blockIdx.x);
  uint32_t chunk = blockIdx.x - block_row * s.chunks.divisor, vec = threadIdx.x;
  const int64_t row = static_cast<int64_t>(block_row) * blockDim.z + threadIdx.z;
  const uint32_t o = s.inner.divide(static_cast<uint32_t>(row));
  const uint32_t i = static_cast<uint32_t>(row) - o * s.inner.divisor;
  const bool is_row = row < s.rows;

  const uint32_t entries = is_row ? s.pairs : 0, entry_step = blockDim.x * groups;
  const uint32_t entry0 = group * blockDim.x + threadIdx.x;
  const Angles angles(p, s, is_row ? o : 0, is_row ? i : 0);
  float2 entry = angles.load(p, s, entry0), next = angles.load(p, s, entry0 + entry_step);

  if (s.parts > 1) {
    vec += chunk % s.parts * kThreads;
    chunk /= s.parts;
  }
  const int64_t head = static_cast<int64_t>(chunk) * s.heads + group;
  int left = 0;  // heads from this thread's first one on
  if (is_row && vec < s.vecs)
    left = min(s.heads - static_cast<int>(group), static_cast<int>(p.heads - head));
  const Place place = place_of(p, s, vec);
  const T* x =
      static_cast<const T*>(p.x) + o * p.x_outer + i * p.x_inner + head * p.x_head + place.first;
  Vec8<T> first[kSteps], second[kSteps];
#pragma unroll
  for (int j = 0; j < kSteps; ++j, x += s.x_step) {
    const bool is_there = j * static_cast<int>(groups) < left;
    first[j] = load<kAligned>(x, is_there ? place.n[0] : 0);
    second[j] = load<kAligned>(x + place.delta, is_there ? place.n[1] : 0);
  }

  float4* factors = table + threadIdx.z * 4 * s.rotated;  // of this row
#pragma unroll 1
  for (uint32_t pair = entry0; pair < entries; pair += entry_step) {
    if (angles.angles && !angles.sines) entry = cos_sin(entry.x);
    store_entry(p, s, pair, entry, reinterpret_cast<float*>(factors));
    entry = next;
    next = angles.load(p, s, pair + 2 * entry_step);
  }
  __syncthreads();
  if (left <= 0) return;

  T* out =
      static_cast<T*>(p.out) + o * p.out_outer + i * p.out_inner + head * p.out_head + place.first;
  const auto write_heads = [&](auto rotate_one) {
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      if (j * static_cast<int>(groups) >= left) break;
      rotate_one(first[j], second[j]);
      T* target = out + j * s.out_step;
      store<kAligned>(target, first[j], place.n[0]);
      store<kAligned>(target + place.delta, second[j], place.n[1]);
    }
  };
  if (vec >= s.rotated) return write_heads([](Vec8<T>&, Vec8<T>&) {});
  float4 quads[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) quads[q] = factors[q * s.rotated + vec];
  const float* cosines = reinterpret_cast<const float*>(quads);
  if (p.interleaved)
    write_heads([&](Vec8<T>& a, Vec8<T>& b) { rotate_vecs<true>(a, b, cosines, cosines + kVec); });
  else
    write_heads([&](Vec8<T>& a, Vec8<T>& b) { rotate_vecs<false>(a, b, cosines, cosines + kVec); });
}

// Heads of all sequences of a token are one dimension where they share angles and lie evenly.
void merge_sequences(Rope& p) {
  const bool is_even = p.x_inner == p.heads * p.x_head && p.out_inner == p.heads * p.out_head;
  if (p.inner_is_token || p.starts || !is_even) return;
  p.heads *= p.inner;
  p.inner = 1;
}

template <typename T, bool kAligned>
void launch(const Rope& p, cudaStream_t stream) {
  const int64_t rows = p.outer * p.inner, half = p.rotary_dim / 2;
  const int64_t rotated = (half + kVec - 1) / kVec;
  const int64_t vecs = rotated + (p.head_dim - p.rotary_dim + 2 * kVec - 1) / (2 * kVec);
  if (rows > 0x7FFFFFFF || p.heads > 0x7FFFFFFF || vecs > 0xFFFFFF)
    fail(kApexTeUnsupported, "rope: x must have fewer than 2^31 rows and heads and 2^27 columns");
  constexpr int64_t kSteps = kHeads<T, kAligned>;
  const int64_t span = vecs < kThreads ? vecs : kThreads, parts = (vecs + span - 1) / span;
  const int64_t most = kThreads / span * kSteps;  // heads of a block
  const int64_t chunks = (p.heads + most - 1) / most;
  const int64_t heads = (p.heads + chunks - 1) / chunks;
  const int64_t groups = (heads + kSteps - 1) / kSteps;
  int64_t block_rows = std::min<int64_t>(kThreads / (groups * span), kMaxRows);
  if (rotated) block_rows = std::min(block_rows, kMaxTableVecs / rotated);
  // Fewer rows in a block where the whole GPU would not be busy otherwise.
  block_rows = std::max<int64_t>(std::min(block_rows, rows * chunks / kFewBlocks), 1);
  const int64_t tokens = p.inner_is_token ? p.inner : p.outer;
  const int64_t blocks = (rows + block_rows - 1) / block_rows * chunks * parts;
  if (blocks > 0x7FFFFFFF) fail(kApexTeUnsupported, "rope: x must need fewer than 2^31 blocks");
  const Split s{Divisor(chunks * parts),
                Divisor(p.inner),
                rows,
                p.freqs ? p.freqs : p.cos,
                groups * p.x_head,
                groups * p.out_head,
                static_cast<uint32_t>(vecs),
                static_cast<uint32_t>(rotated),
                static_cast<uint32_t>(half),
                static_cast<int>(heads),
                static_cast<uint32_t>(parts),
                !p.starts && !p.cu_seqlens && tokens <= p.table_rows - p.start};
  const dim3 threads(span, groups, block_rows);
  const size_t shared = block_rows * rotated * 4 * sizeof(float4);
  rope_kernel<T, kAligned><<<static_cast<unsigned>(blocks), threads, shared, stream>>>(p, s);
  check_cuda(cudaGetLastError(), "rope");
}

template <typename T>
void launch_alignment(const Rope& p, cudaStream_t stream) {
  bool aligned = is_aligned(p.x, 16) && is_aligned(p.out, 16) && p.rotary_dim % (2 * kVec) == 0 &&
                 p.head_dim % kVec == 0;
  for (int64_t stride : {p.x_outer, p.x_inner, p.x_head, p.out_outer, p.out_inner, p.out_head})
    aligned &= stride * sizeof(T) % 16 == 0;
  aligned ? launch<T, true>(p, stream) : launch<T, false>(p, stream);
}

void rope(Args& args, bool is_backward) {
  Rope p = check_rope(args, is_backward);
  if (p.outer * p.inner * p.heads * p.head_dim == 0) return;
  merge_sequences(p);
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  with_dtype(p.dtype, [&](auto zero) { launch_alignment<decltype(zero)>(p, stream); });
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(rope_fwd) { apex_te::rope(args, false); }
APEX_TE_DEFINE(rope_bwd) { apex_te::rope(args, true); }
