"""Schemas that torch knows are those of the C functions, whose headers alone declare them."""

from __future__ import annotations

import importlib
import pkgutil
import re

import pytest
import torch
from apex_te.op_builder import all_builders

import apex_te.ops
from apex_te.ops.registration import bind

# Functions that Python calls without torch.library.
DIRECT = {
    "cast_transpose_pair", "cublaslt_version", "fp8_block_accumulate", "fp8_decode",
    "fp8_gemm_epilogue", "peer_await", "peer_join", "peer_send", "peer_sum",
}  # fmt: skip
# Parameters of C functions that the registered Python function of that name supplies.
SUPPLIED = {
    "fp8_gemm": ["workspace", "algorithm"],
    "fp8_gemm_block": ["workspace", "algorithm"],
    "wgrad_gemm": ["workspace"],
    "dense_gemm": ["columns", "strip", "cache"],
    "dense_gemm_swiglu": ["strip", "cache"],
    "dense_gemm_swiglu_bwd": ["strip", "cache"],
}
FUNCTIONS = {
    name: spec.signature
    for builder in all_builders().values()
    for name, spec in builder.functions().items()
}
KINDS = {"Tensor": "Tensor", "Tensor[]": "List[Tensor]", "float[]": "List[float]"}


@pytest.fixture(scope="module", autouse=True)
def all_ops_imported():
    for module in pkgutil.iter_modules(apex_te.ops.__path__):
        importlib.import_module(f"apex_te.ops.{module.name}")


def schema_of(name):
    return torch._C._get_schema(f"apex_te::{name}", "")


@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - DIRECT))
def test_schema_is_the_signature(name):
    declared = [part.split(": ") for part in FUNCTIONS[name].split(", ")]
    declared = [(label, kind) for label, kind in declared if label not in SUPPLIED.get(name, ())]
    schema = schema_of(name)
    assert not schema.returns
    assert [argument.name for argument in schema.arguments] == [label for label, _ in declared]
    for argument, (label, kind) in zip(schema.arguments, declared, strict=True):
        plain = kind.replace("!", "")
        optional = plain.endswith("?")
        expected = KINDS.get(plain.rstrip("?"), plain.rstrip("?"))
        assert str(argument.type) == (f"Optional[{expected}]" if optional else expected), label
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        assert is_written == ("!" in kind), label
    aliases = re.findall(r"\((\w)!\)", str(schema))
    assert len(set(aliases)) == len(aliases) == sum("!" in kind for _, kind in declared)


def test_every_function_is_registered_or_called_directly():
    registered = {
        name.removeprefix("apex_te::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("apex_te::")
    }
    assert set(FUNCTIONS) - registered == DIRECT


def test_every_function_that_computes_says_what_it_writes():
    silent = {name for name, signature in FUNCTIONS.items() if "!" not in signature}
    assert silent == {"cublaslt_version", "peer_await", "peer_join"}
    for name, supplied in SUPPLIED.items():
        assert all(re.search(rf"\b{label}: ", FUNCTIONS[name]) for label in supplied)


def test_unknown_function():
    with pytest.raises(AttributeError, match=r"^op rope has no function rope_sideways$"):
        bind("rope", "rope_sideways")
