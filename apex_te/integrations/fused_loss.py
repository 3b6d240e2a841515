"""``fuse_loss``, which has causal language models compute their loss without all logits."""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from ..fp8.autocast import is_fp8_enabled
from ..module._core.parallel import is_observed
from ..module.linear import Linear
from ..module.linear_cross_entropy import linear_cross_entropy
from ..recipe import Recipe, stateless_recipe
from ..runtime.named_arguments import check_model, named_arguments
from .autocast_forward import WrappedForward, wrapped_forwards
from .lazy_logits import LazyLogits

_lock = threading.Lock()  # for ``_InPlace.users``, as forwards may run in several threads


class _Options(NamedTuple):
    """Options of ``linear_cross_entropy``."""

    fp8_recipe: Recipe | None
    chunk_rows: int | None
    weight_grad_dtype: torch.dtype | None


class FusedLoss(WrappedForward):
    """Callable that replaces a causal language model's ``forward`` and fuses head and loss."""

    def __init__(self, model: Any, options: _Options) -> None:
        super().__init__(model)
        self.options = options
        self._has_warned = False

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        is_training = self.active and self.model.training
        if not is_training or torch.compiler.is_compiling():
            return self._forward(*args, **kwargs)
        if not _has_labels(type(self.model), args, kwargs):
            return self._forward(*args, **kwargs)
        head = _head_to_fuse(self.model)
        loss = self.model.loss_function
        if head is None or not (loss is _plain_loss() or isinstance(loss, _LossInPlace)):
            return self._forward(*args, **kwargs)
        with (
            _in_place(head, "forward", _LazyHead(head)) as lazy_head,
            _in_place(self.model, "_loss_function", _LossInPlace(self, lazy_head)) as in_place,
        ):
            out = self._forward(*args, **kwargs)
        if not in_place.is_called:
            self._warn("computes its loss in its forward, not by loss_function")
        return out

    def _loss(
        self,
        lazy_head: _LazyHead,
        logits: Any,
        labels: torch.Tensor | None,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Computes what transformers' ``ForCausalLMLoss`` does."""
        is_lazy = isinstance(logits, LazyLogits) and logits.is_unused
        if not is_lazy or logits.shape[-1] != vocab_size:
            if not lazy_head.has_multiplied:
                self._warn("uses logits before its loss, as for a scale or soft cap")
            logits = logits.compute() if isinstance(logits, LazyLogits) else logits
            return _plain_loss()(
                logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
            )
        target = shift_labels
        if target is None:
            assert labels is not None
            target = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        hidden: Any = logits.hidden
        head: Any = logits.head
        loss = linear_cross_entropy(
            hidden.flatten(0, -2),
            head.weight,
            target.reshape(-1).to(hidden.device),
            head.bias,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
            **self.options._asdict(),
        )
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    def _warn(self, reason: str) -> None:
        """Warns once that the loss is not fused."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"fuse_loss: {type(self.model).__name__} {reason}, so that logits are computed in "
                "full",
                stacklevel=2,
            )


class _InPlace:
    """Callable in place of a module's attribute while ``users`` forwards (of any thread) run."""

    def __init__(self) -> None:
        self.users = 0
        self.before: dict[str, Any] = {}


_Some = TypeVar("_Some", bound=_InPlace)


class _LossInPlace(_InPlace):
    """Callable in place of a model's ``_loss_function``."""

    def __init__(self, fused: FusedLoss, lazy_head: Any) -> None:
        super().__init__()
        self.fused, self.lazy_head = fused, lazy_head
        self.is_called = False

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.is_called = True
        return self.fused._loss(self.lazy_head, *args, **kwargs)


class _LazyHead(_InPlace):
    """Callable in place of a head's ``forward``, which leaves the GEMM to the loss."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head
        self.has_multiplied = False

    def __call__(self, hidden: torch.Tensor) -> Any:
        if _is_left_to_loss(self.head, hidden):
            return LazyLogits(self.head, hidden)
        self.has_multiplied = True
        head: Any = type(self.head)
        return head.forward(self.head, hidden)


def _is_left_to_loss(head: Any, hidden: torch.Tensor) -> bool:
    """Returns True if ``linear_cross_entropy`` computes what the head does here."""
    if isinstance(head, Linear) and is_fp8_enabled():
        return False
    dtypes = {hidden.dtype, head.weight.dtype}
    is_one = len(dtypes) == 1 or torch.is_autocast_enabled(hidden.device.type)
    return is_one and dtypes <= {torch.float32, torch.float16, torch.bfloat16}


def _has_labels(model: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns True if a forward with these arguments is given labels."""
    place = _place_of_labels(model) if args else None
    if place is not None and place < len(args):
        return args[place] is not None
    return kwargs.get("labels") is not None


@functools.cache
def _place_of_labels(model: type) -> int | None:
    """Returns the index of ``labels`` among a forward's positional arguments; None without it."""
    forward: Any = model.forward  # type: ignore[attr-defined]
    positional = [
        name
        for name, one in inspect.signature(forward).parameters.items()
        if one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    return positional.index("labels") - 1 if "labels" in positional else None  # without self


def _plain_loss() -> Callable[..., torch.Tensor]:
    """Returns the loss of transformers that is fused."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    return ForCausalLMLoss


def _head_to_fuse(model: Any) -> Any:
    """Returns the model's head if it is nothing but a GEMM now, else None."""
    head = model.get_output_embeddings()
    if type(head) not in (nn.Linear, Linear):
        return None
    if not isinstance(vars(head).get("forward"), _LazyHead) and is_observed(head):
        return None
    if isinstance(head, Linear) and (
        head.split is not None
        or head.parallel_mode is not None
        or head.return_bias
        or head.fuse_wgrad_accumulation
        or head.delay_wgrad_compute
    ):
        return None
    return None if hasattr(head.weight, "to_local") else head  # a DTensor


@contextmanager
def _in_place(owner: nn.Module, name: str, value: _Some) -> Iterator[_Some]:
    """Gives a module an attribute of its own for the time of a ``with`` block."""
    own = vars(owner)
    with _lock:
        there = own.get(name)
        if isinstance(there, type(value)):
            value = there
        else:
            value.before = {name: own[name]} if name in own else {}
            own[name] = value
        value.users += 1
    try:
        yield value
    finally:
        with _lock:
            value.users -= 1
            if value.users == 0 and own.get(name) is value:
                del own[name]
                own.update(value.before)


@named_arguments()
def fuse_loss(
    model: nn.Module,
    *,
    fp8_recipe: Recipe | str | None = None,
    chunk_rows: int | None = None,
    weight_grad_dtype: torch.dtype | None = None,
) -> FusedLoss:
    """Makes a causal LM of transformers compute its loss by ``linear_cross_entropy``.

    A forward in training mode with ``labels`` computes loss and gradients from the hidden states
    and the head's weight, a chunk of rows at a time, so that the logits ``[batch, tokens,
    vocabulary]`` are never in memory. Loss and gradients are equal up to the order of sums. The
    output's ``logits`` are a ``LazyLogits``, which computes them on use. As with
    ``linear_cross_entropy``, backward can run only once. The model's class, keys and files are
    unchanged. Copies and pickles of the model also compute their loss this way.

    Everything else runs as before: evaluation, generation, ``torch.compile``, another loss
    function, and a head that has adapters, hooks or a sharded weight, computes in float64, or is an
    ``apex_te.Linear`` inside ``fp8_autocast``. The same holds, with a warning, for models that
    scale or cap their logits (Gemma 2 and 3, Cohere, Granite) or compute their loss in their
    forward (T5, BART, Whisper).

    Args:
        model: a model such as ``LlamaForCausalLM``, or PEFT's around one.
        fp8_recipe: recipe without state, or its name, with which the head's GEMMs run in FP8. None
            computes them in the head's dtype, even inside ``fp8_autocast`` (where the head must be
            a ``torch.nn.Linear``).
        chunk_rows: rows of a chunk; None chooses as ``linear_cross_entropy`` does.
        weight_grad_dtype: dtype in which the chunks' weight gradients are summed, that of the head
            (the default) or float32.

    Returns:
        An object whose ``remove()`` undoes it.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the model is not a causal language model of transformers with that loss and a
            linear layer as its head, it already has a fused loss, or the recipe keeps state.
    """
    check_model("fuse_loss", model)
    fp8_recipe = stateless_recipe("fuse_loss", "fp8_recipe", fp8_recipe)
    if chunk_rows is not None and (not isinstance(chunk_rows, int) or chunk_rows < 1):
        raise ValueError(f"fuse_loss: chunk_rows must be a positive integer, got {chunk_rows!r}")
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore
    if not hasattr(inner, "loss_function") or not hasattr(inner, "get_output_embeddings"):
        raise ValueError(
            "fuse_loss: model must be a causal language model of transformers, got "
            f"{type(inner).__name__}"
        )
    if inner.loss_function is not _plain_loss():
        name = getattr(inner.loss_function, "__name__", inner.loss_function)
        raise ValueError(
            f"fuse_loss: model must have the loss ForCausalLMLoss, got {type(inner).__name__} with "
            f"{name}"
        )
    head = inner.get_output_embeddings()
    if not isinstance(head, nn.Linear) and not isinstance(head, Linear):
        raise ValueError(
            f"fuse_loss: model must have a linear layer as its head, got {type(head).__name__}"
        )
    if any(isinstance(one, FusedLoss) and one.active for one in wrapped_forwards(inner)):
        raise ValueError("fuse_loss: model must have no fused loss yet, got one with it")
    return FusedLoss(inner, _Options(fp8_recipe, chunk_rows, weight_grad_dtype))
