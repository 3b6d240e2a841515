"""The FP8 command-line switches and the recipe that they ask for."""

import argparse

import pytest

from apex_te.fp8.arguments import add_fp8_arguments, recipe_from_arguments
from apex_te.recipe import BlockScaling, CurrentScaling, DelayedScaling, Format, MXFP8Scaling


def parse(*words):
    parser = argparse.ArgumentParser()
    add_fp8_arguments(parser)
    return parser.parse_args(words)


def recipe(*words):
    return recipe_from_arguments(parse(*words))


def test_defaults_ask_for_no_fp8():
    args = parse()
    assert vars(args) == {
        "transformer_impl": "transformer_engine",
        "fp8_format": None,
        "fp8_recipe": None,
        "use_gmm_fp8": True,
    }
    assert recipe_from_arguments(args) is None
    assert recipe("--transformer-impl", "local") is None


def test_the_group_is_returned_and_named():
    parser = argparse.ArgumentParser()
    group = add_fp8_arguments(parser)
    group.add_argument("--mine")
    text = parser.format_help()
    assert "FP8:" in text
    assert text.index("--transformer-impl") < text.index("--mine")
    assert parser.parse_args(["--mine", "1"]).mine == "1"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--fp8-format", "e4m3"], DelayedScaling(fp8_format=Format.E4M3)),
        (["--fp8-format", "hybrid"], DelayedScaling(fp8_format=Format.HYBRID)),
        (["--fp8-recipe", "delayed"], DelayedScaling()),
        (["--fp8-recipe", "tensorwise"], CurrentScaling()),
        (["--fp8-recipe", "blockwise"], BlockScaling()),
        (["--fp8-recipe", "mxfp8"], MXFP8Scaling()),
        (["--fp8-recipe", "tensorwise", "--fp8-format", "hif8"],
         CurrentScaling(fp8_format=Format.HIF8)),
        (["--fp8-recipe", "tensorwise", "--fp8-format", "e4m3"],
         CurrentScaling(fp8_format=Format.E4M3)),
        (["--fp8-recipe", "blockwise", "--fp8-format", "hybrid"],
         BlockScaling(fp8_format=Format.HYBRID)),
        (["--fp8-recipe", "mxfp8", "--fp8-format", "hybrid"],
         MXFP8Scaling(fp8_format=Format.HYBRID)),
    ],
)  # fmt: skip
def test_switches_give_the_recipe(words, expected):
    assert recipe(*words) == expected
    assert recipe(*words, "--transformer-impl", "transformer_engine") == expected
    assert recipe(*words, "--no-use-gmm-fp8") == expected


def test_no_use_gmm_fp8():
    assert not parse("--no-use-gmm-fp8").use_gmm_fp8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--transformer-impl", "local", "--fp8-format", "hybrid"],
         "--transformer-impl must be transformer_engine with --fp8-format hybrid, got local"),
        (["--transformer-impl", "local", "--fp8-recipe", "mxfp8"],
         "--transformer-impl must be transformer_engine with --fp8-recipe mxfp8, got local"),
        (["--fp8-format", "hif8"],
         "--fp8-recipe must be tensorwise with --fp8-format hif8, got delayed"),
        (["--fp8-format", "hif8", "--fp8-recipe", "blockwise"],
         "--fp8-recipe must be tensorwise with --fp8-format hif8, got blockwise"),
        (["--fp8-format", "hif8", "--fp8-recipe", "mxfp8"],
         "--fp8-recipe must be tensorwise with --fp8-format hif8, got mxfp8"),
    ],
)  # fmt: skip
def test_combinations_refused(words, message):
    with pytest.raises(ValueError, match=f"^recipe_from_arguments: {message}$"):
        recipe(*words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--transformer-impl", "megatron"], "invalid choice: 'megatron'"),
        (["--fp8-format", "e5m2"], "invalid choice: 'e5m2'"),
        (["--fp8-recipe", "nvfp4"], "invalid choice: 'nvfp4'"),
    ],
)
def test_unknown_values_end_the_program(words, message, capsys):
    with pytest.raises(SystemExit):
        parse(*words)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"transformer_impl": None}, "--transformer-impl must be one of local, transformer_engine"),
        ({"fp8_format": "E4M3"}, "--fp8-format must be one of hybrid, e4m3, hif8, got 'E4M3'"),
        (
            {"fp8_recipe": "current"},
            "--fp8-recipe must be one of delayed, tensorwise, blockwise, mxfp8, rowwise, "
            "got 'current'",
        ),
    ],
)
def test_values_set_by_hand_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        recipe_from_arguments(argparse.Namespace(**{**vars(parse()), **changes}))


def test_what_is_no_parser_or_no_namespace_of_it():
    with pytest.raises(TypeError, match=r"parser must be an argparse.ArgumentParser, got dict"):
        add_fp8_arguments({})
    with pytest.raises(TypeError, match=r"got Namespace without --transformer-impl"):
        recipe_from_arguments(argparse.Namespace())
    parser = argparse.ArgumentParser()
    add_fp8_arguments(parser)
    with pytest.raises(argparse.ArgumentError, match="--transformer-impl"):
        add_fp8_arguments(parser)
