"""Contracts in headers of ops: how they are read, and that the functions keep them."""

import ctypes
import functools
import itertools
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from apex_te.op_builder import all_builders
from apex_te.op_builder.jit.backends.library import BASE_CXX_ARGS
from apex_te.op_builder.jit.backends.toolchain import find_cxx

from apex_te.contract import DTYPES, LAYOUTS, Bindings, parse
from apex_te.contract import SIZES as SIZE_FORMULAS
from apex_te.runtime import core, function
from apex_te.runtime.dispatcher import signature
from apex_te.runtime.scratch_sizes import list_words, map_tiles

ROOT = Path(__file__).parents[3]
# Not multiples of blocks, of which they have two.
SIZES = {
    "r": 261, "c": 160, "h": 262, "n": 77, "w": 330, "g": 3, "m": 77, "s": 259, "d": 161, "t": 261
}  # fmt: skip
GEMM = {"m": 272, "n": 288, "k": 304, "w": 1 << 22}  # multiples of 16
GROUPED = {"r": 250, "c": 290, "m": 270, "n": 288, "k": 304, "g": 3}
LIST = {"x": 70, "n": 3}
ROPE = {"r": 37, "h": 3, "d": 26, "p": 40, "k": 22, "q": 2}
MOE = {"t": 261, "r": 300, "c": 37, "w": 6, "s": 5}
OWN_SIZES = {  # where these are too large, or multiples are required
    "attention": {"b": 2, "h": 3, "s": 161, "d": 24, "n": 161, "m": 77},
    "index_mul_2d": {"m": 77, "e": 161, "d": 24},
    "batch_norm": {"n": 37, "c": 24, "s": 5, "w": 3},
    "scaled_softmax": {"r": 2, "h": 3, "q": 5, "c": 160},
    "moe_router": {"r": 6, "c": 160, "k": 9, "g": 3},
    "qkv_cast_grad": {"o": 87, "i": 3, "q": 6, "g": 2, "s": 31},
    "swiglu_bwd_block": {"r": 261, "w": 512},
    "swiglu_fwd_held": {"r": 261, "w": 336},
    "swiglu_bwd_held": {"r": 261, "f": 128},
    "multi_tensor_l2norm": LIST | {"z": list_words(3, 1)},
    "multi_tensor_lamb": LIST | {"z": list_words(3, 2)},
    "multi_tensor": LIST,
    "amax_scale_update": {"l": 5, "s": 7, "n": 3},
    "moe": MOE,
    "rope": ROPE,
    "fp8_gemm": GEMM,
    "wgrad_gemm": GEMM,
    "fp8_block_accumulate": {"m": 261, "n": 262},
    "dense_gemm_swiglu_held": GEMM | {"m": 270, "n": 512},
    "dense_gemm": GEMM | {"m": 270},
    "grouped_gemm": GROUPED,
    "grouped_block_cast": SIZES,
    "grouped_block": GROUPED,
    "peer_sum": {"b": 4096, "s": 259},
}
OPEN = {"grad_output": torch.ones(1)}  # of which the contract says nothing
OPTIONS = {"int": 0, "float": 0.5, "bool": False}
SPECIAL = {
    "groups": 1, "p": 0.0, "num_experts": MOE["w"], "align_size": 1, "rotary_dim": ROPE["k"],
    "step": 1, "block_rows": 1, "columnwise_block_rows": 1, "b_block_rows": 1, "ranks": 1,
}  # fmt: skip
# What a function requires of arguments together: options, and tensors that are left out.
BLOCKS = [({"block_rows": rows}, ()) for rows in (1, 128)]
COLUMN_BLOCKS = [({"columnwise_block_rows": rows}, ()) for rows in (1, 128)]
COPIES = [({"block_rows": rows, "columnwise_block_rows": of_columns}, ())
          for rows, of_columns in ((1, 1), (1, 128), (128, 128))]  # fmt: skip
SQUARES = [({"a_block_rows": a, "b_block_rows": b, "k": 300}, ()) for a, b in
           ((1, 1), (1, 128), (128, 1))]  # fmt: skip
ONE_ADDED = [({}, ("aux",)), ({}, ("c",))]
ANGLES = [({"layout": 2}, ("cos",)), ({"layout": 2}, ("freqs",))]
ROUTES = [({"is_index": is_index}, ()) for is_index in (False, True)]
SWIGLU = [({"activation": 5}, ())]
SWIGLU_BWD = [({"activation": 5, "promotion": 512}, out) for out in
              (("grad",), ("scale", "rowwise", "columnwise", "scale_inv"))]  # fmt: skip
GATHERED, GATED = (torch.ones(SIZES["r"], n * SIZES["c"]).half() for n in (1, 2))
SOURCES = [({"x": GATHERED}, ()), ({"x": GATED}, ("row_of",))]
GROUPED_CASTS = ["grouped_cast", "grouped_block_cast"]
FORMS = {
    "block_quantize": COPIES, "swiglu_fwd_block": COLUMN_BLOCKS, "block_dequantize": BLOCKS,
    "swiglu_fwd_held_block": COLUMN_BLOCKS,
    "fp8_block_accumulate": SQUARES,
    "fp8_gemm_block": [(options | {"k": GEMM["k"]}, ()) for options, _ in SQUARES],
    "fp8_gemm": ONE_ADDED, "fp8_gemm_epilogue": ONE_ADDED, "rope_fwd": ANGLES, "rope_bwd": ANGLES,
    "multi_tensor_sgd": [({"momentum": 0.0}, ())], "moe_permute_map": ROUTES,
    "moe_permute_fwd": ROUTES, "dense_gemm_swiglu": SWIGLU,
    "dense_gemm_swiglu_bwd": SWIGLU_BWD, "dense_gemm_swiglu_held_bwd": SWIGLU_BWD,
    "dense_gemm_swiglu_held": SWIGLU, "dense_gemm_gelu_bwd": [({"promotion": 512}, ())],
    "grouped_cast": SOURCES, "grouped_block_cast": SOURCES,
}  # fmt: skip
# Tensors that are refused without another one, and functions that are refused without any of these.
NEEDS = {"up_bias": ["bias"], "act_columnwise": ["act_scale"]}
QUANTIZE = ["current_scale_fwd", "current_scale_cast", "hif8_quantize", "hif8_current", "hif8_cast"]
BLOCK_CASTS = ["grouped_block_quantize", "grouped_block_quantize_matrices", "grouped_block_cast"]
ONE_OF = {name: {"rowwise", "columnwise"} for name in [*QUANTIZE, *BLOCK_CASTS, "row_quantize"]}
ONE_OF["batch_norm_bwd"] = {"dx", "dz"}
# Optional tensors that one form of a call cannot do without.
NEEDED = {name: {"freqs", "cos", "cu_seqlens"} for name in ("rope_fwd", "rope_bwd")}
NEEDED |= {name: {"row_of"} for name in GROUPED_CASTS}
NEEDED |= {f"dense_gemm_swiglu{each}_bwd": {"grad", "rowwise", "scale"} for each in ("", "_held")}
NEEDED["dense_gemm_swiglu"] = {"scale"}
# Letters whose extent must not be 0.
NOT_EMPTY = {
    ("cross_entropy_fwd", "c"), ("cross_entropy_bwd", "c"), ("moe_router_fwd", "c"),
    ("moe_router_bwd", "c"), ("moe_router_fwd", "g"), ("qkv_cast_grad", "q"),
    ("qkv_cast_grad", "g"), ("amax_scale_update", "l"), ("amax_scale_update", "s"),
    ("peer_sum", "b"), ("attention_join", "s"), ("index_mul_2d_fwd", "m"),
    ("index_mul_2d_bwd", "m"),
    *((name, letter) for name in ("rope_fwd", "rope_bwd") for letter in "dk"),
    *((f"moe_{each}", "w") for each in ("permute_map", "permute_fwd", "permute_rows")),
    *((f"moe_{each}", "w") for each in ("unpermute_fwd", "unpermute_bwd", "tokens_of_rows")),
    *((name, letter) for name in GROUPED_CASTS for letter in "rc"),
    ("multi_tensor_l2norm", "z"), ("multi_tensor_lamb", "z"), ("moe_sort_chunks_map", "r"),
}  # fmt: skip
# Of kernels alone: tensors that they do not take, and what cuBLASLt requires.
CPU_ONLY = dict.fromkeys(("bias_dropout_add_fwd", "bias_dropout_add_bwd"), ("mask",))
PRODUCTS = ("fp8_gemm", "fp8_gemm_block", "fp8_gemm_rows", "wgrad_gemm")
NOT_EMPTY_ON_GPU = {(name, letter) for name in (*PRODUCTS, "fp8_gemm_epilogue") for letter in "mnk"}
# Their letters follow from what comes later, or are those of a scalar.
FREE = {
    "x", "keys", "other_x", "input", "inp", "table", "row_id_map", "routing_map", "freqs", "cos",
    "cu_seqlens", "histories", "ends", "row_of", "moe_tokens_of_rows.out",
    "batch_norm_bwd.counts",
}  # fmt: skip
CONTRACTS = {
    name: (op, parse(spec.signature))
    for op, builder in all_builders().items()
    for name, spec in builder.functions().items()
    if any(p.dims for p in parse(spec.signature).params.values())
}
NOT_EMPTY |= {(name, "g") for name in CONTRACTS if name.startswith("grouped_")}
# The checks of functions that the CPU lacks, which a compiler for the CPU takes.
CHECKS = {
    "dense_gemm/dense_gemm.h": {
        "dense_gemm": "check_dense_gemm(args)",
        "dense_gemm_swiglu": "check_gated(args)",
        "dense_gemm_swiglu_bwd": "check_gated_bwd(args)",
        "dense_gemm_swiglu_held": "check_gated(args, true)",
        "dense_gemm_swiglu_held_bwd": "check_gated_bwd(args, true)",
        "dense_gemm_gelu": "check_gated(args, false, false)",
        "dense_gemm_gelu_bwd": "check_gated_bwd(args, false, false)",
    },
    "fp8_gemm/fp8_gemm.h": {each: f"check_{each}(args)" for each in PRODUCTS},
    "grouped_cast/grouped_cast.h": {
        "grouped_cast": "check_grouped_cast(args, false)",
        "grouped_block_cast": "check_grouped_cast(args, true)",
    },
    "grouped_gemm/grouped_gemm.h": {
        "grouped_gemm_multiply": "check_grouped_gemm(args, false, false)",
        "grouped_gemm_contract": "check_grouped_gemm(args, true, false)",
        "grouped_block_multiply": "check_grouped_gemm(args, false, true)",
        "grouped_block_contract": "check_grouped_gemm(args, true, true)",
    },
    "grouped_quantize/grouped_quantize_blocks.h": {
        "grouped_block_quantize": "check_grouped_blocks(args, false)",
        "grouped_block_quantize_matrices": "check_grouped_blocks(args, true)",
    },
    "peer_exchange/peer_exchange.h": {"peer_sum": "check_peer_sum(args)"},
}
HEADERS = {name: header for header, names in CHECKS.items() for name in names}
DEVICES = {
    name: {*spec.devices, "cpu"}
    for builder in all_builders().values()
    for name, spec in builder.functions().items()
}
EVERY = pytest.mark.parametrize(
    ("name", "device"),
    [
        pytest.param(name, device, marks=[pytest.mark.cuda] * (device == "cuda"))
        for name in CONTRACTS
        for device in sorted(DEVICES[name])
    ],
)


def sizes_of(name):
    return next((OWN_SIZES[each] for each in OWN_SIZES if name.startswith(each)), SIZES)


def forms_of(name):
    return FORMS.get(name, [({}, ())])


def table(groups, rows, device):
    """The table of groups of rows, of which the first has all."""
    made = torch.zeros(3 * groups + 1, dtype=torch.int32, device=device)
    splits = torch.tensor([rows, 0, 0][:groups], device=device)
    function("grouped_quantize", "grouped_offsets")(splits, made, rows)
    return made


def row_map(shape, sizes, device):
    """The map of tokens that all go to all experts."""
    mask = torch.ones(sizes["t"], sizes["w"], dtype=torch.int32, device=device)
    made, workspace = mask.new_zeros(shape), mask.new_zeros(map_tiles(len(mask)), sizes["w"])
    map_of = function("moe_permute", "moe_permute_map")
    map_of(mask, workspace, made, None, sizes["w"], 1, sizes["r"], False)
    return made


def make(name, device, form=({}, ()), without=(), padded=None, dtypes=None, sizes=None):
    """Arguments of a call that the contract of a function allows, by parameter."""
    contract, sizes = CONTRACTS[name][1], sizes or sizes_of(name)
    params = contract.params
    scalars = {p.name: OPTIONS[p.kind] for p in params.values() if p.kind in OPTIONS}
    scalars |= {each: SPECIAL[each] for each in SPECIAL if each in scalars} | form[0]
    without = {*without, *form[1], *(CPU_ONLY.get(name, ()) if device == "cuda" else ())}
    given = {p.name for p in params.values() if p.dims} - without
    model = str(model_of(params.values())).removeprefix("torch.")
    variables = {"F": "float8_e4m3fn", "T": model} | (dtypes or {})

    def bindings(more=0):
        bound = Bindings(scalars | contract.presence(given), None, variables)
        bound.extents |= {letter: (size + more,) for letter, size in sizes.items()}
        return bound

    is_mixed = any(p.length and p.is_mixed for p in params.values())
    whole, places = bindings(), [bindings(i) for i in range(sizes.get("n", 0) * is_mixed)]

    def tensor(p, bound):
        shape = bound.shape(p, padded=padded)
        dtype = variables.get(p.name) or bound.allowed(p)[0]
        bound.bind(p, shape, dtype)
        filled = torch.full(shape, 0 if p.name in ("noop", "buffer") else 1, device=device)
        return filled.to(getattr(torch, dtype))

    made = dict(scalars)
    for p in sorted(params.values(), key=lambda p: p.like is not None):
        if p.kind == "float[]":
            made[p.name] = [0.5] * sizes["n"]
        if not p.is_tensor:
            continue
        made[p.name] = None
        if not p.is_optional and not p.dims:
            made[p.name] = (OPEN | form[0])[p.name].to(device)
        if p.name in without or (p.follows and {*p.follows} <= without):
            made[p.name] = [] if p.length else None
        elif p.name == "table" and name != "grouped_offsets":
            rows = sizes["r"] if "r" in letters_of(name) else sizes["g"]
            made[p.name] = table(sizes["g"], rows, device)
        elif p.name == "row_id_map" and not p.is_written:
            made[p.name] = row_map(whole.shape(p, padded=padded), sizes, device)
        elif p.name == "sorted_index":
            indices = torch.arange(sizes["s"], device=device).flip(0)
            made[p.name] = indices.to(getattr(torch, whole.allowed(p)[0]))
        elif p.name == "ends":
            first = sizes["k" if "contract" in name else "r"]
            made[p.name] = torch.full((sizes["g"],), first, dtype=torch.int32, device=device)
        elif p.length and not p.is_mixed:
            made[p.name] = [tensor(p, whole) for _ in range(sizes[p.length])]
        elif p.length:
            made[p.name] = [tensor(p, bound) for bound in places]
        elif p.dims:
            made[p.name] = tensor(p, whole)
    return {each: made[each] for each in params}


def letters_of(name):
    return {d.name for p in CONTRACTS[name][1].params.values() for d in p.dims if d.is_letter}


@functools.cache
def checks_of(header):
    """The checks of a header as functions of tensors of the CPU."""
    text = f'#include "{header}"\nAPEX_TE_LIBRARY()\n' + "\n".join(
        f"APEX_TE_DEFINE({name}) {{ apex_te::{check}; }}" for name, check in CHECKS[header].items()
    )
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "checks.cpp"), Path(folder, "checks.so")
        source.write_text(text)
        flags = [*BASE_CXX_ARGS, "-O0", "-I", str(ROOT / "csrc"), "-shared", "-o", str(library)]
        subprocess.run([*find_cxx(), str(source), *flags], check=True)
        opened = ctypes.CDLL(str(library))
    found = {}
    for name in CHECKS[header]:
        address = ctypes.cast(opened[f"apex_te_{name}"], ctypes.c_void_p).value
        text = signature(CONTRACTS[name][0], name)
        found[name] = core().Function(name, text, lambda *_, address=address: address)
    return found


def call(name, arguments, device):
    is_check = device == "cpu" and name in HEADERS
    called = checks_of(HEADERS[name])[name] if is_check else function(CONTRACTS[name][0], name)
    called(*arguments.values())


def optional(name, form):
    params = CONTRACTS[name][1].params.values()
    return [
        p.name
        for p in params
        if (p.is_optional or p.may_be_empty)
        and not p.follows
        and p.name not in {*form[1], *NEEDED.get(name, ())}
    ]


@EVERY
def test_takes_what_its_contract_declares(name, device):
    for form in forms_of(name):
        names = optional(name, form)
        counts = {*range(min(len(names), 3) + 1), len(names)}
        for without in itertools.chain(*(itertools.combinations(names, n) for n in counts)):
            absent = {*without, *form[1]}
            needed = NEEDS.keys() & CONTRACTS[name][1].params.keys() - absent
            alone = any({*NEEDS[each]} & absent for each in needed)
            if not alone and not ONE_OF.get(name, {""}) <= absent:
                call(name, make(name, device, form, without), device)


@EVERY
def test_takes_results_that_are_padded(name, device):
    for form in forms_of(name):
        call(name, make(name, device, form, padded=True), device)


@EVERY
def test_takes_every_dtype_of_its_contract(name, device):
    form = forms_of(name)[0]
    params = reversed(CONTRACTS[name][1].params.values())
    kinds = {p.variable or p.name: p.dtypes for p in params if p.variable or len(p.dtypes) > 1}
    for variable, classes in kinds.items():
        for each in classes:
            is_half = each == "T" and ("H",) in kinds.values()
            for dtype in DTYPES["H" if is_half else each]:
                model = dtype if each == "T" else "bfloat16"
                if device == "cpu" or "fnuz" not in dtype:
                    dtypes = {"T": model, variable: dtype}
                    call(name, make(name, device, form, dtypes=dtypes), device)


@EVERY
def test_takes_no_rows_and_no_columns(name, device):
    sizes, form = sizes_of(name), forms_of(name)[0]
    for letter in sizes:
        if device == "cuda" and (name, letter) in NOT_EMPTY_ON_GPU:
            continue
        if (name, letter) not in NOT_EMPTY and letter not in form[0]:
            call(name, make(name, device, form, sizes=sizes | {letter: 0}), device)


@EVERY
def test_refuses_another_dtype_shape_or_none(name, device):
    for form in forms_of(name):
        good = make(name, device, form)
        for p in CONTRACTS[name][1].params.values():
            if p.dims and good[p.name] is not None:
                refuses(name, good, p, device)


def model_of(params):
    """The dtype of class T in the calls of these tests."""
    return torch.float16 if any("H" in p.dtypes for p in params) else torch.float32


def refuses(name, good, p, device):
    """Calls with another dtype, None, another shape and a shorter list in the place of ``p``."""
    given, item = good[p.name], r"\[1\]" if p.length else ""

    def check(error, message, wrong):
        with pytest.raises(error, match=rf"^{name}: {message}"):
            call(name, good | {p.name: wrong}, device)

    x = given[1] if p.length else given
    put = (lambda wrong: [given[0], wrong, *given[2:]]) if p.length else (lambda wrong: wrong)
    check(TypeError, f"{p.name}{item} must have dtype", put(x.double()))
    params = [q for q in CONTRACTS[name][1].params.values() if good[q.name] is not None]
    alike = [q for q in params if q.variable == p.variable and len(q.dtypes) == 1]
    others = set()
    if p in alike and p.variable and len(alike) > 1 and not p.length:
        others = {*DTYPES.get(p.dtypes[0], ())}
    elif "T" in p.dtypes and p is not next(q for q in params if "T" in (*q.dtypes, q.variable)):
        others = {*DTYPES["T"]} - {"float32"} if "f32" in p.dtypes else set()
    for dtype in (getattr(torch, each) for each in sorted(others) if "fnuz" not in each):
        if dtype not in (x.dtype, model_of(params)):
            check(TypeError, r"\w+ must (have dtype|be)", x.to(dtype))
    if p.follows:
        check(ValueError, ".* must be given", None)
    if not p.is_optional:
        check(TypeError, f"{p.name} must be a", None)
    if p.length and p.name != next(iter(good)):
        check(ValueError, f".*must have {len(given)} entries like", given[:-1])
    is_any = len(p.dims) == 1 and p.dims[0].is_open and p.like is None
    first = next(iter(good))
    if p.name == "workspace":
        wrong = x[None] if x.dtype == torch.uint8 else x[:-1]
        check(ValueError, "workspace must have (shape|at least|1 dimensions)", wrong)
    elif FREE & {p.name, f"{name}.{p.name}"} or (p.name == first and not p.length):
        message = rf"\w+({item})? must have ([1-4] dimensions|(x's )?shape)"
        check(ValueError, message, put(x[None]))
    elif not is_any:
        message = f"{p.name}{item} must have " + ("one element" if p.is_scalar else "(x's )?shape")
        check(ValueError, message, put(torch.zeros([n + 3 for n in x.shape]).to(x)))


def test_functions_without_a_contract():
    """Those of handles that only ranks have, of multiples of 16, and of packed rows."""
    named = {name for builder in all_builders().values() for name in builder.functions()}
    assert named - CONTRACTS.keys() == {
        "cublaslt_version", "multi_tensor_adam_block", "multi_tensor_adam_fp8", "peer_await",
        "peer_join", "peer_send", "transducer_joint_bwd", "transducer_joint_fwd",
        "transducer_loss_bwd", "transducer_loss_fwd",
    }  # fmt: skip


def test_longer_names_in_dimensions_are_parameters_or_formulas():
    for name, (_, contract) in CONTRACTS.items():
        known = {*contract.params, *LAYOUTS, *SIZE_FORMULAS, "128"}
        for p in contract.params.values():
            words = {word for d in p.dims for word in (d.name, *d.arguments)}
            assert {word for word in words if len(word) > 1} <= known, (name, p.name)


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


def test_lists():
    text = "a: T[r c][g], b: f32[s][each n]!!, c: f32[b][each n|0]!, d: T[c r]"
    params = list(parse(text).params.values())
    assert [(p.kind, p.length, p.is_mixed, p.may_be_empty) for p in params] == [
        ("Tensor[]", "g", False, False), ("Tensor[]", "n", True, False),
        ("Tensor[]", "n", True, True), ("Tensor", "", False, False),
    ]  # fmt: skip
    assert [(p.is_written, p.is_read) for p in params[1:3]] == [(True, True), (True, False)]
    assert params[2].like == "b"


def test_extents_of_scalars():
    bound = Bindings({"num_experts": 6, "is_index": True})
    out = parse("out: i32[num_experts num_experts/4], num_experts: int").params["out"]
    assert bound.shape(out) == (6, 2)


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


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float16", ("float16", "float32")), ("uint8", ("float32", "float16", "bfloat16"))],
)
def test_only_a_dtype_of_a_class_decides_that_of_others(dtype, expected):
    params = parse("inp: X=T|u8[r], probs: P=T|f32[r], out: X[r]").params
    bound = Bindings({})
    bound.bind(params["inp"], (3,), dtype)
    assert bound.allowed(params["probs"]) == expected
    assert bound.allowed(params["out"]) == (dtype,)


@pytest.mark.parametrize("kind", ["Tensr", "T[r", "T[]", "T[r c]?!", "T[[r]]"])
def test_invalid_types(kind):
    with pytest.raises(ValueError, match=r"^x: type must be valid, got"):
        parse(f"x: {kind}")


def test_invalid_dimensions():
    with pytest.raises(ValueError, match=r"^dimension must be valid, got 'r-2'$"):
        parse("x: T[r-2 c]")


@pytest.mark.parametrize(
    "text",
    ["x: T[r c]!?", "x: W=T|f32[norm_lines(r c) 2c]?dbias", "x: f32[^ 1]!!?; whole c",
     "x: T[r c][g]", "x: f32|H[*x][each n|0]!!"],
)  # fmt: skip
def test_the_dispatcher_takes_a_contract_as_a_tensor(text):
    core().Function("f", f"a: int, {text}", lambda *_: 0)
