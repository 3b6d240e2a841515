"""Models of transformers with sequences split over ranks train as on one rank."""

import copy

import pytest
import torch
from on_rank import device_of
from torch import distributed

import apex_te
from apex_te.integrations import set_context_parallel_group
from apex_te.recipe import BlockScaling

transformers = pytest.importorskip("transformers")

TOKENS, STEPS = 32, 3
SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": TOKENS,
}  # fmt: skip


def _model(kind, device):
    torch.manual_seed(3)
    if kind == "mistral":
        config = transformers.MistralConfig(**SIZES, sliding_window=9)
        return transformers.MistralForCausalLM(config).to(device)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).to(device)


def _train(model, group, recipe):
    """Losses of a few steps, and the weights after them."""
    device = model.device
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    losses = []
    for step in range(STEPS):
        ids = torch.randint(64, (2, TOKENS + 1), generator=torch.Generator().manual_seed(step))
        batch = {
            "input_ids": ids[:, :-1], "shift_labels": ids[:, 1:],
            "position_ids": torch.arange(TOKENS).repeat(2, 1),
        }  # fmt: skip
        own = apex_te.split_for_context_parallel(batch, group)
        own = {name: x.contiguous().to(device) for name, x in own.items()}
        with apex_te.fp8_autocast(recipe is not None, recipe):
            loss = model(**own, labels=own["shift_labels"], num_items_in_batch=2 * TOKENS).loss
        loss.backward()
        total = loss.detach()
        if group is not None:
            for x in (total, *(p.grad for p in model.parameters())):
                distributed.all_reduce(x, group=group)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses, [p.detach().clone() for p in model.parameters()]


def _as_one(rank, kind, comm_type, in_fp8):
    recipe = BlockScaling() if in_fp8 else None
    model = _model(kind, device_of(rank))
    model = apex_te.from_torch(model, fuse=True)
    whole = copy.deepcopy(model)
    whole.set_attn_implementation("sdpa")
    model = set_context_parallel_group(model, distributed.group.WORLD, comm_type)
    expected, wanted = _train(whole, None, recipe)
    losses, found = _train(copy.deepcopy(model), distributed.group.WORLD, recipe)
    worst = max(float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))
    back = set_context_parallel_group(model, None)
    ids = torch.arange(TOKENS, device=device_of(rank))[None]
    fresh = apex_te.from_torch(_model(kind, device_of(rank)), fuse=True)
    fresh.set_attn_implementation("sdpa")
    same = torch.allclose(back(ids).logits, fresh(ids).logits, rtol=1e-4, atol=1e-5)
    return losses, expected, worst, same


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("comm_type", ["all_gather", "a2a"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_models_train_as_on_one_rank(each_two, kind, comm_type, in_fp8):
    for losses, expected, worst, same in each_two.run(_as_one, kind, comm_type, in_fp8):
        # A sum in another order; a cast to FP8 turns some of its values into their neighbours.
        assert losses == pytest.approx(expected, rel=1e-3 if in_fp8 else 1e-5)
        assert worst < (1e-2 if in_fp8 else 1e-4)
        assert same


def _refusals(rank):
    found = []
    group, ids = distributed.group.WORLD, torch.arange(8)[None]
    model = set_context_parallel_group(_model("llama", "cpu"), group)
    chunked = _model("llama", "cpu")
    chunked.config.attention_chunk_size = 4
    for call in (
        lambda: model(ids, attention_mask=torch.tensor([[1] * 7 + [0]])),
        lambda: model(ids, cu_seq_lens_q=torch.tensor([0, 8], dtype=torch.int32)),
        lambda: model(ids[:, :2], past_key_values=model(ids, use_cache=True).past_key_values),
        lambda: set_context_parallel_group(chunked, group),
        lambda: set_context_parallel_group(torch.nn.Linear(2, 2), group),
        lambda: set_context_parallel_group(model, 3),
        lambda: set_context_parallel_group(model, group, "ring"),
    ):
        try:
            call()
        except (TypeError, ValueError, NotImplementedError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_what_split_sequences_exclude(two_ranks):
    wanted = (
        "NotImplementedError: set_context_parallel_group: attention_mask must be None",
        "NotImplementedError: LlamaAttention: cu_seq_lens_q must be None",
        "ValueError: LlamaAttention: attention must be that of 2 tokens",
        "ValueError: set_context_parallel_group: model must not attend within chunks",
        "TypeError: set_context_parallel_group: model must be one of transformers",
        "TypeError: set_context_parallel_group: cp_group must be a torch.distributed",
        "ValueError: set_context_parallel_group: cp_comm_type must be one of",
    )
    for found in two_ranks.run(_refusals):
        assert len(found) == len(wanted)
        for text, begin in zip(found, wanted, strict=True):
            assert text.startswith(begin), found
