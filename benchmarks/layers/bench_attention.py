"""``DotProductAttention`` beside each kernel of torch that takes the same heads.

Forward and backward in bf16, the contenders taking turns with a cold L2 cache. Peers compute the
same heads without padding, so that a row says what the mask costs. "path" is what ``explain`` says.
Peak GiB is what a step needs above its inputs and their gradients. Deterministic cases run under
``torch.use_deterministic_algorithms``, the peers without.

``--chooser`` times each kernel that fits, see ``attention_choice``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import attention_choice
import harness
from attention_choice import deterministic, step

import apex_te

# Heads, groups, sizes of keys and values, options; of 2 x 4096 tokens.
CASES: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    "causal": (32, 8, 128, 128, {}),
    "causal, deterministic": (32, 8, 128, 128, {"deterministic": True}),
    "window 1023": (32, 8, 128, 128, {"window_size": (1023, 0)}),
    "padding, 10% behind": (32, 8, 128, 128, {"padded": "behind", "part": 0.1}),
    "padding, 50% behind": (32, 8, 128, 128, {"padded": "behind", "part": 0.5}),
    "padding, 10% anywhere": (32, 8, 128, 128, {"padded": "anywhere", "part": 0.1}),
    "half packed": (32, 8, 128, 128, {"packed": True}),
    "padding, 10% anywhere, not causal": (
        32, 8, 128, 128, {"padded": "anywhere", "part": 0.1, "kind": "padding"},
    ),
    "latent": (128, 128, 192, 128, {}),
    "latent, deterministic": (128, 128, 192, 128, {"deterministic": True}),
    "heads of 256": (16, 4, 256, 256, {}),
    "heads of 256, deterministic": (16, 4, 256, 256, {"deterministic": True}),
    "heads of 64": (64, 8, 64, 64, {}),
    "heads of 64, sinks": (64, 8, 64, 64, {"softmax_type": "learnable"}),
    "heads of 64, window 127": (64, 8, 64, 64, {"window_size": (127, 0)}),
    "heads of 64, window 127, sinks": (
        64, 8, 64, 64, {"window_size": (127, 0), "softmax_type": "learnable"},
    ),
}  # fmt: skip
BATCH, TOKENS = 2, 4096
PEERS = {
    "torch cuDNN": SDPBackend.CUDNN_ATTENTION,
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def ours(
    case: str, inputs: list[torch.Tensor], options: dict[str, Any]
) -> tuple[Callable[[], None], str]:
    """Returns a step of the module and the path that it takes."""
    heads, groups, size, value_size, _ = CASES[case]
    kind, layout = "causal", "bshd"
    call: dict[str, Any] = {}
    part = options.get("part", 0.0)
    if options.get("padded") == "behind":
        mask = torch.arange(TOKENS, device="cuda") >= torch.tensor(
            [[TOKENS], [int(TOKENS * (1 - 2 * part))]], device="cuda"
        )
        call["attention_mask"] = mask[:, None, None]
    elif "padded" in options:
        call["attention_mask"] = torch.rand(BATCH, 1, 1, TOKENS, device="cuda") < part
    if "attention_mask" in call:
        kind = options.get("kind", "padding_causal")
    if options.get("packed"):  # half of the tokens, in two sequences
        layout, inputs = "thd", [x[:, : TOKENS // 2].flatten(0, 1) for x in inputs]
        cu = torch.arange(0, BATCH + 1, dtype=torch.int32, device="cuda") * (TOKENS // 2)
        call |= {"cu_seqlens_q": cu, "max_seqlen_q": TOKENS // 2}
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    module = apex_te.DotProductAttention(
        heads, (size, value_size), groups, qkv_format=layout, attn_mask_type=kind,
        window_size=options.get("window_size"), device="cuda",
        softmax_type=options.get("softmax_type", "vanilla"),
    )  # fmt: skip
    run, on = step(lambda: module(*inputs, **call), inputs), "deterministic" in options

    def steps() -> None:
        with deterministic(on):
            run()

    with deterministic(on):
        return steps, module.explain(*inputs, **call)


def peer(backend: SDPBackend, inputs: list[torch.Tensor]) -> Callable[[], None] | None:
    """Returns a step of one of torch's kernels, causal; None if it refuses these heads."""
    inputs = [x.detach().transpose(1, 2).requires_grad_() for x in inputs]
    q, k, v = inputs

    def attend() -> torch.Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
            )

    run = step(attend, inputs)
    try:
        run()
    except RuntimeError:
        return None
    return run


def main() -> None:
    rows = []
    clock = harness.sm_clock_mhz()
    for case, (heads, groups, size, value_size, options) in CASES.items():
        shapes = ((heads, size), (groups, size), (groups, value_size))
        inputs = [
            torch.randn(BATCH, TOKENS, *shape, device="cuda", dtype=torch.bfloat16)
            for shape in shapes
        ]
        own, path = ours(case, inputs, options)
        calls = {"apex_te": own}
        for name, backend in PEERS.items():
            found = peer(backend, inputs)
            if found is not None:
                calls[name] = found
        times = harness.paired_us(list(calls.values()), repeats=10)
        for (name, call), each in zip(calls.items(), times, strict=True):
            rows.append(
                {
                    "case": case,
                    "contender": name,
                    "ms": each["us"] / 1e3,
                    "peak GiB above": harness.peak_gib(call),
                    "path": path.partition(":")[0] if name == "apex_te" else "",
                }
            )
        del own, calls, inputs
    harness.report("attention", rows, sm_clock_mhz=f"{clock} to {harness.sm_clock_mhz()}")


if __name__ == "__main__":
    if "--chooser" in sys.argv:
        sys.exit(min(attention_choice.main(), 1))
    main()
