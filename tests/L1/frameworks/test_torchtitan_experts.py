"""torchtitan's experts with FP8GroupedExpertsConverter: results, ranks, recompute, files."""

import copy

import pytest
import titan_moe as tm
import torch
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.deepseek_v3 import model_registry

from apex_te.integrations.torchtitan import (
    FP8GroupedExperts,
    FP8GroupedExpertsConverter,
    FP8LinearConverter,
)
from apex_te.ops.gemm_common import fp8_gemm_count

RECIPES = ["tensorwise", "blockwise", "mxfp8"]
FUSED = RECIPES[:2]


def grads_of(moe):
    return {name: value.grad for name, value in moe.named_parameters()}


def db(found, wanted):
    """Signal-to-noise ratio of a result."""
    return 20 * torch.log10(wanted.norm() / (found - wanted).norm())


@pytest.mark.parametrize("recipe", RECIPES)
def test_results(recipe):
    """Output and gradients are those of torchtitan's experts, but for rounding to FP8."""
    plain, moe = tm.build(), tm.build(recipe)
    assert type(moe.routed_experts.inner_experts) is FP8GroupedExperts
    moe.load_state_dict(plain.state_dict(), strict=True)
    x, dy = tm.batch(0)
    before = fp8_gemm_count()
    with tm.joined() as copies:
        results = tm.run(moe, x, dy)
    if recipe in FUSED:  # two GEMMs forward, two for gradients of rows, one for each weight
        assert fp8_gemm_count() - before == 7
    assert bool(copies) == (recipe not in FUSED)
    for found, wanted in zip(results, tm.run(plain, x, dy), strict=True):
        assert db(found, wanted) > 20
    for name, wanted in grads_of(plain).items():
        found = grads_of(moe)[name]
        assert found.shape == wanted.shape
        assert found.is_contiguous()
        assert db(found, wanted) > (17 if "experts.w" in name or "gate" in name else 20), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_recompute_is_bitwise(recipe):
    moe = tm.build(recipe)
    again = copy.deepcopy(moe)
    for step in range(2):
        x, dy = tm.batch(step)
        for found, wanted in zip(
            tm.run(again, x, dy, recompute=True), tm.run(moe, x, dy), strict=True
        ):
            assert torch.equal(found, wanted)
    for name, wanted in grads_of(moe).items():
        assert torch.equal(grads_of(again)[name], wanted), name


def check_ranks(ranks, recipe, ep, backend, recompute):
    """Parameters spread by expert parallelism, or sharded by FSDP2, against one rank, bitwise."""
    shapes = {name: tuple(value.shape) for name, value in tm.build().state_dict().items()}
    for copies, wrong, found in ranks.run(tm.rank_parallel, recipe, ep, backend, recompute):
        assert not wrong
        assert bool(copies) == (recipe not in FUSED)
        # Without DTensors a state dict has the rank's part alone.
        assert found == shapes or backend == "spmd_types"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("ep", [1, 2])
def test_two_ranks_equal_one(two, recipe, recompute, ep):
    check_ranks(two, recipe, ep, "partial_dtensor", recompute)


@pytest.mark.cuda
@pytest.mark.parametrize("recipe", FUSED)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("ep", "backend"), [(1, "partial_dtensor"), (2, "partial_dtensor"), (2, "spmd_types")]
)
def test_two_gpus_equal_one(gpu_sets, recipe, recompute, ep, backend):
    """With "spmd_types" torchtitan exchanges rows in a way that gloo does not."""
    if 2 not in gpu_sets:
        pytest.skip(f"needs 2 GPUs, got {torch.cuda.device_count()}")
    check_ranks(gpu_sets[2], recipe, ep, backend, recompute)


@pytest.mark.parametrize("recipe", FUSED)
def test_compiled(recipe):
    torch._dynamo.reset()
    moe = tm.build(recipe)
    compiled = copy.deepcopy(moe)
    compiled.routed_experts.inner_experts.compile(backend="aot_eager", fullgraph=True)
    x, dy = tm.batch(0)
    for found, wanted in zip(tm.run(compiled, x, dy), tm.run(moe, x, dy), strict=True):
        assert db(found, wanted) > 40
    for name, wanted in grads_of(moe).items():
        assert db(grads_of(compiled)[name], wanted) > 40, name


def test_evaluation_and_no_tokens():
    experts = tm.build("tensorwise").eval().routed_experts.inner_experts
    counts = torch.tensor([3, 0, 2, 1], device=tm.device())
    x = torch.randn(8, tm.DIM, device=tm.device()).bfloat16().float().requires_grad_()
    out = experts(x, counts)
    assert not out[6:].any()
    with torch.no_grad():
        assert torch.equal(experts(x.bfloat16(), counts), out.bfloat16())
        assert experts(x[:0], torch.zeros_like(counts)).shape == (0, tm.DIM)


def test_experts_that_are_converted():
    converters = [FP8LinearConverter.Config(), FP8GroupedExpertsConverter.Config()]
    with torch.device("meta"):
        model = model_registry("debugmodel", converters=converters).model.build()
        plain = model_registry("debugmodel").model.build()
    model.verify_module_protocol()
    found = [m for m in model.modules() if isinstance(m, GroupedExperts)]
    assert len(found) == 5
    assert {type(each) for each in found} == {FP8GroupedExperts}
    for name, value in plain.state_dict().items():
        assert model.state_dict()[name].shape == value.shape
    convert = FP8GroupedExpertsConverter.Config(filter_fqns=["layers.1."]).build().convert
    kept = convert(model_registry("debugmodel").model)
    types = [type(experts) for _, experts, _, _ in kept.traverse(GroupedExperts.Config)]
    assert types.count(GroupedExperts.Config) == 1
    odd = GroupedExperts.Config(dim=64, hidden_dim=40, num_experts=4)
    assert convert(odd) is odd
    even = convert(GroupedExperts.Config(dim=64, hidden_dim=48, num_experts=4))
    assert type(even.build()) is FP8GroupedExperts


def test_refusals():
    with pytest.raises(ValueError, match=r"FP8GroupedExpertsConverter: recipe_name .* 'delayed'"):
        FP8GroupedExpertsConverter.Config(recipe_name="delayed").build()
