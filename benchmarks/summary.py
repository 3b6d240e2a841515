"""Tables and charts of the memory-bound ops from benchmarks/results, and the README's table.

    python benchmarks/summary.py            # results/ops.md, results/<op>.png, README.md

A function's first row in a results file is its headline. TB/s are the floor's bytes over the time;
the ceiling is a copy_ of as many bytes, timed in the same run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
LAYERS = "transformer"  # the results file of whole layers

# What the README shows of an op with many functions: its first ones. ops.md has all.
README_FUNCTIONS = {
    "activation": 5,
    "bias_gelu": 6,
    "bias_dropout_add": 2,
    "block_quantize": 5,
    "current_scale": 3,
    "grouped_quantize": 2,
    "hif8": 2,
    "moe_permute": 5,
    "rope": 3,
    "swiglu": 5,
}


def load() -> dict[str, dict[str, Any]]:
    """Results files that have rows of bandwidth, by op."""
    found = {}
    for path in sorted(RESULTS.glob("*.json")):
        data = json.loads(path.read_text())
        rows = [row for row in data.get("rows", []) if "function" in row]
        if any("TB/s" in row for row in rows):
            found[path.stem] = {**data, "rows": rows}
    return found


def headlines(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        if "TB/s" in row:
            first.setdefault(row["function"], row)
    return list(first.values())


def peers(row: dict[str, Any]) -> dict[str, float]:
    """Times in microseconds of the other implementations in a row."""
    names = [key.removeprefix("over ") for key in row if key.startswith("over ")]
    return {name: row[f"{name} us"] for name in names}


def ops_table(results: dict[str, dict[str, Any]], every_shape: bool) -> str:
    """Markdown: every row, or for the README one row of each main function."""
    lines = [
        "| function | shape | us | TB/s | of a copy | best peer | times faster |",
        "|---|---|---|---|---|---|---|",
    ]
    for op, data in results.items():
        main_rows = headlines(data["rows"])[: README_FUNCTIONS.get(op)]
        for row in data["rows"] if every_shape else main_rows:
            name = f"{row['function']} {row.get('outputs', '')}".rstrip()
            if op.split("_")[0] not in name and op != "activation":
                name = f"{op}: {name}"
            if "TB/s" not in row:
                if every_shape and "us" in row:
                    lines.append(f"| {name} | {row['shape']} | {row['us']:.1f} | | | | |")
                continue
            others = peers(row)
            best = min(others, key=others.__getitem__) if others else ""
            faster = f"{others[best] / row['us']:.2f}" if others else ""
            of_copy = f"{row['of copy']:.0%}" if "of copy" in row else ""
            lines.append(
                f"| {name} | {row['shape']} | {row['us']:.1f} | {row['TB/s']:.2f} | "
                f"{of_copy} | {best} | {faster} |"
            )
    return "\n".join(lines)


def source_line(results: dict[str, dict[str, Any]]) -> str:
    """GPU, driver and torch of the files, and their dates."""
    infos = [data["environment"] for data in results.values()]
    machines = {(i.get("gpu", "no GPU"), i.get("driver", ""), i["torch"]) for i in infos}
    dates = sorted({i["date"] for i in infos})
    text = "; ".join(f"{gpu}, driver {driver}, torch {torch}" for gpu, driver, torch in machines)
    return f"{text}, {dates[0]}" + (f" to {dates[-1]}" if len(dates) > 1 else "")


def layers_table(data: dict[str, Any]) -> str:
    """Markdown: one row for each layer and stack."""
    info = data["environment"]
    lines = [
        f"{info['gpu']}, driver {info['driver']}, torch {info['torch']}, {info['date']}:",
        "",
        "| layer | stack | measure | ms | ms in turns | peak GiB |",
        "|---|---|---|---|---|---|",
    ]
    for row in data["rows"]:
        figures = (row.get(key) for key in ("ms", "ms in turns", "peak GiB"))
        cells = [row["layer"], row["stack"], row["measure"]]
        cells += ["" if figure is None else f"{figure:.2f}" for figure in figures]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def replaced(readme: str, part: str, text: str) -> str:
    """The README with ``text`` between the marks of ``part``."""
    begin, end = f"<!-- {part}: begin -->", f"<!-- {part}: end -->"
    before, _, rest = readme.partition(begin)
    _, _, after = rest.partition(end)
    if not after:
        sys.exit(f"summary: README.md must contain {begin} and {end}")
    return f"{before}{begin}\n{text}\n{end}{after}"


def draw(name: str, data: dict[str, Any]) -> None:
    """One bar chart of an op's headline rows, peers beside it, the copy's ceiling above each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = headlines(data["rows"])
    contenders = ["apex_te", *dict.fromkeys(peer for row in rows for peer in peers(row))]
    figure, axes = pyplot.subplots(figsize=(max(6.0, 1.6 * len(rows) + 2), 4.5))
    width = 0.8 / len(contenders)
    for k, contender in enumerate(contenders):
        heights = []
        for row in rows:
            num_bytes = row["TB/s"] * row["us"]
            us = row["us"] if contender == "apex_te" else peers(row).get(contender)
            heights.append(num_bytes / us if us else 0.0)
        places = [i - 0.4 + width * (k + 0.5) for i in range(len(rows))]
        axes.bar(places, heights, width, label=contender)
    for i, row in enumerate(rows):
        if "of copy" not in row:
            continue
        ceiling = row["TB/s"] / row["of copy"]
        label = "copy_ of the same bytes" if i == 0 else None
        axes.plot([i - 0.45, i + 0.45], [ceiling, ceiling], color="black", lw=1.2, label=label)
    names = [f"{row['function']}\n{row['shape']}" for row in rows]
    axes.set_xticks(range(len(rows)), names, rotation=30, ha="right", fontsize=7)
    axes.set_ylabel("TB/s over the floor's bytes")
    info = data["environment"]
    axes.set_title(f"{name}: {info.get('gpu', '')}, torch {info['torch']}, {info['date']}", size=9)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(RESULTS / f"{name}.png", dpi=110)
    pyplot.close(figure)


def main() -> None:
    results = load()
    if not results:
        sys.exit("summary: no results with bandwidths in benchmarks/results")
    source = source_line(results)
    text = f"# Memory-bound ops\n\n{source}. Cold L2.\n\n{ops_table(results, every_shape=True)}\n"
    (RESULTS / "ops.md").write_text(text)
    readme = (ROOT / "README.md").read_text()
    table = ops_table(results, every_shape=False)
    readme = replaced(readme, "ops", f"{source}, bf16, cold L2:\n\n{table}")
    layers = RESULTS / f"{LAYERS}.json"
    if layers.exists():
        readme = replaced(readme, "layers", layers_table(json.loads(layers.read_text())))
    (ROOT / "README.md").write_text(readme)
    try:
        for name, data in results.items():
            draw(name, data)
    except ImportError:
        print("summary: no charts, matplotlib is missing (pip install apex_te[demo])")


if __name__ == "__main__":
    main()
