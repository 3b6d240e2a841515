"""Joins the layers of Hugging Face's Llama and GPT-2 blocks, and maps the keys of their state."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ..module.layer_norm_linear import LayerNormLinear
from ..module.layer_norm_mlp import LayerNormMLP
from . import _matching as matching

__all__ = ["KeyMap", "fuse_blocks", "key_map", "refuse_optimized"]

_ATTRIBUTE = "_apex_te_key_map"


class JoinedKey(NamedTuple):
    """One parameter made of others: ``parts`` are their keys and rows, stacked in this order."""

    key: str
    parts: tuple[tuple[str, int], ...]
    transposed: bool = False  # each part is stored [in, out]


class KeyMap:
    """Translates state dicts of a model before and after ``from_torch(fuse=True)``.

    Both methods return a new dict; keys that fusing did not touch pass through. FP8 state
    (``fp8_state.*``) of joined layers has no counterpart before them and is left out.
    """

    def __init__(self, entries: Iterable[JoinedKey]) -> None:
        self.entries = tuple(entries)

    def __repr__(self) -> str:
        joined = "; ".join(
            f"{', '.join(key for key, _ in entry.parts)} -> {entry.key}"
            for entry in self.entries[:3]
        )
        more = f"; and {len(self.entries) - 3} more" if len(self.entries) > 3 else ""
        return f"KeyMap({len(self.entries)} joined: {joined}{more})"

    def to_fused(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """The state dict of the fused model, from one of the original model.

        Errors: ValueError if only some parts of a joined parameter are there.
        """
        new = dict(state_dict)
        for entry in self.entries:
            keys = [key for key, _ in entry.parts]
            absent = [key for key in keys if key not in new]
            if len(absent) == len(keys):
                continue
            if absent:
                raise ValueError(
                    f"KeyMap: state_dict must have all parts of {entry.key}, got none for {absent}"
                )
            values = [new.pop(key) for key in keys]
            new[entry.key] = _joined(values, entry.transposed)
        return new

    def to_original(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """The state dict of the original model, from one of the fused model.

        Errors: ValueError if a joined parameter has another number of rows.
        """
        new = dict(state_dict)
        for entry in self.entries:
            owner = entry.key.rpartition(".")[0]
            for key in [key for key in new if key.startswith(f"{owner}.fp8_state.")]:
                del new[key]
            if entry.key not in new:
                continue
            value = new.pop(entry.key)
            rows = [count for _, count in entry.parts]
            if sum(rows) != value.shape[0]:
                raise ValueError(
                    f"KeyMap: {entry.key} must have {sum(rows)} rows, got {list(value.shape)}"
                )
            for (key, _), part in zip(entry.parts, value.split(rows), strict=True):
                new[key] = (part.t() if entry.transposed else part).contiguous()
        return new


def key_map(model: nn.Module) -> KeyMap:
    """The keys that ``from_torch(model, fuse=True)`` joined; none where it joined nothing."""
    found = vars(model).get(_ATTRIBUTE)
    return KeyMap(()) if found is None else found


def refuse_optimized(model: nn.Module, optimizer: Any) -> None:
    """Raises ValueError if ``optimizer`` or a living one of torch.optim holds a parameter."""
    given = [] if optimizer is None else optimizer
    given = list(given) if isinstance(given, (list, tuple)) else [given]
    for one in given:
        if not hasattr(one, "param_groups"):
            raise TypeError(
                f"from_torch: optimizer must have param_groups, got {type(one).__name__}"
            )
    names = {id(p): name for name, p in model.named_parameters()}
    held = _held(names, given + _living_optimizers())
    if held is not None:
        gc.collect()  # it may only be waiting to be collected
        held = _held(names, given + _living_optimizers())
    if held is not None:
        raise ValueError(
            "from_torch: fuse must be False once the parameters are in an optimizer "
            f"({held[0]} holds {held[1]!r}); convert first, then make the optimizer"
        )


def _living_optimizers() -> list[Any]:
    kind = torch.optim.Optimizer
    # By type(): asking an object for its class can run code of lazy modules and proxies.
    return [found for found in gc.get_objects() if issubclass(type(found), kind)]


def _held(names: dict[int, str], optimizers: list[Any]) -> tuple[str, str] | None:
    """An optimizer's name and a parameter that it holds."""
    for optimizer in optimizers:
        for group in getattr(optimizer, "param_groups", ()):
            for parameter in group["params"]:
                if id(parameter) in names:
                    return type(optimizer).__name__, names[id(parameter)]
    return None


class _NotFusable(Exception):
    """Why a block stays as it is."""


class _Joint:
    """A projection that several layers of a block used to make, run once for all of them."""

    __slots__ = ("linear", "parts", "rows", "seen")

    def __init__(self, linear: LayerNormLinear, rows: list[int]) -> None:
        self.linear = linear
        self.rows = rows
        self.forget()

    def forget(self) -> None:
        """Drop what nobody fetched."""
        self.seen: torch.Tensor | None = None
        self.parts: list[Any] = [None] * len(self.rows)

    def part(self, inp: torch.Tensor, index: int) -> torch.Tensor:
        """Part ``index`` of the projection of ``inp``; each is handed out once."""
        if self.seen is not inp or self.parts[index] is None:
            self.parts = list(self.linear(inp).split(self.rows, -1))
            self.seen = inp
        out = self.parts[index]
        self.parts[index] = None
        if not any(part is not None for part in self.parts):
            self.seen = None
        return out

    def __getstate__(self) -> tuple[LayerNormLinear, list[int]]:
        return self.linear, self.rows

    def __setstate__(self, state: tuple[LayerNormLinear, list[int]]) -> None:
        self.linear, self.rows = state
        self.forget()


class JointPart(nn.Module):
    """Stands where a query, key or value projection stood, and gives its part of the joint one."""

    def __init__(self, joint: _Joint, index: int) -> None:
        super().__init__()
        # No submodule: the joint projection has its own place in the block.
        self.joint = joint
        self.index = index

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """The part [..., rows] for ``inp`` [..., in_features]."""
        return self.joint.part(inp, self.index)

    def extra_repr(self) -> str:
        return f"part {self.index}, out_features={self.joint.rows[self.index]}"


class LayerNormMLPDropout(LayerNormMLP):
    """LayerNormMLP followed by the dropout that GPT-2's MLP ends with."""

    dropout: nn.Module

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        """As ``LayerNormMLP.forward``, with dropout."""
        return self.dropout(super().forward(inp, is_first_microbatch))


def fuse_blocks(model: nn.Module) -> list[str]:
    """Join what can be in every known block of ``model``; names what could not, with reasons."""
    uses = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    entries: list[JoinedKey] = []
    left = []
    for name, block in list(model.named_modules()):
        steps: tuple[Any, ...] = ()
        if matching.is_class(block, matching.LLAMA, "LlamaDecoderLayer"):
            steps = (_llama_attention, _llama_mlp)
        elif matching.is_class(block, matching.GPT2, "GPT2Block"):
            steps = (_gpt2_attention, _gpt2_mlp)
        for step in steps:
            try:
                entries += step(block, f"{name}." if name else "", uses)
            except _NotFusable as reason:
                left.append(f"{name or type(block).__name__} ({reason})")
    if entries:
        vars(model)[_ATTRIBUTE] = KeyMap([*key_map(model).entries, *entries])
    return left


class _Source(NamedTuple):
    """The layers that become one, with the names that they have in the block."""

    norm_name: str
    norm: Any
    linears: dict[str, Any]
    transposed: bool = False  # GPT-2's weights are [in, out]

    def parts(self, attribute: str, *names: str) -> list[tuple[str, Any]]:
        """Keys (in the block) and parameters that one parameter is joined from."""
        names = names or tuple(self.linears)
        return [(f"{name}.{attribute}", getattr(self.linears[name], attribute)) for name in names]

    def norm_parts(self) -> dict[str, list[tuple[str, Any]]]:
        """The same for the norm; Llama's has no bias."""
        bias = getattr(self.norm, "bias", None)
        return {
            "layer_norm_weight": [(f"{self.norm_name}.weight", self.norm.weight)],
            "layer_norm_bias": [(f"{self.norm_name}.bias", bias)],
        }


def _llama_attention(block: Any, prefix: str, uses: Counter[int]) -> list[JoinedKey]:
    attention = block.self_attn
    names = ("q_proj", "k_proj", "v_proj")
    linears = {f"self_attn.{name}": getattr(attention, name) for name in names}
    source = _Source("input_layernorm", block.input_layernorm, linears)
    _check(source, uses)
    rows = [linear.out_features for linear in linears.values()]
    joined = _layer_norm_linear(source, "RMSNorm", attention.q_proj.in_features, sum(rows))
    entries = _fill(
        joined, source, prefix, "self_attn.qkv_proj",
        weight=source.parts("weight"), bias=source.parts("bias"),
    )  # fmt: skip
    joint = _Joint(joined, rows)
    for index, name in enumerate(names):
        setattr(attention, name, JointPart(joint, index).train(attention.training))
    attention.qkv_proj = joined
    block.input_layernorm = nn.Identity().train(block.training)
    return entries


def _gpt2_attention(block: Any, prefix: str, uses: Counter[int]) -> list[JoinedKey]:
    source = _Source("ln_1", block.ln_1, {"attn.c_attn": block.attn.c_attn}, transposed=True)
    _check(source, uses)
    joined = _layer_norm_linear(source, "LayerNorm", *block.attn.c_attn.weight.shape)
    entries = _fill(
        joined, source, prefix, "attn.c_attn",
        weight=source.parts("weight"), bias=source.parts("bias"),
    )  # fmt: skip
    block.attn.c_attn = joined
    block.ln_1 = nn.Identity().train(block.training)
    return entries


def _llama_mlp(block: Any, prefix: str, uses: Counter[int]) -> list[JoinedKey]:
    mlp = block.mlp
    if matching.hooked(mlp) or not matching.is_silu(mlp.act_fn):
        raise _NotFusable(f"mlp.act_fn is {type(mlp.act_fn).__name__}, or mlp has hooks")
    names = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    linears = dict(zip(names, (mlp.gate_proj, mlp.up_proj, mlp.down_proj), strict=True))
    source = _Source("post_attention_layernorm", block.post_attention_layernorm, linears)
    _check(source, uses)
    sizes = mlp.gate_proj.in_features, mlp.gate_proj.out_features
    joined = _layer_norm_mlp(LayerNormMLP, source, "RMSNorm", "swiglu", *sizes)
    entries = _fill(
        joined, source, prefix, "mlp",
        fc1_weight=source.parts("weight", *names[:2]), fc1_bias=source.parts("bias", *names[:2]),
        fc2_weight=source.parts("weight", names[2]), fc2_bias=source.parts("bias", names[2]),
    )  # fmt: skip
    block.mlp = joined
    block.post_attention_layernorm = nn.Identity().train(block.training)
    return entries


def _gpt2_mlp(block: Any, prefix: str, uses: Counter[int]) -> list[JoinedKey]:
    mlp = block.mlp
    activation = matching.gelu_or_relu(mlp.act)
    if matching.hooked(mlp) or activation is None:
        raise _NotFusable(f"mlp.act is {type(mlp.act).__name__}, or mlp has hooks")
    linears = {"mlp.c_fc": mlp.c_fc, "mlp.c_proj": mlp.c_proj}
    source = _Source("ln_2", block.ln_2, linears, transposed=True)
    _check(source, uses)
    kind = LayerNormMLPDropout
    joined = _layer_norm_mlp(kind, source, "LayerNorm", activation, *mlp.c_fc.weight.shape)
    joined.dropout = mlp.dropout
    entries = _fill(
        joined, source, prefix, "mlp",
        fc1_weight=source.parts("weight", "mlp.c_fc"), fc1_bias=source.parts("bias", "mlp.c_fc"),
        fc2_weight=source.parts("weight", "mlp.c_proj"),
        fc2_bias=source.parts("bias", "mlp.c_proj"),
    )  # fmt: skip
    block.mlp = joined
    block.ln_2 = nn.Identity().train(block.training)
    return entries


def _layer_norm_linear(source: _Source, norm: str, inner: int, outer: int) -> LayerNormLinear:
    some = next(iter(source.linears.values()))
    return LayerNormLinear(
        inner, outer, matching.norm_eps(source.norm), some.bias is not None, normalization=norm,
        params_dtype=some.weight.dtype, device="meta",
    ).train(some.training)  # fmt: skip


def _layer_norm_mlp(
    kind: type[LayerNormMLP], source: _Source, norm: str, activation: str, hidden: int, ffn: int
) -> LayerNormMLP:
    some = next(iter(source.linears.values()))
    return kind(
        hidden, ffn, matching.norm_eps(source.norm), some.bias is not None, normalization=norm,
        activation=activation, params_dtype=some.weight.dtype, device="meta",
    ).train(some.training)  # fmt: skip


def _is_linear(module: nn.Module) -> bool:
    return matching.is_plain(module, nn.Linear)


def _is_layer_norm(module: nn.Module) -> bool:
    return matching.is_plain(module, nn.LayerNorm)


def _check(source: _Source, uses: Counter[int]) -> None:
    """Raises _NotFusable unless one layer can stand for those of ``source``."""
    norm, linears = source.norm, list(source.linears.values())
    is_linear, is_norm = _is_linear, matching.is_llama_norm
    if source.transposed:
        is_linear, is_norm = matching.is_conv1d, _is_layer_norm
    for name, module in {source.norm_name: norm, **source.linears}.items():
        fits = is_norm(module) if module is norm else is_linear(module)
        if not fits or matching.hooked(module):
            raise _NotFusable(f"{name} is {type(module).__name__}, or has hooks")
    weights, biases = [m.weight for m in linears], [m.bias for m in linears]
    if source.transposed and (norm.weight is None or norm.bias is None):
        raise _NotFusable(f"{source.norm_name} has no weight or no bias")
    if len({bias is None for bias in biases}) > 1:
        raise _NotFusable("some of its layers have a bias")
    parameters = [p for m in (norm, *linears) for p in m.parameters()]
    if any(uses[id(parameter)] > 1 for parameter in parameters):
        raise _NotFusable("a parameter is shared")
    if len({(p.dtype, p.device) for p in parameters}) > 1:
        raise _NotFusable("its parameters have several dtypes or devices")
    for joined in (weights, [bias for bias in biases if bias is not None]):
        if len({p.requires_grad for p in joined}) > 1:
            raise _NotFusable("some of its parameters are frozen")


def _fill(
    module: nn.Module, source: _Source, prefix: str, path: str, **linear: list[tuple[str, Any]]
) -> list[JoinedKey]:
    """Give ``module`` its parameters; those made of a single one are that Parameter itself."""
    entries = []
    for name, parts in {**source.norm_parts(), **linear}.items():
        values = [value for _, value in parts]
        if values[0] is None:
            continue
        transposed = source.transposed and values[0].dim() == 2
        if len(values) > 1 or transposed:
            with torch.no_grad():
                value = _joined(values, transposed)
            parameter = nn.Parameter(value, requires_grad=values[0].requires_grad)
        else:
            parameter = values[0]
        setattr(module, name, parameter)
        rows = [value.shape[1 if transposed else 0] for value in values]
        keys = [f"{prefix}{key}" for key, _ in parts]
        entries.append(
            JoinedKey(f"{prefix}{path}.{name}", tuple(zip(keys, rows, strict=True)), transposed)
        )
    return entries


def _joined(values: list[torch.Tensor], transposed: bool) -> torch.Tensor:
    """The rows of ``values``, which are stored [in, out] where ``transposed``."""
    if len(values) == 1 and not transposed:
        return values[0]
    return torch.cat([value.t() if transposed else value for value in values]).contiguous()
