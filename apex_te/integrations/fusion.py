"""Fusion of layers in blocks of Hugging Face's families, and a map of parameter names."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ..fp8.parameter.parameter import FP8Parameter
from ..fp8.scheme.base import layout_of
from ..module._core.arguments import class_name
from ..module._core.norm_parameters import NormedModule
from ..module.layer_norm_linear import LayerNormLinear
from ..module.layer_norm_mlp import LayerNormMLP
from ..module.linear import Linear
from ..runtime.named_arguments import check_model, named_arguments
from . import _matching as matching
from ._block_layers import Layers, MLPLayers, Projections, layers_to_join
from ._derived import derived
from ._forward_source import UnreadableError
from ._joined_state import (
    KEYS,
    ORIGINAL,
    JoinedKey,
    JoinedState,
    Original,
    PartParameters,
    PartView,
    init_joined_layers,
    joined,
    read_original_keys,
)
from ._norm_formula import known_norm
from .summary import Layer

_ATTRIBUTE = "_apex_te_key_map"
_JOINED = "_apex_te_joined"


class KeyMap:
    """Maps parameter names from before ``from_torch(fuse=True)`` to those after it, and back.

    It translates dicts of tensors whose keys are the names of ``named_parameters()``, such as
    gradients, and state dicts that an earlier release saved. State dicts of this release have the
    original keys anyway. Both methods return a new dict with all other keys unchanged. FP8 state
    (``fp8_state.*``) of joined layers does not exist in the original model, so ``to_original``
    leaves it out.

    Args:
        entries: the joined parameters, with their keys in the whole model.
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
        """Returns a dict for the fused model, with original parameters joined.

        Args:
            state_dict: tensors by parameter names of the original model.

        Raises:
            ValueError: some, but not all, of the parameters that are joined into one are missing.
        """
        new = dict(state_dict)
        for entry in self.entries:
            if entry.former:
                continue
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
        """Returns a dict for the original model, with joined parameters split.

        Args:
            state_dict: tensors by parameter names of the fused model.

        Raises:
            ValueError: a joined parameter's number of rows differs from that in the fused model.
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


@named_arguments()
def key_map(model: nn.Module) -> KeyMap:
    """Returns the ``KeyMap`` of the parameters that ``from_torch(model, fuse=True)`` joined.

    Args:
        model: the model that was given to ``from_torch``; for any other model the map is empty.

    Raises:
        TypeError: ``model`` is not a module.
    """
    check_model("key_map", model)
    found = vars(model).get(_ATTRIBUTE)
    return KeyMap(()) if found is None else found


def refuse_optimized(model: nn.Module, optimizer: Any, must: str = "fuse must be False") -> None:
    """Raises an error if ``optimizer``, or any torch optimizer, holds a parameter of ``model``."""
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
            f"from_torch: {must} once the parameters are in an optimizer "
            f"({held[0]} holds {held[1]!r}); convert first, then make the optimizer"
        )


def _living_optimizers() -> list[Any]:
    """Returns all existing instances of ``torch.optim.Optimizer``."""
    kind = torch.optim.Optimizer
    # By type(): asking an object for its class can run code of lazy modules and proxies.
    return [found for found in gc.get_objects() if issubclass(type(found), kind)]


def _held(names: dict[int, str], optimizers: list[Any]) -> tuple[str, str] | None:
    """Returns class name and parameter's name for an optimizer with an ``id`` in ``names``."""
    for optimizer in optimizers:
        for group in getattr(optimizer, "param_groups", ()):
            for parameter in group["params"]:
                if id(parameter) in names:
                    return type(optimizer).__name__, names[id(parameter)]
    return None


class _NotFusable(Exception):
    """Raised for layers that cannot be joined; ``chosen`` if by an option, so without a warning."""

    def __init__(self, reason: str, chosen: bool = False) -> None:
        super().__init__(reason)
        self.chosen = chosen


def _version(tensor: torch.Tensor) -> int | None:
    """Returns how often a tensor was changed in place; None where torch does not count that."""
    is_counted = not torch.compiler.is_compiling() and not tensor.is_inference()
    return tensor._version if is_counted else None


class _Joint:
    """Several projections of one tensor, with its norm, in one layer, which runs once for all."""

    __slots__ = ("linear", "parts", "rows", "seen", "version")

    def __init__(self, linear: LayerNormLinear | Linear, rows: list[int]) -> None:
        self.linear = linear
        self.rows = rows
        self.forget()

    def forget(self) -> None:
        """Drops the outputs that were not fetched."""
        self.seen: torch.Tensor | None = None
        self.version: int | None = None
        self.parts: list[Any] = [None] * len(self.rows)

    def part(self, inp: torch.Tensor, index: int) -> torch.Tensor:
        """Returns the output of one projection for ``inp``, and drops it."""
        version = _version(inp)
        if self.seen is not inp or self.parts[index] is None or self.version != version:
            # Some models change a projection in place, which views of several outputs refuse.
            self.parts = list(torch.unsafe_split_with_sizes(self.linear(inp), self.rows, -1))
            self.seen, self.version = inp, version
        out = self.parts[index]
        self.parts[index] = None
        if not any(part is not None for part in self.parts):
            self.seen = None
        return out

    def __getstate__(self) -> tuple[LayerNormLinear | Linear, list[int]]:
        return self.linear, self.rows

    def __setstate__(self, state: tuple[LayerNormLinear | Linear, list[int]]) -> None:
        self.linear, self.rows = state
        self.forget()


class JointPart(nn.Module):
    """Module that replaces a query, key or value projection, which the joined layer computes."""

    view: PartView

    def __init__(self, joint: _Joint, index: int) -> None:
        super().__init__()
        # No submodule: the joint projection has its own place in the block.
        self.joint = joint
        self.index = index

    @property
    def weight(self) -> torch.Tensor | None:
        """Returns the weight of the replaced layer, a view of the joined weight."""
        return self.view.weight

    @property
    def weight_scale_inv(self) -> torch.Tensor:
        """Returns the scales of the weight's own blocks, for a joined weight with free scales."""
        return self.view.weight_scale_inv

    @property
    def bias(self) -> torch.Tensor | None:
        """Returns the bias of the replaced layer, a view of the joined one; None if it had none."""
        return self.view.bias

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Applies the projection, after the norm if it was joined with one."""
        return self.joint.part(inp, self.index)

    def requires_grad_(self, requires_grad: bool = True) -> JointPart:
        """Refuses to freeze one of several joined layers; see ``PartView.requires_grad_``."""
        self.view.requires_grad_(requires_grad)
        return self

    def extra_repr(self) -> str:
        # PEFT quotes this when it refuses to add an adapter to the layer.
        norm = isinstance(self.joint.linear, LayerNormLinear)
        return (
            f"part {self.index}, out_features={self.joint.rows[self.index]}; joined with "
            f"{'its norm' if norm else 'its neighbours'} by from_torch(fuse=True): adapters need "
            "fuse=False"
        )


class JoinedNorm(nn.Module):
    """Norm that keeps its parameters, but passes its input to a joined layer, which applies it."""

    def forward(self, inp: torch.Tensor | None) -> Any:
        """Returns ``inp``; if it is None, ``(weight, bias)``, so that hooks can fetch them."""
        return inp if inp is not None else (self.weight, getattr(self, "bias", None))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if not memo:  # PEFT's LN tuning copies the norm alone, and would train a copy without use
            raise TypeError(
                f"{type(self).__name__}: a norm that from_torch(fuse=True) joined must be copied "
                "with its block, got a copy of the norm alone; adapters need fuse=False"
            )
        new = memo[id(self)] = type(self).__new__(type(self))
        vars(new).update(copy.deepcopy(vars(self), memo))
        return new


class _Joined(nn.Module):
    """Base of the layers that have joined parameters."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_hf_hook" and KEYS in vars(self):  # accelerate's, which may read a state dict
            read_original_keys(value, vars(self)[KEYS])
        super().__setattr__(name, value)


class JoinedProjections(_Joined, Linear):  # type: ignore[misc]
    """``Linear`` of projections that ``from_torch(fuse=True)`` has joined without a norm."""


class _NormApart(_Joined, NormedModule):
    """Base of joined layers; their ``norm`` is a submodule of the block, not theirs."""

    norm: JoinedNorm

    @property
    def layer_norm_weight(self) -> torch.nn.Parameter:  # type: ignore[override]
        """Returns the norm's weight."""
        return self._gamma_and_beta()[0]  # type: ignore[return-value]

    @property
    def layer_norm_bias(self) -> torch.nn.Parameter | None:  # type: ignore[override]
        """Returns the norm's bias, None for an RMS norm."""
        return self._gamma_and_beta()[1]  # type: ignore[return-value]

    def _gamma_and_beta(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        norm: Any = self.norm
        if "_hf_hook" in vars(norm):  # accelerate's, which brings the parameters for a call
            found: tuple[torch.Tensor, torch.Tensor | None] = norm(None)
            return found
        own: Any = norm._parameters
        if "weight" not in own:  # a parametrization makes it
            return norm.weight, getattr(norm, "bias", None)
        return own["weight"], own.get("bias")

    def use_norm(self, norm: Any) -> None:
        """Makes the layer apply ``norm`` of its block, which from then on passes its input on."""
        del self._parameters["layer_norm_weight"], self._parameters["layer_norm_bias"]
        norm.__class__ = derived(JoinedNorm, type(norm), f"Joined{type(norm).__name__}")
        vars(self)["norm"] = norm


def norm_of(module: nn.Module) -> JoinedNorm | None:
    """Returns the norm that a joined layer applies; None for any other module."""
    return module.norm if isinstance(module, _NormApart) else None


class JoinedLinear(_NormApart, LayerNormLinear):
    """``LayerNormLinear`` of a norm and projections that ``from_torch(fuse=True)`` has joined."""


class JoinedMLP(_NormApart, LayerNormMLP):
    """``LayerNormMLP`` of a norm and an MLP, with the MLP's final dropout (GPT-2's) or None."""

    dropout: nn.Module | None

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Applies ``LayerNormMLP.forward``, then dropout."""
        out = super().forward(inp, is_first_microbatch)
        return out if self.dropout is None else self.dropout(out)


class LayerNormMLPDropout(LayerNormMLP):
    """Class of GPT-2's joined MLPs in models that were pickled by an earlier release."""

    dropout: nn.Module

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Applies ``LayerNormMLP.forward``, then dropout."""
        return self.dropout(super().forward(inp, is_first_microbatch))


# Function of a layer's name in the model and the layer: the reason why the caller of ``from_torch``
# wants the layer to stay, None if it may be joined.
Chosen = Callable[[str, nn.Module], "str | None"]


def fuse_blocks(model: nn.Module, chosen: Chosen) -> tuple[list[Layer], list[tuple[str, str]]]:
    """Joins layers of Hugging Face's blocks in ``model``, in place, if the layers allow it."""
    uses = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    entries: list[JoinedKey] = []
    layers: list[Layer] = []
    left = []
    for name, block, is_mixed in blocks_of(model):
        if _JOINED in vars(block):
            continue
        prefix = f"{name}." if name else ""
        order = list(block.state_dict())
        found: list[JoinedKey] = []
        kind = type(block).__name__
        try:
            groups, norms = layers_to_join(block)
        except UnreadableError as error:
            left.append((name or kind, f"fuse=True cannot tell what {kind} computes: {error}"))
            continue
        layers += [
            Layer(name, kind, None, f"not fused: {one.norm}, as {one.reason}") for one in norms
        ]
        for group in groups:
            try:
                if is_mixed and group.norm is not None:
                    raise _NotFusable("its residuals have another dtype than its parameters")
                source, path, parts = _join(block, group, prefix, uses, chosen)
            except _NotFusable as reason:
                if not reason.chosen:
                    left.append((name or kind, str(reason)))
                layers.append(Layer(name, kind, None, f"not fused: {reason}"))
                continue
            found += parts
            names = [n for n in (source.norm_name, *source.linears) if n is not None]
            after = class_name(type(block.get_submodule(path)))
            layers.append(Layer(prefix + path, ", ".join(names), after))
        if found:
            vars(block)[_JOINED] = True
            JoinedState(found, order).install(block)
            entries += [entry.prefixed(prefix) for entry in found]
    if entries:
        vars(model)[_ATTRIBUTE] = KeyMap([*key_map(model).entries, *entries])
        init_joined_layers(model)
    return layers, left


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module, bool]]:
    """Finds Hugging Face's blocks by dotted name: modules in a list that is not in a block.

    If there is none, the model is one. True as the third item marks the blocks of a list all of
    which have linear layers of several dtypes: norms may then get an input of another dtype than
    theirs, as in T5 in fp16, which keeps some weights in fp32.
    """
    found: list[tuple[str, nn.Module, bool]] = []
    for name, blocks in model.named_modules():
        if not isinstance(blocks, nn.ModuleList):
            continue
        if any(name.startswith(f"{outer}.") for outer, *_ in found):
            continue
        own = {n: block for n, block in blocks.named_children() if matching.is_huggingface(block)}
        mixed = all(len({m.weight.dtype for m in _linears(block)}) > 1 for block in own.values())
        found += [(f"{name}.{n}" if name else n, block, mixed) for n, block in own.items()]
    if not found and matching.is_huggingface(model):
        found.append(("", model, False))
    return found


def _linears(block: nn.Module) -> list[Any]:
    """Returns the linear layers in a block."""
    return [module for module in block.modules() if matching.is_linear(module)]


class _Source(NamedTuple):
    """Layers of a block to become one, by dotted name; weights ``[in, out]`` if ``transposed``."""

    norm_name: str | None
    norm: Any
    linears: dict[str, Any]
    transposed: bool = False

    @property
    def norm_options(self) -> dict[str, Any]:
        """Keyword arguments by which a joined layer computes the norm."""
        formula = known_norm(self.norm)
        assert formula is not None
        return {
            "eps": formula.eps,
            "normalization": "RMSNorm" if formula.is_rms else "LayerNorm",
            "zero_centered_gamma": formula.zero_centered,
        }

    def parts(self, attribute: str, *names: str) -> list[tuple[str, Any]]:
        """Returns key in the block and Parameter of ``names``; None for an absent bias."""
        return [(f"{name}.{attribute}", getattr(self.linears[name], attribute)) for name in names]

    def former_entries(self, path: str) -> list[JoinedKey]:
        """Returns keys that the norm's parameters had as the joined layer's in earlier releases."""
        own = {} if self.norm is None else self.norm._parameters
        rows = {name: len(value) for name, value in own.items() if value is not None}
        return [
            JoinedKey(f"{path}.layer_norm_{name}", ((f"{self.norm_name}.{name}", n),), former=True)
            for name, n in rows.items()
        ]


# (layers that were joined, dotted name of the joined layer in the block, its joined parameters)
_Step = tuple[_Source, str, list[JoinedKey]]


def _join(block: Any, layers: Layers, prefix: str, uses: Counter[int], chosen: Chosen) -> _Step:
    """Joins layers of a block into one."""
    if isinstance(layers, MLPLayers):
        return _join_mlp(block, layers, prefix, uses, chosen)
    return _join_projections(block, layers, prefix, uses, chosen)


def _join_projections(
    block: Any, layers: Projections, prefix: str, uses: Counter[int], chosen: Chosen
) -> _Step:
    """Joins linear layers of one input, and its norm, as ``_join`` does."""
    linears = {name: block.get_submodule(name) for name in layers.linears}
    norm = None if layers.norm is None else block.get_submodule(layers.norm)
    source = _Source(layers.norm, norm, linears, layers.transposed)
    _check(source, prefix, uses, chosen)
    _check_scales(source, tuple(linears))
    sizes = [matching.linear_sizes(linear) for linear in linears.values()]
    rows = [out for _, out in sizes]
    module = _projection_layer(source, sizes[0][0], sum(rows))
    parts = []
    if len(linears) > 1:
        joint = _Joint(module, rows)
        for index, name in enumerate(linears):
            owner, _, last = name.rpartition(".")
            parent = block.get_submodule(owner)
            parts.append(JointPart(joint, index).train(parent.training))
            setattr(parent, last, parts[-1])
    step, views = _placed(block, source, layers.path, module, {"": tuple(linears)})
    originals = [
        Original(_without_parameters(linear), {"": views[name]}) for name, linear in linears.items()
    ]
    if not parts:
        _remember(module, originals[0])
        return step
    _remember(module, None)
    for part, name, original in zip(parts, linears, originals, strict=True):
        part.view = views[name]
        vars(part)["_parameters"] = PartParameters(part.view)
        _remember(part, original)
    return step


def _join_mlp(
    block: Any, layers: MLPLayers, prefix: str, uses: Counter[int], chosen: Chosen
) -> _Step:
    """Joins an MLP and the norm before it, as ``_join`` does."""
    path, mlp, formula = layers.path, block.get_submodule(layers.path), layers.formula
    names = [f"{path}.{name}" for name in (*formula.first, formula.second)]
    linears = {name: block.get_submodule(name) for name in names}
    source = _Source(layers.norm, block.get_submodule(layers.norm), linears, layers.transposed)
    _check(source, prefix, uses, chosen)
    _check_scales(source, names[:-1])
    some = linears[names[0]]
    ffn, hidden = matching.linear_sizes(linears[names[-1]])
    module = JoinedMLP(
        hidden, ffn, bias=some.bias is not None, activation=formula.activation,
        params_dtype=some.weight.dtype, device="meta", **source.norm_options,
    ).train(mlp.training)  # fmt: skip
    module.dropout = None if formula.dropout is None else mlp.get_submodule(formula.dropout)
    step, views = _placed(
        block, source, path, module, {"fc1_": tuple(names[:-1]), "fc2_": (names[-1],)}
    )
    original = _without_parameters(mlp)
    for name, linear in linears.items():
        original._modules[name.removeprefix(f"{path}.")] = _without_parameters(linear)
    own = {name.removeprefix(f"{path}."): view for name, view in views.items()}
    _remember(module, Original(original, own))
    return step


def _without_parameters(module: nn.Module) -> nn.Module:
    """Returns a copy of a layer, with the same children and None for each of its parameters."""
    new = copy.copy(module)
    vars(new)["_parameters"] = dict.fromkeys(module._parameters)
    vars(new)["_modules"] = dict(module._modules)
    return new


def _remember(module: nn.Module, original: Original | None) -> None:
    """Records the layer that ``module`` replaces, by which it is initialised; None without one."""
    vars(module)[ORIGINAL] = original
    flagged = "_is_hf_initialized"  # transformers' mark of layers that are not to be initialised
    inner = [] if original is None else [original.module.get_submodule(n) for n in original.views]
    if all(getattr(layer, flagged, False) for layer in inner):
        vars(module)[flagged] = True


def _projection_layer(source: _Source, inner: int, outer: int) -> JoinedLinear | JoinedProjections:
    """Returns a layer on the meta device for the projections of ``source`` and their norm."""
    some = next(iter(source.linears.values()))
    options: dict[str, Any] = {"params_dtype": some.weight.dtype, "device": "meta"}
    bias = some.bias is not None
    if source.norm is None:
        return JoinedProjections(inner, outer, bias, **options).train(some.training)
    return JoinedLinear(inner, outer, bias=bias, **source.norm_options, **options).train(
        some.training
    )


def _placed(
    block: nn.Module, source: _Source, path: str, module: nn.Module, parts: dict[str, tuple]
) -> tuple[_Step, dict[str, PartView]]:
    """Gives ``module``, on the meta device, parameters and puts it in its place in the block."""
    linear = {
        f"{prefix}{attribute}": source.parts(attribute, *names)
        for prefix, names in parts.items()
        for attribute in ("weight", "bias")
    }
    entries = _fill(module, source, path, linear)
    owner, _, name = path.rpartition(".")
    setattr(block.get_submodule(owner), name, module)
    if isinstance(module, _NormApart):
        module.use_norm(source.norm)
    vars(module)[KEYS] = (f"{path}.", tuple(entries))
    views = _show_originals(block, module, entries)
    return (source, path, [*source.former_entries(path), *entries]), views


def _check(source: _Source, prefix: str, uses: Counter[int], chosen: Chosen) -> None:
    """Raises ``_NotFusable`` unless one layer can replace those of ``source``."""
    norm, linears = source.norm, list(source.linears.values())
    named = dict(source.linears)
    if source.norm_name is not None:
        named = {source.norm_name: norm, **named}
    for name, module in named.items():
        if module is norm:
            fits = known_norm(norm) is not None
        elif source.transposed:
            fits = matching.is_conv1d(module)
        else:
            fits = matching.is_plain(module, nn.Linear)
        if not fits or matching.hooked(module):
            raise _NotFusable(f"{name} is {type(module).__name__}, or has hooks")
        reason = matching.unsupported(module)
        if reason:
            raise _NotFusable(f"{name}: {reason}")
        reason = chosen(prefix + name, module)
        if reason:
            raise _NotFusable(f"{name}: {reason}", chosen=True)
    weights, biases = [m.weight for m in linears], [m.bias for m in linears]
    if len({bias is None for bias in biases}) > 1:
        raise _NotFusable("some of its layers have a bias")
    parameters = [p for m in named.values() for p in m.parameters()]
    if any(uses[id(parameter)] > 1 for parameter in parameters):
        raise _NotFusable("a parameter is shared")
    if len({(p.dtype, p.device) for p in parameters}) > 1:
        raise _NotFusable("its parameters have several dtypes or devices")
    for ones in (weights, [bias for bias in biases if bias is not None]):
        if len({p.requires_grad for p in ones}) > 1:
            raise _NotFusable("some of its parameters are frozen")


def _check_scales(source: _Source, names: Iterable[str]) -> None:
    """Raises ``_NotFusable`` if layers to become one have FP8 weights whose scales this mixes."""
    weights = [source.linears[name].weight for name in names]
    free = [w for w in weights if type(w) is FP8Parameter and w.has_free_scales]
    if not free or len(weights) == 1:
        return
    if len(free) < len(weights) or any(w.recipe != weights[0].recipe for w in free):
        raise _NotFusable("some of its FP8 weights have another recipe or no scales of their own")
    rows = layout_of(weights[0].recipe).block_rows
    if not rows:
        raise _NotFusable("its FP8 weights have a scale each")
    if any(w.shape[0] % rows for w in weights[:-1]):
        sizes = [w.shape[0] for w in weights]
        raise _NotFusable(f"its FP8 weights have {sizes} rows, which cut blocks of {rows}")


def _fill(
    module: nn.Module, source: _Source, path: str, linear: dict[str, list[tuple[str, Any]]]
) -> list[JoinedKey]:
    """Gives the joined layer its parameters, from ``(key, Parameter)`` of the originals of each."""
    entries = []
    for name, parts in linear.items():
        values = [value for _, value in parts]
        if values[0] is None:
            continue
        transposed = source.transposed and values[0].dim() == 2
        if len(values) > 1 or transposed:
            with torch.no_grad():
                value = joined(values, transposed)
            parameter = nn.Parameter(value, requires_grad=values[0].requires_grad)
            if all(getattr(value, "_is_hf_initialized", False) for value in values):
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        else:
            parameter = values[0]
        setattr(module, name, parameter)
        rows = [value.shape[1 if transposed else 0] for value in values]
        keys = [key for key, _ in parts]
        entries.append(JoinedKey(f"{path}.{name}", tuple(zip(keys, rows, strict=True)), transposed))
    return entries


def _show_originals(
    block: nn.Module, module: nn.Module, entries: list[JoinedKey]
) -> dict[str, PartView]:
    """Makes original parameters readable under their names, and returns them by layer."""
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
        if getattr(parent, name, None) is None:  # its module is gone
            vars(parent)[name] = view
    return views
