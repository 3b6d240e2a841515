"""Attention whose norm and heads' gradients are cast by their ops, in more layouts."""

import pytest

pytest.importorskip("jax")
pytest.importorskip("flax")
import test_fused_dense as fused


@pytest.mark.parametrize(
    ("chosen", "options"),
    [
        (fused.DELAYED, {"use_bias": True, "return_layernorm_output": True}),
        (fused.DELAYED, {"num_gqa_groups": 1, "transpose_batch_sequence": True}),
        (fused.DELAYED, {"fuse_qkv_params": False, "input_layernorm": False}),
        (fused.CURRENT, {"num_gqa_groups": 2}),
        (fused.CURRENT, {"layernorm_type": "rmsnorm", "zero_centered_gamma": True}),
    ],
)
def test_attention_has_the_numbers_of_its_parts(monkeypatch, chosen, options):
    fused.test_attention_has_the_numbers_of_its_parts(monkeypatch, chosen, options)
