"""Megatron's and MindSpeed's column- and row-parallel linear layers and norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...module.layer_norm import LayerNorm
from ...module.layer_norm_linear import LayerNormLinear
from ...module.linear import Linear
from ._config import MegatronLayer, Reader, check_flags, refuse

Init = Callable[[torch.Tensor], Any] | None


class _ParallelLinear(MegatronLayer, Linear):
    """Base of the column- and row-parallel ``Linear``, which return ``(out, bias or None)``."""

    def _build(
        self,
        mode: str,
        sizes: tuple[int, int],
        config: Any,
        init_method: Init,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        tp_group: Any,
    ) -> None:
        """Constructs the layer; ``mode`` is ``"column"`` or ``"row"``."""
        owner = type(self).__name__
        read = Reader(owner, config)
        layout = read.layout(tp_group, is_expert)
        column = mode == "column"
        axes = {"weight": 0, "bias": 0} if column else {"weight": 1}
        returned = skip_bias_add and bias
        if layout.explicit and layout.ranks > 1:
            if not column and bias and not returned:
                raise refuse(
                    owner, "bias", "False or skip_bias_add True for an expert's split layer", True
                )
            size = read.part("output_size" if column else "input_size", sizes[column], layout)
            sizes = (sizes[0], size) if column else (size, sizes[1])
        init = read.initializer(init_method, axes["weight"], layout)
        Linear.__init__(
            self, *sizes, bias, init_method=init, return_bias=returned,
            parallel_mode=None if layout.explicit else mode, **read.shared(layout, is_expert),
        )  # fmt: skip
        self._finish(read, layout, axes)

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, is_first_microbatch: bool | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Applies the layer.

        Args:
            x: ``[..., in_features]``, of the dtypes that ``Linear.forward`` takes.
            is_first_microbatch: as for ``Linear.forward``.

        Returns:
            ``(out, bias)``: ``out`` is ``[..., out_features]``. With ``skip_bias_add`` the bias is
            returned and not added; otherwise ``bias`` is None.

        Raises:
            TypeError: as for ``Linear.forward``.
            ValueError: as for ``Linear.forward``.
        """
        first = self._first(is_first_microbatch)
        return self._paired(Linear.forward(self, x, is_first_microbatch=first))


class TEColumnParallelLinear(_ParallelLinear):
    """Linear layer whose weight ``[output_size, input_size]`` is split by rows over ranks.

    With ``config.sequence_parallel`` the input's rows (dimension 0) are gathered and its gradient
    is reduce-scattered; otherwise the gradient is all-reduced. Each rank returns its own output
    features. ``forward`` returns ``(out, bias or None)``.

    Args:
        input_size, output_size: features of the unsplit layer.
        config: any object; ``_config.DEFAULTS`` lists the attributes that are read.
        init_method: function that fills a new weight in place; None: config's, else N(0, 0.023^2).
        gather_output: must be False.
        bias: learn a bias; each rank has ``[output_size / ranks]``.
        skip_bias_add: return the bias instead of adding it.
        is_expert: True for the layer of an expert. If it is split, or if
            ``config.expert_model_parallel_size`` is above 1, it runs no collectives: Megatron's
            token dispatcher does.
        skip_weight_param_allocation: must be False.
        tp_comm_buffer_name: not used.
        tp_group: process group over which the weight is split. None means the group of ``config``,
            or else that of Megatron's ``parallel_state`` if the program has initialised it. If
            there is none, call ``set_tensor_parallel_group`` before forward.
        stride: must be 1.

    Attributes:
        weight, bias: this rank's shards, Parameters with the attributes that Megatron reads:
            ``tensor_model_parallel``, ``partition_dim``, ``partition_stride``,
            ``sequence_parallel`` and ``allreduce`` (False for experts that are spread over ranks).

    Raises:
        NotImplementedError: an argument does not have the value that it must have.
        TypeError: an argument is unknown or has a wrong type.
        ValueError: a size is not divisible by the number of ranks.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Init,
        gather_output: bool,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool = False,
        skip_weight_param_allocation: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: Any = None,
        stride: int = 1,
    ) -> None:
        required = {
            "gather_output": (False, gather_output),
            "skip_weight_param_allocation": (False, skip_weight_param_allocation),
            "stride": (1, stride),
        }
        flags = {"bias": bias, "skip_bias_add": skip_bias_add, "is_expert": is_expert}
        check_flags(type(self).__name__, required, **flags)
        self._build(
            "column", (input_size, output_size), config, init_method, bias, skip_bias_add,
            is_expert, tp_group,
        )  # fmt: skip


class TERowParallelLinear(_ParallelLinear):
    """Linear layer whose weight ``[output_size, input_size]`` is split by columns over ranks.

    The output is all-reduced, or with ``config.sequence_parallel`` reduce-scattered along dimension
    0. Then the bias is added.

    Args:
        input_is_parallel: must be True: each rank is given only its own features of the input.
        bias: learn a bias ``[output_size]``, which every rank has in full.

    Other arguments, attributes and results are those of ``TEColumnParallelLinear``.

    Raises:
        NotImplementedError: as for ``TEColumnParallelLinear``; or the layer belongs to an expert,
            is split and is to add its bias (every rank would add it).
        TypeError: as for ``TEColumnParallelLinear``.
        ValueError: as for ``TEColumnParallelLinear``.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Init,
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: Any = None,
        stride: int = 1,
    ) -> None:
        required = {"input_is_parallel": (True, input_is_parallel), "stride": (1, stride)}
        flags = {"bias": bias, "skip_bias_add": skip_bias_add, "is_expert": is_expert}
        check_flags(type(self).__name__, required, **flags)
        self._build(
            "row", (input_size, output_size), config, init_method, bias, skip_bias_add,
            is_expert, tp_group,
        )  # fmt: skip


class MindSpeedTELayerNormColumnParallelLinear(MegatronLayer, LayerNormLinear):
    """Norm and column-parallel linear layer; in FP8 the norm also casts its output to FP8.

    ``config.normalization`` is "LayerNorm" or "RMSNorm", ``config.layernorm_epsilon`` its eps.
    Other arguments, results and errors are those of ``TEColumnParallelLinear``.

    Args:
        is_expert: must be False.

    Attributes:
        layer_norm_weight, layer_norm_bias: the norm's Parameters; RMSNorm has no bias.
        weight, bias: the linear layer's Parameters.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Init,
        gather_output: bool,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool = False,
        skip_weight_param_allocation: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: Any = None,
        stride: int = 1,
    ) -> None:
        owner = type(self).__name__
        required = {
            "gather_output": (False, gather_output),
            "is_expert": (False, is_expert),
            "skip_weight_param_allocation": (False, skip_weight_param_allocation),
            "stride": (1, stride),
        }
        check_flags(owner, required, bias=bias, skip_bias_add=skip_bias_add)
        read = Reader(owner, config)
        layout = read.layout(tp_group, False)
        axes = {"weight": 0, "bias": 0}
        init = read.initializer(init_method, 0, layout)
        LayerNormLinear.__init__(
            self, input_size, output_size, read.layernorm_epsilon, bias,
            normalization=read.normalization,
            zero_centered_gamma=read.layernorm_zero_centered_gamma, init_method=init,
            return_bias=skip_bias_add and bias, parallel_mode="column",
            **read.shared(layout, False),
        )  # fmt: skip
        self._finish(read, layout, axes)

    def forward(
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Applies norm and linear layer.

        Args:
            inp: ``[..., input_size]``, of the dtypes that ``Linear.forward`` takes.
            is_first_microbatch: as for ``LayerNormLinear.forward``.

        Returns:
            ``(out, bias)``: ``out`` is ``[..., output_size / ranks]``. With ``skip_bias_add`` the
            bias is returned and not added; otherwise ``bias`` is None.

        Raises:
            TypeError: as for ``LayerNormLinear.forward``.
            ValueError: as for ``LayerNormLinear.forward``.
        """
        first = self._first(is_first_microbatch)
        return self._paired(LayerNormLinear.forward(self, inp, first))


# Megatron's name for MindSpeed's layer.
TELayerNormColumnParallelLinear = MindSpeedTELayerNormColumnParallelLinear


class MindSpeedTELayernorm(LayerNorm):
    """``apex_te.LayerNorm`` with MindSpeed's arguments.

    Args:
        hidden_size: size of the last dimension.
        eps: added to the variance.
        sequence_parallel: True if a rank has only some rows of the input. The parameters get it as
            their attribute ``sequence_parallel``; Megatron then sums their gradients over ranks.
        zero_centered_gamma: must be False.
        config: any object, or None; its ``params_dtype``, ``use_cpu_initialization`` and
            ``init_model_with_meta_device`` are defaults of the next two arguments.
        params_dtype, device: as in ``apex_te.LayerNorm``; None means the default from ``config``.

    Raises:
        NotImplementedError: ``zero_centered_gamma`` is True.
        TypeError: an argument is unknown.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        zero_centered_gamma: bool = False,
        *,
        config: Any = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        owner = type(self).__name__
        if zero_centered_gamma:
            raise refuse(owner, "zero_centered_gamma", False, zero_centered_gamma)
        if config is not None:
            read = Reader(owner, config)
            params_dtype = read.params_dtype if params_dtype is None else params_dtype
            device = read.device if device is None else device
        super().__init__(
            hidden_size,
            eps,
            sequence_parallel=sequence_parallel,
            params_dtype=params_dtype,
            device=device,
        )
