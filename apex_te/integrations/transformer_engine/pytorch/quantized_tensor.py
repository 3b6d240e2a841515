"""``QuantizedTensor``, the type by which frameworks recognise weights held in FP8 only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn

import torch

from ....fp8.parameter.parameter import FP8Parameter
from .._names import named, not_served

__all__ = [
    "QuantizedTensor", "QuantizedTensorStorage", "Quantizer", "WeightType", "prepare_for_saving",
    "restore_from_func_ctx", "restore_from_saved",
]  # fmt: skip

_MODULE = "transformer_engine.pytorch.quantized_tensor"


class WeightType(type(torch.Tensor)):  # type: ignore[misc]
    """Metaclass of types whose instances are apex_te's FP8 weights with certain recipes."""

    quantizers: tuple[str, ...] | None

    def __instancecheck__(cls, instance: Any) -> bool:
        if not isinstance(instance, FP8Parameter):
            return False
        return cls.quantizers is None or instance.recipe.quantizer in cls.quantizers

    def __subclasscheck__(cls, subclass: type) -> bool:
        if subclass is FP8Parameter:
            return cls.quantizers is None
        return super().__subclasscheck__(subclass)

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{cls.__module__}.{cls.__name__} cannot be constructed in apex_te: modules made "
            "inside fp8_model_init hold such weights"
        )


@named(_MODULE)
class QuantizedTensor(torch.Tensor, metaclass=WeightType):
    """Type of every ``apex_te.parameter.FP8Parameter``, by ``isinstance``."""

    quantizers: ClassVar[tuple[str, ...] | None] = None


def weight_type(name: str, *quantizers: str) -> Any:
    """Returns the type, by ``isinstance``, of FP8 weights whose recipes have these quantizers."""
    module, _, last = name.rpartition(".")
    doc = f"Type of FP8 weights with recipes of kind {' or '.join(quantizers) or 'none'}."
    namespace = {"__module__": module, "__doc__": doc, "quantizers": quantizers}
    return WeightType(last, (QuantizedTensor,), namespace)


_REASON = "modules quantize tensors by their recipe, without an object that users can hold"
Quantizer = not_served(f"{_MODULE}.Quantizer", _REASON)
QuantizedTensorStorage = not_served(f"{_MODULE}.QuantizedTensorStorage", _REASON)


def quantizer_type(name: str, reason: str = _REASON) -> Any:
    """Returns a quantizer that can only be named."""
    return not_served(name, reason, Quantizer)


def prepare_for_saving(
    *tensors: torch.Tensor | None,
) -> tuple[list[torch.Tensor | None], list[None]]:
    """Returns tensors for ``ctx.save_for_backward``, and what ``restore_from_saved`` takes."""
    return list(tensors), [None] * len(tensors)


def restore_from_saved(
    tensors: list[None],
    saved_tensors: Sequence[torch.Tensor | None],
    return_saved_tensors: bool = False,
) -> Any:
    """Returns the tensors that ``prepare_for_saving`` was given.

    Args:
        tensors: second result of ``prepare_for_saving``.
        saved_tensors: ``ctx.saved_tensors``; the first ``len(tensors)`` of them are returned.
        return_saved_tensors: also return the rest, as ``(tensors, rest)``.
    """
    count = len(tensors)
    restored = list(saved_tensors[:count])
    return (restored, list(saved_tensors[count:])) if return_saved_tensors else restored


def restore_from_func_ctx(ctx: Any) -> list[torch.Tensor | None]:
    """Returns the tensors that a context saved by ``prepare_for_saving``."""
    restored: list[torch.Tensor | None] = restore_from_saved(ctx.tensor_objects, ctx.saved_tensors)
    ctx.tensor_objects = None
    return restored
