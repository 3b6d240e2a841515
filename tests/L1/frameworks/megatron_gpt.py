"""A tiny GPT of Megatron-Core on CPU ranks, and what the tests have each rank do with it.

Functions named ``rank_...`` run on every rank, in processes of their own, and return what travels
by pickle. The processes find apex_te as ``transformer_engine`` by the environment of conftest.py.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import apex_te  # Megatron, imported next, finds the alias that this installs

# isort: split
import megatron.core
import torch
from megatron.core import (
    dist_checkpointing,
    fp8_utils,
    num_microbatches_calculator,
    parallel_state,
)
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
    param_and_grad_buffer,
)
from megatron.core.extensions import transformer_engine as megatron_te
from megatron.core.models.common.embeddings import (
    rotary_pos_embedding,
    yarn_rotary_pos_embedding,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import (
    MLATransformerConfig,
    TransformerConfig,
    attention,
    cuda_graphs,
)
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch.overrides import TorchFunctionMode
from transformer_engine.pytorch.optimizers import FusedAdam

from apex_te.fp8.delayed.ranks import amax_groups
from apex_te.fp8.delayed.serialize import NAMES
from apex_te.integrations.megatron.experts import use_fused_experts
from apex_te.module._core.fp8_module import FP8Module

VOCABULARY, LENGTH, BATCH, STEPS = 64, 32, 4, 20
LLAMA = {
    "normalization": "RMSNorm", "gated_linear_unit": True, "num_query_groups": 2,
    "activation_func": torch.nn.functional.silu, "add_bias_linear": False, "qk_layernorm": True,
}  # fmt: skip
MOE = {
    **LLAMA, "num_moe_experts": 4, "moe_grouped_gemm": True, "moe_router_topk": 2,
    "moe_token_dispatcher_type": "allgather", "moe_ffn_hidden_size": 64,
    "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2,
}  # fmt: skip
MLA = {
    "normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False,
    "activation_func": torch.nn.functional.silu, "qk_layernorm": True,
    "multi_latent_attention": True, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_head_dim": 32,
    "qk_pos_emb_head_dim": 16, "v_head_dim": 32, "rope_type": "yarn", "rotary_scaling_factor": 4,
    "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 1.0,
}  # fmt: skip
SIZES = (
    "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim",
    "rotary_scaling_factor", "mscale", "mscale_all_dim",
)  # fmt: skip
FP8 = {
    "delayed": {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 4},
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
}


def splits_on_cpu(sizes: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Returns sizes that are on the CPU already as collectives take them."""
    return sizes.numpy() if as_numpy and sizes is not None else sizes


def own_angles(angles: torch.Tensor, seq_dim: int, cp_group: Any) -> torch.Tensor:
    """Returns a context-parallel rank's angles, for which Megatron indexes on a GPU."""
    return apex_te.split_for_context_parallel(angles, cp_group, seq_dim)


@contextlib.contextmanager
def parallel(tp: int = 1, ep: int = 1, cp: int = 1) -> Iterator[None]:
    """Sets up Megatron's groups of ranks and its random states, as a training script does."""
    amax_groups.pending = 0
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, expert_model_parallel_size=ep, context_parallel_size=cp
    )
    # Megatron asks for the current GPU, waits for it, and keeps its streams and random state.
    with contextlib.ExitStack() as stack:
        for where, name, function in (
            ()
            if torch.cuda.is_available()
            else (
                (torch.cuda, "current_device", lambda: torch.device("cpu")),
                (torch.cuda, "synchronize", lambda *args: None),
                (torch.cuda, "Stream", mock.MagicMock()),
                (torch.cuda, "current_stream", lambda *args: None),
                (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
                (rotary_pos_embedding, "get_pos_emb_on_this_cp_rank", own_angles),
                (yarn_rotary_pos_embedding, "get_pos_emb_on_this_cp_rank", own_angles),
                (token_dispatcher, "maybe_move_tensor_to_cpu", splits_on_cpu),
                (random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
                (random, "_set_cuda_rng_state", lambda state, **kwargs: torch.set_rng_state(state)),
            )
        ):
            stack.enter_context(mock.patch.object(where, name, function))
        model_parallel_cuda_manual_seed(1, te_rng_tracker=True, force_reset_rng=True)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


def gpt(fused_experts: bool = False, **options: Any) -> GPTModel:
    """Returns a GPT of two layers of Transformer Engine's modules."""
    torch.manual_seed(0)
    values: dict[str, Any] = {
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": torch.float32,
        "bias_activation_fusion": False, "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
    }  # fmt: skip
    is_latent = options.get("multi_latent_attention", False)
    make = MLATransformerConfig if is_latent else TransformerConfig
    config = make(**{**values, **options})
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=is_latent,
    )
    if fused_experts:
        use_fused_experts(spec)
    return GPTModel(
        config, spec, vocab_size=VOCABULARY, max_sequence_length=LENGTH,
        position_embedding_type="rope",
    )  # fmt: skip


def batch(step: int) -> torch.Tensor:
    """Returns the tokens of a step: sequences that count up, which a model can learn."""
    generator = torch.Generator().manual_seed(100 + step)
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    pace = torch.randint(1, 6, (BATCH, 1), generator=generator)
    return (start + pace * torch.arange(LENGTH + 1)) % VOCABULARY


def loss_of(model: GPTModel, step: int) -> torch.Tensor:
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
        mask = torch.triu(torch.ones(BATCH, 1, LENGTH, LENGTH), 1).bool()  # Megatron has one
    ids = batch(step).to(mask.device)
    data = {"input_ids": ids[:, :-1], "position_ids": positions, "labels": ids[:, 1:]}
    context = parallel_state.get_context_parallel_group()
    return model(attention_mask=mask, **apex_te.split_for_context_parallel(data, context)).mean()


def train(
    model: GPTModel, steps: range, optimizer: torch.optim.Optimizer | None = None
) -> list[float]:
    """Trains as Megatron's schedule does; returns the loss of each step."""
    optimizer = optimizer or torch.optim.Adam(model.parameters(), 2e-3)
    losses = []
    for step in steps:
        model.set_is_first_microbatch()
        loss = loss_of(model, step)
        loss.backward()
        finish_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def finish_gradients(model: GPTModel) -> None:
    """Does what Megatron's ``finalize_model_grads`` does where all ranks have the same batch.

    Context-parallel ranks have parts of it, and the mean of their gradients.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    context = parallel_state.get_context_parallel_group()
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        if context.size() > 1:
            torch.distributed.all_reduce(parameter.grad.div_(context.size()), group=context)
        if not getattr(parameter, "allreduce", True):  # an expert's, with the tokens of all ranks
            parameter.grad /= parallel_state.get_expert_model_parallel_world_size()
        if context.size() > 1:
            parameter.grad /= context.size()
            torch.distributed.all_reduce(parameter.grad, group=context)
        is_split = getattr(parameter, "sequence_parallel", False)
        if group.size() > 1 and (is_split or "q_layernorm" in name or "k_layernorm" in name):
            torch.distributed.all_reduce(parameter.grad, group=group)


def fp8_states(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the scales and histories of all modules, by name."""
    return {
        f"{name}.{kind}": getattr(module.fp8_state, kind).clone().cpu()
        for name, module in model.named_modules()
        if isinstance(module, FP8Module) and module.fp8_state.allocated
        for kind in NAMES
    }


def save(model: GPTModel, folder: str) -> None:
    """Saves as ``megatron.core.dist_checkpointing`` does; all ranks call it."""
    if torch.distributed.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
    torch.distributed.barrier()
    # Megatron writes in a process of its own, which daemons such as a rank may not start.
    with mock.patch.dict(multiprocessing.current_process()._config, daemon=False):
        dist_checkpointing.save(model.sharded_state_dict(), folder)


def load(model: GPTModel, folder: str) -> None:
    """Loads what ``save`` has saved, on these ranks or on others; strictly."""
    state = dist_checkpointing.load(model.sharded_state_dict(), folder)
    model.load_state_dict(state)


def rank_losses(rank: int, options: dict, tp: int = 1, ep: int = 1) -> list[float]:
    """Losses of training from new weights."""
    with parallel(tp, ep):
        return train(gpt(**options), range(STEPS))


def rank_split(rank: int, options: dict, tp: int, ep: int, folder: str | None) -> list[float]:
    """Losses of a few steps on several ranks, from the weights in ``folder`` or from new ones."""
    with parallel(tp, ep):
        model = gpt(**options)
        if folder is not None:
            load(model, folder)
        # Adam would make a large step of the sign of a gradient that is nearly 0.
        return train(model, range(6), torch.optim.SGD(model.parameters(), 0.1))


def rank_split_tokens(rank: int, options: dict, cp: int, folder: str) -> list[float]:
    """Losses as of ``rank_split``, with sequences split over ranks."""
    with parallel(cp=cp):
        model = gpt(**options)
        load(model, folder)
        losses = train(model, range(6), torch.optim.SGD(model.parameters(), 0.1))
        total = torch.tensor(losses, dtype=torch.float64)
        torch.distributed.all_reduce(total, group=parallel_state.get_context_parallel_group())
        return (total / cp).tolist()


def rank_latent_attention(rank: int) -> list[torch.Tensor]:
    """Results of Megatron's latent attention and of apex_te's with the same weights."""
    with parallel():
        theirs = gpt(**MLA).decoder.layers[1].self_attention
        for parameter in theirs.parameters():
            if parameter.dim() == 1:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        sizes = {name: MLA[name] for name in SIZES}
        ours = apex_te.MultiLatentAttention(64, 4, **sizes, layernorm_epsilon=1e-5)
        state = {k: v for k, v in theirs.state_dict().items() if "_extra_state" not in k}
        ours.load_state_dict(state, strict=False)
        assert len(state) == len([*ours.parameters()]) + 1  # two down projections are one
        angles = apex_te.YarnRotaryEmbedding(
            MLA["qk_pos_emb_head_dim"], interleaved=True,
            scaling_factor=MLA["rotary_scaling_factor"],
            original_max_position_embeddings=MLA["original_max_position_embeddings"],
        )(LENGTH)  # fmt: skip
        found = []
        x = torch.randn(LENGTH, BATCH, 64)
        for module, call in (
            (theirs, {"attention_mask": None}),
            (ours, {"rotary_pos_emb": angles}),
        ):
            leaf = x.clone().requires_grad_()
            out = module(leaf, **call)
            out = out[0] if isinstance(out, tuple) else out
            out.square().sum().backward()
            found += [out.detach(), leaf.grad]
        return found


def rank_saved(rank: int, options: dict, tp: int, ep: int, folder: str, steps: int) -> Any:
    """Trains, saves, and goes on; returns the later losses and the state that was saved."""
    with parallel(tp, ep):
        model = gpt(**options)
        train(model, range(steps))
        save(model, folder)
        return train(model, range(steps, steps + 3)), fp8_states(model)


def rank_loaded(rank: int, options: dict, tp: int, ep: int, folder: str, steps: int) -> Any:
    """Loads into a new model and goes on; returns the losses and the state after them."""
    with parallel(tp, ep):
        model = gpt(**options)
        load(model, folder)
        return train(model, range(steps, steps + 3)), fp8_states(model)


def rank_saved_again(rank: int, options: dict, tp: int, ep: int, folder: str, other: str) -> None:
    """Loads from a folder into a new model and saves that in another folder."""
    with parallel(tp, ep):
        model = gpt(**options)
        load(model, folder)
        save(model, other)


def rank_ends_writers(rank: int) -> None:
    """Ends the process that Megatron's saving has started and would leave behind."""
    if filesystem_async._results_queue is not None:
        filesystem_async._results_queue._manager.shutdown()
        filesystem_async._results_queue = None


def rank_calls(rank: int, function: Callable[..., Any], tp: int, ep: int, *args: Any) -> Any:
    """Result of ``function(*args)`` within Megatron's groups."""
    with parallel(tp, ep):
        return function(*args)


class OnCPU(TorchFunctionMode):
    """Has functions of Megatron that name CUDA compute on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.type and len(args) == 1:
            return TYPES[args[0].dtype]
        return function(*args, **kwargs)


TYPES = {torch.bfloat16: "torch.cuda.BFloat16Tensor", torch.float32: "torch.cuda.FloatTensor"}


@contextlib.contextmanager
def one_by_one(*args: Any, **kwargs: Any) -> Iterator[Any]:
    """Takes the place of torch's coalescing of collectives, which gloo does for one dtype only."""
    yield mock.Mock()


def rank_distributed_optimizer(rank: int, options: dict, steps: int, **ddp: Any) -> Any:
    """Trains data-parallel ranks with ZeRO by Megatron; returns the losses and the weights."""
    optimizing = OptimizerConfig(
        optimizer="adam", lr=2e-3, bf16=True, params_dtype=torch.bfloat16,
        use_distributed_optimizer=True, fp8_recipe=options.get("fp8_recipe"),
    )  # fmt: skip
    held = bool(options.get("fp8_param"))
    splitting = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, fp8_param_gather=held, **ddp
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(parallel())
        if not torch.cuda.is_available():
            stack.enter_context(OnCPU())
            where, name = param_and_grad_buffer, "_coalescing_manager"
            stack.enter_context(mock.patch.object(where, name, one_by_one))
        options = {**options, "bf16": True, "params_dtype": torch.bfloat16}
        model = gpt(**options)
        wrapped = DistributedDataParallel(model.config, splitting, model)
        optimizer, losses = get_megatron_optimizer(optimizing, [wrapped]), []
        for step in range(steps):
            wrapped.zero_grad_buffer()
            optimizer.zero_grad()
            model.set_is_first_microbatch()
            loss = loss_of(wrapped, step)
            loss.backward()
            finalize_model_grads([wrapped])
            optimizer.step()
            losses.append(loss.item())
        return losses, [p.detach().float().cpu() for p in model.parameters()]


def rank_graphs(rank: int, options: dict, steps: int) -> list[list[float]]:
    """Losses without and with the CUDA graphs of layers that Megatron makes; the latter's calls.

    Without a GPU a stand-in runs the captured layers again.
    """
    import graph_stand_in
    import pytest

    found = []
    num_microbatches_calculator.unset_num_microbatches_calculator()
    num_microbatches_calculator.init_num_microbatches_calculator(rank, None, BATCH, BATCH, 1)
    for graphs in ({}, {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": []}):
        with parallel(), pytest.MonkeyPatch.context() as patch:
            if not torch.cuda.is_available():
                graph_stand_in.install(patch)
                patch.setattr(torch.cuda, "empty_cache", lambda: None)
            model = gpt(**options, **graphs)
            layers = model.decoder.layers
            losses = train(model, range(2))
            if graphs:
                model.zero_grad_buffer = lambda: None  # DistributedDataParallel has it
                helper = cuda_graphs.TECudaGraphHelper([model], model.config, LENGTH, BATCH)
                helper.create_cudagraphs()
                assert all(len(layer.cuda_graphs) == 1 for layer in layers)
                for layer in () if torch.cuda.is_available() else layers:
                    # A call of the layer would ask for the stand-in's replay again.
                    layer.cuda_graphs[0].capture.forward = layer._te_cuda_graph_capture
            for layer in layers:
                layer.current_microbatch = 0
            losses += train(model, range(2, steps))
            found.append(losses)
            if graphs:
                found.append([layer.cuda_graphs[0].capture.run for layer in layers])
                helper.delete_cuda_graphs()
    return found


def rank_imports(rank: int) -> dict[str, str]:
    """Imports every module of Megatron-Core; returns the errors by name of the module."""
    errors = {}
    found = pkgutil.walk_packages(
        megatron.core.__path__, "megatron.core.", onerror=lambda name: None
    )
    for module in found:
        try:
            importlib.import_module(module.name)
        except Exception as error:
            errors[module.name] = f"{type(error).__name__}: {error}"
    return errors


def rank_flags(rank: int) -> dict[str, bool]:
    """Says whether Megatron's modules have found what they look for in Transformer Engine."""
    return {
        "HAVE_TE": megatron_te.HAVE_TE,
        "fp8_utils": fp8_utils.HAVE_TE,
        "grouped": megatron_te.TEGroupedLinear is not None,
        "rope": attention.HAVE_FUSED_QKV_ROPE,
        "permute": megatron_te.fused_permute is not None,
        "router": megatron_te.fused_topk_with_score_function is not None,
        "cross entropy": megatron_te.te_parallel_cross_entropy is not None,
        "checkpoint": callable(megatron_te.te_checkpoint),
        "moe": moe_utils.HAVE_TE,
    }


def rank_fp8_weights(rank: int, options: dict) -> tuple[list[float], set[str]]:
    """Trains with weights held in FP8; returns the losses and the weights' types."""
    with parallel():
        plain = gpt(**{**options, "fp8": None})
        model = gpt(**options, fp8_param=True)
        model.load_state_dict(plain.state_dict())
        weights = [
            parameter
            for module in model.modules()
            if isinstance(module, FP8Module)
            for name, parameter in module.named_parameters()
            if name == "weight"
        ]
        optimizer = FusedAdam(model.parameters(), 2e-3, master_weights=True)
        losses = train(model, range(STEPS), optimizer)
        return losses, {type(w).__name__ for w in weights}


def rank_states_saved(rank: int, options: dict, tp: int, ep: int, folder: str) -> dict:
    """Trains five steps, saves, and returns the scales and histories saved."""
    with parallel(tp, ep):
        model = gpt(**options)
        train(model, range(5))
        save(model, folder)
        return fp8_states(model)


def rank_states_loaded(rank: int, options: dict, tp: int, ep: int, folder: str) -> dict:
    """Loads into a new model, and returns its scales and histories."""
    with parallel(tp, ep):
        model = gpt(**options)
        load(model, folder)
        return fp8_states(model)


def rank_loads_te_state(
    rank: int, options: dict, blobs: list[torch.Tensor], values: list[dict[str, torch.Tensor]]
) -> list[str]:
    """Loads a state dict with a release's ``_extra_state``; returns the names of wrong states."""
    with parallel():
        model = gpt(**options)
        state = model.state_dict()
        modules = {n: m for n, m in model.named_modules() if isinstance(m, FP8Module)}
        for name, blob in zip(modules, blobs, strict=True):
            state[f"{name}._extra_state"] = blob
        empty = [name for name in state if name.endswith("core_attention._extra_state")]
        for name in empty:
            state[name] = torch.empty(0, dtype=torch.uint8)
        model.load_state_dict(state, strict=True)
        wrong = [] if empty else ["core_attention"]
        for (name, module), wanted in zip(modules.items(), values, strict=True):
            # Transformer Engine keeps a slot for the output, and one for its gradient.
            if not torch.equal(module.fp8_state.scale_fwd[:2], wanted["scale_fwd"][:2]):
                wrong.append(name)
        return wrong


def rank_fp8_weights_saved(rank: int, options: dict, tp: int, folder: str) -> list[str]:
    """Saves weights held in FP8, loads them over others; returns the names of those that differ."""
    with parallel(tp):
        model, other = gpt(**options, fp8_param=True), gpt(**options, fp8_param=True)
        save(model, folder)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.copy_(torch.randn(parameter.shape))
        load(other, folder)
        pairs = zip(model.named_parameters(), other.parameters(), strict=True)
        return [name for (name, a), b in pairs if not torch.equal(a.detach().float(), b.float())]
