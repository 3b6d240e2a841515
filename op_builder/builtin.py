"""Table of apex_te's own ops: what their builders declare beside ``CUDAOpBuilder``'s default."""

from __future__ import annotations

from typing import Any, NamedTuple

from .jit.backends.archs import Capability

# Without it the CPU loops of these ops are not vectorized: jump threading would turn clamped
# arguments into selections of whole results.
_VECTORIZED = ("-fno-thread-jumps",)


class Op(NamedTuple):
    """One line of the table: what the op computes, and what differs from the default."""

    text: str
    devices: tuple[str, ...] = ("cpu", "cuda")
    min_arch: Capability = (8, 0)
    cxx_args: tuple[str, ...] = ()
    needs_blas: bool = False  # its CUDA sources include cuBLASLt's header


_TEXTS = {
    "activation": "GeLU, quick GeLU, ReLU, squared ReLU and SiLU, also with FP8 output",
    "amax_scale_update": "the update, which computes the next step's scales from amax histories",
    "attention_sink": "softmax sinks from attention's log-sum-exp, and their gradient",
    "batch_norm": (
        "batch normalisation, whole and in steps: statistics, their combination, forward with "
        "residual and ReLU, and the gradients"
    ),
    "bias_dropout_add": "bias addition, dropout and residual addition in one pass",
    "bias_gelu": "GeLU of a sum with a bias, and of its gradients, also with FP8 output",
    "block_quantize": "the cast to FP8 with block scaling, rowwise and columnwise copy in one pass",
    "byte_transpose": "the transpose of a matrix of FP8 data",
    "cast_transpose": "the cast to FP8 with a given scale, rowwise and columnwise copy in one pass",
    "cross_entropy": "softmax cross entropy and its gradient from one read of the logits",
    "current_scale": (
        "the cast to FP8 with current scaling, whose scale comes from the tensor's amax"
    ),
    "dense_gemm": "FP8 GEMMs by apex_te's own kernels; only for GPUs of arch 9.0, not for the CPU",
    "focal_loss": "the sigmoid focal loss and its gradient in one pass over the logits",
    "fp8_gemm": "FP8 GEMMs, which check for arch 8.9 in each call: ``min_arch`` is only 8.0",
    "grouped_cast": (
        "the cast to FP8 of groups of rows that it gathers, or whose gated activation or its "
        "gradient it computes; only for GPUs, since the CPU composes the ops"
    ),
    "grouped_gemm": "FP8 GEMMs over groups of rows, whose sizes lie on the GPU; for arch 9.0 alone",
    "grouped_quantize": (
        "the cast to FP8 of groups of rows, one scale each; their sizes lie on the GPU"
    ),
    "hif8": "HiF8 encoding, decoding, and the cast with one scale for the tensor",
    "index_mul_2d": (
        "rows that an index picks times other rows, and the gradients, summed in a fixed order"
    ),
    "layer_norm": "layer normalisation, also with a residual and with FP8 output",
    "moe_permute": "the permutation of tokens' rows to their experts and back",
    "moe_router": "the choice of each token's experts, their scores, and the gradients",
    "multi_tensor": "operations over lists of tensors: reductions, maps and optimizer steps",
    "mx_quantize": "the cast to MXFP8, rowwise and columnwise copy in one pass",
    "peer_exchange": "copies to the memory of other GPUs of a host, and of sums of received data",
    "qkv_cast": "the casts of a fused QKV projection's weight and output gradient to FP8",
    "rms_norm": "RMS normalisation, also with a residual and with FP8 output",
    "rope": "rotary position embedding",
    "row_quantize": "the cast to FP8 with a scale for each row of either copy",
    "scaled_softmax": (
        "the softmax of scaled, masked or causal attention scores, and of its gradient"
    ),
    "swiglu": "the gated activations SwiGLU, GeGLU, ReGLU and GLU",
    "swiglu_block": "the gated activations that are cast to FP8 with block scaling in one pass",
    "transducer_joint": (
        "sums of all pairs of a transducer's frames and labels, with ReLU and dropout"
    ),
    "transducer_loss": "the loss of a transducer and its gradient, fused with that of softmax",
}
_OTHERWISE: dict[str, dict[str, Any]] = {
    "activation": {"cxx_args": _VECTORIZED},
    "bias_gelu": {"cxx_args": _VECTORIZED},
    "dense_gemm": {"devices": ("cuda",), "min_arch": (9, 0)},
    "fp8_gemm": {"needs_blas": True},
    "grouped_cast": {"devices": ("cuda",)},
    "grouped_gemm": {"devices": ("cuda",), "min_arch": (9, 0)},
    "peer_exchange": {"devices": ("cuda",)},
}
OPS = {name: Op(text, **_OTHERWISE.get(name, {})) for name, text in _TEXTS.items()}
