"""``QuantizedTensor``, the type by which frameworks recognise weights held in FP8 only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn

import torch

from ....fp8.parameter.parameter import FP8Parameter
from .._names import named, not_served

__all__ = [
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "WeightType",
    "prepare_for_saving",
    "restore_from_func_ctx",
    "restore_from_saved",
]

_MODULE = "transformer_engine.pytorch.quantized_tensor"


class WeightType(type(torch.Tensor)):  # type: ignore[misc]
    """Metaclass of types whose instances are apex_te's FP8 weights with certain recipes.

    Attributes:
        quantizers: the schemes, by ``Recipe.quantizer``, of the instances' recipes; None for all.
    """

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


_REASON = "modules quantize tensors by their recipe, without an object that users can hold"
Quantizer = not_served(f"{_MODULE}.Quantizer", _REASON)
QuantizedTensorStorage = not_served(f"{_MODULE}.QuantizedTensorStorage", _REASON)


def prepare_for_saving(
    *tensors: torch.Tensor | None,
) -> tuple[list[torch.Tensor | None], list[None]]:
    """Returns tensors for ``ctx.save_for_backward``, and what ``restore_from_saved`` takes.

    Args:
        tensors: tensors or None; an FP8 weight is a tensor, too.
    """
    return list(tensors), [None] * len(tensors)


def restore_from_saved(
    tensors: list[None],
    saved_tensors: Sequence[torch.Tensor | None],
    return_saved_tensors: bool = False,
) -> Any:
    """Returns the tensors that ``prepare_for_saving`` was given.

    Args:
        tensors: the second result of ``prepare_for_saving``.
        saved_tensors: ``ctx.saved_tensors``.
        return_saved_tensors: return a pair, with the tensors that are left.
    """
    count = len(tensors)
    restored = list(saved_tensors[:count])
    return (restored, list(saved_tensors[count:])) if return_saved_tensors else restored


def restore_from_func_ctx(ctx: Any) -> list[torch.Tensor | None]:
    """Returns the tensors that a context saved by ``prepare_for_saving``.

    Args:
        ctx: autograd's context, with the second result of ``prepare_for_saving`` in its attribute
            ``tensor_objects``, which is dropped.
    """
    restored: list[torch.Tensor | None] = restore_from_saved(ctx.tensor_objects, ctx.saved_tensors)
    ctx.tensor_objects = None
    return restored
