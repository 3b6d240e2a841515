"""Parts of the schedules: a model's chunks, and the forward and backward of a microbatch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from ... import parallel_state
from ..._print import print_first
from ...enums import ModelType
from ...tensor_parallel.layers import set_defaults_if_not_set_tensor_model_parallel_attributes
from ..utils import Model, get_model_type, get_num_microbatches, listify_model, unwrap_model

Batch = torch.Tensor | Sequence[torch.Tensor] | None
LossFunc = Callable[[torch.Tensor], tuple[torch.Tensor, Any]]
FwdStepFunc = Callable[[Any, torch.nn.Module], tuple[torch.Tensor, LossFunc]]


def build_model(
    model_provider_func: Callable[..., torch.nn.Module],
    wrap_with_ddp: bool = True,
    virtual_pipeline_model_parallel_size: int | None = None,
    model_type: ModelType = ModelType.encoder_or_decoder,
    *args: Any,
    **kwargs: Any,
) -> list[torch.nn.Module]:
    """Returns this stage's chunks of a model, on the current GPU if there is one.

    Args:
        model_provider_func: called with ``args``, ``kwargs`` and the flags ``pre_process`` and
            ``post_process``, which are True for the model's first and last chunk.
        wrap_with_ddp: wraps the chunks in torch's DistributedDataParallel.
        virtual_pipeline_model_parallel_size: chunks of a stage; None for one.
        model_type: kind of the model, which becomes its ``model_type``.

    Raises:
        NotImplementedError: a model with encoder and decoder over several stages.
    """
    is_piped = parallel_state.get_pipeline_model_parallel_world_size() > 1
    if is_piped and model_type is ModelType.encoder_and_decoder:
        _refuse_encoder_and_decoder()
    virtual = virtual_pipeline_model_parallel_size if is_piped else None
    chunks = []
    for chunk in range(virtual or 1):
        if virtual is not None:
            parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
        ends = {
            "pre_process": parallel_state.is_pipeline_first_stage(),
            "post_process": parallel_state.is_pipeline_last_stage(),
        }
        model: Any = model_provider_func(*args, **{**kwargs, **ends})
        model.model_type = model_type
        chunks.append(model)
    for model in chunks:
        for param in model.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(param)
    count = sum(param.numel() for model in chunks for param in model.parameters())
    print_first(f" > parameters on the first rank: {count}")
    cuda = torch.cuda.current_device() if torch.cuda.is_available() else None
    if cuda is not None:
        chunks = [model.cuda(cuda) for model in chunks]
    if wrap_with_ddp:
        devices = None if cuda is None else [cuda]
        group = parallel_state.get_data_parallel_group()
        chunks = [
            DistributedDataParallel(model, device_ids=devices, process_group=group)
            for model in chunks
        ]
    return chunks


def _get_params_for_weight_decay_optimization(
    model: Model, *, no_weight_decay_modules: tuple[type, ...] = (torch.nn.LayerNorm,)
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns two groups of parameters: those with weight decay, and biases and norms without."""
    decays: dict[str, Any] = {"params": []}
    others: dict[str, Any] = {"params": [], "weight_decay": 0.0}
    for chunk in listify_model(model):
        for module in chunk.modules():
            is_norm = isinstance(module, no_weight_decay_modules)
            is_norm = is_norm or type(module).__name__.endswith(("LayerNorm", "RMSNorm"))
            for name, param in module.named_parameters(recurse=False):
                group = others if is_norm or name == "bias" else decays
                group["params"].append(param)
    return decays, others


def _refuse_encoder_and_decoder() -> None:
    raise NotImplementedError(
        "apex.transformer.pipeline_parallel: models with encoder and decoder are not served over"
        " several stages; megatron.core.pipeline_parallel has them"
    )


def check_model(model: Model) -> list[torch.nn.Module]:
    """Returns the model's chunks; raises NotImplementedError for an encoder and a decoder."""
    chunks = listify_model(model)
    if any(get_model_type(chunk) is ModelType.encoder_and_decoder for chunk in chunks):
        _refuse_encoder_and_decoder()
    return chunks


def message_shape(
    schedule: str, tensor_shape: Sequence[int] | None, sequence_parallel_enabled: bool
) -> list[int]:
    """Returns the shape of a message between stages; sequence parallelism splits its rows."""
    if tensor_shape is None:
        raise ValueError(f"{schedule}: tensor_shape must be given for a pipeline, got None")
    shape = list(tensor_shape)
    if sequence_parallel_enabled:
        shape[0] //= parallel_state.get_tensor_model_parallel_world_size()
    return shape


@contextlib.contextmanager
def gradients_summed_once(
    chunks: Sequence[torch.nn.Module], context: Callable[[], Any] | None = None
) -> Iterator[None]:
    """Averages gradients over data-parallel ranks after the block instead of in each backward.

    Only DistributedDataParallel modules have that; ``context`` replaces it.
    """
    wrapped = [each for each in chunks if isinstance(each, DistributedDataParallel)]
    with contextlib.ExitStack() as stack:
        if context is not None:
            stack.enter_context(context())
        else:
            for each in wrapped:
                stack.enter_context(each.no_sync())
        yield
    for each in () if context is not None else wrapped:
        ranks = distributed.get_world_size(each.process_group)
        for param in each.parameters():
            if param.grad is not None and ranks > 1:
                param.grad /= ranks
                distributed.all_reduce(param.grad, group=each.process_group)


def forward_step(
    forward_step_func: FwdStepFunc,
    batch: Any,
    model: torch.nn.Module,
    input_tensor: torch.Tensor | None,
    losses_reduced: list[Any],
    dtype: torch.dtype | None,
    disable_autocast: bool = False,
) -> torch.Tensor:
    """Returns the model's output of a microbatch, on the last stage its part of the step's loss.

    Args:
        forward_step_func: returns the output, and the function of the loss, which returns the loss
            and what is appended to ``losses_reduced``.
        batch: the microbatch.
        model: gets ``input_tensor``, in a list, through its method ``set_input_tensor``.
        input_tensor: output of the previous stage, None on the first.
        losses_reduced: appended to on the last stage.
        dtype: float16 or bfloat16 runs the model in an autocast region.
        disable_autocast: runs it without.
    """
    unwrapped = unwrap_model(model)
    if input_tensor is not None or hasattr(unwrapped, "set_input_tensor"):
        unwrapped.set_input_tensor([input_tensor])
    casts = not disable_autocast and dtype in (torch.float16, torch.bfloat16)
    kind = next((param.device.type for param in model.parameters()), "cpu")
    with torch.autocast(kind, dtype=dtype if casts else None, enabled=casts):
        output, loss_func = forward_step_func(batch, model)
        if not parallel_state.is_pipeline_last_stage():
            return output
        loss, reduced = loss_func(output)
    losses_reduced.append(reduced)
    return loss / get_num_microbatches()


def backward_step(
    input_tensor: torch.Tensor | None,
    output_tensor: torch.Tensor,
    output_tensor_grad: torch.Tensor | None,
    model_type: ModelType = ModelType.encoder_or_decoder,
    *,
    grad_scaler: Any = None,
    deallocate_pipeline_outputs: bool = False,
) -> torch.Tensor | None:
    """Runs a microbatch's backward and returns the gradient of its input, None on the first stage.

    Args:
        input_tensor: the forward's input.
        output_tensor: the forward's output.
        output_tensor_grad: its gradient; None on the last stage, whose loss ``grad_scaler`` scales.
        model_type: kind of the model.
        grad_scaler: object with a method ``scale``, or None.
        deallocate_pipeline_outputs: the output's memory was released by ``free_output_tensor``.
    """
    if input_tensor is not None:
        input_tensor.retain_grad()
    if output_tensor_grad is None and grad_scaler is not None:
        output_tensor = grad_scaler.scale(output_tensor)
    if deallocate_pipeline_outputs and output_tensor_grad is not None:
        custom_backward(output_tensor, output_tensor_grad)
    else:
        torch.autograd.backward(output_tensor, output_tensor_grad)
    return None if input_tensor is None else input_tensor.grad


def free_output_tensor(output_tensor: torch.Tensor | None, deallocate: bool) -> None:
    """Releases the memory of an output that was sent, whose graph is still needed."""
    if deallocate and output_tensor is not None:
        output_tensor.data = output_tensor.new_empty(1)


def custom_backward(output: torch.Tensor, grad_output: torch.Tensor | None) -> None:
    """Runs backward from an output of another shape than its gradient's."""
    torch.autograd.Variable._execution_engine.run_backward(
        tensors=(output,),
        grad_tensors=(grad_output,),
        keep_graph=False,
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )
