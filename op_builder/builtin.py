"""Table of apex_te's own ops: what their builders declare beside the default of ``CUDAOpBuilder``.

A new op may have a line here or, as ``scripts/new_op.py`` writes it, a file of its name in this
folder with a builder class. Sources, headers and functions are found in ``csrc`` by the op's name.
"""

from __future__ import annotations

from typing import NamedTuple

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


OPS = {
    "activation": Op(
        "GeLU, quick GeLU, ReLU, squared ReLU and SiLU, also with FP8 output", cxx_args=_VECTORIZED
    ),
    "amax_scale_update": Op(
        "the update, which computes the next step's scales from amax histories"
    ),
    "attention_sink": Op("softmax sinks from attention's log-sum-exp, and their gradient"),
    "batch_norm": Op(
        "batch normalisation: statistics, their combination, forward with residual and ReLU, "
        "and the gradients"
    ),
    "bias_dropout_add": Op("bias addition, dropout and residual addition in one pass"),
    "bias_gelu": Op(
        "GeLU of a sum with a bias, and of its gradients, also with FP8 output",
        cxx_args=_VECTORIZED,
    ),
    "block_quantize": Op(
        "the cast to FP8 with block scaling, rowwise and columnwise copy in one pass"
    ),
    "byte_transpose": Op("the transpose of a matrix of FP8 data"),
    "cast_transpose": Op(
        "the cast to FP8 with a given scale, rowwise and columnwise copy in one pass"
    ),
    "cross_entropy": Op("softmax cross entropy and its gradient from one read of the logits"),
    "current_scale": Op(
        "the cast to FP8 with current scaling, whose scale comes from the tensor's amax"
    ),
    "dense_gemm": Op(
        "FP8 GEMMs by apex_te's own kernels; only for GPUs of arch 9.0, not for the CPU",
        devices=("cuda",),
        min_arch=(9, 0),
    ),
    "focal_loss": Op("the sigmoid focal loss and its gradient in one pass over the logits"),
    "fp8_gemm": Op(
        "FP8 GEMMs, which check for arch 8.9 in each call: ``min_arch`` is only 8.0",
        needs_blas=True,
    ),
    "grouped_cast": Op(
        "the cast to FP8 of groups of rows that it gathers, or whose gated activation or its "
        "gradient it computes; only for GPUs, since the CPU composes the ops",
        devices=("cuda",),
    ),
    "grouped_gemm": Op(
        "FP8 GEMMs over groups of rows, whose sizes lie on the GPU; for arch 9.0 alone",
        devices=("cuda",),
        min_arch=(9, 0),
    ),
    "grouped_quantize": Op(
        "the cast to FP8 of groups of rows, one scale each; their sizes lie on the GPU"
    ),
    "hif8": Op("HiF8 encoding, decoding, and the cast with one scale for the tensor"),
    "index_mul_2d": Op(
        "rows that an index picks times other rows, and the gradients, summed in a fixed order"
    ),
    "layer_norm": Op("layer normalisation, also with a residual and with FP8 output"),
    "moe_permute": Op("the permutation of tokens' rows to their experts and back"),
    "moe_router": Op("the choice of each token's experts, their scores, and the gradients"),
    "multi_tensor": Op("operations over lists of tensors: reductions, maps and optimizer steps"),
    "mx_quantize": Op("the cast to MXFP8, rowwise and columnwise copy in one pass"),
    "peer_exchange": Op(
        "copies to the memory of other GPUs of a host, and of sums of received data",
        devices=("cuda",),
    ),
    "qkv_cast": Op("the casts of a fused QKV projection's weight and output gradient to FP8"),
    "rms_norm": Op("RMS normalisation, also with a residual and with FP8 output"),
    "rope": Op("rotary position embedding"),
    "row_quantize": Op("the cast to FP8 with a scale for each row of either copy"),
    "scaled_softmax": Op(
        "the softmax of scaled, masked or causal attention scores, and of its gradient"
    ),
    "swiglu": Op("the gated activations SwiGLU, GeGLU, ReGLU and GLU"),
    "swiglu_block": Op("the gated activations that are cast to FP8 with block scaling in one pass"),
    "transducer_joint": Op(
        "sums of all pairs of a transducer's frames and labels, with ReLU and dropout"
    ),
    "transducer_loss": Op("the loss of a transducer and its gradient, fused with that of softmax"),
}
