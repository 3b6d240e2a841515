"""DeepSeek-V3's latent attention: a training step, and a step of generation with a cache.

transformers' module, the same converted, and ``MultiLatentAttention``, in bf16 and in FP8, taking
turns with a cold L2 cache. Peak GiB is what a step needs above weights, inputs and their gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import _path  # noqa: F401
import harness
import torch

import apex_te

# Sizes of DeepSeek-V3 by transformers' names.
SIZES: dict[str, Any] = {
    "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}  # fmt: skip
Run = Callable[[], Any]


def region(recipe: str | None) -> AbstractContextManager[Any]:
    return apex_te.fp8_autocast(recipe is not None, recipe or "blockwise")


class Contenders:
    """Steps of all contenders, by name: ``[batch, tokens]`` to train, one token to generate."""

    def __init__(self, sizes: dict[str, Any], batch: int, tokens: int, device: str) -> None:
        self.sizes, self.batch, self.tokens = sizes, batch, tokens
        self.options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
        self.rotary = sizes["qk_rope_head_dim"]
        self.x = torch.randn(batch, tokens, sizes["hidden_size"], **self.options)
        self.train: dict[str, Run] = {}
        self.generate: dict[str, Run] = {}
        self._add_transformers()
        for recipe in (None, "blockwise"):
            for recompute in (False, True):
                self._add_own(recipe, recompute)

    def _step(self, call: Callable[[torch.Tensor], torch.Tensor]) -> Run:
        x, grad = self.x.clone().requires_grad_(), torch.randn_like(self.x)

        def run() -> None:
            x.grad = None
            call(x).backward(grad)

        return run

    def _add_transformers(self) -> None:
        """Adds the module of transformers, where it is installed, plain and converted."""
        try:
            from transformers import DeepseekV3Config, DynamicCache
            from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
        except ImportError:
            print("transformers is not measured: it is not installed")
            return
        config = DeepseekV3Config(**self.sizes, num_hidden_layers=1)
        config._attn_implementation = "sdpa"
        plain = DeepseekV3Attention(config, 0).to(**self.options)
        converted = apex_te.fuse_latent_attention(copy.deepcopy(plain))
        angles = torch.rand(1, self.tokens + 1, self.rotary, **self.options)
        first = (angles[:, :-1].cos(), angles[:, :-1].sin())
        for name, module in (("transformers", plain), ("transformers, converted", converted)):
            cache = DynamicCache(config=config)
            given: dict[str, Any] = {"attention_mask": None, "past_key_values": cache}
            with torch.no_grad():
                module(self.x, position_embeddings=first, **given)

            def train(x: torch.Tensor, module: Any = module) -> torch.Tensor:
                return module(x, position_embeddings=first, attention_mask=None)[0]

            @torch.no_grad()
            def generate(module: Any = module, given: dict[str, Any] = given) -> None:
                last = (angles[:, -1:].cos(), angles[:, -1:].sin())
                module(self.x[:, :1], position_embeddings=last, **given)
                given["past_key_values"].crop(-1)

            self.train[name] = self._step(train)
            self.generate[name] = generate

    def _add_own(self, recipe: str | None, recompute: bool) -> None:
        sizes = self.sizes
        module = apex_te.MultiLatentAttention(
            sizes["hidden_size"], sizes["num_attention_heads"], sizes["q_lora_rank"],
            sizes["kv_lora_rank"], sizes["qk_nope_head_dim"], self.rotary, sizes["v_head_dim"],
            qkv_format="bshd", layer_number=1, recompute_up_proj=recompute,
            params_dtype=self.options["dtype"], device=self.options["device"],
        )  # fmt: skip
        rotary = apex_te.RotaryPositionEmbedding(
            self.rotary, interleaved=True, device=self.options["device"]
        )
        angles = rotary(self.tokens + 1)
        params = apex_te.InferenceParams(self.batch, self.tokens + 1)
        with torch.no_grad(), region(recipe):
            module(self.x, rotary_pos_emb=angles, inference_params=params)
        params.sequence_len_offset = self.tokens

        def train(x: torch.Tensor) -> torch.Tensor:
            with region(recipe):
                return module(x, rotary_pos_emb=angles)

        @torch.no_grad()
        def generate() -> None:
            with region(recipe):
                module(self.x[:, :1], rotary_pos_emb=angles, inference_params=params)

        name = f"MultiLatentAttention, {recipe or 'bf16'}"
        self.train[name + ", recomputed" * recompute] = self._step(train)
        if not recompute:
            self.generate[name] = generate


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs=2, default=(1, 4096))
    batch, tokens = parser.parse_args().tokens
    found = Contenders(SIZES, batch, tokens, "cuda")
    rows = []
    for what, calls in (("train", found.train), ("generate a token", found.generate)):
        for name, ms in harness.paired_ms(calls, repeats=10).items():
            row = {"step": what, "contender": name, "ms": ms}
            rows.append({**row, "peak GiB above": harness.peak_gib(calls[name])})
    harness.report("latent_attention", rows, batch=batch, tokens=tokens)


if __name__ == "__main__":
    main()
