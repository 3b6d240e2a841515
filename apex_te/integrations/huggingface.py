"""``FP8Callback``, by which Hugging Face's trainers train in FP8."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from ..module._core.norm_parameters import NormedModule
from ..recipe import Recipe, chosen_recipe
from ..runtime.named_arguments import argument_names, check_flags, did_you_mean
from .autocast_forward import AutocastForward, autocast_forward
from .from_torch import from_torch
from .fusion import key_map, refuse_optimized
from .saving import find_fp8_state, load_fp8_state, save_fp8_state

__all__ = ["FP8Callback"]


class _FP8Training:
    """Callback that makes ``transformers.Trainer``, and trainers derived from it, train in FP8.

    When the trainer is constructed, before it makes an optimizer, ``from_torch`` converts the
    model, and its forwards run in ``fp8_autocast`` from then on. Checkpoints get a file of FP8
    state, which is read when training is resumed. It is written in addition to what
    ``save_pretrained`` writes, because PEFT saves adapters without the layers under them.

    A trainer with ``model_init`` makes a model and its optimizer before callbacks see them. With
    ``fuse=True`` it needs ``model_init=callback.converted(model_init)``.

    Args:
        recipe: the recipe or its name; None is ``DelayedScaling()``.
        during_eval: evaluate in FP8, too.
        convert: False does not convert the model, for a model made of apex_te modules.
        options: keyword arguments of ``from_torch``, such as ``fuse`` and ``exclude``.

    Attributes:
        handle: result of ``autocast_forward`` for the trainer's model; None before the trainer has
            a model. Its ``remove()`` ends training in FP8.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a recipe's name is unknown, or there are options with ``convert=False``.
    """

    def __init__(
        self,
        recipe: Recipe | str | None = None,
        during_eval: bool = False,
        convert: bool = True,
        **options: Any,
    ) -> None:
        check_flags("FP8Callback", during_eval=during_eval, convert=convert)
        known = argument_names(from_torch)[1:]
        for name in options:
            if name not in known:
                hint = did_you_mean(name, ("recipe", "during_eval", "convert", *known))
                hint = hint or f"; the options of from_torch are {', '.join(known)}"
                raise TypeError(f"FP8Callback: unexpected argument {name!r}{hint}")
        if options and not convert:
            names = ", ".join(options)
            raise ValueError(
                "FP8Callback: convert must be True with options of from_torch,"
                f" got False and {names}"
            )
        self.recipe = chosen_recipe("FP8Callback", "recipe", recipe)
        self.during_eval = during_eval
        self.convert = convert
        self.options = options
        self.handle: AutocastForward | None = None

    def converted(self, model_init: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        """Returns a ``model_init`` for a trainer that also converts each model it makes.

        Args:
            model_init: function without arguments or of a trial, as for ``transformers.Trainer``.

        Raises:
            TypeError: ``model_init`` is not callable.
        """

        if not callable(model_init):
            raise TypeError(
                "FP8Callback.converted: model_init must be a function that returns a model, "
                f"got {type(model_init).__name__}"
            )

        @functools.wraps(model_init)
        def build(*args: Any) -> nn.Module:
            model = model_init(*args)
            return from_torch(model, **self.options) if self.convert else model

        return build

    def on_init_end(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **others: Any
    ) -> None:
        """Converts the trainer's model and makes its forwards run in FP8; the trainer calls it."""
        self._prepare(model)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **others: Any
    ) -> None:
        """Prepares the model again if the trainer changed it; reads FP8 state when resuming.

        The trainer calls it. The model may be a new one, or the trainer, such as TRL's, may have
        replaced the forward that enters the region.

        Warns if the optimizer decays norms of ``LayerNormLinear`` and ``LayerNormMLP``, because
        Trainer does not recognize the names of these parameters.
        """
        self._prepare(model)
        if model is not None and others.get("optimizer") is not None:
            _warn_of_decay(model, others["optimizer"])
        if state.global_step and model is not None:
            file = find_fp8_state(_folder(args, state))
            if file is not None:
                load_fp8_state(model, file)

    def on_save(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **others: Any
    ) -> None:
        """Writes the FP8 state to the folder of the trainer's checkpoint; the trainer calls it."""
        if args.should_save and model is not None and os.path.isdir(_folder(args, state)):
            save_fp8_state(model, _folder(args, state))

    def _prepare(self, model: nn.Module | None) -> None:
        """Converts ``model`` and wraps its forward, unless that is done."""
        if model is None or (self.handle is not None and self.handle.is_in_use(model)):
            return
        if self.convert and (self.handle is None or self.handle.model is not model):
            options = dict(self.options)
            if options.get("fuse"):
                options["fuse"] = not key_map(model).entries
            if options.get("fuse"):
                try:
                    refuse_optimized(model, options.get("optimizer"))
                except ValueError as error:
                    raise ValueError(
                        "FP8Callback: model_init must be callback.converted(model_init) with "
                        "fuse=True, got a model that is not fused and has an optimizer already"
                    ) from error
            from_torch(model, **options)
        if self.handle is not None:
            self.handle.remove()
        self.handle = autocast_forward(model, self.recipe, self.during_eval)


def _warn_of_decay(model: nn.Module, optimizer: Any) -> None:
    """Warns if ``optimizer`` decays the norm's parameters of a layer that begins with a norm."""
    norms = {
        id(p): f"{name}.{key}"
        for name, module in model.named_modules()
        if isinstance(module, NormedModule)
        for key, p in module._parameters.items()
        if p is not None and key.startswith("layer_norm_")
    }
    groups = [group for group in optimizer.param_groups if group.get("weight_decay")]
    found = [norms[id(p)] for group in groups for p in group["params"] if id(p) in norms]
    if found:
        warnings.warn(
            f"FP8Callback: the optimizer decays {len(found)} parameters of norms, such as "
            f"{found[0]}; leave them out in Trainer.get_decay_parameter_names",
            stacklevel=2,
        )


def _folder(args: Any, state: Any) -> str:
    """Returns the folder of the trainer's last checkpoint."""
    return os.path.join(args.output_dir, f"checkpoint-{state.global_step}")


if TYPE_CHECKING:
    from transformers import TrainerCallback

    class FP8Callback(_FP8Training, TrainerCallback):
        """``_FP8Training`` as a callback of transformers."""

else:

    def __getattr__(name: str) -> Any:
        """Makes ``FP8Callback``, a subclass of transformers' callbacks, when it is asked for."""
        if name != "FP8Callback":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            from transformers import TrainerCallback
        except ImportError as error:
            raise ImportError(
                "FP8Callback: transformers must be installed: pip install transformers"
            ) from error
        namespace = {"__module__": __name__, "__doc__": _FP8Training.__doc__}
        globals()[name] = kind = type(name, (_FP8Training, TrainerCallback), namespace)
        return kind
