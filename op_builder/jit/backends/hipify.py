"""Translation of CUDA sources to HIP by a fixed table of names, into copies in a build folder.

The suite's sources use a narrow part of the CUDA runtime, so names are mapped one by one and a name
without a counterpart stays as it is and fails to compile, rather than being guessed. Code that
differs in more than its names is guarded in the sources by ``__HIP_PLATFORM_AMD__``. torch's own
``torch.utils.hipify`` is not used: it needs torch, maps far more, and writes beside its input.
"""

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
    """Returns HIP's counterpart of the CUDA name that ``match`` found, or the name itself."""
    if (name := match[0]) in NAMES:
        return NAMES[name]
    return next((p.sub(prefix, name, 1) for p, prefix in _PREFIXES if p.match(name)), name)


def translate(text: str) -> str:
    """Replaces CUDA's names and headers in a text by HIP's; idempotent."""
    pieces, position = [], 0
    for match in _INCLUDE.finditer(text):  # a path is no place for a name's mapping
        pieces.append(_WORD.sub(_word, text[position : match.start()]))
        header = HEADERS.get(match[2])
        pieces.append(f"{match[1]}{header}{match[3]}" if header else match[0])
        position = match.end()
    pieces.append(_WORD.sub(_word, text[position:]))
    return "".join(pieces)


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
