"""Programs written for apex, run as they are: 20 steps, losses as those of plain PyTorch.

The programs restate the imports and calls of BERT pretraining, fairseq and Megatron. Each has a
twin in plain PyTorch of the same dtypes, from the same weights and data.
"""

import importlib
import math
import types

import pytest
import torch
from apex_te.compatibility import apex as names
from torch.nn import functional
from torch.optim import AdamW

STEPS = 20
# Losses of float16 programs: the norms, softmax and loss of the two round at other places. A
# rounding is 2^-11 = 5e-4 of a value, and a loss is a mean over many.
HALF = 2e-3


@pytest.fixture(autouse=True)
def _installed():
    names.install()
    yield
    importlib.import_module("apex.amp").initialize(torch.nn.Linear(1, 1), enabled=False)
    names.uninstall()


def tokens(device, seed, shape=(4, 12), vocabulary=50):
    generator = torch.Generator().manual_seed(seed % 3)  # a few batches, which can be learnt
    return torch.randint(1, vocabulary, shape, generator=generator).to(device)


class Block(torch.nn.Module):
    """Attention and MLP with the norm and the softmax that are given."""

    def __init__(self, size, norm, softmax, heads=2):
        super().__init__()
        self.heads, self.softmax = heads, softmax
        self.qkv = torch.nn.Linear(size, 3 * size)
        self.proj = torch.nn.Linear(size, size)
        self.up, self.down = torch.nn.Linear(size, 4 * size), torch.nn.Linear(4 * size, size)
        self.norm1, self.norm2 = norm(size, eps=1e-5), norm(size, eps=1e-5)

    def forward(self, x):
        rows, length, size = x.shape
        qkv = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = qkv[0] @ qkv[1].transpose(-1, -2)
        out = self.softmax(scores, 1 / math.sqrt(size // self.heads)) @ qkv[2]
        x = self.norm1(x + self.proj(out.transpose(1, 2).reshape(rows, length, size)))
        return self.norm2(x + self.down(functional.gelu(self.up(x))))


class Encoder(torch.nn.Module):
    """Token embedding, two blocks and logits."""

    def __init__(self, norm, softmax, size=16, vocabulary=50):
        super().__init__()
        torch.manual_seed(4)
        self.embedding = torch.nn.Embedding(vocabulary, size)
        self.blocks = torch.nn.ModuleList(Block(size, norm, softmax) for _ in range(2))
        self.head = torch.nn.Linear(size, vocabulary)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def plain_softmax(scores, scale):
    return torch.softmax(scores.float() * scale, -1).to(scores.dtype)


def causal_softmax(scores, scale):
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return plain_softmax(scores.float().masked_fill(hidden, -torch.inf), scale).to(scores.dtype)


class PlainLamb:
    """LAMB written out for float32 tensors, with bias correction and clipping of the joint norm."""

    def __init__(self, params, lr, groups, betas=(0.9, 0.999), eps=1e-6):
        self.params, self.lr, self.decays = params, lr, groups
        self.betas, self.eps, self.count = betas, eps, 0
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in params]

    @torch.no_grad()
    def step(self, grads):
        self.count += 1
        norm = torch.cat([g.flatten() for g in grads]).norm()
        first, second = self.betas
        for p, g, (m, v), decay in zip(self.params, grads, self.moments, self.decays, strict=True):
            g = g / max(1.0, norm.item())
            m.mul_(first).add_(g, alpha=1 - first)
            v.mul_(second).addcmul_(g, g, value=1 - second)
            mean, square = m / (1 - first**self.count), v / (1 - second**self.count)
            update = mean / (square.sqrt() + self.eps) + decay * p
            ratio = 1.0
            if decay and p.norm() > 0 and update.norm() > 0:
                ratio = (p.norm() / update.norm()).item()
            p.sub_(update, alpha=self.lr * ratio)


def bert(device, accumulate, reduce_by_hand):
    """Returns the losses of BERT's pretraining loop, skipped steps included, and the last scale."""
    import amp_C
    from apex import amp
    from apex.amp import _amp_state
    from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
    from apex.normalization import FusedLayerNorm
    from apex.optimizers import FusedLAMB

    model = Encoder(FusedLayerNorm, plain_softmax).to(device)
    named = list(model.named_parameters())
    no_decay = ["bias", "norm"]
    decayed = [p for n, p in named if not any(k in n for k in no_decay)]
    others = [p for n, p in named if any(k in n for k in no_decay)]
    grouped = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = FusedLAMB(grouped, lr=2e-2)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O2", loss_scale="dynamic", cast_model_outputs=torch.float16,
        verbosity=0,
    )  # fmt: skip
    amp._amp_state.loss_scalers[0]._loss_scale = 2**20
    overflow_buf = torch.zeros(1, dtype=torch.int32, device=device)
    model.train()
    losses = []
    while optimizer.param_groups[0].get("step", 0) < STEPS:
        total = 0.0
        for part in range(accumulate):
            ids = tokens(device, 2 * len(losses) + part)
            logits = model(ids)
            flat, labels = logits.view(-1, logits.size(-1)), ids.roll(1, 1).view(-1)
            loss = SoftmaxCrossEntropyLoss.apply(flat, labels, 0.0, -1, True).mean() / accumulate
            with amp.scale_loss(loss, optimizer, delay_overflow_check=reduce_by_hand) as scaled:
                scaled.backward()
            total += loss.item()
        had_overflow = False
        if reduce_by_hand:
            scaler = _amp_state.loss_scalers[0]
            scale = scaler.loss_scale()
            grads = [p.grad for p in amp.master_params(optimizer) if p.grad is not None]
            flat = torch.empty(sum(g.numel() for g in grads), device=device)
            views = torch._utils._unflatten_dense_tensors(flat, grads)
            overflow_buf.zero_()
            amp_C.multi_tensor_scale(65536, overflow_buf, [grads, views], scale)
            overflow_buf.zero_()
            amp_C.multi_tensor_scale(65536, overflow_buf, [views, grads], 1.0 / scale)
            scaler._overflow_buf = overflow_buf
            had_overflow = scaler.update_scale()
            if had_overflow:
                for param in optimizer._amp_stash.all_fp32_from_fp16_params:
                    param.grad = None
        if not had_overflow:
            optimizer.step()
        for param in model.parameters():
            param.grad = None
        losses.append(total)
    return losses, _amp_state.loss_scalers[0].loss_scale()


def plain_bert(device, accumulate, reduce_by_hand):
    """The twin of ``bert``: float16 weights, float32 copies, a scale kept by hand."""
    model = Encoder(torch.nn.LayerNorm, plain_softmax).to(device).half()
    names, params = zip(*model.named_parameters(), strict=True)
    masters = [p.detach().float() for p in params]
    decays = [0.0 if "bias" in n or "norm" in n else 0.01 for n in names]
    lamb, scale, losses = PlainLamb(masters, 2e-2, decays), 2.0**20, []
    while lamb.count < STEPS:
        sums, total, bad = [torch.zeros_like(m) for m in masters], 0.0, False
        for part in range(accumulate):
            ids = tokens(device, 2 * len(losses) + part)
            logits = model(ids).float()
            loss = functional.cross_entropy(logits.flatten(0, 1), ids.roll(1, 1).flatten())
            loss = loss / accumulate
            model.zero_grad()
            (loss * scale).backward()
            total += loss.item()
            for part_sum, param in zip(sums, params, strict=True):
                part_sum += param.grad.float() / scale
            overflows = not all(bool(p.grad.isfinite().all()) for p in params)
            bad |= overflows
            if overflows and not reduce_by_hand:
                scale /= 2
        losses.append(total)
        if bad:
            scale /= 2 if reduce_by_hand else 1
            continue
        lamb.step(sums)
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)
    return losses, scale


@pytest.mark.parametrize("reduce_by_hand", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_bert_pretraining(reduce_by_hand, accumulate, device):
    losses, scale = bert(device, accumulate, reduce_by_hand)
    expected, expected_scale = plain_bert(device, accumulate, reduce_by_hand)
    assert scale == expected_scale
    assert len(losses) > STEPS  # 2^20 is too much for float16, so some steps are skipped
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=HALF, atol=0)
    assert losses[-1] < 0.95 * losses[0]


class FusedAdamV1(torch.optim.Optimizer):
    """fairseq's: float32 moments, updated by ``fused_adam_cuda.adam`` itself."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        self.kernels = importlib.import_module("fused_adam_cuda")
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self.eps_mode = 1

    def step(self, closure=None, scale=1.0):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                data = p.data.float()
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(data))
                    state["exp_avg_sq"] = torch.zeros_like(data)
                state["step"] += 1
                out_p = p.data
                self.kernels.adam(
                    data, torch.empty(0, device=p.device) if p.dtype is torch.float32 else out_p,
                    state["exp_avg"], state["exp_avg_sq"], p.grad.data, group["lr"], beta1, beta2,
                    group["eps"], scale, state["step"], self.eps_mode, 1, group["weight_decay"],
                )  # fmt: skip
                if p.dtype is torch.float32:
                    out_p.copy_(data)


class PlainAdamV1(torch.optim.Optimizer):
    """V1's formula: the corrections of bias are in the rate, which multiplies the decay, too."""

    def __init__(self, params, **defaults):
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                state["m"].mul_(first).add_(p.grad, alpha=1 - first)
                state["v"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
                rate = math.sqrt(1 - second ** state["step"]) / (1 - first ** state["step"])
                update = state["m"] / (state["v"].sqrt() + group["eps"])
                p.sub_(update + group["weight_decay"] * p, alpha=group["lr"] * rate)


def fused_adam_v2():
    """fairseq's class over apex's FusedAdam, whose ``multi_tensor_adam`` it calls itself."""
    from apex.multi_tensor_apply import multi_tensor_applier
    from apex.optimizers import FusedAdam

    assert multi_tensor_applier.available

    class FusedAdamV2(FusedAdam):
        @torch.no_grad()
        def step(self, closure=None, scale=1.0):
            assert hasattr(self, "multi_tensor_adam")
            for group in self.param_groups:
                beta1, beta2 = group["betas"]
                group["step"] = group.get("step", 0) + 1
                copies, lists = [], ([], [], [], [])
                for p in group["params"]:
                    state = self.state[p]
                    if len(state) == 0:
                        state["exp_avg"] = torch.zeros_like(p.data, dtype=torch.float)
                        state["exp_avg_sq"] = torch.zeros_like(p.data, dtype=torch.float)
                    copies.append((p, p.data.float()))
                    grad = p.grad.data.float() / scale
                    items = (grad, copies[-1][1], state["exp_avg"], state["exp_avg_sq"])
                    for each, item in zip(lists, items, strict=True):
                        each.append(item)
                multi_tensor_applier(
                    self.multi_tensor_adam, self._dummy_overflow_buf, [*lists], group["lr"], beta1,
                    beta2, group["eps"], group["step"], self.adam_w_mode,
                    1 if group["bias_correction"] else 0, group["weight_decay"],
                )  # fmt: skip
                for p, data in copies:
                    p.data.copy_(data)

    return FusedAdamV2


@pytest.mark.parametrize("version", ["V1", "V2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_fairseq_memory_efficient_adam(version, dtype, device):
    """Parameters of one dtype, no master weights: an update in float32 is rounded to them."""
    losses = []
    ours, theirs = (FusedAdamV1, PlainAdamV1) if version == "V1" else (fused_adam_v2(), AdamW)
    for optimizer_of in (ours, theirs):
        plain = optimizer_of is theirs
        model = Encoder(torch.nn.LayerNorm, plain_softmax).to(device, dtype)
        params = list(model.parameters())
        wide = [p.detach().float().requires_grad_() for p in params]
        optimizer = optimizer_of(
            wide if plain else params, lr=5e-3, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01
        )
        scale, found = 128.0, []
        for step in range(STEPS):
            ids = tokens(device, step)
            loss = functional.cross_entropy(
                model(ids).float().flatten(0, 1), ids.roll(1, 1).flatten()
            )
            model.zero_grad()
            (loss * scale).backward()
            found.append(loss.item())
            if not plain:
                optimizer.step(scale=scale)
                continue
            for param, copy in zip(params, wide, strict=True):
                copy.grad = param.grad.float() / scale
            optimizer.step()
            with torch.no_grad():
                for param, copy in zip(params, wide, strict=True):
                    param.copy_(copy)
                    copy.copy_(param)  # the rounded weight is all that is kept
        losses.append(found)
    rtol = 1e-5 if dtype is torch.float32 else HALF
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=rtol, atol=0)
    assert losses[0][-1] < 0.95 * losses[0][0]


def megatron_softmax():
    """Megatron's autograd function over the causal softmax extension."""
    kernels = importlib.import_module("scaled_upper_triang_masked_softmax_cuda")

    class ScaledUpperTriangMaskedSoftmax(torch.autograd.Function):
        @staticmethod
        def forward(ctx, inputs, scale):
            ctx.scale = scale
            results = kernels.forward(inputs, scale)
            ctx.save_for_backward(results)
            return results

        @staticmethod
        def backward(ctx, grads):
            return kernels.backward(grads, ctx.saved_tensors[0], ctx.scale), None

    def softmax(scores, scale):
        flat = scores.reshape(-1, *scores.shape[-2:])
        return ScaledUpperTriangMaskedSoftmax.apply(flat, scale).view_as(scores)

    return softmax


def megatron_clip(parameters, max_norm):
    """Megatron's clipping by ``multi_tensor_applier``."""
    import amp_C
    from apex.multi_tensor_apply import multi_tensor_applier

    grads = [p.grad.detach() for p in parameters]
    flag = torch.zeros(1, dtype=torch.int32, device=grads[0].device)
    norm, _ = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, [grads], False)
    coefficient = max_norm / (norm.item() + 1.0e-6)
    if coefficient < 1.0:
        multi_tensor_applier(amp_C.multi_tensor_scale, flag, [grads, grads], coefficient)
    return norm.item()


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_megatron(level, device):
    """Fused softmax and norm, clipping by lists, FusedAdam; under amp's autocast, too."""
    from apex import amp
    from apex.normalization import MixedFusedLayerNorm
    from apex.optimizers import FusedAdam

    model = Encoder(MixedFusedLayerNorm, megatron_softmax()).to(device)
    optimizer = FusedAdam(model.parameters(), lr=5e-3, weight_decay=0.01, betas=(0.9, 0.95))
    twin = Encoder(torch.nn.LayerNorm, causal_softmax).to(device)
    plain = AdamW(twin.parameters(), lr=5e-3, weight_decay=0.01, betas=(0.9, 0.95))
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0
    )
    dtype = {"O0": torch.float32, "O1": torch.float16, "O4": torch.bfloat16}[level]
    losses, norms = (
        types.SimpleNamespace(ours=[], plain=[]),
        types.SimpleNamespace(ours=[], plain=[]),
    )
    for step in range(STEPS):
        ids = tokens(device, step)
        loss = functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        norms.ours.append(megatron_clip(list(amp.master_params(optimizer)), 0.5))
        optimizer.step()
        optimizer.zero_grad()
        losses.ours.append(loss.item())
        with torch.autocast(torch.device(device).type, dtype=dtype, enabled=level != "O0"):
            logits = twin(ids)
        loss = functional.cross_entropy(logits.float().flatten(0, 1), ids.roll(1, 1).flatten())
        plain.zero_grad()
        loss.backward()
        norms.plain.append(torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5).item())
        plain.step()
        losses.plain.append(loss.item())
    # bfloat16 rounds eight times as coarsely as float16.
    rtol = {"O0": 1e-5, "O1": HALF, "O4": 8 * HALF}[level]
    ours, theirs = torch.tensor(losses.ours), torch.tensor(losses.plain)
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=0)
    assert max(norms.plain) > 0.5  # some are clipped
    assert losses.ours[-1] < 0.95 * losses.ours[0]
