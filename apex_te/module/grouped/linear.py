"""GroupedLinear: linear layers of one shape, each over its own rows of the input (experts)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from ...fp8.autocast import get_fp8_recipe
from ...fp8.parameter.parameter import FP8Parameter
from ...fp8.scheme.base import GroupQuantizers, group_quantizers
from ...fp8.tensor import QuantizedTensor
from ...ops.binding import OpFunction, once_differentiable
from ...runtime.named_arguments import named_arguments
from .._core import arguments as _arguments
from .._core import gemm as _gemm
from .._core.arguments import VAGUE, explain, initialize, materialize
from .._core.fp8_entries import SCALE
from .._core.gemm import SAVED, FP8Call, GemmCall, as_matrix, plain_weight_gradient
from .._core.parallel import ParallelModule, divided, tag
from .._core.programs import take_saved, without_autocast
from . import on_device
from .weights import cached_weights, held_parts

__all__ = ["GroupedLinear"]

_NAME = "GroupedLinear"


class GroupedLinear(ParallelModule):
    """Linear layers of equal shape; layer i is applied to the i-th group of rows of the input.

    Args:
        num_gemms: number of linear layers.
        in_features, out_features: sizes of each layer. Any size works; multiples of 16 are fastest.
        bias: learn a bias ``[out_features]`` for each layer.
        single_parameter: store the weights as one Parameter ``weight`` ``[num_gemms, out_features,
            in_features]`` and the biases as one, ``bias`` ``[num_gemms, out_features]``;
            ``weight0``, ``bias0`` .. are views. Host time then does not grow with ``num_gemms``,
            bf16 weights are not copied, and gradients are accumulated into ``main_grad`` directly.
            A state dict of either kind loads into the other. Inside ``fp8_model_init`` the weights
            are one FP8 Parameter, whose views are read-only.
        return_bias: return ``(y, biases)``; the biases, a list in the dtype of ``y``, are not
            added.
        fuse_wgrad_accumulation, init_method, params_dtype, dtype, delay_wgrad_compute,
            save_original_input, name, device: as in ``Linear``, for each weight ``weight{i}``.
        parallel_mode: ``"column"`` splits ``out_features`` over the ranks of ``tp_group``,
            ``"row"`` splits ``in_features``. The module does not communicate: the dispatcher must
            gather the tokens and reduce the results. Requires ``bias=False``.
        tp_group, tp_size, sequence_parallel, get_rng_state_tracker, rng_tracker_name: as in
            ``Linear``.

    Without ``single_parameter`` the parameters are ``weight0`` ``[out_features, in_features]``,
    ``bias0`` ``[out_features]``, ``weight1``, ``bias1`` .. in this order, in which optimizers
    number their states. To load an optimizer state saved when all weights came first, see
    ``apex_te.integrations.reorder_grouped_linear_state``. Interface and defaults follow
    TransformerEngine's GroupedLinear.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a number is below 1, the ranks do not divide a size, ``parallel_mode`` is
            unknown, or ``bias`` is True with weights split over several ranks.
    """

    num_gemms: int
    in_features: int
    out_features: int
    can_keep_weights = False  # empty groups record no amax

    @named_arguments()
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        name: str | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        single_parameter: bool = False,
    ) -> None:
        sizes = ("num_gemms", "in_features", "out_features")
        wanted = self._take_options(locals(), *sizes, gemms=num_gemms)
        if self.parallel_mode is not None and self.tp_size > 1 and bias:
            raise ValueError(
                "GroupedLinear: bias must be False with weights split over tp_group, because the "
                "token dispatcher reduces the outputs, got True"
            )
        if self.parallel_mode == "column":
            self.out_features = divided(_NAME, "out_features", out_features, self.tp_size)
        elif self.parallel_mode == "row":
            self.in_features = divided(_NAME, "in_features", in_features, self.tp_size)
        self._group_quantizers: dict[int, tuple] = {}
        self.single_parameter = single_parameter
        numbers = ("",) if single_parameter else tuple(map(str, range(num_gemms)))
        self._weight_names = tuple(f"weight{i}" for i in numbers)
        self._bias_names = tuple(f"bias{i}" for i in numbers) if bias else ()
        stack = (num_gemms,) if single_parameter else ()
        # In TransformerEngine's order, in which optimizers number their states.
        for i, key in enumerate(self._weight_names):
            shape = (*stack, self.out_features, self.in_features)
            value = _arguments.parameter(shape, wanted, device, gemm_weight=True)
            if self.parallel_mode is not None:
                dim = len(stack) + (self.parallel_mode == "row")
                tag(value, dim, False, tp_group)
            self.register_parameter(key, value)
            if bias:
                value = _arguments.parameter(shape[:-1], wanted, device, gemm_weight=False)
                self.register_parameter(self._bias_names[i], value)
        initialize(self)

    def reset_parameters(self) -> None:
        """Fills the weights with ``init_method`` (default N(0, 0.023^2)) and the biases with 0.

        Parameters on the meta device get memory first; see ``Linear.reset_parameters``.
        """
        materialize(self)
        with self._forked(self.parallel_mode is not None):
            for key in self._weight_names:
                _arguments.fill(getattr(self, key), self.init_method)
        for key in self._bias_names:
            torch.nn.init.zeros_(getattr(self, key))

    def extra_repr(self) -> str:
        text = f"num_gemms={self.num_gemms}, in_features={self.in_features}"
        text += f", out_features={self.out_features}, bias={self.use_bias}"
        if self.single_parameter:
            text += ", single_parameter=True"
        return text + self._shown_options()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            kind = name.rstrip("0123456789")
            number, stack = name[len(kind) :], self.__dict__.get("_parameters", {}).get(kind)
            if stack is None or not number or int(number) >= self.num_gemms:
                raise
            return stack[int(number)]

    def forward(
        self,
        inp: torch.Tensor,
        m_splits: Sequence[int] | torch.Tensor,
        is_first_microbatch: bool | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        """Applies layer i to the i-th group of rows; returns [..., out_features].

        ``inp`` may have more rows than the groups, like a padded buffer. Rows after the last group
        are ignored; their outputs and gradients are zeros. Splits that are negative or whose sum
        exceeds the rows raise ValueError. Exception: the host does not read splits in a GPU tensor,
        so invalid ones make all outputs and gradients NaN.

        A GPU tensor ``m_splits``, and ``single_parameter`` on any device, change rounding and cost.
        On sm_90, FP8 GEMMs multiply FP8 data; other GPUs decode it to bfloat16 first. Results of
        FP8 GEMMs are rounded to bfloat16 before any cast to another dtype. Weight gradients for
        ``main_grad`` are not rounded, except where torch's grouped GEMM computes them: those of
        bf16 GEMMs on sm_90 and sm_100, and of FP8 GEMMs on sm_100. GEMMs in fp16 and fp32, and all
        GEMMs on other GPUs, cost as much as ``num_gemms`` layers over all rows. ``fp8_statistics``
        does not record these GEMMs. Before torch 2.12, ``torch.compile`` breaks the graph at those
        that are not in FP8.

        Args:
            inp: [..., in_features] in the dtype of the parameters; in FP8 that must be fp32, fp16
                or bf16. Under ``torch.autocast`` it may have any floating-point dtype (in FP8 one
                of these three), and the output has autocast's dtype.
            m_splits: number of rows of each group, which may be 0: ints, or an int32 or int64
                tensor [num_gemms] on the device of ``inp``. On a GPU the host does not wait for the
                tensor.
            is_first_microbatch: as in ``Linear.forward``.

        Returns:
            ``out``, or with ``return_bias`` a tuple ``(out, biases)``, the latter a list.

        Raises:
            TypeError: ``inp`` or a tensor ``m_splits`` has another dtype, or ``m_splits`` holds
                something other than ints.
            ValueError: a shape does not match, ``m_splits`` is on another device than ``inp``, or a
                split is negative or their sum exceeds the rows of ``inp`` (see above for a GPU).
            NotImplementedError: ``m_splits`` is a GPU tensor, and the recipe is ``"mxfp8"`` or
                HiF8, FP8 sizes are not multiples of 16, there are more than 1023 groups, or
                ``delay_wgrad_compute``, ``save_original_input``, ``enable_fp8_all_gather`` or
                ``torch.compile`` is used. With ``single_parameter`` only these are refused, which
                would wait for the sizes: more than 1023 groups; delayed scaling with
                ``save_original_input``; and, with ``fuse_wgrad_accumulation`` or
                ``delay_wgrad_compute``, the recipes and sizes above, and delayed scaling under
                ``torch.compile``. Raised before anything runs.
        """
        out = self._multiply(inp, m_splits, is_first_microbatch, with_bias=not self.return_bias)
        if not self.return_bias:
            return out
        biases = self._weights_and_biases()[1]
        if not biases:
            return out, [out.new_empty(0) for _ in range(self.num_gemms)]
        each = biases[0] if self.single_parameter else biases
        return out, [bias.to(out.dtype) for bias in each]

    def _multiply(
        self, inp: torch.Tensor, m_splits: Any, is_first_microbatch: bool | None, with_bias: bool
    ) -> torch.Tensor:
        """Computes ``out`` of ``forward``, with or without the biases, and calls no hooks."""
        try:
            weights, biases = self._weights_and_biases()
            rows = math.prod(inp.shape[:-1])
            splits: Any
            x, cached_one_by_one = inp, weights
            if weights[0].dim() == 3:
                splits = on_device.table_splits(self, m_splits, rows, inp.device)
                cached_one_by_one = ()
            elif not isinstance(m_splits, torch.Tensor):
                splits = _arguments.checked_splits(_NAME, self.num_gemms, m_splits, rows)
            else:
                owner = type(self).__name__
                on_device.check_splits(owner, m_splits, self.num_gemms, inp.device)
                if not rows or not on_device.stays_on_device(inp.device):
                    splits = on_device.read_splits(owner, m_splits, rows)
                else:
                    on_device.check_supported(self, weights)
                    splits, cached_one_by_one = m_splits, ()
            if isinstance(splits, tuple) and sum(splits) != rows:
                x = inp.reshape(rows, inp.shape[-1])[: sum(splits)]
            out: torch.Tensor = self._call(
                x, self.in_features, weights + biases, cached_one_by_one, is_first_microbatch,
                weights, biases if with_bias else (), splits,
            )  # fmt: skip
        except VAGUE as error:
            explain(self, error, {"inp": inp})
            raise
        if x is not inp:  # the rows after the last group
            out = functional.pad(out, (0, 0, 0, rows - x.shape[0]))
            out = out.view(*inp.shape[:-1], self.out_features)
        return out

    def _weights_and_biases(self) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Returns weights, [out, in] for each group or one stack, and biases likewise or none."""
        weights = tuple([getattr(self, key) for key in self._weight_names])
        return weights, tuple([getattr(self, key) for key in self._bias_names])

    def _stacked_weights(self) -> tuple[torch.Tensor, ...]:
        """Returns the weights with ``single_parameter``: tensors whose rows follow one another."""
        return self._weights_and_biases()[0]

    def _stacked_bias(self) -> torch.Tensor | None:
        """Returns the biases with ``single_parameter``."""
        biases = self._weights_and_biases()[1]
        return biases[0] if biases else None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, end in (("weight", ""), ("weight", SCALE), ("bias", "")):
            stacked = prefix + name + end
            each = [f"{prefix}{name}{i}{end}" for i in range(self.num_gemms)]
            found = state_dict.get(stacked)
            if self.single_parameter:
                if found is None and all(key in state_dict for key in each):
                    state_dict[stacked] = torch.stack([state_dict.pop(key) for key in each])
            elif found is not None and len(found) == len(each):
                state_dict.update(zip(each, state_dict.pop(stacked).unbind(0), strict=True))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _gemm_weights(self) -> list[list[str]]:
        # A stack is not a matrix, and FSDP does not gather its rows in FP8.
        return [] if self.single_parameter else super()._gemm_weights()

    def _weight_sources(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Views of a stack are new ones in each call.
        return self._weights_and_biases()[0] if self.single_parameter else (weight,)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the attributes for a copy or pickle, without quantizers."""
        return {**super().__getstate__(), "_group_quantizers": {}}

    def _run(
        self,
        call: FP8Call,
        inp: torch.Tensor,
        weights: tuple[torch.Tensor, ...],
        biases: tuple[torch.Tensor, ...],
        splits: tuple[int, ...] | torch.Tensor,
    ) -> torch.Tensor:
        if weights[0].dim() == 3 and not on_device.serves(self, call):
            assert isinstance(splits, torch.Tensor)
            read = on_device.read_splits(type(self).__name__, splits, math.prod(inp.shape[:-1]))
            return self._run_one_by_one(call, inp, weights[0], biases, read)
        if isinstance(splits, torch.Tensor):
            return self._run_on_device(call, inp, weights, biases, splits)
        if not call.is_fp8:
            parts = []
            for i, part in enumerate(inp.reshape(sum(splits), self.in_features).split(splits)):
                # An empty group has no amax of which a first scale could be made.
                each = call if splits[i] else call._replace(quantizers=None)
                bias = biases[i] if biases else None
                parts.append(self._linear(part, weights[i], bias, each, i))
            return torch.cat(parts).view(*inp.shape[:-1], self.out_features)
        if torch.is_grad_enabled():
            return GroupedLinearFunction.apply(inp, splits, call, *weights, *biases)
        return grouped_forward(inp, splits, call, weights, biases)[0]

    def _run_one_by_one(
        self,
        call: FP8Call,
        inp: torch.Tensor,
        weight: torch.Tensor,
        biases: tuple[torch.Tensor, ...],
        splits: tuple[int, ...],
    ) -> torch.Tensor:
        """Runs one GEMM per group, for recipes without grouped GEMMs."""
        count, total = self.num_gemms, sum(splits)
        if call.options[0].accumulate is not None or call.options[0].wgrad_store is not None:
            raise NotImplementedError(
                f"{type(self).__name__}: fuse_wgrad_accumulation and delay_wgrad_compute must be "
                f"False with single_parameter=True and {type(get_fp8_recipe()).__name__} in this "
                "format, in sizes that are not multiples of 16, or in compiled code, got True"
            )
        assert call.quantizers is not None
        cached: Any = (None,) * count
        if type(weight) is not FP8Parameter:
            cached = self._cached_weights(weight.unbind(0), call.quantizers, call.fill)
        elif torch.compiler.is_compiling():
            # Parts of one that need gradients cannot leave a graph, as they do where this one ends.
            cached = held_parts(weight, call.quantizers[0]) or cached
            weight = weight.dequantize()
        each = call._replace(options=call.options * count, cached=cached)
        own = biases[0].unbind(0) if biases else ()
        # A number, as torch 2.11 refuses graphs in which a feature's size may vary.
        x = inp.reshape(-1, self.in_features)
        out = self._run(each, x[:total], weight.unbind(0), own, splits)
        out = functional.pad(out, (0, 0, 0, x.shape[0] - total))
        return out.view(*inp.shape[:-1], self.out_features)

    def _run_on_device(
        self,
        call: FP8Call,
        inp: torch.Tensor,
        weights: tuple[torch.Tensor, ...],
        biases: tuple[torch.Tensor, ...],
        splits: torch.Tensor,
    ) -> torch.Tensor:
        """Computes the output [..., out_features] without reading ``splits`` on the host."""
        quantizers, cached = self._quantizers_of_groups(call), None
        if call.is_fp8:
            quantizers = on_device.checked_quantizers(
                type(self).__name__, quantizers, self.in_features, self.out_features
            )
            cached = cached_weights(self._modes, weights, quantizers, call.fill)
            if call.options[0].save_original and quantizers.input.keeps_state:
                raise NotImplementedError(
                    f"{type(self).__name__}: save_original_input must be False with "
                    "single_parameter=True and delayed scaling, whose scales may change before "
                    "backward, got True"
                )
        x = inp.reshape(-1, self.in_features)
        shared = on_device.shared_casts(self)
        out = on_device.run(call, quantizers, cached, x, splits, weights, biases, shared)
        return out if inp.dim() == 2 else out.view(*inp.shape[:-1], self.out_features)

    def _quantizers_of_groups(self, call: FP8Call) -> GroupQuantizers | None:
        """Returns a call's ``GroupQuantizers``, made once for each ``call.quantizers``, or None.

        None: nothing is quantized or recorded, or the scheme needs to know the groups' sizes on the
        host.
        """
        sets, known = call.quantizers, self._group_quantizers
        if sets is None:
            return None
        if torch.compiler.is_compiling():
            return group_quantizers(sets)
        found = known.get(id(sets))
        if found is None or found[0] is not sets:
            if len(known) >= 8:  # of recipes and states that are gone
                known.clear()
            found = known[id(sets)] = (sets, group_quantizers(sets))
        return found[1]


def grouped_forward(
    inp: torch.Tensor,
    splits: tuple[int, ...],
    call: FP8Call,
    weights: tuple[torch.Tensor, ...],
    biases: tuple[torch.Tensor, ...],
    keep: tuple[bool, ...] | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], list[QuantizedTensor | None]]:
    """Returns the output ``[..., out]``, and each group's rows, plain and in FP8.

    A group without rows is not quantized, and records no amax.
    """
    assert call.quantizers is not None
    quantizers, out_dtype = call.quantizers, call.dtype
    x, features = as_matrix(inp), weights[0].shape[0]
    # Not a view made in a Function, or autograd would refuse to change it in place.
    out = torch.empty(*inp.shape[:-1], features, dtype=out_dtype, device=inp.device)
    results = (out if inp.dim() == 2 else out.view(x.shape[0], features)).split(splits)
    groups = x.split(splits)
    quantized: list[QuantizedTensor | None] = []
    for i, group in enumerate(groups):
        if not splits[i]:
            quantized.append(None)
            continue
        q = quantizers[i].input.quantize(group, True, keep is not None and keep[i])[0]
        bias = biases[i] if biases else None
        _gemm.multiply(quantizers[i], q, weights[i], call.cached[i], bias, out_dtype, results[i])
        quantized.append(q)
    return out, groups, quantized


class GroupedLinearFunction(OpFunction):
    """Autograd function of the linear layers in FP8: three quantized GEMMs for each group."""

    LABEL = "GroupedLinear"

    @staticmethod
    def forward(
        ctx: Any,
        inp: torch.Tensor,
        splits: tuple[int, ...],
        call: FP8Call,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        weights, biases = parameters[: len(splits)], parameters[len(splits) :]
        needs = ctx.needs_input_grad
        gemms = tuple(
            [call.gemm(i, weight, needs[0], needs[3 + i]) for i, weight in enumerate(weights)]
        )
        keep = tuple([gemm.keeps_input for gemm in gemms])
        out, groups, quantized = grouped_forward(inp, splits, call, weights, biases, keep)
        saved: list[torch.Tensor | None] = []
        for i, gemm in enumerate(gemms):
            q = quantized[i]
            if q is None:
                saved += [None] * SAVED
            else:
                saved += gemm.saved(groups[i], q, weights[i], call.cached[i])
        ctx.save_for_backward(*saved)
        ctx.gemms = gemms
        ctx.splits = splits
        ctx.bias_dtypes = tuple(
            [b.dtype if needs[3 + len(splits) + i] else None for i, b in enumerate(biases)]
        )
        ctx.in_features = weights[0].shape[1]
        ctx.input_shape = inp.shape
        ctx.input_dtype = inp.dtype
        ctx.device_type = inp.device.type
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple:
        return without_autocast(_grouped_backward, ctx, grad_output)


def _grouped_backward(ctx: Any, grad_output: torch.Tensor) -> tuple:
    gemms, bias_dtypes, saved = ctx.gemms, ctx.bias_dtypes, list(take_saved(ctx))
    grad_input: torch.Tensor | None = None
    rows: Any = None
    if gemms[0].need_input:
        grad_input = grad_output.new_empty(ctx.input_shape, dtype=ctx.input_dtype)
        rows = grad_input.view(-1, ctx.in_features).split(ctx.splits)
    weights: list[torch.Tensor | None] = []
    biases: list[torch.Tensor | None] = []
    for i, dy in enumerate(as_matrix(grad_output).split(ctx.splits)):
        gemm, bias_dtype = gemms[i], bias_dtypes[i] if bias_dtypes else None
        # A group's tensors are let go after their use.
        tensors, saved = tuple(saved[:SAVED]), saved[SAVED:]
        if ctx.splits[i]:
            grad_weight = None
            quantized, grad_bias, _ = gemm.cast_gradient(dy, bias_dtype)
            if gemm.need_input:
                gemm.dgrad(tensors, quantized, ctx.input_dtype, rows[i])
            if gemm.need_weight:
                grad_weight = gemm.wgrad(tensors, dy, quantized)
        else:
            grad_weight, grad_bias = _without_rows(gemm, dy, ctx.in_features, bias_dtype)
        weights.append(grad_weight)
        if bias_dtypes:
            biases.append(grad_bias)
    return grad_input, None, None, *weights, *biases


def _without_rows(
    gemm: GemmCall, dy: torch.Tensor, in_features: int, bias_dtype: torch.dtype | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns zeros, also for ``main_grad``, as gradients of an empty group; stages no amax."""
    grad_weight = grad_bias = None
    if gemm.need_weight:
        x = dy.new_empty((0, in_features))
        grad_weight = plain_weight_gradient(gemm.parameter, dy, x, gemm.weight_dtype, gemm.options)
    if bias_dtype is not None:
        grad_bias = dy.sum(0).to(bias_dtype)
    return grad_weight, grad_bias
