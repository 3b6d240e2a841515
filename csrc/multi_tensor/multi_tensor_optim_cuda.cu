// CUDA kernels of multi_tensor's optimizer steps.
//
// Vectors of 4 elements: 16-byte accesses to moments and master weights, which are most of the
// bytes, and 8-byte ones to parameters and gradients of 16 bits.
#include <type_traits>

#include "multi_tensor/multi_tensor_launch.h"
#include "multi_tensor/multi_tensor_optim.h"

namespace apex_te {
namespace {

constexpr int kWidth = 4;
constexpr int kSteps = 2;  // vectors of each column that a thread has in flight
constexpr int64_t kStride = kThreads * kWidth;

template <int kBytes>
using OptimWork = Work<kNumColumns, kBytes>;

// The columns of a chunk: weights are the master's where there is one, else the parameter's.
struct Columns {
  void *param, *weight, *m, *v, *grad;
  int param_dtype, weight_dtype, grad_dtype;
  template <int kBytes>
  __device__ explicit Columns(const OptimWork<kBytes>& w)
      : param(w.data(kParam)),
        weight(w.data(kMaster) ? w.data(kMaster) : param),
        m(w.data(kExpAvg)),
        v(w.data(kExpAvgSq)),
        grad(w.data(kGrad)),
        param_dtype(w.dtype(kParam)),
        weight_dtype(w.data(kMaster) ? 0 : param_dtype),
        grad_dtype(w.dtype(kGrad)) {}
  template <bool kVector>
  __device__ __forceinline__ void store_weight(int64_t i, int64_t n, const float* values) const {
    store_values<kWidth, kVector>(param, param_dtype, i, n, values);
    if (weight != param) store_values<kWidth, kVector>(weight, 0, i, n, values);
  }
  // Writes a gradient as it was read, times inv_scale.
  template <bool kVector>
  __device__ __forceinline__ void store_unscaled(const DeviceScalars& device, int64_t i, int64_t n,
                                                 const float* grads) const {
    const float factor = *device.inv_scale;
    float values[kWidth];
#pragma unroll
    for (int e = 0; e < kWidth; ++e) values[e] = grads[e] * factor;
    store_values<kWidth, kVector>(grad, grad_dtype, i, n, values);
  }
};

// kUnscale: writes the unscaled gradients; in kernels of their own, which need more registers.
template <bool kUnscale>
struct AdamBody {
  Columns c;
  const Moments& moments;
  const DeviceScalars& device;
  StepScalars s;
  template <int kSteps, bool kVector>
  __device__ __forceinline__ void run(int64_t i, int64_t n) {
    Raw<kWidth> m[kSteps], v[kSteps], p[kSteps], g[kSteps];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int64_t at = i + k * kStride;
      m[k] = load_raw<kWidth, kVector>(c.m, 0, at, n);
      v[k] = load_raw<kWidth, kVector>(c.v, 0, at, n);
      p[k] = load_raw<kWidth, kVector>(c.weight, c.weight_dtype, at, n);
      g[k] = load_raw<kWidth, kVector>(c.grad, c.grad_dtype, at, n);
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int64_t at = i + k * kStride;
      float mv[kWidth], vv[kWidth], pv[kWidth], gv[kWidth];
      unpack(m[k], 0, mv);
      unpack(v[k], 0, vv);
      unpack(p[k], c.weight_dtype, pv);
      unpack(g[k], c.grad_dtype, gv);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) adam_element(moments, s, gv[e], &pv[e], &mv[e], &vv[e]);
      store_values<kWidth, kVector>(c.m, 0, at, n, mv);
      store_values<kWidth, kVector>(c.v, 0, at, n, vv);
      c.template store_weight<kVector>(at, n, pv);
      if (kUnscale) c.template store_unscaled<kVector>(device, at, n, gv);
    }
  }
};

template <bool kUnscale, int kBytes>
__global__ void __launch_bounds__(kThreads)
    multi_tensor_adam_kernel(const __grid_constant__ Table<kNumColumns, kBytes> table,
                             const __grid_constant__ Moments moments,
                             const __grid_constant__ DeviceScalars device,
                             const __grid_constant__ StepScalars host_scalars) {
  if (device.found_inf.is_set()) return;
  const OptimWork<kBytes> w(table);
  const bool on_device = device.lr || device.step || device.inv_scale;
  AdamBody<kUnscale> body{Columns(w), moments, device,
                          on_device ? shared_scalars(moments, device) : host_scalars};
  for_chunk<kWidth, kSteps>(w.begin, w.n, w.is_aligned, body);
}

template <bool kUnscale>
struct SgdBody {
  Columns c;
  const Sgd& o;
  float lr, inv_scale;
  template <int kSteps, bool kVector>
  __device__ __forceinline__ void run(int64_t i, int64_t n) {
    Raw<kWidth> m[kSteps], p[kSteps], g[kSteps];
    const bool reads_momentum = o.with_momentum && !o.first_step;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int64_t at = i + k * kStride;
      m[k] = Raw<kWidth>{};
      if (reads_momentum) m[k] = load_raw<kWidth, kVector>(c.m, 0, at, n);
      p[k] = load_raw<kWidth, kVector>(c.weight, c.weight_dtype, at, n);
      g[k] = load_raw<kWidth, kVector>(c.grad, c.grad_dtype, at, n);
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int64_t at = i + k * kStride;
      float mv[kWidth], pv[kWidth], gv[kWidth];
      unpack(m[k], 0, mv);
      unpack(p[k], c.weight_dtype, pv);
      unpack(g[k], c.grad_dtype, gv);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sgd_element(o, lr, inv_scale, gv[e], &pv[e], &mv[e]);
      if (o.with_momentum) store_values<kWidth, kVector>(c.m, 0, at, n, mv);
      c.template store_weight<kVector>(at, n, pv);
      if (kUnscale) c.template store_unscaled<kVector>(o.device, at, n, gv);
    }
  }
};

template <bool kUnscale, int kBytes>
__global__ void __launch_bounds__(kThreads)
    multi_tensor_sgd_kernel(const __grid_constant__ Table<kNumColumns, kBytes> table,
                            const __grid_constant__ Sgd options) {
  if (options.device.found_inf.is_set()) return;
  const OptimWork<kBytes> w(table);
  SgdBody<kUnscale> body{Columns(w), options, sgd_lr(options), sgd_inv_scale(options)};
  for_chunk<kWidth, kSteps>(w.begin, w.n, w.is_aligned, body);
}

// Phase 1: moments, and the squares of weights and updates for the trust ratios.
struct LambMomentsBody {
  Columns c;
  const Lamb& o;
  StepScalars s;
  float factor;
  float sums[2];
  template <int kSteps, bool kVector>
  __device__ __forceinline__ void run(int64_t i, int64_t n) {
    Raw<kWidth> m[kSteps], v[kSteps], p[kSteps], g[kSteps];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int64_t at = i + k * kStride;
      m[k] = load_raw<kWidth, kVector>(c.m, 0, at, n);
      v[k] = load_raw<kWidth, kVector>(c.v, 0, at, n);
      p[k] = load_raw<kWidth, kVector>(c.weight, c.weight_dtype, at, n);
      g[k] = load_raw<kWidth, kVector>(c.grad, c.grad_dtype, at, n);
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int64_t at = i + k * kStride;
      float mv[kWidth], vv[kWidth], pv[kWidth], gv[kWidth];
      unpack(m[k], 0, mv);
      unpack(v[k], 0, vv);
      unpack(p[k], c.weight_dtype, pv);
      unpack(g[k], c.grad_dtype, gv);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        if (!kVector && e >= n) continue;
        lamb_moments(o, factor, gv[e], pv[e], &mv[e], &vv[e]);
        const float u = lamb_update(o, s, pv[e], mv[e], vv[e]);
        sums[0] = fmaf(pv[e], pv[e], sums[0]);
        sums[1] = fmaf(u, u, sums[1]);
      }
      store_values<kWidth, kVector>(c.m, 0, at, n, mv);
      store_values<kWidth, kVector>(c.v, 0, at, n, vv);
      if (o.device.unscale_grads) c.template store_unscaled<kVector>(o.device, at, n, gv);
    }
  }
};

template <int kBytes>
__global__ void __launch_bounds__(kThreads)
    multi_tensor_lamb_moments_kernel(const __grid_constant__ Table<kNumColumns, kBytes> table,
                                     const __grid_constant__ Lamb options, int first_row,
                                     int64_t first_chunk) {
  if (options.device.found_inf.is_set()) return;
  const OptimWork<kBytes> w(table);
  const StepScalars s = shared_scalars(options.moments, options.device);
  LambMomentsBody body{Columns(w), options, s, lamb_grad_factor(options, s), {}};
  for_chunk<kWidth, kSteps>(w.begin, w.n, w.is_aligned, body);
  store_partials(options.partials, body.sums, w, first_row, first_chunk);
}

// Between the phases: one block a tensor turns its partial sums into its trust ratio.
__global__ void __launch_bounds__(kThreads)
    multi_tensor_lamb_ratio_kernel(const __grid_constant__ Lamb options) {
  if (options.device.found_inf.is_set()) return;
  double sums[2];
  sum_partials(options.partials, blockIdx.x, gridDim.x, sums);
  if (threadIdx.x == 0)
    options.partials.totals[blockIdx.x] =
        static_cast<double>(trust_ratio(options, sums[0], sums[1]));
}

// Phase 2: the update again, from the moments, and the step.
struct LambStepBody {
  Columns c;
  const Lamb& o;
  StepScalars s;
  float step_size;
  template <int kSteps, bool kVector>
  __device__ __forceinline__ void run(int64_t i, int64_t n) {
    Raw<kWidth> m[kSteps], v[kSteps], p[kSteps];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int64_t at = i + k * kStride;
      m[k] = load_raw<kWidth, kVector>(c.m, 0, at, n);
      v[k] = load_raw<kWidth, kVector>(c.v, 0, at, n);
      p[k] = load_raw<kWidth, kVector>(c.weight, c.weight_dtype, at, n);
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      float mv[kWidth], vv[kWidth], pv[kWidth];
      unpack(m[k], 0, mv);
      unpack(v[k], 0, vv);
      unpack(p[k], c.weight_dtype, pv);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) pv[e] -= step_size * lamb_update(o, s, pv[e], mv[e], vv[e]);
      c.template store_weight<kVector>(i + k * kStride, n, pv);
    }
  }
};

template <int kBytes>
__global__ void __launch_bounds__(kThreads)
    multi_tensor_lamb_step_kernel(const __grid_constant__ Table<kNumColumns, kBytes> table,
                                  const __grid_constant__ Lamb options, int first_row) {
  if (options.device.found_inf.is_set()) return;
  const OptimWork<kBytes> w(table);
  const StepScalars s = shared_scalars(options.moments, options.device);
  const float ratio = static_cast<float>(options.partials.totals[first_row + w.tensor]);
  LambStepBody body{Columns(w), options, s, s.lr * ratio};
  for_chunk<kWidth, kSteps>(w.begin, w.n, w.is_aligned, body);
}

constexpr auto kPack = pack_row<kNumColumns, kWidth>;
static_assert(sizeof(Lamb) + 16 <= kOptionBytes, "options fit beside a table");

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(multi_tensor_adam) {
  using namespace apex_te;
  const Adam p = check_adam(args);
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  const StepScalars scalars = host_scalars(p.moments, p.device);
  const auto launch = [&](auto unscale) {
    launch_list<kNumColumns>(
        *p.rows, chunk_of(*p.rows), kPack, [&](const auto& table, unsigned blocks, int, int64_t) {
          multi_tensor_adam_kernel<decltype(unscale)::value>
              <<<blocks, kThreads, 0, stream>>>(table, p.moments, p.device, scalars);
        });
  };
  p.device.unscale_grads ? launch(std::true_type()) : launch(std::false_type());
}

APEX_TE_DEFINE(multi_tensor_sgd) {
  using namespace apex_te;
  const Sgd p = check_sgd(args);
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  const auto launch = [&](auto unscale) {
    launch_list<kNumColumns>(*p.rows, chunk_of(*p.rows), kPack,
                             [&](const auto& table, unsigned blocks, int, int64_t) {
                               multi_tensor_sgd_kernel<decltype(unscale)::value>
                                   <<<blocks, kThreads, 0, stream>>>(table, p);
                             });
  };
  p.device.unscale_grads ? launch(std::true_type()) : launch(std::false_type());
}

APEX_TE_DEFINE(multi_tensor_lamb) {
  using namespace apex_te;
  const Lamb p = check_lamb(args);
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  if (p.rows->empty()) return;
  launch_list<kNumColumns>(
      *p.rows, p.partials.chunk, kPack,
      [&](const auto& table, unsigned blocks, int first_row, int64_t first_chunk) {
        multi_tensor_lamb_moments_kernel<<<blocks, kThreads, 0, stream>>>(table, p, first_row,
                                                                          first_chunk);
      });
  multi_tensor_lamb_ratio_kernel<<<static_cast<unsigned>(p.rows->size()), kThreads, 0, stream>>>(p);
  check_cuda(cudaGetLastError(), "multi_tensor_lamb");
  launch_list<kNumColumns>(*p.rows, p.partials.chunk, kPack,
                           [&](const auto& table, unsigned blocks, int first_row, int64_t) {
                             multi_tensor_lamb_step_kernel<<<blocks, kThreads, 0, stream>>>(
                                 table, p, first_row);
                           });
}
