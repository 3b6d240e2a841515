"""Command-line switches of FP8 training, and the recipe that a command line asks for."""

from __future__ import annotations

import argparse
from typing import Any

from ..recipe import Recipe, make_recipe, recipe_kinds

__all__ = ["add_fp8_arguments", "recipe_from_arguments"]

IMPLEMENTATIONS = ("local", "transformer_engine")
DEFAULT_RECIPE = "delayed"


def _formats_of() -> dict[str, list[str]]:
    """Returns the names of the formats that each recipe accepts, by the recipe's name."""
    return {name: [f.name.lower() for f in kind.formats] for name, kind in recipe_kinds().items()}


def _formats() -> tuple[str, ...]:
    """Returns the names of all formats that any recipe accepts."""
    return tuple(dict.fromkeys(name for names in _formats_of().values() for name in names))


def add_fp8_arguments(parser: argparse.ArgumentParser) -> Any:
    """Adds the argument group of FP8 training to ``parser``, and returns the group.

    The switches have the names of Megatron and MindSpeed:

    - ``--transformer-impl local|transformer_engine`` (``args.transformer_impl``): plain PyTorch
      modules, or those of apex_te (the default).
    - ``--fp8-format e4m3|hybrid|hif8`` (``args.fp8_format``) and ``--fp8-recipe
      delayed|tensorwise|blockwise|mxfp8`` (``args.fp8_recipe``): None if not given;
      ``recipe_from_arguments`` reads both.
    - ``--no-use-gmm-fp8`` (``args.use_gmm_fp8``, default True): keeps grouped linear layers in bf16
      or fp32. The switch only sets the attribute; the model must call these layers in
      ``fp8_autocast(enabled=False)``.

    Raises:
        TypeError: ``parser`` does not support argument groups.
        argparse.ArgumentError: ``parser`` already has one of the switches.
    """
    if not hasattr(parser, "add_argument_group"):
        raise TypeError(
            "add_fp8_arguments: parser must be an argparse.ArgumentParser, "
            f"got {type(parser).__name__}"
        )
    group = parser.add_argument_group("FP8")
    group.add_argument(
        "--transformer-impl",
        choices=IMPLEMENTATIONS,
        default="transformer_engine",
        help="plain PyTorch modules, or those of apex_te, which FP8 needs (default: %(default)s)",
    )
    group.add_argument(
        "--fp8-format",
        choices=_formats(),
        help="train in FP8 with this element format; hif8 needs --fp8-recipe tensorwise "
        "(default with --fp8-recipe: the recipe's own)",
    )
    group.add_argument(
        "--fp8-recipe",
        choices=tuple(recipe_kinds()),
        help=f"train in FP8 with this scaling (default with --fp8-format: {DEFAULT_RECIPE})",
    )
    group.add_argument(
        "--no-use-gmm-fp8",
        dest="use_gmm_fp8",
        action="store_false",
        help="leave grouped linear layers in high precision",
    )
    return group


def recipe_from_arguments(args: argparse.Namespace) -> Recipe | None:
    """Returns the recipe that the parsed switches select, or None if they do not turn FP8 on.

    ``--fp8-format`` alone selects delayed scaling; ``--fp8-recipe`` alone selects that recipe's
    default format.

    Args:
        args: result of a parser to which ``add_fp8_arguments`` has added the switches.

    Raises:
        ValueError: a switch has an unknown value, FP8 is combined with ``--transformer-impl
            local``, or the recipe does not have the format.
        TypeError: ``args`` does not come from a parser with these switches.
    """
    implementation = _value(args, "transformer_impl", IMPLEMENTATIONS)
    fp8_format = _value(args, "fp8_format", (None, *_formats()))
    name = _value(args, "fp8_recipe", (None, *recipe_kinds()))
    if fp8_format is None and name is None:
        return None
    if implementation == "local":
        asked = f"--fp8-recipe {name}" if fp8_format is None else f"--fp8-format {fp8_format}"
        raise ValueError(
            "recipe_from_arguments: --transformer-impl must be transformer_engine with "
            f"{asked}, got local"
        )
    name = DEFAULT_RECIPE if name is None else name
    formats_of = _formats_of()
    if fp8_format is not None and fp8_format not in formats_of[name]:
        able = [recipe for recipe, formats in formats_of.items() if fp8_format in formats]
        raise ValueError(
            f"recipe_from_arguments: --fp8-recipe must be {' or '.join(able)} with "
            f"--fp8-format {fp8_format}, got {name}"
        )
    return make_recipe(name, fp8_format)


def _value(args: argparse.Namespace, name: str, choices: tuple[str | None, ...]) -> str | None:
    """Returns the value of a switch after a check, as users may build a Namespace themselves."""
    switch = "--" + name.replace("_", "-")
    if not hasattr(args, name):
        raise TypeError(
            "recipe_from_arguments: args must come from a parser with add_fp8_arguments, "
            f"got {type(args).__name__} without {switch}"
        )
    value = getattr(args, name)
    if value not in choices:
        wanted = ", ".join(c for c in choices if c is not None)
        raise ValueError(f"recipe_from_arguments: {switch} must be one of {wanted}, got {value!r}")
    return value
