"""apex.transformer in one process: functions against torch, and what programs import."""

import itertools

import pytest
import torch
from checks import DTYPES, assert_as_good_as_torch
from torch import distributed

from apex_te.integrations.apex import normalization, transformer
from apex_te.integrations.apex.transformer import AttnMaskType, microbatches, parallel_state
from apex_te.integrations.apex.transformer._data import (
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
)
from apex_te.integrations.apex.transformer.functional import (
    FusedScaleMaskSoftmax,
    fused_apply_rotary_pos_emb,
    fused_apply_rotary_pos_emb_2d,
    fused_apply_rotary_pos_emb_cached,
    fused_apply_rotary_pos_emb_thd,
)
from apex_te.integrations.apex.transformer.functional.fused_softmax import (
    GenericFusedScaleMaskSoftmax,
    ScaledMaskedSoftmax,
    ScaledUpperTriangMaskedSoftmax,
)
from apex_te.integrations.apex.transformer.layers import (
    FastLayerNorm,
    FusedLayerNorm,
    MixedFusedLayerNorm,
)
from apex_te.integrations.apex.transformer.pipeline_parallel import utils
from apex_te.integrations.apex.transformer.tensor_parallel import memory, random


@pytest.fixture
def alone(tmp_path):
    """The groups of a world of one process."""
    method = f"file://{tmp_path}/store"
    distributed.init_process_group("gloo", init_method=method, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    distributed.destroy_process_group()


NEMO = """
from apex.transformer import parallel_state, tensor_parallel
from apex.transformer.amp import GradScaler
from apex.transformer.enums import AttnMaskType, AttnType, LayerType, ModelType
from apex.transformer.functional.fused_softmax import FusedScaleMaskSoftmax
from apex.transformer.functional.fused_softmax import ScaledMaskedSoftmax
from apex.transformer.layers.layer_norm import FastLayerNorm, FusedLayerNorm
from apex.transformer.log_util import set_logging_level
from apex.transformer.microbatches import ConstantNumMicroBatches
from apex.transformer.parallel_state import (
    get_pipeline_model_parallel_rank,
    set_pipeline_model_parallel_rank,
    set_pipeline_model_parallel_split_rank,
    set_pipeline_model_parallel_world_size,
    set_tensor_model_parallel_rank,
    set_tensor_model_parallel_world_size,
    set_virtual_pipeline_model_parallel_rank,
)
from apex.transformer.pipeline_parallel import get_forward_backward_func
from apex.transformer.pipeline_parallel.schedules.common import build_model
from apex.transformer.pipeline_parallel.schedules.common import (
    _get_params_for_weight_decay_optimization,
)
from apex.transformer.pipeline_parallel.schedules.fwd_bwd_no_pipelining import (
    forward_backward_no_pipelining,
)
from apex.transformer.pipeline_parallel.schedules import (
    fwd_bwd_pipelining_with_interleaving, fwd_bwd_pipelining_without_interleaving,
)
from apex.transformer.pipeline_parallel.utils import (
    _reconfigure_microbatch_calculator,
    get_micro_batch_size,
    get_num_microbatches,
    setup_microbatch_calculator,
    update_num_microbatches,
)
from apex.transformer.tensor_parallel.layers import (
    ColumnParallelLinear, RowParallelLinear, linear_with_grad_accumulation_and_async_allreduce,
    set_tensor_model_parallel_attributes,
)
from apex.transformer.tensor_parallel.random import (
    model_parallel_cuda_manual_seed,
)
from apex.transformer.utils import divide, ensure_divisibility
"""


def test_what_programs_import():
    """The import patterns of NeMo, Megatron-LM's older releases and their descendants."""
    exec(NEMO.replace("from apex.", "from apex_te.integrations.apex."), {})
    for name in transformer.__all__:
        assert hasattr(transformer, name)


def test_state_before_and_after():
    assert parallel_state.is_unitialized()
    assert parallel_state.get_rank_info() == (0, 0, 0, 0)
    with pytest.raises(RuntimeError, match=r"the tensor group does not exist, call initialize_mod"):
        parallel_state.get_tensor_model_parallel_world_size()
    with pytest.raises(RuntimeError, match=r"torch.distributed must be initialised"):
        parallel_state.initialize_model_parallel()


def test_sizes_and_ranks_can_be_set(alone):
    with pytest.raises(RuntimeError, match="the groups already exist"):
        parallel_state.initialize_model_parallel()
    parallel_state.set_tensor_model_parallel_world_size(4)
    parallel_state.set_tensor_model_parallel_rank(3)
    parallel_state.set_pipeline_model_parallel_world_size(4)
    parallel_state.set_pipeline_model_parallel_rank(2)
    parallel_state.set_pipeline_model_parallel_split_rank(2)
    assert parallel_state.get_rank_info() == (0, 3, 2, None)
    assert not parallel_state.is_pipeline_last_stage()
    assert parallel_state.is_pipeline_stage_after_split()
    assert not parallel_state.is_pipeline_stage_before_split()
    assert parallel_state.is_pipeline_stage_before_split(1)
    parallel_state.destroy_model_parallel()
    with pytest.raises(ValueError, match="must be at least 2 for the interleaved schedule, got 1"):
        parallel_state.initialize_model_parallel(virtual_pipeline_model_parallel_size_=2)
    parallel_state.initialize_model_parallel()


def exact_softmax(x, scale, hidden):
    return torch.softmax((x * scale).masked_fill(hidden, -torch.inf), -1).nan_to_num(0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", list(AttnMaskType))
@pytest.mark.parametrize("fused", [True, False])
def test_softmax(device, dtype, kind, fused):
    """Forward and backward, by the op and by torch."""
    causal = kind is AttnMaskType.causal
    x, dy = torch.randn(2, 2, 3, 24, 24, device=device).to(dtype)
    mask = torch.rand(2, 1, 24, 24, device=device) < 0.3
    hidden = torch.ones(24, 24, dtype=torch.bool, device=device).triu(1) if causal else mask
    fill = lambda scores, mask: scores.masked_fill(mask, -torch.inf)  # noqa: E731
    module = FusedScaleMaskSoftmax(
        dtype is torch.float16, dtype is torch.bfloat16, kind, fused, fill, True, 0.5
    )
    assert module.is_kernel_available(mask, *x.shape) == fused

    def run(call, x, dy):
        x = x.detach().requires_grad_()
        y = call(x)
        return y.detach(), *torch.autograd.grad(y, x, dy)

    actual = run(lambda x: module(x, None if causal else mask), x, dy)
    exact = run(lambda x: exact_softmax(x, 0.5, hidden), x.double(), dy.double())
    plain = run(lambda x: exact_softmax(x, 0.5, hidden), x, dy)
    for result, wanted, same_dtype in zip(actual, exact, plain, strict=True):
        assert_as_good_as_torch(result, wanted, same_dtype)
    if fused and causal:
        flat = ScaledUpperTriangMaskedSoftmax.apply(x.flatten(0, 1), 0.5)
        assert torch.equal(flat.view(x.shape), actual[0])
    elif fused:
        assert torch.equal(ScaledMaskedSoftmax.apply(x, mask, 0.5), actual[0])
        generic = GenericFusedScaleMaskSoftmax(
            dtype is torch.float16, dtype is torch.bfloat16, True, fill, True, 0.5
        )
        assert torch.equal(generic(x, mask), actual[0])


def test_softmax_arguments():
    arguments = (AttnMaskType.padding, True, None)
    with pytest.raises(RuntimeError, match="cannot be active at the same time"):
        FusedScaleMaskSoftmax(True, True, *arguments, True, None)
    with pytest.raises(RuntimeError, match="should be in fp32 when scaled"):
        FusedScaleMaskSoftmax(True, False, *arguments, False, 2.0)
    with pytest.raises(ValueError, match="attn_mask_type must be"):
        FusedScaleMaskSoftmax(True, False, None, True, None, True, None)
    causal = FusedScaleMaskSoftmax(True, False, AttnMaskType.causal, True, None, True, None)
    with pytest.raises(ValueError, match="only for self attention"):
        causal(torch.ones(1, 1, 2, 3).half(), None)
    with pytest.raises(ValueError, match=r"input must be \[b, np, sq, sk\]"):
        causal(torch.ones(1, 2, 3).half(), None)


def rotated(t, cos, sin):
    """The formula, of whatever broadcasts to t."""
    first, second = t.chunk(2, -1)
    return t * cos + torch.cat((-second, first), -1) * sin


def tables(freqs):
    return freqs.cos(), freqs.sin()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["plain", "transposed", "cached", "thd", "2d"])
def test_rotary_embedding(device, dtype, form):
    """Forward and backward of each layout, in which halves of the angles differ."""
    cu = torch.tensor([0, 5, 12], dtype=torch.int32, device=device)
    shape = {"thd": (12, 3, 8), "2d": (2, 12, 3, 16)}.get(form, (7, 2, 3, 8))
    t, dy = torch.randn(2, *shape, device=device).to(dtype)
    freqs = torch.randn(7, 1, 1, 8, device=device)
    rows, columns = torch.randn(1, 4, 1, 8, device=device), torch.randn(1, 5, 1, 8, device=device)

    def call(t):
        if form == "cached":
            return fused_apply_rotary_pos_emb_cached(t, *tables(freqs))
        if form == "thd":
            return fused_apply_rotary_pos_emb_thd(t, cu, freqs)
        if form == "2d":
            return fused_apply_rotary_pos_emb_2d(t, 3, 4, *tables(rows), *tables(columns))
        return fused_apply_rotary_pos_emb(t, freqs, form == "transposed")

    def formula(t):
        if form == "thd":
            angles = torch.cat([freqs[:5], freqs[:7]])[:, 0]
            return rotated(t, *(each.to(t.dtype) for each in tables(angles)))
        if form == "2d":
            x = t.view(2, 3, 4, 3, 16)
            halves = (rows[0, :3, None, None, 0], columns[0, :4, None, 0])
            by_row, by_column = (
                rotated(part, *(each.to(t.dtype) for each in tables(angles)))
                for part, angles in zip(x.split(8, -1), halves, strict=True)
            )
            return torch.cat((by_row, by_column), -1).view(t.shape)
        return rotated(t, *(each.to(t.dtype) for each in tables(freqs)))

    def run(function, t, dy):
        t = t.detach().requires_grad_()
        y = function(t)
        return y.detach(), *torch.autograd.grad(y, t, dy)

    actual = run(call, t, dy)
    if form == "transposed":
        assert actual[0].transpose(0, 1).is_contiguous()
    exact, plain = run(formula, t.double(), dy.double()), run(formula, t, dy)
    for result, wanted, same_dtype in zip(actual, exact, plain, strict=True):
        assert_as_good_as_torch(result, wanted, same_dtype)


def test_rotary_embedding_of_another_number_of_patches():
    table = torch.zeros(1, 4, 1, 4)
    with pytest.raises(ValueError, match=r"t must have 3 \* 4 patches, got 11"):
        fused_apply_rotary_pos_emb_2d(torch.zeros(1, 11, 1, 8), 3, 4, *[table] * 4)


@pytest.mark.parametrize("cls", [FusedLayerNorm, MixedFusedLayerNorm, FastLayerNorm])
def test_layer_norms(device, cls):
    module = cls(48, sequence_parallel_enabled=True).to(device)
    assert all(param.sequence_parallel_enabled for param in module.parameters())
    assert not any(param.sequence_parallel_enabled for param in cls(8).parameters())
    x = torch.randn(5, 48, device=device)
    expected = torch.nn.functional.layer_norm(x, (48,), module.weight, module.bias)
    torch.testing.assert_close(module(x), expected)
    assert isinstance(module, normalization.FusedLayerNorm)
    half = module(x.bfloat16()) if cls is MixedFusedLayerNorm else module.bfloat16()(x.bfloat16())
    assert half.dtype is (torch.float32 if cls is MixedFusedLayerNorm else torch.bfloat16)


# Microbatches and samplers ------------------------------------------------------------------------


def test_microbatches(monkeypatch):
    monkeypatch.setattr(utils, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", None)
    with pytest.raises(RuntimeError, match="calculator is not set"):
        utils.get_num_microbatches()
    utils.setup_microbatch_calculator(0, [4, 4, 32], 12, 2, 2)
    seen = []
    for consumed in (0, 15, 16, 31, 32, 33, 100):
        utils.update_num_microbatches(consumed)
        seen.append((utils.get_current_global_batch_size(), utils.get_num_microbatches()))
    assert seen == [(4, 1), (4, 1), (8, 2), (8, 2), (12, 3), (12, 3), (12, 3)]
    with pytest.raises(RuntimeError, match="already set up"):
        utils.setup_microbatch_calculator(0, None, 12, 2, 2)
    with pytest.warns(UserWarning, match="only for unittest"):
        utils._reconfigure_microbatch_calculator(0, None, 12, 2, 3)
    assert (utils.get_num_microbatches(), utils.get_micro_batch_size()) == (2, 2)
    batch = [torch.arange(6), torch.arange(12).view(6, 2)]
    assert utils.get_kth_microbatch(batch, 2)[0].tolist() == [4, 5]
    assert utils.get_kth_microbatch(None, 2) is None
    with pytest.raises(ValueError, match="must have at least 8 samples, got 6"):
        utils.get_kth_microbatch(batch, 3)
    with pytest.raises(ValueError, match=r"must be a multiple of .* = 5, got 12"):
        microbatches.ConstantNumMicroBatches(12, 5, 1)
    with pytest.raises(ValueError, match=r"must be \[start, increment, samples\]"):
        microbatches.build_num_microbatches_calculator(0, [1, 2], 4, 1, 1)
    with pytest.raises(ValueError, match=r"batch_size_increment must divide .* 7, got 2"):
        microbatches.build_num_microbatches_calculator(0, [1, 2, 8], 8, 1, 1)


@pytest.mark.parametrize("cls", [MegatronPretrainingSampler, MegatronPretrainingRandomSampler])
@pytest.mark.parametrize("consumed", [0, 8])
def test_samplers(cls, consumed):
    """Ranks share each batch without overlap, and a resumed sampler goes on where it was."""
    ranks = [list(cls(26, consumed, 2, rank, 2)) for rank in range(2)]
    assert [len(batches) for batches in ranks] == [6 - consumed // 4] * 2
    flat = list(itertools.chain(*itertools.chain(*ranks)))
    assert len(set(flat)) == len(flat) == 24 - consumed
    begun = [list(cls(26, 0, 2, rank, 2)) for rank in range(2)]
    assert [each[consumed // 4 :] for each in begun] == ranks
    if cls is MegatronPretrainingSampler:
        assert ranks[1][0] == [consumed + 2, consumed + 3]
        assert list(cls(26, 24, 2, 0, 2, drop_last=False)) == [[24, 25]]
        with pytest.raises(RuntimeError, match="consumed_samples must be below 26, got 26"):
            cls(26, 26, 2, 0, 2)
    else:
        assert list(cls(26, 24, 2, 0, 2)) != begun[0]  # another epoch
    with pytest.raises(RuntimeError, match="data_parallel_rank must be below 2, got 2"):
        cls(26, 0, 2, 2, 2)


@pytest.mark.parametrize("reset_positions", [True, False])
@pytest.mark.parametrize("reset_mask", [True, False])
def test_masks_and_positions(reset_positions, reset_mask):
    """Document by document, as the rule reads."""
    data = torch.tensor([[3, 0, 5, 6, 0, 0, 2], [1, 2, 3, 4, 5, 6, 0]])
    mask, loss, positions = utils.get_ltor_masks_and_position_ids(
        data, 0, reset_positions, reset_mask, True
    )
    assert mask.shape == (2 if reset_mask else 1, 1, 7, 7)
    assert torch.equal(loss, (data != 0).float())
    for row, tokens in enumerate(data.tolist()):
        document, begin, documents, wanted = 0, 0, [], []
        for index, token in enumerate(tokens):
            documents.append(document)
            wanted.append(index - begin if reset_positions else index)
            if token == 0:
                document, begin = document + 1, index + 1
        assert positions[row].tolist() == wanted
        for i, j in itertools.product(range(7), repeat=2):
            hidden = j > i or (reset_mask and documents[i] != documents[j])
            assert bool(mask[row if reset_mask else 0, 0, i, j]) == hidden


# What trains ------------------------------------------------------------------------------------


def test_recompute_repeats_dropout_of_both_sequences(alone):
    random.model_parallel_cuda_manual_seed(5)
    weight = torch.randn(8, 8, requires_grad=True)

    def layer(x):
        y = torch.nn.functional.dropout(x @ weight, 0.5)
        with random.get_cuda_rng_tracker().fork():
            return torch.nn.functional.dropout(y, 0.5).tanh()

    x = torch.randn(4, 8, requires_grad=True)
    found = []
    for call in (layer, lambda x: random.checkpoint(layer, False, x)):
        random.model_parallel_cuda_manual_seed(6)
        torch.manual_seed(7)
        y = call(x)
        grads = torch.autograd.grad(y.sum(), (x, weight))
        found.append((y.detach(), *grads, torch.rand(2)))
        with random.get_cuda_rng_tracker().fork():
            found[-1] += (torch.rand(2),)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_groups_of_weight_decay_and_norm_of_parameters(alone):
    from apex_te.integrations.apex.transformer.pipeline_parallel.schedules import common

    model = torch.nn.Sequential(torch.nn.Linear(3, 4), FusedLayerNorm(4))
    decays, others = common._get_params_for_weight_decay_optimization(model)
    assert [id(param) for param in decays["params"]] == [id(model[0].weight)]
    assert len(others["params"]) == 3
    norm = torch.cat([param.flatten() for param in model.parameters()]).norm()
    assert utils.calc_params_l2_norm(model, bf16=False) == pytest.approx(norm.item(), rel=1e-6)
    averaged = utils.average_losses_across_data_parallel_group([torch.tensor(2.0), norm])
    assert torch.equal(averaged, torch.stack([torch.tensor(2.0), norm.detach()]))


def test_memory_buffers(monkeypatch):
    monkeypatch.setattr(memory, "_buffers", {})
    buffer = memory.allocate_mem_buff("a", 6, torch.float32, track_usage=True)
    assert memory.get_mem_buff("a") is buffer
    x = torch.randn(2, 2, device=buffer.data.device)
    assert torch.equal(buffer.add(x), x)
    assert buffer.numel_in_use() == 4
    with pytest.raises(RuntimeError, match="2 elements are left, got 4"):
        buffer.add(x)
    with pytest.raises(TypeError, match=r"tensor must have dtype torch.float32"):
        buffer.add(x.half())
    with pytest.raises(ValueError, match="name must be new"):
        memory.allocate_mem_buff("a", 6, torch.float32, track_usage=False)
    ring = memory.RingMemBuffer("ring", 2, 4, torch.float32, track_usage=False)
    first = ring.get_next_buffer()
    first.add(x)
    assert ring.get_next_buffer() is not first
    with pytest.raises(RuntimeError, match="ring 0 is in use"):
        ring.get_next_buffer()


def test_timers(alone, capsys):
    timers = utils.Timers()
    timers("step").start()
    with pytest.raises(RuntimeError, match="is already running"):
        timers("step").start()
    timers("step").stop()
    assert timers("step").elapsed(reset=False) >= 0
    timers.log(["step"])
    assert "step: " in capsys.readouterr().out


def test_test_models_are_refused_at_use():
    from apex_te.integrations.apex.transformer.testing.commons import initialize_distributed

    from apex_te.integrations.apex.transformer.testing import standalone_gpt

    with pytest.raises(NotImplementedError, match=r"testing.commons.initialize_distributed is not"):
        initialize_distributed()
    with pytest.raises(NotImplementedError, match=r"megatron.core.models has GPT and BERT models"):
        standalone_gpt.gpt_model_provider()


def test_schedules_refuse(alone, monkeypatch):
    from apex_te.integrations.apex.transformer import ModelType, pipeline_parallel
    from apex_te.integrations.apex.transformer.pipeline_parallel.schedules import (
        fwd_bwd_no_pipelining,
        fwd_bwd_pipelining_with_interleaving,
        fwd_bwd_pipelining_without_interleaving,
    )

    one = pipeline_parallel.get_forward_backward_func(None, 1)
    assert one is fwd_bwd_no_pipelining.forward_backward_no_pipelining
    module = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="model must be one module, got 2"):
        one(None, None, [module] * 2, forward_only=True)
    piped = fwd_bwd_pipelining_without_interleaving.forward_backward_pipelining_without_interleaving
    with pytest.raises(ValueError, match="tensor_shape must be given for a pipeline, got None"):
        piped(None, None, module, forward_only=True)
    module.model_type = ModelType.encoder_and_decoder
    with pytest.raises(NotImplementedError, match=r"megatron\.core\.pipeline_parallel has them"):
        piped(None, None, module, forward_only=True, tensor_shape=(1,))
    del module.model_type
    monkeypatch.setattr(utils, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", None)
    utils.setup_microbatch_calculator(1, None, 3, 1, 1)
    parallel_state.set_pipeline_model_parallel_world_size(2)
    run = fwd_bwd_pipelining_with_interleaving._forward_backward_pipelining_with_interleaving
    with pytest.raises(ValueError, match="must be a list of several chunks, got 1"):
        run(None, None, [module], forward_only=True, tensor_shape=(1,))
    with pytest.raises(ValueError, match="must be a multiple of 2 stages, got 3"):
        run(None, None, [module] * 2, forward_only=True, tensor_shape=(1,))
    assert pipeline_parallel.get_forward_backward_func(2, 2) is run
    assert pipeline_parallel.get_forward_backward_func(None, 2) is piped
