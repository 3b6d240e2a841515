"""Times every kernel that fits an attention, to make and check ``choice.TABLE``.

For each problem the kernels take turns, and the table's choice is wrong where it takes more than
1.03 times as long as the fastest. Kernels that keep the scores are not compared with a choice that
does not keep them, nor cuDNN with a choice for fewer than 512 tokens: it plans each new shape.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import harness
import torch

import apex_te
from apex_te.module.attention import candidates, choice, packed, plan
from apex_te.module.attention.candidates import CANDIDATES, Path, Problem

DEVICE = "cuda"
WORST = 1.03
SLOW = 4  # times as long as the fastest: kernels that are timed once
_THEMSELVES = ("alibi", "filled")


class Case(NamedTuple):
    """One attention: heads, groups, sizes of keys and values, and options of the module."""

    heads: int
    groups: int
    sizes: tuple[int, int]
    kind: str = "causal"
    tokens: tuple[int, int, int] = (2, 4096, 4096)  # sequences, queries, keys
    window: tuple[int, int] | None = None
    layout: str = "bshd"
    dropout: float = 0.0
    sink: str = "vanilla"
    deterministic: bool = False
    bias: str = "no_bias"
    dtype: torch.dtype = torch.bfloat16
    padding: float = 0.1  # part of the keys
    behind: bool = False  # twice that part, of the second of two sequences

    def name(self) -> str:
        """Says what differs from the first case of these heads."""
        said = [f"{self.heads}/{self.groups} heads of {'/'.join(map(str, self.sizes))}"]
        said += [f"{key} {value}" for key, value in self._asdict().items()
                 if key in self._field_defaults and value != self._field_defaults[key]]  # fmt: skip
        return ", ".join(said)


_HEADS = [(32, 8, (128, 128)), (64, 8, (64, 64)), (16, 4, (256, 256)), (128, 128, (192, 128))]
_FEW, _MANY = (2, 1024, 1024), (2, 2048, 2048)
_BIAS = {"bias": "post_scale_bias"}
CASES = [
    *(Case(*heads, **more) for heads in _HEADS for more in (
        {}, {"kind": "no_mask"}, {"deterministic": True}, {"window": (1023, 0)},
        {"kind": "padding"}, {"layout": "thd"},
    )),
    *(Case(*_HEADS[0], **more) for more in (
        {"tokens": (16, 256, 256)},
        {"tokens": (8, 512, 512)},
        {"sink": "learnable"},
        {"dropout": 0.125},
        {"dropout": 0.1},
        {"window": (127, 0)},
        {"window": (127, 0), "deterministic": True},
        {"layout": "thd", "deterministic": True},
        {"kind": "causal_bottom_right", "tokens": (2, 1024, 4096)},
        {"kind": "no_mask", "tokens": (1, 2048, 8192)},
        {"kind": "no_mask", "tokens": (1, 8192, 2048)},
        {"kind": "padding_causal"},
        {"kind": "arbitrary"},
        {"kind": "arbitrary", "tokens": (8, 1024, 1024)},
        _BIAS,
        {**_BIAS, "tokens": (8, 1024, 1024)},
        {"bias": "alibi"},
        {"dtype": torch.float16},
        {"dtype": torch.float32, "tokens": _FEW},
    )),
    Case(32, 32, (128, 128), "arbitrary", _MANY),
    Case(32, 32, (128, 128), tokens=_MANY, **_BIAS),
    Case(32, 32, (128, 128), tokens=_FEW, dtype=torch.float32),
    Case(*_HEADS[1], window=(127, 0)),
    Case(*_HEADS[1], window=(127, 0), sink="learnable"),
]  # fmt: skip


def step(attend: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> Callable[[], None]:
    grad: list[torch.Tensor] = []

    def run() -> None:
        for x in inputs:
            x.grad = None
        out = attend()
        if not grad:
            grad.append(torch.randn_like(out))
        out.backward(grad[0])

    return run


@contextlib.contextmanager
def deterministic(on: bool) -> Iterator[None]:
    torch.use_deterministic_algorithms(on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def module_and_call(case: Case) -> tuple[Any, list[torch.Tensor], dict[str, Any]]:
    (batch, queries, keys), (inner, outer) = case.tokens, case.sizes
    packs = case.layout == "thd"
    shapes = [(queries, case.heads, inner), (keys, case.groups, inner), (keys, case.groups, outer)]
    given: dict[str, Any] = {"device": DEVICE, "dtype": case.dtype}
    inputs = [torch.randn(batch, *shape, **given).flatten(0, int(packs)) for shape in shapes]
    call: dict[str, Any] = {}
    if packs:
        starts = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE) * queries
        call = {"cu_seqlens_q": starts, "max_seqlen_q": queries}
    elif "padding" in case.kind:
        call["attention_mask"] = torch.rand(batch, 1, 1, keys, device=DEVICE) < case.padding
        if case.behind:
            kept = torch.tensor([[keys], [int(keys * (1 - 2 * case.padding))]], device=DEVICE)
            call["attention_mask"] = (torch.arange(keys, device=DEVICE) >= kept)[:, None, None]
    elif case.kind == "arbitrary":
        call["attention_mask"] = torch.rand(batch, 1, queries, keys, device=DEVICE) < 0.1
    if case.bias != "no_bias":
        call["core_attention_bias_type"] = case.bias
    if case.bias == "post_scale_bias":
        inputs.append(torch.randn(1, case.heads, queries, keys, **given))
        call["core_attention_bias"] = inputs[-1]
    for x in inputs:
        x.requires_grad_()
    module = apex_te.DotProductAttention(
        case.heads, case.sizes, case.groups, attention_dropout=case.dropout,
        qkv_format=case.layout, attn_mask_type=case.kind, window_size=case.window,
        softmax_type=case.sink, device=DEVICE,
    )  # fmt: skip
    return module, inputs, call


def _fitting(explain: Callable[[], str], case: Case) -> tuple[str, list[str]]:
    """Returns the kernel that the table chooses in ``explain``, and all that fit.

    "alibi" and "filled" are the choice itself, which has a kernel for what it makes of the problem.
    """
    problems: list[Problem] = []
    whole = choice.first_that_fits

    def noted(problem: Problem) -> Path:
        problems.append(problem)
        return whole(problem)

    stand_in = {"first_that_fits": noted}
    with mock.patch.multiple(choice, **stand_in), mock.patch.multiple(packed, **stand_in):
        whole_path = explain().partition(":")[0]
    last = problems[-1]  # whose path is taken
    if whole_path == "alibi":
        last = last._replace(bias="constant", size=case.sizes[0])
    elif whole_path == "filled":
        last = last._replace(form="packed")
    row = next(row for row in choice.TABLE if row.has(last))
    chosen = next(name for name in row.kernels if CANDIDATES[name].obstacle(last) is None)
    with mock.patch.object(candidates, "MANY_SCORES", 0):
        fits = [name for name, each in CANDIDATES.items() if each.obstacle(last) is None]
    others = {"independent", "blocks"}  # for batch_invariant; the latter over 1000 times as slow
    if case.layout != "thd":  # the tokens of a batch without its padding are not padded again
        others.add("padded")
    fits = [name for name in fits if name not in others]
    if whole_path in _THEMSELVES:
        return whole_path, [whole_path, *fits]
    if last.queries < choice._MANY and chosen != "cudnn":
        fits = [name for name in fits if name != "cudnn"]
    return chosen, fits


@functools.cache
def _chooser(name: str) -> Callable[..., Path]:
    """Returns a ``choose`` that takes a kernel, one for each, as modules keep plans by it."""
    path = CANDIDATES[name].path

    def choose(*args: Any) -> Path:
        first = choice.choose(*args)
        return first._replace(rest=path) if first.name in ("moved", "packed") else path

    return choose


@contextlib.contextmanager
def forced(name: str) -> Iterator[None]:
    """Makes modules take a kernel, after tokens were moved where they are."""
    if name in _THEMSELVES:
        yield
        return
    kept = {each: getattr(plan, each) for each in ("choose", "choose_packed", "choose_with_alibi")}
    taken = dict.fromkeys(kept, lambda *args: CANDIDATES[name].path) | {"choose": _chooser(name)}
    for each, call in taken.items():
        setattr(plan, each, call)
    try:
        yield
    finally:
        for each, former in kept.items():
            setattr(plan, each, former)


def _steps(case: Case) -> tuple[str, dict[str, Callable[[], None]]]:
    """Returns the table's choice, and a step of each kernel that fits."""
    module, inputs, call = module_and_call(case)
    tensors = inputs[:3]
    with deterministic(case.deterministic):
        chosen, names = _fitting(lambda: module.explain(*tensors, **call), case)
    run = step(lambda: module(*tensors, **call), inputs)

    def of(name: str) -> Callable[[], None]:
        def steps() -> None:
            with deterministic(case.deterministic), forced(name):
                run()

        return steps

    return chosen, {name: of(name) for name in names}


def main() -> int:
    rows, wrong = [], []
    for case in CASES:
        chosen, steps = _steps(case)
        times: dict[str, float] = {}
        for name, call in steps.items():
            try:
                call()
                times[name] = harness.running_us([call], 1, 1)[0]["us"] / 1e3
            except (RuntimeError, torch.OutOfMemoryError) as error:
                print(f"{case.name()}: {name} fails: {str(error).splitlines()[0]}")
        calls = {n: steps[n] for n, ms in times.items() if ms < SLOW * min(times.values())}
        times |= harness.paired_ms(calls, repeats=10, warmup=1)
        ordered = sorted(times, key=times.__getitem__)
        rivals = [name for name in ordered if name != "softmax"] if chosen != "softmax" else ordered
        fastest = rivals[0]
        best = times[fastest]
        print(f"{case.name()}: {chosen} {times.get(chosen, 0) / best:.3f}", flush=True)
        for name in ordered:
            row = {"case": case.name(), "kernel": name, "ms": times[name]}
            row |= {"of the best": times[name] / best}
            row["peak GiB above"] = harness.peak_gib(steps[name])
            rows.append({**row, "chosen": "yes" if name == chosen else ""})
        if times.get(chosen, float("inf")) > WORST * best:
            wrong.append(f"{case.name()}: {chosen}, {fastest} is best")
    harness.report("attention_choice", rows)
    print("\n".join(wrong) or f"each choice is within {WORST} of the fastest")
    return len(wrong)
