"""Places where a model of transformers has the weights of a checkpoint, and how it joins them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from .description import BLOCK, BLOCKS, CHANNEL, PACKED, TENSOR, Form, Header, Stored


class Held(NamedTuple):
    """Weight of a model that is in FP8 in the checkpoint, alone or joined from several there.

    ``stored`` tells how the first of them, ``key``, is stored. ``scale`` and ``input_scale`` are
    names of the Parameters that scales are loaded to, in the weight's module. ``parts`` weights
    follow one another in the rows of a matrix ``shape`` of the model's ``dtype``, and ``pattern``
    is the converter's that joins them, or None.
    """

    stored: Stored
    key: str
    scale: str
    input_scale: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    pattern: str | None
    parts: int = 1


class AsMatrix(ConversionOps):
    """Gives scales two dimensions before those of several weights are joined, and takes them back.

    ``dims`` is the number of dimensions in the file.
    """

    def __init__(self, dims: int, back: bool = False) -> None:
        self.dims, self.back = dims, back

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Returns the scales of ``input_dict`` in the other shape."""
        shaped = _in_file if self.back else _as_matrix
        return {
            key: [shaped(each, self.dims) for each in value]
            if isinstance(value, list)
            else shaped(value, self.dims)
            for key, value in input_dict.items()
        }

    @property
    def reverse_op(self) -> ConversionOps:
        """Op that gives the scales the file's shape again."""
        return AsMatrix(self.dims, not self.back)


def _as_matrix(scale: torch.Tensor, dims: int) -> torch.Tensor:
    if scale.dim() == 4:
        return scale.flatten(0, 1).flatten(1, 2)
    return scale if scale.dim() == 2 else scale.reshape(-1, 1)


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the two dimensions that ``AsMatrix`` gives scales of one weight in ``shape``."""
    rows, cols = _as_matrix(torch.empty(shape, device="meta"), 0).shape
    return rows, cols


def joins_scales(converter: Any) -> bool:
    """Returns True for a converter that ``scale_converters`` has made."""
    return any(isinstance(each, AsMatrix) for each in getattr(converter, "operations", ()))


def _in_file(scale: torch.Tensor, dims: int) -> torch.Tensor:
    if dims == 4:
        return scale[:, None, :, None]
    return scale if dims == 2 else scale.reshape((-1,) if dims else ())


def find_weights(
    model: nn.Module, weights: Mapping[str, Stored], conversions: Iterable[Any]
) -> dict[str, Held]:
    """Returns the model's weights that are in FP8 in the checkpoint, by name.

    Args:
        conversions: transformers' converters of the model's keys.
    """
    conversions = list(conversions)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    state: Any = model.state_dict()
    prefix: Any = model.base_model_prefix
    found: dict[str, Held] = {}
    sources: dict[str, set[str]] = {}
    for key, stored in weights.items():
        if stored.form is Form.PACKED:
            key = key.removesuffix(PACKED)
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state:
            continue  # which transformers reports
        if pattern is not None:
            _check_operations(key, next(c for c in converters if pattern in c.source_patterns))
        sources.setdefault(name, set()).add(pattern or key)
        if name not in found:
            _check_owner(model, name, key, stored)
            scale, inp = _companion(name, key, stored.scale), stored.input_scale
            inp = None if inp is None else _companion(name, key, inp)
            own = state[name]
            shape = tuple(own.shape)
            if is_transposed(model.get_submodule(name.rpartition(".")[0])):
                shape = shape[0], shape[2], shape[1]
            found[name] = Held(stored, key, scale, inp, shape, own.dtype, pattern)
        elif not _alike(found[name].stored, stored):
            raise NotImplementedError(
                f"from_fp8_checkpoint: {key} must have scales as {found[name].key} has, with which "
                f"the model joins it, got {stored.scale_header} and "
                f"{found[name].stored.scale_header}"
            )
    if not found:
        raise ValueError(
            "from_fp8_checkpoint: path_or_name must have weights in FP8 for layers of "
            f"{type(model).__name__}, got {next(iter(weights))}, which is in no layer"
        )
    for name, held in found.items():
        found[name] = held = held._replace(parts=len(sources[name]))
        cut = held.parts > 1 and len(held.shape) == 2 and held.shape[0] // held.parts % BLOCK
        if cut and held.stored.form is not Form.CHANNEL:
            raise NotImplementedError(
                f"from_fp8_checkpoint: {held.key} must have a multiple of {BLOCK} rows to be "
                f"joined to {name}, got {held.shape[0] // held.parts}"
            )
    return found


def _alike(one: Stored, other: Stored) -> bool:
    """Returns True if the scales of two weights may be stacked."""
    dtypes = one.scale_header.dtype, other.scale_header.dtype
    return one[:2] == other[:2] and dtypes[0] is dtypes[1] and (
        len(one.scale_header.shape) == len(other.scale_header.shape)
    )  # fmt: skip


def _companion(name: str, key: str, scale: str) -> str:
    """Returns the name of the Parameter for the scale ``scale`` of ``key``, beside ``name``."""
    own = name.rpartition(".")[2]
    if key.endswith(".weight"):
        end = scale.rpartition(".")[2]
        return end if own == "weight" else f"{own}_{end.removeprefix('weight_')}"
    return own + scale.removeprefix(key)


def cast_by(name: str, held: Held, form: Form, scale_key: str) -> Held:
    """Returns how the weight ``name`` is written that was cast again, with scales of ``form``."""
    block = {Form.BLOCK: BLOCKS, Form.CHANNEL: CHANNEL}.get(form, TENSOR).block
    *count, rows, cols = held.shape
    shape: tuple[int, ...] = (1,)
    if block[0]:
        shape = -(-(rows // held.parts) // block[0]), -(-cols // (block[1] or cols))
    if held.pattern is None:
        shape = (*count, *shape)
    if held.key.endswith(".weight"):
        scale = held.key.removesuffix("weight") + scale_key
    else:
        scale = f"{held.key}_{scale_key.removeprefix('weight_')}"
    stored = Stored(form, block, scale, Header(torch.float32, shape))
    own = _companion(name, held.key, scale)
    return held._replace(stored=stored, scale=own, input_scale=None)


def _check_operations(key: str, converter: WeightConverter) -> None:
    for operation in converter.operations:
        if not isinstance(operation, (MergeModulelist, Concatenate)):
            raise NotImplementedError(
                f"from_fp8_checkpoint: {key} must be stacked or joined only to become the model's "
                f"weight, got {type(operation).__name__}"
            )


def is_transposed(owner: Any) -> bool:
    """Returns True for experts whose weights are ``[experts, in, out]``; FP8 ones are not."""
    return bool(getattr(owner, "is_transposed", False))


def _check_owner(model: nn.Module, name: str, key: str, stored: Stored) -> None:
    owner = model.get_submodule(name.rpartition(".")[0])
    weight = owner._parameters.get(name.rpartition(".")[2])
    stacked = weight is not None and weight.dim() == 3 and hasattr(owner, "is_transposed")
    turns = stored.form in (Form.PACKED, Form.BLOCK)  # whose blocks may lie either way
    is_stack = stacked and (turns or not is_transposed(owner))
    if type(owner) in (nn.Linear, nn.Embedding) or is_stack:
        return
    raise NotImplementedError(
        f"from_fp8_checkpoint: {key} must be the weight of a linear layer, embedding or experts to "
        f"be in FP8, got {type(owner).__name__}"
    )


def scale_converters(converter: Any, weights: Iterable[Held]) -> list[WeightConverter]:
    """Returns copies of a converter of ``weights`` that join their scales in the same way."""
    if not isinstance(converter, WeightConverter):
        return []
    copies: dict[str, WeightConverter] = {}
    for held in weights:
        if held.pattern not in converter.source_patterns:
            continue
        stored = held.stored
        for scale, dims in (
            (stored.scale, len(stored.scale_header.shape)),
            (stored.input_scale, stored.input_dims),
        ):
            if scale is not None:
                end = scale.rpartition(".")[2]
                copies[end] = copies.get(end) or converter.copy(
                    [s.removesuffix("weight") + end for s in converter._original_source_patterns],
                    [
                        f"{target}_{end.removeprefix('weight_')}"
                        for target in converter._original_target_patterns
                    ],
                    operations=[AsMatrix(dims), *converter.operations],
                )
    return list(copies.values())
