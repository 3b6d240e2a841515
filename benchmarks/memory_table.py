"""Bytes of a parameter and of an activation for each choice of precision, measured.

    python benchmarks/memory_table.py [--device cuda] [--hidden 4096] [--tokens 2 4096]

First table: training one matrix by FusedAdam, in bytes of its parameter, master weight, moments
and gradient for each element, after a step. Second table: what a Llama-shaped ``TransformerLayer``
saves for backward, in bytes for each element of its input ``[tokens, hidden]``: on the device, also
with ``save="small"``, and on the host where torch's saved-tensor hooks offload it. On the device a
tensor counts once however often it is saved; parameters do not count. Small sizes on a CPU give the
same figures but for what is counted per tensor (scales).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import harness
import torch
from lora_stack import plain_tensors, tensor_bytes

import apex_te
from apex_te import recipe
from apex_te.optimizers import FusedAdam


class Choice(NamedTuple):
    """One choice of parameters and of ``FusedAdam``'s options."""

    name: str
    dtype: torch.dtype
    held: recipe.Recipe | None  # in FP8
    options: dict[str, Any]


_BF16, _FP16, _FP8 = torch.bfloat16, torch.float16, torch.uint8
_MASTER: dict[str, Any] = {"master_weights": True}
_REMAINDERS = {**_MASTER, "store_param_remainders": True}
_HALF = {**_MASTER, "master_weight_dtype": _FP16}
_TENSORWISE, _BLOCKWISE = recipe.CurrentScaling(), recipe.BlockScaling()


def _moments(dtype: torch.dtype) -> dict[str, Any]:
    return {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}


CHOICES = [
    Choice("fp32", torch.float32, None, {}),
    Choice("bf16, no master weight", _BF16, None, {}),
    Choice("bf16, fp32 master weight", _BF16, None, _MASTER),
    Choice("bf16, remainders", _BF16, None, _REMAINDERS),
    Choice("bf16, remainders, bf16 moments", _BF16, None, {**_REMAINDERS, **_moments(_BF16)}),
    Choice("bf16, remainders, 8-bit moments", _BF16, None, {**_REMAINDERS, **_moments(_FP8)}),
    Choice("FP8, fp32 master weight", _BF16, _TENSORWISE, _MASTER),
    Choice("FP8 blocks, fp32 master weight", _BF16, _BLOCKWISE, _MASTER),
    Choice("FP8, fp16 master weight, bf16 moments", _BF16, _TENSORWISE, _HALF | _moments(_BF16)),
    Choice("FP8, fp16 master weight, 8-bit moments", _BF16, _TENSORWISE, _HALF | _moments(_FP8)),
    Choice("FP8, frozen", _BF16, _TENSORWISE, {"frozen": True}),
    Choice("bf16, frozen", _BF16, None, {"frozen": True}),
]


def parameter_row(choice: Choice, hidden: int, device: str) -> dict[str, Any]:
    """Returns the bytes per element of one choice, ``[hidden, hidden]``, after a training step."""
    options = dict(choice.options)
    frozen = options.pop("frozen", False)
    with apex_te.fp8_model_init(enabled=choice.held is not None, recipe=choice.held):
        options_of_layer = {"bias": False, "params_dtype": choice.dtype}
        layer = apex_te.Linear(hidden, hidden, device=torch.device(device), **options_of_layer)
    layer.requires_grad_(not frozen)
    x = torch.randn(32, hidden, device=device, dtype=choice.dtype, requires_grad=True)
    with apex_te.fp8_autocast(enabled=choice.held is not None, fp8_recipe=choice.held):
        layer(x).float().square().mean().backward()
    parts = {"parameter": [layer.weight], "master": [], "moments": [], "gradient": []}
    if not frozen:
        optimizer = FusedAdam(layer.parameters(), **options)
        optimizer.step()
        for name, value in optimizer.state[layer.weight].items():
            if isinstance(value, torch.Tensor) and name != "step":
                parts["moments" if "exp_avg" in name else "master"].append(value)
        parts["gradient"].append(layer.weight.grad)
    numel = hidden * hidden
    row: dict[str, Any] = {"parameter and optimizer": choice.name}
    row |= {name: sum(map(tensor_bytes, tensors)) / numel for name, tensors in parts.items()}
    row["sum"] = sum(row[name] for name in parts)
    return row


class Saved:
    """Hooks for what autograd saves beside storages at ``known`` addresses; they may offload it."""

    def __init__(self, known: set[int], offload: bool) -> None:
        self.known, self.offload = known, offload
        self.storages: dict[int, int] = {}
        self.host = 0
        self._kept: list[torch.Tensor] = []  # so that no address is used twice

    def pack(self, tensor: torch.Tensor) -> Any:
        parts = [part for part in plain_tensors(tensor) if part.untyped_storage().nbytes()]
        if all(part.untyped_storage().data_ptr() in self.known for part in parts):
            return tensor
        if self.offload:
            self.host += tensor_bytes(tensor)
            return tensor.device, tensor.to("cpu", copy=True)
        for part in parts:
            storage = part.untyped_storage()
            self.storages[storage.data_ptr()] = storage.nbytes()
        self._kept += parts
        return tensor

    def unpack(self, kept: Any) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        device, copied = kept
        return copied.to(device)


def activation_rows(
    hidden: int, tokens: tuple[int, int], device: str, layer: Callable[[], torch.nn.Module]
) -> list[dict[str, Any]]:
    """Returns the bytes that a layer saves for backward, for each recipe and way of saving."""
    rows = []
    recipes = {"bf16": None, "delayed": recipe.DelayedScaling()}
    recipes |= {"tensorwise": _TENSORWISE, "blockwise": _BLOCKWISE}
    for name, scaling in recipes.items():
        module = layer()
        x = torch.randn(*tokens, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
        inner = [part for p in module.parameters() for part in plain_tensors(p)]
        known = {part.untyped_storage().data_ptr() for part in inner}
        for way in ("saved", "small", "recomputed", "offloaded"):
            save = "small" if way == "small" else "all"
            run = module
            if way == "recomputed":
                run = functools.partial(apex_te.checkpoint, module, use_reentrant=True)
            for _ in range(2):  # the second one with FP8 state and workspaces in place
                saved = Saved(known, way == "offloaded")
                with (
                    torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack),
                    apex_te.fp8_autocast(scaling is not None, scaling, save=save),
                ):
                    out = run(x)
                out.float().square().mean().backward()
            row = {"recipe": name, "activations": way, "host bytes": saved.host / x.numel()}
            rows.append({**row, "device bytes": sum(saved.storages.values()) / x.numel()})
    return rows


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--hidden", type=int, default=None)
    parser.add_argument("--tokens", type=int, nargs=2, default=None, help="batch and length")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    hidden = args.hidden or (4096 if on_gpu else 256)
    tokens = tuple(args.tokens or ((2, 4096) if on_gpu else (2, 64)))
    rows = [parameter_row(choice, hidden, args.device) for choice in CHOICES]
    harness.report("memory_parameters", rows, size=hidden, device=args.device)

    def layer() -> torch.nn.Module:
        return apex_te.TransformerLayer(
            hidden, hidden * 7 // 2, hidden // 128 or 1, num_gqa_groups=max(1, hidden // 512),
            normalization="RMSNorm", activation="swiglu", bias=False, hidden_dropout=0.0,
            attention_dropout=0.0, self_attn_mask_type="causal", attn_input_format="bshd",
            params_dtype=torch.bfloat16, device=torch.device(args.device),
        )  # fmt: skip

    rows = activation_rows(hidden, tokens, args.device, layer)
    harness.report("memory_activations", rows, size=hidden, tokens=list(tokens), device=args.device)


if __name__ == "__main__":
    main()
