"""Megatron-Core's latent attention over the alias on CPU ranks, and sequences split over ranks."""

import pytest
import torch
from megatron_ranks import mg, writers  # noqa: F401 (a fixture)
from test_megatron import check_near

RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}


@pytest.fixture(scope="module")
def plain(sets):
    """Losses without FP8."""
    return sets[1].run(mg.rank_losses, mg.MLA)[0]


@pytest.mark.parametrize("recipe", mg.FP8)
def test_trains_with_each_recipe_and_recomputed(one, plain, recipe):
    """Megatron's recompute of up-projections gives the same bits."""
    options = {**mg.MLA, **mg.FP8[recipe]}
    (losses,) = one.run(mg.rank_losses, options)
    check_near(losses, plain)
    assert losses != plain
    if recipe != "delayed":  # which Megatron refuses
        assert one.run(mg.rank_losses, {**options, **RECOMPUTE}) == [losses]


def test_equals_own_module(one):
    """Weights loaded by Megatron's names give equal results and gradients."""
    ((out, grad, own_out, own_grad),) = one.run(mg.rank_latent_attention)
    torch.testing.assert_close(own_out, out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own_grad, grad, rtol=1e-4, atol=1e-4)


def losses_on_one(one, options, folder):
    one.run(mg.rank_saved, options, 1, 1, folder, 0)
    (expected,) = one.run(mg.rank_split, options, 1, 1, folder)
    return expected


@pytest.mark.parametrize("recipe", [None, "blockwise"])
def test_two_tensor_parallel_ranks_equal_one(one, two, tmp_path, recipe):
    options, folder = {**mg.MLA, **mg.FP8.get(recipe, {})}, str(tmp_path / "saved")
    expected = losses_on_one(one, options, folder)
    # Without it Megatron leaves the gradient of the rotary part to each rank.
    split = {**options, "sequence_parallel": True}
    first, second = two.run(mg.rank_split, split, 2, 1, folder)
    assert first == second
    assert first == pytest.approx(expected, rel=1e-6 if recipe is None else 2e-3)


@pytest.mark.parametrize("kind", ["LLAMA", "MLA"])
@pytest.mark.parametrize("comm_type", ["p2p", "a2a"])
def test_two_context_parallel_ranks_equal_one(one, two, tmp_path, kind, comm_type):
    options, folder = getattr(mg, kind), str(tmp_path / "saved")
    expected = losses_on_one(one, options, folder)
    split = {**options, "cp_comm_type": comm_type}
    first, second = two.run(mg.rank_split_tokens, split, 2, folder)
    assert first == second
    assert first == pytest.approx(expected, rel=1e-6)
