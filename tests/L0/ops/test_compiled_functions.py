"""Every public function under torch.compile, and the schemas of the ops that it calls."""

import pytest
import torch
import torch._dynamo
from checks import assert_same_bits
from public_functions import DIFFERENTIABLE, FORMS, PADDED_FORMS, Call, find
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

every = pytest.mark.parametrize("name", [*FORMS, *PADDED_FORMS])
FP8 = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu}


def clones(value):
    return tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, value)


class Recorded(TorchDispatchMode):
    """The calls of this package's ops, with copies of what was given."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "apex_te":
            self.calls.append((func, clones(args)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", sorted({name.partition(".")[0] for name in FORMS}))
def test_compiled_the_functions_of_an_op_give_the_bits_of_eager(device, op):
    """In one graph, as most of the time is spent for each graph."""
    names = [name for name in (*FORMS, *PADDED_FORMS) if name.startswith(f"{op}.")]
    calls = [Call(name, device) for name in names]
    functions = [find(name) for name in names]
    given = [call.arguments(call.fresh()) for call in calls]
    torch._dynamo.reset()

    def run(given):
        # Flat: torch 2.11 cannot return NamedTuples inside of a list.
        results = zip(functions, given, strict=True)
        return [tree_leaves(function(**args)) for function, args in results]

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for call, result, args in zip(calls, compiled(given), given, strict=True):
        actual = call.filled(call.results(result, args))
        assert_same_bits(actual, call.filled(call.expected))


def losses(name, function, tensors):
    """The outputs of a differentiable function, and the gradients of a sum of them."""
    call = Call(name, tensors[0].device)
    leaves = [t.clone() for t in tensors]
    trained = [t.requires_grad_() for t in leaves if t.is_floating_point()]
    trained = trained[:1] if name == "rope.rope" else trained
    if name == "rope.rope":
        leaves[1:] = [t.detach() for t in leaves[1:]]
    outputs = [t for t in tree_leaves(function(call.arguments(leaves))) if t.requires_grad]
    total = sum(
        (t * torch.linspace(0.5, 1.5, t.numel()).view(t.shape).to(t)).sum() for t in outputs
    )
    return [*outputs, *torch.autograd.grad(total, trained)]


@pytest.mark.parametrize("name", sorted(DIFFERENTIABLE))
def test_compiled_gradients_have_the_bits_of_eager(device, name):
    function, tensors = find(name), Call(name, device).tensors
    torch._dynamo.reset()

    def run(given):
        return function(**given)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_same_bits(losses(name, compiled, tensors), losses(name, run, tensors))


@every
def test_its_ops_write_what_their_schemas_say(device, name):
    call = Call(name, device)
    with Recorded() as recorded:
        call(*call.fresh())
    for op, args in recorded.calls:
        given = clones(args)
        op(*given)
        for argument, value, before in zip(op._schema.arguments, given, args, strict=True):
            if argument.alias_info is None or not argument.alias_info.is_write:
                tensors = [
                    [t for t in tree_leaves(v) if isinstance(t, torch.Tensor)]
                    for v in (value, before)
                ]
                assert_same_bits(*tensors)
        # torch's schema check cannot handle FP8 tensors.
        has_fp8 = any(isinstance(t, torch.Tensor) and t.dtype in FP8 for t in tree_leaves(args))
        checks = ("test_autograd_registration", "test_faketensor", "test_schema")
        torch.library.opcheck(op, args, test_utils=checks[: 2 if has_fp8 else 3])
