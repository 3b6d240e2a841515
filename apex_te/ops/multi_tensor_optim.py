"""Optimizer steps over lists of tensors: Adam / AdamW, SGD and LAMB, each in a few launches.

Parameters and gradients are float32, float16 or bfloat16, in any combination; moments and master
weights are float32. A parameter that has a master weight is not read, only overwritten with the
updated master weight, rounded. Gradients are only read, unless ``unscale_grads`` asks to unscale
them in place. A launch takes up to 624 parameters; empty ones may stand anywhere.

So that a captured graph can be replayed for every step, the values that change between steps may be
tensors of one element on the device: ``lr``, ``step``, ``inv_scale`` and ``found_inf``. A
``found_inf`` that is not zero makes the whole step a no-op; the host does not wait to learn of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..runtime.fp8_copies import Casts
from .binding import bind, checked
from .multi_tensor import Tensors, dense, l2norm, mark_written, workspace

_adam = bind("multi_tensor", "multi_tensor_adam")
_adam_fp8 = bind("multi_tensor", "multi_tensor_adam_fp8")
_adam_block = bind("multi_tensor", "multi_tensor_adam_block")
_kept_scales = bind("multi_tensor", "multi_tensor_kept_scales")
_sgd = bind("multi_tensor", "multi_tensor_sgd")
_lamb = bind("multi_tensor", "multi_tensor_lamb")


def _number_or_tensor(value: float | torch.Tensor) -> tuple[float, torch.Tensor | None]:
    """Returns (number, None) for a number, (0, tensor) for a tensor: two arguments of a kernel."""
    return (0, value) if isinstance(value, torch.Tensor) else (value, None)


def _written(*lists: Tensors) -> None:
    for tensors in lists:
        mark_written(tensors, None)


def _dense_grads(name: str, grads: Tensors, are_written: bool) -> Tensors:
    """Returns the gradients made contiguous; with ``are_written`` refuses expanded ones."""
    read = dense(grads)
    if are_written and read is not grads:
        for i, (grad, copy) in enumerate(zip(grads, read, strict=True)):
            if copy is not grad and 0 in grad.stride():
                raise ValueError(
                    f"multi_tensor_optim.{name}: grads[{i}] must not be expanded where it is "
                    f"unscaled in place, got strides {list(grad.stride())} for shape "
                    f"{list(grad.shape)}"
                )
    return read


def _wrote_grads(given: Tensors, read: Tensors) -> None:
    """Copies unscaled gradients from contiguous copies to the caller's, and tells autograd."""
    if given is not read:
        for grad, copy in zip(given, read, strict=True):
            if copy is not grad:
                grad.copy_(copy)
    _written(given)


@checked
def adam(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    step: int | torch.Tensor,
    lr: float | torch.Tensor,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    adamw: bool = True,
    bias_correction: bool = True,
    maximize: bool = False,
    masters: Tensors | None = None,
    inv_scale: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
    unscale_grads: bool = False,
) -> None:
    """Steps AdamW (decoupled weight decay) or Adam (L2) in place, as ``torch.optim`` does.

    Args:
        params: float32, float16 or bfloat16; with ``masters`` only written, not read.
        grads: of params' shapes; each of any of the three dtypes.
        exp_avgs: float32, of params' shapes.
        exp_avg_sqs: float32, of params' shapes.
        step: the number of this update, 1 for the first: a Python number, or one float32 or int32
            element on the device.
        lr: learning rate: a Python number, or one float32 element on the device.
        betas: decay rates of ``exp_avgs`` and ``exp_avg_sqs``, each in [0, 1).
        eps: added to the denominator.
        weight_decay: coefficient of weight decay.
        adamw: decay the weights directly (AdamW) instead of adding the decay to the gradient (L2).
        bias_correction: divide the averages by 1 - beta**step.
        maximize: follow the gradient up instead of down.
        masters: master weights, float32, of params' shapes; None updates ``params`` directly.
        inv_scale: one float32 element, multiplies every gradient: 1 / loss scale.
        found_inf: one float32 or int32 element; a value other than 0 skips the step.
        unscale_grads: also overwrite the gradients with the unscaled gradients, if ``inv_scale``
            is given and the step is not skipped.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape, device or list length does not match, or an option is out of range.
    """
    if not len(params) and not len(grads):
        return
    masters = [] if masters is None else masters
    rate, rate_tensor = _number_or_tensor(lr)
    count, count_tensor = _number_or_tensor(step)
    read = _dense_grads("adam", grads, unscale_grads and inv_scale is not None)
    _adam(
        params, read, exp_avgs, exp_avg_sqs, masters, rate, *betas, eps, weight_decay,
        count, adamw, bias_correction, maximize, rate_tensor, count_tensor, inv_scale, found_inf,
        unscale_grads,
    )  # fmt: skip
    _written(params, exp_avgs, exp_avg_sqs, masters)
    if unscale_grads and inv_scale is not None:
        _wrote_grads(grads, read)


def adam_with_casts(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    casts: Sequence[Casts],
    *,
    step: int | torch.Tensor,
    lr: float | torch.Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    adamw: bool,
    bias_correction: bool,
    masters: Tensors | None,
    inv_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    unscale_grads: bool,
) -> None:
    """Steps ``adam`` and casts each updated parameter to FP8 in the same pass.

    All ``casts`` have one scale, or all are in blocks by one rule. Parameters are matrices whose
    extents are multiples of 16; all tensors are contiguous and aligned to 16 bytes.
    """
    rate, rate_tensor = _number_or_tensor(lr)
    count, count_tensor = _number_or_tensor(step)
    lists = (params, grads, exp_avgs, exp_avg_sqs, [] if masters is None else masters)
    copies = [cast.rowwise for cast in casts], [cast.columnwise for cast in casts]
    inverses = [cast.scale_inv for cast in casts]
    options = (
        rate, *betas, eps, weight_decay, count, adamw, bias_correction, rate_tensor, count_tensor,
        inv_scale, found_inf, unscale_grads,
    )  # fmt: skip
    rule = casts[0].block_rule
    if rule is None:
        scales, amaxes = [cast.scale for cast in casts], [cast.amax for cast in casts]
        _adam_fp8(*lists, *copies, scales, inverses, amaxes, *options)
    else:
        columnwise = [cast.columnwise_scale_inv for cast in casts]
        _adam_block(*lists, *copies, inverses, columnwise, *rule, *options)
    _written(params, exp_avgs, exp_avg_sqs, lists[-1])
    if unscale_grads and inv_scale is not None:
        _written(grads)


def check_kept_scales(
    scales: Tensors,
    scale_invs: Tensors,
    kept_amaxes: Tensors,
    amaxes: Tensors,
    are_equal: Tensors,
) -> None:
    """Tells whether FP8 data have the scales that are wanted now, and stages their amax values.

    Sets ``are_equal``, int32 ``[1]`` each, to 1 where ``scale_inv`` is the inverse of ``scale``,
    else to 0, and ``amaxes``, unless that is empty, to their maximum with ``kept_amaxes``.
    """
    _kept_scales(scales, scale_invs, kept_amaxes, amaxes, are_equal)


@checked
def sgd(
    params: Tensors,
    grads: Tensors,
    momentums: Tensors | None = None,
    *,
    lr: float | torch.Tensor,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    first_step: bool = False,
    maximize: bool = False,
    masters: Tensors | None = None,
    inv_scale: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
    unscale_grads: bool = False,
) -> None:
    """Steps stochastic gradient descent in place, as ``torch.optim.SGD`` does.

    Args:
        params: float32, float16 or bfloat16; with ``masters`` only written, not read.
        grads: of params' shapes; each of any of the three dtypes.
        momentums: momentum buffers, float32, of params' shapes; needed if ``momentum`` is not 0.
        lr: learning rate: a Python number, or one float32 element on the device.
        momentum: factor of the momentum buffers.
        dampening: the gradient enters the momentum buffers with weight 1 - dampening.
        weight_decay: L2 coefficient.
        nesterov: use Nesterov momentum.
        first_step: overwrite the momentum buffers with the gradient, without reading them.
        maximize: follow the gradient up instead of down.
        masters: master weights, float32, of params' shapes; None updates ``params`` directly.
        inv_scale: one float32 element, multiplies every gradient: 1 / loss scale.
        found_inf: one float32 or int32 element; a value other than 0 skips the step.
        unscale_grads: also overwrite the gradients with the unscaled gradients, if ``inv_scale``
            is given and the step is not skipped.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape, device or list length does not match, or an option is out of range.
    """
    if not len(params) and not len(grads):
        return
    momentums = [] if momentums is None or not momentum else momentums
    masters = [] if masters is None else masters
    rate, rate_tensor = _number_or_tensor(lr)
    read = _dense_grads("sgd", grads, unscale_grads and inv_scale is not None)
    _sgd(
        params, read, momentums, masters, rate, momentum, dampening, weight_decay,
        nesterov, first_step, maximize, rate_tensor, inv_scale, found_inf, unscale_grads,
    )  # fmt: skip
    _written(params, momentums, masters)
    if unscale_grads and inv_scale is not None:
        _wrote_grads(grads, read)


@checked
def lamb(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    step: int | torch.Tensor,
    lr: float | torch.Tensor,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    adamw: bool = True,
    bias_correction: bool = True,
    grad_averaging: bool = True,
    nvlamb: bool = False,
    max_grad_norm: float = 0.0,
    grad_norm: torch.Tensor | None = None,
    masters: Tensors | None = None,
    inv_scale: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
    unscale_grads: bool = False,
) -> None:
    """Steps LAMB (arXiv 1904.00962) in place: Adam's update with a learning rate for each tensor.

    A tensor's learning rate is lr * |param| / |update|. Exceptions: it is lr if one of these norms
    is 0, and for all tensors if ``weight_decay`` is 0 and ``nvlamb`` is False. A step takes three
    launches, and two more if it computes the norm of the gradients.

    Args:
        params, grads, exp_avgs, exp_avg_sqs, step, lr, betas, eps, weight_decay, bias_correction,
        masters, inv_scale, found_inf, unscale_grads: as in ``adam``.
        adamw: add weight decay to the update instead of the gradient.
        grad_averaging: the gradient enters exp_avg with weight 1 - betas[0] instead of 1.
        nvlamb: apply the trust ratio |param| / |update| even if ``weight_decay`` is 0.
        max_grad_norm: global norm to which the gradients, after ``inv_scale``, are clipped; 0 does
            not clip.
        grad_norm: global norm of ``grads`` before ``inv_scale``, one float32 element; None
            computes it if needed.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape, device or list length does not match, or an option is out of range.
    """
    if not len(params) and not len(grads):
        return
    read = _dense_grads("lamb", grads, unscale_grads and inv_scale is not None)
    if max_grad_norm <= 0:
        grad_norm = None
    elif grad_norm is None:
        norm = l2norm(read)
        assert isinstance(norm, torch.Tensor)
        grad_norm = norm
    masters = [] if masters is None else masters
    rate, rate_tensor = _number_or_tensor(lr)
    count, count_tensor = _number_or_tensor(step)
    _lamb(
        params, read, exp_avgs, exp_avg_sqs, masters, rate, *betas, eps, weight_decay, count,
        adamw, bias_correction, grad_averaging, nvlamb, max_grad_norm, grad_norm, rate_tensor,
        count_tensor, inv_scale, found_inf, unscale_grads, workspace(params[0], len(params), 2),
    )  # fmt: skip
    _written(params, exp_avgs, exp_avg_sqs, masters)
    if unscale_grads and inv_scale is not None:
        _wrote_grads(grads, read)


def _wide(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """Returns copies of tensors, float64 ones in float64, others in float32."""
    return [t.clone() if t.dtype is torch.float64 else t.float().clone() for t in tensors]


def reference_adam(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    adamw: bool = True,
    bias_correction: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes ``adam`` in plain PyTorch; returns new (param, exp_avg, exp_avg_sq)."""
    p, g, m, v = _wide(param, grad, exp_avg, exp_avg_sq)
    if adamw:
        p = p * (1 - lr * weight_decay)
    else:
        g = g + weight_decay * p
    m = m.lerp(g, 1 - betas[0])
    v = v * betas[1] + (1 - betas[1]) * g * g
    correction1 = 1 - betas[0] ** step if bias_correction else 1.0
    correction2 = 1 - betas[1] ** step if bias_correction else 1.0
    denominator = v.sqrt() / correction2**0.5 + eps
    p = p - lr / correction1 * m / denominator
    return p.to(param.dtype), m, v


def reference_sgd(
    param: torch.Tensor,
    grad: torch.Tensor,
    buffer: torch.Tensor,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    first_step: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes ``sgd`` in plain PyTorch; returns new (param, momentum buffer)."""
    p, g, m = _wide(param, grad, buffer)
    g = g + weight_decay * p
    if momentum:
        m = g.clone() if first_step else momentum * m + (1 - dampening) * g
        g = g + momentum * m if nesterov else m
    return (p - lr * g).to(param.dtype), m


def reference_lamb(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    adamw: bool = True,
    bias_correction: bool = True,
    grad_averaging: bool = True,
    nvlamb: bool = False,
    clip: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes ``lamb`` for one parameter in plain PyTorch, with the gradient times ``clip``."""
    p, g, m, v = _wide(param, grad, exp_avg, exp_avg_sq)
    g = g * clip
    if not adamw:
        g = g + weight_decay * p
    m = betas[0] * m + (1 - betas[0] if grad_averaging else 1.0) * g
    v = v * betas[1] + (1 - betas[1]) * g * g
    correction1 = 1 - betas[0] ** step if bias_correction else 1.0
    correction2 = 1 - betas[1] ** step if bias_correction else 1.0
    update = (m / correction1) / ((v / correction2).sqrt() + eps)
    if adamw:
        update = update + weight_decay * p
    sizes = torch.linalg.vector_norm(p), torch.linalg.vector_norm(update)
    has_ratio = (weight_decay or nvlamb) and sizes[0] and sizes[1]
    ratio = sizes[0] / sizes[1] if has_ratio else 1.0
    return (p - lr * ratio * update).to(param.dtype), m, v
