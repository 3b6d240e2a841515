// The part of hipBLASLt's interface that fp8_gemm uses, for compiling where hipBLASLt is not
// installed; nothing implements it. Names, types and values as its public documentation has them
// (https://rocm.docs.amd.com/projects/hipBLASLt, API of ROCm 6).
#pragma once

#include <hip/hip_runtime.h>

#include <cstddef>
#include <cstdint>

#define HIPBLASLT_VERSION_MAJOR 0

// Newer than the hipDataType of HIP 5.
#define HIP_R_16BF static_cast<hipDataType>(14)
#define HIP_R_8F_E4M3 static_cast<hipDataType>(28)
#define HIP_R_8F_E5M2 static_cast<hipDataType>(29)
#define HIP_R_8F_E4M3_FNUZ static_cast<hipDataType>(1000)
#define HIP_R_8F_E5M2_FNUZ static_cast<hipDataType>(1001)

enum hipblasStatus_t { HIPBLAS_STATUS_SUCCESS = 0, HIPBLAS_STATUS_NOT_SUPPORTED = 7 };
enum hipblasOperation_t { HIPBLAS_OP_N = 111, HIPBLAS_OP_T = 112 };
enum hipblasComputeType_t { HIPBLAS_COMPUTE_32F = 2 };

enum hipblasLtEpilogue_t {
  HIPBLASLT_EPILOGUE_DEFAULT = 1,
  HIPBLASLT_EPILOGUE_BIAS = 4,
  HIPBLASLT_EPILOGUE_GELU_AUX = 160,
  HIPBLASLT_EPILOGUE_GELU_AUX_BIAS = 164,
};
enum hipblasLtMatmulDescAttributes_t {
  HIPBLASLT_MATMUL_DESC_TRANSA = 0,
  HIPBLASLT_MATMUL_DESC_TRANSB = 1,
  HIPBLASLT_MATMUL_DESC_EPILOGUE = 2,
  HIPBLASLT_MATMUL_DESC_BIAS_POINTER = 3,
  HIPBLASLT_MATMUL_DESC_BIAS_DATA_TYPE = 4,
  HIPBLASLT_MATMUL_DESC_A_SCALE_POINTER = 5,
  HIPBLASLT_MATMUL_DESC_B_SCALE_POINTER = 6,
  HIPBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER = 10,
  HIPBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD = 11,
  HIPBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE = 22,
};
enum hipblasLtMatmulPreferenceAttributes_t { HIPBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1 };

typedef void* hipblasLtHandle_t;
typedef struct hipblasLtMatmulDescOpaque* hipblasLtMatmulDesc_t;
typedef struct hipblasLtMatrixLayoutOpaque* hipblasLtMatrixLayout_t;
typedef struct hipblasLtMatmulPreferenceOpaque* hipblasLtMatmulPreference_t;
struct hipblasLtMatmulAlgo_t {
  uint8_t data[16];
  size_t max_workspace_bytes;
};
struct hipblasLtMatmulHeuristicResult_t {
  hipblasLtMatmulAlgo_t algo;
  size_t workspaceSize;
  hipblasStatus_t state;
  float wavesCount;
  int reserved[4];
};

extern "C" {
hipblasStatus_t hipblasLtGetVersion(hipblasLtHandle_t handle, int* version);
hipblasStatus_t hipblasLtCreate(hipblasLtHandle_t* handle);
hipblasStatus_t hipblasLtMatrixLayoutCreate(hipblasLtMatrixLayout_t* layout, hipDataType type,
                                            uint64_t rows, uint64_t cols, int64_t ld);
hipblasStatus_t hipblasLtMatrixLayoutDestroy(const hipblasLtMatrixLayout_t layout);
hipblasStatus_t hipblasLtMatmulDescCreate(hipblasLtMatmulDesc_t* desc, hipblasComputeType_t compute,
                                          hipDataType scale);
hipblasStatus_t hipblasLtMatmulDescDestroy(const hipblasLtMatmulDesc_t desc);
hipblasStatus_t hipblasLtMatmulDescSetAttribute(hipblasLtMatmulDesc_t desc,
                                                hipblasLtMatmulDescAttributes_t attribute,
                                                const void* value, size_t bytes);
hipblasStatus_t hipblasLtMatmulPreferenceCreate(hipblasLtMatmulPreference_t* preference);
hipblasStatus_t hipblasLtMatmulPreferenceDestroy(const hipblasLtMatmulPreference_t preference);
hipblasStatus_t hipblasLtMatmulPreferenceSetAttribute(
    hipblasLtMatmulPreference_t preference, hipblasLtMatmulPreferenceAttributes_t attribute,
    const void* value, size_t bytes);
hipblasStatus_t hipblasLtMatmulAlgoGetHeuristic(
    hipblasLtHandle_t handle, hipblasLtMatmulDesc_t desc, hipblasLtMatrixLayout_t a,
    hipblasLtMatrixLayout_t b, hipblasLtMatrixLayout_t c, hipblasLtMatrixLayout_t d,
    hipblasLtMatmulPreference_t preference, int requested,
    hipblasLtMatmulHeuristicResult_t results[], int* found);
hipblasStatus_t hipblasLtMatmul(hipblasLtHandle_t handle, hipblasLtMatmulDesc_t desc,
                                const void* alpha, const void* a, hipblasLtMatrixLayout_t a_layout,
                                const void* b, hipblasLtMatrixLayout_t b_layout, const void* beta,
                                const void* c, hipblasLtMatrixLayout_t c_layout, void* d,
                                hipblasLtMatrixLayout_t d_layout, const hipblasLtMatmulAlgo_t* algo,
                                void* workspace, size_t bytes, hipStream_t stream);
}
