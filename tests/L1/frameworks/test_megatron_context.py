"""Megatron-Core with sequences split over ranks: a GPT trains as on one rank."""

from __future__ import annotations

import pytest
import torch
from megatron_ranks import gpus, mg, writers  # noqa: F401 (a fixture)

import megatron_context as mc  # isort: skip

FUSED = {"apply_rope_fusion": True}
CASES = {
    "p2p": (1, False, "p2p", {}),
    "a2a, fused rope": (1, False, "a2a", FUSED),
    "delayed": (1, False, "all_gather", mg.FP8["delayed"]),
    "packed": (1, True, "p2p", {}),
    "packed, fused rope, a2a": (1, True, "a2a", FUSED),
    "tensor parallel": (2, False, "all_gather", {"sequence_parallel": True}),
    "tensor parallel, packed, blockwise": (2, True, "a2a", mg.FP8["blockwise"]),
}


def check(one, several, case, folder, **options):
    """Compares 20 steps: fp32 sums in another order, or in FP8 the 2% that casts may cost."""
    tp, packed, comm_type, more = CASES[case]
    options = {**mg.LLAMA, **more, **options}
    alone = {**options, "sequence_parallel": False}
    one.run(mg.rank_saved, alone, 1, 1, folder, 0)
    (expected,) = one.run(mc.rank_context_losses, alone, 1, 1, packed, "p2p", folder)
    found = several.run(mc.rank_context_losses, options, tp, 2, packed, comm_type, folder)
    assert expected[-1] < 0.85 * expected[0]
    assert all(losses == found[0] for losses in found)
    exact = "fp8" not in more and "bf16" not in options
    assert found[0] == pytest.approx(expected, rel=1e-4 if exact else 0.02)


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case[0] == 1])
def test_two_context_ranks_train_as_one(one, two, tmp_path, case):
    check(one, two, case, str(tmp_path))


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case[0] == 2])
def test_beside_tensor_parallelism(one, four, tmp_path, case):
    check(one, four, case, str(tmp_path))


@pytest.mark.cuda
@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case[0] == 1])
def test_two_gpus_train_as_one(gpu_sets, tmp_path, case):
    sizes = gpus(gpu_sets, 1), gpus(gpu_sets, 2)
    check(*sizes, case, str(tmp_path), bf16=True, params_dtype=torch.bfloat16)
