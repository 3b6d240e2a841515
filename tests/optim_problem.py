"""One optimizer step over a list of parameters, as multi_tensor_optim's tests set it up."""

import torch
from checks import assert_as_good_as_torch, assert_same_bits

from apex_te.ops import multi_tensor_optim as op

SIZES = [0, 1, 3, 7, 0, 129, 1000, 2048, 4095, 16384, 16385, 0]


class Problem:
    """Parameters, gradients and moments of one step; masters for parameters of 16 bits."""

    def __init__(self, device, dtype, grad_dtype=None, with_masters=False, sizes=SIZES):
        def randn():
            return [torch.randn(n) for n in sizes]

        masters = [p.to(device) for p in randn()]
        self.params = [p.to(dtype) for p in masters]
        self.grads = [g.to(grad_dtype or dtype).to(device) for g in randn()]
        self.m = [0.3 * m.to(device) for m in randn()]
        self.v = [0.5 * v.abs().to(device) for v in randn()]
        self.masters = masters if with_masters else None

    def weights(self):
        return self.params if self.masters is None else self.masters

    def lists(self):
        return [self.params, self.grads, self.m, self.v, self.masters or []]

    def clones(self):
        return [[t.clone() for t in tensors] for tensors in self.lists()]

    def check(self, reference, call, with_v=True, **options):
        """Runs `call` and compares each list with `reference` in float64 and as torch has it."""
        states = (self.m, self.v) if with_v else (self.m,)
        sources = list(zip(self.weights(), self.grads, *states, strict=True))
        exact = [reference(*(t.cpu().double() for t in s), **options) for s in sources]
        same_dtype = [reference(*s, **options) for s in sources]
        call(self)
        results = (self.weights(), *states)
        for result, e, s in zip(
            results, zip(*exact, strict=True), zip(*same_dtype, strict=True), strict=True
        ):
            assert_as_good_as_torch(torch.cat(result), torch.cat(e), torch.cat(s))
        if self.masters is not None:
            dtype = self.params[0].dtype
            assert_same_bits(self.params, [m.to(dtype) for m in self.masters])


def adam(problem, **options):
    op.adam(problem.params, problem.grads, problem.m, problem.v, masters=problem.masters, **options)


def sgd(problem, **options):
    op.sgd(problem.params, problem.grads, problem.m, masters=problem.masters, **options)


def lamb(problem, **options):
    op.lamb(problem.params, problem.grads, problem.m, problem.v, masters=problem.masters, **options)
