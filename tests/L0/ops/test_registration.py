"""Schemas that torch knows are those of the C functions, whose headers alone declare them."""

from __future__ import annotations

import importlib
import pkgutil
import re

import pytest
import torch
from apex_te.op_builder import all_builders

import apex_te.ops
from apex_te.contract import parse
from apex_te.ops.binding import bind

# Functions that Python calls without torch.library.
DIRECT = {
    "cast_transpose_pair", "cublaslt_version", "fp8_block_accumulate", "fp8_decode",
    "fp8_gemm_epilogue", "fp8_gemm_rows", "peer_await", "peer_join", "peer_send", "peer_sum",
}  # fmt: skip
# Parameters of C functions that the registered Python function of that name supplies.
SUPPLIED = {
    "fp8_gemm": ["workspace", "algorithm"],
    "fp8_gemm_block": ["workspace", "algorithm"],
    "wgrad_gemm": ["workspace"],
    "dense_gemm": ["columns", "strip", "cache"],
    "dense_gemm_swiglu": ["strip", "cache"],
    "dense_gemm_swiglu_bwd": ["strip", "cache"],
    "dense_gemm_swiglu_held": ["strip", "cache"],
    "dense_gemm_swiglu_held_bwd": ["strip", "cache"],
    "dense_gemm_gelu": ["strip", "cache"],
    "dense_gemm_gelu_bwd": ["strip", "cache"],
}
FUNCTIONS = {
    name: parse(spec.signature).params
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
    declared = [p for p in FUNCTIONS[name].values() if p.name not in SUPPLIED.get(name, ())]
    schema = schema_of(name)
    assert not schema.returns
    assert [argument.name for argument in schema.arguments] == [p.name for p in declared]
    for argument, p in zip(schema.arguments, declared, strict=True):
        expected = KINDS.get(p.kind, p.kind)
        assert str(argument.type) == (f"Optional[{expected}]" if p.is_optional else expected), p
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        assert is_written == p.is_written, p
    aliases = re.findall(r"\((\w)!\)", str(schema))
    assert len(set(aliases)) == len(aliases) == sum(p.is_written for p in declared)


def test_every_function_is_registered_or_called_directly():
    registered = {
        name.removeprefix("apex_te::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("apex_te::")
    }
    assert set(FUNCTIONS) - registered == DIRECT


def test_every_function_that_computes_says_what_it_writes():
    silent = {
        name for name, params in FUNCTIONS.items() if not any(p.is_written for p in params.values())
    }
    assert silent == {"cublaslt_version", "peer_await", "peer_join"}
    for name, supplied in SUPPLIED.items():
        assert set(supplied) <= set(FUNCTIONS[name])


def test_unknown_function():
    with pytest.raises(AttributeError, match=r"^op rope has no function rope_sideways$"):
        bind("rope", "rope_sideways")
