"""Names of layers: patterns that select them, and names that models give heads and routers."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable

# Parts of dotted names, outside of blocks, under which models keep the layers of their output.
HEADS = frozenset(
    (
        "lm_head", "embed_out", "output_projection", "classifier", "classification_head", "score",
        "qa_outputs", "cls", "head", "heads", "logits", "lm_logits", "predictions", "unembed",
    )
)  # fmt: skip
# Names beside experts of what chooses or weights them, and names and classes that say it alone.
GATES = re.compile(r"(shared_experts?_|expert_|moe_)?gate|wg")
ROUTERS = re.compile(r"(.*_)?(router|routing)(_.*)?|shared_experts?_gate")
ROUTER_CLASSES = re.compile(r"Router|(?i:(topk|moe)\w*gat(e|ing)(v\d+)?$)")


def pattern(text: str) -> Callable[[str], bool]:
    """Returns a function that tells if successive parts of a dotted name match a pattern."""
    fits = re.compile(fnmatch.translate(text)).match

    def matches(name: str) -> bool:
        parts = name.split(".")
        starts = range(len(parts))
        return any(fits(".".join(parts[i:j])) for i in starts for j in range(i + 1, len(parts) + 1))

    return matches
