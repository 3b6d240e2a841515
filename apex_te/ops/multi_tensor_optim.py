"""Optimizer steps over lists of tensors: Adam, SGD, LAMB, Adagrad, NovoGrad and LARS.

Each takes a few launches. Parameters and gradients are float32, float16 or bfloat16, in any
combination; moments and master weights are float32, and those of ``adagrad``, ``novograd`` and
``lars`` may have 16 bits. A parameter that has a master weight is not read, only overwritten with
the updated master weight, rounded. Gradients are only read, unless ``unscale_grads`` asks to
unscale them in place. A launch takes up to 624 parameters; empty ones may stand anywhere.

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
_adam_halves = bind("multi_tensor", "multi_tensor_adam_halves")
_sgd = bind("multi_tensor", "multi_tensor_sgd")
_lamb = bind("multi_tensor", "multi_tensor_lamb")
_adagrad = bind("multi_tensor", "multi_tensor_adagrad")
_novograd = bind("multi_tensor", "multi_tensor_novograd")
_lars = bind("multi_tensor", "multi_tensor_lars")
_descend = bind("multi_tensor", "multi_tensor_descend")
_lamb_update = bind("multi_tensor", "multi_tensor_lamb_update")


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
                    f"multi_tensor_optim.{name}: grads[{i}] must not be expanded if it is unscaled "
                    f"in place, got strides {list(grad.stride())} for shape "
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
    eps_inside_sqrt: bool = False,
    masters: Tensors | None = None,
    inv_scale: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
    unscale_grads: bool = False,
) -> None:
    """Performs one AdamW or Adam step in place, as ``torch.optim`` does.

    Args:
        params: list of float32, float16 or bfloat16 tensors; with ``masters`` only written, not
            read.
        grads: tensors in params' shapes; each in any of the three dtypes.
        exp_avgs, exp_avg_sqs: float32 tensors in params' shapes, updated.
        step: the number of this update, 1 for the first: a Python number, or one float32 or int32
            element on the device.
        lr: learning rate: a Python number, or one float32 element on the device.
        betas: decay rates of ``exp_avgs`` and ``exp_avg_sqs``, each in [0, 1).
        eps: added to the denominator.
        weight_decay: coefficient of weight decay.
        adamw: decay the weights directly (AdamW) instead of adding the decay to the gradient
            (Adam).
        bias_correction: divide the averages by 1 - beta**step.
        maximize: maximise instead of minimise.
        eps_inside_sqrt: add ``eps`` to the second moment, before its bias correction and root.
        masters: master weights, float32, of params' shapes; None updates ``params`` directly. For
            bfloat16 ``params`` they may be int16: the difference of a float32 weight's bits and
            those of the parameter, which is that weight rounded to nearest, ties away from zero.
        inv_scale: one float32 element, multiplies every gradient: 1 / loss scale.
        found_inf: one float32 or int32 element; a value other than 0 skips the step.
        unscale_grads: also overwrite the gradients with the unscaled gradients, if ``inv_scale`` is
            given and the step is not skipped.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape, device or list length does not match, or an option is out of range.
    """
    if not len(params) and not len(grads):
        return
    masters = [] if masters is None else masters
    rate, rate_tensor = _number_or_tensor(lr)
    count, count_tensor = _number_or_tensor(step)
    call, weights = _adam, masters
    if len(masters) and masters[0].dtype is torch.int16:
        call, weights = _adam_halves, [each.view(torch.bfloat16) for each in masters]
    read = _dense_grads("adam", grads, unscale_grads and inv_scale is not None)
    call(
        params, read, exp_avgs, exp_avg_sqs, weights, rate, *betas, eps, weight_decay, count,
        adamw, bias_correction, maximize, eps_inside_sqrt, rate_tensor, count_tensor, inv_scale,
        found_inf, unscale_grads,
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
    """Checks whether FP8 data have the scales that are wanted now, and stages their amax values.

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
    """Performs one step of stochastic gradient descent in place, as ``torch.optim.SGD`` does.

    Args:
        params: list of float32, float16 or bfloat16 tensors; with ``masters`` only written, not
            read.
        grads: tensors in params' shapes; each in any of the three dtypes.
        momentums: momentum buffers, float32, in params' shapes; required if ``momentum`` is not 0.
        lr: learning rate: a Python number, or one float32 element on the device.
        momentum: factor of the momentum buffers.
        dampening: the gradient enters the momentum buffers with weight 1 - dampening.
        weight_decay: L2 coefficient.
        nesterov: use Nesterov momentum.
        first_step: overwrite the momentum buffers with the gradient, without reading them.
        maximize: maximise instead of minimise.
        masters: master weights, float32, in params' shapes; None updates ``params`` directly.
        inv_scale: one float32 element, multiplies every gradient: 1 / loss scale.
        found_inf: one float32 or int32 element; a value other than 0 skips the step.
        unscale_grads: also overwrite the gradients with the unscaled gradients, if ``inv_scale`` is
            given and the step is not skipped.

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
    """Performs one LAMB step (arXiv 1904.00962) in place: Adam with a trust ratio for each tensor.

    A tensor's learning rate is lr * |param| / |update|. Exceptions: it is lr if one of these norms
    is 0, and for all tensors if ``weight_decay`` is 0 and ``nvlamb`` is False. A step takes three
    launches, and two more if it computes the norm of the gradients.

    Args:
        params: list of float32, float16 or bfloat16 tensors; with ``masters`` only written, not
            read.
        grads: tensors in params' shapes; each in any of the three dtypes.
        exp_avgs, exp_avg_sqs: float32 tensors in params' shapes, updated.
        step: the number of this update, 1 for the first: a Python number, or one float32 or int32
            element on the device.
        lr: learning rate: a Python number, or one float32 element on the device.
        betas: decay rates of ``exp_avgs`` and ``exp_avg_sqs``, each in [0, 1).
        eps: added to the denominator.
        weight_decay: coefficient of weight decay.
        bias_correction: divide the averages by 1 - beta**step.
        masters: master weights, float32, of params' shapes; None updates ``params`` directly.
        inv_scale: one float32 element, multiplies every gradient: 1 / loss scale.
        found_inf: one float32 or int32 element; a value other than 0 skips the step.
        unscale_grads: also overwrite the gradients with the unscaled gradients, if ``inv_scale`` is
            given and the step is not skipped.
        adamw: add weight decay to the update instead of the gradient.
        grad_averaging: the gradient enters exp_avg with weight 1 - betas[0] instead of 1.
        nvlamb: apply the trust ratio |param| / |update| even if ``weight_decay`` is 0.
        max_grad_norm: global norm to which the gradients, after ``inv_scale``, are clipped; 0 does
            not clip.
        grad_norm: global norm of ``grads`` before ``inv_scale``, one float32 element; None computes
            it if needed.

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


@checked
def adagrad(
    params: Tensors,
    grads: Tensors,
    sums: Tensors,
    *,
    lr: float,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    adagrad_w: bool = False,
    found_inf: torch.Tensor | None = None,
) -> None:
    """Performs one Adagrad step in place, as ``torch.optim.Adagrad`` does with ``lr_decay=0``.

    Args:
        params: list of float32, float16 or bfloat16 tensors.
        grads: tensors in params' shapes; each in any of the three dtypes.
        sums: sums of squared gradients, in params' shapes; each in any of the three dtypes.
        lr: learning rate.
        eps: added to the root of ``sums``.
        weight_decay: coefficient of weight decay.
        adagrad_w: decay the weights directly instead of adding the decay to the gradient.
        found_inf: one float32 or int32 element; a value other than 0 skips the step.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape, device or list length does not match, or an option is out of range.
    """
    if not len(params) and not len(grads):
        return
    _adagrad(params, dense(grads), sums, lr, eps, weight_decay, adagrad_w, found_inf)
    _written(params, sums)


@checked
def novograd(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    norms: torch.Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.95, 0.98),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = True,
    bias_correction: bool = True,
    grad_averaging: bool = True,
    found_inf: torch.Tensor | None = None,
) -> None:
    """Performs one NovoGrad step (arXiv 1905.11286) in place: Adam with a second moment per tensor.

    Args:
        params: list of float32, float16 or bfloat16 tensors.
        grads: tensors in params' shapes; each in any of the three dtypes.
        exp_avgs: first moments, in params' shapes; each in any of the three dtypes.
        norms: [len(params)] float32, the running average of each gradient's norm, which the caller
            has updated; only read.
        step: the number of this update, 1 for the first.
        lr: learning rate.
        betas: decay rates of ``exp_avgs`` and of the squared ``norms``, each in [0, 1).
        eps: added to the norm.
        weight_decay: coefficient of weight decay.
        decoupled: divide ``exp_avgs`` by the norm and decay the weights directly, instead of
            averaging normalised gradients with the decay added.
        bias_correction: divide ``exp_avgs`` by 1 - beta1**step, norms by sqrt(1 - beta2**step).
        grad_averaging: the gradient enters exp_avg with weight 1 - betas[0] instead of 1.
        found_inf: one float32 or int32 element; a value other than 0 skips the step.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape, device or list length does not match, or an option is out of range.
    """
    if not len(params) and not len(grads):
        return
    _novograd(
        params, dense(grads), exp_avgs, norms.contiguous(), lr, *betas, eps, weight_decay, step,
        decoupled, bias_correction, grad_averaging, found_inf,
    )  # fmt: skip
    _written(params, exp_avgs)


@checked
def lars(
    params: Tensors,
    grads: Tensors,
    momentums: Tensors,
    grad_norms: torch.Tensor,
    param_norms: torch.Tensor,
    *,
    lr: float,
    trust_coefficient: float = 0.001,
    eps: float = 0.0,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    nesterov: bool = False,
    adapt: bool = True,
    masters: Tensors | None = None,
    found_inf: torch.Tensor | None = None,
) -> None:
    """Performs one LARS step (arXiv 1708.03888) in place: SGD with a learning rate for each tensor.

    A tensor's learning rate is lr * trust_coefficient * |param| / (|grad| + weight_decay * |param|
    + eps), and lr if one of these norms is 0. The momentum buffers hold changes of the parameters.

    Args:
        params: list of float32, float16 or bfloat16 tensors; with ``masters`` only written, not
            read.
        grads: tensors in params' shapes; each in any of the three dtypes.
        momentums: momentum buffers, in params' shapes; each in any of the three dtypes.
        grad_norms: [len(params)] float32, the norm of each gradient.
        param_norms: [len(params)] float32, the norm of each parameter.
        lr: learning rate.
        trust_coefficient: factor of the ratio |param| / |grad|.
        eps: added to the divisor.
        weight_decay: L2 coefficient.
        momentum: factor of the momentum buffers.
        nesterov: use Nesterov momentum.
        adapt: False uses ``lr`` for all tensors.
        masters: master weights, float32, in params' shapes; None updates ``params`` directly.
        found_inf: one float32 or int32 element; a value other than 0 skips the step.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape, device or list length does not match, or an option is out of range.
    """
    if not len(params) and not len(grads):
        return
    masters = [] if masters is None else masters
    _lars(
        params, dense(grads), momentums, masters, grad_norms.contiguous(),
        param_norms.contiguous(), lr, trust_coefficient, eps, weight_decay, momentum, nesterov,
        adapt, found_inf,
    )  # fmt: skip
    _written(params, momentums, masters)


def descend(
    params: Tensors,
    updates: Tensors,
    rates: torch.Tensor,
    *,
    masters: Tensors | None = None,
    found_inf: torch.Tensor | None = None,
) -> None:
    """Subtracts ``rates[i]``, float32 [len(params)], times each update from its parameter."""
    masters = [] if masters is None else masters
    _descend(params, updates, masters, rates, found_inf)
    _written(params, masters)


def lamb_update(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    updates: Tensors,
    *,
    beta1s: torch.Tensor,
    beta2s: torch.Tensor,
    eps: torch.Tensor,
    weight_decays: torch.Tensor,
    bias_corrections: torch.Tensor,
    step: torch.Tensor,
    factor: torch.Tensor,
    adamw: bool = True,
    found_inf: torch.Tensor | None = None,
) -> None:
    """Updates LAMB's moments and writes its updates before the trust ratio.

    Options are [len(params)] on the device, float32 but for the int32 ``bias_corrections``;
    ``step`` is one int32 element, ``factor`` of the gradients one float32 element.
    """
    _lamb_update(
        params, grads, exp_avgs, exp_avg_sqs, updates, beta1s, beta2s, eps, weight_decays,
        bias_corrections, adamw, step, factor, found_inf,
    )  # fmt: skip
    _written(exp_avgs, exp_avg_sqs, updates)


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


def reference_adagrad(
    param: torch.Tensor,
    grad: torch.Tensor,
    total: torch.Tensor,
    *,
    lr: float,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    adagrad_w: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes ``adagrad`` in plain PyTorch; returns new (param, sum of squares)."""
    p, g, h = _wide(param, grad, total)
    if not adagrad_w:
        g = g + weight_decay * p
    h = h + g * g
    update = g / (h.sqrt() + eps)
    if adagrad_w:
        update = update + weight_decay * p
    return (p - lr * update).to(param.dtype), h.to(total.dtype)


def reference_novograd(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    norm: float,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.95, 0.98),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = True,
    bias_correction: bool = True,
    grad_averaging: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes ``novograd`` for one parameter in plain PyTorch; returns new (param, exp_avg)."""
    p, g, m = _wide(param, grad, exp_avg)
    correction1, correction2 = (1 - b**step if bias_correction else 1.0 for b in betas)
    divisor = norm / correction2**0.5 + eps
    if not decoupled:
        g = g / divisor + weight_decay * p
    m = betas[0] * m + (1 - betas[0] if grad_averaging else 1.0) * g
    update = m / correction1
    if decoupled:
        update = update / divisor + weight_decay * p
    return (p - lr * update).to(param.dtype), m.to(exp_avg.dtype)


def reference_lars(
    param: torch.Tensor,
    grad: torch.Tensor,
    buffer: torch.Tensor,
    grad_norm: float,
    param_norm: float,
    *,
    lr: float,
    trust_coefficient: float = 0.001,
    eps: float = 0.0,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    nesterov: bool = False,
    adapt: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes ``lars`` for one parameter in plain PyTorch; returns new (param, momentum)."""
    p, g, m = _wide(param, grad, buffer)
    if adapt and grad_norm > 0 and param_norm > 0:
        lr = lr * trust_coefficient * param_norm / (grad_norm + param_norm * weight_decay + eps)
    change = lr * (g + weight_decay * p)
    m = momentum * m - change
    p = p + (momentum * m - change if nesterov else m)
    return p.to(param.dtype), m.to(buffer.dtype)
