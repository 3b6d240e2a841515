// CUDA kernels of index_mul_2d.
//
// Forward: a thread has some vectors of 16 bytes, whose indices come first. Backward: some lanes of
// a warp have a chunk of the sorted places and 8 columns each, so that dout is read once; a row
// whose places lie in several chunks is joined from their sums by a second kernel.
#include "common/gpu/fast_division.h"
#include "common/gpu/vec.h"
#include "common/numerics/with_dtype.h"
#include "index_mul_2d/index_mul_2d.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int kThreads = 256;
constexpr int kChunk = static_cast<int>(kIndexMulChunk);

template <typename T>
constexpr int kAtOnce = 8 / sizeof(T);  // rows of each tensor whose loads are in flight

template <typename T, bool kAligned>
__device__ __forceinline__ Vec8<T> load(const void* data, int64_t row, const IndexMul& p,
                                        int64_t col, bool exists) {
  if (!exists) return {};
  const T* at = static_cast<const T*>(data) + row * p.cols + col;
  return kAligned ? load_vec(at) : load_partial(at, p.cols - col);
}

template <typename T, bool kAligned>
__device__ __forceinline__ void store(void* data, int64_t row, const IndexMul& p, int64_t col,
                                      const float* values) {
  Vec8<T> v;
  pack(values, &v);
  T* at = static_cast<T*>(data) + row * p.cols + col;
  if (kAligned)
    store_vec_whole(at, v);
  else
    store_partial(at, v, p.cols - col);
}

template <typename T, bool kAligned, bool kMore>
__global__ void __launch_bounds__(kThreads)
    fwd_kernel(const IndexMul p, const FastDivision place_of, uint32_t per_row, uint32_t count) {
  constexpr int kSteps = kAtOnce<T>;
  const int64_t first = int64_t{blockIdx.x} * kSteps * kThreads + threadIdx.x;
  int64_t place[kSteps], row[kSteps], col[kSteps];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const int64_t v = first + k * kThreads;
    place[k] = v < count ? place_of(static_cast<uint32_t>(v)) : p.places;
    col[k] = (v - place[k] * per_row) * kVec;
    row[k] = place[k] < p.places ? p.index[place[k]] : -1;
  }
  Vec8<T> a[kSteps], b[kSteps], more_a[kSteps], more_b[kSteps];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const bool exists = p.has_row(row[k]);
    b[k] = load<T, kAligned>(p.in2, place[k], p, col[k], exists);
    a[k] = load<T, kAligned>(p.in1, row[k], p, col[k], exists);
    if (!kMore) continue;
    more_b[k] = load<T, kAligned>(p.more2, place[k], p, col[k], exists);
    more_a[k] = load<T, kAligned>(p.more1, row[k], p, col[k], exists);
  }
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    if (place[k] >= p.places) break;
    float x[kVec], y[kVec], more_x[kVec], more_y[kVec];
    unpack(a[k], x);
    unpack(b[k], y);
    if (kMore) {
      unpack(more_a[k], more_x);
      unpack(more_b[k], more_y);
    }
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      x[i] *= y[i];
      if (kMore) x[i] += more_x[i] * more_y[i];
      if (!p.has_row(row[k])) x[i] = bits_float(0x7FC00000u);
    }
    store<T, kAligned>(p.out, place[k], p, col[k], x);
  }
}

// A chunk of sorted places of a group of lanes.
template <int kLanes>
struct Chunk {
  int64_t number, begin, end, col;

  __device__ explicit Chunk(const IndexMul& p)
      : number(int64_t{blockIdx.x} * (kThreads / kLanes) + threadIdx.x / kLanes),
        begin(number * kChunk),
        end(min(begin + kChunk, p.places)),
        col((int64_t{blockIdx.y} * kLanes + threadIdx.x % kLanes) * kVec) {}
  __device__ bool begins(const IndexMul& p, int64_t key) const {
    return begin == 0 || p.keys[begin - 1] != key;
  }
  __device__ bool ends(const IndexMul& p, int64_t key) const {
    return end == p.places || p.keys[end] != key;
  }
};

template <typename T, bool kAligned>
__device__ __forceinline__ void add_row(const IndexMul& p, int64_t row, int64_t col,
                                        const float* sum) {
  if (!p.has_row(row)) return;
  float values[kVec];
  unpack(load<T, kAligned>(p.din1, row, p, col, true), values);
#pragma unroll
  for (int i = 0; i < kVec; ++i) values[i] += sum[i];
  store<T, kAligned>(p.din1, row, p, col, values);
}

template <bool kAligned>
__device__ __forceinline__ void store_sum(const IndexMul& p, int64_t line, int64_t col,
                                          const float* sum) {
  store<float, kAligned>(p.workspace, line, p, col, sum);
}

template <typename T, int kLanes, bool kAligned>
__global__ void __launch_bounds__(kThreads) bwd_kernel(const IndexMul p) {
  constexpr int kSteps = kAtOnce<T>;
  const Chunk<kLanes> own(p);
  if (own.begin >= p.places || own.col >= p.cols) return;
  int64_t row = p.keys[own.begin];
  bool began = own.begins(p, row);
  float sum[kVec] = {};
  for (int64_t k0 = own.begin; k0 < own.end; k0 += kSteps) {
    int64_t key[kSteps], place[kSteps];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const bool exists = k0 + k < own.end;
      key[k] = exists ? p.keys[k0 + k] : -1;
      place[k] = exists ? p.order[k0 + k] : -1;
    }
    Vec8<T> dout[kSteps], in2[kSteps], in1[kSteps];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      dout[k] = load<T, kAligned>(p.dout, place[k], p, own.col, place[k] >= 0);
      in2[k] = load<T, kAligned>(p.in2, place[k], p, own.col, place[k] >= 0);
      in1[k] = load<T, kAligned>(p.in1, key[k], p, own.col, p.has_row(key[k]));
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (place[k] < 0) break;
      if (key[k] != row) {
        if (began)
          add_row<T, kAligned>(p, row, own.col, sum);
        else
          store_sum<kAligned>(p, 2 * own.number, own.col, sum);
#pragma unroll
        for (int i = 0; i < kVec; ++i) sum[i] = 0.0f;
        row = key[k];
        began = true;
      }
      float a[kVec], b[kVec], c[kVec];
      unpack(dout[k], a);
      unpack(in2[k], b);
      unpack(in1[k], c);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        sum[i] += a[i] * b[i];
        c[i] = p.has_row(row) ? c[i] * a[i] : bits_float(0x7FC00000u);
      }
      store<T, kAligned>(p.din2, place[k], p, own.col, c);
    }
  }
  if (began && own.ends(p, row))
    add_row<T, kAligned>(p, row, own.col, sum);
  else
    store_sum<kAligned>(p, 2 * own.number + began, own.col, sum);
}

// Rows that begin in a chunk and go on behind it.
template <typename T, int kLanes, bool kAligned>
__global__ void __launch_bounds__(kThreads) join_kernel(const IndexMul p) {
  constexpr int kSteps = 4;
  const Chunk<kLanes> own(p);
  if (own.begin >= p.places || own.col >= p.cols) return;
  const int64_t row = p.keys[own.end - 1];
  if (!own.begins(p, row) || own.ends(p, row)) return;
  float sum[kVec];
  unpack(load<float, kAligned>(p.workspace, 2 * own.number + 1, p, own.col, true), sum);
  for (int64_t chunk = own.number + 1;; chunk += kSteps) {
    Vec8<float> parts[kSteps];
    bool goes_on = true;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int64_t begin = (chunk + k) * kChunk;
      goes_on = goes_on && begin < p.places && p.keys[begin] == row;
      parts[k] = load<float, kAligned>(p.workspace, 2 * (chunk + k), p, own.col, goes_on);
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      float part[kVec];
      unpack(parts[k], part);
#pragma unroll
      for (int i = 0; i < kVec; ++i) sum[i] += part[i];
    }
    if (!goes_on) break;
  }
  add_row<T, kAligned>(p, row, own.col, sum);
}

template <typename T, bool kAligned>
void launch_fwd(const IndexMul& p, cudaStream_t stream) {
  const int64_t per_row = (p.cols + kVec - 1) / kVec;
  constexpr int64_t kShare = int64_t{kThreads} * kAtOnce<T>;
  if (p.places > (0x7FFFFFFF - kShare) / per_row)
    fail(kApexTeUnsupported, "index_mul_2d_fwd: in2 must have fewer elements");
  const int64_t count = p.places * per_row;
  const auto kernel = p.more1 ? fwd_kernel<T, kAligned, true> : fwd_kernel<T, kAligned, false>;
  kernel<<<static_cast<unsigned>((count + kShare - 1) / kShare), kThreads, 0, stream>>>(
      p, FastDivision(static_cast<uint32_t>(per_row)), static_cast<uint32_t>(per_row),
      static_cast<uint32_t>(count));
  check_cuda(cudaGetLastError(), "index_mul_2d_fwd");
}

template <typename T, int kLanes, bool kAligned>
void launch_lanes(const IndexMul& p, cudaStream_t stream) {
  const int64_t groups = kThreads / kLanes,
                col_tiles = (p.cols + kLanes * kVec - 1) / (kLanes * kVec);
  const int64_t blocks = (p.chunks() + groups - 1) / groups;
  if (blocks > 0x7FFFFFFF || col_tiles > kMaxGridY)
    fail(kApexTeUnsupported, "index_mul_2d_bwd: in2 must have fewer elements");
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(col_tiles));
  bwd_kernel<T, kLanes, kAligned><<<grid, kThreads, 0, stream>>>(p);
  join_kernel<T, kLanes, kAligned><<<grid, kThreads, 0, stream>>>(p);
  check_cuda(cudaGetLastError(), "index_mul_2d_bwd");
}

template <typename T, bool kAligned>
void launch_bwd(const IndexMul& p, cudaStream_t stream) {
  if (p.cols <= 8 * kVec) return launch_lanes<T, 8, kAligned>(p, stream);
  if (p.cols <= 16 * kVec) return launch_lanes<T, 16, kAligned>(p, stream);
  launch_lanes<T, 32, kAligned>(p, stream);
}

template <typename T, bool kAligned>
void launch(const IndexMul& p, cudaStream_t stream) {
  p.out ? launch_fwd<T, kAligned>(p, stream) : launch_bwd<T, kAligned>(p, stream);
}

void run(const IndexMul& p, cudaStream_t stream) {
  if (p.places == 0 || p.cols == 0) return;
  bool aligned = p.cols % kVec == 0;
  for (const void* each : {p.in1, p.in2, p.more1, p.more2, p.dout, static_cast<const void*>(p.out),
                           static_cast<const void*>(p.din1), static_cast<const void*>(p.din2),
                           static_cast<const void*>(p.workspace)})
    aligned = aligned && is_aligned(each, 16);
  with_dtype(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    aligned ? launch<T, true>(p, stream) : launch<T, false>(p, stream);
  });
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(index_mul_2d_fwd) {
  using namespace apex_te;
  const IndexMul p = check_index_mul_2d_fwd(args);
  const DeviceGuard guard(args.device_id());
  run(p, static_cast<cudaStream_t>(args.stream()));
}

APEX_TE_DEFINE(index_mul_2d_bwd) {
  using namespace apex_te;
  const IndexMul p = check_index_mul_2d_bwd(args);
  const DeviceGuard guard(args.device_id());
  run(p, static_cast<cudaStream_t>(args.stream()));
}
