"""Writes the files of a new op, or removes them again.

    python scripts/new_op.py my_op                        # asks, then writes a skeleton
    python scripts/new_op.py my_op --cuda --yes           # asks nothing
    python scripts/new_op.py my_op --inputs x,gate --outputs y --scalars alpha --yes
    python scripts/new_op.py my_ext --from-sources csrc/my_ext.cpp,csrc/my_ext_kernel.cu
    python scripts/new_op.py my_op --remove

A skeleton is an elementwise op that works, on the CPU and on the GPU: builder, kernels,
Python op, test and benchmark, to be changed into what it is to be; with --inputs and --outputs
one of several tensors and numbers, without a benchmark. With sources, an existing
extension (PYBIND11_MODULE, torch/extension.h) gets a builder and a test and stays as it is.
docs/new_op.md goes through both.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # op_builder, as setup.py finds it: no torch is needed here

from jit_templates import names, record, render, several  # noqa: E402
from jit_templates.names import Refusal  # noqa: E402
from jit_templates.tree import parsed  # noqa: E402

NAME = "What is the name of the module? "
CUDA = "Is this a CUDA module? (Y/n) "
SOURCES = "Enter the sources (comma separated), or nothing for a skeleton: "


def ask(prompt: str, instead: str) -> str:
    """An answer from stdin; where it has ended, Refusal, which names the flags ``instead``."""
    try:
        return input(prompt).strip()
    except (EOFError, RuntimeError):  # RuntimeError: started without a stdin
        print()
        raise Refusal(f"no answer to {prompt.strip()!r}, stdin has ended: give {instead}") from None


def ask_yes(prompt: str, instead: str) -> bool:
    """Yes (also an empty answer) or no, in any case; anything else is asked again."""
    while True:
        answer = ask(prompt, instead).lower()
        if answer in ("", "y", "yes"):
            return True
        if answer in ("n", "no"):
            return False
        print(f"Please answer y or n, got {answer!r}.")


def split(text: str) -> list[str]:
    """The parts of a comma separated list."""
    return [part.strip() for part in text.split(",") if part.strip()]


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; what contradicts ends the program with status 2."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", help="name of the op, in snake_case")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--cuda", action="store_true", default=None, help="with a CUDA library")
    kind.add_argument("--cpu", dest="cuda", action="store_false", help="for CPU tensors only")
    parser.add_argument(
        "--sources", "--from-sources", dest="sources", metavar="FILE,...", type=split,
        help="sources below csrc of an extension with a PYBIND11_MODULE",
    )  # fmt: skip
    parser.add_argument(
        "--exports", metavar="NAME,...", type=split, default=[],
        help='what the extension defines, where m.def("...") in its sources does not tell',
    )  # fmt: skip
    parser.add_argument(
        "--include", metavar="FOLDER,...", type=split, default=[],
        help="include folders of the extension, relative to the root",
    )  # fmt: skip
    for noun, meaning in (
        ("inputs", "tensors that the op reads"),
        ("outputs", "tensors that it returns"),
        ("scalars", "numbers that it takes"),
    ):
        text = f"{meaning}, for an elementwise op of several"
        parser.add_argument(f"--{noun}", metavar="NAME,...", type=split, default=[], help=text)
    parser.add_argument("--yes", "-y", action="store_true", help="take the defaults, ask nothing")
    options = parsed(parser, arguments)
    if options.remove:
        given = [options.sources, options.exports, options.include, options.cuda is not None]
        given += [options.inputs, options.outputs, options.scalars]
        if any(given):
            parser.error("--remove takes a name, --force, --yes and --dry-run, nothing else")
    return options


def plan(options: argparse.Namespace) -> tuple[str, dict[str, str]]:
    """Returns name and files of what was asked for, asking for what was not given.

    Raises:
        Refusal: what was given cannot be made.
    """
    if options.name is None and options.yes:
        raise Refusal("a name must be given with --yes")
    name: str = options.name or ask(NAME, "a name")
    arguments = several.Arguments(options.inputs, options.outputs, options.scalars)
    if any(arguments) and (options.sources or options.exports or options.include):
        raise Refusal("--inputs, --outputs and --scalars describe a skeleton, not an extension")
    is_asked = options.sources is None and not options.yes
    if options.sources is None:
        names.check_name(name, ROOT, is_skeleton=False)  # before the questions that follow
    cuda: bool | None = options.cuda
    if cuda is None and is_asked:
        cuda = ask_yes(CUDA, "--cuda or --cpu, or --yes")
    if any(arguments):
        names.check_name(name, ROOT, is_skeleton=True)
        return name, several.files(name, arguments, cuda is not False)
    given: list[str] = split(ask(SOURCES, "--sources or --yes")) if is_asked else options.sources
    if not given:
        if options.exports or options.include:
            raise Refusal("--exports and --include describe an extension: give its sources, too")
        names.check_name(name, ROOT, is_skeleton=True)
        return name, render.skeleton(name, cuda is not False)
    names.check_name(name, ROOT, is_skeleton=False)
    sources, folders = names.find_sources(given, ROOT)
    kernels = [source for source in sources if source.endswith(".cu")]
    if kernels and cuda is False:
        raise Refusal(f"{', '.join(kernels)} needs a CUDA module, and it was said to be none")
    names.check_extension(name, sources, options.exports, ROOT)
    names.check_includes(options.include, ROOT)
    with_cuda = bool(kernels) if cuda is None else cuda
    folders = options.include or folders
    return name, render.extension(name, sources, with_cuda, options.exports, folders)


def create(options: argparse.Namespace) -> None:
    """Write the files of a new op, or say which they would be."""
    name, files = plan(options)
    names.check_targets(name, [*files, f"{record.FOLDER}/{name}.json"], ROOT)
    if options.dry_run:
        print(f"would write, in {ROOT}:", *files, sep="\n  ")
        return
    record.write(name, files, ROOT)
    print(f"wrote, in {ROOT}:", *files, sep="\n  ")
    print("\nnext:")
    for where in files:
        if where.startswith("tests/"):
            print(f"  python -m pytest {where}")
        elif where.startswith("benchmarks/"):
            print(f"  python benchmarks/run.py {name}")
    print(f"  python scripts/new_op.py {name} --remove    # undoes this")


def remove(options: argparse.Namespace) -> None:
    """Remove the files of a generated op, or say which they are."""
    if options.name is None and options.yes:
        raise Refusal("a name must be given with --yes")
    name: str = options.name or ask(NAME, "a name")
    files = record.check_removal(name, ROOT, options.force)
    results: list[str] = []
    if any(file.startswith("benchmarks/") for file in files):
        # What the benchmark wrote, with and without a GPU.
        written = [f"benchmarks/results/{stem}.json" for stem in (name, f"{name}_cpu")]
        results = [where for where in written if (ROOT / where).exists()]
    print(
        f"{'would remove' if options.dry_run else 'removed'}, in {ROOT}:",
        *files,
        *results,
        sep="\n  ",
    )
    if options.dry_run:
        return
    for where in results:
        (ROOT / where).unlink()
    for folder in record.remove(name, ROOT, options.force):
        print(f"left: {folder}, which holds files that were not generated")


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when all was done, 1 when it was refused, 2 for a wrong command line."""
    options = parse_arguments(arguments)
    action: Callable[[argparse.Namespace], None] = remove if options.remove else create
    try:
        action(options)
    except Refusal as refusal:
        print(f"new_op: {refusal}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"new_op: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nnew_op: stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
