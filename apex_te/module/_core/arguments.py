"""Checks and defaults of arguments that several modules take: dtypes, new weights, row counts."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import torch

from ...fp8 import model_init
from ...fp8.parameter.parameter import FP8Parameter
from ...runtime.counts import check_count
from ...runtime.named_arguments import nearest

INIT_STD = 0.023
_DTYPES = ("float32", "float16", "bfloat16", "float64")


def params_dtype_of(
    owner: str, params_dtype: torch.dtype | None, dtype: torch.dtype | None
) -> torch.dtype:
    """Returns ``params_dtype`` or its other name ``dtype``; None for both: torch's default."""
    if params_dtype is not None and dtype is not None and params_dtype != dtype:
        raise ValueError(f"{owner}: dtype must equal params_dtype, got {dtype} and {params_dtype}")
    name, chosen = ("params_dtype", params_dtype) if dtype is None else ("dtype", dtype)
    chosen = torch.get_default_dtype() if chosen is None else chosen
    if not isinstance(chosen, torch.dtype):
        near = nearest(chosen, _DTYPES) or "bfloat16"
        raise TypeError(
            f"{owner}: {name} must be a torch.dtype such as torch.{near}, got {chosen!r}"
        )
    if str(chosen).removeprefix("torch.") not in _DTYPES:
        instead = "; fp8_model_init makes weights in FP8" if "float8" in str(chosen) else ""
        raise TypeError(
            f"{owner}: {name} must be {', '.join(_DTYPES[:-1])} or {_DTYPES[-1]}, "
            f"got {chosen}{instead}"
        )
    return chosen


def autocast_dtype(owner: str, name: str, x: torch.Tensor) -> torch.dtype | None:
    """Returns the dtype of ``torch.autocast`` on the device of ``x``; None if autocast is off."""
    device_type = x.device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    if not x.is_floating_point():
        raise TypeError(f"{owner}: {name} must be a floating-point tensor, got {x.dtype}")
    return torch.get_autocast_dtype(device_type)


def parameter(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str | int | None,
    gemm_weight: bool | None = None,
) -> torch.nn.Parameter:
    """Makes a parameter without values, in FP8 if it is a GEMM weight inside ``fp8_model_init``.

    ``gemm_weight=None`` treats every matrix as a GEMM weight.
    """
    kept = model_init.settings()
    if kept is not None and (len(shape) == 2 if gemm_weight is None else gemm_weight):
        preserve = kept.preserve_high_precision_init_val
        held = FP8Parameter.empty(shape, kept.recipe, dtype, device, preserve)
        return torch.nn.Parameter(held)
    return torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device))


def fill(weight: torch.Tensor | None, init_method: Callable[[torch.Tensor], Any] | None) -> None:
    """Fills a weight in place by ``init_method``; None draws from N(0, 0.023)."""
    if weight is None:
        return
    if init_method is None:
        init_method = _normal
    with torch.no_grad():
        if type(weight) is FP8Parameter:
            weight.initialize(init_method)
        else:
            init_method(weight)


def _normal(weight: torch.Tensor) -> None:
    torch.nn.init.normal_(weight, 0.0, INIT_STD)


def split_names(owner: str, parameters_split: Any, out_features: int) -> dict[str, int] | None:
    """Returns a weight's parts with the number of rows of each; None if it is not split."""
    if parameters_split is None:
        return None
    if isinstance(parameters_split, dict):
        parts = dict(parameters_split)
        if not all(isinstance(n, int) and n > 0 for n in parts.values()):
            raise ValueError(
                f"{owner}: parameters_split must map names to rows above 0, got {parts}"
            )
    elif isinstance(parameters_split, (tuple, list)) and parameters_split:
        names = list(parameters_split)
        if len(set(names)) != len(names):
            raise ValueError(f"{owner}: parameters_split must have unique names, got {names}")
        rows, rest = divmod(out_features, len(names))
        if rest:
            raise ValueError(
                f"{owner}: parameters_split must divide out_features={out_features}, "
                f"got {len(names)} names"
            )
        parts = dict.fromkeys(names, rows)
    else:
        raise TypeError(
            f"{owner}: parameters_split must be names or a dict of name to rows, "
            f"got {type(parameters_split).__name__}"
        )
    if not all(isinstance(name, str) and name.isidentifier() for name in parts):
        raise ValueError(f"{owner}: parameters_split must have identifiers, got {list(parts)}")
    if sum(parts.values()) != out_features:
        raise ValueError(
            f"{owner}: parameters_split must have out_features={out_features} rows, "
            f"got {sum(parts.values())}"
        )
    return parts


def check_num_gemms(owner: str, num_gemms: Any) -> None:
    """Checks that ``num_gemms`` is an int of at least 1; raises as ``check_count`` does."""
    check_count(owner, "num_gemms", num_gemms)


def checked_groups(owner: str, num_attention_heads: Any, num_gqa_groups: Any) -> int:
    """Returns the number of key heads, by default ``num_attention_heads``, after checks."""
    check_count(owner, "num_attention_heads", num_attention_heads)
    if num_gqa_groups is None:
        return num_attention_heads
    check_count(owner, "num_gqa_groups", num_gqa_groups)
    if num_attention_heads % num_gqa_groups:
        raise ValueError(
            f"{owner}: num_gqa_groups must divide num_attention_heads={num_attention_heads}, "
            f"got {num_gqa_groups}"
        )
    return num_gqa_groups


def checked_eps(owner: str, name: str, eps: Any) -> float:
    """Returns the epsilon of a norm; refuses 1 or more, most likely a misplaced argument."""
    value = checked_number(owner, name, eps)
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{owner}: {name} must be at least 0 and below 1, got {eps}")
    return value


def checked_number(owner: str, name: str, value: Any) -> float:
    """Returns the argument ``name`` as a float; raises TypeError if it is not a number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{owner}: {name} must be a float, got {type(value).__name__}")
    return float(value)


def checked_splits(
    owner: str, num_gemms: int, m_splits: Any, rows: int | None = None
) -> tuple[int, ...]:
    """Returns ``m_splits`` as a tuple after checks; the sum must not exceed ``rows``, if given."""
    if not isinstance(m_splits, (list, tuple)):
        raise TypeError(f"{owner}: m_splits must be a list of ints, got {type(m_splits).__name__}")
    for split in m_splits:
        if isinstance(split, bool) or not isinstance(split, int):
            raise TypeError(f"{owner}: m_splits must hold ints, got {type(split).__name__}")
    if len(m_splits) != num_gemms or min(m_splits) < 0:
        raise ValueError(
            f"{owner}: m_splits must be {num_gemms} counts of rows, got {list(m_splits)}"
        )
    if rows is not None and sum(m_splits) > rows:
        raise ValueError(
            f"{owner}: m_splits must be counts of at most the {rows} rows of inp, "
            f"got {list(m_splits)}"
        )
    return tuple(m_splits)
