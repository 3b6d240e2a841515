// CUDA side of fp8_gemm: cuBLASLt with a cached plan for each shape, layout and epilogue.
//
// A plan keeps the descriptors and one algorithm of the heuristic's list (the first unless tuned),
// so that a call sets a few pointers and launches. cuBLAS is column-major: it computes out^T = b .
// a^T, so its A is b.
#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "fp8_gemm/fp8_gemm.h"
#include "fp8_gemm/fp8_gemm_cublaslt.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

struct PlanKey {
  int64_t m, n, k, workspace_bytes;
  int32_t device, a_type, b_type, out_type, epilogue;
  int32_t alignment_a, alignment_b, alignment_c, alignment_out;
  int32_t has_c;
  int32_t split_accumulator, accumulate, algorithm;
  int32_t a_block_rows, b_block_rows;
  int32_t k_is_outer;  // no padding bytes: the key is compared and hashed whole
  bool operator==(const PlanKey& o) const { return memcmp(this, &o, sizeof(*this)) == 0; }
};
static_assert(sizeof(PlanKey) == 4 * 8 + 16 * 4, "PlanKey is compared and hashed by its bytes");

struct PlanHash {
  size_t operator()(const PlanKey& key) const {
    uint64_t hash = 1469598103934665603u;  // FNV-1a
    const auto* bytes = reinterpret_cast<const unsigned char*>(&key);
    for (size_t i = 0; i < sizeof(key); ++i) hash = (hash ^ bytes[i]) * 1099511628211u;
    return hash;
  }
};

struct Destroy {
  void operator()(cublasLtMatmulDesc_t p) const { CublasLt::get().cublasLtMatmulDescDestroy(p); }
  void operator()(cublasLtMatrixLayout_t p) const {
    CublasLt::get().cublasLtMatrixLayoutDestroy(p);
  }
  void operator()(cublasLtMatmulPreference_t p) const {
    CublasLt::get().cublasLtMatmulPreferenceDestroy(p);
  }
};
template <typename Pointer>
using Owned = std::unique_ptr<std::remove_pointer_t<Pointer>, Destroy>;

constexpr size_t kMaxPlans = 4096;  // then all are made anew: batches of any size would fill memory

struct Plan {
  Owned<cublasLtMatmulDesc_t> matmul;
  Owned<cublasLtMatrixLayout_t> a, b, out;
  cublasLtMatmulAlgo_t algo;
  size_t workspace_bytes = 0;
};

cudaDataType_t cuda_type(DType type) {
  switch (type) {
#if defined(__HIP_PLATFORM_AMD__)
    case DType::kE4M3FNUZ:
      return HIP_R_8F_E4M3_FNUZ;
    case DType::kE5M2FNUZ:
      return HIP_R_8F_E5M2_FNUZ;
#endif
    case DType::kE4M3:
      return CUDA_R_8F_E4M3;
    case DType::kE5M2:
      return CUDA_R_8F_E5M2;
    case DType::kFloat16:
      return CUDA_R_16F;
    case DType::kBFloat16:
      return CUDA_R_16BF;
    default:
      return CUDA_R_32F;
  }
}

int32_t alignment_of(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  for (int32_t bytes = 256; bytes > 1; bytes /= 2)
    if (address % bytes == 0) return bytes;
  return 1;
}

template <typename T>
void set(const Plan& plan, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  check_cublaslt(CublasLt::get().cublasLtMatmulDescSetAttribute(plan.matmul.get(), attribute,
                                                                &value, sizeof(value)),
                 "setting a matmul attribute");
}

cublasLtEpilogue_t epilogue_of(const Fp8Gemm& g) {
  if (g.aux) return g.bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
  return g.bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
}

cublasLtHandle_t handle_of(int device) {
  static cublasLtHandle_t handles[64] = {};
  if (device < 0 || device >= 64)
    fail(kApexTeUnsupported, "fp8_gemm: device index must be below 64, got %d", device);
  if (!handles[device])
    check_cublaslt(CublasLt::get().cublasLtCreate(&handles[device]), "cublasLtCreate");
  return handles[device];
}

int64_t lt_version([[maybe_unused]] int device) {
#if defined(__HIP_PLATFORM_AMD__)
  const DeviceGuard guard(device);
  int version = 0;
  check_cublaslt(CublasLt::get().cublasLtGetVersion(handle_of(device), &version), "its version");
  return version;
#else
  return static_cast<int64_t>(CublasLt::get().cublasLtGetVersion());
#endif
}

// The call's pointers, which a plan's descriptor holds only for one call.
void set_pointers(const Plan& plan, const Fp8Gemm& g) {
  if (!g.k_is_outer) {
    set(plan, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, static_cast<const void*>(g.b_scale_inv));
    set(plan, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, static_cast<const void*>(g.a_scale_inv));
  }
  if (g.bias) set(plan, CUBLASLT_MATMUL_DESC_BIAS_POINTER, g.bias.data<const void>());
  if (g.aux) set(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, g.aux.data<void>());
}

// Scales of blocks and rows: cuBLASLt from 12.9 on.
void set_scale_mode(const Plan& plan, cublasLtMatmulDescAttributes_t attribute,
                    int64_t block_rows) {
  if (block_rows == 0) return;
#if defined(__HIP_PLATFORM_AMD__)
  fail(kApexTeUnsupported, "fp8_gemm: products with scales of blocks or rows need cuBLASLt");
#elif CUBLAS_VERSION >= 120900
  set(plan, attribute,
      block_rows == kScaledRows ? CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F
      : block_rows == 1         ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F
                                : CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F);
#else
  fail(kApexTeUnsupported,
       "fp8_gemm: for scales of blocks or rows, cuBLAS must be 12.9 or later when the op is "
       "compiled, got %d",
       CUBLAS_VERSION);
#endif
}
#if CUBLAS_VERSION >= 120900
constexpr auto kScaleModeA = CUBLASLT_MATMUL_DESC_A_SCALE_MODE;
constexpr auto kScaleModeB = CUBLASLT_MATMUL_DESC_B_SCALE_MODE;
#else
constexpr auto kScaleModeA = CUBLASLT_MATMUL_DESC_A_SCALE_POINTER;
constexpr auto kScaleModeB = CUBLASLT_MATMUL_DESC_B_SCALE_POINTER;
#endif

#if defined(__HIP_PLATFORM_AMD__)
// gfx94x multiply fnuz formats, gfx950 and gfx12 those of OCP.
void check_arch(const Fp8Gemm& g, int device) {
  cudaDeviceProp properties;
  check_cuda(cudaGetDeviceProperties(&properties, device), "fp8_gemm");
  const char* const arch = properties.gcnArchName;
  const bool fnuz = strncmp(arch, "gfx94", 5) == 0;
  if (!fnuz && strncmp(arch, "gfx95", 5) != 0 && strncmp(arch, "gfx12", 5) != 0)
    fail(kApexTeUnsupported,
         "fp8_gemm: the GPU must be a gfx94x, gfx95x or gfx12, which have FP8 matrix units, got %s",
         arch);
  for (const TensorView& operand : {g.a, g.b}) {
    if (fnuz)
      operand.has_dtype({DType::kE4M3FNUZ, DType::kE5M2FNUZ});
    else
      operand.has_dtype({DType::kE4M3, DType::kE5M2});
  }
}
#else
void check_arch(const Fp8Gemm&, int device) {
  int major = 0, minor = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "fp8_gemm");
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "fp8_gemm");
  if (major * 10 + minor < 89)
    fail(kApexTeUnsupported,
         "fp8_gemm: the GPU must be of arch 8.9 or later, which have FP8 matrix units, got %d.%d",
         major, minor);
}
#endif

// Row-major [rows, cols] is column-major [cols, rows].
Owned<cublasLtMatrixLayout_t> layout_of(const TensorView& x, const char* what) {
  cublasLtMatrixLayout_t layout = nullptr;
  check_cublaslt(CublasLt::get().cublasLtMatrixLayoutCreate(
                     &layout, cuda_type(x.dtype()), static_cast<uint64_t>(x.size(1)),
                     static_cast<uint64_t>(x.size(0)), x.size(1)),
                 what);
  return Owned<cublasLtMatrixLayout_t>(layout);
}

Plan make_plan(const Fp8Gemm& g, const PlanKey& key) {
  if (!g.k_is_outer) check_arch(g, key.device);
  const CublasLt& lt = CublasLt::get();
  Plan plan;
  cublasLtMatmulDesc_t matmul = nullptr;
  check_cublaslt(lt.cublasLtMatmulDescCreate(&matmul, CUBLAS_COMPUTE_32F, CUDA_R_32F),
                 "cublasLtMatmulDescCreate");
  plan.matmul.reset(matmul);
  set(plan, CUBLASLT_MATMUL_DESC_TRANSA, g.k_is_outer ? CUBLAS_OP_N : CUBLAS_OP_T);
  set(plan, CUBLASLT_MATMUL_DESC_TRANSB, g.k_is_outer ? CUBLAS_OP_T : CUBLAS_OP_N);
#if !defined(__HIP_PLATFORM_AMD__)  // hipBLASLt has no such choice
  if (!g.k_is_outer)
    set(plan, CUBLASLT_MATMUL_DESC_FAST_ACCUM,
        static_cast<int8_t>(g.use_split_accumulator ? 0 : 1));
#endif
  set(plan, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(g));
  if (g.bias) set(plan, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, cuda_type(g.bias.dtype()));
  if (g.aux) {
    set(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, g.n);
    set(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, cuda_type(g.aux.dtype()));
  }
  set_scale_mode(plan, kScaleModeA, g.b_block_rows);
  set_scale_mode(plan, kScaleModeB, g.a_block_rows);
  set_pointers(plan, g);
  plan.a = layout_of(g.b, "layout of b");
  plan.b = layout_of(g.a, "layout of a");
  plan.out = layout_of(g.out, "layout of out");

  cublasLtMatmulPreference_t created = nullptr;
  check_cublaslt(lt.cublasLtMatmulPreferenceCreate(&created), "cublasLtMatmulPreferenceCreate");
  const Owned<cublasLtMatmulPreference_t> preference(created);
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    lt.cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof(value));
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(key.workspace_bytes));
#if !defined(__HIP_PLATFORM_AMD__)  // hipBLASLt has none; launch() asks for 16 bytes
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(key.alignment_b));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(key.alignment_a));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(key.alignment_c));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(key.alignment_out));
  // Partial sums of a split K in the dtype of out would be rounded more than once.
  if (g.k_is_outer)
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
           static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
#endif
  cublasLtMatmulHeuristicResult_t found[kMaxAlgorithms];
  int count = 0;
  const cublasStatus_t status = lt.cublasLtMatmulAlgoGetHeuristic(
      handle_of(key.device), plan.matmul.get(), plan.a.get(), plan.b.get(), plan.out.get(),
      plan.out.get(), preference.get(), key.algorithm + 1, found, &count);
  if (status != CUBLAS_STATUS_SUCCESS || count <= key.algorithm)
    fail(kApexTeUnsupported,
         "fp8_gemm: cuBLASLt has no algorithm %d for M=%lld N=%lld K=%lld, a %s, b %s, out %s, "
         "epilogue %d: %s",
         key.algorithm, static_cast<long long>(g.m), static_cast<long long>(g.n),
         static_cast<long long>(g.k), dtype_name(g.a.dtype()), dtype_name(g.b.dtype()),
         dtype_name(g.out.dtype()), key.epilogue, status_text(status).text);
  plan.algo = found[key.algorithm].algo;
  plan.workspace_bytes = found[key.algorithm].workspaceSize;
  return plan;
}

// What the heuristic may use. With few rows and room for partial sums it splits K, which took up to
// 1.17 times as long on an H200 as what it proposes for 1 MiB.
int64_t workspace_bytes(const Fp8Gemm& g) {
  constexpr int64_t kFewRows = 256, kFewRowsBytes = 1 << 20;
  const int64_t given = g.workspace ? g.workspace.numel() : 0;
  const bool few = g.m <= kFewRows && !g.k_is_outer && g.a_block_rows == 0;
  return few ? std::min(given, kFewRowsBytes) : given;
}

// Some of cuBLASLt's algorithms read scales in units of 16 bytes, and say no more than that they do
// not support a product.
void refuse_misaligned_scales(const Fp8Gemm& g) {
  const std::pair<const char*, const void*> scales[] = {{"a_scale_inv", g.a_scale_inv},
                                                        {"b_scale_inv", g.b_scale_inv}};
  for (const auto& [name, pointer] : scales)
    if (!is_aligned(pointer, 16))
      fail(kApexTeValueError,
           "fp8_gemm: %s must start on a 16-byte boundary for this product, got a misaligned "
           "address",
           name);
}

// Descriptors are shared and hold a call's pointers, so a call owns them until it has launched.
void matmul(const Fp8Gemm& g, int device, cudaStream_t stream) {
  static std::mutex mutex;
  // Never destroyed: cuBLASLt may have ended before a static object does.
  static auto& plans = *new std::unordered_map<PlanKey, Plan, PlanHash>();
  PlanKey key;
  memset(&key, 0, sizeof(key));
  key.m = g.m;
  key.n = g.n;
  key.k = g.k;
  key.workspace_bytes = workspace_bytes(g);
  key.device = device;
  key.a_type = static_cast<int32_t>(g.a.dtype());
  key.b_type = static_cast<int32_t>(g.b.dtype());
  key.out_type = static_cast<int32_t>(g.out.dtype());
  key.epilogue = epilogue_of(g);
  key.alignment_a = alignment_of(g.a.data<void>());
  key.alignment_b = alignment_of(g.b.data<void>());
  key.alignment_out = alignment_of(g.out.data<void>());
  key.has_c = static_cast<bool>(g.c);
  key.alignment_c = g.c ? alignment_of(g.c.data<const void>()) : key.alignment_out;
  key.split_accumulator = g.use_split_accumulator;
  key.accumulate = g.accumulate;
  key.algorithm = static_cast<int32_t>(g.algorithm);
  key.a_block_rows = static_cast<int32_t>(g.a_block_rows);
  key.b_block_rows = static_cast<int32_t>(g.b_block_rows);
  key.k_is_outer = g.k_is_outer;

  const std::lock_guard<std::mutex> lock(mutex);
  auto found = plans.find(key);
  if (found == plans.end()) {
    if (plans.size() >= kMaxPlans) plans.clear();
    found = plans.emplace(key, make_plan(g, key)).first;
  }
  const Plan& plan = found->second;
  set_pointers(plan, g);
  const float alpha = 1.0f, beta = g.accumulate || g.c ? 1.0f : 0.0f;
  void* out = g.out.data<void>();
  const void* c = g.c ? g.c.data<const void>() : out;  // both have the layout plan.out
  const cublasStatus_t status = CublasLt::get().cublasLtMatmul(
      handle_of(device), plan.matmul.get(), &alpha, g.b.data<const void>(), plan.a.get(),
      g.a.data<const void>(), plan.b.get(), &beta, c, plan.out.get(), out, plan.out.get(),
      &plan.algo, g.workspace.data<void>(), plan.workspace_bytes, stream);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) refuse_misaligned_scales(g);
  check_cublaslt(status, "cublasLtMatmul");
}

// Runs a product whose arguments are checked; all FP8 functions end here.
void launch(const Fp8Gemm& g, Args& args) {
  if (g.m == 0 || g.n == 0) return;
  if (g.k == 0 || g.k % 16 || g.n % 16)
    fail(kApexTeValueError, "%s: K and N must be multiples of 16 above zero, got K=%lld and N=%lld",
         args.name(), static_cast<long long>(g.k), static_cast<long long>(g.n));
  for (const TensorView& operand : {g.a, g.b, g.c, g.out})
    if (operand && !is_aligned(operand.data<void>(), 16))
      operand.refuse(kApexTeValueError, "start on a 16-byte boundary", "a misaligned address");
  const DeviceGuard guard(args.device_id());
  matmul(g, args.device_id(), static_cast<cudaStream_t>(args.stream()));
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(fp8_gemm) {
  using namespace apex_te;
  launch(check_fp8_gemm(args), args);
}

APEX_TE_DEFINE(fp8_gemm_block) {
  using namespace apex_te;
  const Fp8Gemm g = check_fp8_gemm_block(args);
  if (g.m % 4)
    fail(kApexTeValueError, "fp8_gemm_block: M must be a multiple of 4, got %lld",
         static_cast<long long>(g.m));
  launch(g, args);
}

APEX_TE_DEFINE(fp8_gemm_rows) {
  using namespace apex_te;
  launch(check_fp8_gemm_rows(args), args);
}

APEX_TE_DEFINE(wgrad_gemm) {
  using namespace apex_te;
  const Fp8Gemm g = check_wgrad_gemm(args);
  if (g.m == 0 || g.n == 0) return;
  if (g.k == 0) g.a.refuse(kApexTeValueError, "have one row or more", "0");
  const DeviceGuard guard(args.device_id());
  matmul(g, args.device_id(), static_cast<cudaStream_t>(args.stream()));
}

APEX_TE_DEFINE(cublaslt_version) {
  using namespace apex_te;
  args.tensor();
  args.set_result(lt_version(args.device_id()));
}
