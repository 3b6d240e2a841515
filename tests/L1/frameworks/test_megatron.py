"""Megatron-Core over the alias on CPU ranks: GPT, parallelism, recompute, experts, checkpoints."""

from __future__ import annotations

import sys

import pytest
import torch
from megatron_ranks import gpus, mg, writers  # noqa: F401 (a fixture)
from pins import ROOT

sys.path.insert(0, str(ROOT / "tests" / "L0" / "module"))

import te_blobs

BF16 = {**mg.LLAMA, "bf16": True, "params_dtype": torch.bfloat16}


def check_near(losses, plain, tolerance=0.02):
    assert plain[-1] < 0.85 * plain[0], "the plain model did not learn"
    mean, expected = sum(losses[-5:]) / 5, sum(plain[-5:]) / 5
    assert abs(mean - expected) <= tolerance * expected, (losses, plain)


def test_every_module_imports(one):
    """Modules of Megatron import, but for those that need a package that is not installed."""
    (errors,) = one.run(mg.rank_imports)
    wrong = {name: text for name, text in errors.items() if "transformer_engine" in text}
    assert not wrong
    others = ("modelopt", "nvidia_resiliency_ext", "triton", "mamba", "causal_conv1d", "zarr")
    left = {k: v for k, v in errors.items() if not any(o in v or o in k for o in others)}
    assert not left
    (flags,) = one.run(mg.rank_flags)
    assert all(flags.values()), flags


@pytest.fixture(scope="module")
def plain(sets):
    """Losses without FP8."""
    return sets[1].run(mg.rank_losses, mg.LLAMA)[0]


@pytest.mark.parametrize("recipe", mg.FP8)
def test_gpt_trains_with_each_recipe(one, plain, recipe):
    (losses,) = one.run(mg.rank_losses, {**mg.LLAMA, **mg.FP8[recipe]})
    check_near(losses, plain)
    assert losses != plain


FUSED = {
    "rope": {"apply_rope_fusion": True},
    "cross entropy": {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"},
}


@pytest.mark.parametrize("kind", FUSED)
def test_fused_functions(one, plain, kind):
    """Rotary embedding and cross entropy of the alias in the place of Megatron's own."""
    (losses,) = one.run(mg.rank_losses, {**mg.LLAMA, **FUSED[kind]})
    assert losses == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("recipe", [None, "delayed", "tensorwise", "blockwise"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_tensor_parallel_ranks_equal_one(one, two, tmp_path, recipe, sequence_parallel):
    fp8 = mg.FP8.get(recipe, {})
    options, folder = {**mg.LLAMA, **fp8}, str(tmp_path / "saved")
    one.run(mg.rank_saved, options, 1, 1, folder, 0)
    (expected,) = one.run(mg.rank_split, options, 1, 1, folder)
    options["sequence_parallel"] = sequence_parallel
    first, second = two.run(mg.rank_split, options, 2, 1, folder)
    assert first == second
    # In FP8 a sum in another order may round to the next value, and recipes without state find
    # the scales of a rank's weights by themselves.
    assert first == pytest.approx(expected, rel=1e-5 if recipe is None else 2e-3)


RECOMPUTES = {
    "full": {
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
    },
    "block": {
        "recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1,
    },
    "attention": {
        "recompute_granularity": "selective", "recompute_modules": ["core_attn"],
    },
}  # fmt: skip


@pytest.mark.parametrize("recipe", [None, *mg.FP8])
@pytest.mark.parametrize("kind", RECOMPUTES)
def test_recompute_is_bitwise(one, kind, recipe):
    options = {**mg.LLAMA, **mg.FP8.get(recipe, {}), "attention_dropout": 0.1}
    again = {**options, **RECOMPUTES[kind]}
    assert one.run(mg.rank_losses, again) == one.run(mg.rank_losses, options)


@pytest.mark.parametrize("distribute", [False, True])
def test_recompute_on_two_ranks(two, distribute):
    options = {**mg.LLAMA, **mg.FP8["delayed"], "attention_dropout": 0.1}
    again = {**options, **RECOMPUTES["full"], "distribute_saved_activations": distribute}
    assert two.run(mg.rank_split, again, 2, 1, None) == two.run(mg.rank_split, options, 2, 1, None)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_weights_in_fp8(one, plain, recipe):
    (found,) = one.run(mg.rank_fp8_weights, {**mg.LLAMA, **mg.FP8[recipe]})
    losses, kinds = found
    assert kinds == {"FP8Parameter"}
    check_near(losses, plain)


@pytest.mark.parametrize("recipe", [None, "delayed", "tensorwise", "blockwise"])
@pytest.mark.parametrize("held", [False, True])
def test_distributed_optimizer(one, two, recipe, held):
    """ZeRO over two ranks with the same batch equals one rank; weights in FP8 are cut anywhere."""
    if held and recipe is None:
        pytest.skip("weights in FP8 have a recipe")
    # With three layers the first half of the weights ends within a weight.
    options = {**mg.LLAMA, **mg.FP8.get(recipe, {}), "fp8_param": held, "num_layers": 3}
    (expected,) = one.run(mg.rank_distributed_optimizer, options, 4)
    first, second = two.run(mg.rank_distributed_optimizer, options, 4)
    assert first[0] == second[0]
    for a, b in zip(first[1], second[1], strict=True):
        assert torch.equal(a, b)
    assert first[0] == pytest.approx(expected[0], rel=2e-3)


@pytest.mark.parametrize("recipe", mg.FP8)
def test_grouped_experts(one, recipe):
    (expected,) = one.run(mg.rank_losses, mg.MOE)
    (losses,) = one.run(mg.rank_losses, {**mg.MOE, **mg.FP8[recipe]})
    check_near(losses, expected)
    assert losses != expected


@pytest.mark.parametrize("recipe", [None, "delayed"])
def test_experts_on_two_ranks(one, two, tmp_path, recipe):
    options, folder = {**mg.MOE, **mg.FP8.get(recipe, {})}, str(tmp_path / "saved")
    one.run(mg.rank_saved, options, 1, 1, folder, 0)
    (expected,) = one.run(mg.rank_split, options, 1, 1, folder)
    first, second = two.run(mg.rank_split, options, 1, 2, folder)
    assert first == second
    assert first == pytest.approx(expected, rel=1e-5 if recipe is None else 2e-3)


@pytest.mark.parametrize("kind", ["dense", "experts"])
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_a_checkpoint_continues_bitwise(one, tmp_path, kind, recipe):
    options = {**(mg.MOE if kind == "experts" else mg.LLAMA), **mg.FP8[recipe]}
    folder = str(tmp_path / "saved")
    (later,) = one.run(mg.rank_saved, options, 1, 1, folder, 5)
    (again,) = one.run(mg.rank_loaded, options, 1, 1, folder, 5)
    assert again[0] == later[0]
    assert again[1].keys() == later[1].keys()
    assert bool(later[1]) == (recipe == "delayed")
    for name, value in later[1].items():
        assert torch.equal(again[1][name], value), name


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_weights_in_fp8_are_saved(two, tmp_path, recipe):
    # The halves of a gated layer are saved apart: with blocks of 128 rows they must not cut one.
    options = {**mg.LLAMA, **mg.FP8[recipe], "ffn_hidden_size": 256}
    for wrong in two.run(mg.rank_fp8_weights_saved, options, 2, str(tmp_path / "saved")):
        assert wrong == []


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_a_checkpoint_loads_on_other_ranks(one, two, tmp_path, kind, before, after):
    """Scales and histories come along, also where a rank has another part of the weights."""
    options = {**(mg.MOE if kind == "experts" else mg.LLAMA), **mg.FP8["delayed"]}
    folder, by_size = str(tmp_path / "saved"), {1: one, 2: two}

    def sizes(ranks):
        return (1, ranks) if kind == "experts" else (ranks, 1)

    saved = by_size[before].run(mg.rank_states_saved, options, *sizes(before), folder)
    loaded = by_size[after].run(mg.rank_states_loaded, options, *sizes(after), folder)
    dense = [name for name in saved[0] if "experts" not in name]
    assert dense
    for state in loaded:
        assert state.keys() == loaded[0].keys()
        for name in dense:
            assert torch.equal(state[name], saved[0][name]), name
    if kind == "experts":
        check_experts(saved, loaded)


def check_through_one(one, two, options, kind, folder):
    """Saves on two ranks, loads and saves on one, and checks that two continue bitwise."""
    sizes = {n: ((1, n) if kind == "experts" else (n, 1)) for n in (1, 2)}
    first, second = f"{folder}/two", f"{folder}/one"
    later = two.run(mg.rank_saved, options, *sizes[2], first, 5)
    one.run(mg.rank_saved_again, options, *sizes[1], first, second)
    again = two.run(mg.rank_loaded, options, *sizes[2], second, 5)
    for (losses, states), (expected, kept) in zip(again, later, strict=True):
        assert losses == expected
        assert kept
        assert states.keys() == kept.keys()
        for name, value in kept.items():
            assert torch.equal(states[name], value), name


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_a_checkpoint_through_one_rank_continues_bitwise(one, two, tmp_path, kind):
    options = {**(mg.MOE if kind == "experts" else mg.LLAMA), **mg.FP8["delayed"]}
    check_through_one(one, two, options, kind, str(tmp_path))


def check_experts(saved, loaded):
    """Checks that each expert has its scales: ranks in order have the experts in order."""
    names = [name for name in saved[0] if "experts" in name]
    assert names
    for name in names:
        if name.endswith(("scale_fwd", "scale_inv_fwd", "scale_bwd", "scale_inv_bwd")):
            whole = [torch.cat([state[name] for state in states]) for states in (saved, loaded)]
            assert torch.equal(*whole), name


@pytest.mark.parametrize("recipe", [None, "delayed", "tensorwise"])
def test_graphs_of_layers_equal_eager(one, recipe):
    """Megatron's helper captures layers by ``make_graphed_callables(_order=)`` and replays them."""
    options = {**BF16, **mg.FP8.get(recipe, {})}
    ((eager, graphed, runs),) = one.run(mg.rank_graphs, options, 6)
    assert graphed == eager
    assert runs == [4, 4]


def test_a_state_dict_of_transformer_engine_loads(one):
    """Megatron's keys with the ``_extra_state`` of a release that pickles, strictly."""
    values = []
    for number in range(8):
        values.append(te_blobs.tensors(length=4))
        values[-1]["scale_fwd"] *= 2.0**number
    own = {n: m for n, m in sys.modules.items() if n.startswith(("transformer_engine", "megatron"))}
    blobs = [te_blobs.pickled_with_recipe(value, which=2) for value in values]
    sys.modules.update(own)  # in whose place the blobs' classes were
    (wrong,) = one.run(mg.rank_loads_te_state, {**mg.LLAMA, **mg.FP8["delayed"]}, blobs, values)
    assert wrong == []


@pytest.mark.cuda
@pytest.mark.parametrize("recipe", mg.FP8)
def test_gpt_on_a_gpu(gpu_sets, recipe):
    ranks = gpus(gpu_sets, 1)
    (plain,), (losses,) = (
        ranks.run(mg.rank_losses, {**BF16, **fp8}) for fp8 in ({}, mg.FP8[recipe])
    )
    check_near(losses, plain)


@pytest.mark.cuda
@pytest.mark.parametrize("recipe", [None, "delayed", "tensorwise", "blockwise"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_gpus(gpu_sets, tmp_path, recipe, sequence_parallel):
    one, two = gpus(gpu_sets, 1), gpus(gpu_sets, 2)
    options, folder = {**BF16, **mg.FP8.get(recipe, {})}, str(tmp_path / "saved")
    one.run(mg.rank_saved, options, 1, 1, folder, 0)
    (expected,) = one.run(mg.rank_split, options, 1, 1, folder)
    options["sequence_parallel"] = sequence_parallel
    first, second = two.run(mg.rank_split, options, 2, 1, folder)
    assert first == second
    assert first == pytest.approx(expected, rel=1e-2)


@pytest.mark.cuda
@pytest.mark.parametrize("recipe", [None, "delayed", "tensorwise", "blockwise"])
@pytest.mark.parametrize("held", [False, True])
def test_distributed_optimizer_on_gpus(gpu_sets, recipe, held):
    if held and recipe is None:
        pytest.skip("weights in FP8 have a recipe")
    options = {**BF16, **mg.FP8.get(recipe, {}), "fp8_param": held, "num_layers": 3}
    (expected,) = gpus(gpu_sets, 1).run(mg.rank_distributed_optimizer, options, 4)
    first, second = gpus(gpu_sets, 2).run(mg.rank_distributed_optimizer, options, 4)
    assert first[0] == second[0]
    for a, b in zip(first[1], second[1], strict=True):
        assert torch.equal(a, b)
    assert first[0] == pytest.approx(expected[0], rel=1e-2)


@pytest.mark.cuda
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_checkpoints_on_gpus(gpu_sets, tmp_path, kind, before, after):
    options = {**BF16, **(mg.MOE if kind == "experts" else {}), **mg.FP8["delayed"]}
    sizes = {n: ((1, n) if kind == "experts" else (n, 1)) for n in (1, 2)}
    folder = str(tmp_path / "saved")
    saved = gpus(gpu_sets, before).run(mg.rank_states_saved, options, *sizes[before], folder)
    loaded = gpus(gpu_sets, after).run(mg.rank_states_loaded, options, *sizes[after], folder)
    for state in loaded:
        for name in [name for name in saved[0] if "experts" not in name]:
            assert torch.equal(state[name], saved[0][name]), name
    if kind == "experts":
        check_experts(saved, loaded)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_a_checkpoint_through_one_gpu_continues_bitwise(gpu_sets, tmp_path, kind):
    options = {**BF16, **(mg.MOE if kind == "experts" else {}), **mg.FP8["delayed"]}
    check_through_one(gpus(gpu_sets, 1), gpus(gpu_sets, 2), options, kind, str(tmp_path))


@pytest.mark.cuda
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_experts_on_gpus(gpu_sets, recipe):
    options = {**BF16, **mg.MOE}
    (plain,) = gpus(gpu_sets, 1).run(mg.rank_losses, options)
    first, second = gpus(gpu_sets, 2).run(mg.rank_losses, {**options, **mg.FP8[recipe]}, 1, 2)
    assert first == second
    check_near(first, plain)


@pytest.mark.cuda
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_weights_in_fp8_are_saved_on_gpus(gpu_sets, tmp_path, recipe):
    options = {**BF16, **mg.FP8[recipe], "ffn_hidden_size": 256}
    ranks = gpus(gpu_sets, 2)
    for wrong in ranks.run(mg.rank_fp8_weights_saved, options, 2, str(tmp_path / "saved")):
        assert wrong == []


@pytest.mark.cuda
@pytest.mark.parametrize("recipe", [None, "delayed", "tensorwise"])
def test_graphs_of_layers_on_a_gpu(gpu_sets, recipe):
    options = {**BF16, **mg.FP8.get(recipe, {})}
    ((eager, graphed, runs),) = gpus(gpu_sets, 1).run(mg.rank_graphs, options, 6)
    assert graphed == eager
    assert runs == [4, 4]
