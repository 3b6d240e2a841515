"""``export_fp8``, which writes Hugging Face's models as FP8 checkpoints that servers read."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import torch
from torch import nn

from ..recipe import BlockScaling, CurrentScaling
from ..runtime.named_arguments import named_arguments
from ._fp8_entries import BLOCK, Entry, Form, check_model, entries

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
_NAME = "model"

_CHOICES = {
    "quant_method": ("compressed-tensors", "fp8"),
    "weights": ("tensor", "block"),
    "activations": ("dynamic", "static"),
}


class Export:
    """Checked options of ``export_fp8``."""

    def __init__(self, quant_method: str, weights: str, activations: str) -> None:
        self.quant_method, self.weights, self.activations = quant_method, weights, activations
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if not isinstance(value, str):
                raise TypeError(f"export_fp8: {name} must be a str, got {type(value).__name__}")
            if value not in choices:
                wanted = " or ".join(map(repr, choices))
                raise ValueError(f"export_fp8: {name} must be {wanted}, got {value!r}")
        if weights == "block" and activations == "static":
            raise ValueError(
                "export_fp8: activations must be 'dynamic' with weights='block', got 'static'"
            )

    @property
    def blocks(self) -> bool:
        """True if each block of 128x128 of a weight has its own scale."""
        return self.weights == "block"

    @property
    def form(self) -> Form:
        """Form of the quantized weights."""
        recipe = BlockScaling() if self.blocks else CurrentScaling()
        return Form(recipe, self.activations == "static", self.scale_key)

    @property
    def scale_key(self) -> str:
        """Last part of the key of a weight's scale."""
        deepseek = self.blocks and self.quant_method == "fp8"
        return "weight_scale_inv" if deepseek else "weight_scale"


def quantization_config(export: Export, ignored: list[str]) -> dict[str, Any]:
    """Returns ``quantization_config`` of ``config.json``; ``ignored`` names layers not in FP8."""
    if export.quant_method == "compressed-tensors":
        return _compressed_tensors(export, ignored)
    config: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": export.activations,
        "modules_to_not_convert": ignored,
        "ignored_layers": ignored,
    }
    if export.blocks:
        config["weight_block_size"] = [BLOCK, BLOCK]
        del config["ignored_layers"]
    else:
        config["weight_block_size"] = None
    return config


def _compressed_tensors(export: Export, ignored: list[str]) -> dict[str, Any]:
    """Returns the configuration of compressed-tensors' format "float-quantized"."""
    weights = _arguments("block" if export.blocks else "tensor", dynamic=False)
    if export.blocks:
        weights["block_structure"] = [BLOCK, BLOCK]
        inputs = _arguments("group", dynamic=True)
        inputs["group_size"] = BLOCK
    elif export.activations == "dynamic":
        inputs = _arguments("token", dynamic=True)
    else:
        inputs = _arguments("tensor", dynamic=False)
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _arguments(strategy: str, dynamic: bool) -> dict[str, Any]:
    """Returns how one tensor is quantized, in the terms of compressed-tensors."""
    return {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": strategy,
        "dynamic": dynamic,
        "group_size": None,
        "block_structure": None,
        "actorder": None,
        "observer": None if dynamic else "minmax",
        "observer_kwargs": {},
    }


@named_arguments()
def export_fp8(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    quant_method: str = "compressed-tensors",
    weights: str = "tensor",
    activations: str = "dynamic",
    max_shard_size: int | str = "5GB",
) -> None:
    """Writes ``model`` as a checkpoint with FP8 weights that vLLM and transformers can load.

    The weights of converted linear layers and experts are quantized as by ``CurrentScaling`` or
    ``BlockScaling``. This includes layers that ``from_torch(fuse=True)`` joined; with one scale per
    weight these, and the first two matrices of an expert, share it. Weights that are
    already held in FP8 in that layout are written as they are. Weights have the names of the plain
    model's files, with their scales beside them. Everything else keeps its dtype. The configuration
    lists linear layers that are not quantized, such as ``lm_head`` and GPT-2's Conv1D.

    |``quant_method``|``weights``|keys beside a ``weight``|read by|
    |---|---|---|---|
    |``"compressed-tensors"``|``"tensor"``|``weight_scale`` ``[1]``|vLLM, compressed-tensors|
    |``"compressed-tensors"``|``"block"``|``weight_scale`` per 128x128|vLLM, compressed-tensors|
    |``"fp8"``|``"tensor"``|``weight_scale`` ``[1]``|vLLM|
    |``"fp8"``|``"block"``|``weight_scale_inv`` per 128x128 (DeepSeek-V3)|vLLM, transformers|

    A weight's values are its FP8 data times its scale. ``activations="static"`` adds
    ``input_scale`` ``[1]``.

    Args:
        model: a model of Hugging Face after ``from_torch``, without adapters.
        folder: directory for the files; created if missing. Weights in it are replaced.
        quant_method: layout of configuration and keys, ``"compressed-tensors"`` or ``"fp8"``.
        weights: ``"tensor"`` for one scale per weight, ``"block"`` for one per block of 128x128; or
            the recipe's name, ``"tensorwise"`` or ``"blockwise"``.
        activations: ``"dynamic"``; or ``"static"`` to write the inputs' scales of delayed scaling,
            only with ``weights="tensor"``. Call ``flush_fp8_state()`` before.
        max_shard_size: largest size of a file, in bytes or like ``"5GB"``. A larger model is
            written to several files, with an index.

    Raises:
        ImportError: safetensors is not installed.
        TypeError: ``model`` is not a model of Hugging Face, or an argument has a wrong type.
        ValueError: an option is unknown or cannot be combined with another; the model has no
            converted layer, has adapters or is sharded; or ``"static"`` is given without state of
            delayed scaling.
    """
    try:
        import safetensors.torch as safetensors
    except ImportError as error:
        raise ImportError(
            "export_fp8: safetensors must be installed: pip install safetensors"
        ) from error
    layout = weights.removesuffix("wise") if isinstance(weights, str) else weights
    export = Export(quant_method, layout, activations)
    largest = _bytes(max_shard_size)
    check_model(model, sharded=False)
    found, ignored = entries(model, export.form)
    folder = os.fspath(folder)
    os.makedirs(folder, exist_ok=True)
    for name in os.listdir(folder):
        if re.fullmatch(rf"{_NAME}(-\d+-of-\d+)?\.safetensors(\.index\.json)?", name):
            os.remove(os.path.join(folder, name))
    shards = _shards(found, largest)
    names: dict[str, str] = {}
    total = 0
    for index, shard in enumerate(shards):
        file = f"{_NAME}.safetensors"
        if len(shards) > 1:
            file = f"{_NAME}-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        tensors = {key: _saved(value) for entry in shard for key, value in entry.tensors()}
        safetensors.save_file(tensors, os.path.join(folder, file), metadata={"format": "pt"})
        names.update(dict.fromkeys(tensors, file))
        total += sum(value.nbytes for value in tensors.values())
    if len(shards) > 1:
        index_of = {"metadata": {"total_size": total}, "weight_map": names}
        _write_json(os.path.join(folder, f"{_NAME}.safetensors.index.json"), index_of)
    _write_config(model, folder, quantization_config(export, ignored))


def _saved(value: torch.Tensor) -> torch.Tensor:
    """Returns a copy on the CPU, in memory of its own."""
    return value.to("cpu", copy=True)


def _shards(entries: list[Entry], largest: int) -> list[list[Entry]]:
    """Divides the entries into files of at most ``largest`` bytes, if none is larger itself."""
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.nbytes() > largest:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes()
    return shards


def _bytes(size: int | str) -> int:
    """Returns ``max_shard_size`` in bytes."""
    if isinstance(size, str):
        found = re.fullmatch(r"(\d+)([KMG]B)", size)
        if found is None:
            raise ValueError(
                f'export_fp8: max_shard_size must be an int or as in "5GB", got {size!r}'
            )
        return int(found[1]) * _UNITS[found[2]]
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(
            f"export_fp8: max_shard_size must be an int or str, got {type(size).__name__}"
        )
    if size < 1:
        raise ValueError(f"export_fp8: max_shard_size must be at least 1, got {size}")
    return size


def _write_config(model: Any, folder: str, quantization: dict[str, Any]) -> None:
    """Writes the model's configuration with that of its quantization, and that of generation."""
    config = json.loads(model.config.to_json_string())
    config["architectures"] = [type(model).__name__]
    config["dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")
    config["quantization_config"] = quantization
    _write_json(os.path.join(folder, "config.json"), config)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)


def _write_json(path: str, content: Any) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
