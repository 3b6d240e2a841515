"""State dicts of blocks whose layers ``from_torch(fuse=True)`` has joined, in the original keys.

A joined parameter is several original ones, say the weights of the query, key and value
projections, stacked by rows. Hooks of the block split it when a state dict is made, and stack the
original ones when a state dict is loaded. So a fused model and a plain one have the same files.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from ..fp8.parameter.operands import dequantized
from ..fp8.parameter.parameter import FP8Parameter
from ..module._core.fp8_entries import SCALE, given_weight
from . import _matching as matching

# Attribute of a joined layer: its dotted name in the block and a period, and its joined parameters.
KEYS = "_apex_te_keys"
BLOCK = 128


class JoinedKey(NamedTuple):
    """Keys of a joined parameter and of the original parameters that it is stacked from.

    ``parts`` has ``(key, rows)`` of each original parameter, which is ``[in, out]`` if
    ``transposed``. ``former`` is True for a norm's parameter that had ``key`` only in earlier
    releases.
    """

    key: str
    parts: tuple[tuple[str, int], ...]
    transposed: bool = False
    former: bool = False

    def prefixed(self, prefix: str) -> JoinedKey:
        """Returns a copy with ``prefix`` before each of the keys."""
        parts = tuple((prefix + key, rows) for key, rows in self.parts)
        return JoinedKey(prefix + self.key, parts, self.transposed, self.former)

    def split(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Returns views of a joined parameter's values, one for each original parameter."""
        value = dequantized(value)
        rows = [count for _, count in self.parts]
        return [original_part(part, self.transposed) for part in value.split(rows)]

    def split_scales(self, scale_inv: torch.Tensor) -> list[torch.Tensor]:
        """Returns the scales of the original parameters, of a joined one that is held in FP8."""
        if scale_inv.dim() < 2:
            return [scale_inv.clone() for _ in self.parts]
        each = rows_with_a_scale(scale_inv, sum(rows for _, rows in self.parts))
        if self.cuts_blocks and each > 1:
            raise NotImplementedError(
                f"from_torch: parts of the joined {self.key} must be whole blocks of {BLOCK} rows "
                f"to have scales of their own, got {[rows for _, rows in self.parts]} rows"
            )
        blocks = [-(-count // each) for _, count in self.parts]
        parts = scale_inv.split(blocks)
        return [original_part(part, self.transposed).contiguous() for part in parts]

    @property
    def cuts_blocks(self) -> bool:
        """True if a block of 128 rows spans two parts, so that neither has its own scales."""
        return any(rows % BLOCK for _, rows in self.parts[:-1])


def rows_with_a_scale(scale_inv: torch.Tensor, rows: int) -> int:
    """Returns how many rows of a weight with ``rows`` rows share the scales of ``scale_inv``."""
    return 1 if scale_inv.shape[0] == rows else BLOCK


def original_part(part: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Returns a view of joined rows ``[out, in]`` or ``[out]`` in the original layout."""
    return part.t() if transposed else part


def joined(values: list[torch.Tensor], transposed: bool) -> torch.Tensor:
    """Returns weights (``[in, out]`` if ``transposed``) or biases, stacked by rows."""
    if len(values) == 1 and not transposed:
        return values[0]
    return torch.cat([value.t() if transposed else value for value in values]).contiguous()


class PartView:
    """Weight and bias of one original layer, read as views of the joined parameters."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.rows: dict[str, tuple[str, int, int, bool]] = {}

    def part(self, attribute: str) -> torch.Tensor | None:
        """Returns a view of an original parameter, in its own layout; None if it did not exist."""
        if attribute not in self.rows:
            return None
        name, start, rows, transposed = self.rows[attribute]
        value = dequantized(getattr(self.module, name))
        return original_part(value.narrow(0, start, rows), transposed)

    @property
    def weight(self) -> torch.Tensor | None:
        """Returns the weight of the original layer, a view of the joined weight."""
        return self.part("weight")

    @property
    def bias(self) -> torch.Tensor | None:
        """Returns the bias of the original layer, a view of the joined one; None if it had none."""
        return self.part("bias")

    @property
    def weight_scale_inv(self) -> torch.Tensor:
        """Returns the scales of the weight's own blocks, for a joined weight with free scales."""
        name, start, rows, transposed = self.rows["weight"]
        scale_inv: torch.Tensor = getattr(self.module, name + SCALE)
        if scale_inv.dim() < 2:
            return scale_inv
        each = rows_with_a_scale(scale_inv, getattr(self.module, name).shape[0])
        own = scale_inv[start // each : -(-(start + rows) // each)]
        return original_part(own, transposed)

    @property
    def _parameters(self) -> PartParameters:
        """Returns what accelerate reads and sets parameters by."""
        return PartParameters(self)

    @property
    def _buffers(self) -> dict[str, torch.Tensor]:
        return {}

    def requires_grad_(self, requires_grad: bool = True) -> PartView:
        """Raises ValueError unless the joined parameters already have this ``requires_grad``."""
        for name, *_ in self.rows.values():
            parameter = getattr(self.module, name)
            if parameter.requires_grad != requires_grad:
                raise ValueError(
                    f"from_torch: requires_grad must be {parameter.requires_grad} for a layer that "
                    f"fuse=True joined with others, got {requires_grad}; set it for the joined "
                    f"{name}, or before the conversion, or convert with fuse=False"
                )
        return self

    def write(self, attribute: str, value: torch.Tensor) -> None:
        """Sets an original parameter; a joined one on the meta device waits for all its parts."""
        name, start, rows, transposed = self.rows[attribute]
        whole = getattr(self.module, name)
        if hasattr(whole, "to_local"):
            raise TypeError(
                f"from_torch: a joined {name} must be a plain Parameter to set a part of it, got a "
                f"{type(whole).__name__}"
            )
        value = original_part(value.detach(), transposed)
        waiting = vars(self.module).setdefault("_apex_te_waiting", {})
        with torch.no_grad():
            if value.is_meta:
                new = whole.detach().to("meta", value.dtype)
            elif whole.is_meta:
                parts = waiting.setdefault(name, {})
                parts[start] = value
                if sum(len(part) for part in parts.values()) < len(whole):
                    return
                new = torch.cat([parts[at].to(value) for at in sorted(parts)])
            elif isinstance(whole, FP8Parameter):
                new = dequantized(whole).clone()
                new.narrow(0, start, rows).copy_(value)
                whole.copy_(new)
                return
            else:
                new = whole.detach().to(value)
                new.narrow(0, start, rows).copy_(value)
        waiting.pop(name, None)
        if new.data_ptr() != whole.data_ptr() or new.is_meta != whole.is_meta:
            setattr(self.module, name, nn.Parameter(new, requires_grad=whole.requires_grad))


class PartParameters(dict[str, Any]):
    """Parameters of an original layer, read and set by name; iterating yields none."""

    def __init__(self, view: PartView) -> None:
        super().__init__()
        self.view = view

    def __contains__(self, name: object) -> bool:
        return name in self.view.rows

    def __getitem__(self, name: str) -> nn.Parameter:
        value = self.view.part(name)
        if value is None:
            raise KeyError(name)
        whole = getattr(self.view.module, self.view.rows[name][0])
        return nn.Parameter(value.detach(), requires_grad=whole.requires_grad)

    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        self.view.write(name, value)

    def __reduce__(self) -> Any:
        return PartParameters, (self.view,)


class _OriginalWeights:
    """Weights for accelerate's hook of a joined layer, stacked from the original ones."""

    def __init__(self, weights: Any, block: str, entries: Iterable[JoinedKey]) -> None:
        self.dataset, self.prefix = weights.dataset, weights.prefix
        self.entries = {entry.key: entry for entry in (one.prefixed(block) for one in entries)}

    def __getitem__(self, name: str) -> Any:
        entry = self.entries.get(self.prefix + name)
        if entry is None or any(key not in self.dataset for key, _ in entry.parts):
            return self.dataset[self.prefix + name]
        values = [self.dataset[key] for key, _ in entry.parts]
        # GPT-2's c_attn has one name for both layouts, and a hook writes back the joined one.
        transposed = entry.transposed and values[0].shape[-1] == entry.parts[0][1]
        return joined(values, transposed)


def read_original_keys(hook: Any, keys: tuple[str, tuple[JoinedKey, ...]]) -> None:
    """Makes a hook of accelerate's, made for a joined layer, find parameters by original keys."""
    for one in getattr(hook, "hooks", (hook,)):
        weights, (path, entries) = getattr(one, "weights_map", None), keys
        prefix = getattr(weights, "prefix", "")
        if prefix.endswith(path) and hasattr(weights, "dataset"):
            one.weights_map = _OriginalWeights(weights, prefix[: -len(path)], entries)


class JoinedState:
    """State dict hooks of one block that save and load the keys of the original layers."""

    def __init__(self, entries: Iterable[JoinedKey], order: list[str]) -> None:
        self.entries = tuple(entries)
        self.order = order
        self._prefix = ""

    def install(self, block: nn.Module) -> None:
        """Registers the hooks with ``block``."""
        block.register_state_dict_post_hook(self)
        block.register_load_state_dict_pre_hook(self.before_load)
        block.register_load_state_dict_post_hook(self.after_load)

    def __call__(
        self, block: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        """Replaces joined keys of ``state_dict`` by the original ones (a post-hook)."""
        own = {key: state_dict.pop(key) for key in list(state_dict) if key.startswith(prefix)}
        for entry in self.entries:
            entry = entry.prefixed(prefix)
            value, scale_inv = own.pop(entry.key, None), own.pop(entry.key + SCALE, None)
            if value is not None:
                parts = zip(entry.parts, entry.split(value), strict=True)
                own.update({key: _own_storage(part) for (key, _), part in parts})
            if scale_inv is not None:
                scales = zip(entry.parts, entry.split_scales(scale_inv), strict=True)
                for (key, _), part in scales:
                    own[key + SCALE] = part
                    if entry.transposed or part.dim() < 2:  # a copy, as the scales are
                        own[key] = own[key].clone()
        for key in self.order:
            if prefix + key in own:
                state_dict[prefix + key] = own.pop(prefix + key)
        state_dict.update(own)

    def before_load(
        self,
        block: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        """Replaces original keys of ``state_dict`` by joined ones, which torch then loads."""
        self._prefix = prefix
        for entry in self.entries:
            if entry.former:
                former = entry.prefixed(prefix)
                if former.key in state_dict:
                    state_dict.setdefault(former.parts[0][0], state_dict.pop(former.key))
                continue
            own = block.get_parameter(entry.key).detach()
            entry = entry.prefixed(prefix)
            if self._is_joined(entry, state_dict, own):
                continue
            if not any(key in state_dict for key, _ in entry.parts):
                continue
            values = []
            held = _held_parts(entry, state_dict, own)
            for (key, _), current in zip(entry.parts, entry.split(own), strict=True):
                value = state_dict.pop(key, None)
                if value is None:
                    missing.append(key)
                elif not isinstance(value, torch.Tensor) or value.shape != current.shape:
                    errors.append(_mismatch(key, value, current))
                    value = None
                values.append(current if value is None else value)
            if held is not None:
                state_dict[entry.key] = held
                continue
            device = next((v.device for v in values if not v.is_meta), own.device)
            # Missing original parameters keep the values that the model has.
            if not any(v.is_meta for v in values):
                values = [v.to(device) for v in values]
            elif not all(v.is_meta for v in values):
                continue  # after_load says that all of them are missing
            state_dict[entry.key] = _like(own, joined(values, entry.transposed))

    def _is_joined(self, entry: JoinedKey, state_dict: dict[str, Any], own: torch.Tensor) -> bool:
        """Returns True if ``state_dict`` has the joined parameter, as earlier releases saved it."""
        if entry.key not in state_dict:
            return False
        if entry.key != entry.parts[0][0]:
            # With all original keys there, too, a tool has added the joined one from the model.
            return not all(key in state_dict for key, _ in entry.parts)
        # GPT-2's c_attn has one name for both: [in, 3 in] originally, [3 in, in] joined.
        shape = getattr(state_dict[entry.key], "shape", None)
        return shape == own.shape and shape != entry.split(own)[0].shape

    def after_load(self, block: nn.Module, incompatible: Any) -> None:
        """Replaces joined keys by the original ones in the list of missing keys, in place."""
        missing: list[str] = incompatible.missing_keys
        for entry in self.entries:
            entry = entry.prefixed(self._prefix)
            if entry.key in missing:
                missing.remove(entry.key)
                missing += [key for key, _ in entry.parts if key not in missing]


def _held_parts(
    entry: JoinedKey, state_dict: dict[str, Any], own: torch.Tensor
) -> torch.Tensor | None:
    """Joins the FP8 data and scales of original parameters; None unless all parts have them."""
    held = []
    for key, _ in entry.parts:
        codes, scale_inv = state_dict.get(key), state_dict.get(key + SCALE)
        if not isinstance(codes, torch.Tensor) or not isinstance(scale_inv, torch.Tensor):
            continue
        del state_dict[key + SCALE]
        if entry.transposed:
            codes, scale_inv = codes.t(), scale_inv.t()
        held.append(given_weight(own, codes, scale_inv))
        state_dict[key] = original_part(dequantized(held[-1]), entry.transposed)
    return torch.cat(held) if len(held) == len(entry.parts) else None


def _mismatch(key: str, value: Any, current: torch.Tensor) -> str:
    """Returns torch's message for an entry of another shape, or one for an entry without."""
    if not isinstance(value, torch.Tensor):
        return f"{key} must be a tensor, got {type(value).__name__}"
    return (
        f"size mismatch for {key}: copying a param with shape {value.shape} from checkpoint, "
        f"the shape in current model is {current.shape}."
    )


def _like(own: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns ``value`` with mesh and placements of ``own``; itself if that is not a DTensor."""
    if type(own) is torch.Tensor or not torch.distributed.is_available():
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(own, DTensor) or isinstance(value, DTensor):
        return value
    return distribute_tensor(value.to(own.device), own.device_mesh, own.placements)


def _own_storage(part: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with the memory of ``part`` and another ``torch.UntypedStorage`` object.

    Tools that write safetensors drop all but one of the tensors that share a storage; a copy would
    not show later changes. DTensors, meta and fake tensors, and views that require grad stay as
    they are.
    """
    if type(part) is not torch.Tensor or part.is_meta or part.requires_grad:
        return part  # DTensors, fake tensors, and views that keep_vars=True wants differentiable
    return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(part))


ORIGINAL = "_apex_te_original"


class Original(NamedTuple):
    """Layer that a joined layer replaces; ``views`` has its parameters, by dotted name in it."""

    module: nn.Module
    views: dict[str, PartView]


class InitWeights:
    """Callable that replaces a model's ``_init_weights`` and also initialises joined layers."""

    def __init__(self, model: Any) -> None:
        # A copy or pickle of the model contains one of these that initialises the copy.
        self.model = model

    def __call__(self, module: nn.Module) -> None:
        init = type(self.model)._init_weights
        own = vars(module)
        if ORIGINAL not in own:
            init(self.model, module)
        elif own[ORIGINAL] is not None:
            original: Original = own[ORIGINAL]
            layers = [(original.module.get_submodule(n), v) for n, v in original.views.items()]
            parts = [(layer, name, view) for layer, view in layers for name in view.rows]
            try:
                for layer, name, view in parts:
                    layer._parameters[name] = _parameter(view, name)
                original.module.apply(lambda layer: init(self.model, layer))
                with torch.no_grad():
                    for layer, name, view in parts:
                        found, value = view.part(name), layer._parameters[name]
                        if view.rows[name][3] and found is not None and value is not None:
                            found.copy_(value)
            finally:
                for layer, name, _ in parts:
                    layer._parameters[name] = None


def _parameter(view: PartView, attribute: str) -> nn.Parameter:
    """Returns a Parameter that shares its memory with a part of a joined one."""
    whole = getattr(view.module, view.rows[attribute][0])
    if type(whole) is not nn.Parameter:
        raise NotImplementedError(
            "from_torch: a model with joined layers must be initialised before its weights are "
            f"sharded or held in FP8, got a {type(whole).__name__}"
        )
    value = view.part(attribute)
    assert isinstance(value, torch.Tensor)
    parameter = nn.Parameter(value.detach().contiguous(), whole.requires_grad)
    if getattr(whole, "_is_hf_initialized", False):
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    return parameter


def init_joined_layers(model: nn.Module) -> None:
    """Replaces ``_init_weights`` on Hugging Face's models in ``model``, on the instances."""
    for module in matching.pretrained_models(model):
        if "_init_weights" not in vars(module):
            vars(module)["_init_weights"] = InitWeights(module)
