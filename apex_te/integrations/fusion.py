"""Joins the layers of Hugging Face's Llama-like and GPT-2 blocks, and maps the keys of state."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ..module.layer_norm_linear import LayerNormLinear
from ..module.layer_norm_mlp import LayerNormMLP
from . import _matching as matching
from ._joined_state import JoinedKey, JoinedState, PartView, joined
from .summary import Layer

__all__ = ["KeyMap", "fuse_blocks", "key_map", "refuse_optimized"]

_ATTRIBUTE = "_apex_te_key_map"
_JOINED = "_apex_te_joined"


class KeyMap:
    """Translates dicts by parameter names of a model before and after ``from_torch(fuse=True)``.

    The map is for dicts of gradients, learning rates and the like by ``named_parameters``, and for
    state dicts that an earlier release saved; today's state dicts have the original keys. Both
    methods return a new dict; keys that fusing did not touch pass through. FP8 state
    (``fp8_state.*``) of joined layers has no counterpart in the original model and is left out.
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
        """Returns the state dict of the fused model, from one of the original model.

        Raises:
            ValueError: only some parts of a joined parameter are there.
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
            new[entry.key] = joined(values, entry.transposed)
        return new

    def to_original(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the state dict of the original model, from one of the fused model.

        Raises:
            ValueError: a joined parameter has another number of rows.
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
            for (key, _), part in zip(entry.parts, entry.split(value), strict=True):
                new[key] = part.contiguous()
        return new


def key_map(model: nn.Module) -> KeyMap:
    """Returns the map of what ``from_torch(model, fuse=True)`` joined, an empty one if nothing."""
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
    """Returns names ``(optimizer, parameter)`` of an optimizer and a parameter in it, or None."""
    for optimizer in optimizers:
        for group in getattr(optimizer, "param_groups", ()):
            for parameter in group["params"]:
                if id(parameter) in names:
                    return type(optimizer).__name__, names[id(parameter)]
    return None


class _NotFusable(Exception):
    """Reason why a block stays as it is; ``chosen`` if the caller wanted it so."""

    def __init__(self, reason: str, chosen: bool = False) -> None:
        super().__init__(reason)
        self.chosen = chosen


class _Joint:
    """Joint projection of several layers of a block, run once for all of them."""

    __slots__ = ("linear", "parts", "rows", "seen")

    def __init__(self, linear: LayerNormLinear, rows: list[int]) -> None:
        self.linear = linear
        self.rows = rows
        self.forget()

    def forget(self) -> None:
        """Drops the parts that nobody fetched."""
        self.seen: torch.Tensor | None = None
        self.parts: list[Any] = [None] * len(self.rows)

    def part(self, inp: torch.Tensor, index: int) -> torch.Tensor:
        """Returns part ``index`` of the projection of ``inp``; each is handed out once."""
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


class _Replaced(nn.Module):
    """Stands where a layer stood whose parameters another one has joined.

    Attributes:
        view: the parameters that the layer had, as views of the joined ones.
    """

    view: PartView

    @property
    def weight(self) -> torch.Tensor | None:
        """Returns the original weight as a view of the joined one."""
        return self.view.weight

    @property
    def bias(self) -> torch.Tensor | None:
        """Returns the original bias as a view of the joined one, None without a bias."""
        return self.view.bias


class JointPart(_Replaced):
    """Stands where a query, key or value projection stood, and gives its part of the joint one."""

    def __init__(self, joint: _Joint, index: int) -> None:
        super().__init__()
        # No submodule: the joint projection has its own place in the block.
        self.joint = joint
        self.index = index

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Returns the part ``[..., rows]`` of the projection of ``inp``, ``[..., in_features]``."""
        return self.joint.part(inp, self.index)

    def extra_repr(self) -> str:
        # Adapters quote this when they refuse the layer.
        return (
            f"part {self.index}, out_features={self.joint.rows[self.index]}; joined with its norm "
            "by from_torch(fuse=True): adapters need fuse=False"
        )


class JoinedNorm(_Replaced, nn.Identity):
    """Stands where a norm stood that the next layer applies now."""


class LayerNormMLPDropout(LayerNormMLP):
    """``LayerNormMLP`` followed by the dropout that GPT-2's MLP ends with."""

    dropout: nn.Module

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Applies ``LayerNormMLP.forward``, then dropout."""
        return self.dropout(super().forward(inp, is_first_microbatch))


# Gives the reason why the caller wants the layer of a name to stay, else None.
Chosen = Callable[[str, nn.Module], "str | None"]


def fuse_blocks(model: nn.Module, chosen: Chosen) -> tuple[list[Layer], list[str]]:
    """Joins the layers of every known block of ``model`` that allow it.

    Args:
        model: any model.
        chosen: gives the reason why the caller wants the layer of a name to stay, else None.

    Returns:
        ``(layers, left)``: entries of the summary; names of blocks that could not be joined, each
        with the reason.
    """
    uses = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    entries: list[JoinedKey] = []
    layers: list[Layer] = []
    left = []
    for name, block in list(model.named_modules()):
        steps: tuple[Any, ...] = ()
        if matching.is_llama_block(block):
            steps = (_llama_attention, _llama_mlp)
        elif matching.is_gpt2_block(block):
            steps = (_gpt2_attention, _gpt2_mlp)
        if not steps or _JOINED in vars(block):
            continue
        prefix = f"{name}." if name else ""
        order = list(block.state_dict())
        found: list[JoinedKey] = []
        for step in steps:
            try:
                source, path, parts = step(block, prefix, uses, chosen)
            except _NotFusable as reason:
                kind = type(block).__name__
                if not reason.chosen:
                    left.append(f"{name or kind} ({reason})")
                layers.append(Layer(name, kind, None, f"not fused: {reason}"))
                continue
            found += parts
            names = (source.norm_name, *source.linears)
            after = type(block.get_submodule(path)).__name__
            layers.append(Layer(prefix + path, ", ".join(names), after))
        if found:
            vars(block)[_JOINED] = True
            JoinedState(found, order).install(block)
            entries += [entry.prefixed(prefix) for entry in found]
    if entries:
        vars(model)[_ATTRIBUTE] = KeyMap([*key_map(model).entries, *entries])
    return layers, left


class _Source(NamedTuple):
    """Layers that become one, by the names that they have in the block."""

    norm_name: str
    norm: Any
    linears: dict[str, Any]
    transposed: bool = False  # GPT-2's weights are [in, out]

    def parts(self, attribute: str, *names: str) -> list[tuple[str, Any]]:
        """Returns pairs (key in the block, Parameter) that one Parameter is joined from."""
        return [(f"{name}.{attribute}", getattr(self.linears[name], attribute)) for name in names]

    def norm_parts(self) -> dict[str, list[tuple[str, Any]]]:
        """Returns pairs (key in the block, Parameter) of the norm; Llama's norm has no bias."""
        bias = getattr(self.norm, "bias", None)
        return {
            "layer_norm_weight": [(f"{self.norm_name}.weight", self.norm.weight)],
            "layer_norm_bias": [(f"{self.norm_name}.bias", bias)],
        }


# (layers that were joined, path of the joined layer in the block, its entries)
_Step = tuple[_Source, str, list[JoinedKey]]


def _llama_attention(block: Any, prefix: str, uses: Counter[int], chosen: Chosen) -> _Step:
    attention = block.self_attn
    names = ("q_proj", "k_proj", "v_proj")
    linears = {f"self_attn.{name}": getattr(attention, name) for name in names}
    source = _Source("input_layernorm", block.input_layernorm, linears)
    _check(source, prefix, uses, chosen)
    rows = [linear.out_features for linear in linears.values()]
    module = _layer_norm_linear(source, "RMSNorm", attention.q_proj.in_features, sum(rows))
    joint = _Joint(module, rows)
    for index, name in enumerate(names):
        setattr(attention, name, JointPart(joint, index).train(attention.training))
    return _placed(block, source, "self_attn.qkv_proj", module, {"": tuple(linears)})


def _gpt2_attention(block: Any, prefix: str, uses: Counter[int], chosen: Chosen) -> _Step:
    source = _Source("ln_1", block.ln_1, {"attn.c_attn": block.attn.c_attn}, transposed=True)
    _check(source, prefix, uses, chosen)
    module = _layer_norm_linear(source, "LayerNorm", *block.attn.c_attn.weight.shape)
    return _placed(block, source, "attn.c_attn", module, {"": ("attn.c_attn",)})


def _llama_mlp(block: Any, prefix: str, uses: Counter[int], chosen: Chosen) -> _Step:
    mlp = block.mlp
    if matching.hooked(mlp) or not matching.is_silu(mlp.act_fn):
        raise _NotFusable(f"mlp.act_fn is {type(mlp.act_fn).__name__}, or mlp has hooks")
    names = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    linears = dict(zip(names, (mlp.gate_proj, mlp.up_proj, mlp.down_proj), strict=True))
    source = _Source("post_attention_layernorm", block.post_attention_layernorm, linears)
    _check(source, prefix, uses, chosen)
    sizes = mlp.gate_proj.in_features, mlp.gate_proj.out_features
    module = _layer_norm_mlp(LayerNormMLP, source, "RMSNorm", "swiglu", *sizes)
    return _placed(block, source, "mlp", module, {"fc1_": names[:2], "fc2_": names[2:]})


def _gpt2_mlp(block: Any, prefix: str, uses: Counter[int], chosen: Chosen) -> _Step:
    mlp = block.mlp
    activation = matching.gelu_or_relu(mlp.act)
    if matching.hooked(mlp) or activation is None:
        raise _NotFusable(f"mlp.act is {type(mlp.act).__name__}, or mlp has hooks")
    linears = {"mlp.c_fc": mlp.c_fc, "mlp.c_proj": mlp.c_proj}
    source = _Source("ln_2", block.ln_2, linears, transposed=True)
    _check(source, prefix, uses, chosen)
    sizes = mlp.c_fc.weight.shape
    module = _layer_norm_mlp(LayerNormMLPDropout, source, "LayerNorm", activation, *sizes)
    module.dropout = mlp.dropout
    return _placed(block, source, "mlp", module, {"fc1_": ("mlp.c_fc",), "fc2_": ("mlp.c_proj",)})


def _placed(
    block: nn.Module, source: _Source, path: str, module: nn.Module, parts: dict[str, tuple]
) -> _Step:
    """Puts ``module``, with its parameters, in the place of the layers of ``source``.

    Args:
        block: the block.
        source: the layers that ``module`` stands for.
        path: where in the block ``module`` goes.
        module: the layer, its parameters still on the meta device.
        parts: names of the linear layers that a weight and bias of ``module`` are joined from, by
            the prefix of these two.
    """
    linear = {
        f"{prefix}{attribute}": source.parts(attribute, *names)
        for prefix, names in parts.items()
        for attribute in ("weight", "bias")
    }
    entries = _fill(module, source, path, linear)
    owner, _, name = path.rpartition(".")
    setattr(block.get_submodule(owner), name, module)
    setattr(block, source.norm_name, JoinedNorm().train(block.training))
    _show_originals(block, module, entries)
    return source, path, entries


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


def _check(source: _Source, prefix: str, uses: Counter[int], chosen: Chosen) -> None:
    """Raises ``_NotFusable`` unless one layer can stand for those of ``source``."""
    norm, linears = source.norm, list(source.linears.values())
    for name, module in {source.norm_name: norm, **source.linears}.items():
        if source.transposed:
            fits = (
                matching.is_plain(norm, nn.LayerNorm)
                if module is norm
                else matching.is_conv1d(module)
            )
        else:
            fits = (
                matching.is_llama_norm(norm)
                if module is norm
                else matching.is_plain(module, nn.Linear)
            )
        if not fits or matching.hooked(module):
            raise _NotFusable(f"{name} is {type(module).__name__}, or has hooks")
        reason = matching.unsupported(module)
        if reason:
            raise _NotFusable(f"{name}: {reason}")
        reason = chosen(prefix + name, module)
        if reason:
            raise _NotFusable(f"{name}: {reason}", chosen=True)
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
    for ones in (weights, [bias for bias in biases if bias is not None]):
        if len({p.requires_grad for p in ones}) > 1:
            raise _NotFusable("some of its parameters are frozen")


def _fill(
    module: nn.Module, source: _Source, path: str, linear: dict[str, list[tuple[str, Any]]]
) -> list[JoinedKey]:
    """Gives ``module`` its parameters; one made of a single Parameter is that Parameter itself.

    Returns:
        The entries of its parameters by keys in the block, where ``module`` is at ``path``.
    """
    entries = []
    for name, parts in {**source.norm_parts(), **linear}.items():
        values = [value for _, value in parts]
        if values[0] is None:
            continue
        transposed = source.transposed and values[0].dim() == 2
        if len(values) > 1 or transposed:
            with torch.no_grad():
                value = joined(values, transposed)
            parameter = nn.Parameter(value, requires_grad=values[0].requires_grad)
        else:
            parameter = values[0]
        setattr(module, name, parameter)
        rows = [value.shape[1 if transposed else 0] for value in values]
        keys = [key for key, _ in parts]
        entries.append(JoinedKey(f"{path}.{name}", tuple(zip(keys, rows, strict=True)), transposed))
    return entries


def _show_originals(block: nn.Module, module: nn.Module, entries: list[JoinedKey]) -> None:
    """Lets the original names in ``block`` lead to views; tools follow a state dict's keys."""
    views: dict[str, PartView] = {}
    for entry in entries:
        start = 0
        for key, rows in entry.parts:
            owner, _, attribute = key.rpartition(".")
            view = views.setdefault(owner, PartView(module))
            name = entry.key.rpartition(".")[2]
            view.rows[attribute] = (name, start, rows, entry.transposed)
            start += rows
    for owner, view in views.items():
        path, _, name = owner.rpartition(".")
        parent = block.get_submodule(path)
        layer = getattr(parent, name, None)
        if isinstance(layer, _Replaced):
            layer.view = view
        elif layer is None:  # its module is gone
            vars(parent)[name] = view
