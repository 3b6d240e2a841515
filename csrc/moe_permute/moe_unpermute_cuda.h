// Copies summed back to their tokens in fp32, and the gradients of that.
#pragma once

#include "common/gpu/vec.h"
#include "moe_permute/moe_permute_rows_cuda.h"

namespace apex_te {
namespace {

constexpr int kSumWarps = 2;
constexpr int kSumThreads = 32 * kSumWarps;
template <typename T>
constexpr int kSumVecs = 8 / sizeof(T);  // of a lane: 64 bytes of each copy
template <typename T>
constexpr int64_t kSumCols = 32 * kVec * kSumVecs<T>;
constexpr int kGradVecs = 2;    // of a lane at a time
constexpr int kGradCopies = 4;  // whose dot products a lane keeps
constexpr int kGradCols = 32 * kVec * kGradVecs;

template <bool kAligned, typename T>
__device__ __forceinline__ Vec8<T> load_some(const T* p, int64_t n) {
  if (!kAligned) return load_partial(p, n);
  return n > 0 ? load_vec(p) : Vec8<T>{};
}
template <bool kAligned, typename T>
__device__ __forceinline__ void store_some(T* p, const Vec8<T>& v, int64_t n) {
  if (!kAligned)
    store_partial(p, v, n);
  else if (n > 0)
    store_vec_whole(p, v);
}

// Elements [at, at + 8) of a row of `cols`; of an aligned one they are all or none.
template <bool kAligned, typename T>
struct Cols : Window<T> {};
template <typename T>
struct Cols<true, T> {
  Vec8<T> v;
  __device__ __forceinline__ void load(const T* row, int64_t at, int64_t cols) {
    v = at < cols ? load_vec(row + at) : Vec8<T>{};
  }
  __device__ __forceinline__ const Vec8<T>& elements() const { return v; }
};
template <bool kAligned, typename T>
__device__ __forceinline__ void store_cols(T* row, const Vec8<T>& v, int64_t at, int64_t cols) {
  if (!kAligned)
    store_window(row, v, at, cols);
  else if (at < cols)
    store_vec_whole(row + at, v);
}

template <typename T>
__device__ __forceinline__ float prob_of(const Unpermute& p, int64_t i) {
  return p.has_float_probs ? static_cast<const float*>(p.probs)[i]
                           : to_float(static_cast<const T*>(p.probs)[i]);
}

// A copy of a token: its row, and its place in probs. A map that fits another matrix gives NaN.
struct Copy {
  int32_t row;
  int64_t prob;
  bool is_dropped, is_bad;
  __device__ __forceinline__ Copy(const Unpermute& p, int64_t token, int32_t to, int32_t column)
      : row(to), prob(token * p.map.width + column) {
    is_dropped = row == kDropped;
    is_bad = !is_dropped && (row < 0 || row >= p.num_rows || column < 0 || column >= p.map.width);
  }
  __device__ __forceinline__ bool is_used() const { return !is_dropped && !is_bad; }
};

// Zeros, then the gradients of the copies' probs, in the token's row of probs.
__device__ __forceinline__ void scatter_prob_gradients(const Unpermute& p, int64_t token, int n) {
  const int lane = threadIdx.x % 32;
  for (int e = lane; e < p.map.width; e += 32) zero_prob(p.grad_probs, token * p.map.width + e);
  __syncwarp();
  if (!p.grad_probs.from) return;
  const int32_t* entry = p.map.of(token);
  for (int k = lane; k < n; k += 32) {
    const Copy copy(p, token, entry[1 + 2 * k], entry[2 + 2 * k]);
    if (copy.is_used()) copy_prob(p.grad_probs, copy.prob, copy.row);
  }
}

// A warp sums kSumCols columns of a token, two copies loaded at a time and added in their order.
// Blocks are small: the next one waits for all warps of a block.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kSumThreads)
    moe_unpermute_fwd_kernel(const Unpermute p, uint32_t pieces) {
  constexpr int kVecs = kSumVecs<T>;
  const uint32_t index = blockIdx.x * kSumWarps + threadIdx.x / 32;
  const int64_t token = index / pieces, piece = index % pieces;
  if (token >= p.map.tokens) return;
  const Head head(p.map, token);
  const int n = head.copies();
  T* out = static_cast<T*>(p.out) + token * p.cols;
  // Words of the output are whole, those of the copies may lie otherwise.
  const int64_t col = piece * kSumCols<T> + threadIdx.x % 32 * kVec -
                      (kAligned ? 0 : misalignment(out) / static_cast<int>(sizeof(T)));
  float sums[kVecs][kVec] = {};
  bool is_bad = false;
  for (int k = 0; k < n; k += 2) {
    Cols<kAligned, T> x[2][kVecs];
    float factors[2];
    bool is_used[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      is_used[i] = false;
      if (k + i >= n) continue;
      const Copy copy(p, token, head.row(k + i), head.column(k + i));
      is_bad = is_bad || copy.is_bad;
      is_used[i] = copy.is_used();
      if (!is_used[i]) continue;
      const T* row = static_cast<const T*>(p.inp) + copy.row * p.cols;
#pragma unroll
      for (int v = 0; v < kVecs; ++v) x[i][v].load(row, col + v * 32 * kVec, p.cols);
      factors[i] = p.probs ? prob_of<T>(p, copy.prob) : 1.0f;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!is_used[i]) continue;
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        float values[kVec];
        unpack(x[i][v].elements(), values);
#pragma unroll
        for (int c = 0; c < kVec; ++c) sums[v][c] += factors[i] * values[c];
      }
    }
  }
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    if (is_bad)
#pragma unroll
      for (int c = 0; c < kVec; ++c) sums[v][c] = __uint_as_float(0x7FFFFFFFu);
    Vec8<T> y;
    pack(sums[v], &y);
    store_cols<kAligned>(out, y, col + v * 32 * kVec, p.cols);
  }
  if (p.grad_probs.to && piece == 0) scatter_prob_gradients(p, token, n);
}

// A warp takes a token: for each copy prob * gradient, and the dot product of copy and gradient.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kRowThreads)
    moe_unpermute_bwd_kernel(const Unpermute p, int64_t token_blocks) {
  const int lane = threadIdx.x % 32;
  const int64_t block = block_row();
  T* grad_inp = static_cast<T*>(p.out);
  if (block >= token_blocks) {
    const int64_t warp = (block - token_blocks) * kRowWarps + threadIdx.x / 32;
    if (block < token_blocks + kZeroBlocks)
      for_each_unused_row(p.map, p.num_rows, warp, kZeroBlocks * kRowWarps, [&](int64_t row) {
        for (int64_t c = lane * kVec; c < p.cols; c += 32 * kVec)
          store_some<kAligned>(grad_inp + row * p.cols + c, Vec8<T>{}, p.cols - c);
      });
    return;
  }
  const int64_t token = block * kRowWarps + threadIdx.x / 32;
  if (token >= p.map.tokens) return;
  const Head head(p.map, token);
  const int n = head.copies();
  const T* grad = static_cast<const T*>(p.grad_output) + token * p.cols;
  scatter_prob_gradients(p, token, n);
  __syncwarp();
  for (int first = 0; first < n; first += kGradCopies) {
    int64_t rows[kGradCopies];  // of the first element; -1: no copy
    float factors[kGradCopies], dots[kGradCopies] = {};
#pragma unroll
    for (int k = 0; k < kGradCopies; ++k) {
      rows[k] = -1;
      factors[k] = 0.0f;
      if (first + k >= n) continue;
      const Copy copy(p, token, head.row(first + k), head.column(first + k));
      if (!copy.is_used()) continue;
      rows[k] = copy.row * p.cols;
      factors[k] = prob_of<T>(p, copy.prob);
    }
    for (int64_t base = lane * kVec; base < p.cols; base += kGradCols) {
      Vec8<T> g[kGradVecs], x[kGradCopies][kGradVecs];
#pragma unroll
      for (int v = 0; v < kGradVecs; ++v) {
        const int64_t c = base + v * 32 * kVec;
        g[v] = load_some<kAligned>(grad + c, p.cols - c);
      }
#pragma unroll
      for (int k = 0; k < kGradCopies; ++k) {
        if (rows[k] < 0) continue;
#pragma unroll
        for (int v = 0; v < kGradVecs; ++v) {
          const int64_t c = base + v * 32 * kVec;
          x[k][v] = load_some<kAligned>(static_cast<const T*>(p.inp) + rows[k] + c, p.cols - c);
        }
      }
#pragma unroll
      for (int v = 0; v < kGradVecs; ++v) {
        const int64_t c = base + v * 32 * kVec;
        float gradient[kVec];
        unpack(g[v], gradient);
#pragma unroll
        for (int k = 0; k < kGradCopies; ++k) {
          if (rows[k] < 0) continue;
          float values[kVec];
          unpack(x[k][v], values);
#pragma unroll
          for (int i = 0; i < kVec; ++i) {
            dots[k] = fmaf(gradient[i], values[i], dots[k]);
            values[i] = gradient[i] * factors[k];
          }
          Vec8<T> y;
          pack(values, &y);
          store_some<kAligned>(grad_inp + rows[k] + c, y, p.cols - c);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kGradCopies; ++k) {
      if (first + k >= n) break;
      const float dot = warp_sum(dots[k]);
      const Copy copy(p, token, head.row(first + k), head.column(first + k));
      if (lane || !copy.is_used()) continue;
      if (p.grad_probs.bytes == 4)
        static_cast<float*>(p.grad_probs.to)[copy.prob] = dot;
      else
        static_cast<T*>(p.grad_probs.to)[copy.prob] = from_float<T>(dot);
    }
  }
}

template <typename T>
void launch_unpermute_fwd(const Unpermute& p, cudaStream_t stream) {
  const bool is_aligned_row = p.cols % kVec == 0 && is_aligned(p.inp, 16) && is_aligned(p.out, 16);
  const auto kernel =
      is_aligned_row ? moe_unpermute_fwd_kernel<T, true> : moe_unpermute_fwd_kernel<T, false>;
  const int64_t before = is_aligned_row ? 0 : 16 / static_cast<int64_t>(sizeof(T)) - 1;
  const int64_t pieces = p.cols ? (p.cols + before + kSumCols<T> - 1) / kSumCols<T> : 1;
  if (!p.map.tokens) return;
  if (pieces > 0x7FFFFFFF / p.map.tokens)
    fail(kApexTeUnsupported, "moe_unpermute: the matrix is too large for one launch");
  const int64_t blocks = (p.map.tokens * pieces + kSumWarps - 1) / kSumWarps;
  kernel<<<static_cast<unsigned>(blocks), kSumThreads, 0, stream>>>(p,
                                                                    static_cast<uint32_t>(pieces));
  check_cuda(cudaGetLastError(), "moe_unpermute");
}

template <typename T>
void launch_unpermute_bwd(const Unpermute& p, cudaStream_t stream) {
  const bool is_aligned_row = p.cols % kVec == 0 && is_aligned(p.inp, 16) &&
                              is_aligned(p.out, 16) && is_aligned(p.grad_output, 16);
  const auto kernel =
      is_aligned_row ? moe_unpermute_bwd_kernel<T, true> : moe_unpermute_bwd_kernel<T, false>;
  const int64_t blocks = (p.map.tokens + kRowWarps - 1) / kRowWarps;
  kernel<<<grid_of(blocks + kZeroBlocks, 1, "moe_unpermute"), kRowThreads, 0, stream>>>(p, blocks);
  check_cuda(cudaGetLastError(), "moe_unpermute");
}

}  // namespace
}  // namespace apex_te
