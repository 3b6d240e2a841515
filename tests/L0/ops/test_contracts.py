"""Contracts in headers of ops: how they are read, and that the functions keep them."""

import itertools

import pytest
import torch
from apex_te.op_builder import all_builders

from apex_te.contract import DTYPES, Bindings, parse
from apex_te.runtime import core, function

# Not multiples of blocks, of which they have two.
SIZES = {"r": 261, "c": 160, "h": 262, "n": 77, "w": 330, "g": 3, "m": 77, "s": 259, "d": 161}
OWN_SIZES = {  # where these are too large, or multiples are required
    "scaled_softmax_fwd": {"r": 2, "h": 3, "q": 5, "c": 160},
    "moe_router_fwd": {"r": 6, "c": 160, "k": 9, "g": 3},
    "moe_router_bwd": {"r": 6, "c": 160, "k": 9},
    "scaled_softmax_bwd": {"r": 2, "h": 3, "q": 5, "c": 160},
    "qkv_cast_grad": {"o": 87, "i": 3, "q": 6, "g": 2, "s": 31},
    "swiglu_bwd_block": {"r": 261, "w": 512},
}
OPEN = {"grad_output": torch.ones(1)}  # of which the contract says nothing
OPTIONS = {"int": 0, "float": 0.5, "bool": False}
SPECIAL = {"block_rows": (1, 128), "groups": (1,), "p": (0.0,)}
# Functions that are refused without any of these, those that take no such dimension, and tensors
# that are refused without another one.
NEEDS = {"up_bias": "bias"}
GROUPED = ["offsets", "quantize", "scales", "first_scales", "finish", "clear", "sum"]
QUANTIZE = ["current_scale_fwd", "current_scale_cast", "hif8_quantize", "hif8_current", "hif8_cast"]
ONE_OF = {name: {"rowwise", "columnwise"} for name in QUANTIZE}
NOT_EMPTY = {
    ("cross_entropy_fwd", "c"), ("cross_entropy_bwd", "c"), ("moe_router_fwd", "c"),
    ("moe_router_bwd", "c"), ("moe_router_fwd", "g"), ("qkv_cast_grad", "q"),
    ("qkv_cast_grad", "g"), *((f"grouped_{each}", "g") for each in GROUPED),
}  # fmt: skip
CONTRACTS = {
    name: (op, parse(spec.signature))
    for op, builder in all_builders().items()
    for name, spec in builder.functions().items()
    if "cpu" in spec.devices and any(p.dims for p in parse(spec.signature).params.values())
}
EVERY = pytest.mark.parametrize("name", CONTRACTS)


def sizes_of(name):
    return OWN_SIZES.get(name, SIZES)


def table(groups, rows):
    """The table of groups of rows, of which the first has all."""
    made = torch.zeros(3 * groups + 1, dtype=torch.int32)
    splits = torch.tensor([rows, 0, 0][:groups])
    function("grouped_quantize", "grouped_offsets")(splits, made, rows)
    return made


def make(name, without=(), padded=None, dtypes=None, sizes=None, choice=0):
    """Arguments of a call that the contract of a function allows, by parameter."""
    contract, sizes = CONTRACTS[name][1], sizes or sizes_of(name)
    params = contract.params
    scalars = {p.name: OPTIONS[p.kind] for p in params.values() if p.kind in OPTIONS}
    scalars |= {each: SPECIAL[each][choice] for each in SPECIAL if each in scalars}
    given = {p.name for p in params.values() if p.dims} - {*without}
    model = "float16" if any("H" in p.dtypes for p in params.values()) else "float32"
    variables = {"F": "float8_e4m3fn", "T": model} | (dtypes or {})
    bound = Bindings(scalars | contract.presence(given), None, variables)
    bound.extents |= {letter: (size,) for letter, size in sizes.items()}
    made = dict(scalars)
    for p in sorted(params.values(), key=lambda p: p.like is not None):
        if not p.is_tensor:
            continue
        made[p.name] = None if p.is_optional else OPEN.get(p.name)
        if p.name == "table" and name != "grouped_offsets":
            made[p.name] = table(
                sizes["g"], sizes["r"] if "r" in bound_letters(name) else sizes["g"]
            )
        elif (
            p.dims and p.name not in without and not (p.follows and set(p.follows) <= set(without))
        ):
            dtype = getattr(torch, bound.allowed(p)[0])
            fill = 0 if p.name == "noop" else 1
            made[p.name] = torch.full(bound.shape(p, padded=padded), fill).to(dtype)
            bound.bind(p, made[p.name].shape, bound.allowed(p)[0])
    return {each: made[each] for each in params}


def bound_letters(name):
    return {d.name for p in CONTRACTS[name][1].params.values() for d in p.dims if d.is_letter}


def needing(name):
    return NEEDS.keys() & CONTRACTS[name][1].params.keys()


def call(name, arguments):
    function(CONTRACTS[name][0], name)(*arguments.values())


def optional(name):
    params = CONTRACTS[name][1].params
    return [p.name for p in params.values() if p.is_optional and not p.follows]


@EVERY
def test_takes_what_its_contract_declares(name):
    for choice in range(2 if "block_rows" in CONTRACTS[name][1].params else 1):
        counts = {*range(min(len(optional(name)), 3) + 1), len(optional(name))}
        for without in itertools.chain(
            *(itertools.combinations(optional(name), n) for n in counts)
        ):
            alone = any(each not in without and NEEDS[each] in without for each in needing(name))
            if not alone and not ONE_OF.get(name, {""}) <= {*without}:
                call(name, make(name, without, choice=choice))


@EVERY
def test_takes_results_that_are_padded(name):
    call(name, make(name, padded=True))


@EVERY
def test_takes_every_dtype_of_its_contract(name):
    params = reversed(CONTRACTS[name][1].params.values())
    for variable, classes in {p.variable: p.dtypes for p in params if p.variable}.items():
        for each in classes:
            for dtype in DTYPES[each]:
                model = dtype if each == "T" else "bfloat16"
                call(name, make(name, dtypes={"T": model, variable: dtype}))


@EVERY
def test_takes_no_rows_and_no_columns(name):
    sizes = sizes_of(name)
    for letter in sizes:
        if (name, letter) not in NOT_EMPTY:
            call(name, make(name, sizes=sizes | {letter: 0}))


@EVERY
def test_refuses_another_dtype_shape_or_none(name):
    params = list(CONTRACTS[name][1].params.values())
    for p in (p for p in params if p.dims):
        good = make(name)
        x = good[p.name]
        with pytest.raises(TypeError, match=rf"^{name}: {p.name} must have dtype"):
            call(name, good | {p.name: x.double()})
        if p.follows:
            with pytest.raises(ValueError, match=rf"^{name}: .* must be given with"):
                call(name, good | {p.name: None})
        if not p.is_optional:
            with pytest.raises(TypeError, match=rf"^{name}: {p.name} must be a"):
                call(name, good | {p.name: None})
        wrong = torch.zeros([n + 3 for n in x.shape]).to(x.dtype)
        message = f"{p.name} must have " + ("one element" if p.is_scalar else "(x's )?shape")
        # These may have any extents, and the others fit to them.
        if p.name in ("x", "keys", "other_x", "input", "table", params[0].name):
            wrong, message = x[None], r"\w+ must have ([1-4] dimensions|(x's )?shape)"
        with pytest.raises(ValueError, match=rf"^{name}: {message}"):
            call(name, good | {p.name: wrong})


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


@pytest.mark.parametrize(
    ("with_up", "apart", "expected"),
    [(True, True, (160, 2, 160, 2)), (True, False, (160, 2, 320, 3)),
     (False, True, (80, 1, 80, 1)), (False, False, (80, 1, 160, 2))],
)  # fmt: skip
def test_shapes_that_depend_on_what_is_given(with_up, apart, expected):
    dims = "gated(w up) gated(w up)/128 pair(w up apart) pair(w up apart)/128"
    contract = parse(f"x: T[w], up: T[w]?, apart: T[w]?, out: f32[{dims}]")
    given = [name for name, is_given in (("up", with_up), ("apart", apart)) if is_given]
    bound = Bindings(contract.presence(given))
    bound.bind(contract.params["x"], (160,), "float16")
    assert bound.shape(contract.params["out"]) == expected


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
