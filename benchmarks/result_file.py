"""Results files: their origin (date, commit, Python, CPU) and their text, without torch."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def output_of(*command: str) -> str:
    """Returns what a command prints, empty if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, 'unknown')}, {os.cpu_count()} CPUs"


def provenance() -> dict[str, str]:
    return {
        "date": datetime.date.today().isoformat(),
        "commit": os.environ.get("APEX_TE_COMMIT")
        or output_of("git", "rev-parse", "--short", "HEAD"),
        "python": sys.version.split()[0],
        "cpu": cpu_name(),
    }


def result_text(content: dict[str, Any]) -> str:
    """Returns the JSON text of a results file: a line for each key, and for each row of a list."""
    parts = []
    for key, value in content.items():
        text = json.dumps(value)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n" + ",\n".join("  " + json.dumps(row) for row in value) + "\n ]"
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
