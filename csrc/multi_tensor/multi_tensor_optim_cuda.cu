// CUDA kernels of multi_tensor's optimizer steps.
//
// Vectors of 4 elements: 16-byte accesses to moments and master weights, which are most of the
// bytes, and 8-byte ones to parameters and gradients of 16 bits.
#include <type_traits>

#include "multi_tensor/multi_tensor_launch.h"
#include "multi_tensor/multi_tensor_steps.h"

namespace apex_te {
namespace {

constexpr int kWidth = 4;
constexpr int kSteps = 2;  // vectors of each column that a thread has in flight
constexpr int64_t kStride = kThreads * kWidth;
constexpr int kBFloat = 2;  // bfloat16's number among a column's dtypes

template <int kBytes>
using OptimWork = Work<kNumColumns, kBytes>;

// The columns of a chunk: weights are the master's where there is one, else the parameter's.
struct Columns {
  void *param, *weight, *m, *v, *grad;
  int param_dtype, weight_dtype, grad_dtype, m_dtype, v_dtype;
  template <int kBytes>
  __device__ explicit Columns(const OptimWork<kBytes>& w)
      : param(w.data(kParam)),
        weight(w.data(kMaster) ? w.data(kMaster) : param),
        m(w.data(kExpAvg)),
        v(w.data(kExpAvgSq)),
        grad(w.data(kGrad)),
        param_dtype(w.dtype(kParam)),
        weight_dtype(w.data(kMaster) ? 0 : param_dtype),
        grad_dtype(w.dtype(kGrad)),
        m_dtype(w.dtype(kExpAvg)),
        v_dtype(w.dtype(kExpAvgSq)) {}
  // The last column is not the parameters' master weights: parameters are read.
  __device__ void read_params() {
    weight = param;
    weight_dtype = param_dtype;
  }
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

// 16 bits of each of kWidth words.
template <bool kVector>
__device__ __forceinline__ void store_halves(void* data, int64_t i, int64_t n,
                                             const uint32_t* halves) {
  uint16_t* out = static_cast<uint16_t*>(data) + i;
  if (kVector)
    *reinterpret_cast<uint2*>(out) =
        make_uint2(halves[0] | halves[1] << 16, halves[2] | halves[3] << 16);
#pragma unroll
  for (int k = 0; k < (kVector ? 0 : kWidth); ++k)
    if (k < n) out[k] = static_cast<uint16_t>(halves[k]);
}

// kUnscale: writes the unscaled gradients; in kernels of their own, which need more registers.
// kHalves: weights are the parameters and, in `low`, the rest of their bits.
template <bool kUnscale, bool kHalves>
struct AdamBody {
  Columns c;
  const Moments& moments;
  const DeviceScalars& device;
  StepScalars s;
  void* low;
  template <int kSteps, bool kVector>
  __device__ __forceinline__ void run(int64_t i, int64_t n) {
    Raw<kWidth> m[kSteps], v[kSteps], p[kSteps], g[kSteps], l[kSteps];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int64_t at = i + k * kStride;
      m[k] = load_raw<kWidth, kVector>(c.m, 0, at, n);
      v[k] = load_raw<kWidth, kVector>(c.v, 0, at, n);
      p[k] = load_raw<kWidth, kVector>(c.weight, kHalves ? kBFloat : c.weight_dtype, at, n);
      g[k] = load_raw<kWidth, kVector>(c.grad, c.grad_dtype, at, n);
      if (kHalves) l[k] = load_raw<kWidth, kVector>(low, kBFloat, at, n);
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int64_t at = i + k * kStride;
      float mv[kWidth], vv[kWidth], pv[kWidth], gv[kWidth];
      unpack(m[k], 0, mv);
      unpack(v[k], 0, vv);
      unpack(p[k], kHalves ? kBFloat : c.weight_dtype, pv);
      unpack(g[k], c.grad_dtype, gv);
      uint32_t high[kWidth], rest[kWidth];
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        if (kHalves) pv[e] = join_halves(pv[e], l[k].words[e / 2] >> 16 * (e % 2) & 0xFFFFu);
        adam_element(moments, s, gv[e], &pv[e], &mv[e], &vv[e]);
        if (kHalves) {
          const Halves halves = split_halves(pv[e]);
          high[e] = halves.high;
          rest[e] = halves.low;
        }
      }
      store_values<kWidth, kVector>(c.m, 0, at, n, mv);
      store_values<kWidth, kVector>(c.v, 0, at, n, vv);
      if (kHalves) {
        store_halves<kVector>(c.param, at, n, high);
        store_halves<kVector>(low, at, n, rest);
      } else {
        c.template store_weight<kVector>(at, n, pv);
      }
      if (kUnscale) c.template store_unscaled<kVector>(device, at, n, gv);
    }
  }
};

template <bool kUnscale, bool kHalves, int kBytes>
__global__ void __launch_bounds__(kThreads)
    multi_tensor_adam_kernel(const __grid_constant__ Table<kNumColumns, kBytes> table,
                             const __grid_constant__ Moments moments,
                             const __grid_constant__ DeviceScalars device,
                             const __grid_constant__ StepScalars host_scalars) {
  if (device.found_inf.is_set()) return;
  const OptimWork<kBytes> w(table);
  const bool on_device = device.lr || device.step || device.inv_scale;
  AdamBody<kUnscale, kHalves> body{Columns(w), moments, device,
                                   on_device ? shared_scalars(moments, device) : host_scalars,
                                   w.data(kMaster)};
  if (kHalves) body.c.read_params();
  for_chunk<kWidth, kSteps>(w.begin, w.n, w.is_aligned, body);
}

// A step of multi_tensor_steps.h.
template <bool kUnscale, typename Step>
struct StepBody {
  Columns c;
  const Step& step;
  typename Step::Scalars s;
  template <int kSteps, bool kVector>
  __device__ __forceinline__ void run(int64_t i, int64_t n) {
    Raw<kWidth> m[kSteps], p[kSteps], g[kSteps];
    const bool reads_moment = step.reads_moment();
    const int m_dtype = Step::kFloatMoments ? 0 : c.m_dtype;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int64_t at = i + k * kStride;
      m[k] = Raw<kWidth>{};
      if (reads_moment) m[k] = load_raw<kWidth, kVector>(c.m, m_dtype, at, n);
      p[k] = load_raw<kWidth, kVector>(c.weight, c.weight_dtype, at, n);
      g[k] = load_raw<kWidth, kVector>(c.grad, c.grad_dtype, at, n);
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int64_t at = i + k * kStride;
      float mv[kWidth], pv[kWidth], gv[kWidth];
      unpack(m[k], m_dtype, mv);
      unpack(p[k], c.weight_dtype, pv);
      unpack(g[k], c.grad_dtype, gv);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) step.element(s, gv[e], &pv[e], &mv[e]);
      if (step.has_moment()) store_values<kWidth, kVector>(c.m, m_dtype, at, n, mv);
      c.template store_weight<kVector>(at, n, pv);
      if (kUnscale) c.template store_unscaled<kVector>(step.device, at, n, gv);
    }
  }
};

template <bool kUnscale, typename Step, int kBytes>
__global__ void __launch_bounds__(kThreads)
    multi_tensor_step_kernel(const __grid_constant__ Table<kNumColumns, kBytes> table,
                             const __grid_constant__ Step step, int first_row) {
  if (step.device.found_inf.is_set()) return;
  const OptimWork<kBytes> w(table);
  StepBody<kUnscale, Step> body{Columns(w), step, step.scalars(first_row + w.tensor)};
  for_chunk<kWidth, kSteps>(w.begin, w.n, w.is_aligned, body);
}

// Phase 1: moments, and the squares of weights and updates for the trust ratios; or, with kStore,
// the updates themselves.
template <bool kStore>
struct LambMomentsBody {
  Columns c;
  const Moments& moments;
  const DeviceScalars& device;
  StepScalars s;
  float weight_of_grad, factor;
  void* update;
  int update_dtype;
  float sums[2];
  template <int kSteps, bool kVector>
  __device__ __forceinline__ void run(int64_t i, int64_t n) {
    const int m_dtype = kStore ? c.m_dtype : 0, v_dtype = kStore ? c.v_dtype : 0;
    Raw<kWidth> m[kSteps], v[kSteps], p[kSteps], g[kSteps];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int64_t at = i + k * kStride;
      m[k] = load_raw<kWidth, kVector>(c.m, m_dtype, at, n);
      v[k] = load_raw<kWidth, kVector>(c.v, v_dtype, at, n);
      p[k] = load_raw<kWidth, kVector>(c.weight, c.weight_dtype, at, n);
      g[k] = load_raw<kWidth, kVector>(c.grad, c.grad_dtype, at, n);
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int64_t at = i + k * kStride;
      float mv[kWidth], vv[kWidth], pv[kWidth], gv[kWidth], uv[kWidth];
      unpack(m[k], m_dtype, mv);
      unpack(v[k], v_dtype, vv);
      unpack(p[k], c.weight_dtype, pv);
      unpack(g[k], c.grad_dtype, gv);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        if (!kVector && e >= n) continue;
        lamb_moments(moments, weight_of_grad, factor, gv[e], pv[e], &mv[e], &vv[e]);
        uv[e] = lamb_update(moments, s, pv[e], mv[e], vv[e]);
        if (kStore) continue;
        sums[0] = fmaf(pv[e], pv[e], sums[0]);
        sums[1] = fmaf(uv[e], uv[e], sums[1]);
      }
      store_values<kWidth, kVector>(c.m, m_dtype, at, n, mv);
      store_values<kWidth, kVector>(c.v, v_dtype, at, n, vv);
      if (kStore)
        store_values<kWidth, kVector>(update, update_dtype, at, n, uv);
      else if (device.unscale_grads)
        c.template store_unscaled<kVector>(device, at, n, gv);
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
  LambMomentsBody<false> body{Columns(w),
                              options.moments,
                              options.device,
                              s,
                              options.weight_of_grad,
                              lamb_grad_factor(options, s),
                              nullptr,
                              0,
                              {}};
  for_chunk<kWidth, kSteps>(w.begin, w.n, w.is_aligned, body);
  store_partials(options.partials, body.sums, w, first_row, first_chunk);
}

template <int kBytes>
__global__ void __launch_bounds__(kThreads)
    multi_tensor_lamb_update_kernel(const __grid_constant__ Table<kNumColumns, kBytes> table,
                                    const __grid_constant__ LambUpdate options, int first_row) {
  if (options.device.found_inf.is_set()) return;
  const OptimWork<kBytes> w(table);
  __shared__ Moments moments;
  __shared__ StepScalars scalars;
  if (threadIdx.x == 0) {
    moments = options.moments(first_row + w.tensor);
    scalars = step_scalars(moments, options.device);
  }
  __syncthreads();
  const Moments own = moments;
  LambMomentsBody<true> body{Columns(w),
                             own,
                             options.device,
                             scalars,
                             own.one_minus_beta1,
                             scalars.inv_scale,
                             w.data(kUpdate),
                             w.dtype(kUpdate),
                             {}};
  body.c.read_params();
  for_chunk<kWidth, kSteps>(w.begin, w.n, w.is_aligned, body);
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
      for (int e = 0; e < kWidth; ++e)
        pv[e] -= step_size * lamb_update(o.moments, s, pv[e], mv[e], vv[e]);
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

template <bool kHalves>
void launch_adam(Args& args, const Adam& p) {
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  const StepScalars scalars = host_scalars(p.moments, p.device);
  const auto launch = [&](auto unscale) {
    launch_list<kNumColumns>(
        *p.rows, chunk_of(*p.rows), kPack, [&](const auto& table, unsigned blocks, int, int64_t) {
          multi_tensor_adam_kernel<decltype(unscale)::value, kHalves>
              <<<blocks, kThreads, 0, stream>>>(table, p.moments, p.device, scalars);
        });
  };
  p.device.unscale_grads ? launch(std::true_type()) : launch(std::false_type());
}

template <bool kUnscale, typename Step>
void launch_step(Args& args, const Step& p) {
  static_assert(sizeof(Step) + 16 <= kOptionBytes, "options fit beside a table");
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  launch_list<kNumColumns>(*p.rows, chunk_of(*p.rows), kPack,
                           [&](const auto& table, unsigned blocks, int first_row, int64_t) {
                             multi_tensor_step_kernel<kUnscale>
                                 <<<blocks, kThreads, 0, stream>>>(table, p, first_row);
                           });
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(multi_tensor_adam) {
  using namespace apex_te;
  launch_adam<false>(args, check_adam(args));
}

APEX_TE_DEFINE(multi_tensor_adam_halves) {
  using namespace apex_te;
  launch_adam<true>(args, check_adam_halves(args));
}

APEX_TE_DEFINE(multi_tensor_sgd) {
  using namespace apex_te;
  const Sgd p = check_sgd(args);
  p.device.unscale_grads ? launch_step<true>(args, p) : launch_step<false>(args, p);
}

APEX_TE_DEFINE(multi_tensor_adagrad) {
  using namespace apex_te;
  launch_step<false>(args, check_adagrad(args));
}

APEX_TE_DEFINE(multi_tensor_novograd) {
  using namespace apex_te;
  launch_step<false>(args, check_novograd(args));
}

APEX_TE_DEFINE(multi_tensor_lars) {
  using namespace apex_te;
  launch_step<false>(args, check_lars(args));
}

APEX_TE_DEFINE(multi_tensor_descend) {
  using namespace apex_te;
  launch_step<false>(args, check_descend(args));
}

APEX_TE_DEFINE(multi_tensor_lamb_update) {
  using namespace apex_te;
  const LambUpdate p = check_lamb_update(args);
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  launch_list<kNumColumns>(*p.rows, chunk_of(*p.rows), kPack,
                           [&](const auto& table, unsigned blocks, int first_row, int64_t) {
                             multi_tensor_lamb_update_kernel<<<blocks, kThreads, 0, stream>>>(
                                 table, p, first_row);
                           });
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
