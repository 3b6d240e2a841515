"""``autocast_forward``, which has a model enter ``fp8_autocast`` in each of its forwards."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..fp8.autocast import fp8_autocast
from ..recipe import Recipe, chosen_recipe
from ..runtime.model_argument import check_model
from ..runtime.named_arguments import named_arguments
from ._wrapped_forward import WrappedForward, wrapped_forwards

__all__ = ["AutocastForward", "autocast_forward"]


class AutocastForward(WrappedForward):
    """Callable in place of a model's ``forward``, which runs that inside ``fp8_autocast``."""

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
    """Has ``model`` run each forward inside ``fp8_autocast``, for trainers that call it themselves.

    Only the forward runs inside, with what it computes of the loss; backward belongs outside. The
    model's class stays; copies and pickles of the model run in FP8, too, and ``torch.compile``
    compiles the region with the model.

    Args:
        model: a model with layers of apex_te, such as ``from_torch`` makes, which is called, not a
            part of it.
        recipe: the recipe or its name, default ``DelayedScaling()``.
        during_eval: also run in FP8 in evaluation (``model.eval()``), as in ``generate``; by
            default evaluation does not run in FP8.

    Returns:
        An object whose ``remove()`` undoes it.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a recipe's name is unknown, or the model has an active one already.
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
