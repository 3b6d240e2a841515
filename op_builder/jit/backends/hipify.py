"""Translation of CUDA sources to HIP by a fixed table of names, into copies in a build folder."""

# A name without a counterpart stays and fails to compile, rather than being guessed. Not by torch's
# torch.utils.hipify: it needs torch, maps far more, and writes beside its input.

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..sources import closure

HEADERS = {
    "cublasLt.h": "hipblaslt/hipblaslt.h",
    "cuda.h": "hip/hip_runtime.h",
    "cuda_bf16.h": "hip/hip_bf16.h",
    "cuda_fp16.h": "hip/hip_fp16.h",
    "cuda_runtime.h": "hip/hip_runtime.h",
    "cuda_runtime_api.h": "hip/hip_runtime_api.h",
}
# Names whose counterpart is not the same word with another prefix.
NAMES = {
    "CUDART_VERSION": "HIP_VERSION",
    "CUDA_R_16BF": "HIP_R_16BF",
    "CUDA_R_16F": "HIP_R_16F",
    "CUDA_R_32F": "HIP_R_32F",
    "CUDA_R_8F_E4M3": "HIP_R_8F_E4M3",
    "CUDA_R_8F_E5M2": "HIP_R_8F_E5M2",
    "__CUDACC__": "__HIPCC__",
    # HIP's own differ in meaning (csrc/common/gpu/compat.h): a warp is 32 lanes of whatever wave
    "__launch_bounds__": "APEX_TE_LAUNCH_BOUNDS",
    "__ldcg": "apex_te_load_coherent",
    "__shfl_down_sync": "apex_te_shfl_down",
    "__shfl_sync": "apex_te_shfl",
    "__shfl_xor_sync": "apex_te_shfl_xor",
    "__syncwarp": "apex_te_syncwarp",
    "cudaDataType_t": "hipDataType",
    "cudaDevAttrComputeCapabilityMajor": "hipDeviceAttributeComputeCapabilityMajor",
    "cudaDevAttrComputeCapabilityMinor": "hipDeviceAttributeComputeCapabilityMinor",
    # HIP 5 has no opt-in limit: a workgroup may have all the LDS without asking
    "cudaDevAttrMaxSharedMemoryPerBlockOptin": "hipDeviceAttributeMaxSharedMemoryPerBlock",
    "cudaDevAttrMultiProcessorCount": "hipDeviceAttributeMultiprocessorCount",
    "cudaDeviceAttr": "hipDeviceAttribute_t",
    "cudaDeviceProp": "hipDeviceProp_t",
}
# Families that differ in their prefix alone.
_PREFIXES = (
    (re.compile(r"cublasLt(?=[A-Z])"), "hipblasLt"),
    (re.compile(r"CUBLASLT_(?=[A-Z])"), "HIPBLASLT_"),
    (re.compile(r"cublas(?=[A-Z])"), "hipblas"),
    (re.compile(r"CUBLAS_(?=[A-Z])"), "HIPBLAS_"),
    (re.compile(r"cuda(?=[A-Z])"), "hip"),
)
_WORD = re.compile(r"\b(?:__\w+|cuda[A-Z]\w*|CUDA\w+|cublas\w+|CUBLAS\w+)\b")
_INCLUDE = re.compile(r'(^[ \t]*#[ \t]*include[ \t]*[<"])([^>"\n]+)([>"])', re.MULTILINE)


def _word(match: re.Match[str]) -> str:
    if (name := match[0]) in NAMES:
        return NAMES[name]
    return next((p.sub(prefix, name, 1) for p, prefix in _PREFIXES if p.match(name)), name)


def translate(text: str) -> str:
    """Replaces CUDA's names and headers in a text by HIP's; idempotent."""
    parts = _INCLUDE.split(text)  # code, then for each include its begin, path, end and the code
    for i in range(0, len(parts), 4):
        parts[i] = _WORD.sub(_word, parts[i])  # a path is no place for a name's mapping
    parts[2::4] = [HEADERS.get(header, header) for header in parts[2::4]]
    return "".join(parts)


@functools.cache
def digest() -> str:
    """Returns a hash of the mapping's tables, part of the cache key of translated libraries."""
    families = [(pattern.pattern, prefix) for pattern, prefix in _PREFIXES]
    text = repr((HEADERS, NAMES, families, _WORD.pattern, _INCLUDE.pattern))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def copied(path: str, folder: str) -> str:
    """Returns the path below ``folder`` at which ``copies`` puts the copy of the file ``path``."""
    return os.path.join(folder, os.path.abspath(path).lstrip(os.sep))


def copies(sources: Iterable[str], include_paths: Sequence[str], folder: str) -> None:
    """Writes translations of ``sources`` and their project headers to the paths of ``copied``."""
    for path in sorted(closure(sources, include_paths)):
        target = Path(copied(path, folder))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(translate(Path(path).read_text(encoding="utf-8")), encoding="utf-8")
