"""The files of an elementwise op of several inputs, outputs and scalars.

The kernels are files of the folder beside this one, whatever the arguments; the header, the Python
op and its test are written here, since they name them.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from . import render
from .names import Refusal

KERNELS = Path(__file__).resolve().parent / "several"
MOST, LONGEST = 6, 9  # of each kind, and characters of a name: lines stay in bounds
# names of the generated files, and words of C++, that arguments must leave alone
_TAKEN = {
    *("Any", "OpFunction", "annotations", "args", "backward", "bind", "checked", "ctx", "each"),
    *("forward", "grad_outputs", "grads", "op", "out", "p", "scale", "tensors", "torch", "total"),
    *("auto", "bool", "char", "double", "float", "in", "int", "long", "short", "void"),
}


class Arguments(NamedTuple):
    """Names of an op's tensors and numbers, in the order of its functions' arguments."""

    inputs: Sequence[str]
    outputs: Sequence[str]
    scalars: Sequence[str] = ()

    def check(self, op: str) -> None:
        """Raise Refusal if an op cannot have arguments of these names."""
        for kind, names in zip(self._fields, self, strict=True):
            if len(names) > MOST or (not names and kind != "scalars"):
                raise Refusal(f"--{kind} must be 1 to {MOST} names, got {len(names)}")
        gradients = [f"d{name}" for name in (*self.inputs, *self.outputs)]
        every = [*self.inputs, *self.outputs, *self.scalars, *gradients]
        for name in every:
            if len(name) > LONGEST + 1:  # a gradient's has one more
                raise Refusal(f"an argument's name must have at most {LONGEST} characters: {name}")
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) or keyword.iskeyword(name):
                raise Refusal(f"an argument's name must be an identifier, got {name!r}")
            if name in _TAKEN or name == op or name.startswith((f"{op}_", "k")):
                raise Refusal(f"{name!r} is a name that the generated files use; choose another")
            if every.count(name) > 1:
                raise Refusal(f"{name!r} is the name of two arguments, a gradient's included")


def files(name: str, arguments: Arguments, cuda: bool) -> dict[str, str]:
    """Returns the files of the op: path below the root -> text."""
    arguments.check(name)
    found = {
        f"apex_te/ops/{name}.py": _python(name, arguments),
        f"csrc/{name}/{name}.h": _header(name, arguments),
        f"op_builder/{name}.py": _BUILDER.format(
            name=name, cls=render.class_name(name), base="CUDA" if cuda else "CPU"
        ),
        f"tests/L0/ops/test_{name}.py": _test(name, arguments, cuda),
    }
    for path in sorted(KERNELS.rglob("*")):
        if path.suffix == ".cpp" or (path.suffix == ".cu" and cuda):
            text = path.read_text(encoding="utf-8").replace(render.STEM, name)
            where = str(path.relative_to(KERNELS)).replace(render.STEM, name)
            found[where] = render.sort_includes(text)
    return found


def _lines(items: Iterable[str], indent: int = 4) -> str:
    """Items on a line each, with a comma after every one."""
    return "".join(f"{' ' * indent}{item},\n" for item in items)


def _literals(items: Sequence[str], indent: int) -> str:
    """A C string in pieces, one for each item of a comma separated list."""
    pieces = [f'"{item}, "' for item in items[:-1]] + [f'"{items[-1]}"']
    return f"\n{' ' * indent}".join(pieces)


_BUILDER = '''"""Builder of {name}."""

from .builder import {base}OpBuilder


class {cls}Builder({base}OpBuilder):
    """An elementwise op of several tensors."""

    NAME = "{name}"
'''


def _header(name: str, arguments: Arguments) -> str:
    inputs, outputs, scalars = arguments
    first = inputs[0]
    like = [f"{name}: T[*r c]" if name == first else f"{name}: T[{first}]" for name in inputs]
    numbers = [f"{scalar}: float" for scalar in scalars]
    fwd = [*like, *(f"{each}: T[{first}]!" for each in outputs), *numbers]
    bwd = [*(f"d{each}: T[{first}]" for each in outputs), *like]
    bwd += [*(f"d{each}: T[{first}]!" for each in inputs), *numbers]
    pad = len("APEX_TE_FUNCTION(")
    reads = [f"  const float {each} = in[{i}];" for i, each in enumerate(inputs)]
    reads += [f"  const float {each} = scalars[{i}];" for i, each in enumerate(scalars)]
    scale = [f"  const float scale = {' * '.join(scalars)};"] if scalars else []
    factors = ["scale"] * bool(scalars)
    product = " * ".join((*factors, *inputs))
    values = [f"  out[{j}] = {j + 1}.0f * {product};" for j in range(len(outputs))]
    total = ["  float total = grads[0];"]
    total += [f"  total += {j + 1}.0f * grads[{j}];" for j in range(1, len(outputs))]
    gradients = [
        f"  out[{i}] = {' * '.join(('total', *factors, *inputs[:i], *inputs[i + 1 :]))};"
        for i in range(len(inputs))
    ]
    used = reads if len(inputs) > 1 else reads[1:]
    unused = [] if scalars else ["  (void)scalars;"]
    lines = {
        "values": [*unused, *reads, *scale, *values],
        "gradients": [
            *unused,
            *([] if used else ["  (void)in;"]),
            *used,
            *scale,
            *total,
            *gradients,
        ],
    }
    return _HEADER.format(
        name=name,
        fwd=_literals(fwd, pad),
        bwd=_literals(bwd, pad),
        numbers=(len(inputs), len(outputs), len(scalars)),
        **{key: "\n".join(value) for key, value in lines.items()},
    )


_HEADER = """// {name}: outputs of every element of the inputs.
//
// The declarations below are read as text: by the builder, for the schemas that torch knows, and as
// contracts (docs/new_op.md). "!" is written.
#pragma once

#include "common/activation/arguments.h"

APEX_TE_FUNCTION({name}_fwd,
                 {fwd})
APEX_TE_FUNCTION({name}_bwd,
                 {bwd})

namespace apex_te {{
namespace {{

constexpr int kInputs = {numbers[0]}, kOutputs = {numbers[1]}, kScalars = {numbers[2]};
constexpr int kMost = kInputs > kOutputs ? kInputs : kOutputs;

// The formulas, in float32, once for both devices.
APEX_TE_HD void values_of(const float* in, const float* scalars, float* out) {{
{values}
}}
APEX_TE_HD void gradients_of(const float* in, const float* grads, const float* scalars,
                             float* out) {{
{gradients}
}}

// Checked arguments. Plain data, so kernels take it whole.
struct Problem {{
  bool is_bwd;
  DType dtype;  // of every tensor
  int64_t numel;
  float scalars[kScalars + 1];
  const void *in[kInputs], *grads[kOutputs];  // grads are null in the forward
  void* out[kMost];                           // the outputs, or the inputs' gradients

  APEX_TE_HD int results() const {{ return is_bwd ? kInputs : kOutputs; }}
}};

// Reads the arguments in the order of the signatures; both devices call it, so that no kernel can
// be launched unchecked.
inline Problem check_problem(Args& args, bool is_bwd) {{
  Problem p = {{}};
  p.is_bwd = is_bwd;
  TensorView grads[kOutputs];
  for (int k = 0; is_bwd && k < kOutputs; ++k) grads[k] = args.tensor();
  const TensorView x = args.tensor();
  x.has_dtype({{DType::kFloat32, DType::kFloat16, DType::kBFloat16}}).is_dense();
  p.in[0] = x.data();
  for (int k = 1; k < kInputs; ++k) p.in[k] = check_like(args.tensor(), x);
  for (int k = 0; is_bwd && k < kOutputs; ++k) p.grads[k] = check_like(grads[k], x);
  for (int k = 0; k < p.results(); ++k) p.out[k] = check_like(args.tensor(), x);
  for (int k = 0; k < kScalars; ++k) p.scalars[k] = static_cast<float>(args.floating());
  p.dtype = x.dtype();
  p.numel = x.numel();
  return p;
}}

}}  // namespace
}}  // namespace apex_te
"""


def _python(name: str, arguments: Arguments) -> str:
    inputs, outputs, scalars = arguments
    grads = [f"d{each}" for each in outputs]
    tensors = "torch.Tensor"
    several = f"tuple[{', '.join([tensors] * len(outputs))}]" if len(outputs) > 1 else tensors
    many = f"tuple[{', '.join([tensors] * len(inputs))}]" if len(inputs) > 1 else tensors
    defaults = [f"{each}: float = 1.0" for each in scalars]
    product = " * ".join((*["scale"] * bool(scalars), *inputs))
    grads_of = "*grads" if len(inputs) > 1 else "grads"
    gradients = [grads_of, *("None" for _ in scalars)]
    values = {
        "name": name,
        "cls": render.class_name(name),
        "parameters": _lines([*(f"{each}: {tensors}" for each in inputs), *defaults]),
        "bwd_parameters": _lines([f"{each}: {tensors}" for each in (*grads, *inputs)] + defaults),
        "ctx_parameters": _lines(
            ["ctx: Any", *(f"{each}: {tensors}" for each in inputs)]
            + [f"{each}: float" for each in scalars],
            8,
        ),
        "all": _lines([*inputs, *scalars], 12),
        "call": _lines([*inputs, *scalars], 8),
        "contiguous": "\n".join(f"    {each} = {each}.contiguous()" for each in inputs),
        "grads_contiguous": "\n".join(
            f"    {each} = {each}.contiguous()" for each in (*grads, *inputs)
        ),
        "made": "\n".join(f"    {each} = torch.empty_like({inputs[0]})" for each in outputs),
        "grads_made": "\n".join(f"    d{each} = torch.empty_like({each})" for each in inputs),
        "fwd_call": _lines([*inputs, *outputs, *scalars], 8),
        "bwd_call": _lines([*grads, *inputs, *(f"d{each}" for each in inputs), *scalars], 8),
        "saved": _lines(inputs, 12),
        "kept": "".join(f"        ctx.{each} = {each}\n" for each in scalars),
        "returned": _returned(outputs),
        "grads_returned": _returned([f"d{each}" for each in inputs]),
        "several": several,
        "many": many,
        "leaves": _lines(inputs, 8),
        "gradients": f"({grads_of},)" if not scalars else f"(\n{_lines(gradients, 12)}        )",
        "ctx_scalars": "".join(f"            ctx.{each},\n" for each in scalars),
        "scale": f"    scale = {' * '.join(scalars)}\n" if scalars else "",
        "formula": _returned([f"{j + 1} * {product}" for j in range(len(outputs))]),
    }
    return _PYTHON.format(**values)


def _returned(names: Sequence[str]) -> str:
    """The statement that returns one value, or a tuple of several."""
    return f"return {names[0]}" if len(names) == 1 else f"return (\n{_lines(names, 8)}    )"


_PYTHON = '''"""An elementwise op of several tensors, and its gradients."""

from __future__ import annotations

from typing import Any

import torch

from .binding import OpFunction, bind, checked

# Arguments as csrc/{name}/{name}.h declares them.
_fwd = bind("{name}", "{name}_fwd")
_bwd = bind("{name}", "{name}_bwd")


@checked
def {name}(
{parameters}) -> {several}:
    """Computes the outputs for every element, differentiably, in float32 arithmetic.

    The tensors have one shape and one dtype, float32, float16 or bfloat16, as the results do; they
    are made contiguous if they are not, and saved for backward.

    Raises:
        TypeError: a dtype that is not listed, or two dtypes.
        ValueError: two shapes.
    """
    tensors = [
{leaves}    ]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _{cls}.apply(
{all}        )
    return {name}_fwd(
{call}    )


@checked
def {name}_fwd(
{parameters}) -> {several}:
    """Computes the function without autograd."""
{contiguous}
{made}
    _fwd(
{fwd_call}    )
    {returned}


@checked
def {name}_bwd(
{bwd_parameters}) -> {many}:
    """Computes the inputs' gradients, of their shape and dtype."""
{grads_contiguous}
{grads_made}
    _bwd(
{bwd_call}    )
    {grads_returned}


class _{cls}(OpFunction):
    LABEL = "{name}"

    @staticmethod
    def forward(
{ctx_parameters}    ) -> {several}:
        ctx.save_for_backward(
{saved}        )
{kept}        return {name}_fwd(
{all}        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads = {name}_bwd(
            *grad_outputs,
            *ctx.saved_tensors,
{ctx_scalars}        )
        return {gradients}


def reference(
{parameters}) -> {several}:
    """Computes the function in plain PyTorch, differentiably; the specification."""
{scale}    {formula}
'''


def _test(name: str, arguments: Arguments, cuda: bool) -> str:
    scalars = [f"{0.5 + i}" for i in range(len(arguments.scalars))]
    fixture = "" if cuda else _CPU_ALONE
    return _TEST.format(
        name=name,
        inputs=len(arguments.inputs),
        outputs=len(arguments.outputs),
        first=arguments.inputs[0],
        second=arguments.inputs[1] if len(arguments.inputs) > 1 else f"d{arguments.outputs[0]}",
        scalars="()" if not scalars else f"({', '.join(scalars)}{',' * (len(scalars) == 1)})",
        fixture=fixture,
        marks=_ON_GPU.format(name=name) if cuda else "",
        imports=_lines(
            ["DTYPES", "assert_as_good_as_torch", "assert_same_bits", *(["needs_cuda"] * cuda)]
        ),
    )


_CPU_ALONE = """

@pytest.fixture
def device():
    return torch.device("cpu")
"""
_ON_GPU = """

@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_on_both_devices(dtype):
    x, dy = tensors((5000,), dtype, "cpu")
    there = [[each.cuda() for each in group] for group in (x, dy)]
    actual = op.{name}_fwd(*there[0], *SCALARS)
    assert_same_bits(as_list(actual), as_list(op.{name}_fwd(*x, *SCALARS)))
    actual = op.{name}_bwd(*there[1], *there[0], *SCALARS)
    assert_same_bits(as_list(actual), as_list(op.{name}_bwd(*dy, *x, *SCALARS)))
"""
_TEST = '''"""{name} against its reference in float64 and in its own dtype."""

import pytest
import torch
from checks import (
{imports})

from apex_te.ops import {name} as op

SCALARS = {scalars}
{fixture}

def as_list(results):
    return [results] if isinstance(results, torch.Tensor) else list(results)


def tensors(shape, dtype, device):
    """The inputs and the outputs' gradients."""
    made = [torch.randn(shape, device=device).to(dtype) for _ in range({inputs} + {outputs})]
    return made[:{inputs}], made[{inputs}:]


def values_and_gradients(call, x, dy):
    x = [each.detach().requires_grad_() for each in x]
    y = as_list(call(*x, *SCALARS))
    return [*(each.detach() for each in y), *torch.autograd.grad(y, x, dy)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (3, 129), (2, 5, 1000)])
def test_fwd_and_bwd(device, poison, dtype, shape):
    x, dy = tensors(shape, dtype, device)
    actual = values_and_gradients(op.{name}, x, dy)
    doubles = [[each.double() for each in group] for group in (x, dy)]
    exact = values_and_gradients(op.reference, *doubles)
    plain = values_and_gradients(op.reference, x, dy)
    for result, wanted, same_dtype in zip(actual, exact, plain, strict=True):
        assert_as_good_as_torch(result, wanted, same_dtype)


def test_strided(device):
    x, dy = tensors((40, 32), torch.float32, device)
    turned = [[each.t().contiguous().t() for each in group] for group in (x, dy)]
    expected = values_and_gradients(op.{name}, x, dy)
    assert_same_bits(values_and_gradients(op.{name}, *turned), expected)


def test_rejects_bad_arguments(device):
    x, dy = tensors((6, 4), torch.float32, device)
    with pytest.raises(TypeError, match="{first} must have dtype float32, float16 or bfloat16"):
        op.{name}_fwd(*(each.double() for each in x), *SCALARS)
    given = [*dy, *x]
    other = len(dy) + 1 if len(x) > 1 else 0
    given[other] = given[other].t()
    with pytest.raises(ValueError, match="{second} must have x's shape"):
        op.{name}_bwd(*given, *SCALARS)


def test_compiled(device):
    x, dy = tensors((17, 5), torch.float32, device)
    compiled = torch.compile(op.{name}, fullgraph=True, backend="aot_eager")
    expected = values_and_gradients(op.{name}, x, dy)
    assert_same_bits(values_and_gradients(compiled, x, dy), expected)
{marks}'''
