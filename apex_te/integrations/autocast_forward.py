"""``autocast_forward``, which has a model enter ``fp8_autocast`` in each of its forwards.

``WrappedForward`` stays with copies and pickles of the model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import MethodType
from typing import Any

from torch import nn

from ..fp8.autocast import fp8_autocast
from ..recipe import Recipe, chosen_recipe
from ..runtime.named_arguments import check_flags, check_model, named_arguments


class WrappedForward:
    """Callable that replaces a model's ``forward`` and runs it in ``_run`` of a subclass."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.active = True
        self.inner: Any = vars(model).get("forward")
        vars(model)["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], nn.Module):
            return self._rebound(args[0])(*args[1:], **kwargs)
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward with what is around it."""
        raise NotImplementedError

    def _rebound(self, model: nn.Module) -> WrappedForward:
        """Replaces a method made of this object by it, or by one like it for a copy of the model.

        ``Accelerator.unwrap_model(keep_fp32_wrapper=False)`` binds what it finds to the model, like
        a function.
        """
        own = self
        if model is not self.model:
            own = copy.copy(self)
            own.model = model
            if isinstance(self.inner, WrappedForward):
                own.inner = self.inner._rebound(model)
        vars(model)["forward"] = own
        return own

    @property
    def __wrapped__(self) -> Any:
        """Returns the forward that runs inside, from which tools read names of arguments."""
        if self.inner is not None:
            return self.inner
        return MethodType(type(self.model).forward, self.model)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the forward that runs inside, which no bound method holds: Dynamo makes none."""
        if self.inner is None:
            return type(self.model).forward(self.model, *args, **kwargs)
        return self.inner(*args, **kwargs)

    def is_in_use(self, model: nn.Module) -> bool:
        """Returns True if calls of ``model`` run this object, even through wrappers around it."""
        return self.active and any(forward is self for forward in wrapped_forwards(model))

    def remove(self) -> None:
        """Removes this object, or makes it do nothing if another library wrapped the forward."""
        self.active = False
        own = vars(self.model)
        if own.get("forward") is self:
            if self.inner is None:
                del own["forward"]
            else:
                own["forward"] = self.inner


def wrapped_forwards(model: nn.Module) -> Iterator[Any]:
    """Yields the ``forward`` set on the instance ``model``, then each one that it wraps."""
    forward = vars(model).get("forward")
    while forward is not None:
        yield forward
        forward = getattr(forward, "__wrapped__", None)


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
    check_flags("autocast_forward", during_eval=during_eval)
    recipe = chosen_recipe("autocast_forward", "recipe", recipe)
    for forward in wrapped_forwards(model):
        if isinstance(forward, AutocastForward) and forward.active:
            raise ValueError(
                "autocast_forward: model must have no autocast_forward yet, got one with "
                f"{forward.recipe}"
            )
    return AutocastForward(model, recipe, during_eval)
