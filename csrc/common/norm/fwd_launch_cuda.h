// Choice of the kernel for a forward of the norms without a columnwise copy.
#pragma once

#include "common/norm/fwd_ring_cuda.h"
#include "common/norm/fwd_stream_cuda.h"

namespace apex_te {

constexpr int64_t kMinRingCols = 1024;  // shorter rows are many for the bookkeeping
constexpr int64_t kPlainCols = 8192;    // rms_norm in x's dtype: little to compute until a load
constexpr int64_t kMinStreamCols = 256;
constexpr int64_t kMaxCodeCols = 2048;  // of layer_norm to FP8, beyond which the ring is faster

// Returns true if there are enough rows for kernels of many. To x's dtype there always are: kernels
// add in different orders, and a row must have the same bits whatever the number of rows.
inline bool has_many_rows(const NormFwd& p) { return p.rows >= (p.y ? 1 : kManyRows); }

// Returns true if rows should stream through a persistent grid. With a residual enough loads are in
// flight without it.
template <bool kLayerNorm>
bool wants_norm_ring(const NormFwd& p) {
  if (p.residual || !has_many_rows(p)) return false;
  return p.cols >= (kLayerNorm || p.scale ? kMinRingCols : kPlainCols + 1);
}

// Returns true if rows should stream through blocks that hold a row instead.
template <typename T, bool kLayerNorm>
bool wants_norm_stream(const NormFwd& p) {
  if (p.residual || !has_many_rows(p) || p.cols < kMinStreamCols) return false;
  if (kLayerNorm ? !p.y && p.cols > kMaxCodeCols : !p.scale) return false;
  return stream_threads<T>(p) <= kStreamThreads;
}

inline bool norm_fwd_aligned(const NormFwd& p) {
  for (const void* q : {p.x, p.residual, p.params.weight, p.params.bias,
                        static_cast<const void*>(p.y), static_cast<const void*>(p.residual_sum)})
    if (!is_aligned(q, 16)) return false;
  return p.cols % kVec == 0 && is_aligned(p.rowwise, 8);
}

template <typename T, bool kLayerNorm>
void launch_norm_fwd_rows(const NormFwd& p, const char* op, int device, cudaStream_t stream) {
  const bool aligned = norm_fwd_aligned(p);
  if (aligned && wants_norm_stream<T, kLayerNorm>(p))
    return launch_norm_stream<T, kLayerNorm>(p, op, stream);
  if constexpr (kHasCountedBarriers) {
    RingPlan ring;
    if ((aligned ? wants_norm_ring<kLayerNorm>(p) : p.cols && has_many_rows(p)) &&
        plan_norm_ring<T, kLayerNorm>(p, !aligned, device, &ring))
      return launch_norm_ring<T, kLayerNorm>(p, ring, device, stream);
  }
  const int64_t pieces = (p.cols / kVec + kNormVecs<T> - 1) / kNormVecs<T>;
  const int64_t ranks = pieces <= kMaxNormThreads ? 1 : (pieces + kRankThreads - 1) / kRankThreads;
  const bool held = ranks <= most_norm_ranks(device);
  if (aligned && p.cols && held) {
    const int64_t threads = row_threads((pieces + ranks - 1) / ranks);
    const int64_t rows_each = threads < kNormThreads ? kNormThreads / threads : 1;
    const int64_t blocks = std::max<int64_t>((p.rows + rows_each - 1) / rows_each, 1) * ranks;
    check_grid(blocks, op);
    launch_cluster(norm_fwd_kernel<T, kLayerNorm>, blocks, static_cast<int>(threads * rows_each),
                   static_cast<int>(ranks), 0, stream, p, static_cast<int>(threads));
    return;
  }
  const int64_t blocks = std::max<int64_t>(p.rows, 1);
  check_grid(blocks, op);
  const int64_t threads = row_threads(std::max<int64_t>((p.cols + kVec - 1) / kVec, 32));
  norm_fwd_loop_kernel<T, kLayerNorm>
      <<<static_cast<unsigned>(blocks),
         static_cast<unsigned>(std::min<int64_t>(threads, kMaxNormThreads)), 0, stream>>>(p,
                                                                                          aligned);
  check_cuda(cudaGetLastError(), op);
}

}  // namespace apex_te
