"""Each op on a CPU gives the same bits with every instruction set that it has kernels for."""

import inspect
import itertools

import pytest
import torch
from checks import DTYPES, FP8, assert_portable_gives_same_bits
from public_functions import FORMS, PADDED_FORMS, UNFILLED, find, in_dtype, make_case
from test_storage_of_functions import OTHER_DTYPES
from torch.utils._pytree import tree_leaves, tree_map

from apex_te.ops import activation, swiglu
from apex_te.runtime.op_options import BLOCK_SCALES
from apex_te.runtime.router_options import SCORE_FUNCTIONS

NAMES = [*FORMS, *PADDED_FORMS]
OPS = sorted({name.partition(".")[0] for name in NAMES})
# Options that choose other code.
OPTIONS = {
    "activation": swiglu.ACTIVATIONS,
    "block_rows": (1, 128),
    "causal": (None, "bottom_right"),
    "form": ("tanh", "erf"),
    "fp8_dtype": FP8,
    "interleaved": (True, False),
    "kind": activation.KINDS,
    "pow2": (True, False),
    "scales": BLOCK_SCALES,
    "score_function": SCORE_FUNCTIONS,
    "use_pre_softmax": (True, False),
}
# Lists whose tensors may have any dtype.
LISTS = {"grads", "inputs", "outputs", "params", "tensors", "xs", "ys"}
# Of any number's bits the first give FP8 codes, and the others no NaN.
CASTS = (
    "block_quantize.block_q",
    "cast_transpose.",
    "current_scale.",
    "hif8.q",
    "mx_quantize.mx_q",
    "row_quantize.",
)
ELEMENTWISE = ("activation.", "bias_gelu.", "rope.")
SIZES = ((72, 302), (8, 3014))
EXPERTS = ((40, 12), (40, 128), (40, 300))


def choices(name, args):
    """The arguments with each choice of the options that a function has."""
    parameters = inspect.signature(find(name)).parameters
    own = [option for option in OPTIONS if option in parameters]
    if "scales" in own:  # tensors, or a rule, whose former form is pow2
        chosen = "scales" if "scales" in args else "pow2"
        own = [option for option in own if option != chosen]
    if "out" in args or name.startswith(
        ("dense_gemm_gelu.", "dense_gemm_swiglu.", "grouped_", "fp8_gemm.", "emulated_")
    ):
        own = [option for option in own if option not in ("fp8_dtype", "block_rows")]
    for values in itertools.product(*(OPTIONS[option] for option in own)):
        yield {**args, **dict(zip(own, values, strict=True))}


def any_bits(t, is_finite):
    """Numbers of any bits in the form of a tensor."""
    bits = torch.randint(-(2**31), 2**31, t.shape).int()
    made = bits.view(torch.float32) if t.element_size() == 4 else bits.short().view(t.dtype)
    return torch.where(made.isfinite(), made, 0) if is_finite else made


def results(op):
    """Returns the results of an op's functions for all dtypes and options."""
    sizes = EXPERTS if op == "moe_router" else SIZES
    products = itertools.product(NAMES, DTYPES, ("usual", "finite", "any"), sizes)
    for name, dtype, values, size in products:
        limit = {"usual": op, "finite": (*CASTS, *ELEMENTWISE), "any": CASTS}[values]
        own = name.startswith(f"{op}.") and name.startswith(limit)
        if not own or dtype in OTHER_DTYPES.get(name, ()):
            continue
        case = make_case(name, *size)
        made = in_dtype(name, case.args, dtype)
        lists = [k for k in LISTS & made.keys() if isinstance(made[k], list)]
        made |= {k: [t.to(dtype) for t in made[k]] for k in lists}
        for key in ("x", "freqs"):
            if key in made and values != "usual":
                made[key] = any_bits(made[key], values == "finite")
        clamped = {"activation": swiglu.ClampedSwiglu(limit=1.0)}
        takes_it = name.startswith(("swiglu.", "swiglu_block."))
        for args in (*choices(name, made), *([made | clamped] if takes_it else ())):
            given = tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, args)
            found = tree_leaves([find(name)(**given), [given[key] for key in case.written]])
            for i, t in enumerate(t for t in found if isinstance(t, torch.Tensor)):
                if i not in UNFILLED.get(name, ()) and (values != "any" or t.itemsize == 1):
                    yield t.detach().contiguous()


@pytest.mark.parametrize("op", OPS)
def test_every_instruction_set_gives_the_same_bits(op):
    assert_portable_gives_same_bits(
        f"from test_portable_paths import results\ndef run(): yield from results({op!r})"
    )
