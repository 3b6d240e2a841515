// CUDA kernels of peer_exchange. The copies are the copy engines'; a kernel of one thread sets a
// flag, and one of a thread for each rank waits.
#include <cassert>

#include "common/gpu/vec.h"
#include "common/numerics/with_dtype.h"
#include "peer_exchange/peer_exchange.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int kSumThreads = 256;
constexpr int kSumBlocksPerSM = 8;

__device__ __forceinline__ uint64_t global_ns() {
#if defined(__HIP_PLATFORM_AMD__)
  return static_cast<uint64_t>(__clock64());  // cycles: a longer timeout
#else
  uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
#endif
}

__device__ __forceinline__ void pause() {
#if defined(__HIP_PLATFORM_AMD__)
  __builtin_amdgcn_s_sleep(2);
#else
  __nanosleep(100);
#endif
}

__global__ void peer_flag_kernel(uint32_t* flag, uint32_t number) {
  __threadfence_system();
  *reinterpret_cast<volatile uint32_t*>(flag) = number;
}

// Until the rank's bytes of exchange `number` are there; what is read after it is not older.
__device__ __forceinline__ void await_flag(const uint32_t* flag, uint32_t number,
                                           uint64_t timeout_ns) {
  const auto arrived = [&] {
    return static_cast<int32_t>(*reinterpret_cast<const volatile uint32_t*>(flag) - number) >= 0;
  };
  if (!arrived()) {
    const uint64_t begin = global_ns();
    while (!arrived()) {
      if (global_ns() - begin > timeout_ns)
        __assert_fail("a rank of the group sent nothing within its timeout", "peer_exchange", 0,
                      "peer_await");
      pause();
    }
  }
  __threadfence_system();
}

// A thread waits for each of `flags` but that of `own`. Kernels that fill the GPU must not wait
// themselves: a peer waits for what this GPU has still to send.
__global__ void peer_await_kernel(const uint32_t* flags, int own, uint32_t number,
                                  uint64_t timeout_ns) {
  const int rank = static_cast<int>(threadIdx.x);
  if (rank != own) await_flag(flags + rank, number, timeout_ns);
}

template <typename T, bool kAligned>
__device__ __forceinline__ void sum_vec(const PeerSum& p, int64_t at) {
  const int64_t left = p.numel - at;
  float sum[kVec], values[kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) sum[i] = 0.0f;
  const T* piece = reinterpret_cast<const T*>(p.pieces) + at;
  for (int rank = 0; rank < p.ranks; ++rank, piece += p.numel) {
    unpack(kAligned ? load_vec(piece) : load_partial(piece, left), values);
#pragma unroll
    for (int i = 0; i < kVec; ++i) sum[i] = rank ? sum[i] + values[i] : values[i];
  }
  Vec8<T> result;
  pack(sum, &result);
  if (kAligned)
    store_vec(static_cast<T*>(p.out) + at, result);
  else
    store_partial(static_cast<T*>(p.out) + at, result, left);
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kSumThreads) peer_sum_kernel(const PeerSum p) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kSumThreads * kVec;
  for (int64_t at = (static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x) * kVec;
       at < p.numel; at += step)
    sum_vec<T, kAligned>(p, at);
}

cudaEvent_t event_of(int64_t handle) { return reinterpret_cast<cudaEvent_t>(handle); }

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(peer_send) {
  using namespace apex_te;
  const TensorView source = args.tensor();
  source.has_dtype({DType::kUInt8}).is_dense();
  const int64_t bytes = source.numel();
  const DLTensor* targets = nullptr;
  const int list = args.position();
  const int count = args.tensor_list(&targets);
  const TensorView own = args.optional_tensor();
  const int64_t rank = args.integer();
  const uint32_t number = static_cast<uint32_t>(args.integer());
  const auto side = reinterpret_cast<cudaStream_t>(args.integer());
  const cudaEvent_t fork = event_of(args.integer()), sent = event_of(args.integer());
  const DeviceGuard guard(args.device_id());
  check_cuda(cudaEventRecord(fork, static_cast<cudaStream_t>(args.stream())), "peer_send");
  check_cuda(cudaStreamWaitEvent(side, fork, 0), "peer_send");
  for (int i = 0; i < count; ++i) {
    const PeerBuffer target(args.list_item(targets, list, i));
    check_cuda(cudaMemcpyAsync(target.piece(rank, bytes), source.data<const uint8_t>(),
                               static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, side),
               "peer_send");
    peer_flag_kernel<<<1, 1, 0, side>>>(target.flag(rank), number);
    check_cuda(cudaGetLastError(), "peer_send");
  }
  if (own)
    check_cuda(cudaMemcpyAsync(PeerBuffer(own).piece(rank, bytes), source.data<const uint8_t>(),
                               static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, side),
               "peer_send");
  check_cuda(cudaEventRecord(sent, side), "peer_send");
}

APEX_TE_DEFINE(peer_await) {
  using namespace apex_te;
  const PeerBuffer buffer(args.tensor());
  const uint32_t* flag = buffer.flag(args.integer());
  const uint32_t number = static_cast<uint32_t>(args.integer());
  const uint64_t timeout_ns = static_cast<uint64_t>(args.integer()) * 1000000u;
  const DeviceGuard guard(args.device_id());
  peer_await_kernel<<<1, 1, 0, static_cast<cudaStream_t>(args.stream())>>>(flag, -1, number,
                                                                           timeout_ns);
  check_cuda(cudaGetLastError(), "peer_await");
}

APEX_TE_DEFINE(peer_sum) {
  using namespace apex_te;
  const PeerSum p = check_peer_sum(args);
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  peer_await_kernel<<<1, static_cast<unsigned>(p.ranks), 0, stream>>>(p.flags, p.rank, p.number,
                                                                      p.timeout_ns);
  check_cuda(cudaGetLastError(), "peer_sum");
  const int64_t wanted = (p.numel + kSumThreads * kVec - 1) / (kSumThreads * kVec);
  const int64_t most = device_attribute(cudaDevAttrMultiProcessorCount) * kSumBlocksPerSM;
  const unsigned blocks = static_cast<unsigned>(wanted < 1 ? 1 : wanted < most ? wanted : most);
  with_dtype(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const bool aligned = p.numel % kVec == 0 && is_aligned(p.out, 16) && is_aligned(p.pieces, 16);
    const auto kernel = aligned ? peer_sum_kernel<T, true> : peer_sum_kernel<T, false>;
    kernel<<<blocks, kSumThreads, 0, stream>>>(p);
  });
  check_cuda(cudaGetLastError(), "peer_sum");
}

APEX_TE_DEFINE(peer_join) {
  using namespace apex_te;
  const PeerBuffer buffer(args.tensor());
  const cudaEvent_t sent = event_of(args.integer());
  const DeviceGuard guard(args.device_id());
  check_cuda(cudaStreamWaitEvent(static_cast<cudaStream_t>(args.stream()), sent, 0), "peer_join");
}
