"""Every public function refuses arguments that it cannot take, with an error of its own."""

import functools
import inspect

import pytest
import torch
from apex_te.op_builder.jit.errors import BuildError
from public_functions import NAMES, find, make_case

from apex_te.ops import multi_tensor

REFUSALS = (NotImplementedError, TypeError, ValueError)


class Stranger:
    """An object without any attribute that a tensor or an option has."""


@functools.cache
def nested(layout):
    return torch.nested.nested_tensor([torch.rand(3, 4), torch.rand(2, 4)], layout=layout)


TENSORS = {
    "string": lambda t: "tensor",
    "number": lambda t: 3.5,
    "none in a list": lambda t: [None],
    "stranger": lambda t: Stranger(),
    "numpy": lambda t: t.float().numpy(),
    "one dimension more": lambda t: t[None],
    "no dimension": lambda t: t.flatten()[0],
    "seven dimensions": lambda t: t.reshape(1, 1, 1, 1, 1, 1, -1),
    "another dtype": lambda t: t.to(torch.complex64),
    "double": lambda t: t.to(torch.float64),
    "nested": lambda t: nested(torch.strided),
    "jagged": lambda t: nested(torch.jagged),
    "sparse": lambda t: t.float().to_sparse(),
    "quantized": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    "meta": lambda t: t.to("meta"),
}
# No function takes these for a tensor.
NEVER = {
    "string", "number", "none in a list", "stranger", "nested", "jagged", "sparse", "quantized",
    "numpy",
}  # fmt: skip
LISTS = {
    "string": lambda ts: "tensors",
    "number": lambda ts: 3,
    "stranger": lambda ts: Stranger(),
    "strings": lambda ts: ["a"] * len(ts),
    "numbers": lambda ts: [1.0] * len(ts),
    "nothing inside": lambda ts: [None] * len(ts),
    "empty": lambda ts: [],
    "one too many": lambda ts: [*ts, ts[0]],
    "nested": lambda ts: [nested(torch.strided) for _ in ts],
    "jagged": lambda ts: [nested(torch.jagged) for _ in ts],
    "sparse": lambda ts: [t.to_sparse() for t in ts],
    "meta in part": lambda ts: [ts[0].to("meta"), *ts[1:]],
    "complex": lambda ts: [t.to(torch.complex64) for t in ts],
}
NUMBERS = {
    "string": lambda n: "number",
    "stranger": lambda n: Stranger(),
    "list": lambda n: [n],
    "2^63": lambda n: 2**63,
    "-2^63 - 1": lambda n: -(2**63) - 1,
    "2^2000": lambda n: 2**2000,
}
OTHERS = {
    "string": lambda v: "\ud800",
    "number": lambda v: 3,
    "2^63": lambda v: 2**63,
    "stranger": lambda v: Stranger(),
    "tensor": lambda v: torch.rand(3),
}


def replacements(value):
    """Wrong values for an argument, by name; for a tuple of tensors, also those of its parts."""
    if isinstance(value, torch.Tensor):
        return {k: lambda make=make: make(value) for k, make in TENSORS.items()}
    if isinstance(value, bool) or value is None:
        return {}
    if isinstance(value, (int, float)):
        return {k: lambda make=make: make(value) for k, make in NUMBERS.items()}
    if isinstance(value, list):
        table = LISTS if isinstance(value[0], torch.Tensor) else {
            "string": lambda v: "x", "strings": lambda v: ["x"] * len(v), "number": lambda v: 3,
            "stranger": lambda v: Stranger(), "huge": lambda v: [2**2000] * len(v),
        }  # fmt: skip
        return {k: lambda make=make: make(value) for k, make in table.items()}
    return {k: lambda make=make: make(value) for k, make in OTHERS.items()}


def check(name, case, argument, kind, value):
    """The call raises a refusal that names function and argument, or gives what it should."""
    function = find(name)
    try:
        function(**{**case.args, argument: value})
        tensors = [a for k, a in case.args.items() if isinstance(a, torch.Tensor) and k != argument]
        must_fail = kind in NEVER or (kind == "meta" and tensors)
        assert not (must_fail and isinstance(case.args[argument], torch.Tensor)), (
            f"{argument} {kind}: taken without a word"
        )
    except REFUSALS as error:
        text = str(error)
        stem, own = name.split(".")
        words = (own, stem, *stem.split("_"), *own.split("_"))
        head, colon, rest = text.partition(": ")
        assert colon, f"{argument} {kind}: no function in {text!r}"
        assert any(word in head for word in words), f"{argument} {kind}: {text!r}"
        assert argument in rest or named_otherwise(name, argument, rest), (
            f"{argument} {kind}: no argument in {text!r}"
        )
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(
            f"{argument} {kind}: {type(error).__name__}: {str(error)[:200]}"
        ) from None


# What an argument is called in the op's C contract, whose errors name it so.
C_NAMES = {
    "amax": ("x",),
    "grad_output": ("dy",),
    "grad_permuted": ("inp",),
    "groups": ("table",),
    "matrices": ("table",),
    "num_rows": ("num_out_tokens",),  # as moe_permute of apex_te.permutation has it
    "out": ("y", "dx", "amax", "table"),
    "tensors": ("amax",),
}


def named_otherwise(name, argument, text):
    """The contract may say what is wrong of another argument that has to agree."""
    names = [*inspect.signature(find(name)).parameters, *C_NAMES.get(argument, ())]
    return any(other in text for other in names)


@pytest.mark.parametrize("name", NAMES)
def test_each_argument_in_turn(name):
    failures = []
    arguments = make_case(name).args
    for argument, given in arguments.items():
        for kind in replacements(given):
            case = make_case(name)
            try:
                value = replacements(case.args[argument])[kind]()
            except (RuntimeError, TypeError, NotImplementedError):
                continue  # torch itself cannot make such a tensor of this dtype
            try:
                check(name, case, argument, kind, value)
            except AssertionError as error:
                failures.append(str(error))
    assert not failures, "\n".join(failures)


def having(parameter):
    return [name for name in NAMES if parameter in make_case(name).args]


@pytest.mark.parametrize("name", [name for name in having("fp8_dtype") if "scales_of" not in name])
def test_formats_that_are_not_fp8(name):
    by_contract = name in ("grouped_quantize.quantize_groups", "grouped_quantize.quantize_matrices")
    refused = "rowwise must have dtype" if by_contract else "fp8_dtype must be"
    for dtype in (torch.bfloat16, torch.int8):
        args = {k: v for k, v in make_case(name).args.items() if not k.startswith("out")}
        with pytest.raises(TypeError, match=rf"^[\w.]+: {refused} float8_e4m3fn"):
            find(name)(**{**args, "fp8_dtype": dtype})


@pytest.mark.parametrize("name", having("eps"))
def test_eps_that_is_no_small_number(name):
    for eps in (-1.0, torch.inf, torch.nan):
        with pytest.raises(ValueError, match="eps must be zero or more and finite, got"):
            find(name)(**{**make_case(name).args, "eps": eps})


@pytest.mark.parametrize("kind", [BuildError, torch.OutOfMemoryError])
def test_failures_of_builds_and_devices_stay_as_they_are(kind, monkeypatch):
    """A build that fails is not explained by an argument, here one that would be refused, too."""

    def fail(*args):
        raise kind("no compiler")

    monkeypatch.setattr(multi_tensor, "_scale", fail)
    with pytest.raises(kind, match=r"^no compiler$"):
        multi_tensor.scale([torch.ones(2)], [], 1.0)
