"""CurrentScaling, BlockScaling, MXFP8Scaling and make_recipe: every argument and every error."""

import dataclasses
import pickle
import re
import typing

import pytest
import torch

from apex_te import recipe
from apex_te.recipe import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Format,
    MXFP8Scaling,
    Recipe,
    make_recipe,
)

STATELESS = [CurrentScaling, BlockScaling, MXFP8Scaling]
ALL = [DelayedScaling, *STATELESS]


def test_hif8_format_values():
    value = Format.HIF8.value
    assert (value.max_fwd, value.max_bwd) == (15, 224)
    assert value.fwd_dtype is value.bwd_dtype is torch.uint8


def test_defaults():
    current, block, mx = CurrentScaling(), BlockScaling(), MXFP8Scaling()
    assert (current.fp8_format, current.pow2, current.eps) == (Format.HYBRID, False, 0.0)
    assert (block.fp8_format, block.pow2, block.eps) == (Format.E4M3, True, 0.0)
    assert (mx.fp8_format, mx.rounding) == (Format.E4M3, "up")
    assert current.use_split_accumulator == mx.use_split_accumulator == (False, True, True)
    assert block.use_split_accumulator == (True, True, True)
    for made in (current, block, mx):
        assert made.override_linear_precision == (False, False, False)
        assert made.interval == 1


def test_rules_of_block_scales():
    """``pow2`` is the former form of ``scales``, also for ``dataclasses.replace`` and pickles."""
    of = {True: "pow2", False: "fp32", None: "pow2"}
    for pow2, scales in of.items():
        made = BlockScaling(pow2=pow2)
        assert (made.scales, made.pow2) == (scales, scales == "pow2")
        assert made == BlockScaling(scales=scales)
        assert hash(made) == hash(BlockScaling(scales=scales))
        assert pickle.loads(pickle.dumps(made)) == made
        assert BlockScaling(scales=scales, pow2=pow2) == made
        if pow2 is not None:
            assert dataclasses.replace(BlockScaling(scales="server"), pow2=pow2) == made
    with pytest.raises(ValueError, match="BlockScaling: wgrad_input must be '1x128' or '128x128'"):
        BlockScaling(wgrad_input="1x32")
    server = BlockScaling(scales="server")
    assert (server.scales, server.pow2, server.eps) == ("server", False, 0.0)
    assert dataclasses.replace(server, eps=1.0).scales == "server"
    assert dataclasses.replace(BlockScaling(), scales="server") == server
    for options, error in (
        ({"scales": "pow2", "pow2": False}, ValueError),
        ({"scales": "fp32", "pow2": True}, ValueError),
        ({"scales": "server", "pow2": False}, ValueError),
        ({"scales": "engine"}, ValueError),
        ({"scales": True}, TypeError),
    ):
        with pytest.raises(error, match=r"BlockScaling: (scales|pow2) must be"):
            BlockScaling(**options)


def test_names_used_elsewhere():
    assert recipe.Float8CurrentScaling is CurrentScaling
    assert recipe.Float8BlockScaling is BlockScaling
    assert recipe.MXFP8BlockScaling is MXFP8Scaling
    for name in recipe.__all__:
        assert hasattr(recipe, name)


def test_each_names_its_quantizer_and_whether_it_keeps_state():
    assert [kind().quantizer for kind in ALL] == ["delayed", "current", "block", "mx"]
    assert [kind().keeps_state for kind in ALL] == [True, False, False, False]
    assert CurrentScaling(fp8_format=Format.HIF8).quantizer == "hif8"
    assert all(isinstance(kind(), Recipe) for kind in ALL)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("name", ["e4m3", "E4M3", "hybrid", "Hybrid"])
def test_a_format_may_be_given_by_its_name(kind, name):
    made = kind(fp8_format=name)
    assert made.fp8_format is Format[name.upper()]
    assert made == kind(fp8_format=Format[name.upper()]) == dataclasses.replace(made)


def test_hifloat8_may_be_given_by_its_name():
    assert CurrentScaling(fp8_format="hif8").quantizer == "hif8"
    assert typing.get_type_hints(CurrentScaling)["fp8_format"] == Format | str


@pytest.mark.parametrize("kind", STATELESS)
def test_arguments_are_kept_and_are_keywords(kind):
    made = kind(
        fp8_format=Format.HYBRID,
        override_linear_precision=[False, False, True],
        use_split_accumulator=[True, True, True],
        interval=4,
        fp8_dpa=False,
        fp8_mha=False,
    )
    assert made.fp8_format is Format.HYBRID
    assert made.override_linear_precision == (False, False, True)
    assert made.use_split_accumulator == (True, True, True)
    assert made.interval == 4
    assert made != kind()
    with pytest.raises(TypeError, match="by name, such as fp8_format=, got 1 by position"):
        kind(Format.E4M3)


@pytest.mark.parametrize("kind", [CurrentScaling, BlockScaling])
def test_scale_arguments(kind):
    made = kind(pow2=not kind().pow2, eps=1e-4)
    assert made.pow2 is not kind().pow2
    assert made.eps == 1e-4
    assert kind(eps=1).eps == 1


def test_mx_rounding():
    assert MXFP8Scaling(rounding="floor").rounding == "floor"


@pytest.mark.parametrize("split", [(False, False, False), (True, False, True)])
@pytest.mark.parametrize("kind", [DelayedScaling, CurrentScaling, MXFP8Scaling])
def test_split_accumulator_can_be_chosen(kind, split):
    assert kind(use_split_accumulator=split).use_split_accumulator == split


@pytest.mark.parametrize("kind", STATELESS)
def test_frozen_hashable_and_replaceable(kind):
    made = kind(override_linear_precision=[False, False, True])
    assert hash(made) == hash(dataclasses.replace(made))
    assert dataclasses.replace(made, interval=2).interval == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.interval = 3


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"params_dtype": torch.bfloat16}, TypeError, "params_dtype"),
        ({"fp8_format": 4}, TypeError, "fp8_format must be a recipe.Format or its name, got int"),
        ({"fp8_format": "e5m2"}, ValueError, r"pure E5M2 .* got 'e5m2'"),
        ({"fp8_format": Format.E5M2}, ValueError, r"pure E5M2 .* got Format.E5M2"),
        ({"interval": 0}, ValueError, "interval must be at least 1, got 0"),
        ({"interval": True}, TypeError, "interval must be an int, got bool"),
        ({"override_linear_precision": (False, True, False)}, ValueError,
         r"override_linear_precision must be .* got \(False, True, False\)"),
        ({"override_linear_precision": 0}, TypeError, "override_linear_precision must be a tuple"),
        ({"override_linear_precision": ()}, ValueError,
         "override_linear_precision must have three"),
        ({"use_split_accumulator": (1, 1, 1)}, TypeError, "use_split_accumulator must be a tuple"),
        ({"use_split_accumulator": (True,)}, ValueError, "use_split_accumulator must have three"),
        ({"fp8_dpa": True}, NotImplementedError, "fp8_dpa must be False"),
        ({"fp8_mha": True}, NotImplementedError, "fp8_mha must be False"),
    ],
)  # fmt: skip
def test_all_reject(kind, kwargs, error, message):
    with pytest.raises(error, match=message) as seen:
        kind(**kwargs)
    if "params_dtype" not in kwargs:
        assert str(seen.value).startswith(f"{kind.__name__}: ")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: DelayedScaling(margn=2), "DelayedScaling: .* 'margn'; did you mean 'margin'?"),
        (lambda: make_recipe("mxfp8", roundng="up"), "MXFP8Scaling: .* did you mean 'rounding'?"),
        (lambda: BlockScaling(zzz=1), "BlockScaling: unexpected argument 'zzz'; the arguments are"),
        (lambda: CurrentScaling("e4m3"), "CurrentScaling: .* by name, such as fp8_format="),
        (lambda: DelayedScaling(1, margin=1), "DelayedScaling: margin must be given once"),
    ],
)
def test_arguments_that_a_recipe_does_not_have_are_named(call, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        call()


def test_a_subclass_may_have_a_constructor_of_its_own():
    class Mine(CurrentScaling):
        def __init__(self, exponent, **others):
            super().__init__(eps=10.0**exponent, **others)

    assert Mine(-2, pow2=True) == Mine(exponent=-2, pow2=True)
    assert (Mine(-2, pow2=True).eps, Mine(-2, pow2=True).pow2) == (0.01, True)


@pytest.mark.parametrize("kind", [DelayedScaling, BlockScaling, MXFP8Scaling])
def test_hif8_is_tensorwise_only(kind):
    message = f"{kind.__name__}: fp8_format must be Format.HYBRID or Format.E4M3, got Format.HIF8"
    with pytest.raises(ValueError, match=message):
        kind(fp8_format=Format.HIF8)


@pytest.mark.parametrize("kind", [CurrentScaling, BlockScaling])
@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"pow2": 1}, TypeError, "pow2 must be a bool, got int"),
        ({"eps": "0"}, TypeError, "eps must be a float, got str"),
        ({"eps": True}, TypeError, "eps must be a float, got bool"),
        ({"eps": -1e-9}, ValueError, "eps must be finite and at least 0, got -1e-09"),
        ({"eps": float("inf")}, ValueError, "eps must be finite and at least 0, got inf"),
        ({"eps": float("nan")}, ValueError, "eps must be finite and at least 0, got nan"),
        ({"rounding": "up"}, TypeError, "rounding"),
        ({"margin": 0}, TypeError, "margin"),
    ],
)
def test_scale_arguments_rejected(kind, kwargs, error, message):
    with pytest.raises(error, match=message):
        kind(**kwargs)


def test_block_sums_are_always_split():
    with pytest.raises(ValueError, match=r"must be \(True, True, True\), got \(False, True, True"):
        BlockScaling(use_split_accumulator=(False, True, True))


@pytest.mark.parametrize("rounding", ["down", "UP", None, 1])
def test_mx_rounding_rejected(rounding):
    with pytest.raises(ValueError, match=f'"up" or "floor", got {rounding!r}'):
        MXFP8Scaling(rounding=rounding)
    with pytest.raises(TypeError, match="pow2"):
        MXFP8Scaling(pow2=True)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("delayed",), DelayedScaling()),
        (("tensorwise",), CurrentScaling()),
        (("blockwise",), BlockScaling()),
        (("mxfp8",), MXFP8Scaling()),
        (("delayed", "e4m3"), DelayedScaling(fp8_format=Format.E4M3)),
        (("tensorwise", "hif8"), CurrentScaling(fp8_format=Format.HIF8)),
        (("blockwise", "hybrid"), BlockScaling(fp8_format=Format.HYBRID)),
        (("mxfp8", "hybrid"), MXFP8Scaling(fp8_format=Format.HYBRID)),
        (("delayed", "HYBRID"), DelayedScaling()),
        (("delayed", Format.E4M3), DelayedScaling(fp8_format=Format.E4M3)),
        (("tensorwise", "HiF8"), CurrentScaling(fp8_format=Format.HIF8)),
    ],
)
def test_make_recipe(args, expected):
    assert make_recipe(*args) == expected


def test_make_recipe_passes_options_on():
    assert make_recipe("delayed", margin=2) == DelayedScaling(margin=2)
    assert make_recipe("tensorwise", "e4m3", pow2=True).pow2
    with pytest.raises(TypeError, match="rounding"):
        make_recipe("blockwise", rounding="up")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ("current",),
            "name must be one of delayed, tensorwise, blockwise, mxfp8, rowwise, got 'current'",
        ),
        (("delayed", "hif8"), 'fp8_format must be "hybrid" or "e4m3", got .hif8.'),
        (("blockwise", "hif8"), 'fp8_format must be "hybrid" or "e4m3", got .hif8.'),
        (("mxfp8", "hif8"), 'fp8_format must be "hybrid" or "e4m3", got .hif8.'),
        (("tensorwise", "e5m2"), '"hybrid" or "e4m3" or "hif8" .pure E5M2 .* got .e5m2.'),
        (("mxfp8", Format.HIF8), "Format.HYBRID or Format.E4M3, got Format.HIF8"),
    ],
)
def test_make_recipe_rejects(args, message):
    owner = f"make_recipe('{args[0]}')" if len(args) > 1 else "make_recipe"
    with pytest.raises(ValueError, match=f"^{re.escape(owner)}: .*{message}$"):
        make_recipe(*args)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((None,), "make_recipe: name must be a str, got NoneType"),
        (("delayed", 3), "make_recipe('delayed'): fp8_format must be a recipe.Format or its name"),
    ],
)
def test_make_recipe_rejects_types(args, message):
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        make_recipe(*args)


def test_a_huge_eps_would_make_every_scale_zero():
    for kind in (CurrentScaling, BlockScaling):
        assert kind(eps=torch.finfo(torch.float32).max)
        for eps in (1e39, 10**400):
            with pytest.raises(ValueError, match="eps must be finite and at least 0, got 1"):
                kind(eps=eps)
