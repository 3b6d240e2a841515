"""JSON text of a results file: a line for each key, and for each row of a list."""

from __future__ import annotations

import json
from typing import Any


def result_text(content: dict[str, Any]) -> str:
    """Returns the text of a file in ``benchmarks/results``."""
    parts = []
    for key, value in content.items():
        text = json.dumps(value)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n" + ",\n".join("  " + json.dumps(row) for row in value) + "\n ]"
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
