"""Linear layers and an embedding whose weights are split over the tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter, functional, init

from .....comm.collectives import all_reduce, reduce_scatter_rows
from .....compatibility.apex import fused_weight_gradient_mlp_cuda as wgrad_kernels
from .. import parallel_state
from ..utils import divide
from . import mappings
from .random import get_cuda_rng_tracker
from .utils import VocabUtility

Initialize = Callable[[torch.Tensor], Any]
_ATTRIBUTES: dict[str, Any] = {
    "tensor_model_parallel": False,
    "partition_dim": -1,
    "partition_stride": 1,
}


def set_tensor_model_parallel_attributes(
    tensor: torch.Tensor, is_parallel: bool, dim: int, stride: int
) -> None:
    """Marks a parameter as split over ranks along ``dim``, or as whole.

    Args:
        tensor: gets the attributes ``tensor_model_parallel``, ``partition_dim`` and
            ``partition_stride``.
        is_parallel, dim, stride: their values: True if the tensor is split, the dimension, and the
            number of pieces that are split one by one.

    Raises:
        ValueError: it is marked already.
    """
    if any(hasattr(tensor, name) for name in _ATTRIBUTES):
        raise ValueError("set_tensor_model_parallel_attributes: tensor already has the attributes")
    for name, value in zip(_ATTRIBUTES, (is_parallel, dim, stride), strict=True):
        setattr(tensor, name, value)


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: torch.Tensor) -> None:
    """Marks a parameter as whole unless it is marked."""
    for name, value in _ATTRIBUTES.items():
        if not hasattr(tensor, name):
            setattr(tensor, name, value)


def copy_tensor_model_parallel_attributes(
    destination_tensor: torch.Tensor, source_tensor: torch.Tensor
) -> None:
    """Copies the marks of ``set_tensor_model_parallel_attributes`` from a tensor to another one.

    Args:
        destination_tensor: the tensor to mark; earlier marks are overwritten.
        source_tensor: the tensor whose marks are copied; those that it lacks are left out.
    """
    for name in _ATTRIBUTES:
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))


def _rank_and_size() -> tuple[int, int]:
    state = parallel_state
    return state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()


def _weight(
    shape: tuple[int, int],
    dim: int,
    stride: int,
    init_method: Initialize,
    dtype: torch.dtype | None,
    on_cpu: bool,
    keep_master: bool = False,
) -> tuple[Parameter, torch.Tensor | None]:
    """Returns this rank's part of a weight of a whole ``shape``, and the whole one if it is kept.

    On the CPU all ranks draw the whole weight and take their part, so that it does not depend on
    their number; on a GPU each draws its own part, from the tracker's sequence.
    """
    rank, ranks = _rank_and_size()
    if stride != 1 and ranks > 1 and shape[dim] % (ranks * stride):
        raise ValueError(f"stride must divide the share {shape[dim] // ranks}, got {stride}")
    dtype = dtype or torch.get_default_dtype()
    part_shape = list(shape)
    part_shape[dim] = divide(shape[dim], ranks)
    master = None
    if on_cpu or not torch.cuda.is_available():
        whole = torch.empty(shape, dtype=torch.float32)
        init_method(whole)
        master = whole.to(dtype)
        pieces = master.split(divide(part_shape[dim], stride), dim)
        part = torch.cat(pieces[rank::ranks], dim).contiguous()
    else:
        part = torch.empty(part_shape, dtype=dtype, device=torch.cuda.current_device())
        with get_cuda_rng_tracker().fork():
            init_method(part)
    weight = Parameter(part)
    set_tensor_model_parallel_attributes(weight, True, dim, stride)
    return weight, master if keep_master else None


def _bias(size: int, weight: Parameter, stride: int | None) -> Parameter:
    """Returns zeros of the weight's dtype and device, marked as split if there is a stride."""
    bias = Parameter(torch.zeros(size, dtype=weight.dtype, device=weight.device))
    if stride is not None:
        set_tensor_model_parallel_attributes(bias, True, 0, stride)
    return bias


class _Linear(torch.autograd.Function):
    """Product with a weight; the input's gradient is summed over ranks beside the weight's."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        fuses_wgrad: bool,
        reduces: bool,
        sequence_parallel: bool,
        in_16_bits: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options = fuses_wgrad, reduces, sequence_parallel, in_16_bits
        ctx.has_bias = bias is not None
        whole = mappings.gather_rows(x) if sequence_parallel else x
        return functional.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        fuses_wgrad, reduces, sequence_parallel, in_16_bits = ctx.options
        group = parallel_state.get_tensor_model_parallel_group()
        is_split = parallel_state.get_tensor_model_parallel_world_size() > 1
        whole = mappings.gather_rows(x) if sequence_parallel else x
        grad_x: Any = grad.matmul(weight)
        pending = None
        if is_split and sequence_parallel:
            pending = reduce_scatter_rows(grad_x, group)
        elif is_split and reduces:
            pending = all_reduce(grad_x.contiguous(), group)
        rows, columns = grad.reshape(-1, grad.shape[-1]), whole.reshape(-1, whole.shape[-1])
        grad_weight = None
        if fuses_wgrad:
            accumulate = (
                wgrad_kernels.wgrad_gemm_accum_fp16
                if in_16_bits
                else wgrad_kernels.wgrad_gemm_accum_fp32
            )
            accumulate(columns, rows, weight.main_grad)
        else:
            grad_weight = rows.t().matmul(columns)
        grad_bias = rows.sum(0) if ctx.has_bias else None
        if pending is not None:
            grad_x = pending.wait()
        return grad_x, grad_weight, grad_bias, None, None, None, None


def linear_with_grad_accumulation_and_async_allreduce(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gradient_accumulation_fusion: bool,
    async_grad_allreduce: bool,
    sequence_parallel_enabled: bool,
    accumulation_in_fp16: bool = False,
) -> torch.Tensor:
    """Computes input @ weight.T + bias, with the collectives of tensor parallelism.

    Args:
        input: [..., in] in the weight's dtype, or any float dtype under ``torch.autocast``; with
            ``sequence_parallel_enabled`` this rank's part of the first dimension.
        weight: [out, in].
        bias: [out] or None.
        gradient_accumulation_fusion: adds the weight's gradient to ``weight.main_grad``.
        async_grad_allreduce: sums the input's gradient over ranks while the weight's is computed.
        sequence_parallel_enabled: gathers the input, and sums and splits its gradient, by rows.
        accumulation_in_fp16: ``main_grad`` has the weight's dtype.

    Returns:
        The product [..., out], with all rows; of a weight split over ranks, this rank's columns or
        its term of the sum.

    Source: apex.transformer.tensor_parallel.layers.
    """
    if torch.is_autocast_enabled(input.device.type):
        dtype = torch.get_autocast_dtype(input.device.type)
        input, weight = input.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    with torch.autocast(input.device.type, enabled=False):
        out: torch.Tensor = _Linear.apply(
            input,
            weight,
            bias,
            gradient_accumulation_fusion,
            async_grad_allreduce,
            sequence_parallel_enabled,
            accumulation_in_fp16,
        )
    return out


class VocabParallelEmbedding(torch.nn.Module):
    """Embedding whose rows, the vocabulary, are split over the tensor-parallel ranks.

    Args:
        num_embeddings: size of the vocabulary, a multiple of the number of ranks.
        embedding_dim: size of an embedding.
        init_method: initializes the weight in place.
        params_dtype: dtype of the weight; None for torch's default.
        use_cpu_initialization: draws the whole weight on the CPU, equal for any number of ranks,
            and keeps its part there; False uses the current GPU if there is one.

    Raises:
        ValueError: the number of ranks does not divide ``num_embeddings``.

    Source: apex.transformer.tensor_parallel.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        init_method: Initialize = init.xavier_normal_,
        *,
        params_dtype: torch.dtype | None = None,
        use_cpu_initialization: bool = False,
    ) -> None:
        super().__init__()
        rank, ranks = _rank_and_size()
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.tensor_model_parallel_size = ranks
        self.vocab_start_index, self.vocab_end_index = (
            VocabUtility.vocab_range_from_global_vocab_size(num_embeddings, rank, ranks)
        )
        self.num_embeddings_per_partition = self.vocab_end_index - self.vocab_start_index
        shape = (num_embeddings, embedding_dim)
        self.weight, _ = _weight(shape, 0, 1, init_method, params_dtype, use_cpu_initialization)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings [..., embedding_dim] of indices [...], equal on all ranks.

        Collective. An index outside of the vocabulary gives zeros on several ranks; on one rank it
        is PyTorch's error.

        Args:
            input_: int32 or int64 [...], equal on all ranks.
        """
        if self.tensor_model_parallel_size == 1:
            return functional.embedding(input_, self.weight)
        others = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
        own = (input_ - self.vocab_start_index).masked_fill(others, 0)
        found = functional.embedding(own, self.weight).masked_fill(others[..., None], 0.0)
        return mappings.reduce_from_tensor_model_parallel_region(found)


class ColumnParallelLinear(torch.nn.Module):
    """Linear layer whose outputs are split over the tensor-parallel ranks.

    Args:
        input_size: input features.
        output_size: output features, a multiple of the number of ranks; with ``stride``, of
            ``stride`` times that.
        bias: adds a bias.
        gather_output: returns all ranks' outputs instead of this rank's.
        init_method: initializes the weight in place.
        stride: pieces of the weight that are split one by one, such as 3 for query, key and value.
        keep_master_weight_for_test: keeps the whole weight as ``master_weight``, if drawn on the
            CPU.
        skip_bias_add: returns the bias instead of adding it.
        no_async_tensor_model_parallel_allreduce: sums the input's gradient over ranks after
            computing the weight's gradient, instead of at the same time.
        params_dtype: dtype of the parameters; None for torch's default.
        use_cpu_initialization: draws the whole weight on the CPU, equal for any number of ranks,
            and keeps its part there; False uses the current GPU if there is one.
        gradient_accumulation_fusion: adds the weight's gradient to ``weight.main_grad``.
        accumulation_in_fp16: ``main_grad`` has the weight's dtype.
        sequence_parallel_enabled: the input is this rank's rows, the first dimension's; requires
            ``gather_output=False``.

    Raises:
        ValueError: the number of ranks, or ``stride``, does not divide ``output_size``, or options
            exclude each other.

    Source: apex.transformer.tensor_parallel.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        init_method: Initialize = init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        *,
        no_async_tensor_model_parallel_allreduce: bool = False,
        params_dtype: torch.dtype | None = None,
        use_cpu_initialization: bool = False,
        gradient_accumulation_fusion: bool = False,
        accumulation_in_fp16: bool = False,
        sequence_parallel_enabled: bool = False,
    ) -> None:
        super().__init__()
        if sequence_parallel_enabled and gather_output:
            raise ValueError(
                "ColumnParallelLinear: gather_output must be False with sequence_parallel_enabled,"
                " got True"
            )
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        self.input_size = input_size
        self.output_size = output_size
        self.output_size_per_partition = divide(output_size, ranks)
        self.gather_output = gather_output
        self.skip_bias_add = skip_bias_add
        self.gradient_accumulation_fusion = gradient_accumulation_fusion
        self.accumulation_in_fp16 = accumulation_in_fp16
        self.sequence_parallel_enabled = sequence_parallel_enabled and ranks > 1
        self.async_tensor_model_parallel_allreduce = (
            ranks > 1
            and not sequence_parallel_enabled
            and not no_async_tensor_model_parallel_allreduce
        )
        self.weight, self.master_weight = _weight(
            (output_size, input_size), 0, stride, init_method, params_dtype,
            use_cpu_initialization, keep_master_weight_for_test,
        )  # fmt: skip
        size = self.output_size_per_partition
        self.bias = _bias(size, self.weight, stride) if bias else None

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the output, and the bias if it was not added, else None.

        Args:
            input_: [..., input_size] in the parameters' dtype, or any float dtype under
                ``torch.autocast``, equal on all ranks; with ``sequence_parallel_enabled`` this
                rank's part of the first dimension.

        Returns:
            output: [..., output_size]; with ``gather_output=False`` this rank's columns [...,
                output_size / ranks].
            bias: this rank's bias with ``skip_bias_add``, else None.
        """
        overlaps = self.async_tensor_model_parallel_allreduce
        if not overlaps and not self.sequence_parallel_enabled:
            input_ = mappings.copy_to_tensor_model_parallel_region(input_)
        out = linear_with_grad_accumulation_and_async_allreduce(
            input_,
            self.weight,
            None if self.skip_bias_add else self.bias,
            self.gradient_accumulation_fusion,
            overlaps,
            self.sequence_parallel_enabled,
            self.accumulation_in_fp16,
        )
        if self.gather_output:
            out = mappings.gather_from_tensor_model_parallel_region(out)
        return out, self.bias if self.skip_bias_add else None


class RowParallelLinear(torch.nn.Module):
    """Linear layer whose inputs are split over the tensor-parallel ranks.

    Args:
        input_size: input features, a multiple of the number of ranks.
        output_size: output features.
        bias: adds a bias, which all ranks hold.
        input_is_parallel: the input is this rank's features, as a column-parallel layer returns.
        init_method: initializes the weight in place.
        stride: pieces of the weight that are split one by one.
        keep_master_weight_for_test: keeps the whole weight as ``master_weight``, if drawn on the
            CPU.
        skip_bias_add: returns the bias instead of adding it.
        params_dtype: dtype of the parameters; None for torch's default.
        use_cpu_initialization: draws the whole weight on the CPU, equal for any number of ranks,
            and keeps its part there; False uses the current GPU if there is one.
        gradient_accumulation_fusion: adds the weight's gradient to ``weight.main_grad``.
        accumulation_in_fp16: ``main_grad`` has the weight's dtype.
        sequence_parallel_enabled: returns this rank's rows, the first dimension's; requires
            ``input_is_parallel=True``.

    Raises:
        ValueError: the number of ranks, or ``stride``, does not divide ``input_size``, or options
            exclude each other.

    Source: apex.transformer.tensor_parallel.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        init_method: Initialize = init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        *,
        params_dtype: torch.dtype | None = None,
        use_cpu_initialization: bool = False,
        gradient_accumulation_fusion: bool = False,
        accumulation_in_fp16: bool = False,
        sequence_parallel_enabled: bool = False,
    ) -> None:
        super().__init__()
        if sequence_parallel_enabled and not input_is_parallel:
            raise ValueError(
                "RowParallelLinear: input_is_parallel must be True with sequence_parallel_enabled,"
                " got False"
            )
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        self.input_size = input_size
        self.output_size = output_size
        self.input_size_per_partition = divide(input_size, ranks)
        self.input_is_parallel = input_is_parallel
        self.skip_bias_add = skip_bias_add
        self.gradient_accumulation_fusion = gradient_accumulation_fusion
        self.accumulation_in_fp16 = accumulation_in_fp16
        self.sequence_parallel_enabled = sequence_parallel_enabled and ranks > 1
        self.weight, self.master_weight = _weight(
            (output_size, input_size), 1, stride, init_method, params_dtype,
            use_cpu_initialization, keep_master_weight_for_test,
        )  # fmt: skip
        self.bias = _bias(output_size, self.weight, None) if bias else None
        if self.bias is not None:
            self.bias.sequence_parallel_enabled = sequence_parallel_enabled  # type: ignore[attr-defined]

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the output, and the bias if it was not added, else None.

        Args:
            input_: [..., input_size] in the parameters' dtype, or any float dtype under
                ``torch.autocast``, equal on all ranks; with ``input_is_parallel`` this rank's
                columns [..., input_size / ranks].

        Returns:
            output: [..., output_size], equal on all ranks; with ``sequence_parallel_enabled`` this
                rank's part of the first dimension.
            bias: the bias with ``skip_bias_add``, else None.

        Raises:
            ValueError: ``sequence_parallel_enabled``, and the number of ranks does not divide the
                first dimension.
        """
        if not self.input_is_parallel:
            input_ = mappings.scatter_to_tensor_model_parallel_region(input_)
        out = linear_with_grad_accumulation_and_async_allreduce(
            input_,
            self.weight,
            None,
            self.gradient_accumulation_fusion,
            False,
            False,
            self.accumulation_in_fp16,
        )
        if self.sequence_parallel_enabled:
            out = mappings.reduce_scatter_to_sequence_parallel_region(out)
        else:
            out = mappings.reduce_from_tensor_model_parallel_region(out)
        if self.skip_bias_add:
            return out, self.bias
        return out if self.bias is None else out + self.bias, None
