"""Contracts in headers of ops: how they are read."""

import pytest

from apex_te.contract import Bindings, parse
from apex_te.runtime import core


def test_text_without_a_contract():
    params = parse("x: Tensor, y: Tensor?, out: Tensor![], z: Tensor!?, s: float[] -> int").params
    assert [(p.name, p.kind, p.is_optional, p.is_written) for p in params.values()] == [
        ("x", "Tensor", False, False), ("y", "Tensor", True, False),
        ("out", "Tensor[]", False, True), ("z", "Tensor", True, True),
        ("s", "float[]", False, False),
    ]  # fmt: skip
    assert not any(p.dims for p in params.values())


def test_marks():
    contract = parse("x: T[r c], out: F*[r c]!, amax: f32[^ 1]!!?, sum: T[+ c]!?x|amax; whole c r")
    out, amax, total = list(contract.params.values())[1:]
    assert (out.is_written, out.is_read, out.is_optional) == (True, False, False)
    assert (amax.is_written, amax.is_read, amax.is_optional) == (True, True, True)
    assert (amax.reduction, amax.is_scalar) == ("^", True)
    assert (total.reduction, total.is_optional, total.follows) == ("+", True, ("x", "amax"))
    assert contract.whole == {"r", "c"}


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        ("r c", (5, 160)), ("2", (2,)), ("2c r", (320, 5)), ("c/128 r%4", (2, 8)),
        ("c r~16", (160, 5)), ("x", (5, 160)), ("block_scales(r c block_rows)", (2, 8)),
        ("block_scales(c r 128)", (2, 4)), ("norm_lines(r c) c", (5, 160)),
    ],
)  # fmt: skip
def test_shapes(dims, expected):
    params = parse(f"x: T[r c], out: f32[{dims}]").params
    bound = Bindings({"block_rows": 1})
    bound.bind(params["x"], (5, 160), "float16")
    assert bound.shape(params["out"]) == expected


def test_shapes_that_may_be_padded_and_those_that_are():
    params = parse("x: T[r c], out: T[c%4 r~16]").params
    bound = Bindings({})
    bound.bind(params["x"], (5, 7), "float32")
    found = [bound.shape(params["out"], padded=padded) for padded in (None, False, True)]
    assert found == [(8, 5), (7, 5), (8, 16)]


def test_letters_of_several_dimensions():
    params = parse("x: T[*r c], out: T[c r]").params
    bound = Bindings({}, {"c": 1})
    bound.bind(params["x"], (2, 3, 4), "float32")
    assert bound.ranks == {"r": 2, "c": 1}
    assert bound.shape(params["out"]) == (4, 2, 3)


def test_dtypes():
    params = parse("x: T[r], w: W=T|f32[r], b: W=T|f32[r], other: T|i32[r], n: i64[r]").params
    bound = Bindings({})
    assert bound.allowed(params["w"]) == ("float32", "float16", "bfloat16")
    bound.bind(params["x"], (3,), "float16")
    assert bound.allowed(params["w"]) == ("float16", "float32")
    bound.bind(params["w"], (3,), "float32")
    assert bound.allowed(params["b"]) == ("float32",)
    assert bound.allowed(params["other"]) == ("float16", "int32")
    assert bound.allowed(params["n"]) == ("int64",)


@pytest.mark.parametrize("kind", ["Tensr", "T[r", "T[]", "T[r c]?!", "T[[r]]"])
def test_invalid_types(kind):
    with pytest.raises(ValueError, match=r"^x: type must be valid, got"):
        parse(f"x: {kind}")


def test_invalid_dimensions():
    with pytest.raises(ValueError, match=r"^dimension must be valid, got 'r-2'$"):
        parse("x: T[r-2 c]")


@pytest.mark.parametrize(
    "text", ["x: T[r c]!?", "x: W=T|f32[norm_lines(r c) 2c]?dbias", "x: f32[^ 1]!!?; whole c"]
)
def test_the_dispatcher_takes_a_contract_as_a_tensor(text):
    core().Function("f", f"a: int, {text}", lambda *_: 0)
