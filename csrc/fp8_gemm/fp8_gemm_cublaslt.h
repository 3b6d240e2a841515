// cuBLASLt, opened at run time: the library links none and runs with the copy torch has loaded.
#pragma once

#include <cublasLt.h>
#include <dlfcn.h>

#include <cstdio>

#include "common/gpu.h"

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
  X(cublasLtGetStatusString) \
  X(cublasLtGetVersion)
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
    snprintf(soname, sizeof(soname), "libcublasLt.so.%d", CUBLAS_VER_MAJOR);
    void* handle = dlopen(soname, RTLD_NOW | RTLD_NOLOAD);
    if (!handle) handle = dlopen(soname, RTLD_NOW | RTLD_LOCAL);
    if (!handle)
      fail(kApexTeRuntimeError,
           "fp8_gemm: %s must be loadable (it comes with a CUDA %d build of torch or the toolkit): "
           "%s",
           soname, CUBLAS_VER_MAJOR, dlerror());
#define APEX_TE_LOAD(name)                                       \
  name = reinterpret_cast<decltype(name)>(dlsym(handle, #name)); \
  if (!name) fail(kApexTeRuntimeError, "fp8_gemm: %s has no " #name, soname);
    APEX_TE_CUBLASLT_FUNCTIONS(APEX_TE_LOAD)
#undef APEX_TE_LOAD
#undef APEX_TE_CUBLASLT_FUNCTIONS
  }
};

inline void check_cublaslt(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  const int32_t kind =
      status == CUBLAS_STATUS_NOT_SUPPORTED ? kApexTeUnsupported : kApexTeRuntimeError;
  fail(kind, "fp8_gemm: %s: %s", what, CublasLt::get().cublasLtGetStatusString(status));
}

}  // namespace apex_te
