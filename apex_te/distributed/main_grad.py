"""Data-parallel reduction of gradients for trainers that accumulate them in ``main_grad``."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import distributed

from ..comm.agreement import HEADER, RankMismatchError, compared, header
from ..comm.collectives import world_size
from ..comm.groups import check_process_group
from ..runtime.named_arguments import check_flags, named_arguments

_SMALL = 4 << 20  # bytes; gradients below this travel together
_BUCKET = 32 << 20  # bytes of those
_IN_FLIGHT = 4  # buckets at a time, which bounds the memory that they take
_QUANTUM = 4096  # numbers that the first collective of a group has, and by which it grows


class _Agreed:
    """Cache, for one process group, of what earlier calls found its ranks to agree on.

    ``capacity`` is the number of int32 elements of a call's first all-reduce. ``sent`` are device
    tensors of the numbers that this rank sent with all gradients, by device and header; they save a
    repeated call the copy.
    """

    def __init__(self) -> None:
        self.capacity = _QUANTUM
        self.sent: dict[tuple[torch.device, tuple[int, ...]], torch.Tensor] = {}


_agreed: weakref.WeakKeyDictionary[Any, _Agreed] = weakref.WeakKeyDictionary()


@named_arguments()
def reduce_main_grads(
    model: torch.nn.Module | Iterable[torch.Tensor], group: Any = None, *, average: bool = True
) -> None:
    """Averages the gradients of all trained parameters over data-parallel ranks, in place.

    Collective: every rank of ``group`` calls it once a step, after the last backward and before
    clipping and the optimizer. It is for trainers that allocate ``main_grad``
    (``fuse_wgrad_accumulation``). If a parameter has ``main_grad``, that buffer is reduced, after
    adding any ``.grad`` from autograd (of a bias, or of an embedding tied to the weight). Then
    ``.grad`` becomes None and ``grad_added_to_main_grad`` False. For any other parameter ``.grad``
    is reduced; if only some ranks have one, the other ranks contribute zeros and get the result as
    their ``.grad``.

    Gradients of 4 MiB and more are reduced without a copy, smaller ones in buckets, in the order of
    the parameters. On GPUs the host waits in the first call for a model, and in each call on ranks
    without some gradient. The set of trained parameters may change between calls if all ranks
    change it together.

    Gradients of parameters with ``sequence_parallel=True`` must also be summed over the
    tensor-parallel ranks, once a step. The trainer does that, for example by this function:
    ``reduce_main_grads([p for p in model.parameters() if getattr(p, "sequence_parallel", False)],
    tp_group, average=False)``.

    Args:
        model: a module or parameters. A module's parameters with ``allreduce=False``, such as
            Megatron's expert-parallel ones, are left out. Parameters that are given directly are
            all reduced, whatever their ``allreduce``.
        group: process group of the data-parallel ranks, which all have the same parameters; None is
            the whole world.
        average: divide by the number of ranks, as DistributedDataParallel does; False sums.

    Raises:
        TypeError: an argument has a wrong type, or a parameter is a DTensor that is sharded or
            replicated over ranks of ``group`` (``fully_shard`` has already reduced its gradient).
        ValueError: a ``main_grad`` does not have its parameter's size, or is not contiguous.
        NotImplementedError: a gradient is sparse.
        RuntimeError: torchrun started several ranks, but no process group is initialized.
        RankMismatchError: the ranks' trained parameters differ (raised on every rank), or another
            rank raises one of the errors for a gradient.
    """
    check_process_group("reduce_main_grads", "group", group)
    check_flags("reduce_main_grads", average=average)
    started = os.environ.get("WORLD_SIZE", "1")  # by torchrun
    if group is None and started not in ("", "1") and not distributed.is_initialized():
        raise RuntimeError(
            f"reduce_main_grads: torch.distributed must be initialized on the {started} ranks of"
            " WORLD_SIZE; call torch.distributed.init_process_group first"
        )
    parameters = _parameters(model)
    with torch.no_grad():
        gradients: list[torch.Tensor | None] = [None] * len(parameters)
        error: Exception | None = None
        try:
            gradients = [_gradient(parameter, group) for parameter in parameters]
        except (TypeError, ValueError, NotImplementedError) as found:
            error = found  # to be raised when the other ranks know of it
        ranks = world_size(group)
        if ranks > 1:
            complete = _complete(parameters, gradients, group or distributed.group.WORLD, error)
            _reduce(complete, group, 1.0 / ranks if average else 1.0)
        elif error is not None:
            raise error


def _parameters(model: Any) -> list[torch.Tensor]:
    """Returns the parameters of the argument ``model`` that require gradients, each once."""
    if isinstance(model, torch.nn.Module):
        given: list[Any] = [p for p in model.parameters() if getattr(p, "allreduce", True)]
    elif isinstance(model, Iterable) and not isinstance(model, torch.Tensor):
        given = list({id(p): p for p in model}.values())
    else:
        raise TypeError(
            "reduce_main_grads: model must be a torch.nn.Module or parameters, "
            f"got {type(model).__name__}"
        )
    for parameter in given:
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(
                "reduce_main_grads: model must be a torch.nn.Module or parameters, got a "
                f"{type(parameter).__name__} among them"
            )
    return [parameter for parameter in given if parameter.requires_grad]


def _gradient(parameter: Any, group: Any) -> torch.Tensor | None:
    """Returns the tensor that holds the whole local gradient of ``parameter``; None without one."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is not None:
        _check_mesh(mesh, group)
    main_grad = getattr(parameter, "main_grad", None)
    grad = parameter.grad
    if main_grad is None:
        return None if grad is None else _dense(grad)
    # A gradient that came with the flag is the dummy that stands for main_grad.
    stands_for = getattr(parameter, "grad_added_to_main_grad", False)
    main_grad = _dense(main_grad)
    fits = mesh is not None or main_grad.numel() == parameter.numel()
    if not fits or not main_grad.is_contiguous():
        raise ValueError(
            "reduce_main_grads: main_grad must be contiguous with shape "
            f"{list(parameter.shape)}, got {list(main_grad.shape)}"
        )
    if grad is not None and (not stands_for or getattr(parameter, "zero_out_wgrad", False)):
        main_grad.add_(_dense(grad).reshape(main_grad.shape))
    parameter.grad = None
    if hasattr(parameter, "grad_added_to_main_grad"):
        parameter.grad_added_to_main_grad = False
    return main_grad


def _dense(grad: Any) -> torch.Tensor:
    """Returns ``grad``, or the local tensor if it is a DTensor; raises for a sparse gradient."""
    if grad.layout is not torch.strided:
        raise NotImplementedError(
            f"reduce_main_grads: gradients must be dense tensors, got {grad.layout}"
        )
    return grad.to_local() if hasattr(grad, "to_local") else grad


def _check_mesh(mesh: Any, group: Any) -> None:
    """Raises TypeError if the device mesh of a DTensor has two or more ranks of ``group``."""
    ranks = distributed.get_process_group_ranks(group or distributed.group.WORLD)
    shared = set(ranks) & set(mesh.mesh.flatten().tolist())
    if len(shared) > 1:
        raise TypeError(
            "reduce_main_grads: parameters must not be DTensors over ranks of group, whose "
            f"gradients fully_shard reduces, got one over ranks {sorted(shared)}"
        )


def _complete(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor | None],
    group: Any,
    error: Exception | None,
) -> list[torch.Tensor]:
    """Finds the gradients to reduce: those that at least one rank has, in one order on all ranks.

    A small MAX all-reduce finds them, and compares parameters and errors. Its size is what the
    ranks last agreed on, so that ranks that differ still take part in the same collective; numbers
    beyond it follow in a second one once the ranks are known to agree.
    """
    present = [int(gradient is not None) for gradient in gradients]
    is_usual = all(present) and error is None
    own = header(len(parameters), _described(parameters, gradients), int(error is not None))
    agreed = _agreed.setdefault(group, _Agreed())
    key = (_device(parameters, group), tuple(own))
    sent = agreed.sent.get(key) if is_usual else None
    is_known = sent is not None
    if sent is None:
        sent = torch.tensor([*own, *present], dtype=torch.int32).to(key[0])
    used, first = sent.numel(), agreed.capacity
    numbers = sent.new_zeros(max(first, -(-used // _QUANTUM) * _QUANTUM))
    numbers[:used] = sent
    distributed.all_reduce(numbers[:first], op=distributed.ReduceOp.MAX, group=group)
    if error is not None:
        raise error
    if not (is_known and numbers.is_cuda):  # reading them would make the host wait
        _check_agreement(numbers, len(parameters), group)
        if numbers.numel() > first:
            distributed.all_reduce(numbers[first:], op=distributed.ReduceOp.MAX, group=group)
            agreed.capacity = numbers.numel()
        if is_usual:
            agreed.sent[key] = sent
        _add_zeros(parameters, gradients, numbers[HEADER:used].tolist())
    return [gradient for gradient in gradients if gradient is not None]


def _described(parameters: list[torch.Tensor], gradients: list[torch.Tensor | None]) -> bytes:
    """Returns text that must be equal on all ranks: sizes, dtypes, who has ``main_grad``."""
    facts = [
        (p.numel(), str(p.dtype if g is None else g.dtype), hasattr(p, "main_grad"))
        for p, g in zip(parameters, gradients, strict=True)
    ]
    return repr(facts).encode()


def _device(parameters: list[torch.Tensor], group: Any) -> torch.device:
    """Returns the first parameter's device; without parameters, one that ``group`` can use."""
    if parameters:
        return parameters[0].device
    if distributed.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _check_agreement(numbers: torch.Tensor, count: int, group: Any) -> None:
    """Raises RankMismatchError if the ranks differ or one has an error; the host waits."""
    found = compared(numbers[:HEADER].tolist())
    ranks = distributed.get_process_group_ranks(group)
    if found.flag:
        raise RankMismatchError(
            f"reduce_main_grads: the gradients of every rank of group (ranks {ranks}) must fit, "
            "got an error on another rank"
        )
    if not found.agrees:
        raise found.error(
            f"reduce_main_grads: every rank of group (ranks {ranks}) must have the same trained "
            "parameters, in number, sizes, dtypes and main_grads",
            count,
        )


def _add_zeros(
    parameters: list[torch.Tensor], gradients: list[torch.Tensor | None], anywhere: list[int]
) -> None:
    """Puts zeros into ``gradients`` and ``.grad`` for gradients that only other ranks have."""
    for i, parameter in enumerate(parameters):
        if gradients[i] is None and anywhere[i]:
            parameter.grad = torch.zeros_like(parameter)
            gradients[i] = _dense(parameter.grad)


def _reduce(gradients: list[torch.Tensor], group: Any, factor: float) -> None:
    """Replaces each gradient by the sum over ranks of ``gradient * factor``."""
    flying: deque[tuple[Any, torch.Tensor, list[torch.Tensor]]] = deque()
    for bucket in _buckets(gradients):
        if len(flying) == _IN_FLIGHT:
            _land(*flying.popleft())
        first = bucket[0]
        alone = len(bucket) == 1 and first.is_contiguous()
        flat = first if alone else torch.cat([gradient.reshape(-1) for gradient in bucket])
        if factor != 1.0:
            flat.mul_(factor)  # before the sum, which 16-bit gradients could not hold
        work = distributed.all_reduce(flat, group=group, async_op=True)
        flying.append((work, flat, [] if alone else bucket))
    for landing in flying:
        _land(*landing)


def _land(work: Any, flat: torch.Tensor, bucket: list[torch.Tensor]) -> None:
    """Waits for the all-reduce of a bucket and copies the sums to its gradients."""
    work.wait()  # on a GPU the stream waits, not the host
    if bucket:
        parts = flat.split([gradient.numel() for gradient in bucket])
        views = [part.view(to.shape) for part, to in zip(parts, bucket, strict=True)]
        torch._foreach_copy_(bucket, views)


def _buckets(gradients: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Groups gradients for one all-reduce each: the same groups in each call."""
    open_buckets: dict[tuple, tuple[int, list[torch.Tensor]]] = {}
    for gradient in gradients:
        size = gradient.numel() * gradient.element_size()
        if size >= _SMALL:
            yield [gradient]
        elif size:
            key = (gradient.dtype, gradient.device)
            total, bucket = open_buckets.get(key, (0, []))
            bucket.append(gradient)
            open_buckets[key] = (total + size, bucket)
            if total + size >= _BUCKET:
                yield open_buckets.pop(key)[1]
    for _, bucket in open_buckets.values():
        yield bucket
