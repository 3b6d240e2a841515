"""MoELayer: a mixture of experts, each token through the few MLPs that a router chooses."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed
from torch._compile import _disable_dynamo

from ..comm.collectives import world_size
from ..comm.exchange_parts import run_in_chunks
from ..comm.expert_parallel import EXCHANGES, Dispatch, TokenDispatcher
from ..comm.groups import check_process_group
from ..comm.row_exchange import wire_recipe
from ..recipe import BlockScaling
from ..router import DenseRouting
from ..runtime.named_arguments import check_count, did_you_mean, named_arguments
from ..runtime.router_options import check_choice
from ._core.arguments import (
    VAGUE,
    autocast_dtype,
    checked_number,
    explain,
    params_dtype_of,
)
from ._core.fused_casts import activation_of, is_gated
from ._core.gemm import cast_to
from ._core.parallel import CompositeModule, GroupHolder
from .attention.context_parallel.ranks import ContextRanks
from .grouped.experts import run_experts, run_ordered
from .grouped.linear import GroupedLinear
from .grouped.on_device import LARGEST
from .grouped.parts import in_parts
from .moe_router import MoERouter
from .moe_shared_expert import SharedExpert

__all__ = ["MoELayer"]

_NAME = "MoELayer"
_POLICIES = ("probs", "position")
_ROUTER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_Init = Callable[[torch.Tensor], Any] | None


class MoELayer(CompositeModule):
    """Mixture of experts: ``sum(prob * expert(x))`` over the ``top_k`` experts of each token.

    An expert is ``act(x @ fc1.T + b1) @ fc2.T + b2``, in FP8 inside an enabled ``fp8_autocast``
    region. On one rank the host does not wait for the GPU, and calls can be captured in a CUDA
    graph, except with MXFP8, HiF8 and FP8 with sizes that are not multiples of 16. The router never
    runs in FP8, because rounding would change the choice of experts. The choice is deterministic,
    so that activation checkpoints recompute the same one. With FSDP2, shard the layer as a whole:
    hooks of ``fc1`` or ``fc2`` prevent fusion of their ops. Inside ``fp8_model_init`` the weights
    of experts and shared expert are held in FP8, the router's is not.

    Args:
        hidden_size: features of the input and of the output.
        ffn_hidden_size: features between the two GEMMs of an expert; a gated activation makes FC1
            twice as wide.
        num_experts: number of experts over all ranks, at most 1023.
        top_k: number of experts of each token.
        activation, activation_params: as in ``LayerNormMLP``.
        bias: experts have biases in both GEMMs.
        score_function, use_pre_softmax, num_groups, group_topk, scaling_factor: as in
            ``apex_te.router.topk_router``.
        expert_bias: add a bias to the scores for the choice only, to balance the experts without a
            loss; not with ``"softmax"``. Call ``update_expert_bias`` after each optimizer step.
        bias_update_rate: step size of ``update_expert_bias``.
        aux_loss_coeff: coefficient of the load-balance loss; 0 disables it.
        sequence_aux_loss: compute the load-balance loss per sequence and average it, instead of
            over all tokens. The input is then ``[..., sequence, hidden_size]``.
        sequence_first: the input of ``sequence_aux_loss`` is ``[sequence, ..., hidden_size]``.
        z_loss_coeff: coefficient of the router z-loss; 0 disables it.
        capacity_factor: each expert drops tokens beyond ``tokens * top_k / num_experts`` times
            this, rounded up; None drops none. A dropped token gets nothing from that expert. Each
            rank has its own capacity, for its own tokens.
        token_drop_policy: ``"probs"`` drops the tokens with the smallest probabilities,
            ``"position"`` the last tokens.
        shared_expert_ffn_hidden_size: FFN size of a shared expert without biases, an MLP whose
            output for every token is added; None has no shared expert.
        shared_expert_gate: multiply the shared expert's output by ``sigmoid(x @ gate_weight.T)``.
        router_dtype: dtype in which the router logits are computed.
        init_method, output_layer_init_method: initialise the weights of router and FC1, and of FC2;
            default N(0, 0.023^2).
        expert_group: process group over which the experts are distributed: rank ``r`` has
            ``num_experts / ranks`` experts, starting at ``r * num_experts / ranks``. None keeps all
            experts on this rank. If all ranks have the same random state, router and shared expert
            are initialised equally and experts differently.
        exchange, wire: as in ``apex_te.distributed.TokenDispatcher``; only with several ranks.
        exchange_chunks: number of chunks of the token exchange, which overlaps with the experts'
            GEMMs in forward and backward. "all_to_all" chunks the experts of a rank, with bitwise
            identical results. "all_gather" chunks the tokens: ``"tensorwise"`` then computes scales
            per chunk, and weight gradients other than ``main_grad`` are rounded per chunk. Under
            ``torch.compile`` there is one chunk.
        fuse_wgrad_accumulation, params_dtype, dtype, delay_wgrad_compute, name, device: as in
            ``Linear``, for experts and shared expert. ``main_grad`` of the experts' weights is
            ``[experts, out, in]``. The router's weight gets ``.grad``.

    Attributes:
        aux_loss, z_loss: float32 scalars, the losses of the last forward in training mode, times
            their coefficients and detached; None with coefficient 0 and in evaluation mode.
        tokens_per_expert: int32 ``[num_experts]``, the number of this rank's tokens that chose each
            expert in the last forward, before dropping; None before the first.
        loss_scale: float, or tensor of one element on the layer's device, that multiplies the
            gradients of the losses; default 1.

    Backward adds the gradients of both losses; do not add them to the training loss. They are
    losses of one call on one rank. With ``n`` microbatches whose losses are averaged, set
    ``loss_scale`` to ``1 / n``; with a ``GradScaler``, multiply it by the scaler's scale. Compiled
    code recompiles for another float, but not for a changed tensor.

    Its parameters are ``router.weight`` ``[num_experts, hidden]``, ``fc1.weight`` ``[experts, ffn,
    hidden]`` (gated: ``[experts, 2 ffn, hidden]``, gate first), ``fc1.bias``, ``fc2.weight``
    ``[experts, hidden, ffn]``, ``fc2.bias``, ``shared_expert.fc1.weight``,
    ``shared_expert.fc2.weight``, ``shared_expert.gate_weight`` ``[1, hidden]``; ``experts`` counts
    those of this rank. The buffer ``router.expert_bias`` is float32 ``[num_experts]`` even if the
    module is cast. State dicts with a key per expert, ``fc1.weight0`` .., can be loaded, too. With
    several ranks the experts' parameters have the attribute ``allreduce=False``.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a number is out of range, or arguments exclude each other.
        NotImplementedError: there are more than 1023 experts.
    """

    @named_arguments()
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_experts: int,
        top_k: int = 2,
        *,
        activation: str = "swiglu",
        activation_params: dict[str, float] | None = None,
        bias: bool = False,
        score_function: str = "softmax",
        use_pre_softmax: bool = False,
        num_groups: int | None = None,
        group_topk: int | None = None,
        scaling_factor: float | None = None,
        expert_bias: bool = False,
        bias_update_rate: float = 1e-3,
        aux_loss_coeff: float = 0.0,
        sequence_aux_loss: bool = False,
        sequence_first: bool = False,
        z_loss_coeff: float = 0.0,
        capacity_factor: float | None = None,
        token_drop_policy: str = "probs",
        shared_expert_ffn_hidden_size: int | None = None,
        shared_expert_gate: bool = False,
        router_dtype: torch.dtype = torch.float32,
        init_method: _Init = None,
        output_layer_init_method: _Init = None,
        expert_group: Any = None,
        exchange: str = "all_to_all",
        wire: BlockScaling | str | None = None,
        exchange_chunks: int = 1,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        delay_wgrad_compute: bool = False,
        name: str | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        wanted = params_dtype_of(_NAME, params_dtype, dtype)
        sizes = {
            "hidden_size": hidden_size, "ffn_hidden_size": ffn_hidden_size,
            "num_experts": num_experts, "top_k": top_k, "exchange_chunks": exchange_chunks,
        }  # fmt: skip
        if shared_expert_ffn_hidden_size is not None:
            sizes["shared_expert_ffn_hidden_size"] = shared_expert_ffn_hidden_size
        elif shared_expert_gate:
            raise ValueError(
                f"{_NAME}: shared_expert_gate must be False without "
                "shared_expert_ffn_hidden_size, got True"
            )
        for key, size in sizes.items():
            check_count(_NAME, key, size)
        if num_experts > LARGEST:
            raise NotImplementedError(
                f"{_NAME}: num_experts must be at most {LARGEST}, got {num_experts}"
            )
        logits = torch.empty(0, num_experts, device="meta")
        check_choice("router", logits, top_k, score_function, num_groups, group_topk)
        if expert_bias and score_function == "softmax":
            raise ValueError(
                f"{_NAME}: expert_bias must be False with score_function 'softmax', got True"
            )
        if token_drop_policy not in _POLICIES:
            raise ValueError(
                f"{_NAME}: token_drop_policy must be 'probs' or 'position', "
                f"got {token_drop_policy!r}" + did_you_mean(token_drop_policy, _POLICIES)
            )
        if exchange not in EXCHANGES:
            raise ValueError(
                f"{_NAME}: exchange must be one of {', '.join(EXCHANGES)}, got {exchange!r}"
                + did_you_mean(exchange, EXCHANGES)
            )
        if router_dtype not in _ROUTER_DTYPES:
            raise TypeError(
                f"{_NAME}: router_dtype must be torch.float32, torch.bfloat16 or torch.float16, "
                f"got {router_dtype}"
            )
        for key, value, above in (
            ("bias_update_rate", bias_update_rate, False),
            ("aux_loss_coeff", aux_loss_coeff, False),
            ("z_loss_coeff", z_loss_coeff, False),
            ("scaling_factor", scaling_factor, True),
            ("capacity_factor", capacity_factor, True),
        ):
            _check_factor(key, value, above)
        check_process_group(_NAME, "expert_group", expert_group)
        super().__init__()
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.top_k = top_k
        self.activation = activation
        self.sequence_aux_loss = sequence_aux_loss
        self.exchange, self.wire = exchange, wire_recipe(_NAME, wire)
        self.exchange_chunks = exchange_chunks
        self.expert_group = expert_group
        self.expert_ranks = 1 if expert_group is None else world_size(expert_group)
        self._function = activation_of(_NAME, activation, activation_params)
        self._dispatcher: TokenDispatcher | None = None
        local = num_experts if self.expert_ranks == 1 else self._dispatch_with().local_experts
        if self.expert_ranks > 1 and exchange == "all_to_all" and exchange_chunks > local:
            raise ValueError(
                f"{_NAME}: exchange_chunks must be at most the {local} experts of a rank with "
                f"exchange 'all_to_all', got {exchange_chunks}"
            )
        inits = (init_method, output_layer_init_method)
        self.router = MoERouter(
            hidden_size,
            num_experts,
            top_k,
            {
                "score_function": score_function,
                "use_pre_softmax": use_pre_softmax,
                "num_groups": num_groups,
                "group_topk": group_topk,
                "scaling_factor": scaling_factor,
            },
            expert_bias=expert_bias,
            bias_update_rate=bias_update_rate,
            aux_loss_coeff=aux_loss_coeff,
            sequence_first=sequence_first,
            z_loss_coeff=z_loss_coeff,
            capacity_factor=capacity_factor,
            token_drop_policy=token_drop_policy,
            router_dtype=router_dtype,
            init_method=init_method,
            dtype=wanted,
            device=device,
        )
        options: dict[str, Any] = {
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "delay_wgrad_compute": delay_wgrad_compute,
        }

        def named(key: str) -> str:
            return f"{name}.{key}" if name else key

        def experts(key: str, inner: int, outer: int, init: _Init) -> GroupedLinear:
            return GroupedLinear(
                local, inner, outer, bias, single_parameter=True, init_method=init,
                params_dtype=wanted, device=device, name=named(key), **options,
            )  # fmt: skip

        width = ffn_hidden_size * (2 if is_gated(self._function) else 1)
        with self._own_draws():
            self.fc1 = experts("fc1", hidden_size, width, inits[0])
            self.fc2 = experts("fc2", ffn_hidden_size, hidden_size, inits[1])
        self.shared_expert: SharedExpert | None = None
        if shared_expert_ffn_hidden_size is not None:
            self.shared_expert = SharedExpert(
                hidden_size, shared_expert_ffn_hidden_size, self._function, shared_expert_gate,
                inits, wanted, device, named("shared_expert"), bias=False, **options,
            )  # fmt: skip
        self._tag_experts()

    def reset_parameters(self) -> None:
        """Re-initialises all parameters in place, and sets the expert bias to 0.

        Parameters on the meta device are first allocated on PyTorch's default device, or on the
        current GPU if that is the CPU.
        """
        self.router.reset_parameters()
        with self._own_draws():
            self.fc1.reset_parameters()
            self.fc2.reset_parameters()
        if self.shared_expert is not None:
            self.shared_expert.reset_parameters()
        self._tag_experts()

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, num_experts={self.num_experts}, "
            f"top_k={self.top_k}, activation={self.activation}"
        )

    @property
    def aux_loss(self) -> torch.Tensor | None:
        """Returns the load-balance loss of the last forward, a detached scalar with coefficient.

        None before the first forward, and if that forward computed none, as in evaluation or
        without a coefficient.
        """
        return self.router.aux_loss

    @property
    def z_loss(self) -> torch.Tensor | None:
        """Returns the router z-loss of the last forward, a detached scalar with coefficient.

        None before the first forward, and if that forward computed none, as in evaluation or
        without a coefficient.
        """
        return self.router.z_loss

    @property
    def tokens_per_expert(self) -> torch.Tensor | None:
        """Returns the tokens of each expert in the last forward, int32 [num_experts].

        None before the first forward.
        """
        return self.router.tokens_per_expert

    @property
    def loss_scale(self) -> float | torch.Tensor:
        """Returns the factor of the losses' gradients."""
        return self.router.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float | torch.Tensor) -> None:
        if not isinstance(value, torch.Tensor):
            value = checked_number(_NAME, "loss_scale", value)
        elif value.numel() != 1:
            raise ValueError(
                f"{_NAME}: loss_scale must have one element, got shape {list(value.shape)}"
            )
        self.router.loss_scale = value

    def set_context_parallel_group(self, cp_group: Any) -> None:
        """Sets the ranks over which sequences are split; can be called at any time.

        The load-balance loss then counts the tokens of all these ranks, which must have equally
        many; its mean over the ranks is the loss of whole sequences. Nothing else depends on other
        tokens.

        Args:
            cp_group: process group, or ``DeviceMesh`` with one dimension; None for one rank; or a
                list of two groups, as in ``DotProductAttention.set_context_parallel_group``.

        Raises:
            TypeError: ``cp_group`` has another type than those above.
            ValueError: ``cp_group`` has more than two groups.
        """
        nested = isinstance(cp_group, (list, tuple))
        self.router.context_ranks = ContextRanks(
            _NAME, cp_group, comm_type="a2a+p2p" if nested else None
        )

    def forward(
        self, hidden_states: torch.Tensor, is_first_microbatch: bool | None = None
    ) -> torch.Tensor:
        """Routes each token to its experts and returns the weighted sum of their outputs.

        Args:
            hidden_states: [..., hidden_size] in the dtype of the parameters: fp32, fp16 or bf16.
                Under ``torch.autocast`` it may have any of these.
            is_first_microbatch: True caches the FP8 weights, False reuses them, None casts them in
                each call.

        Returns:
            A tensor in the shape and dtype of ``hidden_states``; under ``torch.autocast`` it has
            autocast's dtype.

        Raises:
            TypeError: ``hidden_states`` has another dtype than those above.
            ValueError: the last dimension is not ``hidden_size``, or with ``sequence_aux_loss``
                there is only one dimension.
            NotImplementedError: the recipe, sizes and options exclude each other, as in
                ``GroupedLinear.forward`` with ``single_parameter``.
            RankMismatchError: the ranks differ in sizes or dtypes; other errors of
                ``apex_te.distributed.TokenDispatcher`` also apply with several ranks.
        """
        try:
            return self._computed(hidden_states, is_first_microbatch)
        except VAGUE as error:
            explain(self, error, {"hidden_states": hidden_states}, inp="hidden_states")
            raise

    def backward_dw(self) -> None:
        """Computes the weight gradients that ``delay_wgrad_compute=True`` left out of backward.

        Adds them to ``.grad``, or with ``fuse_wgrad_accumulation`` to ``main_grad``. Does nothing
        if none are pending.
        """
        self._call_children("backward_dw")

    def update_expert_bias(self, group: Any = None) -> None:
        """Updates the expert bias to balance the experts; call it after each optimizer step.

        The bias of an expert with fewer tokens than the mean since the last update increases by
        ``bias_update_rate``, and that of one with more decreases by it. All forwards in training
        mode count; a recompute in backward does not, except in compiled code, which counts it
        twice.

        Args:
            group: process group of ranks with other tokens and the same router, over which the
                counts are summed; all its ranks must call. None does not sum.

        Raises:
            TypeError: ``group`` is neither a process group nor None.
            ValueError: the layer was made without ``expert_bias=True``.
        """
        if self.router.expert_bias is None:
            raise ValueError(f"{_NAME}: expert_bias must be True for an update, got False")
        check_process_group(_NAME, "group", group)
        self.router.update_expert_bias(group)

    def set_expert_group(self, expert_group: Any) -> None:
        """Sets the ranks over which the experts are distributed, such as after unpickling.

        Args:
            expert_group: a ``torch.distributed.ProcessGroup`` with as many ranks as before.

        Raises:
            TypeError: ``expert_group`` is not a process group.
            ValueError: it has another number of ranks.
        """
        if expert_group is None:
            raise TypeError(f"{_NAME}: expert_group must be a process group, got None")
        check_process_group(_NAME, "expert_group", expert_group)
        ranks = world_size(expert_group)
        if ranks != self.expert_ranks:
            raise ValueError(
                f"{_NAME}: expert_group must have the {self.expert_ranks} ranks that the experts "
                f"are distributed over, got {ranks}"
            )
        self.expert_group, self._dispatcher = expert_group, None

    def _computed(
        self, hidden_states: torch.Tensor, is_first_microbatch: bool | None
    ) -> torch.Tensor:
        shape = hidden_states.shape
        if not shape or shape[-1] != self.hidden_size:
            raise ValueError(
                f"{_NAME}: hidden_states must have a last dimension of {self.hidden_size}, "
                f"got {list(shape)}"
            )
        x = hidden_states.reshape(-1, self.hidden_size)
        spread = self.expert_ranks > 1
        routing: Any = self.router(x, spread, self._sequences(shape))
        x = cast_to(x, autocast_dtype(_NAME, "hidden_states", x))
        if spread:
            out = self._dispatched(x, routing, is_first_microbatch)
        else:
            out, _ = run_experts(
                self.fc1, self.fc2, x, routing.index, routing.probs, self._function,
                is_first_microbatch,
            )  # fmt: skip
        if self.shared_expert is not None:
            out = out + self.shared_expert(x, is_first_microbatch)
        return out.view(shape)

    def _dispatched(
        self, x: torch.Tensor, routing: DenseRouting, is_first_microbatch: bool | None
    ) -> torch.Tensor:
        """Sends tokens to the ranks of their experts, and the results back."""
        probs = cast_to(routing.probs, torch.float32)
        given = (x, probs, routing.routing_map)
        if self.exchange_chunks > 1 and not torch.compiler.is_compiling():
            return self._in_chunks(*given, is_first_microbatch)
        dispatch = self._dispatch_with().dispatch(*given)
        return dispatch.combine(self._run_experts(dispatch, is_first_microbatch))

    # A graph would not run its collectives in the order of the parts.
    @_disable_dynamo
    def _in_chunks(
        self,
        x: torch.Tensor,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
        is_first_microbatch: bool | None,
    ) -> torch.Tensor:
        """Does what ``_dispatched`` does in several parts."""
        chunks = self.exchange_chunks
        with in_parts((self.fc1, self.fc2), chunks, is_first_microbatch) as begin:

            def compute(part: int, dispatch: Dispatch) -> torch.Tensor:
                return self._run_experts(dispatch, begin(part))

            return run_in_chunks(self._dispatch_with(), x, probs, routing_map, chunks, compute)

    def _run_experts(self, dispatch: Dispatch, is_first_microbatch: bool | None) -> torch.Tensor:
        # The host would wait for the device to copy sizes from a list.
        rows, splits = dispatch.rows, dispatch.counts
        return run_ordered(self.fc1, self.fc2, rows, splits, self._function, is_first_microbatch)

    def _dispatch_with(self) -> TokenDispatcher:
        """Returns the dispatcher of several ranks; its rows need no padding."""
        if self.expert_group is None:
            raise ValueError(
                f"{_NAME}: expert_group must be set by set_expert_group in a layer that was loaded "
                "from a pickle, got None"
            )
        if self._dispatcher is None:
            self._dispatcher = TokenDispatcher(
                self.num_experts, self.expert_group, align=1, exchange=self.exchange,
                max_experts_per_token=self.top_k, wire=self.wire,
            )  # fmt: skip
        return self._dispatcher

    def _sequences(self, shape: torch.Size) -> int | None:
        """Returns the number of sequences of an input, None if they are not told apart."""
        if not self.sequence_aux_loss:
            return None
        if len(shape) < 2:
            raise ValueError(
                f"{_NAME}: hidden_states must have a dimension of tokens with sequence_aux_loss, "
                f"got {list(shape)}"
            )
        return math.prod(shape[1:-1] if self.router.sequence_first else shape[:-2])

    @contextlib.contextmanager
    def _own_draws(self) -> Iterator[None]:
        """Context in which experts are drawn, from other random numbers on each rank."""
        if self.expert_ranks == 1:
            yield
            return
        seed = int(torch.randint(2**31, ())) + distributed.get_rank(self.expert_group)
        cuda = torch.cuda.current_device() if torch.cuda.is_available() else None
        with torch.random.fork_rng([] if cuda is None else [cuda]):
            torch.default_generator.manual_seed(seed)
            if cuda is not None:
                torch.cuda.default_generators[cuda].manual_seed(seed)
            yield

    def _tag_experts(self) -> None:
        """Tells trainers which gradients are complete on their rank."""
        if self.expert_ranks > 1:
            for layer in (self.fc1, self.fc2):
                for parameter in layer.parameters():
                    parameter.allreduce = False  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, Any]:
        """Returns the attributes for a copy or pickle, ``expert_group`` in a ``GroupHolder``."""
        group = GroupHolder(self.expert_group)
        return {**super().__getstate__(), "expert_group": group, "_dispatcher": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "expert_group": state["expert_group"].group})
        self._tag_experts()


def _check_factor(name: str, value: float | None, above: bool) -> None:
    """Checks that a factor is at least 0, or above it; None stands for no factor."""
    if value is None and above:
        return
    number = checked_number(_NAME, name, value)
    if not (number > 0.0 if above else number >= 0.0) or number == math.inf:
        least = "above" if above else "at least"
        raise ValueError(f"{_NAME}: {name} must be {least} 0 and finite, got {value}")
