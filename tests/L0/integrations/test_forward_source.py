"""from_torch(fuse=True) on blocks whose forwards do more with a norm's output, or seem to."""

import copy
import warnings

import pytest
import torch
from torch import nn

from apex_te.integrations import from_torch, key_map
from apex_te.integrations.fusion import JoinedLinear, JoinedNorm, JoinedProjections

SIZE = 16
X = torch.linspace(-2, 3, 6 * SIZE).view(2, 3, SIZE).sin()


class Block(nn.Module):
    """A norm and two linear layers, and a norm for calls from elsewhere."""

    flag = False

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(SIZE, 1e-5)
        self.q = nn.Linear(SIZE, SIZE)
        self.k = nn.Linear(SIZE, SIZE)
        self.inner = nn.ModuleDict()
        self.ln = nn.LayerNorm(SIZE)
        nn.init.normal_(self.norm.weight, 1, 0.2)
        nn.init.normal_(self.ln.weight, 1, 0.2)


class Attending(Block):
    def attend(self, h, other=None):
        other = h if other is None else other
        return self.q(h) * self.k(other).sigmoid()


class Read(Block):
    def forward(self, x):
        h = self.norm(x)
        return h + self.q(h) + self.k(h)


class ReadInABranch(Block):
    def forward(self, x, other=None):
        h = self.norm(x)
        if x.shape[0] > 1:
            return self.q(h) + self.k(h) + h.sum()
        return self.q(h) + self.k(h)


class Maybe(Block):
    def forward(self, x):
        h = self.norm(x) if x.shape[0] > 5 else x
        return self.q(h) + self.k(h)


class MaybeInALoop(Block):
    def forward(self, x):
        out, h = 0, x
        for _ in range(2):
            out = out + self.q(h) + self.k(h)
            h = self.norm(x)
        return out


class AlsoOther(Block):
    def forward(self, x):
        h = self.norm(x)
        return self.q(h) + self.k(h) + self.k(x)


class AlsoOtherInAMethod(Attending):
    def forward(self, x):
        return self.attend(self.norm(x)) + self.attend(self.norm(x), x)


class OtherByKeyword(Attending):
    def forward(self, x, *, other=None):
        return self.attend(self.norm(x), other)


class Stored(Block):
    def forward(self, x):
        h = self.norm(x)
        self.last = h
        return self.q(h) + self.k(h) + self.last


class Listed(Block):
    def forward(self, x):
        h = self.norm(x)
        all_states = [x, h]
        return self.q(h) + self.k(h) + sum(all_states)


class Returned(Block):
    def forward(self, x):
        h = self.norm(x)
        return self.q(h) + self.k(h), h


class InALambda(Block):
    def forward(self, x):
        h = self.norm(x)
        more = (lambda: h * 2)()
        return self.q(h) + self.k(h) + more


class InAComprehension(Block):
    def forward(self, x):
        h = self.norm(x)
        return self.q(h) + self.k(h) + sum(h[i].mean() for i in range(2))


class InANestedFunction(Block):
    def forward(self, x):
        h = self.norm(x)

        def more():
            return h * 2

        return self.q(h) + self.k(h) + more()


class InputChanged(Block):
    def forward(self, x):
        x = x * 1
        h = self.norm(x)
        x += 1
        return self.q(h) + self.k(h) + x


class InputChangedByAMethod(Block):
    def forward(self, x):
        x = x * 1
        h = self.norm(x)
        x.mul_(2)
        return self.q(h) + self.k(h) + x


class InputChangedByItem(Block):
    def forward(self, x):
        x = x * 1
        h = self.norm(x)
        x[0] = 3.0
        return self.q(h) + self.k(h) + x


class InputChangedByALayer(Block):
    def __init__(self):
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        x = x * 1
        h = self.norm(x)
        x = self.act(x)
        return self.q(h) + self.k(h) + x


class CalledByAMethod(Block):
    def forward(self, x):
        return self.q(self.norm(x)) + self.k(self.norm(x))

    def prefill(self, x):
        return self.q(x)


class SetLater(Block):
    def forward(self, x):
        later = x
        return later + self.query(self.norm(x)) + self.keys(self.norm(x))

    def __init__(self):
        super().__init__()
        self.query, self.keys = self.q, self.k
        del self.q, self.k

    def swap(self):
        self.query = self.keys


class OfParent(Read):
    def forward(self, x):
        h = self.norm(x)
        return self.q(h) + self.k(h) + super().forward(x)


class WeightRead(Block):
    def forward(self, x):
        h = self.norm(x)
        return self.q(h) + nn.functional.linear(h, self.k.weight, self.k.bias)


class FromOutside(Block):
    def forward(self, x):
        h = self.ln(x)
        return self.q(h) + self.k(h)


APART = [
    Read, ReadInABranch, Maybe, MaybeInALoop, AlsoOther, AlsoOtherInAMethod, OtherByKeyword, Stored,
    Listed, Returned, InALambda, InAComprehension, InANestedFunction, InputChanged,
    InputChangedByAMethod, InputChangedByItem, InputChangedByALayer, CalledByAMethod, SetLater,
    OfParent, WeightRead, FromOutside,
]  # fmt: skip


class Plain(Block):
    def forward(self, x):
        residual = x
        h = self.norm(x)
        return residual + self.q(h) + self.k(h)


class Decided(Attending):
    def forward(self, x, other=None):
        shape = (*x.shape[:-1], -1)
        h = x
        if not self.flag:
            h, other = self.norm(h), other
        else:
            h = h * 2
        out = self.attend(h) if self.flag is False else self.attend(h, x)
        return out.view(shape) if (h is not None and h.dim() == 3) else out


class Past(Attending):
    """A keyword that is given only where it is not None."""

    def forward(self, x, other=None):
        out = self.attend(self.norm(x))
        is_cross = self.flag and other is not None
        return self.attend(out, other=other) if is_cross else out


class InAnotherModule(Block):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

        def forward(self, states, mask=None, **kwargs):
            q = self.q(states)
            q *= 2  # in place, on a part of what is computed at once
            return q * self.k(states), None

    def __init__(self):
        super().__init__()
        self.q = self.k = None
        self.attention = self.Attention()

    def forward(self, x, **kwargs):
        out, _ = self.attention(states=self.norm(x), **kwargs)
        return out


JOINED = [Plain, Decided, Past, InAnotherModule]
for kind in (*APART, *JOINED, Block, InAnotherModule.Attention):
    kind.__module__ = "transformers.models.own.modeling_own"


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([kind()])

    def forward(self, x):
        (block,) = self.layers
        out = block(x)
        out = torch.cat(out) if isinstance(out, tuple) else out
        # A call of a layer past the forward of its block.
        return out + block.ln(x) if isinstance(block, FromOutside) else out


def outcome(model):
    """The output and the gradients of the original parameters."""
    if type(model.layers[0]).__name__.startswith("InputChanged"):  # which has no gradient
        with torch.no_grad():
            return {"out": model(X.clone())}
    out = model(X.clone())
    out.square().sum().backward()
    grads = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    return {"out": out.detach(), **key_map(model).to_original(grads)}


@pytest.mark.parametrize("kind", [*APART, *JOINED])
def test_values_stay_and_norms_are_joined_if_nothing_else_reads_them(kind):
    plain = Model(kind)
    model = copy.deepcopy(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a forward that cannot be told is named
        from_torch(model, fuse=True)
    norms = [m for m in model.modules() if isinstance(m, JoinedNorm)]
    layers = [m for m in model.modules() if isinstance(m, JoinedLinear)]
    assert len(norms) == len(layers) == (kind in JOINED)
    expected, actual = outcome(plain), outcome(model)
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value, rtol=1e-5, atol=1e-4, msg=key)


class OneBranch(Block):
    def forward(self, x):
        out = self.q(x)
        return out + self.k(x) if x.shape[0] > 5 else out


class AfterAReturn(Block):
    def forward(self, x):
        out = self.q(x)
        if x.shape[0] < 5:
            return out
        return out + self.k(x)


class InALoop(Block):
    def forward(self, x):
        out = self.q(x)
        for _ in range(x.shape[0] - 2):
            out = out + self.k(x)
        return out


class AfterAnd(Block):
    def forward(self, x):
        out = self.q(x)
        return out if x.shape[0] < 5 or self.k(x).sum() > 0 else out * 2


for kind in (OneBranch, AfterAReturn, InALoop, AfterAnd):
    kind.__module__ = Block.__module__


@pytest.mark.parametrize("kind", [OneBranch, AfterAReturn, InALoop, AfterAnd])
def test_layers_that_may_run_alone_are_not_joined(kind):
    """A layer that does not run has no gradient, rather than zeros."""
    model = Model(kind)
    from_torch(model, fuse=True)
    assert not any(isinstance(m, JoinedProjections) for m in model.modules())
    assert not any(key.startswith("layers.0.k") for key in outcome(model))


def test_a_forward_without_source_or_replaced_is_left_and_named():
    namespace = {"Block": Block}
    exec(
        "class Own(Block):\n    def forward(self, x):\n        return self.q(self.norm(x))",
        namespace,
    )
    own = namespace["Own"]
    own.__module__ = Block.__module__
    replaced = Model(Plain)
    replaced.layers[0].forward = replaced.layers[0].q.forward
    for model in (Model(own), replaced):
        with pytest.warns(UserWarning, match=r"layers.0 \(fuse=True cannot tell what \w+ computes"):
            from_torch(model, fuse=True)
        assert not any(isinstance(m, JoinedNorm) for m in model.modules())
