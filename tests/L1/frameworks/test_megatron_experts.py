"""FusedGroupedMLP in Megatron-Core against its TEGroupedMLP and SequentialMLP, on CPU ranks."""

from __future__ import annotations

import pytest
import torch
from megatron_ranks import gpus, mg, writers  # noqa: F401 (a fixture)

import megatron_experts as me  # isort: skip

RECIPES = [None, "delayed", "tensorwise", "blockwise", "mxfp8"]
FUSED = ("delayed", "tensorwise", "blockwise")
# Blocks of 128 must not hold gates and ups.
MOE = {**mg.MOE, "moe_ffn_hidden_size": 128}
TOP1 = {
    "moe_router_topk": 1, "moe_apply_probs_on_input": True, "moe_router_pre_softmax": True,
}  # fmt: skip
# Results of one GEMM for all experts are rounded to bf16, those of one for each are not. That moves
# one FP8 code in 32 by at most 1/8 in each of two casts.
ROUNDED = 2 * 32**-0.5 / 8
DISPATCHERS = ("allgather", "alltoall")


def assert_near(found, wanted, bound):
    for value, other in zip(found, wanted, strict=True):
        assert value.shape == other.shape
        assert (value - other).norm() <= bound * other.norm(), (value - other).norm() / other.norm()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("bias_activation_fusion", [False, True])
def test_experts(one, recipe, on_input, bias_activation_fusion):
    """Output and gradients of rows, probs and weights, with an idle expert."""
    options = {**MOE, "bias_activation_fusion": bias_activation_fusion}
    if on_input:
        options.update(TOP1)
    options.update(mg.FP8.get(recipe, {}))
    (results,) = one.run(me.rank_results, options, recipe, True)
    (plain,) = one.run(me.rank_results, {**options, "fp8": None}, None, True)
    values, calls = results["fused"]
    assert calls == (recipe in FUSED)
    assert all(value.any() for value in values)
    # Sigmoids in another last bit change few FP8 codes.
    assert_near(values, results["apart"][0], 1e-5 if recipe is None else 2e-3)
    for kind in ("grouped", "one by one"):
        assert_near(values, results[kind][0], 1e-5 if recipe is None else ROUNDED)
    # 17 dB, of a chain of products in FP8.
    assert_near(values, plain["grouped"][0], 1e-5 if recipe is None else 10 ** (-17 / 20))


OTHERS = {
    "gelu": {"activation_func": torch.nn.functional.gelu},
    "clamped": {"activation_func_clamp_value": 0.5},
    "not gated": {"gated_linear_unit": False},
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("recipe", [None, "tensorwise"])
def test_activations_that_megatron_computes(one, kind, recipe):
    options = {**MOE, **OTHERS[kind], **mg.FP8.get(recipe, {})}
    (results,) = one.run(me.rank_results, options, recipe, False)
    values, calls = results["fused"]
    assert calls == 0
    assert_near(values, results["grouped"][0], 1e-5 if recipe is None else ROUNDED)


@pytest.mark.parametrize("recipe", [None, "delayed", "tensorwise", "blockwise"])
def test_main_grad(one, recipe):
    (found,) = one.run(me.rank_main_grads, MOE, recipe)
    assert len(found) == 4
    # Autograd adds what is rounded to bf16, main_grad what is not.
    assert_near(found[2:], found[:2], 1e-6 if recipe is None else 1e-2)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("recipe", [None, "delayed", "tensorwise", "blockwise"])
@pytest.mark.parametrize("saved_by", ["fused", "grouped", "one by one"])
def test_two_ranks_equal_one(one, two, tmp_path, dispatcher, recipe, saved_by):
    """From weights that any of the three kinds of experts has saved on one rank."""
    options = {**MOE, "moe_token_dispatcher_type": dispatcher, **mg.FP8.get(recipe, {})}
    folder, ours = str(tmp_path / "saved"), {**options, "fused_experts": True}
    saving = {
        "fused": ours, "grouped": options, "one by one": {**options, "moe_grouped_gemm": False}
    }[saved_by]  # fmt: skip
    one.run(mg.rank_saved, saving, 1, 1, folder, 0)
    (expected,) = one.run(mg.rank_split, options, 1, 1, folder)
    first, second = two.run(mg.rank_split, ours, 1, 2, folder)
    assert first == second
    assert first == pytest.approx(expected, rel=1e-5 if recipe is None else 2e-3)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_checkpoint_continues_bitwise(sets, tmp_path, recipe, size):
    """Weights, FP8 state and the optimizer's states, which Megatron's experts take, too."""
    options, folder = {**MOE, **mg.FP8[recipe]}, str(tmp_path / "saved")
    ours = {**options, "fused_experts": True}
    later = sets[size].run(me.rank_saves, ours, size, folder)
    assert sets[size].run(me.rank_goes_on, ours, size, folder) == later
    for losses in sets[size].run(me.rank_goes_on, options, size, folder):
        assert losses == pytest.approx(later[0], rel=2e-3)


@pytest.mark.parametrize("recipe", [None, *FUSED])
@pytest.mark.parametrize(
    "kind",
    [
        {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        {
            "recompute_granularity": "full", "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    ],
)  # fmt: skip
def test_recompute_is_bitwise(one, recipe, kind):
    options = {**MOE, **mg.FP8.get(recipe, {}), "fused_experts": True}
    again = {**options, **kind}
    ((expected, calls),) = one.run(me.rank_calls, options, 1, 1)
    ((losses, more),) = one.run(me.rank_calls, again, 1, 1)
    assert losses == expected
    assert (calls, more) == ((6, 12) if recipe in FUSED else (0, 0))


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_recompute_of_the_activation(one, recipe):
    """By Megatron's own forward."""
    options = {**MOE, **mg.FP8[recipe], "fused_experts": True}
    again = {**options, "recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
    ((expected, _),) = one.run(me.rank_calls, options, 1, 1)
    ((losses, calls),) = one.run(me.rank_calls, again, 1, 1)
    assert calls == 0
    assert losses == pytest.approx(expected, rel=2e-3)


def test_hooks_that_gather_weights(one):
    """Those of overlap_param_gather run, and the function stays one."""
    options = {**MOE, **mg.FP8["tensorwise"], "fused_experts": True}
    ((expected, calls),) = one.run(me.rank_overlapped, options, False)
    ((found, more),) = one.run(me.rank_overlapped, options, True)
    assert calls == more == 6
    assert found[0] == expected[0]
    assert all(torch.equal(*pair) for pair in zip(found[1], expected[1], strict=True))


def test_state_dicts_are_megatrons(one):
    ((theirs, ours),) = one.run(me.rank_state_keys, MOE)
    assert ours == theirs
    assert "linear_fc1.weight3" in ours


def test_refusals(one):
    from apex_te.integrations.megatron.experts import use_fused_experts

    with pytest.raises(ValueError, match=r"spec must have experts of TEGroupedMLP.*got int"):
        use_fused_experts(3)
    for options, message in (
        ({"add_bias_linear": True}, "config.add_bias_linear must be False, got True"),
        ({**mg.FP8["tensorwise"], "fp8_param": True}, "config.fp8_param must be False, got True"),
        ({"moe_apply_probs_on_input": True}, "moe_router_topk must be 1 with .*, got 2"),
    ):
        with pytest.raises(AssertionError, match=f"FusedGroupedMLP: .*{message}"):
            one.run(me.rank_calls, {**MOE, **options, "fused_experts": True}, 1, 1)


@pytest.mark.cuda
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("on_device", [False, True])
def test_experts_on_a_gpu(gpu_sets, recipe, on_device):
    options = {**MOE, "bf16": True, "params_dtype": torch.bfloat16, **mg.FP8.get(recipe, {})}
    (results,) = gpus(gpu_sets, 1).run(me.rank_results, options, recipe, on_device)
    values, calls = results["fused"]
    assert calls == (recipe in FUSED)
    assert_near(values, results["grouped"][0], 1e-2 if recipe is None else 3e-2)


@pytest.mark.cuda
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("recipe", [None, *FUSED])
def test_two_gpus_equal_one(gpu_sets, tmp_path, dispatcher, recipe):
    options = {
        **MOE, "moe_token_dispatcher_type": dispatcher, "bf16": True,
        "params_dtype": torch.bfloat16, "fused_experts": True, **mg.FP8.get(recipe, {}),
    }  # fmt: skip
    folder = str(tmp_path / "saved")
    gpus(gpu_sets, 1).run(mg.rank_saved, options, 1, 1, folder, 0)
    (expected,) = gpus(gpu_sets, 1).run(mg.rank_split, options, 1, 1, folder)
    first, second = gpus(gpu_sets, 2).run(mg.rank_split, options, 1, 2, folder)
    assert first == second
    assert first == pytest.approx(expected, rel=1e-2)
