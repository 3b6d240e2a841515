"""Flax Linen module of a mixture of experts."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ...runtime.named_arguments import check_count
from ...runtime.op_options import ClampedSwiglu
from .. import fp8_state
from .._partition import axis_of
from ..experts import moe
from .module import Axes, Initializer, TransformerEngineBase, kernel_init_of, placed

__all__ = ["MoEBlock"]

_zeros = nn.initializers.zeros
_STATES = ("fc1", "fc2")  # as PyTorch's module names what has them


class MoEBlock(TransformerEngineBase):
    """Mixture of experts: each token through the gated MLPs that a router chooses.

    Its parameters are gate_kernel [hidden, num_experts], wi [num_experts, hidden, 2 *
    intermediate_size] with the gates first, wo [num_experts, intermediate_size, hidden], and where
    asked for wi_bias, wo_bias and expert_bias, float32 [num_experts]. In a ``jax.shard_map`` over
    ``ep_axis``, all but gate_kernel and expert_bias are those of a device's experts. With delayed
    scaling it has FP8 state for each expert. The numbers of tokens of the experts are sown as
    "tokens_per_expert" in the collection "intermediates".

    Attributes:
        num_experts: number of experts.
        num_experts_per_tok: number of experts of each token.
        intermediate_size: features between the two GEMMs of an expert.
        activation_type, score_function, use_pre_softmax, num_groups, group_topk, scaling_factor,
        aux_loss_coeff, sequence_aux_loss, z_loss_coeff, ep_axis: as in ``te.moe``.
        use_expert_routing_bias: have the parameter expert_bias, whose gradient is 0: after each
            optimizer step replace it by the result of ``te.update_expert_bias``.
        use_ffn_bias: each expert has both biases.
        gate_kernel_axes, wi_kernel_axes, wo_kernel_axes, wi_bias_axes, wo_bias_axes: logical axes
            of the parameters.
        input_axes: logical axes to which the input is constrained; empty does not constrain it.
        kernel_init: initializer of the kernels; None: variance_scaling(1.0, fan_in,
            truncated_normal), for each expert's.
        bias_init, expert_bias_init: initializers of biases.
        dtype: dtype of the parameters; the experts compute in that of the input.
    """

    num_experts: int = 8
    num_experts_per_tok: int = 2
    intermediate_size: int = 2048
    activation_type: str | ClampedSwiglu = "silu"
    score_function: str = "softmax"
    use_pre_softmax: bool = False
    num_groups: int | None = None
    group_topk: int | None = None
    scaling_factor: float | None = None
    use_expert_routing_bias: bool = False
    aux_loss_coeff: float = 0.0
    sequence_aux_loss: bool = False
    z_loss_coeff: float = 0.0
    ep_axis: str | None = None
    gate_kernel_axes: Axes = ()
    wi_kernel_axes: Axes = ("exp", "embed", "mlp")
    wo_kernel_axes: Axes = ("exp", "mlp", "embed")
    wi_bias_axes: Axes = ("exp", "mlp")
    wo_bias_axes: Axes = ("exp", "embed")
    input_axes: Axes = ()
    dtype: Any = jnp.float32
    kernel_init: Initializer | None = None
    bias_init: Initializer = _zeros
    expert_bias_init: Initializer = _zeros
    use_ffn_bias: bool = False

    @nn.compact
    def __call__(self, inputs: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Returns the output, and the sum of the losses that are asked for, or None.

        Args:
            inputs: [..., hidden].
        """
        x = placed(self._input(inputs), self.input_axes or None)
        for name in ("num_experts", "num_experts_per_tok", "intermediate_size"):
            check_count(type(self).__name__, name, getattr(self, name))
        hidden, width, local = x.shape[-1], self.intermediate_size, self._local_experts()
        gate = self._parameter(
            "gate_kernel", kernel_init_of(self.kernel_init), (hidden, self.num_experts),
            self.gate_kernel_axes,
        )  # fmt: skip
        wi = self._parameter("wi", self._each(2), (local, hidden, 2 * width), self.wi_kernel_axes)
        wo = self._parameter("wo", self._each(1), (local, width, hidden), self.wo_kernel_axes)
        biases = [None, None]
        if self.use_ffn_bias:
            biases = [
                self._parameter("wi_bias", self.bias_init, (local, 2 * width), self.wi_bias_axes),
                self._parameter("wo_bias", self.bias_init, (local, hidden), self.wo_bias_axes),
            ]
        expert_bias = None
        if self.use_expert_routing_bias:
            init = self.expert_bias_init
            expert_bias = self.param("expert_bias", init, (self.num_experts,), jnp.float32)
        wi_bias, wo_bias = (None if p is None else p.astype(x.dtype) for p in biases)
        made = moe(
            x, gate, wi.astype(x.dtype), wo.astype(x.dtype), wi_bias, wo_bias, expert_bias,
            num_experts_per_tok=self.num_experts_per_tok, activation_type=self.activation_type,
            score_function=self.score_function, use_pre_softmax=self.use_pre_softmax,
            num_groups=self.num_groups, group_topk=self.group_topk,
            scaling_factor=self.scaling_factor,
            aux_loss_coeff=self.aux_loss_coeff, sequence_aux_loss=self.sequence_aux_loss,
            z_loss_coeff=self.z_loss_coeff, ep_axis=self.ep_axis, states=self._states(local),
        )  # fmt: skip
        self.sow("intermediates", "tokens_per_expert", made.tokens_per_expert)
        losses = [each for each in (made.aux_loss, made.z_loss) if each is not None]
        return made.output, sum(losses[1:], losses[0]) if losses else None

    def _local_experts(self) -> int:
        """Returns the number of experts whose parameters the module has."""
        if self.ep_axis is None:
            return self.num_experts
        size, is_manual = axis_of(type(self).__name__, "ep_axis", self.ep_axis)
        if self.num_experts % size:
            raise ValueError(
                f"{type(self).__name__}: num_experts must be a multiple of the {size} devices of"
                f" ep_axis, got {self.num_experts}"
            )
        return self.num_experts // size if is_manual else self.num_experts

    def _each(self, parts: int) -> Initializer:
        """Returns an initializer that draws each expert's kernels, and each of their parts."""

        def init(key: Any, shape: Any, dtype: Any) -> jax.Array:
            count, inner, outer = shape
            keys = jax.random.split(key, count * parts)
            one = (inner, outer // parts)
            drawn = jax.vmap(lambda key: kernel_init_of(self.kernel_init)(key, one, dtype))(keys)
            return drawn.reshape(count, parts, *one).swapaxes(1, 2).reshape(shape)

        return init

    def _states(self, experts: int) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Returns the FP8 states of both GEMMs of the experts, empty without delayed scaling."""
        recipe, owner = self._delayed(_STATES[0]), type(self).__name__
        if recipe is None:
            return {}, {}
        collection = fp8_state.FP8_COLLECTION_NAME
        made = fp8_state.initial(recipe, experts)
        one, two = (
            fp8_state.checked(owner, self.variable(collection, name, lambda: made).value, made)
            for name in _STATES
        )
        return one, two
