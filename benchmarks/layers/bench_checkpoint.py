"""A released FP8 checkpoint of Llama-3-8B's shapes in use: memory, training, hand-over, losses.

``python benchmarks/layers/bench_checkpoint.py`` needs one GPU with 100 GB. Codes and fp32 scales of
128x128 blocks are random, as in DeepSeek-V3's layout; the bf16 contenders have the decoded values.
Contenders of a figure take turns.

- "weights": GiB of the layers' weights, without embedding and head.
- "LoRA": forward and backward with adapters of rank 16 on all projections. "decoded" computes an
  FP8 product in forward and decodes the weight to bf16 in backward, as transformers does.
- "full": forward, backward and Adam with fp32 master weights, over a few layers.
- "hand-over": all tensors of ``fp8_tensors`` from a ``LlamaForCausalLM``, if transformers is
  installed; first call and later ones. Memory: the peak above what is allocated before.
- "log-probs": forward and backward of ``linear_log_probs``. Memory: the peak above what is
  allocated before, less the gradients, beside the bytes of bf16 logits.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import _path  # noqa: F401
import harness
import lora_stack
import torch
from bench_lora import step_of, times_in_turns
from torch import nn
from torch.nn import functional as F

import apex_te
from apex_te import from_torch
from apex_te.fp8.parameter.parameter import FP8Parameter
from apex_te.integrations import fp8_tensors
from apex_te.integrations.fusion import key_map
from apex_te.optimizers import FusedAdam
from apex_te.recipe import BlockScaling

BLOCK = 128
RECIPE = BlockScaling(pow2=False)
RANK = 16


class Sizes(NamedTuple):
    """Sizes of the model and of its input, and how often steps are timed."""

    shape: lora_stack.Shape
    layers: int
    trained: int  # layers of full fine-tuning
    words: int
    tokens: tuple[int, int]  # batch and length
    repeats: int
    dtype: torch.dtype


LLAMA = Sizes(lora_stack.SHAPES["Llama-3-8B"], 32, 4, 128256, (2, 4096), 5, torch.bfloat16)
TINY = Sizes(lora_stack.Shape(512, 512, 4, 2), 2, 1, 512, (1, 16), 1, torch.float32)
Row = dict[str, Any]
Weights = list[dict[str, torch.Tensor]]  # of each layer, by the projections' names


def released(rows: int, cols: int, dtype: torch.dtype, device: str) -> FP8Parameter:
    """Returns a weight of random codes and scales that no cast would give."""
    codes = torch.randn(rows, cols, device=device, dtype=torch.bfloat16) * 100
    codes = codes.clamp(-448, 448).to(torch.float8_e4m3fn)
    blocks = -(-rows // BLOCK), -(-cols // BLOCK)
    scale = (torch.rand(blocks, device=device) + 0.5) * (0.01 / cols**0.5)
    return FP8Parameter.from_codes(codes, scale, RECIPE, dtype)


def layers_of(sizes: Sizes, device: str) -> Weights:
    with torch.device("meta"):
        layer = lora_stack.Layer(sizes.shape)
    shapes = {n: m.weight.shape for n, m in layer.named_children() if n.endswith("_proj")}
    return [
        {name: released(*shapes[name], dtype=sizes.dtype, device=device) for name in shapes}
        for _ in range(sizes.layers)
    ]


def stack_of(layers: Weights, sizes: Sizes, kind: str, trained: bool, device: str) -> nn.Sequential:
    made = []
    for weights in layers:
        with torch.device("meta"):
            layer = nn.Sequential(lora_stack.Layer(sizes.shape))
        if kind == "apex_te":
            from_torch(layer, include="*")
        for module in layer[0].children():
            ones = torch.ones(sizes.shape.hidden, dtype=sizes.dtype, device=device)
            module.register_parameter("weight", nn.Parameter(ones, trained))
        for name, weight in weights.items():
            own = weight.clone() if trained else weight
            layer[0].get_submodule(name).register_parameter("weight", nn.Parameter(own, trained))
        made.append(layer[0])
    return nn.Sequential(*made)


class _DecodedInBackward(torch.autograd.Function):
    """FP8 product in forward; in backward a product with the decoded weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, base: nn.Module) -> torch.Tensor:
        ctx.base = base
        out: torch.Tensor = base(x)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        codes, scale = ctx.base.weight.codes()
        blocks = codes.view(len(scale), BLOCK, -1, BLOCK).to(grads[0].dtype)
        decoded = blocks * scale.to(blocks.dtype)[:, None, :, None]
        return grads[0] @ decoded.view(codes.shape), None


class Decoded(nn.Module):
    """Linear layer over a frozen FP8 weight that is decoded in each backward."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        self.weight = base.weight
        self.in_features, self.out_features = base.in_features, base.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _DecodedInBackward.apply(x, self.base)
        return out


def with_adapters(stack: nn.Sequential, decoded: bool, fused: bool) -> nn.Sequential:
    """Puts adapters as in the middle of a training on all projections, in place."""
    torch.manual_seed(1)
    for layer in stack:
        for name, module in list(layer.named_children()):
            if name.endswith("_proj"):
                base = Decoded(module) if decoded else module
                adapted = lora_stack.LoRALinear(base, RANK, 2.0 * RANK, fused)
                nn.init.normal_(adapted.up, 0, 0.02)
                setattr(layer, name, adapted)
    return stack


def inputs(sizes: Sizes, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(2)
    shape = (2, *sizes.tokens, sizes.shape.hidden)
    x, dy = torch.randn(shape, device=device, dtype=sizes.dtype).unbind()
    return x, dy


def compared(
    figure: str, steps: dict[str, Callable[[], Any]], sizes: Sizes, device: str, logits: int = 0
) -> Iterator[Row]:
    """Yields time, memory and distance of the gradients from the first step's, of each step."""
    rows: list[Row] = []
    reference = None
    for name, step in steps.items():
        gradients, _, peak = harness.memory(step)
        reference = reference or gradients
        row: Row = {"figure": figure, "stack": name}
        row["gradients differ by"] = statistics.mean(harness.distances(gradients, reference))
        above = peak - sum(g.nbytes for g in gradients) if logits else peak
        if device == "cuda":
            row |= {"peak GiB above": above / 2**30}
            row |= {"of logits": above / logits} if logits else {}
        rows.append(row)
        del gradients
    del reference
    yield from timed(rows, [*steps.values()], sizes, device)


def timed(
    rows: list[Row], steps: list[Callable[[], Any]], sizes: Sizes, device: str
) -> Iterator[Row]:
    times = times_in_turns(steps, device, sizes.repeats)
    for row, ms in zip(rows, times, strict=True):
        yield row | {"ms": ms} | {f"over {rows[i]['stack']}": ms / times[i] for i in range(2)}


def weights_and_lora(held: Weights, plain: Weights, sizes: Sizes, device: str) -> Iterator[Row]:
    gib = [
        sum(lora_stack.tensor_bytes(w) for layer in layers for w in layer.values()) / 2**30
        for layers in (plain, held)
    ]
    for name, found in zip(("bf16", "FP8"), gib, strict=True):
        yield {"figure": "weights", "stack": name, "GiB": found, "of bf16": found / gib[0]}
    x, dy = inputs(sizes, device)
    contenders = {
        "apex_te bf16": (plain, "apex_te", False, False),
        "decoded": (held, "apex_te", True, False),
        "torch bf16": (plain, "torch", False, False),
        "FP8": (held, "apex_te", False, False),
        "FP8, fused": (held, "apex_te", False, True),
    }
    steps = {}
    for name, (weights, kind, decoded, fused) in contenders.items():
        stack = with_adapters(stack_of(weights, sizes, kind, False, device), decoded, fused)
        steps[name] = step_of(stack, RECIPE if weights is held else None, x, dy)
        steps[name]()
    yield from compared("LoRA", steps, sizes, device)


def full(held: Weights, plain: Weights, sizes: Sizes, device: str) -> Iterator[Row]:
    x, dy = inputs(sizes, device)
    steps: list[Callable[[], Any]] = []
    rows: list[Row] = []
    for name, weights, in_fp8 in (
        ("bf16", plain, False), ("bf16 weights, FP8 products", plain, True), ("FP8", held, True),
    ):  # fmt: skip
        stack = stack_of(weights[: sizes.trained], sizes, "apex_te", True, device)
        trained = list(stack.parameters())
        gib = sum(map(lora_stack.tensor_bytes, trained)) / 2**30
        optimizer = FusedAdam(trained, lr=1e-5, master_weights=True)
        gradients = step_of(stack, RECIPE if in_fp8 else None, x, dy)

        def step(
            trained: list[nn.Parameter] = trained,
            optimizer: FusedAdam = optimizer,
            gradients: Callable[[], list[torch.Tensor]] = gradients,
        ) -> None:
            for parameter, grad in zip(trained, gradients(), strict=True):
                parameter.grad = grad
            optimizer.step()
            optimizer.zero_grad()

        steps.append(step)
        rows.append({"figure": "full", "stack": name, "GiB": gib})
    yield from timed(rows, steps, sizes, device)


def language_model(layers: Weights, sizes: Sizes, device: str) -> Any:
    """Returns a converted ``LlamaForCausalLM`` with the given weights; joined ones are copies."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, ffn, heads, groups = sizes.shape
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=ffn, num_attention_heads=heads,
        num_key_value_heads=groups, num_hidden_layers=sizes.layers, vocab_size=sizes.words,
        tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(sizes.dtype)
    from_torch(model, fuse=True)
    joined = {entry.key: entry for entry in key_map(model).entries}
    for name, parameter in list(model.named_parameters()):
        keys = [key for key, _ in joined[name].parts] if name in joined else [name]
        if keys[0].endswith("_proj.weight"):
            index, own = int(keys[0].split(".")[2]), [key.split(".")[-2] for key in keys]
            value = torch.cat([layers[index][each] for each in own])
        else:
            value = torch.randn(parameter.shape, dtype=sizes.dtype, device=device)
        path, _, own_name = name.rpartition(".")
        model.get_submodule(path).register_parameter(own_name, nn.Parameter(value, False))
    return model


def hand_over(held: Weights, plain: Weights, sizes: Sizes, device: str) -> Iterator[Row]:
    try:
        import transformers  # noqa: F401
    except ImportError:
        yield {"figure": "hand-over", "stack": "not run: transformers is not installed"}
        return
    server = BlockScaling(scales="server")
    contenders = (("held in FP8", held, "block"), ("cast from bf16", plain, server))
    for name, layers, weights in contenders:
        model = language_model(layers, sizes, device)

        def taken(model: Any = model, weights: Any = weights) -> tuple[float, int]:
            start = time.perf_counter()
            count = sum(tensor.nbytes for _, tensor in fp8_tensors(model, weights=weights))
            if device == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - start, count

        (first, count), _, peak = harness.memory(taken)
        later = sorted(taken()[0] for _ in range(sizes.repeats))[sizes.repeats // 2]
        row: Row = {"figure": "hand-over", "stack": name, "GiB": count / 2**30}
        row |= {"first ms": first * 1e3, "ms": later * 1e3}
        if device == "cuda":
            row["peak GiB above"] = peak / 2**30
        yield row
        del model, taken
        gc.collect()


def log_probs(sizes: Sizes, device: str) -> Iterator[Row]:
    x, _ = inputs(sizes, device)
    x = x.flatten(0, 1).requires_grad_()
    w = torch.randn(sizes.words, sizes.shape.hidden, device=device, dtype=sizes.dtype)
    w = (w / sizes.shape.hidden**0.5).requires_grad_()
    targets = torch.randint(sizes.words, x.shape[:1], device=device)
    dy = torch.randn(x.shape[0], device=device)

    def torchs() -> torch.Tensor:
        logits = F.log_softmax(F.linear(x, w).float(), -1)
        return logits.gather(1, targets[:, None])[:, 0]

    def gradients(loss: Callable[[], Any]) -> Callable[[], list[torch.Tensor]]:
        return lambda: list(torch.autograd.grad(loss(), (x, w), dy))

    ours = functools.partial(apex_te.linear_log_probs, x, w, targets)
    steps = {
        "torch": gradients(torchs),
        "linear_log_probs": gradients(ours),
        "linear_log_probs, FP8": gradients(functools.partial(ours, fp8_recipe="blockwise")),
    }
    yield from compared("log-probs", steps, sizes, device, 2 * x.shape[0] * sizes.words)


def measured(sizes: Sizes, device: str) -> Iterator[Row]:
    torch.manual_seed(0)
    held = layers_of(sizes, device)
    plain = [
        {name: weight.dequantize().to(sizes.dtype) for name, weight in layer.items()}
        for layer in held
    ]
    yield from weights_and_lora(held, plain, sizes, device)
    gc.collect()
    yield from full(held, plain, sizes, device)
    gc.collect()
    yield from hand_over(held, plain, sizes, device)
    del held, plain
    gc.collect()
    yield from log_probs(sizes, device)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="small sizes on the CPU")
    tiny = parser.parse_args().tiny
    sizes, device = (TINY, "cpu") if tiny else (LLAMA, "cuda")
    begin = time.perf_counter()
    rows = list(measured(sizes, device))
    seconds = round(time.perf_counter() - begin, 1)
    harness.report("checkpoint", rows, shape=list(sizes.shape), layers=sizes.layers,
                   tokens=list(sizes.tokens), rank=RANK, seconds=seconds)  # fmt: skip


if __name__ == "__main__":
    main()
