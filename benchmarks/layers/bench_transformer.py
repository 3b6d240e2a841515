"""A whole Transformer layer, forward + backward: Llama-3-8B's and GPT's shape.

One configuration for time and memory: eager, no CUDA graph, bf16 parameters,
``is_first_microbatch=None`` (weights are quantized in every step), dropout 0, ``.grad`` set to None
in each step, the region's entry inside the timed part, no rotary embedding. PyTorch's own layers
run beside ours (bf16, eager and compiled, cuDNN attention), as do torchao's (compiled) and
Transformer Engine's where they can be imported. Each stack is timed three times: cold L2, median,
by itself, one after the other, as ``triton.testing.do_bench`` does ("ms"); the same, taking turns
with all others step by step ("ms in turns"); and in blocks of steps back to back, which take turns
after 2 s of load, where the board is at its power limit ("ms sustained", with power, energy of a
step, SM clock and throttle reasons of the same blocks). "products", "attention" and "rest" are the
kernels' own times in a warm loop.

With ``--options`` also each recipe's step with ``save="small"``, and with FusedAdam's (bf16
parameters, fp32 master weights), without and with ``keep_fp8_weights``.

Besides: delayed scaling with cached weights (``is_first_microbatch=False``), as a CUDA graph and,
where the layer has SwiGLU in its products' epilogues, without that;
other numbers of tokens, with the time of a token over that of the first size ("per token"), each
recipe's sizes taking turns; peak memory of one step alone on the GPU, and what of it is above what
was allocated before the step (parameters, input and output gradient, but no gradients of
parameters).

    python benchmarks/layers/bench_transformer.py                    # all
    python benchmarks/layers/bench_transformer.py --model llama --recipes delayed,blockwise \\
        --tokens 2x4096,2x4095,3x2731 --peers te
    python benchmarks/layers/bench_transformer.py --model llama --tokens 2x4096 \\
        --no-variants --name transformer_h100                     # the README's table
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.metadata
import importlib.util
import itertools
import operator
import time
from collections.abc import Callable
from typing import Any

import _path  # noqa: F401
import harness
import kernel_families
import torch
import transformer_stacks as stacks
from sustained import sustained
from transformer_stacks import RECIPES, SHAPES

import apex_te

MODELS = {"llama": "Llama-3-8B", "gpt": "GPT"}
PEERS = ("torch", "compiled", "torchao", "te")
TOKENS = "2x4096,2x4095,3x2731"
GPU = "GPU, forward + backward"
Step = Callable[[], None]
Rows = dict[str, dict[str, Any]]  # by stack
Made = tuple[Callable[[], torch.nn.Module], stacks.Autocast]


def arguments() -> argparse.Namespace:
    parser = harness.parser(__doc__)

    def names(known: Any) -> Callable[[str], list[str]]:
        def split(text: str) -> list[str]:
            chosen = [part for part in text.split(",") if part and part != "none"]
            unknown = set(chosen) - set(known)
            if unknown:
                raise argparse.ArgumentTypeError(f"must be of {', '.join(known)}, got {unknown}")
            return chosen

        return split

    def sizes(text: str) -> list[tuple[int, int]]:
        return [(int(b), int(t)) for b, t in (part.split("x") for part in text.split(","))]

    parser.add_argument("--model", type=names(MODELS), default=[*MODELS], help="llama,gpt")
    parser.add_argument("--recipes", type=names(RECIPES), default=[*RECIPES], help="of ours and TE")
    parser.add_argument("--tokens", type=sizes, default=sizes(TOKENS), help=f"default {TOKENS}")
    parser.add_argument("--peers", type=names(PEERS), default=[*PEERS], help="none, or of these")
    parser.add_argument("--rounds", type=int, default=3, help="blocks of each stack under load")
    parser.add_argument("--block", type=float, default=0.6, help="seconds of a block")
    parser.add_argument("--peer-tokens", action="store_true", help="other tokens of TE, too")
    parser.add_argument("--kernels", action="store_true", help="print times by kernel name")
    parser.add_argument("--options", action="store_true", help="save='small', and FusedAdam's step")
    parser.add_argument("--no-variants", action="store_true", help="recipes alone, no options")
    parser.add_argument("--name", default="transformer", help="of the results file")
    return parser.parse_args()


class Bench:
    """The measurements of a model of ``SHAPES``; ``te`` is Transformer Engine's package or None."""

    def __init__(self, model: str, options: argparse.Namespace, te: Any) -> None:
        self.model, self.options = model, options
        self.shape = shape = SHAPES[model]
        self.first, *self.others = options.tokens
        # By stack: what makes its layer, and the context of its forward.
        self.plain = self._plain()
        self.layers: dict[str, Made] = {}
        for key in options.recipes:
            ours = stacks.our_autocast(RECIPES[key])
            self.layers[f"apex_te {key}"] = (lambda: stacks.layer(**shape), ours)
            if options.options and RECIPES[key] is not None:
                small = stacks.our_autocast(RECIPES[key], save="small")
                self.layers[f"apex_te {key}, save small"] = (lambda: stacks.layer(**shape), small)
            theirs = None if te is None else stacks.their_autocast(te, key)
            if theirs is not None:
                make = (lambda: stacks.their_layer(te, **shape), theirs)
                self.layers[f"{stacks.TRANSFORMER_ENGINE} {key}"] = make

    def _plain(self) -> dict[str, Made]:
        """Returns the layers of PyTorch and torchao that the command line names."""
        shape, none = self.shape, stacks.our_autocast(None)

        def plain() -> torch.nn.Module:
            return stacks.Plain(**shape).to("cuda", stacks.DTYPE)

        makers: dict[str, tuple[str, Callable[[], Any]]] = {
            "torch": ("torch bf16", plain),
            "compiled": ("torch bf16 compiled", lambda: torch.compile(plain())),
            "torchao": ("torchao tensorwise compiled", lambda: stacks.torchao_layer(**shape)),
        }
        chosen = [makers[peer] for peer in self.options.peers if peer in makers]
        if "torchao" in self.options.peers and importlib.util.find_spec("torchao") is None:
            print("torchao is not measured: it is not installed")
            chosen.remove(makers["torchao"])
        return {name: (make, none) for name, make in chosen}

    def size(self, tokens: tuple[int, int]) -> tuple[int, int, int]:
        return (*tokens, self.shape["hidden"])

    def steps(self) -> tuple[dict[str, Step], Rows]:
        """Returns each stack's step, and its peak memory without what other stacks hold."""
        steps, peaks = {}, {}
        for name, (make, autocast) in {**self.plain, **self.layers}.items():
            others = torch.cuda.memory_allocated()
            module = make()
            run = stacks.step(module, autocast, self.size(self.first))
            run()
            run()
            peak, before = stacks.peak_bytes(run, module)
            above = {"peak GiB": peak - others, "peak GiB above": peak - before}
            steps[name], peaks[name] = run, {key: n / 2**30 for key, n in above.items()}
        return steps, peaks

    def updates(self) -> dict[str, Step]:
        """Returns steps with FusedAdam's, which casts the weights itself where they are kept."""
        steps: dict[str, Step] = {}
        for key, keeps in itertools.product(self.options.recipes, (False, True)):
            if keeps and RECIPES[key] is None:
                continue
            module = stacks.layer(**self.shape)
            if keeps:
                apex_te.keep_fp8_weights(module)
            adam = apex_te.optimizers.FusedAdam(module.parameters(), master_weights=True)
            region = stacks.our_autocast(RECIPES[key])
            run = stacks.step(module, region, self.size(self.first))

            def step(run: Step = run, update: Callable[[], Any] = adam.step) -> None:
                run()
                update()

            steps[f"apex_te {key}, FusedAdam" + ", weights kept" * keeps] = step
        return steps

    def variants(self) -> dict[str, Step]:
        """Returns the steps of delayed scaling with other options, such as cached weights."""
        delayed = RECIPES["delayed"]
        if "delayed" not in self.options.recipes or delayed is None:
            return {}
        size, region = self.size(self.first), stacks.our_autocast(delayed)
        module = stacks.layer(**self.shape)
        # Makes the FP8 weights that the timed steps use.
        stacks.step(module, region, size, is_first_microbatch=True)()
        x = torch.randn(*size, device="cuda", dtype=stacks.DTYPE, requires_grad=True)
        graphed = apex_te.make_graphed_callables(
            stacks.layer(**self.shape), (x,), fp8_enabled=True, fp8_recipe=delayed
        )
        steps = {
            "cached weights": stacks.step(module, region, size, is_first_microbatch=False),
            "CUDA graph": stacks.step(graphed, region, size),
        }
        if self.shape["llama"]:
            apart = stacks.step(stacks.layer(**self.shape), region, size)
            steps["SwiGLU apart"] = stacks.with_fused_swiglu(False, apart)
        return {f"apex_te delayed, {name}": step for name, step in steps.items()}

    def main_rows(self) -> list[dict[str, Any]]:
        """Returns the rows of the first number of tokens, one for each stack."""
        begin = time.perf_counter()
        steps, peaks = self.steps()
        if self.options.options:
            steps |= self.updates()
        if not self.options.no_variants:
            steps |= self.variants()
        cold = cold_times(steps, repeats=25)
        warm = sustained(steps, self.options.rounds, self.options.block)
        kernels = families(steps, self.options.kernels)
        print(f"{self.model}: {time.perf_counter() - begin:.0f} s", flush=True)
        rows = []
        for name in steps:
            figures = (part.get(name, {}) for part in (cold, peaks, warm, kernels))
            row = {"layer": self.model, "measure": GPU, "stack": name}
            rows.append(functools.reduce(operator.or_, figures, row))
        return rows

    def token_rows(self) -> list[dict[str, Any]]:
        """Returns the rows of the other numbers of tokens, for each of our stacks."""
        rows = []
        begin = time.perf_counter()
        for name, (make, autocast) in self.layers.items():
            if not self.options.peer_tokens and not name.startswith("apex_te"):
                continue
            module = make()
            sizes = {size: f"{size[0]} x {size[1]}" for size in self.options.tokens}
            steps = {n: stacks.step(module, autocast, self.size(s)) for s, n in sizes.items()}
            cold = cold_times(steps, repeats=15)
            warm = sustained(steps, 2, self.options.block / 2, warmup_s=0.5)
            first = sizes[self.first]
            for size in self.others:
                text = sizes[size]
                row = {"layer": f"{self.model}, {text} tokens", "measure": GPU, "stack": name}
                row |= cold[text] | warm[text]
                of_token = (self.first[0] * self.first[1]) / (size[0] * size[1])
                for key in ("ms", "ms in turns", "ms sustained"):
                    ratio = row[key] / ({**cold[first], **warm[first]}[key]) * of_token
                    row[key.replace("ms", "per token")] = ratio
                rows.append(row)
            del module, steps
            gc.collect()
        print(f"{self.model}, tokens: {time.perf_counter() - begin:.0f} s", flush=True)
        return rows


def cold_times(steps: dict[str, Step], repeats: int) -> Rows:
    """Returns each step's milliseconds with a cold L2, by itself and in turns with the others."""
    turns = harness.paired_us([*steps.values()], repeats=repeats, warmup=6)
    found = {}
    for (name, step), turn in zip(steps.items(), turns, strict=True):
        alone = harness.kernel_us(step, repeats)
        names = {"us": "ms", "p10": "p10 ms", "p90": "p90 ms"}
        found[name] = {label: alone[key] / 1e3 for key, label in names.items()}
        found[name]["ms in turns"] = turn["us"] / 1e3
    return found


def families(steps: dict[str, Step], by_name: bool) -> Rows:
    """Returns milliseconds of each stack's kernels by family; prints the largest ``by_name``."""
    found = {}
    for name, step in steps.items():
        durations = kernel_families.kernel_ms(step)
        sums = kernel_families.by_family(durations)
        found[name] = {f"{family} ms": sum_ms for family, sum_ms in sums.items()}
        if by_name:
            print(f"\n{name}, kernels of one step, ms:")
            for kernel, ms in sorted(durations.items(), key=lambda item: -item[1])[:25]:
                print(f"  {ms:7.3f}  {kernel_families.family(kernel):9}  {kernel[:90]}")
    return found


def main() -> None:
    options = arguments()
    te = stacks.transformer_engine() if "te" in options.peers else None
    clock = harness.sm_clock_mhz()
    rows = []
    for key in options.model:
        bench = Bench(MODELS[key], options, te)
        rows += bench.main_rows()
        gc.collect()
        if bench.others:
            rows += bench.token_rows()
        gc.collect()
        torch.cuda.empty_cache()
    extra = {}
    if te is not None:
        import transformer_engine

        extra["transformer_engine"] = str(getattr(transformer_engine, "__version__", "unknown"))
    if "torchao" in options.peers and importlib.util.find_spec("torchao") is not None:
        extra["torchao"] = importlib.metadata.version("torchao")
    extra["sm_clock_mhz"] = f"{clock} to {harness.sm_clock_mhz()}"
    harness.report(options.name, rows, hidden=("measure", "p10 ms", "p90 ms"), **extra)


if __name__ == "__main__":
    main()
