"""Chooses the kernel of an attention by its shapes, dtypes and options, never by values.

``TABLE`` has the order of kernels, the fastest first; ``bench_attention.py --chooser`` times each
and reports where the order is wrong. ``candidates`` has what each kernel can compute.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...runtime.device import nvidia_capability
from .alibi import COLUMNS, Alibi
from .candidates import CANDIDATES, Options, Path, Problem, is_flash_replaced
from .masks import Visibility

# Shorter sequences are bound by the host, and cuDNN plans anew for each shape.
_MANY = 512
_PLAIN = ("full", "causal")
_BIASES = ("none", "constant", "gradient", "alone")


class Row(NamedTuple):
    """Row of the table: kernels for some problems, the fastest first.

    Attributes:
        kernels: names of ``CANDIDATES``; the last can compute every problem.
        forms: values of ``Problem.form`` that the row is for.
        biases: values of ``Problem.bias`` that the row is for.
        is_cuda: it is for GPUs, False for other devices, None for both.
        capability: least compute capability.
        tokens: least number of queries, and of keys.
        independent_rows: it is for such problems only, or for others only.
    """

    kernels: tuple[str, ...]
    forms: tuple[str, ...] = (*_PLAIN, "window", "mask")
    biases: tuple[str, ...] = _BIASES
    is_cuda: bool | None = True
    capability: tuple[int, int] = (0, 0)
    tokens: int = 0
    independent_rows: bool = False

    def has(self, problem: Problem) -> bool:
        """Returns True if the row is for this problem."""
        return (
            problem.form in self.forms
            and problem.bias in self.biases
            and problem.independent_rows == self.independent_rows
            and self.is_cuda in (None, problem.is_cuda)
            and bool(problem.queries >= self.tokens and problem.keys >= self.tokens)
            and nvidia_capability(problem.device) >= self.capability
        )


_LAST = ("widened flash", "efficient", "expanded", "softmax")
# The first row that has a problem decides. Kernels that a user has activated come first.
TABLE = (
    Row(("independent", "blocks"), is_cuda=None, independent_rows=True),
    Row(("varlen", "widened varlen", "padded"), forms=("packed",), is_cuda=None),
    Row(("maths", "cpu", "softmax"), is_cuda=False),
    Row(
        ("maths", "activated", "cudnn", "flash", *_LAST),
        forms=_PLAIN, biases=("none",), capability=(9, 0), tokens=_MANY,
    ),
    Row(("maths", "activated", "flash", *_LAST), forms=_PLAIN, biases=("none",)),
    Row(
        ("maths", "windowed", "widened windowed", "efficient", "expanded", "softmax"),
        forms=("window",), biases=("none",),
    ),
    Row(("maths", "efficient", "expanded", "softmax")),
)  # fmt: skip


def choose(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: Visibility,
    bias: torch.Tensor | None,
    options: Options,
) -> Path:
    """Chooses how to compute an attention; ``bias`` may be ALiBi's slopes."""
    problem = Problem.of(q, k, v, seen, bias, options)
    if seen.packed is not None:
        rest = first_that_fits(problem)
        return Path("packed", f"padded tokens are left out, then {rest.name}: {rest.reason}", rest)
    if seen.padded is not None and seen.causal == "upper_left" and bias is None:
        # Then no token sees a padded one: they all come after it.
        rest = first_that_fits(problem._replace(form="causal"))
        reason = f"padded tokens are put behind the others, then {rest.name}: {rest.reason}"
        return Path("moved", reason, rest)
    if options.independent_rows and bias is None and _hides_padding(seen):
        # Sums of keys begin with the first, which must not be a padded one.
        rest = first_that_fits(problem)
        reason = f"padded keys are put behind the others, then {rest.name}: {rest.reason}"
        return Path("moved keys", reason, rest)
    return first_that_fits(problem)


def _hides_padding(seen: Visibility) -> bool:
    """Returns True if ``seen`` hides padded tokens and nothing else."""
    hidden, limits = seen.hidden, (seen.causal, seen.window)
    is_padding = hidden is not None and hidden.shape[2] == 1 and limits == (None, None)
    return is_padding and seen.fully_masked_queries is not None


def choose_with_alibi(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: Visibility,
    slopes: torch.Tensor,
    alibi: Alibi,
    options: Options,
) -> Path:
    """Chooses how to compute an attention with ALiBi: by the flash kernel if it can be."""
    if not options.has_sink and alibi.has_columns(slopes, q.dtype, k.shape[2]):
        # Views of one element serve: only their shapes are read.
        size = q.shape[3] + COLUMNS
        wide = [x[..., :1].expand(*x.shape[:3], size) for x in (q, k)]
        rest = last = choose(wide[0], wide[1], v, seen, None, options)
        while last.rest is not None:
            last = last.rest
        if last.kernel == "flash":
            reason = f"ALiBi is {COLUMNS} more columns of queries and keys, then "
            return Path("alibi", f"{reason}{rest.name}: {rest.reason}", rest)
    return choose(q, k, v, seen, slopes, options)


def packs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> bool:
    """Returns True if a kernel takes sequences of these tensors without their padded tokens."""
    if options.independent_rows:
        return False
    problem = Problem.of(q, k, v, Visibility(), None, options)._replace(form="packed")
    return first_that_fits(problem).name != "padded"


def first_that_fits(problem: Problem) -> Path:
    """Returns the path of the first kernel of the problem's row that can compute it."""
    row = next(row for row in TABLE if row.has(problem))
    obstacles = []
    for name in row.kernels:
        path, obstacle_of = CANDIDATES[name]
        obstacle = obstacle_of(problem)
        if obstacle is None:
            break
        if obstacle:
            obstacles.append(obstacle)
    if path.name in ("softmax", "padded"):
        path = path._replace(reason=obstacles[-1])
    elif obstacles and path.name != "sdpa_flash":
        path = path._replace(reason=f"{path.reason} ({obstacles[0]})")
    return _explained_sink(path, problem.has_sink)


def _explained_sink(path: Path, has_sink: bool) -> Path:
    """Returns the path with a reason that says how it adds a sink, if there is one."""
    if not has_sink or path.name == "padded":  # whose own choice follows
        return path
    how = "rescales its output" if (path.rest or path).kernel else "is one more column of scores"
    return path._replace(reason=f"{path.reason}; the softmax sink {how}")


def path_settings() -> tuple[bool, bool]:
    """Returns the settings of torch on which ``choose`` depends besides its arguments."""
    return torch.are_deterministic_algorithms_enabled(), is_flash_replaced()
