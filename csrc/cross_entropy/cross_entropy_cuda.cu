// CUDA kernels of cross_entropy.
//
// A short row stays in the registers of a block between the reduction and the gradient. A longer
// one goes to shared memory as it is read; several blocks share a multiprocessor, so that some read
// while others write. Rows that only one block could hold (about 50,000 bf16 logits and more) take
// the ring of cross_entropy_ring.h. What does not fit in shared memory is read twice, soon enough
// to be still in L2. The gradient from known statistics needs no row at once: persistent blocks
// take pieces of rows.
#include "common/gpu/dependent_launch.h"
#include "common/numerics/with_dtype.h"
#include "cross_entropy/cross_entropy_ring.h"
#include "cross_entropy/cross_entropy_row.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

// Rows of a block of the kernel of short rows: a multiprocessor has no more than 32 blocks.
template <int kThreads>
constexpr int kBlockRows = kThreads == 32 ? 4 : 1;
// Threads of a multiprocessor, at least, which bounds their registers.
template <typename T, bool kGrad>
constexpr int kThreadsOfSM = kGrad || sizeof(T) == 4 ? 1024 : 1536;

// A row of at most kThreads * kVecs vectors; the gradient, if wanted, is aligned as the logits are.
template <typename T, int kThreads, int kVecs, bool kGrad>
__global__ void __launch_bounds__(kThreads* kBlockRows<kThreads>,
                                  kThreadsOfSM<T, kGrad> / kThreads / kBlockRows<kThreads>)
    cross_entropy_fwd_short_kernel(const Params p) {
  __shared__ BlockScratch<kThreads> scratch;
  const int64_t r = blockIdx.x * int64_t{kBlockRows<kThreads>} + threadIdx.y;
  wait_for_previous_kernel();
  if (kBlockRows<kThreads> > 1 && r >= p.rows) return;
  const int64_t target = p.target[r];
  const Row<T> row(p.logits, r, p.cols);
  const int end = row.num_vecs;
  Vec8<T> in[kVecs];
#pragma unroll
  for (int k = 0; k < kVecs; ++k)
    in[k] = load_or_neutral(row.data + row.head, static_cast<int>(threadIdx.x) + k * kThreads, end);
  const int32_t num_valid = num_valid_of(p);
  asm volatile("" ::: "memory");  // loads stay ahead: waiting for the target first takes 8% longer
  if (target == p.target.ignore_index) return clear_row<T>(p, r, kThreads);
  const int edge = row.edge_col();
  const float edge_logit = edge >= 0 ? row.at(edge) : -INFINITY;
  const float target_logit = threadIdx.x == 0 ? target_logit_of(row, target) : 0.0f;
  float max = fmaxf(edge_logit, -FLT_MAX);
#pragma unroll
  for (int k = 0; k < kVecs; ++k) max = fmaxf(max, max_of(in[k]));
  Stats stats{block_max(max, scratch), 0.0f, 0.0f};
  stats.exp_sum = fast_exp(edge_logit - stats.max);
#pragma unroll
  for (int k = 0; k < kVecs; ++k) {
    if (k * kThreads >= end) break;
    add_exps(in[k], stats);
  }
  const uint32_t zero = hidden_zero(p);
  const bool with_sum = p.label_smoothing != 0.0f;
  if (with_sum) {
    if (edge >= 0) stats.sum = edge_logit;
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      read_anew(in[k], zero);
      if (threadIdx.x + k * kThreads < end) stats.sum += sum_of(in[k]);
    }
  }
  const RowGrad g = finish_row(p, r, target, target_logit, block_sum(stats, with_sum, scratch),
                               grad_factor(num_valid), threadIdx.x == 0);
  if (!kGrad) return;
  T* grad = static_cast<T*>(p.grad) + r * p.cols;
#pragma unroll
  for (int k = 0; k < kVecs; ++k) {
    const int i = threadIdx.x + k * kThreads;
    if (k * kThreads >= end) break;
    read_anew(in[k], zero);
    if (i < end) store_grad<T, true>(grad, row.col(i), in[k], g);
  }
  if (edge >= 0) store_edge_grad(grad, edge, edge_logit, g);
}

// A row of any length, of which the first `kept` vectors stay in shared memory.
template <typename T, int kThreads, bool kVectors>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_fwd_loop_kernel(const Params p, const int kept) {
  constexpr int kSteps = (kThreads <= 256 ? 8 : 4) * 2 / sizeof(T);
  extern __shared__ __align__(16) unsigned char chunks[];
  T* const kept_row = reinterpret_cast<T*>(chunks);
  __shared__ BlockScratch<kThreads> scratch;
  wait_for_previous_kernel();
  const int64_t r = blockIdx.x, target = p.target[r];
  if (target == p.target.ignore_index) return clear_row<T>(p, r, kThreads);
  const Row<T> row(p.logits, r, p.cols);
  const int end = row.num_vecs, edge = row.edge_col();
  const float edge_logit = edge >= 0 ? row.at(edge) : -INFINITY;
  const float target_logit = threadIdx.x == 0 ? target_logit_of(row, target) : 0.0f;
  const bool with_sum = p.label_smoothing != 0.0f;
  const int32_t num_valid = num_valid_of(p);
  Stats stats{-FLT_MAX, 0.0f, 0.0f};
  for (int begin = threadIdx.x; begin < end; begin += kThreads * kSteps) {
    Vec8<T> in[kSteps];
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
      in[k] = load_or_neutral(row.data + row.head, begin + k * kThreads, end);
    float max = stats.max;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) max = fmaxf(max, max_of(in[k]));
    stats.raise(max);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int i = begin + k * kThreads;
      if (i - static_cast<int>(threadIdx.x) >= end) break;
      if (p.grad && i < min(end, kept)) store_vec(kept_row + i * kVec, in[k]);
      add_exps(in[k], stats);
      if (with_sum && i < end) stats.sum += sum_of(in[k]);
    }
  }
  if (edge >= 0) {
    stats.raise(fmaxf(stats.max, edge_logit));
    stats.exp_sum += fast_exp(edge_logit - stats.max);
    stats.sum += edge_logit;
  }
  stats.raise(block_max(stats.max, scratch));
  const RowGrad g = finish_row(p, r, target, target_logit, block_sum(stats, with_sum, scratch),
                               grad_factor(num_valid), threadIdx.x == 0);
  if (!p.grad) return;
  T* grad = static_cast<T*>(p.grad) + r * p.cols;
  // Each thread finds the vectors it kept itself, so no barrier is due. What was read last comes
  // first: it is the likeliest to be still in L2.
  const int first = static_cast<int>(threadIdx.x);
  const int last = (end - 1 - first) / kThreads * kThreads + first;
  for (int begin = last; begin >= kept && first < end; begin -= kThreads * kSteps) {
    Vec8<T> in[kSteps];
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
      if (begin - k * kThreads >= kept)
        in[k] = load_or_neutral(row.data + row.head, begin - k * kThreads, end);
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
      if (begin - k * kThreads >= kept)
        store_grad<T, kVectors>(grad, row.col(begin - k * kThreads), in[k], g);
  }
#pragma unroll 2
  for (int i = threadIdx.x; i < min(end, kept); i += kThreads)
    store_grad<T, kVectors>(grad, row.col(i), load_vec(kept_row + i * kVec), g);
  if (edge >= 0) store_edge_grad(grad, edge, edge_logit, g);
}

// Shared memory for a row, in vectors, at most what a block of the device may have.
template <typename T, int kThreads, bool kVectors>
void launch_loop(const Params& p, cudaStream_t stream) {
  const auto kernel = cross_entropy_fwd_loop_kernel<T, kThreads, kVectors>;
  constexpr int kVecBytes = kVec * sizeof(T), kReserved = 1024;  // for the statistics
  const int64_t wanted = p.grad ? p.cols / kVec * kVecBytes : 0;
  const int64_t allowed = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - kReserved;
  const int kept = static_cast<int>(min(wanted, allowed)) / kVecBytes;
  allow_shared(reinterpret_cast<const void*>(kernel));
  launch_dependent_shared(kernel, p.rows, kThreads, kept * kVecBytes, stream, p, kept);
}

template <typename T, int kThreads>
void launch_short(const Params& p, cudaStream_t stream) {
  constexpr int kRows = kBlockRows<kThreads>;
  launch_dependent_grid(p.grad ? cross_entropy_fwd_short_kernel<T, kThreads, 4, true>
                               : cross_entropy_fwd_short_kernel<T, kThreads, 4, false>,
                        dim3(static_cast<unsigned>((p.rows + kRows - 1) / kRows)),
                        dim3(kThreads, kRows), 0, stream, p);
}

template <typename T>
void launch_fwd(const Params& p, cudaStream_t stream) {
  if (!p.rows) return;
  const int64_t vecs = p.cols / kVec, bytes = p.cols * sizeof(T);
  const auto offset = reinterpret_cast<uintptr_t>(p.logits) - reinterpret_cast<uintptr_t>(p.grad);
  if (p.grad && offset % (kVec * sizeof(T)))
    launch_loop<T, 512, false>(p, stream);
  else if (vecs <= 128)  // a warp's row needs no barrier
    launch_short<T, 32>(p, stream);
  else if (vecs <= 256)
    launch_short<T, 64>(p, stream);
  else if (vecs <= 512)
    launch_short<T, 128>(p, stream);
  else if (bytes <= 24 << 10)
    launch_loop<T, 128, true>(p, stream);
  else if (bytes <= 72 << 10)
    launch_loop<T, 256, true>(p, stream);
  else if (bytes <= 112 << 10)
    launch_loop<T, 512, true>(p, stream);
  else if (!launch_ring<T>(p, stream))
    launch_loop<T, 1024, true>(p, stream);
  check_cuda(cudaGetLastError(), "cross_entropy_fwd");
}

constexpr int kSumThreads = 1024;
constexpr int64_t kCountRows = 16384;  // of a block, about

// The sum over a block of one value a thread, in a fixed order.
template <typename V>
__device__ __forceinline__ V sum_of_block(V value, V* shared) {
#pragma unroll
  for (int offset = 16; offset; offset /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, offset);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  V total = 0;
  for (int w = 0; w < kSumThreads / 32; ++w) total += shared[w];
  return total;
}

__global__ void __launch_bounds__(kSumThreads)
    cross_entropy_count_kernel(const Targets target, int32_t* num_valid) {
  let_next_kernel_start();
  __shared__ int32_t warps[kSumThreads / 32];
  int32_t count = 0;
  const int64_t step = int64_t{gridDim.x} * kSumThreads;
#pragma unroll 8
  for (int64_t i = int64_t{blockIdx.x} * kSumThreads + threadIdx.x; i < target.rows; i += step)
    count += target[i] != target.ignore_index;
  count = sum_of_block(count, warps);
  if (threadIdx.x != 0) return;
  if (gridDim.x == 1)
    *num_valid = count;
  else
    atomicAdd(num_valid, count);
}

__global__ void __launch_bounds__(kSumThreads) cross_entropy_sum_kernel(const CrossEntropySum p) {
  __shared__ double warps[kSumThreads / 32];
  double sum = 0.0;
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < p.rows; i += kSumThreads) sum += p.loss[i];
  sum = sum_of_block(sum, warps);
  if (threadIdx.x == 0) *p.total = static_cast<float>(p.num_valid ? sum / *p.num_valid : sum);
}

constexpr int kBwdThreads = 128, kBwdBlocks = 8;  // blocks a multiprocessor

// Vectors of a row that a block takes at once.
template <typename T>
constexpr int kPiece = kBwdThreads * 8 / static_cast<int>(sizeof(T));

// kVectors: the gradient is aligned as the logits are, which it may overwrite. kRows: rows that a
// block takes at once, of a vector a thread, or 1.
template <typename T, bool kVectors, int kRows>
__global__ void __launch_bounds__(kBwdThreads, kBwdBlocks)
    cross_entropy_bwd_kernel(const Params p, const GradOutput grad_output, const int pieces) {
  constexpr int kSteps = kPiece<T> / kBwdThreads / kRows;  // vectors of a row
  if (grad_output.made && *grad_output.data == 1.0f) return;
  const int32_t num_valid = num_valid_of(p);
  const int64_t groups = (p.rows + kRows - 1) / kRows * pieces;
  for (int64_t i = blockIdx.x; i < groups; i += gridDim.x) {
    const int64_t group = pieces == 1 ? i : i / pieces;
    const int64_t r0 = group * kRows;
    const int piece = static_cast<int>(i - group * pieces);
    const int first = piece * kPiece<T> + static_cast<int>(threadIdx.x);
    Vec8<T> in[kRows][kSteps];
    int64_t target[kRows];
    float2 stats[kRows];
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      const int64_t r = r0 + n < p.rows ? r0 + n : p.rows - 1;  // what exists
      const Row<T> row(p.logits, r, p.cols);
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
        in[n][k] = load_or_neutral(row.data + row.head, first + k * kBwdThreads, row.num_vecs);
      target[n] = p.target[r];
      stats[n] = p.stats[r];
    }
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      const int64_t r = r0 + n;
      if (r >= p.rows) break;
      const Row<T> row(p.logits, r, p.cols);
      T* grad = static_cast<T*>(p.grad) + r * p.cols;
      const int edge = piece == 0 ? row.edge_col() : -1;
      float edge_logit = edge >= 0 ? row.at(edge) : -INFINITY;
      RowGrad g{0.0f, 0.0f, 0.0f, 0.0f, -1};  // of neutral logits: 0
      if (target[n] != p.target.ignore_index) {
        g = row_grad(p, target[n], stats[n].x, stats[n].y, grad_factor(num_valid, grad_output[r]));
      } else {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) in[n][k] = load_or_neutral(row.data, 0, 0);
        edge_logit = -INFINITY;
      }
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const int v = first + k * kBwdThreads;
        if (v < row.num_vecs) store_grad<T, kVectors>(grad, row.col(v), in[n][k], g);
      }
      if (edge >= 0) store_edge_grad(grad, edge, edge_logit, g);
    }
  }
}

template <typename T, bool kVectors, int kRows>
void launch_bwd_rows(const Params& p, const GradOutput& grad_output, cudaStream_t stream) {
  const int64_t vecs = p.cols / kVec;
  const int pieces = static_cast<int>(max(int64_t{1}, (vecs + kPiece<T> - 1) / kPiece<T>));
  const int64_t at_once = device_attribute(cudaDevAttrMultiProcessorCount) * kBwdBlocks;
  const int64_t groups = (p.rows + kRows - 1) / kRows * pieces;
  cross_entropy_bwd_kernel<T, kVectors, kRows>
      <<<static_cast<unsigned>(min(groups, at_once)), kBwdThreads, 0, stream>>>(p, grad_output,
                                                                                pieces);
}

template <typename T>
void launch_bwd(const Params& p, const GradOutput& grad_output, cudaStream_t stream) {
  if (!p.rows) return;
  const auto offset = reinterpret_cast<uintptr_t>(p.logits) - reinterpret_cast<uintptr_t>(p.grad);
  if (offset % (kVec * sizeof(T)))
    launch_bwd_rows<T, false, 1>(p, grad_output, stream);
  else if (p.cols / kVec <= kBwdThreads)
    launch_bwd_rows<T, true, kPiece<T> / kBwdThreads>(p, grad_output, stream);
  else
    launch_bwd_rows<T, true, 1>(p, grad_output, stream);
  check_cuda(cudaGetLastError(), "cross_entropy_bwd");
}

template <typename T>
__global__ void __launch_bounds__(256) cross_entropy_scale_kernel(const CrossEntropyScale p) {
  if (p.is_kept()) return;
  const float factor = *p.grad_output;
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
    if (p.is_kept(r)) continue;
    const Row<T> row(p.grad, r, p.cols);
    for (int i = threadIdx.x; i < row.num_vecs; i += blockDim.x) {
      T* at = row.data + row.col(i);
      float values[kVec];
      unpack(load_vec(at), values);
#pragma unroll
      for (int k = 0; k < kVec; ++k) values[k] *= factor;
      Vec8<T> v;
      pack(values, &v);
      store_vec(at, v);
    }
    const int edge = row.edge_col();
    if (edge >= 0) row.data[edge] = from_float<T>(row.at(edge) * factor);
  }
}

template <typename T>
void launch_scale(const CrossEntropyScale& p, cudaStream_t stream) {
  if (!p.rows || !p.cols) return;
  const int64_t at_once = device_attribute(cudaDevAttrMultiProcessorCount) * 8;
  cross_entropy_scale_kernel<T><<<static_cast<unsigned>(min(p.rows, at_once)), 256, 0, stream>>>(p);
  check_cuda(cudaGetLastError(), "cross_entropy_scale");
}

Params params_of(const CrossEntropy& c) {
  return Params{c.logits.data<void>(),
                c.grad.data<void>(),
                c.rows,
                c.cols,
                c.target,
                c.loss,
                reinterpret_cast<float2*>(c.stats),
                c.num_valid,
                c.label_smoothing};
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(cross_entropy_fwd) {
  using namespace apex_te;
  const CrossEntropy c = check_cross_entropy_fwd(args);
  const DeviceGuard guard(args.device_id());
  const Params p = params_of(c);
  const auto stream = static_cast<cudaStream_t>(args.stream());
  with_dtype(c.logits.dtype(), [&](auto zero) { launch_fwd<decltype(zero)>(p, stream); });
}

APEX_TE_DEFINE(cross_entropy_count) {
  using namespace apex_te;
  const CrossEntropyCount p = check_cross_entropy_count(args);
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  const auto blocks = static_cast<unsigned>(min(int64_t{32}, p.target.rows / kCountRows + 1));
  if (blocks > 1)
    check_cuda(cudaMemsetAsync(p.num_valid, 0, sizeof(int32_t), stream), "cross_entropy_count");
  cross_entropy_count_kernel<<<blocks, kSumThreads, 0, stream>>>(p.target, p.num_valid);
  check_cuda(cudaGetLastError(), "cross_entropy_count");
}

APEX_TE_DEFINE(cross_entropy_sum) {
  using namespace apex_te;
  const CrossEntropySum p = check_cross_entropy_sum(args);
  const DeviceGuard guard(args.device_id());
  cross_entropy_sum_kernel<<<1, kSumThreads, 0, static_cast<cudaStream_t>(args.stream())>>>(p);
  check_cuda(cudaGetLastError(), "cross_entropy_sum");
}

APEX_TE_DEFINE(cross_entropy_bwd) {
  using namespace apex_te;
  const CrossEntropyBwd c = check_cross_entropy_bwd(args);
  const DeviceGuard guard(args.device_id());
  const Params p = params_of(c);
  const auto stream = static_cast<cudaStream_t>(args.stream());
  with_dtype(c.logits.dtype(),
             [&](auto zero) { launch_bwd<decltype(zero)>(p, c.grad_output, stream); });
}

APEX_TE_DEFINE(cross_entropy_scale) {
  using namespace apex_te;
  const CrossEntropyScale p = check_cross_entropy_scale(args);
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  with_dtype(p.dtype, [&](auto zero) { launch_scale<decltype(zero)>(p, stream); });
}
