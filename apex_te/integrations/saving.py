"""Saving of Hugging Face's models with the FP8 state in a file apart from the weights."""

from __future__ import annotations

import os
import re
import warnings
from typing import Any

import torch
from torch import nn

from ..fp8.delayed.serialize import NAMES, read_state, save_state
from ..module._core.fp8_entries import SCALE
from ..module._core.fp8_module import STATE_PREFIX, FP8Module
from ..runtime.named_arguments import check_flags, check_model, named_arguments
from . import _matching as matching
from ._export_config import Export, quantization_config

# Of the format of safetensors, but loaders that read all ``*.safetensors`` of a folder as weights,
# as vLLM and accelerate do, must not find it.
_FILE = "fp8_state.apex_te"
_FORMER_FILE = "fp8_state.safetensors"


def _fp8_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the FP8 state of all modules in ``model``, by its keys in the state dict."""
    found: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, FP8Module):
            save_state(module.fp8_state, found, f"{name}.{STATE_PREFIX}" if name else STATE_PREFIX)
    return found


@named_arguments()
def save_fp8_state(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Writes the FP8 state of ``model`` (scales, amax histories) to a safetensors file.

    Args:
        model: a model with apex_te modules. If none has FP8 state yet, no file is written, and an
            existing file is removed.
        path: the file, or a directory, in which the file ``fp8_state.apex_te`` is written.

    Raises:
        TypeError: an argument has a wrong type.
    """
    from safetensors.torch import save_file

    check_model("save_fp8_state", model)
    path, state = _path("save_fp8_state", path), _fp8_state(model)
    if os.path.isdir(path):
        _remove_fp8_state(path)
        path = os.path.join(path, _FILE)
    if state:
        save_file({key: value.cpu() for key, value in state.items()}, path)
    elif os.path.exists(path):
        os.remove(path)


@named_arguments()
def load_fp8_state(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Sets the FP8 state of ``model`` from a file of ``save_fp8_state`` or ``save_pretrained``.

    Load the weights first: loading weights resets FP8 state that is not in the same file. If the
    file causes an error, ``model`` is unchanged.

    Args:
        model: the model, converted (and fused) as the saved one was.
        path: the file, or a directory that contains ``fp8_state.apex_te`` or, from an earlier
            release, ``fp8_state.safetensors``.

    Raises:
        TypeError: an argument has a wrong type.
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, lacks entries of a module's state, or has state of modules
            that are not in ``model``.
        RuntimeError: the state does not fit a module.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    check_model("load_fp8_state", model)
    path = _path("load_fp8_state", path)
    if os.path.isdir(path):
        path = find_fp8_state(path) or os.path.join(path, _FILE)
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"load_fp8_state: path must be a file of save_fp8_state or its folder, got {path!r}, "
            "which is not there"
        )
    try:
        state = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"load_fp8_state: {path} must be a safetensors file, {error}") from error
    _check(model, path, state)
    model.load_state_dict(state, strict=False)


def _path(owner: str, path: Any) -> str:
    """Returns ``path`` as text; raises TypeError if it is not a path."""
    try:
        return os.fsdecode(path)
    except TypeError:
        raise TypeError(
            f"{owner}: path must be a str or pathlib.Path, got {type(path).__name__}"
        ) from None


def _check(model: nn.Module, path: str, state: dict[str, torch.Tensor]) -> None:
    """Raises the errors of ``load_fp8_state`` for a file's entries; ``model`` is not changed."""
    unexpected = set(state)
    missing: list[str] = []
    errors: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, FP8Module):
            prefix = f"{name}.{STATE_PREFIX}" if name else STATE_PREFIX
            unexpected -= {prefix + entry for entry in NAMES}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # loading gives them
                read_state(module._fp8, state, prefix, missing, errors)
    if unexpected:
        raise ValueError(
            "load_fp8_state: model must be converted as the saved one was, "
            f"got state for {sorted({key.rpartition('.')[0] for key in unexpected})[:8]}"
        )
    if missing or not state:
        lacking = ", ".join(missing[:8]) or "entries"
        raise ValueError(
            f"load_fp8_state: {path} must contain complete FP8 states, got none for {lacking}"
        )
    if errors:
        raise RuntimeError(f"load_fp8_state: {path} must fit the model: {'; '.join(errors[:8])}")


def find_fp8_state(folder: str | os.PathLike[str]) -> str | None:
    """Returns the path of the FP8 state's file in a folder; None if there is none."""
    for name in (_FILE, _FORMER_FILE):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            return path
    return None


def _remove_fp8_state(folder: str | os.PathLike[str]) -> None:
    """Removes the file of FP8 state from a folder, also one of the former name."""
    while (path := find_fp8_state(folder)) is not None:
        os.remove(path)


class SavePretrained:
    """Callable that replaces a model's ``save_pretrained`` and writes FP8 state to a separate file.

    Weights with free scales are written as FP8 data and scales, with a ``quantization_config`` that
    says so. ``fp8_state=False`` writes no FP8 state. In a directory ``checkpoint-<step>``, as made
    by ``transformers.Trainer``, the file of the weights contains the FP8 state, too, because
    resuming reads only that file.
    """

    def __init__(self, model: Any) -> None:
        # A copy or pickle of the model contains one of these that saves the copy.
        self.model = model

    def __call__(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        *args: Any,
        fp8_state: bool = True,
        **kwargs: Any,
    ) -> Any:
        check_flags("save_pretrained", fp8_state=fp8_state)
        model = self.model
        own = vars(model)
        ignored = "_keys_to_ignore_on_save"
        before = {ignored: own[ignored]} if ignored in own else {}
        # The folders that transformers.Trainer resumes from: it reads the weights' files alone.
        resumed = re.fullmatch(
            r"checkpoint-\d+", os.path.basename(os.path.normpath(save_directory))
        )
        apart = () if fp8_state and resumed else _fp8_state(model)
        own[ignored] = [*(getattr(model, ignored, None) or ()), *apart]
        described = _describe_fp8(model)
        try:
            save = type(model).save_pretrained
            result = save(model, save_directory, is_main_process, *args, **kwargs)
        finally:
            del own[ignored]
            own.update(before)
            if described:
                del model.config.quantization_config
        if is_main_process and os.path.isdir(save_directory):
            if fp8_state:
                save_fp8_state(model, save_directory)
            else:
                _remove_fp8_state(save_directory)
        return result


def _describe_fp8(model: Any) -> bool:
    """Adds ``quantization_config`` to a model's config if its files have FP8 data and scales.

    Returns True if it was added; an existing one is kept.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        return False
    if not any(getattr(_local(p), "has_free_scales", False) for p in model.parameters()):
        return False
    state = model.state_dict()
    scales = {key.removesuffix(SCALE): v for key, v in state.items() if key.endswith(SCALE)}
    blocks = {scale_inv.dim() - (state[key].dim() - 2) == 2 for key, scale_inv in scales.items()}
    if len(blocks) > 1:
        raise NotImplementedError(
            "save_pretrained: FP8 weights must all have one scale, or all of them blocks, got both"
        )
    embeddings = {name for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
    matrices = [key for key, value in state.items() if value.dim() == 2 and key.endswith(".weight")]
    names = [key.removesuffix(".weight") for key in matrices]
    ignored = [n for n in names if f"{n}.weight" not in scales and n not in embeddings]
    export = Export("fp8", "block" if True in blocks else "tensor", "dynamic")
    model.config.quantization_config = quantization_config(export, ignored)
    return True


def _local(parameter: Any) -> Any:
    """Returns this rank's part of a DTensor; any other tensor as it is."""
    return getattr(parameter, "_local_tensor", parameter)


def save_without_fp8_state(model: nn.Module) -> None:
    """Makes ``save_pretrained`` of models in ``model`` write FP8 state to a separate file."""
    for module in matching.pretrained_models(model):
        if "save_pretrained" not in vars(module):
            vars(module)["save_pretrained"] = SavePretrained(module)
