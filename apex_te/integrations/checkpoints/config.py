"""Configurations of quantized checkpoints, in the terms of each tool that writes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .description import BLOCKS, CHANNEL, MXFP4, MXFP8, TENSOR, Expected, Form


class Rules(NamedTuple):
    """Form that a configuration tells of each layer's weight, None if it leaves it open.

    With ``static`` the inputs have scales.
    """

    method: str
    static: bool
    of: Callable[[str], Expected | None]


def rules_of(config: Mapping[str, Any]) -> Rules:
    """Returns the rules for FP8 weights in a checkpoint's ``quantization_config``."""
    method = config.get("quant_method")
    method = str(getattr(method, "value", method))
    if "quantization" in config or method == "modelopt":
        return _modelopt(config)
    reader = _READERS.get(method)
    if reader is None:
        raise _refused("quant_method", f"one of {', '.join([*_READERS, 'modelopt'])}", method)
    return reader(config)


def _refused(key: str, wanted: str, found: Any) -> NotImplementedError:
    return NotImplementedError(
        f"from_fp8_checkpoint: {key} in quantization_config must be {wanted}, got {found!r}"
    )


def _always(expected: Expected | None) -> Callable[[str], Expected | None]:
    return lambda name: expected


def _fine_grained(config: Mapping[str, Any]) -> Rules:
    """Reads ``quant_method: "fp8"`` and ``"mxfp8"`` (DeepSeek-V3, Qwen3, MiniMax, Mistral)."""
    method = str(config["quant_method"])
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _refused("fmt", "'e4m3'", config["fmt"])
    if config.get("expert_dtype", "fp8") != "fp8":
        raise _refused("expert_dtype", "'fp8'", config["expert_dtype"])
    static = config.get("activation_scheme", "dynamic") == "static"
    expected: Expected | None = MXFP8 if method == "mxfp8" else None  # readers disagree if absent
    if "weight_block_size" in config:
        size = config["weight_block_size"]
        expected = TENSOR if size is None else _blocks(size)
    return Rules(method, static, _always(expected))


def _blocks(size: Any) -> Expected:
    """Returns the form of blocks ``[rows, cols]``, which may be text like "128x128"."""
    if isinstance(size, str):
        size = size.split("x")
    try:
        rows, cols = (int(each) for each in size)
    except (TypeError, ValueError):
        raise ValueError(
            "from_fp8_checkpoint: a block size in quantization_config must be two ints, "
            f"got {size!r}"
        ) from None
    return Expected(Form.GROUP if rows == 1 else Form.BLOCK, (rows, cols))


def _compressed_tensors(config: Mapping[str, Any]) -> Rules:
    """Reads compressed-tensors, whose groups say which layers they are for."""
    known = ("float-quantized", "naive-quantized", "mxfp8-quantized")
    if config.get("format") not in known:
        raise _refused("format", f"one of {', '.join(known)}", config.get("format"))
    groups = []
    static = False
    for group in config.get("config_groups", {}).values():
        inputs = group.get("input_activations")
        static |= bool(inputs) and inputs.get("dynamic") is False
        groups.append((tuple(group.get("targets", ())), _strategy(group.get("weights") or {})))

    def of(name: str) -> Expected | None:
        for targets, expected in groups:
            if any(_is_target(target, name) for target in targets):
                return expected
        return None

    return Rules("compressed-tensors", static, of)


def _is_target(target: str, name: str) -> bool:
    """Returns True if a target, a class's name, a layer's name or "re:...", means a layer."""
    if target.startswith("re:"):
        return re.match(target[3:], name) is not None
    return target == "Linear" or name == target or name.endswith(f".{target}")


def _strategy(weights: Mapping[str, Any]) -> Expected:
    kind = weights.get("type", "float"), weights.get("num_bits", 8)
    if kind != ("float", 8):
        raise _refused("weights", "floats of 8 bits", f"{kind[0]} of {kind[1]} bits")
    strategy = weights.get("strategy")
    if strategy == "group":
        return Expected(Form.GROUP, (1, int(weights["group_size"])))
    if strategy == "block":
        return _blocks(weights.get("block_structure"))
    found = {"tensor": TENSOR, "channel": CHANNEL}.get(str(strategy))
    if found is None:
        raise _refused("strategy", "'tensor', 'channel', 'group' or 'block'", strategy)
    return found


_ALGORITHMS = {
    "FP8": TENSOR, "FP8_PER_CHANNEL_PER_TOKEN": CHANNEL, "FP8_PB_WO": BLOCKS, "MXFP8": MXFP8,
}  # fmt: skip


def _modelopt(config: Mapping[str, Any]) -> Rules:
    """Reads ModelOpt's ``hf_quant_config.json``, or the same in ``config.json``."""
    inner = config.get("quantization", config)
    layers = inner.get("quantized_layers") or {}
    algorithm = inner.get("quant_algo")
    for name in {algorithm, *(layer.get("quant_algo") for layer in layers.values())}:
        if name not in _ALGORITHMS and not (name == "MIXED_PRECISION" and layers):
            raise _refused("quant_algo", f"one of {', '.join(_ALGORITHMS)}", name)

    def of(name: str) -> Expected | None:
        return _ALGORITHMS.get(layers.get(name, inner).get("quant_algo"))

    return Rules("modelopt", algorithm == "FP8", of)


_READERS: dict[str, Callable[[Mapping[str, Any]], Rules]] = {
    "fp8": _fine_grained,
    "mxfp8": _fine_grained,
    "compressed-tensors": _compressed_tensors,
    "mxfp4": lambda config: Rules("mxfp4", False, _always(MXFP4)),
    "fbgemm_fp8": lambda config: Rules("fbgemm_fp8", False, _always(CHANNEL)),
}
