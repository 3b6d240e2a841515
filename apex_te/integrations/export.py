"""``export_fp8``, which writes Hugging Face's models as FP8 checkpoints that servers read."""

from __future__ import annotations

import json
import os
import re
from typing import Any, NamedTuple

import torch
from torch import nn

from ..fp8.parameter.decode import quantizers_of
from ..fp8.parameter.operands import dequantized
from ..fp8.parameter.parameter import FP8Parameter
from ..module._core.fp8_module import STATE_PREFIX, FP8Module
from ..module.linear import Linear
from ..recipe import BlockScaling, CurrentScaling
from ..runtime.named_arguments import named_arguments
from ._export_config import BLOCK, Export, quantization_config
from .experts import StackedExperts
from .fusion import key_map

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
_NAME = "model"


@named_arguments()
def export_fp8(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    quant_method: str = "compressed-tensors",
    weights: str = "tensor",
    activations: str = "dynamic",
    layout: str | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Writes ``model`` as a checkpoint with FP8 weights that vLLM and transformers can load.

    The weights of converted linear layers and experts are quantized as by ``CurrentScaling`` or
    ``BlockScaling``. This includes layers that ``from_torch(fuse=True)`` joined. Weights that are
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
        layout: ``"file"`` for the layout of the checkpoint that ``from_fp8_checkpoint`` has read,
            instead of the three options before; weights that were not trained keep their bytes.
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
    form = weights.removesuffix("wise") if isinstance(weights, str) else weights
    export = Export(quant_method, form, activations)
    largest = _bytes(max_shard_size)
    _check_model(model)
    if layout is None:
        entries, ignored = _entries(model, export)
        quantization = quantization_config(export, ignored)
    else:
        entries, quantization = _as_read(model, layout, (quant_method, weights, activations))
    folder = os.fspath(folder)
    os.makedirs(folder, exist_ok=True)
    for name in os.listdir(folder):
        if re.fullmatch(rf"{_NAME}(-\d+-of-\d+)?\.safetensors(\.index\.json)?", name):
            os.remove(os.path.join(folder, name))
    shards = _shards(entries, largest)
    names: dict[str, str] = {}
    total = 0
    for index, shard in enumerate(shards):
        file = f"{_NAME}.safetensors"
        if len(shards) > 1:
            file = f"{_NAME}-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        tensors = {key: value for entry in shard for key, value in entry.tensors(export).items()}
        safetensors.save_file(tensors, os.path.join(folder, file), metadata={"format": "pt"})
        names.update(dict.fromkeys(tensors, file))
        total += sum(value.nbytes for value in tensors.values())
    if len(shards) > 1:
        index_of = {"metadata": {"total_size": total}, "weight_map": names}
        _write_json(os.path.join(folder, f"{_NAME}.safetensors.index.json"), index_of)
    _write_config(model, folder, quantization)


def _as_read(
    model: Any, layout: Any, options: tuple[Any, ...]
) -> tuple[list[_Entry], dict[str, Any]]:
    """Returns the tensors and configuration of ``layout="file"``."""
    if layout != "file":
        raise ValueError(f"export_fp8: layout must be 'file' or None, got {layout!r}")
    if options != ("compressed-tensors", "tensor", "dynamic"):
        raise ValueError(
            "export_fp8: layout must be None with quant_method, weights or activations, got 'file'"
        )
    quantizer = getattr(model, "hf_quantizer", None)
    if not isinstance(getattr(quantizer, "held", None), dict):
        raise ValueError(
            "export_fp8: layout must be None for a model that from_fp8_checkpoint has not loaded, "
            "got 'file'"
        )
    assert quantizer is not None
    state = _unshared(model, quantizer.get_state_dict_and_metadata(model)[0])
    entries = [_Entry(key, value, None) for key, value in _original_format(model, state).items()]
    return entries, quantizer.quantization_config.to_dict()


class _Source:
    """Weight of a GEMM, quantized once for all the original weights that it was joined from.

    ``input_scale`` is the input's ``scale_inv``, ``[1]``; None with dynamic activations.
    """

    def __init__(self, weight: torch.Tensor, input_scale: torch.Tensor | None) -> None:
        self.weight = weight
        self.input_scale = input_scale
        self._whole: tuple[torch.Tensor, torch.Tensor] | None = None

    def quantized(self, start: int, rows: int, blocks: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns FP8 data of rows and fp32 scales, ``[1]`` or by blocks of rows and columns."""
        if not blocks:
            if self._whole is None:
                self._whole = _quantized(self.weight, blocks)
            data, scale = self._whole
            if start + rows == self.weight.shape[0]:
                self._whole = None  # its last rows
            return data[start : start + rows], scale
        if start == 0 and rows == self.weight.shape[0]:
            return _quantized(self.weight, blocks)
        held = _held(self.weight, blocks)
        if held is not None and start % BLOCK == 0 and (start + rows) % BLOCK == 0:
            data, scale = held
            first, last = start // BLOCK, (start + rows) // BLOCK
            return data[start : start + rows], scale[first:last]
        return _quantized(dequantized(self.weight)[start : start + rows], blocks)


def _held(weight: torch.Tensor, blocks: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns FP8 data and scales of a weight that is held in FP8 in the wanted layout."""
    if type(weight) is not FP8Parameter:
        return None
    held = weight._held
    data, scale = held.rowwise, held.rowwise_scale_inv
    if held.dtype is not torch.float8_e4m3fn or data is None or scale is None:
        return None
    if isinstance(weight.recipe, BlockScaling) != blocks or (not blocks and scale.numel() != 1):
        return None
    return data, _trimmed(scale, data) if blocks else scale


def _quantized(weight: torch.Tensor, blocks: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns FP8 data ``[rows, cols]`` and fp32 scales of a weight."""
    held = _held(weight, blocks)
    if held is not None:
        return held
    values = dequantized(weight.detach()).contiguous()
    recipe = BlockScaling() if blocks else CurrentScaling()
    made = quantizers_of(recipe, values.device).weight.quantize(values, True, False)[0]
    data, scale = made.rowwise, made.rowwise_scale_inv
    assert data is not None
    assert scale is not None
    if made.dtype is not torch.float8_e4m3fn:
        raise NotImplementedError(f"export_fp8: weights must be cast to E4M3, got {made.dtype}")
    return data.view(made.dtype), _trimmed(scale, data) if blocks else scale.view(1)


def _trimmed(scale: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Returns the scales of the blocks that ``data`` has, without those that pad their rows."""
    return scale[: -(-data.shape[0] // BLOCK), : -(-data.shape[1] // BLOCK)]


class _Part(NamedTuple):
    """Rows of a joined weight that are exported as one weight of the original model."""

    source: _Source
    start: int
    rows: int


class _Entry(NamedTuple):
    """Tensor of the checkpoint, and the weight that is quantized in its place, or None."""

    key: str
    value: torch.Tensor
    part: _Part | None

    def nbytes(self) -> int:
        """Returns the bytes of the tensor in the checkpoint, without its scales."""
        return self.value.nbytes if self.part is None else self.value.numel()

    def tensors(self, export: Export) -> dict[str, torch.Tensor]:
        """Returns the tensors of the checkpoint by their names, on the CPU."""
        if self.part is None:
            return {self.key: _saved(self.value)}
        source, start, rows = self.part
        data, scale = source.quantized(start, rows, export.blocks)
        stem = self.key.removesuffix("weight")
        found = {self.key: _saved(data), stem + export.scale_key: _saved(scale)}
        if source.input_scale is not None:
            found[stem + "input_scale"] = _saved(source.input_scale)
        return found


def _saved(value: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous copy on the CPU, in memory of its own."""
    return value.detach().to("cpu", copy=True).contiguous()


def _check_model(model: Any) -> None:
    """Raises an error if ``model`` is no whole model of Hugging Face with converted layers."""
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise TypeError(
            f"export_fp8: model must be a model of Hugging Face, got {type(model).__name__}"
        )
    for module in model.modules():
        if any(kind.__name__ == "BaseTunerLayer" for kind in type(module).__mro__):
            raise ValueError(
                "export_fp8: model must have no adapters; call merge_and_unload() before, "
                f"got {type(module).__name__}"
            )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh") or parameter.is_meta:
            raise ValueError(
                f"export_fp8: model must have whole weights, got {name} sharded or on meta"
            )


def _entries(model: nn.Module, export: Export) -> tuple[list[_Entry], list[str]]:
    """Returns the checkpoint's tensors, and names of the linear layers that are not quantized."""
    parts, experts = _parts(model, export)
    if not parts and not experts:
        raise ValueError(
            "export_fp8: model must have linear layers converted by from_torch, got none"
        )
    complete = model.state_dict()
    state = _unshared(model, complete)
    names = {id(value): key for key, value in state.items()}
    entries, final = [], {}
    for key, value in _original_format(model, state).items():
        before = names.get(id(value))
        if before is not None:
            final[before] = key
            entries.append(_Entry(key, value, parts.get(before)))
        else:
            entries.append(_Entry(key, value, _expert_part(key, value, experts)))
    kept = {id(entry.value) for entry in entries if entry.part is None}
    embeddings = {k for k, m in model.named_modules() if isinstance(m, nn.Embedding)}
    ignored = []
    for key, value in complete.items():
        name = key.removesuffix(".weight")
        if name == key or value.dim() != 2 or key in parts or name in embeddings:
            continue
        if key not in state or id(state[key]) in kept:
            ignored.append(final.get(key, key).removesuffix(".weight"))
    return entries, ignored


def _unshared(model: nn.Module, complete: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns a state dict without FP8 state, and with shared Parameters once."""
    state: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    owners = dict(model.named_parameters(remove_duplicate=False))
    for key, value in complete.items():
        shared = id(owners.get(key, value))
        if f".{STATE_PREFIX}" not in key and shared not in seen:
            seen.add(shared)
            state[key] = value
    return state


def _original_format(model: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns ``state`` under the names of the files that ``save_pretrained`` writes.

    transformers joins the weights of experts as it loads them; these are apart in the files.
    """
    from transformers import core_model_loading

    revert = getattr(core_model_loading, "revert_weight_conversion", None)
    return state if revert is None else dict(revert(model, state))


def _parts(
    model: nn.Module, export: Export
) -> tuple[dict[str, _Part], dict[str, tuple[StackedExperts, bool]]]:
    """Finds weights to be quantized, by key, and layers of stacked experts, by dotted name."""
    static = export.activations == "static"
    parts: dict[str, _Part] = {}
    experts: dict[str, tuple[StackedExperts, bool]] = {}
    for name, module in model.named_modules():
        if type(module) is Linear and module._parameters["weight"] is not None:
            scale = _input_scale(name, module, 0) if static else None
            parts[f"{name}.weight"] = _Part(
                _Source(module.weight, scale), 0, module.weight.shape[0]
            )
        elif isinstance(module, StackedExperts):
            experts[name] = (module, static)
    for entry in key_map(model).entries:
        owner, _, attribute = entry.key.rpartition(".")
        if not attribute.endswith("weight") or attribute.startswith("layer_norm"):
            continue
        if entry.transposed:
            continue
        module = model.get_submodule(owner)
        scale = _input_scale(owner, module, int(attribute.startswith("fc2"))) if static else None
        source, start = _Source(getattr(module, attribute), scale), 0
        parts.pop(entry.key, None)
        for key, rows in entry.parts:
            parts[key] = _Part(source, start, rows)
            start += rows
    for key in _tied_to_others(model, parts):
        del parts[key]
    return parts, experts


def _tied_to_others(model: nn.Module, parts: dict[str, _Part]) -> list[str]:
    """Returns the keys of ``parts`` whose weight is shared with a module that cannot read FP8."""
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(name, recurse=False):
            holders.setdefault(id(parameter), []).append(key)
    tied = [keys for keys in holders.values() if not all(key in parts for key in keys)]
    return [key for keys in tied for key in keys if key in parts]


def _expert_part(
    key: str, value: torch.Tensor, experts: dict[str, tuple[StackedExperts, bool]]
) -> _Part | None:
    """Returns the part for one expert's weight, None for any other tensor."""
    found = re.search(r"(?:^|\.)(\d+)\.(?:.*\.)?experts\.(\d+)\.", key)
    if found is None or value.dim() != 2 or not key.endswith(".weight"):
        return None
    block, expert = found[1], int(found[2])
    for name, (layer, static) in experts.items():
        if f".{block}." not in f".{name}.":
            continue
        scale = None
        if static:
            down = value.shape == layer.down_proj.shape[1:] and key.split(".")[-2] in (
                "w2", "down_proj"
            )  # fmt: skip
            gemm = layer.down_gemm if down else layer.gate_up_gemm
            scale = _input_scale(name, gemm, expert)
        return _Part(_Source(value, scale), 0, value.shape[0])
    return None


def _input_scale(name: str, module: Any, gemm: int) -> torch.Tensor:
    """Returns ``scale_inv`` of a GEMM's input, ``[1]``, from the module's FP8 state."""
    state = module.fp8_state if isinstance(module, FP8Module) else None
    if state is None or not state.allocated:
        raise ValueError(
            'export_fp8: activations must be "dynamic" for layers without the state of delayed '
            f'scaling, got "static" and none in {name}'
        )
    return state.scale_inv_fwd[3 * gemm : 3 * gemm + 1]


def _shards(entries: list[_Entry], largest: int) -> list[list[_Entry]]:
    """Divides the entries into files of at most ``largest`` bytes, if none is larger itself."""
    shards: list[list[_Entry]] = [[]]
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
