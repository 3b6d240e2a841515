"""``fp8_tensors``, which hands a model's weights over to an inference engine in FP8, in memory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from ..fp8.parameter.decode import quantizers_of
from ..recipe import BlockScaling, CurrentScaling, Recipe, RowwiseScaling, chosen_recipe
from ..runtime.named_arguments import named_arguments
from ._fp8_entries import BLOCK, Entry, Form, check_model, entries

_LAYOUTS = ("vllm", "sglang", "hf")
_METHODS = ("fp8", "compressed-tensors")
_ACTIVATIONS = ("dynamic", "static")
# Layers that an engine joins to one: their last names, in the order in which it joins them.
_JOINED = (
    ("q_proj", "k_proj", "v_proj"), ("q_a_proj", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj"),
    ("w1", "w3"),
)  # fmt: skip


@named_arguments()
def fp8_tensors(
    model: nn.Module,
    *,
    layout: str = "vllm",
    quant_method: str = "fp8",
    weights: Recipe | str = "block",
    activations: str = "dynamic",
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the names and tensors of the plain model, with FP8 weights, for an inference engine.

    The names are those of ``export_fp8``: layers that ``from_torch(fuse=True)`` joined are split,
    and experts are separate. A quantized weight ``[out, in]`` in float8_e4m3fn is followed by its
    float32 scale, by which the engine multiplies it. Everything else has the model's dtype. Weights
    that are already held in FP8 in that layout are yielded without a copy; others are quantized one
    after the other, as for a GEMM in that recipe. Parts of a joined layer, and the first two
    matrices of an expert, share a single scale, so that the engine can join them.

    |``quant_method``|``weights``|``layout``|scale of ``x.weight``|
    |---|---|---|---|
    |``"fp8"``|``"block"``|any|``x.weight_scale_inv`` ``[ceil(out / 128), ceil(in / 128)]``|
    |``"fp8"``|``"tensor"``|``"vllm"``, ``"sglang"``|``x.weight_scale`` ``[1]``|
    |``"fp8"``|``"tensor"``|``"hf"``|``x.weight_scale_inv`` ``[]``|
    |``"compressed-tensors"``|``"block"``|any|``x.weight_scale``, as with ``"fp8"``|
    |``"compressed-tensors"``|``"channel"``|any|``x.weight_scale`` ``[out, 1]``|
    |``"compressed-tensors"``|``"tensor"``|any|``x.weight_scale`` ``[1]``|

    With ``activations="static"`` the scale of the layer's input follows: ``x.input_scale`` ``[1]``,
    or in transformers' layout ``x.activation_scale`` ``[]``.

    A model that is sharded by ``fully_shard``, or has layers split by a ``tp_group``, is gathered
    one parameter at a time: in FP8 if it is held in FP8, or if each rank's part consists of whole
    blocks, which the rank then quantizes first. FP8 parts of a ``tp_group`` that have a single
    scale each, or end inside a block of the whole weight, are decoded and quantized again. All
    ranks must read the iterator to its end. If transformers distributes experts over ranks, each
    rank yields its own, numbered as in the whole model.

    The tensors may share the model's memory: copy them to keep them over the next training step.

    Args:
        model: a model of Hugging Face after ``from_torch``, without adapters; whole or sharded.
        layout: names expected by ``"vllm"``, ``"sglang"`` or ``"hf"`` (transformers).
        quant_method: the engine's quantization, ``"fp8"`` or ``"compressed-tensors"``.
        weights: ``"block"`` for one scale per 128x128, as in DeepSeek-V3, ``"channel"`` for one per
            output channel, amax / 448, or ``"tensor"`` for one per weight; or a recipe, or its
            name, that has such scales, such as ``BlockScaling(pow2=False)``.
        activations: ``"dynamic"``; or ``"static"`` to yield the inputs' scales of delayed scaling,
            only with one scale per weight. Call ``flush_fp8_state()`` before.

    Returns:
        An iterator of ``(name, tensor)``.

    Raises:
        TypeError: ``model`` is not a model of Hugging Face, or an argument has a wrong type.
        ValueError: an option is unknown; the model lacks converted layers, has adapters or is on
            the meta device; channels are given with ``"fp8"``; ``"static"`` is given with blocks or
            channels, or without state of delayed scaling; or, with blocks, the rows of a layer that
            the engine joins with the next one, or the columns of any layer for compressed-tensors,
            are not a multiple of 128.
        NotImplementedError: FP8 weights or experts are sharded otherwise than by rows.
    """
    for name, value, choices in (
        ("layout", layout, _LAYOUTS), ("quant_method", quant_method, _METHODS),
        ("activations", activations, _ACTIVATIONS),
    ):  # fmt: skip
        if not isinstance(value, str):
            raise TypeError(f"fp8_tensors: {name} must be a str, got {type(value).__name__}")
        if value not in choices:
            wanted = ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}"
            raise ValueError(f"fp8_tensors: {name} must be {wanted}, got {value!r}")
    check_model(model)
    recipe = _recipe(weights)
    blocks, scalars = isinstance(recipe, BlockScaling), layout == "hf" and quant_method == "fp8"
    static, channels = activations == "static", isinstance(recipe, RowwiseScaling)
    if static and (blocks or channels):
        raise ValueError(
            "fp8_tensors: activations must be 'dynamic' with scales of blocks or channels, "
            "got 'static'"
        )
    if channels and quant_method != "compressed-tensors":
        raise ValueError(
            "fp8_tensors: quant_method must be 'compressed-tensors' with scales of channels, "
            f"got {quant_method!r}"
        )
    scale_key = (
        "weight_scale_inv" if quant_method == "fp8" and (blocks or scalars) else "weight_scale"
    )
    input_key = "activation_scale" if scalars else "input_scale"
    form = Form(recipe, static, scale_key, scalars, input_key, own_experts=True)
    found, _ = entries(model, form)
    if blocks:
        _check_joined(found, experts_only=layout == "hf")
        if quant_method == "compressed-tensors":
            _check_columns(found)
    return _tensors(found)


def _tensors(found: list[Entry]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of the entries, each of which is dropped once it is read."""
    found.reverse()
    while found:
        yield from found.pop().tensors()


def _recipe(weights: Recipe | str) -> Recipe:
    """Returns the recipe that quantizes weights."""
    known = {"block": "blockwise", "channel": "rowwise", "tensor": "tensorwise"}
    name = known.get(weights, weights) if isinstance(weights, str) else weights
    recipe = chosen_recipe("fp8_tensors", "weights", name)
    if (
        not isinstance(recipe, (BlockScaling, CurrentScaling, RowwiseScaling))
        or quantizers_of(recipe, torch.device("cpu")).weight.dtype is not torch.float8_e4m3fn
    ):
        raise ValueError(
            "fp8_tensors: weights must be 'block', 'channel', 'tensor', or block, rowwise or "
            f"current scaling with E4M3 weights, got {weights!r}"
        )
    return recipe


def _check_joined(found: Iterable[Entry], experts_only: bool) -> None:
    """Raises ValueError if an engine would join layers inside of a block of scales."""
    rows = {
        entry.key.removesuffix(".weight"): entry.shape[0] for entry in found if entry.is_quantized
    }
    for name, count in rows.items():
        stem, _, last = name.rpartition(".")
        if experts_only and not re.search(r"\.experts\.\d+$", stem):
            continue
        for names in _JOINED:
            later = names[names.index(last) + 1 :] if last in names else ()
            if count % BLOCK and any(f"{stem}.{other}" in rows for other in later):
                raise ValueError(
                    "fp8_tensors: weights must be 'tensor' for layers that the engine joins and "
                    f"whose rows are not a multiple of {BLOCK}, got {count} rows in {name}"
                )


def _check_columns(found: Iterable[Entry]) -> None:
    """Raises ValueError for columns that compressed-tensors cannot split into groups."""
    for entry in found:
        if entry.is_quantized and entry.shape[1] % BLOCK:
            raise ValueError(
                "fp8_tensors: weights must be 'tensor' with quant_method 'compressed-tensors' for "
                f"columns that are not a multiple of {BLOCK}, got {entry.shape[1]} in {entry.key}"
            )
