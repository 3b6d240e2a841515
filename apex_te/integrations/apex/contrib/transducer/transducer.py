"""Modules of a transducer, by the ops ``transducer_joint`` and ``transducer_loss``."""

from __future__ import annotations

import torch

from .....ops import transducer_joint as joint
from .....ops.transducer_loss import transducer_loss, transducer_loss_fwd

__all__ = ["TransducerJoint", "TransducerLoss"]


class TransducerJoint(torch.nn.Module):
    """Joint of a transducer (RNN-T): sums of all pairs of frames and labels, optionally packed.

    Args:
        pack_output: pack the result, without the elements beyond the lengths.
        relu: apply a ReLU to the sums.
        dropout: apply dropout in training.
        opt: 0 or 1; both use one kernel, but 0 refuses ReLU and dropout.
        fwd_tile_size: not used.
        dropout_prob: dropout probability.
        probe_mask: append the mask of each forward to ``mask_probe``.

    Raises:
        NotImplementedError: ReLU or dropout with ``opt`` 0.
    """

    def __init__(
        self,
        pack_output: bool = False,
        relu: bool = False,
        dropout: bool = False,
        opt: int = 1,
        fwd_tile_size: int = 4,
        dropout_prob: float = 0,
        probe_mask: bool = False,
    ) -> None:
        super().__init__()
        self.pack_output = pack_output
        self.relu = relu
        self.dropout = dropout
        self.dropout_prob = dropout_prob
        self.opt = opt
        self.fwd_tile_size = fwd_tile_size
        self.mask_probe: list[torch.Tensor] | None = None
        if relu or dropout:
            if opt != 1:
                raise NotImplementedError(
                    f"TransducerJoint: opt must be 1 for ReLU and dropout, got {opt}"
                )
            self.mask_probe = [] if probe_mask else None

    def forward(
        self,
        f: torch.Tensor,
        g: torch.Tensor,
        f_len: torch.Tensor,
        g_len: torch.Tensor,
        batch_offset: torch.Tensor | None = None,
        packed_batch: int = 0,
    ) -> torch.Tensor:
        """Returns the joint of f [B, T, H] and g [B, U, H], [B, T, U, H] or [packed_batch, H].

        Args:
            f, g: float32, float16 or bfloat16.
            f_len, g_len: int32 [B], lengths of each sample in T and U.
            batch_offset: int64 [B], ``cumsum(f_len * g_len)``, with ``pack_output``.
            packed_batch: the last element of ``batch_offset``.

        Raises:
            ValueError: ``batch_offset`` or ``packed_batch`` is missing, or a shape does not match.
        """
        offset = batch_offset if self.pack_output else None
        if self.pack_output and (offset is None or packed_batch == 0):
            raise ValueError(
                "TransducerJoint: batch_offset and packed_batch must be given with pack_output, "
                f"got {type(offset).__name__} and {packed_batch}"
            )
        p = float(self.dropout_prob) if self.dropout and self.training else 0.0
        seed = None
        if 0.0 < p < 1.0:
            seed = torch.randint(0, 2**63 - 1, (1,), device=f.device)
        args = f, g, f_len, g_len, offset, packed_batch
        if self.mask_probe is not None:
            with torch.no_grad():
                _, mask = joint.transducer_joint_fwd(*args, relu=self.relu, p=p, seed=seed)
            assert mask is not None
            self.mask_probe.append(mask)
        return joint.transducer_joint(*args, relu=self.relu, p=p, seed=seed)


class TransducerLoss(torch.nn.Module):
    """Transducer (RNN-T, arXiv 1211.3711) loss of logits, including their log-softmax.

    ``apex_te.ops.transducer_loss`` computes it.

    Args:
        fuse_softmax_backward: compute the gradients of softmax and loss together, from the logits;
            False leaves the softmax to ``torch.log_softmax``.
        opt: not used.
        packed_input: logits are packed, without the elements beyond the lengths.

    Source: apex.contrib.transducer.
    """

    def __init__(
        self, fuse_softmax_backward: bool = True, opt: int = 1, packed_input: bool = False
    ) -> None:
        super().__init__()
        self.fuse_softmax_backward = fuse_softmax_backward
        self.opt = opt
        self.packed_input = packed_input

    def forward(
        self,
        x: torch.Tensor,
        label: torch.Tensor,
        f_len: torch.Tensor,
        y_len: torch.Tensor,
        blank_idx: int,
        batch_offset: torch.Tensor | None = None,
        max_f_len: int | None = None,
        debug_list: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Returns the loss of each sample, [B] in the dtype of x.

        Args:
            x: logits [B, T, U, V] or packed [rows, V], float32, float16 or bfloat16.
            label: int32 [B, U - 1].
            f_len, y_len: frames and labels of each sample, int32 [B].
            blank_idx: index of the blank symbol.
            batch_offset: cumsum(f_len * (y_len + 1)), int64 [B], with ``packed_input``.
            max_f_len: T, with ``packed_input``.
            debug_list: an empty list that receives alpha and beta, from a second forward; None does
                not.

        Raises:
            ValueError: ``batch_offset`` or ``max_f_len`` is missing, or a shape does not match.
        """
        offset = batch_offset if self.packed_input else None
        if self.packed_input and (offset is None or max_f_len is None):
            raise ValueError(
                "TransducerLoss: batch_offset and max_f_len must be given with packed_input, "
                f"got {type(offset).__name__} and {max_f_len}"
            )
        if not self.fuse_softmax_backward:
            x = x.log_softmax(-1)
        args = label, f_len, y_len, blank_idx, offset, max_f_len
        if debug_list == []:
            with torch.no_grad():
                logs = x.log_softmax(-1) if self.fuse_softmax_backward else x
                debug_list += transducer_loss_fwd(logs, *args)[:2]
        return transducer_loss(x, *args, log_probs=not self.fuse_softmax_backward)
