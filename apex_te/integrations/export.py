"""``export_fp8``, which writes Hugging Face's models as FP8 checkpoints that servers read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import distributed, nn

from ..comm.agreement import check_same
from ..runtime.named_arguments import named_arguments
from ._export_config import Export, quantization_config
from ._fp8_entries import check_model, entries, is_spread

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
_NAME = "model"
_FORMS = {"tensorwise": "tensor", "rowwise": "channel", "blockwise": "block"}


class _Entry(Protocol):
    """Tensor of the files, with its scales; to be read once, by all ranks in the same order."""

    def nbytes(self) -> int: ...

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]: ...


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

    Converted linear layers and experts are quantized as by ``CurrentScaling``, ``RowwiseScaling``
    or ``BlockScaling``, including layers that ``from_torch(fuse=True)`` joined; with one scale per
    weight, the parts of a joined layer, and the first two matrices of an expert, share it. Weights
    that are already held in FP8 in that layout are written unchanged. Weights have the names of the
    plain model's files, next to their scales. Everything else keeps its dtype. The configuration
    lists linear layers that are not quantized, such as ``lm_head`` and GPT-2's Conv1D.

    If the model is split over ranks, by ``fully_shard``, by a ``tp_group`` or by experts, all ranks
    call this function. They gather one parameter at a time, and the first rank of the default group
    writes the files of the whole model, holding one file's tensors in CPU memory. If it cannot
    write them, it raises the error, and the others raise ``RankMismatchError``.

    |``quant_method``|``weights``|keys beside a ``weight``|read by|
    |---|---|---|---|
    |``"compressed-tensors"``|``"tensor"``|``weight_scale`` ``[1]``|vLLM, compressed-tensors|
    |``"compressed-tensors"``|``"channel"``|``weight_scale`` ``[out, 1]``|vLLM, compressed-tensors|
    |``"compressed-tensors"``|``"block"``|``weight_scale`` per 128x128|vLLM, compressed-tensors|
    |``"fp8"``|``"tensor"``|``weight_scale`` ``[1]``|vLLM|
    |``"fp8"``|``"block"``|``weight_scale_inv`` per 128x128 (DeepSeek-V3)|vLLM, transformers|

    A weight's values are its FP8 data times its scale. ``activations="static"`` adds
    ``input_scale`` ``[1]``.

    Args:
        model: a model of Hugging Face after ``from_torch``, without adapters.
        folder: directory for the files; created if missing. Weights in it are replaced.
        quant_method: layout of configuration and keys, ``"compressed-tensors"`` or ``"fp8"``.
        weights: ``"tensor"`` for one scale per weight, ``"channel"`` for one per output channel,
            amax / 448, ``"block"`` for one per block of 128x128; or the recipe's name,
            ``"tensorwise"``, ``"rowwise"`` or ``"blockwise"``.
        activations: ``"dynamic"``; or ``"static"`` to write the inputs' scales of delayed scaling,
            only with ``weights="tensor"``. Call ``flush_fp8_state()`` before.
        layout: ``"file"`` for the layout of the checkpoint that ``from_fp8_checkpoint`` read,
            instead of the three options above; weights that were not trained are written bitwise
            unchanged.
        max_shard_size: largest size of a file, in bytes or like ``"5GB"``. A larger model is
            written to several files, with an index.

    Raises:
        ImportError: safetensors is not installed.
        TypeError: ``model`` is not a model of Hugging Face, or an argument has a wrong type.
        ValueError: an option is unknown or cannot be combined with another; the model has no
            converted layer, has adapters or is on the meta device; or ``"static"`` is given without
            state of delayed scaling.
        NotImplementedError: FP8 weights or experts are sharded otherwise than by rows.
        RankMismatchError: the first rank could not write the files.
    """
    try:
        import safetensors  # noqa: F401
    except ImportError as missing:
        raise ImportError(
            "export_fp8: safetensors must be installed: pip install safetensors"
        ) from missing
    form = _FORMS.get(weights, weights) if isinstance(weights, str) else weights
    export = Export(quant_method, form, activations)
    largest = _bytes(max_shard_size)
    check_model(model)
    found: Sequence[_Entry]
    if layout is None:
        found, ignored = entries(model, export.form)
        quantization = quantization_config(export, ignored)
    else:
        found, quantization = _as_read(model, layout, (quant_method, weights, activations))
    folder = os.fspath(folder)
    shards = _shards(found, largest)
    if not is_spread(model):
        _write(model, folder, iter(shards), len(shards), quantization)
        return
    remaining = iter(shards)
    error: Exception | None = None
    if distributed.get_rank() == 0:
        try:
            _write(model, folder, remaining, len(shards), quantization)
        except Exception as found_error:
            error = found_error
    for shard in remaining:  # which gathers this rank's part, also after an error of the first one
        for entry in shard:
            for _ in entry.tensors():
                pass
    check_same(
        "export_fp8", "the default group", None, {}, _device(model), error, "writing must succeed"
    )


def _write(
    model: Any,
    folder: str,
    shards: Iterator[list[_Entry]],
    count: int,
    quantization: dict[str, Any],
) -> None:
    """Writes ``count`` files, their index and the configuration."""
    import safetensors.torch as safetensors

    os.makedirs(folder, exist_ok=True)
    for name in os.listdir(folder):
        if re.fullmatch(rf"{_NAME}(-\d+-of-\d+)?\.safetensors(\.index\.json)?", name):
            os.remove(os.path.join(folder, name))
    names: dict[str, str] = {}
    total = 0
    for index, shard in enumerate(shards):
        file = f"{_NAME}.safetensors"
        if count > 1:
            file = f"{_NAME}-{index + 1:05d}-of-{count:05d}.safetensors"
        tensors = {key: _saved(value) for entry in shard for key, value in entry.tensors()}
        safetensors.save_file(tensors, os.path.join(folder, file), metadata={"format": "pt"})
        names.update(dict.fromkeys(tensors, file))
        total += sum(value.nbytes for value in tensors.values())
    if count > 1:
        index_of = {"metadata": {"total_size": total}, "weight_map": names}
        _write_json(os.path.join(folder, f"{_NAME}.safetensors.index.json"), index_of)
    _write_config(model, folder, quantization)


def _device(model: nn.Module) -> torch.device:
    """Returns the device of collectives on a model's parameters, which may be offloaded."""
    parameters: list[Any] = list(model.parameters())
    meshes = (each.device_mesh for each in parameters if hasattr(each, "device_mesh"))
    mesh = next(meshes, None)
    return parameters[0].device if mesh is None else torch.device(mesh.device_type)


def _as_read(
    model: Any, layout: Any, options: tuple[Any, ...]
) -> tuple[Sequence[_Entry], dict[str, Any]]:
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
    return quantizer.file_entries(model), quantizer.quantization_config.to_dict()


def _saved(value: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous copy on the CPU, in memory of its own."""
    return value.detach().to("cpu", copy=True).contiguous()


def _shards(entries: Sequence[_Entry], largest: int) -> list[list[_Entry]]:
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
    config["architectures"] = [_class_name(model)]
    config["dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")
    config["quantization_config"] = quantization
    _write_json(os.path.join(folder, "config.json"), config)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)


def _class_name(model: nn.Module) -> str:
    """Returns the name of a model's class before ``fully_shard``."""
    for kind in type(model).__mro__:
        if all(each.__name__ != "FSDPModule" for each in kind.__mro__):
            return kind.__name__
    return type(model).__name__


def _write_json(path: str, content: Any) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
