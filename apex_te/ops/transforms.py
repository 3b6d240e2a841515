"""Runs ops that write into their arguments under torch.func's transforms (grad, vjp, vmap, jvp).

``apply`` runs an ``OpFunction``, which has a derivative; ``run_samples`` is the vmap rule of a
registered op, which has none; ``refuse_derivatives`` raises where a transform would need one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _functorch
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd import forward_ad

__all__ = ["apply", "refuse_derivatives", "refuse_tangents", "run_samples"]


def apply(function: Any, args: tuple[Any, ...]) -> Any:
    """Applies an ``OpFunction`` under grad, vjp and vmap, in any order.

    Args:
        function: the ``OpFunction``.
        args: arguments of its ``forward``, without ctx.

    Returns:
        What its ``forward`` returns.
    """
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    rest = tuple(None if isinstance(a, torch.Tensor) else a for a in args)
    is_tensor = tuple(isinstance(a, torch.Tensor) for a in args)
    call = _Call(function, rest, is_tensor)
    call.needs = tuple(isinstance(a, torch.Tensor) and _requires_grad(a) for a in args)
    results = _Forward.apply(call, *tensors)[: call.num_outputs]
    results = _with_gaps(results, call.has_output)
    return results if call.is_tuple else results[0]


class _Call:
    """Record of one call of an ``OpFunction``, which its forward fills and its backward reads.

    ``rest`` are the arguments with None instead of tensors; ``needs`` and ``attributes`` are
    ctx.needs_input_grad and what the forward set on ctx; ``has_*`` are True for each tensor.
    """

    def __init__(self, function: Any, rest: tuple[Any, ...], is_tensor: tuple[bool, ...]) -> None:
        self.function = function
        self.rest = rest
        self.is_tensor = is_tensor
        self.needs: tuple[bool, ...] = ()
        self.attributes: dict[str, Any] = {}
        self.has_output: tuple[bool, ...] = ()
        self.has_saved: tuple[bool, ...] = ()
        self.is_tuple = False
        self.outputs: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self.materializes = True
        self.has_grad: tuple[bool, ...] = ()

    @property
    def num_outputs(self) -> int:
        return sum(self.has_output)

    def arguments(self, tensors: tuple[torch.Tensor, ...]) -> list[Any]:
        given = iter(tensors)
        pairs = zip(self.rest, self.is_tensor, strict=True)
        return [next(given) if is_tensor else value for value, is_tensor in pairs]

    def copy(self) -> _Call:
        """Returns a copy of the record, for one sample of a batch."""
        other = _Call(self.function, self.rest, self.is_tensor)
        vars(other).update(vars(self))
        return other

    def adopt(self, other: _Call) -> None:
        """Takes over the record of one sample's call, as all samples fill theirs alike."""
        vars(self).update(vars(other))

    def refuse(self, what: str) -> NotImplementedError:
        return NotImplementedError(f"{self.function.LABEL}: {what} is not supported")


class _Context:
    """Substitute for autograd's ctx in a forward or a backward that a transform runs."""

    def __init__(self, call: _Call, saved: tuple[torch.Tensor | None, ...] = ()) -> None:
        vars(self).update(call.attributes)
        self.needs_input_grad = call.needs
        self.saved_tensors = saved
        self._call = call

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self._call.materializes = value

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        pass

    def mark_dirty(self, *tensors: torch.Tensor) -> None:
        raise self._call.refuse("overwriting an input under torch.func's transforms")


class _Forward(torch.autograd.Function):
    """Forward as a pure function, whose outputs include the tensors saved for backward."""

    @staticmethod
    def forward(call: _Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx = _Context(call)
        known = set(vars(ctx))
        results = call.function.forward(ctx, *call.arguments(tensors))
        call.is_tuple = isinstance(results, tuple)
        results = results if call.is_tuple else (results,)
        saved = ctx.saved_tensors
        call.attributes = {k: v for k, v in vars(ctx).items() if k not in known}
        call.has_output = tuple(t is not None for t in results)
        call.has_saved = tuple(t is not None for t in saved)
        made = [t for t in results if t is not None]
        call.outputs = [(t.shape, t.dtype, t.device) for t in made]
        return (*made, *(t.detach() for t in saved if t is not None))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.call = inputs[0]
        # Saved tensors stay attached to the graph, so that a second derivative reaches _Backward's.
        ctx.save_for_backward(*output[ctx.call.num_outputs :])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        call = ctx.call.copy()
        grads = grads[: call.num_outputs]
        call.has_grad = tuple(g is not None for g in grads)
        given = [g for g in grads if g is not None]
        return None, *_Backward.apply(call, *given, *ctx.saved_tensors)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise ctx.call.refuse("forward-mode differentiation (torch.func.jvp)")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: _Call, *tensors: torch.Tensor) -> Any:
        return _each_sample(_Forward, info, in_dims, call, tensors)


class _Backward(torch.autograd.Function):
    """Backward as a pure function of the gradients and of the tensors that the forward saved."""

    @staticmethod
    def forward(call: _Call, *tensors: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        num_grads = sum(call.has_grad)
        made = _with_gaps(tensors[:num_grads], call.has_grad)
        if call.materializes:
            made = tuple(
                torch.zeros(size, dtype=dtype, device=device) if g is None else g
                for g, (size, dtype, device) in zip(made, call.outputs, strict=True)
            )
        given = iter(made)
        grads = [next(given) if has else None for has in call.has_output]
        saved = _with_gaps(tensors[num_grads:], call.has_saved)
        results = call.function.backward(_Context(call, saved), *grads)
        results = results if isinstance(results, tuple) else (results,)
        return tuple(r for r, is_tensor in zip(results, call.is_tensor, strict=True) if is_tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.call = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ctx.call.refuse("a second derivative under torch.func's transforms")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise ctx.call.refuse("forward-mode differentiation of the gradient (torch.func.jvp)")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: _Call, *tensors: torch.Tensor) -> Any:
        return _each_sample(_Backward, info, in_dims, call, tensors)


def _each_sample(
    function: Any, info: Any, in_dims: tuple[Any, ...], call: _Call, tensors: tuple[Any, ...]
) -> Any:
    """Applies ``_Forward`` or ``_Backward`` to each sample of a batch: its rule for ``vmap``.

    Returns (results stacked along dimension 0, their batch dimensions), None for a None. The first
    of ``in_dims`` is that of ``call``.
    """
    if not info.batch_size:
        raise call.refuse("torch.func.vmap over no samples")
    results = []
    for i in range(info.batch_size):
        own = call.copy()
        dims = in_dims[1:]
        sample = [
            t if dim is None else _aligned(t.select(dim, i))
            for t, dim in zip(tensors, dims, strict=True)
        ]
        results.append(function.apply(own, *sample))
    call.adopt(own)
    stacked = tuple(
        None if parts[0] is None else torch.stack(parts) for parts in zip(*results, strict=True)
    )
    return stacked, tuple(None if t is None else 0 for t in stacked)


def _aligned(sample: torch.Tensor) -> torch.Tensor:
    """Returns a sample, copied unless aligned to 16 bytes: cuBLASLt refuses other scales."""
    t = sample
    while _functorch.is_functorch_wrapped_tensor(t):
        if _functorch.is_batchedtensor(t):
            return sample  # the inner vmap's rule takes its samples and aligns them
        t = _functorch.get_unwrapped(t)
    return sample if t.storage_offset() * t.element_size() % 16 == 0 else sample.clone()


def _with_gaps(tensors: tuple[Any, ...], has: tuple[bool, ...]) -> tuple[Any, ...]:
    """Returns ``tensors`` spread over the True places of ``has``, with None at its False places."""
    given = iter(tensors)
    return tuple(next(given) if is_there else None for is_there in has)


def _requires_grad(t: torch.Tensor) -> bool:
    """Returns True if a transform at any level, or autograd below it, may ask for a gradient."""
    while _functorch.is_functorch_wrapped_tensor(t):
        if t.requires_grad:
            return True
        t = _functorch.get_unwrapped(t)
    return t.requires_grad


def run_samples(op: Any, args: tuple[Any, ...]) -> None:
    """Runs a registered op once for each sample of a batch, as its ``torch.func.vmap`` rule.

    Raises NotImplementedError if it would write to a tensor that is not batched.
    """
    interpreter: Any = retrieve_current_functorch_interpreter()
    level = interpreter.level()
    size = interpreter.batch_size()
    flat = [[_samples(t, level) for t in a] if _is_list(a) else _samples(a, level) for a in args]
    for given, argument in zip(flat, op.default._schema.arguments, strict=False):
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and any(_is_shared(t) for t in (given if _is_list(given) else [given])):
            raise NotImplementedError(
                f"{op.__name__}: torch.func.vmap must batch {argument.name}, which is written, "
                "got a tensor that all samples share"
            )
    with interpreter.lower():
        for i in range(size):
            copies: list[tuple[torch.Tensor, torch.Tensor]] = []
            op(*([_take(t, i, copies) for t in a] if _is_list(a) else _take(a, i, copies)
                 for a in flat))  # fmt: skip
            for target, source in copies:
                target.copy_(source)


class _Samples:
    """Batched argument of an op, ``value`` with its batch dimension moved to the front."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _is_shared(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 0


def _samples(value: Any, level: int) -> Any:
    """Returns ``_Samples`` of a tensor that the vmap at ``level`` batches; else the plain value."""
    if not isinstance(value, torch.Tensor):
        return value
    value, dim = _functorch._unwrap_batched(value, level)
    return value if dim is None else _Samples(value.movedim(dim, 0))


def _take(value: Any, i: int, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Returns sample ``i``, contiguous and aligned; ``copies`` gets (sample, copy) if copied."""
    if not isinstance(value, _Samples):
        return value
    sample = value.value[i]
    dense = _aligned(sample if sample.is_contiguous() else sample.contiguous())
    if dense is not sample:
        copies.append((sample, dense))
    return dense


def _tensors(args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Returns the tensors among the arguments and in lists among them."""
    given = [t for a in args for t in (a if _is_list(a) else (a,))]
    return [t for t in given if isinstance(t, torch.Tensor)]


def _is_differentiated(t: Any) -> bool:
    """Returns True if a transform of torch.func differentiates with respect to a tensor."""
    while isinstance(t, torch.Tensor) and _functorch.is_functorch_wrapped_tensor(t):
        if _functorch.is_gradtrackingtensor(t) and (t.requires_grad or _has_tangent(t)):
            return True
        t = _functorch.get_unwrapped(t)
    return False


def _has_tangent(t: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(t, level=0).tangent is not None


def refuse_tangents(name: str, args: tuple[Any, ...]) -> None:
    """Raises NotImplementedError, of op ``name``, if an argument has a forward-mode tangent."""
    if forward_ad._current_level >= 0 and any(map(_has_tangent, _tensors(args))):
        raise NotImplementedError(f"{name}: forward-mode differentiation (jvp) is not supported")


def refuse_derivatives(name: str, args: tuple[Any, ...]) -> None:
    """Raises NotImplementedError if an argument of an op without a derivative is differentiated.

    It detects transforms of torch.func and forward mode, not plain autograd. Calls from an
    ``OpFunction`` pass, since their tensors are untracked.

    Args:
        name: the op's name, for the error.
        args: the op's arguments; other values than tensors are skipped.
    """
    refuse_tangents(name, args)
    if torch.is_grad_enabled() and any(map(_is_differentiated, _tensors(args))):
        raise NotImplementedError(
            f"{name}: torch.func.grad, vjp and jvp are not supported, as it has no derivative"
        )
