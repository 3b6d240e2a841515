// moe_router on a GPU: a warp takes a token, and each lane experts_per_lane consecutive experts in
// registers. The choice is top_k maxima over the warp. Counts are added in shared memory first.
#include "common/gpu/ballot.h"
#include "common/gpu/device.h"
#include "moe_router/moe_router.h"
#include "moe_router/moe_router_lanes_cuda.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr uint32_t kNotChosen = 0xFFFFFFFFu;  // bits that arithmetic does not give, even of a NaN
template <int V>
constexpr int kWarps = V >= 16 ? 4 : 8;
// Blocks of a multiprocessor, which rows are divided among. Without it ptxas spills a register.
template <int V>
constexpr int kBlocks = V >= 8 ? 3 : 4;

// How a call is launched, and shared memory: counts of experts, then `words` of each warp.
struct Plan {
  bool is_whole, has_histogram, has_matrices;
  int words;
};

// Leaves the keys of the best groups, which are whole lanes, a power of 2 of them; others become 0.
template <int V>
__device__ __forceinline__ void limit_groups_of_lanes(const Router& p, uint32_t* keys) {
  const int lane = threadIdx.x % 32, width = p.group_size / V;
  const uint32_t own = (width == 32 ? kAllLanes : (1u << width) - 1) << lane / width * width;
  uint32_t left[V];
#pragma unroll
  for (int i = 0; i < V; ++i) left[i] = keys[i];
  float sum = 0.0f;
  for (int n = 0; n < p.group_best; ++n) {
    const uint32_t mine = largest<V>(left);
    uint32_t best = mine;
    for (int offset = 1; offset < width; offset *= 2)
      best = max(best, __shfl_xor_sync(kAllLanes, best, offset));
    if (lane == __ffs(warp_ballot(mine == best) & own) - 1) remove<V>(left, best);
    sum += value_of(best);
  }
  uint32_t key = lane * V < p.experts ? key_of(sum) : 0;
  bool is_chosen = false;
  for (int n = 0; n < p.group_topk; ++n) {
    const int winner = __ffs(warp_ballot(key == warp_max(key))) - 1;
    if (lane / width != winner / width) continue;
    is_chosen = true;
    key = 0;
  }
#pragma unroll
  for (int i = 0; i < V; ++i) keys[i] = is_chosen ? keys[i] : 0;
}

// A place in the order of descending keys, equal ones in their order.
struct Place {
  uint32_t key = 0xFFFFFFFFu;
  int at = -1;
  // Moves to the next of n keys, in all lanes.
  __device__ __forceinline__ void next(const uint32_t* keys, int n) {
    uint32_t best = 0, where = 0;
    for (int i = threadIdx.x % 32; i < n; i += 32) {
      const bool is_after = keys[i] < key || (keys[i] == key && i > at);
      if (is_after && keys[i] > best) best = keys[i], where = i;
    }
    key = warp_max(best);
    at = static_cast<int>(~warp_max(best == key ? ~where : 0));
  }
};

// The same for groups of any size, in `words` of shared memory for the keys and then the groups'.
template <int V>
__device__ __forceinline__ void limit_groups(const Router& p, uint32_t* words, uint32_t* keys) {
  const int lane = threadIdx.x % 32;
  uint32_t* groups = words + p.experts;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < V; ++i)
    if (lane * V + i < p.experts) words[lane * V + i] = keys[i];
  __syncwarp();
  for (int g = 0; g < p.num_groups; ++g) {
    Place place;
    float sum = 0.0f;
    for (int n = 0; n < p.group_best; ++n) {
      place.next(words + g * p.group_size, p.group_size);
      sum += value_of(place.key);
    }
    if (lane == 0) groups[g] = key_of(sum);
  }
  __syncwarp();
  Place place;
  for (int n = 0; n < p.group_topk; ++n) {
    place.next(groups, p.num_groups);
    if (lane == 0) groups[place.at] = 0;  // chosen, and never the next again
    __syncwarp();
  }
#pragma unroll
  for (int i = 0; i < V; ++i)
    if (lane * V + i < p.experts && groups[(lane * V + i) / p.group_size]) keys[i] = 0;
  __syncwarp();
}

// The softmax over all experts, and what it comes from.
template <int V>
struct Softmax {
  float max, sum, inverse, values[V];
  __device__ __forceinline__ Softmax(const float* x, int experts) {
    uint32_t key = 0;
#pragma unroll
    for (int i = 0; i < V; ++i)
      if (has_expert<V>(i, experts) && x[i] == x[i]) key = max_of(key, key_of(x[i]));
    max = value_of(warp_max(key));
#pragma unroll
    for (int i = 0; i < V; ++i) values[i] = has_expert<V>(i, experts) ? exp_fast(x[i] - max) : 0.0f;
    sum = sum_experts<V>(values);
    inverse = 1.0f / sum;
#pragma unroll
    for (int i = 0; i < V; ++i) values[i] *= inverse;
  }
};

// A chosen expert's value, whose sum factor_of takes, from its logit.
__device__ __forceinline__ float chosen_value(const Router& p, float x, float largest, float max,
                                              float inverse) {
  if (p.score == Score::kSoftmax) return exp_fast(x - largest);
  if (p.score == Score::kPreSoftmax) return exp_fast(x - max) * inverse;
  return score_of(p.score, x);
}

template <typename T, int V>
__device__ __forceinline__ void forward_row(const Router& p, const Plan& plan, int64_t row,
                                            uint32_t* histogram, uint32_t* words) {
  const int lane = threadIdx.x % 32, n = p.experts, k = p.top_k;
  const T* logits = static_cast<const T*>(p.logits) + row * n;
  float x[V], max = 0.0f, inverse = 0.0f;
  load_experts<V>(logits, n, plan.is_whole, x);
  uint32_t keys[V];
  {
    float scores[V];
#pragma unroll
    for (int i = 0; i < V; ++i) scores[i] = x[i];
    if (!is_softmax(p.score)) {
#pragma unroll
      for (int i = 0; i < V; ++i) scores[i] = has_expert<V>(i, n) ? score_of(p.score, x[i]) : 0.0f;
      if (p.scores) {
        const float factor = 1.0f / (sum_experts<V>(scores) + kSmallest);
        float out[V];
#pragma unroll
        for (int i = 0; i < V; ++i) out[i] = scores[i] * factor;
        store_experts<V>(out, n, plan.is_whole, p.scores + row * n);
      }
    }
    if (p.has_softmax()) {
      const Softmax<V> softmax(x, n);
      max = softmax.max, inverse = softmax.inverse;
      if (p.lse && lane == 0) p.lse[row] = max + logf(softmax.sum);
      if (p.scores && is_softmax(p.score))
        store_experts<V>(softmax.values, n, plan.is_whole, p.scores + row * n);
      if (p.score == Score::kPreSoftmax) {
#pragma unroll
        for (int i = 0; i < V; ++i) scores[i] = softmax.values[i];
      }
    }
    if (p.expert_bias) {
      float bias[V];
      load_experts<V>(p.expert_bias, n, plan.is_whole, bias);
#pragma unroll
      for (int i = 0; i < V; ++i) scores[i] += bias[i];
    }
#pragma unroll
    for (int i = 0; i < V; ++i) keys[i] = has_expert<V>(i, n) ? key_of(scores[i]) : 0;
  }
  if (p.group_topk) {
    if (has_groups_of_lanes(p, V))
      limit_groups_of_lanes<V>(p, keys);
    else
      limit_groups<V>(p, words, keys);
  }
  int32_t* index = p.index + row * k;
  int mine = 0, first = 0;  // experts of the lane's own rank of 32, and of rank 0
  uint32_t best = largest<V>(keys);
  for (int rank = 0; rank < k; ++rank) {
    const uint32_t key = warp_max(best);
    const int winner = __ffs(warp_ballot(best == key)) - 1;
    int slot = 0;
    if (lane == winner) {
      slot = remove<V>(keys, key);
      best = largest<V>(keys);
    }
    const int expert = __shfl_sync(kAllLanes, lane * V + slot, winner);
    if (rank == 0) first = expert;
    if (lane == rank % 32) mine = expert;
    if ((rank % 32 == 31 || rank + 1 == k) && lane <= rank % 32)
      index[rank / 32 * 32 + lane] = mine;
  }
  const bool has_values = p.probs || p.dense_probs;
  const float largest_x = has_values && k ? to_float(logits[first]) : 0.0f;
  // Of each lane's own ranks, which it has written itself; past the last, the first rank's. All
  // lanes go through the same loops.
  const auto expert_of = [&](int rank) { return rank >= k ? first : k <= 32 ? mine : index[rank]; };
  const auto value = [&](int expert) {
    return chosen_value(p, to_float(logits[expert]), largest_x, max, inverse);
  };
  float factor = 1.0f, own = 0.0f;
  const bool has_own = has_values && p.is_normalised();
  if (has_own) {
    float total = 0.0f;
    for (int rank = lane; rank - lane < k; rank += 32) {
      own = value(expert_of(rank));
      total += rank < k ? own : 0.0f;
    }
    factor = p.factor_of(warp_sum(total));
  }
  if (plan.has_matrices) {
    for (int e = lane; e < n; e += 32) words[e] = kNotChosen;
    __syncwarp();
  }
  for (int rank = lane; rank - lane < k; rank += 32) {
    const int expert = expert_of(rank);
    if (has_values && !(has_own && k <= 32)) own = value(expert);
    const float prob = own * factor * p.scaling_factor;
    if (rank >= k) break;
    if (p.probs) p.probs[row * k + rank] = prob;
    if (plan.has_matrices) words[expert] = float_bits(prob);
    if (plan.has_histogram)
      atomicAdd(histogram + expert, 1u);
    else if (p.counts)
      atomicAdd(p.counts_of(row) + expert, 1);
  }
  if (!plan.has_matrices) return;
  __syncwarp();
  float probs[V];
  uint8_t routes[V];
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const uint32_t word = has_expert<V>(i, n) ? words[lane * V + i] : kNotChosen;
    routes[i] = word != kNotChosen;
    probs[i] = word == kNotChosen ? 0.0f : bits_float(word);
  }
  if (p.dense_probs)
    store_experts<V>(probs, n, plan.is_whole, static_cast<T*>(p.dense_probs) + row * n);
  if (p.routing_map) store_flags<V>(routes, n, plan.is_whole, p.routing_map + row * n);
  __syncwarp();
}

template <typename T, int V>
__global__ void __launch_bounds__(32 * kWarps<V>, kBlocks<V>)
    moe_router_fwd_kernel(const Router p, const Plan plan) {
  extern __shared__ uint32_t shared[];
  const int histogram_words = plan.has_histogram ? p.experts : 0;
  for (int e = threadIdx.x; e < histogram_words; e += 32 * kWarps<V>) shared[e] = 0;
  if (plan.has_histogram) __syncthreads();
  const int warp = threadIdx.x / 32;
  uint32_t* words = shared + histogram_words + warp * plan.words;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps<V> + warp; row < p.rows;
       row += static_cast<int64_t>(gridDim.x) * kWarps<V>)
    forward_row<T, V>(p, plan, row, shared, words);
  if (!plan.has_histogram) return;
  __syncthreads();
  for (int e = threadIdx.x; e < p.experts; e += 32 * kWarps<V>)
    if (shared[e]) atomicAdd(p.counts + e, static_cast<int32_t>(shared[e]));
}

// Into `grads` in shared memory: of the chosen experts' scores or, for the softmax over them,
// logits; of others 0.
template <typename T>
__device__ __forceinline__ void chosen_grads(const Router& p, int64_t row, const T* logits,
                                             float* grads) {
  const int lane = threadIdx.x % 32, n = p.experts, k = p.top_k;
  const int32_t* index = p.index + row * k;
  for (int e = lane; e < n; e += 32) grads[e] = 0.0f;
  __syncwarp();
  if (k == 0 || (!p.grad_probs && !p.grad_dense_probs)) return;
  // A lane's own ranks: the expert, -1 for an index out of range or past the last; the value, and
  // the gradient of the prob. All lanes go through the same loops.
  struct Chosen {
    int expert;
    float value, grad;
  };
  const auto logit = [&](int e) { return e >= 0 && e < n ? to_float(logits[e]) : 0.0f; };
  const float largest_x = logit(index[0]);
  const auto chosen = [&](int rank) {
    const int e = rank < k ? index[rank] : -1;
    Chosen own = {e >= 0 && e < n ? e : -1, chosen_value(p, logit(e), largest_x, 0.0f, 1.0f), 0.0f};
    if (own.expert < 0) return Chosen{-1, 0.0f, 0.0f};
    if (p.grad_dense_probs)
      own.grad = to_float(static_cast<const T*>(p.grad_dense_probs)[row * n + e]);
    if (p.grad_probs) own.grad += p.grad_probs[row * k + rank];
    own.grad *= p.scaling_factor;
    return own;
  };
  float factor = 1.0f, dot = 0.0f;
  if (p.is_normalised()) {
    float total = 0.0f;
    for (int rank = lane; rank - lane < k; rank += 32) total += chosen(rank).value;
    factor = p.factor_of(warp_sum(total));
    for (int rank = lane; rank - lane < k; rank += 32) {
      const Chosen own = chosen(rank);
      dot += own.grad * (own.value * factor);
    }
    dot = warp_sum(dot);
  }
  for (int rank = lane; rank - lane < k; rank += 32) {
    const Chosen own = chosen(rank);
    float result = own.grad;
    if (p.is_normalised()) result = (result - dot) * factor;
    if (p.score == Score::kSoftmax) result = own.value * factor * (own.grad - dot);
    if (own.expert >= 0) grads[own.expert] = result;
  }
  __syncwarp();
}

template <typename T, int V>
__device__ __forceinline__ void backward_row(const Router& p, const Plan& plan, int64_t row,
                                             float* shared) {
  const int lane = threadIdx.x % 32, n = p.experts;
  const T* logits = static_cast<const T*>(p.logits) + row * n;
  float x[V], grads[V], of_scores[V];
  load_experts<V>(logits, n, plan.is_whole, x);
#pragma unroll
  for (int i = 0; i < V; ++i) of_scores[i] = 0.0f;
  if (p.grad_scores) load_experts<V>(p.grad_scores_of(row), n, plan.is_whole, of_scores);
  chosen_grads(p, row, logits, shared);
#pragma unroll
  for (int i = 0; i < V; ++i) grads[i] = has_expert<V>(i, n) ? shared[lane * V + i] : 0.0f;
  if (!is_softmax(p.score)) {
    float scores[V];
#pragma unroll
    for (int i = 0; i < V; ++i) scores[i] = has_expert<V>(i, n) ? score_of(p.score, x[i]) : 0.0f;
    if (p.grad_scores) {
      const float inverse = 1.0f / (sum_experts<V>(scores) + kSmallest);
      float products[V];
#pragma unroll
      for (int i = 0; i < V; ++i) products[i] = of_scores[i] * (scores[i] * inverse);
      const float dot = sum_experts<V>(products);
#pragma unroll
      for (int i = 0; i < V; ++i) grads[i] += (of_scores[i] - dot) * inverse;
    }
#pragma unroll
    for (int i = 0; i < V; ++i) grads[i] *= slope_of(p.score, x[i], scores[i]);
  }
  if (p.has_softmax()) {
    const Softmax<V> softmax(x, n);
    const bool is_pre = p.score == Score::kPreSoftmax;
    float values[V], products[V];
#pragma unroll
    for (int i = 0; i < V; ++i) {
      values[i] = is_pre ? grads[i] : 0.0f;
      if (p.grad_scores && is_softmax(p.score)) values[i] += of_scores[i];
      if (is_pre) grads[i] = 0.0f;
      products[i] = has_expert<V>(i, n) ? values[i] * softmax.values[i] : 0.0f;
    }
    const float less = (p.grad_lse ? p.grad_lse[row] : 0.0f) - sum_experts<V>(products);
#pragma unroll
    for (int i = 0; i < V; ++i) grads[i] += softmax.values[i] * (values[i] + less);
  }
  store_experts<V>(grads, n, plan.is_whole, static_cast<T*>(p.grad_logits) + row * n);
  __syncwarp();
}

template <typename T, int V>
__global__ void __launch_bounds__(32 * kWarps<V>, kBlocks<V>)
    moe_router_bwd_kernel(const Router p, const Plan plan) {
  extern __shared__ uint32_t shared[];
  const int warp = threadIdx.x / 32;
  float* words = reinterpret_cast<float*>(shared + warp * plan.words);
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps<V> + warp; row < p.rows;
       row += static_cast<int64_t>(gridDim.x) * kWarps<V>)
    backward_row<T, V>(p, plan, row, words);
}

// Calls run(V) with the number of experts of a lane.
template <typename Run>
void with_lanes(int experts, const Run& run) {
  const int each = experts_per_lane(experts);
  if (each == 1) return run(std::integral_constant<int, 1>{});
  if (each == 2) return run(std::integral_constant<int, 2>{});
  if (each == 4) return run(std::integral_constant<int, 4>{});
  if (each == 8) return run(std::integral_constant<int, 8>{});
  if (each == 16) return run(std::integral_constant<int, 16>{});
  return run(std::integral_constant<int, 32>{});
}

Plan plan_of(const Router& p) {
  Plan plan = {};
  plan.is_whole = p.experts % experts_per_lane(p.experts) == 0;
  for (const void* x :
       {p.logits, static_cast<const void*>(p.expert_bias), static_cast<const void*>(p.dense_probs),
        static_cast<const void*>(p.routing_map), static_cast<const void*>(p.scores),
        static_cast<const void*>(p.grad_scores), static_cast<const void*>(p.grad_logits)})
    plan.is_whole = plan.is_whole && is_aligned(x, 16);
  plan.has_histogram = p.counts && p.sequences == 1;
  plan.has_matrices = p.dense_probs || p.routing_map;
  if (plan.has_matrices || p.grad_logits) plan.words = p.experts;
  if (p.group_topk && !has_groups_of_lanes(p, experts_per_lane(p.experts)))
    plan.words = p.experts + p.num_groups;
  return plan;
}

template <typename T, int V>
void launch(const Args& args, const Router& p, void (*kernel)(Router, Plan)) {
  const Plan plan = plan_of(p);
  const int64_t most = device_attribute(cudaDevAttrMultiProcessorCount) * kBlocks<V>;
  const int64_t blocks = (p.rows + kWarps<V> - 1) / kWarps<V>;
  const size_t words = (plan.has_histogram ? p.experts : 0) + kWarps<V> * plan.words;
  kernel<<<static_cast<unsigned>(blocks < most ? blocks : most), 32 * kWarps<V>,
           words * sizeof(uint32_t), static_cast<cudaStream_t>(args.stream())>>>(p, plan);
  check_cuda(cudaGetLastError(), args.name());
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(moe_router_fwd) {
  using namespace apex_te;
  const Router p = check_moe_router_fwd(args);
  const DeviceGuard guard(args.device_id());
  if (p.counts)
    check_cuda(cudaMemsetAsync(p.counts, 0, sizeof(int32_t) * p.sequences * p.experts,
                               static_cast<cudaStream_t>(args.stream())),
               args.name());
  if (!p.rows) return;
  with_dtype(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    with_lanes(p.experts, [&](auto lanes) {
      constexpr int V = decltype(lanes)::value;
      launch<T, V>(args, p, moe_router_fwd_kernel<T, V>);
    });
  });
}

APEX_TE_DEFINE(moe_router_bwd) {
  using namespace apex_te;
  const Router p = check_moe_router_bwd(args);
  if (!p.rows || !p.experts) return;
  const DeviceGuard guard(args.device_id());
  with_dtype(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    with_lanes(p.experts, [&](auto lanes) {
      constexpr int V = decltype(lanes)::value;
      launch<T, V>(args, p, moe_router_bwd_kernel<T, V>);
    });
  });
}
