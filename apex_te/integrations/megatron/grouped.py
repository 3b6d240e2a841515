"""MindSpeed's grouped linear layers, for experts, over ``apex_te.GroupedLinear``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...fp8.autocast import fp8_autocast, local
from ...module.grouped.linear import GroupedLinear
from ._config import MegatronLayer, Reader, check_flags, refuse

Init = Callable[[torch.Tensor], Any] | None


class MindSpeedTEGroupedLinear(MegatronLayer, GroupedLinear):
    """Group of ``num_gemms`` linear layers without bias, each applied to some rows of the input.

    Args:
        num_gemms: number of layers, one for each local expert.
        input_size, output_size: features of each unsplit layer.
        parallel_mode: ``"column"`` to split each weight by rows over ranks, ``"row"`` to split it
            by columns, None for no split. The layer runs no collectives: Megatron's token
            dispatcher does.
        config: any object; ``_config.DEFAULTS`` lists the attributes that are read.
            ``use_gmm_fp8=False`` keeps the layer in bf16 or fp32.
        init_method: function that fills a new weight in place; None: config's, else N(0, 0.023^2).
        bias: must be False.
        skip_bias_add: a bool that has no effect.
        is_expert: True for experts; with ``config.expert_model_parallel_size`` above 1, weights
            then have the attribute ``allreduce=False``.
        tp_comm_buffer_name: not used.
        tp_group: process group over which weights are split, as in ``TEColumnParallelLinear``.
        pg_collection: an object with the groups ``expt_tp`` (used if ``is_expert``) and ``tp``;
            read only if ``tp_group`` is None.

    Attributes:
        weight0, weight1, ...: ``[output_size, input_size]``, one for each layer; with
            ``parallel_mode`` each rank has a shard.

    Raises:
        NotImplementedError: ``bias`` is True, or the recipe is block scaling.
        TypeError: an argument is unknown or has a wrong type.
    """

    _several = True

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str | None,
        config: Any,
        init_method: Init,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: Any = None,
        pg_collection: Any = None,
    ) -> None:
        owner = type(self).__name__
        flags = {"skip_bias_add": skip_bias_add, "is_expert": is_expert}
        check_flags(owner, {"bias": (False, bias)}, **flags)
        read = Reader(owner, config)
        in_fp8 = bool(read.use_gmm_fp8)
        if in_fp8 and read.recipe == "blockwise":
            raise refuse(owner, "config.fp8_recipe", "delayed, tensorwise or mxfp8", "blockwise")
        if tp_group is None and pg_collection is not None:
            tp_group = pg_collection.expt_tp if is_expert else pg_collection.tp
        layout = read.layout(tp_group, is_expert)._replace(explicit=False)
        row = isinstance(parallel_mode, str) and parallel_mode.lower() == "row"
        dim = 1 if row else 0
        init = read.initializer(init_method, dim, layout)
        options = read.shared(layout, is_expert)
        GroupedLinear.__init__(
            self, num_gemms, input_size, output_size, False, init_method=init,
            parallel_mode=parallel_mode, **options,
        )  # fmt: skip
        split = dict.fromkeys(self._weight_names, dim) if parallel_mode is not None else {}
        self._finish(read, layout, split)
        self.use_gmm_fp8 = in_fp8

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, m_splits: Any, is_first_microbatch: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """Applies the first layer to the first rows of ``x``, the second to the next rows, etc.

        Args:
            x: ``[rows, in_features]``, of the dtypes that ``GroupedLinear.forward`` takes.
            m_splits: number of rows for each layer, as for ``GroupedLinear.forward``.
            is_first_microbatch: as for ``GroupedLinear.forward``.

        Returns:
            ``(out, None)``: ``out`` is ``[rows, out_features]``; there is no bias.

        Raises:
            NotImplementedError: the recipe of the region is block scaling; or as for
                ``GroupedLinear.forward``.
            TypeError: as for ``GroupedLinear.forward``.
            ValueError: as for ``GroupedLinear.forward``.
        """
        first = self._first(is_first_microbatch)
        region = local.region
        if region is not None and region.enabled:
            if not self.use_gmm_fp8:
                with fp8_autocast(enabled=False):
                    return GroupedLinear.forward(self, x, m_splits, first), None  # type: ignore[return-value]
            if region.recipe.quantizer == "block":
                raise refuse(
                    type(self).__name__, "fp8_recipe", "another than block scaling", "BlockScaling"
                )
        return GroupedLinear.forward(self, x, m_splits, first), None  # type: ignore[return-value]


class _ParallelGroupedLinear(MindSpeedTEGroupedLinear):
    """Base of ``MindSpeedTEGroupedLinear`` classes that fix ``parallel_mode``."""

    _mode: str

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Init,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        tp_comm_buffer_name: str | None = None,
        tp_group: Any = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(
            num_gemms, input_size, output_size, parallel_mode=self._mode, config=config,
            init_method=init_method, bias=bias, skip_bias_add=skip_bias_add, is_expert=is_expert,
            tp_comm_buffer_name=tp_comm_buffer_name, tp_group=tp_group, pg_collection=pg_collection,
        )  # fmt: skip


class MindSpeedTEColumnParallelGroupedLinear(_ParallelGroupedLinear):
    """Experts' linear layers, each weight split by rows over tensor-parallel ranks.

    This is ``MindSpeedTEGroupedLinear`` with ``parallel_mode="column"``; the other arguments are
    the same. ``forward`` takes all input features and returns this rank's output features.
    """

    _mode = "column"


class MindSpeedTERowParallelGroupedLinear(_ParallelGroupedLinear):
    """Experts' linear layers, each weight split by columns over tensor-parallel ranks.

    This is ``MindSpeedTEGroupedLinear`` with ``parallel_mode="row"``; the other arguments are the
    same. ``forward`` takes this rank's input features and returns partial sums: it runs no
    all-reduce.
    """

    _mode = "row"
