"""Options of ``export_fp8``, and the configurations that they make."""

from __future__ import annotations

from typing import Any

from ..recipe import BlockScaling, CurrentScaling, RowwiseScaling
from ._fp8_entries import BLOCK, Form

_CHOICES = {
    "quant_method": ("compressed-tensors", "fp8"),
    "weights": ("tensor", "channel", "block"),
    "activations": ("dynamic", "static"),
}


_RECIPES = {"tensor": CurrentScaling(), "channel": RowwiseScaling(), "block": BlockScaling()}


class Export:
    """Checked options of ``export_fp8``."""

    def __init__(self, quant_method: str, weights: str, activations: str) -> None:
        self.quant_method, self.weights, self.activations = quant_method, weights, activations
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if not isinstance(value, str):
                raise TypeError(f"export_fp8: {name} must be a str, got {type(value).__name__}")
            if value not in choices:
                wanted = ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}"
                raise ValueError(f"export_fp8: {name} must be {wanted}, got {value!r}")
        if weights != "tensor" and activations == "static":
            raise ValueError(
                f"export_fp8: activations must be 'dynamic' with weights={weights!r}, got 'static'"
            )
        if weights == "channel" and quant_method == "fp8":
            raise ValueError(
                "export_fp8: quant_method must be 'compressed-tensors' with weights='channel', "
                "got 'fp8'"
            )

    @property
    def blocks(self) -> bool:
        """True if each block of 128x128 of a weight has its own scale."""
        return self.weights == "block"

    @property
    def form(self) -> Form:
        """Form of the quantized weights."""
        return Form(_RECIPES[self.weights], self.activations == "static", self.scale_key)

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
    """Returns the configuration of compressed-tensors for the options of ``export``."""
    weights = _arguments(export.weights, dynamic=False)
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
