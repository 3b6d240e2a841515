"""``autocast_forward``, which has a model enter ``fp8_autocast`` in each of its forwards."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..fp8.autocast import fp8_autocast
from ..recipe import Recipe, chosen_recipe
from ..runtime.named_arguments import check_model, named_arguments
from ._wrapped_forward import WrappedForward, wrapped_forwards

__all__ = ["AutocastForward", "autocast_forward"]


class AutocastForward(WrappedForward):
    """Callable that replaces a model's ``forward`` and runs it inside ``fp8_autocast``."""

    def __init__(self, model: Any, recipe: Recipe, during_eval: bool) -> None:
        super().__init__(model)
        self.recipe = recipe
        self.during_eval = during_eval

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if not self.active or not (self.model.training or self.during_eval):
            return self._forward(*args, **kwargs)
        with fp8_autocast(enabled=True, fp8_recipe=self.recipe):
            return self._forward(*args, **kwargs)


@named_arguments()
def autocast_forward(
    model: nn.Module, recipe: Recipe | str | None = None, during_eval: bool = False
) -> AutocastForward:
    """Makes ``model`` run its forwards in ``fp8_autocast``, for trainers that call the model.

    Only the forward runs inside the region, including the loss if the forward computes it. Call
    backward outside. The model's class stays. Copies and pickles of the model run in FP8, too, and
    ``torch.compile`` compiles the region with the model.

    Args:
        model: a model with apex_te layers, such as ``from_torch`` makes. It must be the module that
            the trainer calls, not a submodule.
        recipe: the recipe or its name; None is ``DelayedScaling()``.
        during_eval: also run in FP8 in evaluation mode (``model.eval()``), for example in
            ``generate``.

    Returns:
        An object whose ``remove()`` undoes it.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a recipe's name is unknown, or the model already has an ``autocast_forward``.
    """
    check_model("autocast_forward", model)
    if not isinstance(during_eval, bool):
        raise TypeError(
            f"autocast_forward: during_eval must be a bool, got {type(during_eval).__name__}"
        )
    recipe = chosen_recipe("autocast_forward", "recipe", recipe)
    for forward in wrapped_forwards(model):
        if isinstance(forward, AutocastForward) and forward.active:
            raise ValueError(
                "autocast_forward: model must have no autocast_forward yet, got one with "
                f"{forward.recipe}"
            )
    return AutocastForward(model, recipe, during_eval)
