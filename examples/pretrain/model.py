"""A Llama-style decoder: embedding, ``TransformerLayer`` blocks, RMSNorm and a head with its loss.

Blocks have RMSNorm, rotary embedding, grouped queries and SwiGLU, and no biases. They compute in
FP8 inside ``apex_te.fp8_autocast``; the embedding, the last norm and, unless asked for otherwise,
the head compute in the dtype of the parameters.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from config import Shape
from experts import ExpertBlock
from plain import PlainBlock, plain_loss
from torch import nn

import apex_te
from apex_te.recipe import Recipe

EPS = 1e-5
ROTARY_BASE = 10000.0
ENDS_BRANCH = ("proj.weight", "fc2_weight", "fc2.weight")


def te_block(
    shape: Shape, number: int, dtype: torch.dtype, device: torch.device, packed: bool,
    main_grads: bool, tp_group: Any,
) -> nn.Module:  # fmt: skip
    """Returns a block of apex_te, with a mixture of experts if the shape has some.

    Args:
        shape: sizes of the model.
        number: the block's, from 1.
        dtype: of its parameters.
        device: where they lie.
        packed: documents are packed one after the other, ``[tokens, dim]``, else
            ``[sequences, context, dim]``.
        main_grads: weight gradients are added to a float32 ``main_grad`` of the weights.
        tp_group: ranks that split the block, or None.
    """
    if shape.experts:
        return ExpertBlock(shape, number, dtype, device, packed, main_grads, EPS)
    return apex_te.TransformerLayer(
        shape.dim,
        shape.ffn,
        shape.heads,
        num_gqa_groups=shape.groups,
        layernorm_epsilon=EPS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        layer_number=number,
        bias=False,
        activation="swiglu",
        normalization="RMSNorm",
        fuse_qkv_params=True,
        qkv_weight_interleaved=False,
        attn_input_format="thd" if packed else "bshd",
        fuse_wgrad_accumulation=main_grads,
        params_dtype=dtype,
        device=device,
        set_parallel_mode=tp_group is not None,
        tp_group=tp_group,
    )


class Llama(nn.Module):
    """Decoder that returns the summed loss of its targets, or logits of the last tokens.

    Args:
        shape: sizes of the model.
        vocabulary: number of tokens.
        context: most tokens of a sequence.
        layers: ``"apex_te"``, or ``"torch"`` for blocks of plain PyTorch.
        tied: the head's weight is the embedding's.
        dtype, device: of the parameters.
        packed: as in ``te_block``.
        recompute: recompute every so many-th block's activations in backward; 0 is none.
        main_grads, tp_group: as in ``te_block``.
        head_recipe: recipe of the head's products; None computes them in ``dtype``.
    """

    def __init__(
        self,
        shape: Shape,
        vocabulary: int,
        context: int,
        *,
        layers: str = "apex_te",
        tied: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        packed: bool = False,
        recompute: int = 0,
        main_grads: bool = False,
        tp_group: Any = None,
        head_recipe: Recipe | None = None,
    ) -> None:
        super().__init__()
        device = torch.device(device)
        self.shape, self.context, self.packed = shape, context, packed
        self.layers, self.recompute, self.head_recipe = layers, recompute, head_recipe
        self.tokens = nn.Embedding(vocabulary, shape.dim, device=device, dtype=dtype)
        self.blocks = nn.ModuleList(
            te_block(shape, i + 1, dtype, device, packed, main_grads, tp_group)
            if layers == "apex_te"
            else PlainBlock(shape, EPS, dtype, device)
            for i in range(shape.layers)
        )
        norm = apex_te.RMSNorm if layers == "apex_te" else nn.RMSNorm
        self.norm = norm(shape.dim, EPS, device=device, dtype=dtype)
        self.head = None if tied else nn.Linear(
            shape.dim, vocabulary, bias=False, device=device, dtype=dtype
        )  # fmt: skip
        rotary = apex_te.RotaryPositionEmbedding(
            shape.dim // shape.heads, rotary_base=ROTARY_BASE, device=device
        )
        self.register_buffer("angles", rotary(context), persistent=False)
        self.plain_loss = plain_loss  # which may be compiled

    def head_weight(self) -> torch.Tensor:
        """Returns the head's weight, [vocabulary, dim]."""
        return self.tokens.weight if self.head is None else self.head.weight

    def split_sequences(self, cp_group: Any) -> None:
        """Has blocks of apex_te expect this rank's tokens of each sequence; None: whole sequences.

        Grouped queries have few keys and values, which ranks gather.
        """
        for module in self.modules():
            if isinstance(module, apex_te.MultiheadAttention):
                module.set_context_parallel_group(cp_group, cp_comm_type="all_gather")
            elif isinstance(module, apex_te.MoELayer):
                module.set_context_parallel_group(cp_group)

    def forward(
        self,
        ids: torch.Tensor,
        targets: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        padded: torch.Tensor | None = None,
        is_first_microbatch: bool | None = None,
        cache: apex_te.InferenceParams | None = None,
    ) -> torch.Tensor:
        """Returns the loss summed over ``targets``, float32; without them logits.

        Args:
            ids: tokens, int64 [sequences, context]; packed [1, tokens].
            targets: the tokens to predict, in the shape of ``ids``; -100 is none.
            cu_seqlens: packed, where documents begin, int32 [documents + 1].
            padded: where they begin with padding between them; see ``batches.Batch``.
            is_first_microbatch: as in ``TransformerLayer.forward``.
            cache: keys and values of earlier tokens; ``pre_step`` has announced these.

        Returns:
            The loss, or without targets the logits of the last token of each row, float32
            [sequences, vocabulary].
        """
        hidden = self.tokens(ids[0] if self.packed else ids)
        options: dict[str, Any] = {"rotary_pos_emb": self.angles}
        if self.layers == "apex_te":
            if is_first_microbatch is not None:
                options["is_first_microbatch"] = is_first_microbatch
            if cache is not None:
                options["inference_params"] = cache
            elif self.packed:
                longest = self.context
                options |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens}
                options |= {"max_seqlen_q": longest, "max_seqlen_kv": longest}
                options |= {"cu_seqlens_q_padded": padded, "cu_seqlens_kv_padded": padded}
        for index, block in enumerate(self.blocks):
            if self.recompute and index % self.recompute == 0 and torch.is_grad_enabled():
                hidden = apex_te.checkpoint(block, hidden, use_reentrant=False, **options)
            else:
                hidden = block(hidden, **options)
        if targets is None:
            last = self.norm(hidden[-1:] if self.packed else hidden[:, -1])
            return nn.functional.linear(last, self.head_weight()).float()
        if self.layers != "apex_te":
            return self.plain_loss(hidden, self.norm, self.head_weight(), targets)
        return apex_te.linear_cross_entropy(
            self.norm(hidden),
            self.head_weight(),
            targets[0] if self.packed else targets,
            reduction="sum",
            fp8_recipe=self.head_recipe,
        )


@torch.no_grad()
def draw_weights(model: Llama, seed: int, part_of: Any = None) -> None:
    """Draws normal weights of deviation 0.02; smaller ones where a residual branch ends.

    Each weight has a generator of its own, so that its values do not depend on the kind of layers,
    the ranks or the number of blocks drawn before; the device they are drawn on matters.

    Args:
        model: whose matrices are drawn; norms keep their ones.
        seed: of the run.
        part_of: returns this rank's part of a whole weight, ``(name, parameter, draw)``, where
            ``draw`` makes the whole of a shape; None keeps all.
    """
    residual = 0.02 / math.sqrt(2 * model.shape.layers)
    matrices = [(n, p) for n, p in model.named_parameters() if p.dim() > 1]
    for index, (name, parameter) in enumerate(matrices):
        parameter.copy_(drawn(index, name, parameter, seed, residual, part_of))


def drawn(
    index: int, name: str, parameter: torch.Tensor, seed: int, residual: float, part_of: Any
) -> torch.Tensor:
    """Returns the first values of a matrix in the parameter's dtype; see ``draw_weights``."""
    std = residual if name.endswith(ENDS_BRANCH) else 0.02

    def draw(shape: Any) -> torch.Tensor:
        generator = torch.Generator(parameter.device).manual_seed(seed * 100_003 + index)
        whole = torch.empty(shape, device=parameter.device)
        return whole.normal_(std=std, generator=generator).to(parameter.dtype)

    return draw(parameter.shape) if part_of is None else part_of(name, parameter, draw)
