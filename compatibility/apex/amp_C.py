"""apex's amp_C: operations and optimizer steps over lists of tensors.

Arguments that all functions have in common: ``chunk_size`` must be positive and has no effect.
``noop_flag`` is one int32 element on the tensors' device. ``tensor_lists`` has lists of equal
length, whose i-th tensors belong together; each function names its lists in order, where g, p, m
and v are gradients, parameters and first and second moments. Moments of float16 or bfloat16 are
served through float32 copies.
"""

from __future__ import annotations

import torch

from apex_te._version import __version__ as __version__
from apex_te.ops import multi_tensor, multi_tensor_optim

from . import _multi_tensor
from ._lamb import (
    multi_tensor_lamb,
    multi_tensor_lamb_mp,
    multi_tensor_lamb_stage1_cuda,
    multi_tensor_lamb_stage2_cuda,
)
from ._multi_tensor import Tensors, take_lists, take_mode

__all__ = [
    "multi_tensor_adagrad",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_mp",
    "multi_tensor_l2norm_scale",
    "multi_tensor_lamb",
    "multi_tensor_lamb_mp",
    "multi_tensor_lamb_stage1_cuda",
    "multi_tensor_lamb_stage2_cuda",
    "multi_tensor_lars",
    "multi_tensor_novograd",
    "multi_tensor_scale",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
    "update_scale_hysteresis",
]

_CHECKS = {-1: "result", 0: "x", 1: "y"}


def multi_tensor_scale(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list[Tensors], scale: float
) -> None:
    """Computes out = in * scale.

    Args:
        chunk_size: at least 1; has no effect.
        noop_flag: set to 1 if a stored result is not finite.
        tensor_lists: [in, out], float32, float16 or bfloat16; an out may be its in.
        scale: factor.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: another number of lists, a chunk_size below 1, or a shape or device does not
            match.
    """
    inputs, outputs = take_lists("multi_tensor_scale", chunk_size, tensor_lists, "in out")
    multi_tensor.scale(inputs, outputs, float(scale), found_inf=noop_flag)


def multi_tensor_axpby(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: list[Tensors],
    a: float,
    b: float,
    arg_to_check: int,
) -> None:
    """Computes out = a * x + b * y; lists are x, y and out.

    noop_flag becomes 1 if a checked value is not finite.

    Args:
        chunk_size: at least 1; has no effect.
        noop_flag: one int32 element.
        tensor_lists: [x, y, out].
        a: factor of x.
        b: factor of y.
        arg_to_check: 0 to check the values of x, 1 to check y, -1 to check the stored result.

    Raises:
        ValueError: another number of lists, or a bad arg_to_check or chunk_size.
    """
    if arg_to_check not in _CHECKS:
        raise ValueError(
            f"multi_tensor_axpby: arg_to_check must be -1, 0 or 1, got {arg_to_check!r}"
        )
    xs, ys, outputs = take_lists("multi_tensor_axpby", chunk_size, tensor_lists, "x y out")
    check = _CHECKS[arg_to_check]
    multi_tensor.axpby(xs, ys, outputs, float(a), float(b), check=check, found_inf=noop_flag)


def _norms(
    noop_flag: torch.Tensor,
    tensors: Tensors,
    per_tensor: bool | None,
    factor: float | torch.Tensor = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes L2 norms times ``factor``; a norm that is not finite sets ``noop_flag`` to 1.

    Returns:
        Two float32 tensors: the norm over all tensors, [1], and the norm of each tensor,
        [len(tensors)], or [0] without ``per_tensor``.
    """
    if not tensors:
        total = torch.zeros(1, dtype=torch.float32, device=noop_flag.device)
        return total, total.new_zeros(0)
    found = multi_tensor.l2norm(tensors, per_tensor=bool(per_tensor))
    total, norms = found if isinstance(found, tuple) else (found, found.new_empty(0))
    total = total.view(1)
    multi_tensor.scale([total, norms], [total, norms], factor, found_inf=noop_flag)
    return total, norms


def multi_tensor_l2norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: list[Tensors],
    per_tensor_python: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the L2 norm over one list of tensors.

    Args:
        chunk_size: at least 1; has no effect.
        noop_flag: set to 1 if a norm is not finite.
        tensor_lists: one list of float32, float16 or bfloat16 tensors.
        per_tensor_python: True to return the norm of each tensor, too.

    Returns:
        Two float32 tensors: the norm over all tensors, [1], and the norm of each tensor,
        [number of tensors], or [0] without ``per_tensor_python``.

    Raises:
        TypeError: a tensor has a dtype other than float32, float16 and bfloat16.
        ValueError: another number of lists, a chunk_size below 1, or a device does not match.
    """
    (tensors,) = take_lists("multi_tensor_l2norm", chunk_size, tensor_lists, "tensors")
    return _norms(noop_flag, tensors, per_tensor_python)


def multi_tensor_l2norm_mp(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: list[Tensors],
    per_tensor_python: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes L2 norms as ``multi_tensor_l2norm`` does.

    Arguments, result and errors are those of that function; apex's own one leaves the result
    undefined if noop_flag is not 0.
    """
    (tensors,) = take_lists("multi_tensor_l2norm_mp", chunk_size, tensor_lists, "tensors")
    return _norms(noop_flag, tensors, per_tensor_python)


def multi_tensor_l2norm_scale(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: list[Tensors],
    scale: float,
    per_tensor_python: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes out = in * scale and the L2 norms of in; lists are in and out.

    noop_flag becomes 1 if a norm is not finite.

    Returns:
        Two float32 tensors: the norm over all tensors of in, [1], and the norm of each tensor,
        [number of tensors], or [0] without ``per_tensor_python``.
    """
    inputs, outputs = take_lists("multi_tensor_l2norm_scale", chunk_size, tensor_lists, "in out")
    norms = _norms(noop_flag, inputs, per_tensor_python)
    multi_tensor.scale(inputs, outputs, float(scale))
    return norms


def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: list[Tensors],
    inv_scale: torch.Tensor,
    per_tensor_python: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the L2 norms of the tensors times inv_scale; the tensors are not written.

    noop_flag becomes 1 if a norm is not finite.

    Args:
        chunk_size: at least 1; has no effect.
        noop_flag: one int32 element.
        tensor_lists: one list.
        inv_scale: one float32 element.
        per_tensor_python: True to return the norm of each tensor, too.

    Returns:
        Two float32 tensors: the norm over all tensors, [1], and the norm of each tensor,
        [number of tensors], or [0] without ``per_tensor_python``.
    """
    (tensors,) = take_lists("multi_tensor_unscale_l2norm", chunk_size, tensor_lists, "tensors")
    return _norms(noop_flag, tensors, per_tensor_python, inv_scale.abs())


def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: list[Tensors],
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """Steps SGD in place, as ``torch.optim.SGD`` does.

    Args:
        chunk_size: at least 1; has no effect.
        noop_flag: a value other than 0 skips the step.
        tensor_lists: [g, p, momentum buffers], or [g, p, momentum buffers, low-precision copies of
            p, which are written].
        wd, momentum, dampening, lr: numbers; wd is the weight decay.
        nesterov: use Nesterov momentum.
        first_run: overwrite the momentum buffers with the gradients, without reading them.
        wd_after_momentum: decay the weights directly instead of adding the decay to the gradients.
        scale: factor for the gradients.

    Raises:
        TypeError: a tensor has a dtype other than float32, float16 and bfloat16.
        ValueError: another number of lists, a shape or device does not match, or an option is out
            of range.
    """
    lists = take_lists(
        "multi_tensor_sgd", chunk_size, tensor_lists, "g p momentums", "the model's copy of p"
    )
    grads, params, momentums = lists[:3]
    copies = lists[3] if len(lists) > 3 else None
    if not params:
        return
    lr, wd, scale = float(lr), float(wd), float(scale)
    state = _multi_tensor.float32(momentums)
    weights = params
    if wd and wd_after_momentum:
        # p - lr (m + wd p) = (1 - lr wd) p - lr m; in float32, to be rounded once.
        weights = _multi_tensor.float32(params)
        decay = _multi_tensor.scalar(1.0 - lr * wd, noop_flag)
        multi_tensor.scale(weights, weights, _multi_tensor.unless_noop(noop_flag, decay))
        wd = 0.0
    multi_tensor_optim.sgd(
        weights if copies is None else copies, grads, state, lr=lr, momentum=float(momentum),
        dampening=float(dampening), weight_decay=wd, nesterov=bool(nesterov),
        first_step=bool(first_run), masters=None if copies is None else weights,
        inv_scale=None if scale == 1.0 else _multi_tensor.scalar(scale, noop_flag),
        found_inf=noop_flag,
    )  # fmt: skip
    _multi_tensor.write_back(momentums, state)
    _multi_tensor.write_back(params, weights)


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: list[Tensors],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Steps Adam or AdamW in place, as ``torch.optim`` does.

    Args:
        chunk_size: at least 1; has no effect.
        noop_flag: not read.
        tensor_lists: [g, p, m, v].
        lr, beta1, beta2, epsilon, weight_decay: numbers.
        step: number of this update, from 1.
        mode: 0 for Adam, 1 for AdamW.
        bias_correction: 0 or 1.

    Raises:
        TypeError: a tensor has a dtype other than float32, float16 and bfloat16.
        ValueError: another number of lists, a shape or device does not match, or an option is out
            of range.
    """
    adamw = take_mode("multi_tensor_adam", mode)
    grads, params, m, v = take_lists("multi_tensor_adam", chunk_size, tensor_lists, "g p m v")
    m32, v32 = _multi_tensor.float32(m), _multi_tensor.float32(v)
    multi_tensor_optim.adam(
        params, grads, m32, v32, step=step, lr=float(lr), betas=(float(beta1), float(beta2)),
        eps=float(epsilon), weight_decay=float(weight_decay), adamw=adamw,
        bias_correction=bool(bias_correction),
    )  # fmt: skip
    _multi_tensor.write_back(m, m32)
    _multi_tensor.write_back(v, v32)


def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: list[Tensors],
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: torch.Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: torch.Tensor,
) -> None:
    """Steps Adam in place with scalars on the device.

    The arguments and errors are those of ``multi_tensor_adam``, except for:

    Args:
        noop_flag: a value other than 0 skips the step, and nothing is written.
        tensor_lists: [g, p, m, v]; g is multiplied by inv_scale in place.
        lr: one float32 element.
        step: one float32 or int32 element.
        inv_scale: factor for the gradients, one float32 element.
    """
    lists = take_lists("multi_tensor_adam_capturable", chunk_size, tensor_lists, "g p m v")
    _capturable(
        "multi_tensor_adam_capturable", noop_flag, [*lists, None], lr, (beta1, beta2),
        epsilon, step, mode, bias_correction, weight_decay, inv_scale,
    )  # fmt: skip


def multi_tensor_adam_capturable_master(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: list[Tensors],
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: torch.Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: torch.Tensor,
) -> None:
    """Steps Adam as ``multi_tensor_adam_capturable`` does, with float32 master weights.

    The arguments and errors are those of ``multi_tensor_adam_capturable``, except for:

    Args:
        tensor_lists: [g, p, m, v, master weights]; the master weights are stepped, and copied to p,
            rounded.
    """
    lists = take_lists(
        "multi_tensor_adam_capturable_master", chunk_size, tensor_lists, "g p m v master"
    )
    _capturable(
        "multi_tensor_adam_capturable_master", noop_flag, lists, lr, (beta1, beta2),
        epsilon, step, mode, bias_correction, weight_decay, inv_scale,
    )  # fmt: skip


def _capturable(op, noop_flag, lists, lr, betas, eps, step, mode, correction, decay, inv_scale):
    """Steps Adam for function ``op``; lists are g, p, m, v and master weights or None."""
    adamw = take_mode(op, mode)
    grads, params, m, v, masters = lists
    m32, v32 = _multi_tensor.float32(m), _multi_tensor.float32(v)
    multi_tensor_optim.adam(
        params, grads, m32, v32, step=step, lr=lr, betas=(float(betas[0]), float(betas[1])),
        eps=float(eps), weight_decay=float(decay), adamw=adamw, bias_correction=bool(correction),
        masters=masters, inv_scale=inv_scale, found_inf=noop_flag,
    )  # fmt: skip
    _multi_tensor.write_back(m, m32)
    _multi_tensor.write_back(v, v32)
    multi_tensor.scale(grads, grads, _multi_tensor.unless_noop(noop_flag, inv_scale))


@torch.no_grad()
def update_scale_hysteresis(
    current_scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    hysteresis_tracker: torch.Tensor,
    found_inf: torch.Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> torch.Tensor:
    """Updates a loss scale and its counters in place on the device, without a wait of the host.

    The scale is multiplied by ``backoff_factor`` at each step with an infinity from the
    ``hysteresis``-th consecutive one on, and by ``growth_factor`` after ``growth_interval``
    consecutive steps without one.

    Args:
        current_scale: one element, the loss scale; written.
        growth_tracker: one element, number of consecutive steps without an infinity; written.
        hysteresis_tracker: one element, number of steps with an infinity that are left before the
            scale backs off; written.
        found_inf: one element, above 0 if this step had an infinity.

    Returns:
        ``current_scale``.
    """
    is_inf = found_inf > 0
    left = torch.where(is_inf, hysteresis_tracker - 1, hysteresis)
    backs_off = is_inf & (left <= 0)
    successful = growth_tracker + 1
    grows = ~is_inf & (successful == growth_interval)
    grown = current_scale * growth_factor
    kept = torch.where(grows & torch.isfinite(grown), grown, current_scale)
    current_scale.copy_(torch.where(backs_off, current_scale * backoff_factor, kept))
    growth_tracker.copy_(torch.where(is_inf | grows, 0, successful))
    hysteresis_tracker.copy_(left)
    return current_scale


def multi_tensor_adagrad(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: list[Tensors],
    lr: float,
    epsilon: float,
    mode: int,
    weight_decay: float,
) -> None:
    """Steps Adagrad in place, as ``torch.optim.Adagrad`` does with ``lr_decay=0``.

    Args:
        chunk_size: at least 1; has no effect.
        noop_flag: not read.
        tensor_lists: [g, p, h]; h are the sums of squared gradients.
        lr, epsilon, weight_decay: numbers; epsilon is added to the root of h.
        mode: 0 for L2 weight decay, 1 for decoupled weight decay.

    Raises:
        TypeError: a tensor has a dtype other than float32, float16 and bfloat16.
        ValueError: another number of lists, a shape or device does not match, or an option is out
            of range.
    """
    adagrad_w = take_mode("multi_tensor_adagrad", mode)
    grads, params, sums = take_lists("multi_tensor_adagrad", chunk_size, tensor_lists, "g p h")
    multi_tensor_optim.adagrad(
        params, grads, sums, lr=float(lr), eps=float(epsilon), weight_decay=float(weight_decay),
        adagrad_w=adagrad_w,
    )  # fmt: skip


def multi_tensor_novograd(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: list[Tensors],
    grad_norms: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    norm_type: int,
) -> None:
    """Steps NovoGrad (arXiv 1905.11286) in place; lists are g, p and m.

    Args:
        chunk_size: at least 1; has no effect.
        noop_flag: not read.
        tensor_lists: [g, p, m].
        grad_norms: the averaged norm of each gradient, float32 [number of tensors]; written first.
        lr, beta1, beta2, epsilon, weight_decay: numbers; beta2 averages the norms, and epsilon is
            added to them.
        step: number of this update, from 1.
        bias_correction: 0 or 1.
        grad_averaging: 0 to add gradients to m with weight 1 instead of 1 - beta1.
        mode: 0 to average normalised gradients with the decay added, 1 to normalise the average.
        norm_type: 2 for L2 norms, whose squares are averaged, 0 for the largest magnitudes.

    Raises:
        TypeError: a tensor has a dtype other than float32, float16 and bfloat16.
        ValueError: another number of lists, a shape or device does not match, or an option is out
            of range.
    """
    decoupled = take_mode("multi_tensor_novograd", mode)
    if norm_type not in (0, 2):
        raise ValueError(f"multi_tensor_novograd: norm_type must be 0 or 2, got {norm_type!r}")
    grads, params, m = take_lists("multi_tensor_novograd", chunk_size, tensor_lists, "g p m")
    if not params:
        return
    beta2 = float(beta2)
    if norm_type == 2:
        norms = multi_tensor.l2norm(grads, per_tensor=True)[1]
        squares = grad_norms.square().mul_(beta2).add_(norms.square_(), alpha=1 - beta2)
        grad_norms.copy_(squares.sqrt_())
    else:
        grad_norms.mul_(beta2).add_(multi_tensor.amax(grads), alpha=1 - beta2)
    multi_tensor_optim.novograd(
        params, grads, m, grad_norms, step=step, lr=float(lr), betas=(float(beta1), beta2),
        eps=float(epsilon), weight_decay=float(weight_decay), decoupled=decoupled,
        bias_correction=bool(bias_correction), grad_averaging=bool(grad_averaging),
    )  # fmt: skip


def multi_tensor_lars(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: list[Tensors],
    grad_norms: torch.Tensor,
    param_norms: torch.Tensor,
    lr: float,
    trust_coefficient: float,
    epsilon: float,
    weight_decay: float,
    momentum: float,
    dampening: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
    is_skipped: bool,
) -> None:
    """Steps LARS (arXiv 1708.03888) in place.

    Arguments that are not listed are those of ``apex_te.ops.multi_tensor_optim.lars``.

    Args:
        chunk_size: at least 1; has no effect.
        noop_flag: a value other than 0 skips the step.
        tensor_lists: [g, p, m], or [g, p, m, low-precision copies of p, which are written].
        grad_norms, param_norms: norm of each gradient and parameter, float32 [number of tensors].
        epsilon: added to the divisor of the trust ratio.
        dampening, first_run, wd_after_momentum, scale: no effect, as in apex.
        is_skipped: True uses ``lr`` for all tensors, without trust ratios.

    Raises:
        TypeError: a tensor has a dtype other than float32, float16 and bfloat16.
        ValueError: another number of lists, a shape or device does not match, or an option is out
            of range.
    """
    lists = take_lists(
        "multi_tensor_lars", chunk_size, tensor_lists, "g p m", "the model's copy of p"
    )
    grads, params, m = lists[:3]
    copies = lists[3] if len(lists) > 3 else None
    multi_tensor_optim.lars(
        params if copies is None else copies, grads, m, grad_norms, param_norms, lr=float(lr),
        trust_coefficient=float(trust_coefficient), eps=float(epsilon),
        weight_decay=float(weight_decay), momentum=float(momentum), nesterov=bool(nesterov),
        adapt=not is_skipped, masters=None if copies is None else params, found_inf=noop_flag,
    )  # fmt: skip
