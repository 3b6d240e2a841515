"""``fuse_latent_attention``, for DeepSeek's attention and what computes alike in transformers."""

from __future__ import annotations

import copy
import sys
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from ..fp8.parameter.parameter import FP8Parameter
from ..module._core.fp8_module import FP8Module
from ..module._core.parallel import is_observed
from ..module._core.recompute import Recomputed
from ..module.attention.latent_cache import attend_to_latents, is_absorbing_faster
from ..module.attention.latent_heads import Turn, latent_heads
from ..runtime.invariance import is_batch_invariant
from ..runtime.named_arguments import check_flags, check_model, named_arguments
from ..runtime.tracing import is_traced
from ._derived import derived
from ._probe import agree, probed, random, stand_in

_Model = TypeVar("_Model", bound=nn.Module)
_ROTATIONS = ("interleaved", "half", "complex", "none")
_PARTS = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj", "expand_kv")
_SIZES = {
    "hidden_size": 16, "num_heads": 2, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
    "qk_head_dim": 8, "v_head_dim": 6, "kv_lora_rank": 10, "q_lora_rank": 12,
    "num_key_value_groups": 1,
}  # fmt: skip


@named_arguments()
def fuse_latent_attention(model: _Model, recompute_up_proj: bool = False) -> _Model:
    """Makes latent attention of Hugging Face models compute as ``MultiLatentAttention`` does.

    The attention modules of DeepSeek-V2 and V3, GLM, MiniCPM3, Youtu, LongCat, Kimi and others
    become instances of a subclass of their class, which writes queries, keys and values in one pass
    each and calls the model's own attention implementation. During generation, new tokens attend to
    the cached latents directly, except with ``attn_implementation="eager"``. To tell whether a
    class is supported, its forward is called on a small copy. Parameters, keys, hooks and files are
    unchanged, and results are equal up to rounding. Call it after ``from_torch``, which converts
    and joins the projections.

    Args:
        model: any model or layer, changed in place.
        recompute_up_proj: recompute queries, keys and values from their latents in backward,
            instead of saving them; no effect under ``torch.compile``.

    Returns:
        ``model``.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: no latent attention of the model can be converted.
    """
    check_model("fuse_latent_attention", model)
    check_flags("fuse_latent_attention", recompute_up_proj=recompute_up_proj)
    found, others = 0, set()
    for module in model.modules():
        of: Any = module
        if not isinstance(module, FusedLatentAttention):
            if not all(hasattr(module, name) for name in _PARTS):
                continue
            rotation = None if "forward" in vars(module) else probed(module, _rotation_of)
            if rotation is None:
                others.add(type(module).__name__)
                continue
            of.rotation = rotation
            of.__class__ = derived(FusedLatentAttention, type(module))
        of.recompute_up_proj = recompute_up_proj
        found += 1
    if not found:
        unlike = f"others ({', '.join(sorted(others))})" if others else "none"
        raise ValueError(
            "fuse_latent_attention: model must have attention with the formula of DeepSeek-V3's, "
            f"got {unlike}"
        )
    return model


class _Attention(NamedTuple):
    """Mask and options of a call of attention."""

    mask: Any
    options: dict[str, Any]


class FusedLatentAttention(nn.Module):
    """Latent attention of a class of transformers, whose submodules and attributes it has.

    Attributes:
        rotation: how queries and keys are rotated, one of ``"interleaved"``, ``"half"``,
            ``"complex"`` and ``"none"``.
        recompute_up_proj: compute queries, keys and values again in backward.
    """

    rotation: str
    recompute_up_proj: bool

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        """Returns the result [b, s, hidden] and attention's weights, if there are any."""
        of: Any = self
        source = (of.q_proj if of.q_lora_rank is None else of.q_a_proj)(hidden_states)
        down = of.kv_a_proj_with_mqa(hidden_states)
        latent, part = down.split([of.kv_lora_rank, of.qk_rope_head_dim], -1)
        latent = _scaled(of.kv_a_layernorm(latent), of, "mla_scale_kv_lora")
        turn = _turn(self.rotation, position_embeddings)
        how = _Attention(attention_mask, kwargs)
        weights = None
        if past_key_values is not None:
            out, weights = self._cached(source, latent, part, turn, past_key_values, how)
        else:
            out, weights = self._attend(lambda: self._heads(source, latent, part, turn), how)
        return of.o_proj(out.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights

    def _queries(self, source: torch.Tensor) -> torch.Tensor:
        """Returns query heads [b, s, h, n + p], not rotated, from their latent if they have one."""
        of: Any = self
        if of.q_lora_rank is not None:
            source = _scaled(of.q_b_proj(of.q_a_layernorm(source)), of, "mla_scale_q_lora")
        return source.unflatten(-1, (-1, of.qk_head_dim))

    def _up(self, latent: torch.Tensor) -> torch.Tensor:
        """Returns keys and values [b, s, h, n + v] without the keys' rotated parts."""
        of: Any = self
        kv: torch.Tensor = of.kv_b_proj(latent)
        return kv.unflatten(-1, (-1, of.qk_nope_head_dim + of.v_head_dim))

    def _heads(
        self, source: torch.Tensor, latent: torch.Tensor, part: torch.Tensor, turn: Turn | None
    ) -> tuple[torch.Tensor, ...]:
        """Returns queries, keys and values [b, s, h, size]."""
        q, kv = self._queries(source), self._up(latent)
        if turn is None or _is_shared(turn, q):
            return latent_heads(q, kv, part, "bshd", turn)
        # Each token has angles of its own.
        q1, kv1, part1 = (x.flatten(0, 1).unsqueeze(1) for x in (q, kv, part))
        made = latent_heads(q1, kv1, part1, "sbhd", turn)
        return tuple(x.view(*q.shape[:2], *x.shape[2:]) for x in made)

    def _attend(self, heads: Any, how: _Attention) -> tuple[torch.Tensor, Any]:
        """Attends by the model's implementation; ``heads()`` returns queries, keys and values."""
        of: Any = self
        again = self.recompute_up_proj and torch.is_grad_enabled() and not is_traced()
        saving: Any = nullcontext()
        made: Any
        if again:
            found = (of._modules.get(name) for name in ("q_b_proj", "kv_b_proj"))
            layers = [layer for layer in found if isinstance(layer, FP8Module)]
            recomputed = Recomputed(layers, heads)
            saving, made = recomputed.saving(), recomputed.results
        else:
            made = heads()
        with saving:
            q, k, v = (x.transpose(1, 2) for x in made)
            del made
            out: tuple[torch.Tensor, Any] = _implementation(of)(
                of, q, k, v, how.mask, dropout=of.attention_dropout if of.training else 0.0,
                scaling=of.scaling, **how.options,
            )  # fmt: skip
        return out

    def _cached(
        self,
        source: torch.Tensor,
        latent: torch.Tensor,
        part: torch.Tensor,
        turn: Turn | None,
        cache: Any,
        how: _Attention,
    ) -> tuple[torch.Tensor, Any]:
        """Attends to the cached tokens, too, by their latents or by keys and values."""
        if is_batch_invariant():
            raise NotImplementedError(
                f"{type(self).__name__}: past_key_values must be None under batch_invariant, "
                "because tokens that attend to latents are summed in another order, got some"
            )
        of: Any = self
        part = part.unsqueeze(2)
        part = part if turn is None else _rotated(part, turn)
        kept, rotated = cache.update(latent.unsqueeze(1), part.transpose(1, 2), of.layer_idx)

        def queries() -> torch.Tensor:
            q, n = self._queries(source), of.qk_nope_head_dim
            return q if turn is None else torch.cat((q[..., :n], _rotated(q[..., n:], turn)), -1)

        if self._absorbs(source.shape[1], kept, how.mask):

            def attend(absorbed: torch.Tensor, turned: torch.Tensor) -> torch.Tensor:
                return _to_latents(absorbed, turned, kept, rotated, how.mask, of.scaling)

            weight = of.kv_b_proj.weight
            return attend_to_latents(attend, queries(), weight, of.qk_rope_head_dim), None

        def heads() -> tuple[torch.Tensor, ...]:
            return latent_heads(queries(), self._up(kept[:, 0]), rotated[:, 0], "bshd", None)

        return self._attend(heads, how)

    def _absorbs(self, tokens: int, kept: torch.Tensor, mask: Any) -> bool:
        """Returns True if new tokens attend to latents: to more tokens, for less work."""
        of: Any = self
        inner = of.qk_nope_head_dim + of.v_head_dim
        known = tokens == 1 if mask is None else isinstance(mask, torch.Tensor) and mask.dim() == 4
        fewer = is_absorbing_faster(tokens, of.kv_lora_rank, inner)
        drops = of.training and of.attention_dropout > 0.0
        plain = of.config._attn_implementation != "eager" and _has_plain_weight(of.kv_b_proj)
        return known and fewer and plain and not drops and kept.shape[2] > tokens


def _has_plain_weight(layer: Any) -> bool:
    """Returns True if a layer is a GEMM with its weight: not adapted, quantized or observed."""
    weight = layer._parameters.get("weight")
    is_plain = type(weight) in (nn.Parameter, FP8Parameter) and weight.is_floating_point()
    return is_plain and weight.element_size() > 1 and layer.bias is None and not is_observed(layer)


def _scaled(x: torch.Tensor, module: Any, name: str) -> torch.Tensor:
    """Returns ``x`` times the module's attribute ``name``, which LongCat's have."""
    factor = getattr(module, name, None)
    return x if factor is None else x * factor


def _to_latents(
    absorbed: torch.Tensor,
    turned: torch.Tensor,
    kept: torch.Tensor,
    rotated: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Returns sums of latents [b, q, h, c] for queries [b, q, h, c] and [b, q, h, p].

    ``kept`` [b, 1, s, c] and ``rotated`` [b, 1, s, p] are what the cache has; ``mask``, [b, 1, q,
    s], is True for visible keys, or added to the scores. All heads are rows of one GEMM.
    """
    (batch, queries, heads, size), keys = absorbed.shape, kept[:, 0]
    rows = absorbed.reshape(batch, queries * heads, size)
    scores = torch.bmm(rows, keys.transpose(1, 2))
    turned = turned.reshape(batch, queries * heads, turned.shape[-1])
    scores = torch.baddbmm(scores, turned, rotated[:, 0].transpose(1, 2))
    scores = scores.view(batch, queries, heads, -1).float() * scale
    if mask is not None:
        mask = mask[..., : keys.shape[1]].transpose(1, 2)
        if mask.dtype is torch.bool:
            scores = scores.masked_fill(~mask, torch.finfo(torch.float32).min)
        else:
            scores = scores + mask
    weights = scores.softmax(-1).to(keys.dtype).view(batch, queries * heads, -1)
    return torch.bmm(weights, keys).view(absorbed.shape)


def _turn(rotation: str, embeddings: Any) -> Turn | None:
    """Returns the rotation that the model's embeddings of positions mean, [b or 1, s, c] each."""
    if rotation == "none":
        return None
    cos, sin = embeddings if rotation != "complex" else (embeddings.real, embeddings.imag)
    if rotation == "interleaved":  # one column for each pair
        cos, sin = (x[..., : x.shape[-1] // 2] for x in (cos, sin))
    cos, sin = (x.detach().float().flatten(0, 1).contiguous() for x in (cos, sin))
    return Turn(None, cos, sin, rotation != "half")


def _is_shared(turn: Turn, x: torch.Tensor) -> bool:
    """Returns True if the sequences of ``x`` [b, s, ...] share their angles."""
    assert turn.cos is not None
    return turn.cos.shape[0] == x.shape[1]


def _rotated(x: torch.Tensor, turn: Turn) -> torch.Tensor:
    """Returns the rotation of all elements of ``x`` [b, s, heads, p]."""
    if _is_shared(turn, x):
        return turn.of(x, "bshd")
    return turn.of(x.flatten(0, 1).unsqueeze(1), "sbhd").view(x.shape)


def _implementation(module: Any) -> Any:
    """Returns the attention function that the model's configuration names."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    base = next(k for k in type(module).__mro__ if k.__module__.startswith("transformers"))
    eager = sys.modules[base.__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, eager)


class _History:
    """Cache of one layer."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def update(self, *args: Any) -> tuple[torch.Tensor, ...]:
        """Appends tokens to both tensors, and returns them."""
        new = args[:2]
        old = self.kept or [x[:, :, :0] for x in new]
        self.kept = [torch.cat(pair, 2) for pair in zip(old, new, strict=True)]
        return tuple(self.kept)


def _rotation_of(module: Any) -> str | None:
    """Returns the rotation with which a module computes ``FusedLatentAttention``'s formula."""
    small = _small(module)
    kind = derived(FusedLatentAttention, type(module))
    twin = copy.copy(small)
    twin.__class__ = kind
    twin.recompute_up_proj = False
    x = random(2, 5, _SIZES["hidden_size"])
    angles = random(1, 5, _SIZES["qk_rope_head_dim"] // 2) * 3
    mask = torch.full((5, 5), -torch.inf).triu(1)[None, None]

    def run(of: Any, rotation: str) -> list[torch.Tensor]:
        """Results without a cache, of two steps with one, and the cached latents."""
        columns = torch.cat((angles, angles), -1)
        tables: tuple[torch.Tensor, ...] = (columns.cos(), columns.sin())
        if rotation == "complex":
            tables = (torch.polar(torch.ones_like(angles), angles),)
        history, out = _History(), []
        for start, end, cache in ((0, 5, None), (0, 3, history), (3, 5, history)):
            own = tuple(table[:, start:end] for table in tables)
            out.append(of(
                x[:, start:end], position_embeddings=own[0] if rotation == "complex" else own,
                attention_mask=mask[:, :, start:end, :end], past_key_values=cache,
            )[0])  # fmt: skip
        return [*out, history.kept[0]]

    for rotation in _ROTATIONS:
        try:
            expected = run(small, rotation)
        except Exception:  # embeddings of another form
            continue
        twin.rotation = rotation
        actual = run(twin, rotation)
        if all(agree(a, e.double(), 1e-5) for a, e in zip(actual, expected, strict=True)):
            return rotation
    return None


def _small(module: Any) -> Any:
    """Returns a stand-in with few features and random weights, which attends eagerly."""
    size = {**_SIZES, "q_lora_rank": module.q_lora_rank and _SIZES["q_lora_rank"]}
    rows = size["num_heads"] * size["qk_head_dim"]
    down = size["kv_lora_rank"] + size["qk_rope_head_dim"]
    kv_rows = size["num_heads"] * (size["qk_nope_head_dim"] + size["v_head_dim"])
    shapes = {
        "q_proj": (size["hidden_size"], rows), "q_b_proj": (size["q_lora_rank"], rows),
        "q_a_proj": (size["hidden_size"], size["q_lora_rank"]),
        "kv_a_proj_with_mqa": (size["hidden_size"], down),
        "kv_b_proj": (size["kv_lora_rank"], kv_rows),
        "o_proj": (size["num_heads"] * size["v_head_dim"], size["hidden_size"]),
    }  # fmt: skip
    norms = {"q_a_layernorm": size["q_lora_rank"], "kv_a_layernorm": size["kv_lora_rank"]}
    children: dict[str, Any] = {}
    for name, child in module.named_children():
        if name in shapes:
            children[name] = nn.Linear(*shapes[name])
        elif name in norms:
            children[name] = nn.RMSNorm(norms[name], 1e-6)
        elif type(child).__module__.startswith("apex_te."):  # joined layers, called by the others
            continue
        else:
            raise ValueError(name)  # a part of another formula
        for parameter in children[name].parameters():
            nn.init.normal_(parameter, 0.0, 0.5)
    small = stand_in(module, {}, children)
    vars(small).update(size, config=copy.copy(module.config))
    small.config._attn_implementation = "eager"
    return small
