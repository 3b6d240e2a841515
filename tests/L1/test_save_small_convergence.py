"""Training with save="small" reaches the loss of training without it, on real text."""

import sys
from pathlib import Path

import pytest
import torch
from schemes import SCHEMES

import apex_te

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "char_gpt"))
import data

SEEDS, STEPS, LAST, BATCH, CONTEXT, WIDTH = (1, 2, 3), 200, 50, 16, 64, 64


class Model(torch.nn.Module):
    """A language model of two Llama-type layers."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        super().__init__()
        on_gpu = device.type == "cuda"
        dtype = torch.bfloat16 if on_gpu else torch.float32
        self.tokens = torch.nn.Embedding(vocabulary, WIDTH, dtype=dtype, device=device)
        self.positions = torch.nn.Embedding(CONTEXT, WIDTH, dtype=dtype, device=device)
        self.blocks = torch.nn.ModuleList(
            apex_te.TransformerLayer(
                WIDTH, 3 * WIDTH, 2, normalization="RMSNorm", activation="swiglu", bias=False,
                hidden_dropout=0.0, attention_dropout=0.0, self_attn_mask_type="causal",
                attn_input_format="bshd", params_dtype=dtype, device=device,
            )
            for _ in range(2)
        )  # fmt: skip
        self.head = torch.nn.Linear(WIDTH, vocabulary, dtype=dtype, device=device)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(torch.nn.functional.rms_norm(x, (WIDTH,)))


def loss_of(corpus: data.Corpus, recipe: str, save: str, seed: int, device: torch.device) -> float:
    """Mean loss of the last steps; the first one's must be more than 1.4 times as large."""
    torch.manual_seed(seed)
    model = Model(len(corpus.vocabulary), device)
    optimizer = apex_te.optimizers.FusedAdam(
        model.parameters(), lr=3e-3, betas=(0.9, 0.99), master_weights=device.type == "cuda"
    )
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20) * (1 - step / STEPS)
        starts = torch.randint(len(corpus.train) - CONTEXT - 1, (BATCH,), generator=generator)
        rows = torch.stack([corpus.train[s : s + CONTEXT + 1] for s in starts]).long().to(device)
        with apex_te.fp8_autocast(fp8_recipe=SCHEMES[recipe], save=save):
            logits = model(rows[:, :-1])
        loss = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), rows[:, 1:].flatten()
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    found = torch.stack(losses).double().cpu()
    assert found[0] > 1.4 * found[-LAST:].mean()
    return found[-LAST:].mean().item()


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_loss_is_within_two_thousandths(device, recipe):
    corpus = data.load_corpus(1 << 20)
    mean = {
        save: sum(loss_of(corpus, recipe, save, seed, device) for seed in SEEDS) / len(SEEDS)
        for save in ("all", "small")
    }
    print(recipe, mean)
    assert mean["small"] != mean["all"]
    assert abs(mean["small"] / mean["all"] - 1) <= 0.002
