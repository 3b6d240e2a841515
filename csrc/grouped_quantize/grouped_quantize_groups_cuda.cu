// CUDA kernels of grouped_quantize over groups and rows: offsets, scales, bias, zeros, column sums.
#include <algorithm>

#include "common/gpu/vec.h"
#include "grouped_quantize/grouped_quantize.h"

namespace apex_te {
namespace {

constexpr int kScanThreads = 1024;
constexpr int kThreads = 256;
constexpr int kBlocksPerSM = 8;
constexpr uint32_t kNaNBits = 0x7FC00000u;
static_assert(kMaxGroups <= kScanThreads, "a thread for each group");

// One block: an inclusive scan of rows and of columns.
template <typename Int>
__global__ void __launch_bounds__(kScanThreads)
    offsets_kernel(const Int* splits, int groups, int64_t rows, int32_t* table) {
  __shared__ int64_t sums[2][kScanThreads][2];
  const int g = threadIdx.x;
  const int64_t split = g < groups ? static_cast<int64_t>(splits[g]) : 0;
  // A split that is out of range would make the sums wrap.
  bool bad = __syncthreads_or(split < 0 || split > rows);
  const int64_t own = bad ? 0 : split;
  int64_t row = own, column = g < groups ? columns_of(own) : 0;
  int from = 0;
  for (int step = 1; step < kScanThreads; step *= 2, from ^= 1) {
    sums[from][g][0] = row;
    sums[from][g][1] = column;
    __syncthreads();
    if (g >= step) {
      row += sums[from][g - step][0];
      column += sums[from][g - step][1];
    }
  }
  bad = __syncthreads_or(bad || row > rows);
  if (g >= groups) return;
  table[g] = bad ? 0 : static_cast<int32_t>(row);
  table[groups + g] = static_cast<int32_t>(bad ? (g + 1) * kGroupAlign : column);
  table[2 * groups + g] = !bad && own > 0;
  if (g == 0) table[3 * groups] = bad;
}

__global__ void scales_kernel(const GroupedScales p) {
  for (int g = threadIdx.x; g < p.table.groups; g += kThreads) set_scale(p, g);
}
__global__ void first_scales_kernel(const GroupedScales p) {
  for (int g = threadIdx.x; g < p.table.groups; g += kThreads) set_first_scale(p, g);
}

__device__ __forceinline__ int group_of(const Table& table, int64_t row) {
  int low = 0, high = table.groups;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (table.end(middle) <= row)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

template <typename T>
__device__ __forceinline__ Vec8<T> filled(float value) {
  float values[kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) values[i] = value;
  Vec8<T> v;
  pack(values, &v);
  return v;
}

template <typename T, bool kAligned>
__device__ __forceinline__ Vec8<T> load_any(const T* p, int64_t n) {
  return kAligned ? load_vec(p) : load_partial(p, n);
}
template <typename T, bool kAligned>
__device__ __forceinline__ void store_any(T* p, const Vec8<T>& v, int64_t n) {
  if (kAligned)
    store_vec(p, v);
  else
    store_partial(p, v, n);
}

// A block takes every gridDim-th row; without a bias it begins behind the last group.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    finish_kernel(T* out, int64_t rows, int64_t cols, const Table table, const T* bias) {
  const bool bad = table.bad();
  const int64_t total = table.end(table.groups - 1);
  for (int64_t r = (bias || bad ? 0 : total) + blockIdx.x; r < rows; r += gridDim.x) {
    const bool present = !bad && r < total;
    const T* added = present ? bias + group_of(table, r) * cols : nullptr;
    for (int64_t c = threadIdx.x * kVec; c < cols; c += kThreads * kVec) {
      T* p = out + r * cols + c;
      Vec8<T> v = filled<T>(bad ? __uint_as_float(kNaNBits) : 0.0f);
      if (present) {
        float values[kVec], addends[kVec];
        unpack(load_any<T, kAligned>(p, cols - c), values);
        unpack(load_any<T, kAligned>(added + c, cols - c), addends);
#pragma unroll
        for (int i = 0; i < kVec; ++i) values[i] += addends[i];
        pack(values, &v);
      }
      store_any<T, kAligned>(p, v, cols - c);
    }
  }
}

// blockIdx.y is the group.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads) clear_kernel(T* out, int64_t cols, const Table table) {
  const int g = blockIdx.y;
  if (table.used(g)) return;
  const Vec8<T> v = filled<T>(table.bad() ? __uint_as_float(kNaNBits) : 0.0f);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads * kVec;
  for (int64_t c = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kVec; c < cols;
       c += stride)
    store_any<T, kAligned>(out + g * cols + c, v, cols - c);
}

// blockIdx.y is the group, blockIdx.x 256 columns of it. Warp w adds the rows w, w + 8, ..: each
// four in float, those sums in double, since the rounding of long sums would show. Then the warps'
// sums are added in their order.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(const T* x, int64_t cols, const Table table, T* out) {
  constexpr int kWarps = kThreads / 32, kInFlight = 4;
  __shared__ double sums[kWarps][32 * kVec];
  const int g = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t c = blockIdx.x * (32 * kVec) + lane * kVec;
  const int64_t end = table.end(g);
  double sum[kVec] = {};
  if (c < cols) {
    for (int64_t r = table.begin(g) + warp; r < end; r += kWarps * kInFlight) {
      Vec8<T> in[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int64_t row = r + i * kWarps;
        in[i] = row < end ? load_any<T, kAligned>(x + row * cols + c, cols - c) : Vec8<T>{};
      }
      float part[kVec] = {};
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        float values[kVec];
        unpack(in[i], values);
#pragma unroll
        for (int k = 0; k < kVec; ++k) part[k] += values[k];
      }
#pragma unroll
      for (int k = 0; k < kVec; ++k) sum[k] += part[k];
    }
  }
#pragma unroll
  for (int k = 0; k < kVec; ++k) sums[warp][lane * kVec + k] = sum[k];
  __syncthreads();
  const int64_t column = blockIdx.x * (32 * kVec) + threadIdx.x;
  if (column >= cols) return;
  double total = table.bad() ? __uint_as_float(kNaNBits) : 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += sums[w][threadIdx.x];
  out[g * cols + column] = from_float<T>(static_cast<float>(total));
}
static_assert(32 * kVec == kThreads, "a thread for each column");

// 16 codes a step of a thread.
template <typename Format>
__global__ void __launch_bounds__(kThreads)
    decode_kernel(const uint8_t* codes, BFloat16* out, int64_t numel, bool aligned) {
  constexpr int kCodes = 2 * kVec;
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kCodes;
  if (i >= numel) return;
  const bool whole = aligned && i + kCodes <= numel;
  uint2 halves[2];
  if (whole) {
    const uint4 words = *reinterpret_cast<const uint4*>(codes + i);
    halves[0] = make_uint2(words.x, words.y);
    halves[1] = make_uint2(words.z, words.w);
  } else {
    halves[0] = load_codes_partial(codes + i, numel - i);
    halves[1] = load_codes_partial(codes + i + kVec, numel - i - kVec);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float values[kVec];
    decode_values<Format>(halves[h], values);
    Vec8<BFloat16> v;
    pack(values, &v);
    if (whole)
      store_vec(out + i + h * kVec, v);
    else
      store_partial(out + i + h * kVec, v, numel - i - h * kVec);
  }
}

// A block takes every gridDim-th row.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    scale_rows_kernel(T* out, int64_t rows, int64_t cols, const float* factors) {
  for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    const float factor = factors[r];
    for (int64_t c = threadIdx.x * kVec; c < cols; c += kThreads * kVec) {
      T* p = out + r * cols + c;
      float values[kVec];
      unpack(load_any<T, kAligned>(p, cols - c), values);
#pragma unroll
      for (int i = 0; i < kVec; ++i) values[i] *= factor;
      Vec8<T> v;
      pack(values, &v);
      store_any<T, kAligned>(p, v, cols - c);
    }
  }
}

template <typename Call>
void with_type(DType dtype, const Call& call) {
  if (dtype == DType::kFloat32) return call(float{});
  if (dtype == DType::kFloat16) return call(Half{});
  call(BFloat16{});
}

unsigned blocks_for(int64_t wanted) {
  const int64_t limit =
      kBlocksPerSM * static_cast<int64_t>(device_attribute(cudaDevAttrMultiProcessorCount));
  return static_cast<unsigned>(std::max<int64_t>(1, std::min(wanted, limit)));
}

bool rows_aligned(const GroupedRows& p) {
  return p.cols % kVec == 0 && is_aligned(p.x.data(), 16) && is_aligned(p.other.data(), 16);
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(grouped_offsets) {
  using namespace apex_te;
  const GroupedOffsets p = check_grouped_offsets(args);
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  if (p.splits.dtype() == DType::kInt64)
    offsets_kernel<<<1, kScanThreads, 0, stream>>>(p.splits.data<const int64_t>(), p.groups, p.rows,
                                                   p.table);
  else
    offsets_kernel<<<1, kScanThreads, 0, stream>>>(p.splits.data<const int32_t>(), p.groups, p.rows,
                                                   p.table);
  check_cuda(cudaGetLastError(), "grouped_offsets");
}

APEX_TE_DEFINE(grouped_scales) {
  using namespace apex_te;
  const GroupedScales p = check_grouped_scales(args);
  const DeviceGuard guard(args.device_id());
  scales_kernel<<<1, kThreads, 0, static_cast<cudaStream_t>(args.stream())>>>(p);
  check_cuda(cudaGetLastError(), "grouped_scales");
}

APEX_TE_DEFINE(grouped_first_scales) {
  using namespace apex_te;
  const GroupedScales p = check_grouped_first_scales(args);
  const DeviceGuard guard(args.device_id());
  first_scales_kernel<<<1, kThreads, 0, static_cast<cudaStream_t>(args.stream())>>>(p);
  check_cuda(cudaGetLastError(), "grouped_first_scales");
}

APEX_TE_DEFINE(grouped_finish) {
  using namespace apex_te;
  const GroupedRows p = check_grouped_rows(args, true);
  const DeviceGuard guard(args.device_id());
  if (p.rows == 0 || p.cols == 0) return;
  with_type(p.x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const auto kernel = rows_aligned(p) ? finish_kernel<T, true> : finish_kernel<T, false>;
    kernel<<<blocks_for(p.rows), kThreads, 0, static_cast<cudaStream_t>(args.stream())>>>(
        p.x.data<T>(), p.rows, p.cols, p.table, p.other.data<const T>());
  });
  check_cuda(cudaGetLastError(), "grouped_finish");
}

APEX_TE_DEFINE(grouped_clear) {
  using namespace apex_te;
  const GroupedRows p = check_grouped_clear(args);
  const DeviceGuard guard(args.device_id());
  if (p.cols == 0) return;
  with_type(p.x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const auto kernel = rows_aligned(p) ? clear_kernel<T, true> : clear_kernel<T, false>;
    // Most groups are used, and their blocks do nothing: they should be few.
    constexpr int64_t kPerBlock = kThreads * kVec * 4, kMost = 16;
    const dim3 grid(blocks_for(std::min((p.cols + kPerBlock - 1) / kPerBlock, kMost)),
                    static_cast<unsigned>(p.table.groups));
    kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(args.stream())>>>(p.x.data<T>(), p.cols,
                                                                            p.table);
  });
  check_cuda(cudaGetLastError(), "grouped_clear");
}

APEX_TE_DEFINE(grouped_sum) {
  using namespace apex_te;
  const GroupedRows p = check_grouped_rows(args, false);
  const DeviceGuard guard(args.device_id());
  if (p.cols == 0) return;
  with_type(p.x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const auto kernel = rows_aligned(p) ? sum_kernel<T, true> : sum_kernel<T, false>;
    const dim3 grid(static_cast<unsigned>((p.cols + kThreads - 1) / kThreads),
                    static_cast<unsigned>(p.table.groups));
    kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(args.stream())>>>(
        p.x.data<const T>(), p.cols, p.table, p.other.data<T>());
  });
  check_cuda(cudaGetLastError(), "grouped_sum");
}

APEX_TE_DEFINE(grouped_decode) {
  using namespace apex_te;
  const GroupedDecode p = check_grouped_decode(args);
  const DeviceGuard guard(args.device_id());
  if (p.numel == 0) return;
  constexpr int64_t kPerBlock = kThreads * 2 * kVec;
  const int64_t blocks = (p.numel + kPerBlock - 1) / kPerBlock;
  if (blocks > 0x7FFFFFFF)
    fail(kApexTeUnsupported, "grouped_decode: codes must be fewer than 2^43");
  const bool aligned = is_aligned(p.codes, 16) && is_aligned(p.out, 16);
  const auto kernel = p.format == DType::kE5M2 ? decode_kernel<E5M2> : decode_kernel<E4M3>;
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(args.stream())>>>(
      p.codes, p.out, p.numel, aligned);
  check_cuda(cudaGetLastError(), "grouped_decode");
}

APEX_TE_DEFINE(grouped_scale_rows) {
  using namespace apex_te;
  const GroupedRows p = check_grouped_scale_rows(args);
  const DeviceGuard guard(args.device_id());
  if (p.rows == 0 || p.cols == 0) return;
  const bool aligned = p.cols % kVec == 0 && is_aligned(p.x.data(), 16);
  with_type(p.x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const auto kernel = aligned ? scale_rows_kernel<T, true> : scale_rows_kernel<T, false>;
    kernel<<<blocks_for(p.rows), kThreads, 0, static_cast<cudaStream_t>(args.stream())>>>(
        p.x.data<T>(), p.rows, p.cols, p.other.data<const float>());
  });
  check_cuda(cudaGetLastError(), "grouped_scale_rows");
}
