// CUDA kernels of multi_tensor: reductions (amax, l2norm) and maps (scale, axpby, quantize).
//
// A block works on one chunk of one tensor, with the dtypes of that tensor: a list may mix them.
#include "multi_tensor/multi_tensor_launch.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int kLoads = 8;     // 16-byte loads that a thread of a reduction has in flight
constexpr int kMapSteps = 4;  // vectors that a thread of a map has in flight

struct AmaxFold {
  uint32_t found = 0;
  template <typename T>
  __device__ __forceinline__ void add(const Vec8<T>& v) {
    fold_amax(v, found);
  }
};
struct SquareFold {
  float sums[kVec] = {};
  template <typename T>
  __device__ __forceinline__ void add(const Vec8<T>& v) {
    float values[kVec];
    unpack(v, values);
#pragma unroll
    for (int k = 0; k < kVec; ++k) sums[k] = fmaf(values[k], values[k], sums[k]);
  }
};

template <typename T, typename Fold>
struct FoldBody {
  const T* x;
  Fold& fold;
  template <int kSteps, bool kVector>
  __device__ __forceinline__ void run(int64_t i, int64_t n) {
    Vec8<T> in[kSteps];
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
      in[k] = kVector ? load_vec(x + i + k * kThreads * kVec) : load_partial(x + i, n);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) fold.add(in[k]);
  }
};

template <typename T, typename Fold, typename Work>
__device__ __forceinline__ void fold_chunk(const Work& w, Fold& fold) {
  FoldBody<T, Fold> body{w.template data<const T>(0), fold};
  for_chunk<kVec, kLoads * 2 / sizeof(T)>(w.begin, w.n, w.is_aligned, body);
}

template <int kBytes>
__global__ void __launch_bounds__(kThreads)
    multi_tensor_amax_kernel(const __grid_constant__ Table<1, kBytes> table, float* amaxes) {
  __shared__ uint32_t warps[kThreads / 32];
  const Work<1, kBytes> w(table);
  const uint32_t seen = amax_so_far(amaxes + w.tensor);
  AmaxFold fold;
  uint32_t amax;
  if (w.dtype(0) == 0) {
    fold_chunk<float>(w, fold);
    amax = amax_bits(0.0f, fold.found);
  } else if (w.dtype(0) == 1) {
    fold_chunk<Half>(w, fold);
    amax = amax_bits(Half{}, fold.found);
  } else {
    fold_chunk<BFloat16>(w, fold);
    amax = amax_bits(BFloat16{}, fold.found);
  }
  stage_amax(amax, warps);
  __syncthreads();
  finish_amax<kThreads>(amaxes + w.tensor, seen, warps);
}

template <int kBytes>
__global__ void __launch_bounds__(kThreads)
    multi_tensor_l2norm_kernel(const __grid_constant__ Table<1, kBytes> table, const Partials p,
                               int first_row, int64_t first_chunk) {
  const Work<1, kBytes> w(table);
  SquareFold fold;
  if (w.dtype(0) == 0)
    fold_chunk<float>(w, fold);
  else if (w.dtype(0) == 1)
    fold_chunk<Half>(w, fold);
  else
    fold_chunk<BFloat16>(w, fold);
  float sum[1] = {((fold.sums[0] + fold.sums[1]) + (fold.sums[2] + fold.sums[3])) +
                  ((fold.sums[4] + fold.sums[5]) + (fold.sums[6] + fold.sums[7]))};
  store_partials(p, sum, w, first_row, first_chunk);
}

// One block a tensor; the block that ends last adds the tensors up, in the list's order.
__global__ void __launch_bounds__(kThreads)
    multi_tensor_l2norm_finish_kernel(const Partials p, float* total, float* norms) {
  __shared__ bool is_last;
  const int row = blockIdx.x, num_rows = gridDim.x;
  double sum[1];
  sum_partials(p, row, num_rows, sum);
  if (threadIdx.x == 0) {
    p.totals[row] = sum[0];
    if (norms) norms[row] = static_cast<float>(sqrt(sum[0]));
    __threadfence();
    is_last = atomicAdd(p.counter, 1u) == static_cast<unsigned>(num_rows - 1);
  }
  __syncthreads();
  if (!is_last) return;
  __shared__ double threads[kThreads];
  __threadfence();
  double all = 0.0;
  for (int i = threadIdx.x; i < num_rows; i += kThreads) all += __ldcg(p.totals + i);
  threads[threadIdx.x] = all;
  for (int half = kThreads / 2; half; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) threads[threadIdx.x] += threads[threadIdx.x + half];
  }
  if (threadIdx.x == 0) *total = static_cast<float>(sqrt(threads[0]));
}

struct ScaleBody {
  const void* in;
  void* out;
  int in_dtype, out_dtype;
  float factor;
  uint32_t amax;
  template <int kSteps, bool kVector>
  __device__ __forceinline__ void run(int64_t i, int64_t n) {
    Raw<kVec> raw[kSteps];
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
      raw[k] = load_raw<kVec, kVector>(in, in_dtype, i + k * kThreads * kVec, n);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      float values[kVec];
      unpack(raw[k], in_dtype, values);
#pragma unroll
      for (int e = 0; e < kVec; ++e) values[e] *= factor;
      // Elements behind the end were loaded as zero, but 0 * infinity is NaN.
      if (!kVector && n < kVec)
#pragma unroll
        for (int e = 0; e < kVec; ++e) values[e] = e < n ? values[e] : 0.0f;
      fold_amax(values, amax);
      store_values<kVec, kVector>(out, out_dtype, i + k * kThreads * kVec, n, values);
    }
  }
};

// Several threads may store the same value.
__device__ __forceinline__ void raise_flag(const Flag& flag, bool found) {
  if (found && flag.bits) *flag.bits = flag.one;
}

template <int kBytes>
__global__ void __launch_bounds__(kThreads)
    multi_tensor_scale_kernel(const __grid_constant__ Table<2, kBytes> table, float factor,
                              const float* factor_tensor, const Flag found_inf) {
  const Work<2, kBytes> w(table);
  if (factor_tensor) factor *= *factor_tensor;
  ScaleBody body{w.data(0), w.data(1), w.dtype(0), w.dtype(1), factor, 0};
  for_chunk<kVec, kMapSteps>(w.begin, w.n, w.is_aligned, body);
  raise_flag(found_inf, body.amax >= overflow_bits(body.out_dtype));
}

struct AxpbyBody {
  const void *x, *y;
  void* out;
  int x_dtype, y_dtype, out_dtype;
  float a, b;
  int check;
  uint32_t amax;
  template <int kSteps, bool kVector>
  __device__ __forceinline__ void run(int64_t i, int64_t n) {
    Raw<kVec> xs[kSteps], ys[kSteps];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      xs[k] = load_raw<kVec, kVector>(x, x_dtype, i + k * kThreads * kVec, n);
      ys[k] = load_raw<kVec, kVector>(y, y_dtype, i + k * kThreads * kVec, n);
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      float xv[kVec], yv[kVec], values[kVec];
      unpack(xs[k], x_dtype, xv);
      unpack(ys[k], y_dtype, yv);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        values[e] = kVector || e < n ? a * xv[e] + b * yv[e] : 0.0f;
        const float checked = check == kCheckResult ? values[e] : check == kCheckX ? xv[e] : yv[e];
        amax = max(amax, magnitude_bits(checked));
      }
      store_values<kVec, kVector>(out, out_dtype, i + k * kThreads * kVec, n, values);
    }
  }
};

template <int kBytes>
__global__ void __launch_bounds__(kThreads)
    multi_tensor_axpby_kernel(const __grid_constant__ Table<3, kBytes> table, float a, float b,
                              int check, const Flag found_inf) {
  const Work<3, kBytes> w(table);
  AxpbyBody body{w.data(0),  w.data(1), w.data(2), w.dtype(0), w.dtype(1),
                 w.dtype(2), a,         b,         check,      0};
  for_chunk<kVec, kMapSteps / 2>(w.begin, w.n, w.is_aligned, body);
  raise_flag(found_inf, body.amax >= overflow_bits(check == kCheckResult ? body.out_dtype : 0));
}

struct QuantizeBody {
  const void* in;
  uint8_t* out;
  int dtype;
  bool is_e5m2;
  float scale;
  uint32_t amax;
  template <int kSteps, bool kVector>
  __device__ __forceinline__ void run(int64_t i, int64_t n) {
    Raw<kVec> raw[kSteps];
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
      raw[k] = load_raw<kVec, kVector>(in, dtype, i + k * kThreads * kVec, n);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      float values[kVec];
      unpack(raw[k], dtype, values);
      fold_amax(values, amax);
      const uint2 codes =
          is_e5m2 ? encode_values<E5M2>(values, scale) : encode_values<E4M3>(values, scale);
      if (kVector)
        *reinterpret_cast<uint2*>(out + i + k * kThreads * kVec) = codes;
      else
        store_codes_partial(out + i, codes, n);
    }
  }
};

template <int kBytes>
__global__ void __launch_bounds__(kThreads)
    multi_tensor_quantize_kernel(const __grid_constant__ Table<5, kBytes> table) {
  __shared__ uint32_t warps[kThreads / 32];
  const Work<5, kBytes> w(table);
  const float scale = *w.template data<const float>(2);
  float* amax = w.template data<float>(3);
  const uint32_t seen = amax_so_far(amax);
  QuantizeBody body{w.data(0), w.template data<uint8_t>(1), w.dtype(0), w.dtype(1) == 1, scale, 0};
  for_chunk<kVec, kMapSteps>(w.begin, w.n, w.is_aligned, body);
  stage_amax(body.amax, warps);
  __syncthreads();
  finish_amax<kThreads>(amax, seen, warps);
  float* scale_inv = w.template data<float>(4);
  if (scale_inv && w.is_first_chunk() && threadIdx.x == 0) *scale_inv = 1.0f / scale;
}

uint64_t pack_quantize(const Row& row) {
  const bool aligned = is_aligned(row.data[0], 16) && is_aligned(row.data[1], 8);
  return row.dtypes | (aligned ? 1u << 15 : 0u);
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(multi_tensor_amax) {
  using namespace apex_te;
  const Amax p = check_amax(args);
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  launch_list<1>(*p.rows, chunk_of(*p.rows), pack_row<1, kVec>,
                 [&](const auto& table, unsigned blocks, int first_row, int64_t) {
                   multi_tensor_amax_kernel<<<blocks, kThreads, 0, stream>>>(table,
                                                                             p.amax + first_row);
                 });
}

APEX_TE_DEFINE(multi_tensor_l2norm) {
  using namespace apex_te;
  const L2Norm p = check_l2norm(args);
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  if (p.rows->empty())
    return check_cuda(cudaMemsetAsync(p.total, 0, sizeof(float), stream), "multi_tensor_l2norm");
  launch_list<1>(*p.rows, p.partials.chunk, pack_row<1, kVec>,
                 [&](const auto& table, unsigned blocks, int first_row, int64_t first_chunk) {
                   multi_tensor_l2norm_kernel<<<blocks, kThreads, 0, stream>>>(
                       table, p.partials, first_row, first_chunk);
                 });
  multi_tensor_l2norm_finish_kernel<<<static_cast<unsigned>(p.rows->size()), kThreads, 0, stream>>>(
      p.partials, p.total, p.norms);
  check_cuda(cudaGetLastError(), "multi_tensor_l2norm");
}

APEX_TE_DEFINE(multi_tensor_scale) {
  using namespace apex_te;
  const Scale p = check_scale(args);
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  launch_list<2>(*p.rows, chunk_of(*p.rows), pack_row<2, kVec>,
                 [&](const auto& table, unsigned blocks, int, int64_t) {
                   multi_tensor_scale_kernel<<<blocks, kThreads, 0, stream>>>(
                       table, p.factor, p.factor_tensor, p.found_inf);
                 });
}

APEX_TE_DEFINE(multi_tensor_axpby) {
  using namespace apex_te;
  const Axpby p = check_axpby(args);
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  launch_list<3>(*p.rows, chunk_of(*p.rows), pack_row<3, kVec>,
                 [&](const auto& table, unsigned blocks, int, int64_t) {
                   multi_tensor_axpby_kernel<<<blocks, kThreads, 0, stream>>>(table, p.a, p.b,
                                                                              p.check, p.found_inf);
                 });
}

APEX_TE_DEFINE(multi_tensor_quantize) {
  using namespace apex_te;
  const Rows& rows = check_quantize(args);
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  launch_list<5>(rows, chunk_of(rows), pack_quantize,
                 [&](const auto& table, unsigned blocks, int, int64_t) {
                   multi_tensor_quantize_kernel<<<blocks, kThreads, 0, stream>>>(table);
                 });
}
