"""Peak memory of a step with fp8_autocast(save="small"), from the tensors that ops allocate.

The layer has Llama-3-8B's proportions and twice as many tokens as hidden units, like 2 x 4096
tokens of 4096. All large tensors are then multiples of tokens x hidden, so the bytes per input
element are those of the large layer on any device.
"""

import pytest
import torch
from schemes import SCHEMES
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from apex_te import TransformerLayer, fp8_autocast
from apex_te.fp8.scheme import gemm_backend
from apex_te.ops import dense_gemm_swiglu

HIDDEN, TOKENS = 256, 512


class Peak(TorchDispatchMode):
    """Counts the bytes of all storages that ops allocate and that are still referenced."""

    def __init__(self, known):
        super().__init__()
        self.known = {t.untyped_storage()._cdata for t in known}
        self.alive, self.peak, self.then = {}, 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.alive = {key: held for key, held in self.alive.items() if not held[0].expired()}
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                if storage._cdata not in self.known:
                    held = StorageWeakRef(storage), storage.nbytes(), tuple(t.shape), t.dtype
                    self.alive.setdefault(storage._cdata, held)
        total = sum(held[1] for held in self.alive.values())
        if total > self.peak:
            self.peak, self.then = total, [held[1:] for held in self.alive.values()]
        return out


def peak_of_step(scaling, save, device):
    """Peak bytes per input element of a step, without the input and the output's gradient."""
    torch.manual_seed(3)
    module = TransformerLayer(
        HIDDEN, 7 * HIDDEN // 2, 4, num_gqa_groups=1, normalization="RMSNorm", bias=False,
        activation="swiglu", hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=True,
        self_attn_mask_type="causal", attn_input_format="bshd", params_dtype=torch.bfloat16,
        device=device,
    )  # fmt: skip
    x = torch.randn(2, TOKENS // 2, HIDDEN, device=device, dtype=torch.bfloat16)
    dy = torch.randn_like(x)
    x.requires_grad_()
    for _ in range(2):  # the second one with FP8 state in place
        x.grad = None
        module.zero_grad()
        with Peak([*module.parameters(), x, dy]) as count:
            with fp8_autocast(fp8_recipe=scaling, save=save):
                y = module(x)
            y.backward(dy)
            del y
    print(*sorted(count.then, key=lambda held: -held[0]), sep="\n")
    return count.peak / x.numel()


# What is alive at the peak, in bytes: always queries, keys and values, attention's output, its sum
# with the input, and the layer's output.
ALWAYS = 3 + 2 + 2 + 2
HELD = 7 * (1 + 4 / 128)
D_HIDDEN = 7  # a copy
PEAKS = {
    # FC1's weight gradient, with FC2's, the norm's output and gradient.
    "fused": ALWAYS + 3.5 + 7 + D_HIDDEN + 1 + 2,
    # The cast of FC1's output, in forward: that, and FC2's input.
    "one scale": ALWAYS - 2 + 14 + HELD + 3.5,
    # SwiGLU's gradient: its input, FC2's input gradient and weight gradient, and the columnwise
    # copy. The rowwise one has the memory of what was held.
    "blocks": ALWAYS + HELD + 7 + 3.5 + D_HIDDEN * (1 + 2 * 4 / 128),
}
CASES = {
    "delayed": "one scale", "delayed, fused": "fused", "tensorwise": "one scale",
    "blockwise": "blocks",
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_peak_of_a_llama_layer(monkeypatch, name):
    """The peak on the CPU, where the ops that sm_90 fuses count as one op."""
    name, _, is_fused = name.partition(", ")
    if is_fused:
        monkeypatch.setattr(gemm_backend, "has_dense_fp8", lambda device: True)
        for size in ("_MIN_ROWS", "_MIN_DEPTH", "_MIN_WORK"):
            monkeypatch.setattr(dense_gemm_swiglu, size, 0)
    expected = PEAKS[CASES[f"{name}, fused" if is_fused else name]]
    found = peak_of_step(SCHEMES[name], "small", torch.device("cpu"))
    # Statistics of rows, scales of blocks of weights.
    assert expected <= found <= expected + 0.35
    assert found <= peak_of_step(SCHEMES[name], "all", torch.device("cpu")) - 8
