"""apex's transducer_joint_cuda: sums of all pairs of frames and labels, and their gradients."""

from __future__ import annotations

import torch

from apex_te._version import __version__ as __version__
from apex_te.ops.transducer_joint import transducer_joint_bwd, transducer_joint_fwd

__all__ = ["backward", "forward"]


@torch.no_grad()
def forward(
    f: torch.Tensor,
    g: torch.Tensor,
    f_len: torch.Tensor,
    g_len: torch.Tensor,
    batch_offset: torch.Tensor,
    packed_batch: int,
    opt: int,
    pack_output: bool,
    relu: bool,
    dropout: bool,
    dropout_prob: float,
    tile_size: int,
) -> list[torch.Tensor]:
    """Computes f[:, :, None] + g[:, None], then ReLU and dropout where they are asked for.

    Args:
        f: [B, T, H], float32, float16 or bfloat16.
        g: [B, U, H].
        f_len, g_len: int32 [B].
        batch_offset: cumsum(f_len * g_len), int64 [B]; not read unless pack_output.
        packed_batch: rows of the packed result.
        opt, tile_size: not used; there is one kernel.
        pack_output: True for a result without the cells behind the lengths, which else are -1.
        relu, dropout: True to apply them.
        dropout_prob: probability of an element to be dropped; the seed is drawn from torch's
            default generator of the device.

    Returns:
        [h], [B, T, U, H] or [packed_batch, H]; with relu or dropout [h, mask], uint8 of its shape.
    """
    p = float(dropout_prob) if dropout else 0.0
    seed = None
    if 0.0 < p < 1.0:
        seed = torch.randint(0, 2**63 - 1, (1,), device=f.device)
    out, mask = transducer_joint_fwd(
        f, g, f_len, g_len, batch_offset if pack_output else None, packed_batch, relu=relu, p=p,
        seed=seed, with_mask=relu or dropout,
    )  # fmt: skip
    return [out] if mask is None else [out, mask]


@torch.no_grad()
def backward(
    input: list[torch.Tensor],
    f_len: torch.Tensor,
    g_len: torch.Tensor,
    batch_offset: torch.Tensor,
    max_f_len: int,
    max_g_len: int,
    pack_output: bool,
    scale: float,
) -> list[torch.Tensor]:
    """Computes [df, dg], [B, max_f_len, H] and [B, max_g_len, H].

    Args:
        input: [grad] or [grad, mask].
        f_len, g_len, batch_offset, pack_output: as in ``forward``.
        max_f_len, max_g_len: T and U.
        scale: factor of the gradient, 1 / (1 - dropout_prob).
    """
    if len(input) not in (1, 2):
        raise ValueError(
            f"transducer_joint_cuda.backward: input must have 1 or 2 tensors, got {len(input)}"
        )
    grad, mask = (*input, None)[:2]
    assert grad is not None
    offset = batch_offset if pack_output else None
    return list(transducer_joint_bwd(grad, mask, f_len, g_len, offset, max_f_len, max_g_len, scale))
