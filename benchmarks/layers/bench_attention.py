"""``DotProductAttention`` beside each kernel of torch that takes the same heads.

Forward and backward in bf16, the contenders taking turns: "ms" of steps in a row, the host ahead
of the GPU as in training; "ms alone" of one step with a cold L2 cache, which also waits for the
host to issue its first kernels. Peers compute the same heads without padding, so that a row says
what the mask costs. "path" is what ``explain`` says. Peak GiB is what a step needs above its inputs
and their gradients. Deterministic cases run under ``torch.use_deterministic_algorithms``, the peers
without.

``--chooser`` times each kernel that fits, see ``attention_choice``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import _path  # noqa: F401
import attention_choice
import harness
import torch
from attention_choice import Case, deterministic, module_and_call, step
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS, LATENT, WIDE, NARROW = (
    (32, 8, (128, 128)), (128, 128, (192, 128)), (16, 4, (256, 256)), (64, 8, (64, 64)),
)  # fmt: skip
CASES = {
    "causal": Case(*HEADS),
    "causal, deterministic": Case(*HEADS, deterministic=True),
    "window 1023": Case(*HEADS, window=(1023, 0)),
    "padding, 10% behind": Case(*HEADS, "padding_causal", behind=True),
    "padding, 50% behind": Case(*HEADS, "padding_causal", behind=True, padding=0.5),
    "padding, 10% anywhere": Case(*HEADS, "padding_causal"),
    "half packed": Case(*HEADS, tokens=(2, 2048, 2048), layout="thd"),  # half of the tokens
    "padding, 10% anywhere, not causal": Case(*HEADS, "padding"),
    "latent": Case(*LATENT),
    "latent, deterministic": Case(*LATENT, deterministic=True),
    "heads of 256": Case(*WIDE),
    "heads of 256, deterministic": Case(*WIDE, deterministic=True),
    "heads of 64": Case(*NARROW),
    "heads of 64, sinks": Case(*NARROW, sink="learnable"),
    "heads of 64, window 127": Case(*NARROW, window=(127, 0)),
    "heads of 64, window 127, sinks": Case(*NARROW, window=(127, 0), sink="learnable"),
}
PEERS = {
    "torch cuDNN": SDPBackend.CUDNN_ATTENTION,
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def ours(case: Case) -> tuple[Callable[[], None], str]:
    module, inputs, call = module_and_call(case)
    run = step(lambda: module(*inputs, **call), inputs)

    def steps() -> None:
        with deterministic(case.deterministic):
            run()

    with deterministic(case.deterministic):
        return steps, module.explain(*inputs, **call)


def peer(backend: SDPBackend, case: Case) -> Callable[[], None] | None:
    """Returns a step of one of torch's kernels, causal; None if it refuses these heads."""
    _, inputs, _ = module_and_call(Case(case.heads, case.groups, case.sizes))
    inputs = [x.detach().transpose(1, 2).requires_grad_() for x in inputs]
    options = {"is_causal": True, "enable_gqa": case.heads != case.groups}

    def attend() -> torch.Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(*inputs, **options)

    run = step(attend, inputs)
    try:
        run()
    except RuntimeError:
        return None
    return run


def rows() -> Iterator[harness.Row]:
    for name, case in CASES.items():
        own, path = ours(case)
        peers = {key: peer(backend, case) for key, backend in PEERS.items()}
        calls = {"apex_te": own} | {key: call for key, call in peers.items() if call is not None}
        alone = harness.paired_ms(calls, repeats=8)  # which warms up, too
        times = harness.running_us(list(calls.values()))
        for (contender, call), each in zip(calls.items(), times, strict=True):
            row = {"case": name, "contender": contender, "ms": each["us"] / 1e3}
            row |= {"ms alone": alone[contender], "peak GiB above": harness.peak_gib(call)}
            yield {**row, "path": path.partition(":")[0] if contender == "apex_te" else ""}
        del own, calls, peers


if __name__ == "__main__":
    if "--chooser" in sys.argv:
        sys.exit(min(attention_choice.main(), 1))
    harness.run("attention", rows())
