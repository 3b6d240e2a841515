"""Ops of apex's contrib: bandwidth of each function against the plain formula, or autograd's of it.

Bytes counted, of elements of s bytes:
    focal_loss        each logit: the loss alone s (read), with the gradient, the gradient alone and
                      the scaling in place 2 s
    index_mul_2d      each of e * d elements: forward 3 s (read both, write), backward 6 s (read
                      dout, in2 and a row of in1, write din2, add to din1), second backward 9 s
    transducer_joint  each of B * T * U * H elements: forward s (write), with ReLU and dropout s + 1
                      (the mask, too), backward as forward (one read for both gradients)
    transducer_loss   each row of V logits: forward V s + 20 (read the logits, write and read two
                      log-probabilities, write alpha, beta and the sum's log), backward 2 V s + 8
focal_loss: anchors of RetinaNet's five levels, of 800x1333 pixels, times images and classes; 90
classes are not a multiple of a vector. index_mul_2d: backward includes the sort of the index;
torch's sums have no fixed order. transducer: all samples have all frames and labels; the loss is
bounded by its T + U dependent steps where V is small, and its peer computes a diagonal at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import harness
import torch

from apex_te.ops import focal_loss, index_mul_2d
from apex_te.ops.transducer_joint import transducer_joint_bwd, transducer_joint_fwd
from apex_te.ops.transducer_loss import transducer_loss

ANCHORS = 201_600
LOGITS = [(ANCHORS, 80), (ANCHORS, 96), (8 * ANCHORS, 80), (8 * ANCHORS, 90), (4096, 80)]
# rows of in1, rows of in2, columns: edges of atoms
EDGES = [
    (50_000, 1_000_000, 64), (200_000, 1_000_000, 128), (5_000, 100_000, 64), (2_000, 500_000, 256),
]  # fmt: skip
# B, T, U, then H or V
JOINTS = [(16, 200, 60, 512), (8, 400, 100, 640), (32, 128, 30, 1024), (4, 64, 20, 512)]
LOSSES = [(16, 200, 60, 29), (8, 400, 100, 1024), (32, 128, 30, 512), (16, 200, 60, 4096)]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def named(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{harness.text_of(shape)} {str(dtype).removeprefix('torch.')}"


def lengths(batch: int, *sizes: int) -> list[torch.Tensor]:
    return [torch.full((batch,), size, dtype=torch.int32, device="cuda") for size in sizes]


@harness.case("focal_loss", LOGITS)
def focal_rows(shape: tuple[int, int]) -> Iterator[harness.Row]:
    target = torch.randint(-2, shape[1], shape[:1], device="cuda")
    count, factor = torch.tensor([100.0], device="cuda"), torch.tensor(2.0, device="cuda")
    for dtype in (BF16, FP32):
        logits = (harness.normal(*shape).float() * 2 - 4).to(dtype)
        leaf, size = logits.clone().requires_grad_(), logits.numel() * logits.element_size()
        args, name = (logits, target, count), named(shape, dtype)
        forward = partial(focal_loss.focal_loss_fwd, *args)
        made = forward()[1]
        out = focal_loss.reference(leaf, target, count)
        calls = {
            "focal_loss": (partial(forward, with_grad=False),
                           harness.formula_peers(focal_loss.reference, *args)),
            "with gradient": (forward, {}),
            "focal_loss_bwd": (partial(focal_loss.focal_loss_bwd, *args, factor),
                               {"torch": harness.gradients(out, leaf, out.new_ones(()))}),
            "focal_loss_scale": (partial(focal_loss.focal_loss_scale, made, count, count),
                                 {"torch": partial(made.mul_, 1.0)}),
        }  # fmt: skip
        for function, (call, peers) in calls.items():
            num_bytes = size if function == "focal_loss" else 2 * size
            yield harness.measure(function, name, num_bytes, call, peers)


@harness.case("index_mul_2d", EDGES)
def index_rows(shape: tuple[int, int, int]) -> Iterator[harness.Row]:
    num_rows, places, cols = shape
    index = torch.randint(num_rows, (places,), device="cuda")
    fwd, bwd = index_mul_2d.index_mul_2d_fwd, index_mul_2d.index_mul_2d_bwd
    for dtype in (FP32, FP16):
        in1, d1 = (harness.normal(num_rows, cols).to(dtype) for _ in range(2))
        in2, dout, d2 = (harness.normal(places, cols).to(dtype) for _ in range(3))
        out, din1 = torch.empty_like(in2), torch.zeros_like(in1)
        leaves = [t.clone().requires_grad_() for t in (in1, in2, dout)]
        made = index_mul_2d.reference(*leaves[:2], index)
        grads = torch.autograd.grad(made, leaves[:2], leaves[2], create_graph=True)
        forward = partial(fwd, in1, in2, index, out=out)
        backward = partial(bwd, dout, in1, in2, index, din1=din1, out=out)
        again = (
            partial(fwd, d1, in2, index, in1, d2, out=out),
            partial(bwd, dout, d1, d2, index, din1=din1, out=out),
        )
        calls = {
            "fwd": (3, forward, harness.formula_peers(index_mul_2d.reference, in1, in2, index)),
            "bwd": (6, backward, {"torch": harness.gradients(made, leaves[:2], dout)}),
            "bwd twice": (9, lambda again=again: [call() for call in again],
                          {"torch": harness.gradients(grads, leaves, (d1, d2))}),
        }  # fmt: skip
        for function, (passes, call, peers) in calls.items():
            num_bytes = passes * in2.numel() * in2.element_size()
            name = named(shape, dtype)
            yield harness.measure(f"index_mul_2d {function}", name, num_bytes, call, peers)


def joint(f: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return f[:, :, None] + g[:, None]


def masked(f: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(joint(f, g).relu(), 0.1)


@harness.case("transducer_joint", JOINTS)
def joint_rows(shape: tuple[int, int, int, int]) -> Iterator[harness.Row]:
    batch, frames, places, cols = shape
    f_len, g_len = lengths(batch, frames, places)
    random = {"relu": True, "p": 0.1, "seed": torch.tensor([1], device="cuda")}
    for dtype in (BF16, FP32):
        f, g = (harness.normal(batch, n, cols).to(dtype) for n in (frames, places))
        numel, size, name = batch * frames * places * cols, f.element_size(), named(shape, dtype)
        forward = partial(transducer_joint_fwd, f, g, f_len, g_len)
        call, peers = partial(forward, with_mask=False), harness.formula_peers(joint, f, g)
        yield harness.measure("transducer_joint fwd", name, numel * size, call, peers)
        call, peers = partial(forward, **random), harness.formula_peers(masked, f, g)
        yield harness.measure("fwd, ReLU and dropout", name, numel * (size + 1), call, peers)
        grad, mask = call()
        for label, kept, formula in (("bwd", None, joint), ("bwd, masked", mask, masked)):
            call = partial(transducer_joint_bwd, grad, kept, f_len, g_len, None, frames, places)
            peers = {"torch": harness.backward(formula, (f, g), grad)}
            num_bytes = numel * (size + (kept is not None))
            yield harness.measure(f"transducer_joint {label}", name, num_bytes, call, peers)


def by_diagonals(x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """The loss of samples that all have T frames and U - 1 labels."""
    logs = x.float().log_softmax(-1)
    batch, frames, places, _ = logs.shape
    blank = logs[..., 0]
    index = label.long()[:, None, :, None].expand(-1, frames, -1, 1)
    labels = logs[:, :, :-1].gather(-1, index)[..., 0]
    place = torch.arange(places, device=x.device)
    alpha = blank.new_full((batch, places), -torch.inf)
    alpha[:, 0] = 0.0
    for diagonal in range(1, frames + places - 1):
        t = diagonal - place
        down = alpha + blank[:, (t - 1).clamp(0, frames - 1), place]
        down = down.masked_fill((t < 1) | (t >= frames), -torch.inf)
        right = alpha[:, :-1] + labels[:, t[1:].clamp(0, frames - 1), place[:-1]]
        right = right.masked_fill((t[1:] < 0) | (t[1:] >= frames), -torch.inf)
        right = torch.nn.functional.pad(right, (1, 0), value=-torch.inf)
        alpha = torch.logaddexp(down, right)
    return -(alpha[:, -1] + blank[:, -1, -1])


@harness.case("transducer_loss", LOSSES)
def loss_rows(shape: tuple[int, int, int, int]) -> Iterator[harness.Row]:
    batch, frames, places, symbols = shape
    label = torch.randint(1, symbols, (batch, places - 1), device="cuda").int()
    f_len, y_len = lengths(batch, frames, places - 1)
    for dtype in (BF16, FP32):
        x = harness.normal(*shape).to(dtype).requires_grad_()
        num_rows, size, name = x[..., 0].numel(), symbols * x.element_size(), named(shape, dtype)
        loss, other = transducer_loss(x, label, f_len, y_len), by_diagonals(x, label)
        call = partial(transducer_loss, x.detach(), label, f_len, y_len)
        peers = {"torch": partial(by_diagonals, x.detach(), label)}
        yield harness.measure("transducer_loss fwd", name, num_rows * (size + 20), call, peers)
        ones = torch.ones_like(loss)
        call = harness.gradients(loss, x, ones)
        peers = {"torch": harness.gradients(other, x, ones.float())}
        yield harness.measure("transducer_loss bwd", name, num_rows * (2 * size + 8), call, peers)
