// cuBLASLt, opened at run time: the library links none and runs with the copy torch has loaded.
//
// In a hipified copy it is hipBLASLt, which has the same functions under its own prefix; what it
// names otherwise or lacks is here.
#pragma once

#include <cublasLt.h>
#include <dlfcn.h>

#include <cstdio>

#include "common/gpu/device.h"

#if defined(__HIP_PLATFORM_AMD__)
#define APEX_TE_LT_SONAME "libhipblaslt.so.%d"
#define APEX_TE_LT_MAJOR HIPBLASLT_VERSION_MAJOR
#define APEX_TE_LT_SOURCE "a ROCm build of torch or hipBLASLt's package"
#else
#define APEX_TE_LT_SONAME "libcublasLt.so.%d"
#define APEX_TE_LT_MAJOR CUBLAS_VER_MAJOR
#define APEX_TE_LT_SOURCE "a CUDA build of torch of the same major version or the toolkit"
#endif

namespace apex_te {

struct CublasLt {
  // clang-format off
#define APEX_TE_CUBLASLT_FUNCTIONS(X) \
  X(cublasLtCreate) \
  X(cublasLtMatmul) \
  X(cublasLtMatmulDescCreate) \
  X(cublasLtMatmulDescSetAttribute) \
  X(cublasLtMatrixLayoutCreate) \
  X(cublasLtMatmulPreferenceCreate) \
  X(cublasLtMatmulPreferenceDestroy) \
  X(cublasLtMatmulPreferenceSetAttribute) \
  X(cublasLtMatmulAlgoGetHeuristic) \
  X(cublasLtMatmulDescDestroy) \
  X(cublasLtMatrixLayoutDestroy) \
  APEX_TE_CUBLASLT_STATUS_STRING(X) \
  X(cublasLtGetVersion)
#if defined(__HIP_PLATFORM_AMD__)
#define APEX_TE_CUBLASLT_STATUS_STRING(X)
#else
#define APEX_TE_CUBLASLT_STATUS_STRING(X) X(cublasLtGetStatusString)
#endif
// clang-format on
#define APEX_TE_POINTER(name) decltype(&::name) name = nullptr;
  APEX_TE_CUBLASLT_FUNCTIONS(APEX_TE_POINTER)
#undef APEX_TE_POINTER

  static const CublasLt& get() {
    static const CublasLt library;  // a failure throws, and the next call tries again
    return library;
  }

 private:
  CublasLt() {
    char soname[32];
    snprintf(soname, sizeof(soname), APEX_TE_LT_SONAME, APEX_TE_LT_MAJOR);
    void* handle = dlopen(soname, RTLD_NOW | RTLD_NOLOAD);
    if (!handle) handle = dlopen(soname, RTLD_NOW | RTLD_LOCAL);
    if (!handle)
      fail(kApexTeRuntimeError,
           "fp8_gemm: %s must be loadable (it comes with " APEX_TE_LT_SOURCE "): %s", soname,
           dlerror());
#define APEX_TE_LOAD(name)                                       \
  name = reinterpret_cast<decltype(name)>(dlsym(handle, #name)); \
  if (!name) fail(kApexTeRuntimeError, "fp8_gemm: %s has no " #name, soname);
    APEX_TE_CUBLASLT_FUNCTIONS(APEX_TE_LOAD)
#undef APEX_TE_LOAD
#undef APEX_TE_CUBLASLT_FUNCTIONS
  }
};

#if defined(__HIP_PLATFORM_AMD__)
struct StatusText {  // the names are hipBLAS's, which is another library
  char text[24];
};
inline StatusText status_text(cublasStatus_t status) {
  StatusText made;
  snprintf(made.text, sizeof(made.text), "hipBLAS status %d", static_cast<int>(status));
  return made;
}
#else
struct StatusText {
  const char* text;
};
inline StatusText status_text(cublasStatus_t status) {
  return {CublasLt::get().cublasLtGetStatusString(status)};
}
#endif

inline void check_cublaslt(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  const int32_t kind =
      status == CUBLAS_STATUS_NOT_SUPPORTED ? kApexTeUnsupported : kApexTeRuntimeError;
  fail(kind, "fp8_gemm: %s: %s", what, status_text(status).text);
}

}  // namespace apex_te
