"""Writes the tables and charts of the documents from benchmarks/results.

    python benchmarks/summary.py    # README.md, docs/performance.md, results/ops.md, results/*.png

A function's first row in a results file is its headline. TB/s are the bytes that must be
read and written over the time; the ceiling is a copy_ of as many bytes, timed in the same run.
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
LAYERS = "transformer"  # the results file of whole layers

README = ROOT / "README.md"
PERFORMANCE = ROOT / "docs" / "performance.md"

# Columns of the layers' tables, one table for each kind of figure: name in the results, format.
LAYER_COLUMNS = {
    "Time": {"ms": ".2f", "ms in turns": ".2f", "ms sustained": ".2f", "products ms": ".2f",
             "attention ms": ".2f", "rest ms": ".2f"},
    "Time of a token over that of 2 x 4096 tokens": {
        "per token": ".3f", "per token in turns": ".3f", "per token sustained": ".3f"},
    "Energy of a step, sustained": {"J": ".2f", "W": ".0f", "SM MHz": ".0f", "throttle": ""},
    "Memory": {"peak GiB": ".2f", "peak GiB above": ".2f"},
}  # fmt: skip
LAYER_NAMES = ("Llama-3-8B", "GPT")
# Columns of the tables of a head's loss, of a model's, and of Accelerate's switch.
HEAD_COLUMNS = {"ms": ".1f", "over torch": ".2f", "peak GiB": ".2f", "from torch's": ".1e"}
FUSED_LOSS_COLUMNS = {
    "ms": ".0f", "over transformers": ".2f", "peak GiB": ".1f", "of the step GiB": ".1f",
    "gradients from transformers'": ".3f",
}  # fmt: skip
ACCELERATE_COLUMNS = {"tokens/s": ",", "of bf16": ".2f", "peak GiB": ".1f"}
PRETRAIN_COLUMNS = {
    "tokens/s": ",", "of bf16": ".2f", "of torch": ".2f", "ms": ".0f", "MFU": ".1%",
    "peak GiB": ".1f",
}  # fmt: skip
LORA_COLUMNS = {
    "weight MiB": ".0f", "of bf16": ".3f", "peak MiB": ".0f", "ms": ".1f", "time of torch's": ".3f",
}  # fmt: skip
OUR_AND_THEIR_LAYERS = ("apex_te", "Transformer Engine")
LAYER_STACKS = {  # how a results file names a stack, or begins to: how the README does
    "torch bf16": "PyTorch",
    "torch bf16 compiled": "`torch.compile`",
    "apex_te": "apex_te",
    "Transformer Engine": "Transformer Engine",
}

# Functions that docs/performance.md shows of an op with many: its first ones. ops.md has all.
MAIN_FUNCTIONS = {
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
    """Returns the results files that have rows of bandwidth, by op."""
    found = {}
    for path in sorted(RESULTS.glob("*.json")):
        data = json.loads(path.read_text())
        rows = [row for row in data.get("rows", []) if "function" in row]
        if any("TB/s" in row for row in rows):
            found[path.stem] = {**data, "rows": rows}
    return found


def headlines(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the first row with a bandwidth of each function."""
    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        if "TB/s" in row:
            first.setdefault(row["function"], row)
    return list(first.values())


def peers(row: dict[str, Any]) -> dict[str, float]:
    """Returns the times in microseconds of the other implementations in a row."""
    names = [key.removeprefix("over ") for key in row if key.startswith("over ")]
    return {name: row[f"{name} us"] for name in names}


def ops_table(results: dict[str, dict[str, Any]], every_shape: bool) -> str:
    """Returns a Markdown table of every row, or of one row for each main function."""
    lines = [
        "| function | shape | us | TB/s | of a copy | best peer | times faster |",
        "|---|---|---|---|---|---|---|",
    ]
    for op, data in results.items():
        main_rows = headlines(data["rows"])[: MAIN_FUNCTIONS.get(op)]
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
    """Returns GPU, driver and torch of the files, and their dates."""
    infos = [data["environment"] for data in results.values()]
    machines = {(i.get("gpu", "no GPU"), i.get("driver", ""), i["torch"]) for i in infos}
    dates = sorted({i["date"] for i in infos})
    text = "; ".join(
        f"{gpu}, driver {driver}, torch {torch}" if driver else f"{gpu}, torch {torch}"
        for gpu, driver, torch in sorted(machines)
    )
    return f"{text}, {dates[0]}" + (f" to {dates[-1]}" if len(dates) > 1 else "")


def layers_table(data: dict[str, Any]) -> str:
    """Returns a Markdown table for each kind of figure measured, with a row for each stack.

    What is the same in all rows stands above them.
    """
    rows = data["rows"]
    names = ("layer", "stack", "measure")
    values = {key: {row.get(key) for row in rows} for key in (*names, "throttle")}
    shared = [key for key in values if len(values[key]) == 1 and values[key] != {None}]
    shown = [key for key in names if key not in shared]
    parts = [f"{', '.join([*(rows[0][key] for key in shared), source_line({LAYERS: data})])}."]
    for title, columns in LAYER_COLUMNS.items():
        keys = [
            key
            for key in columns
            if key not in shared and any(row.get(key) is not None for row in rows)
        ]
        lines = [f"{title}:", "", f"| {' | '.join([*shown, *keys])} |"]
        lines.append("|---" * (len(shown) + len(keys)) + "|")
        for row in rows:
            figures = [(row.get(key), columns[key]) for key in keys]
            cells = ["" if figure is None else format(figure, form) for figure, form in figures]
            if any(cells):
                lines.append(f"| {' | '.join([*(row[key] for key in shown), *cells])} |")
        if keys:
            parts.append("\n".join(lines))
    return "\n\n".join(parts)


def host_table(data: dict[str, Any]) -> str:
    """Returns a Markdown table of host time by layer and stack, with its ratio to PyTorch's."""
    lines = [f"{source_line({'host': data})}:", "", "| layer | stack | us | of torch |"]
    lines.append("|---|---|---|---|")
    for row in data["rows"]:
        cells = (row["layer"], row["stack"], f"{row['host us']:.0f}", f"{row['of torch']:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def stacks_table(name: str, columns: dict[str, str]) -> str:
    """Returns a Markdown table of a results file with one row for each stack.

    Args:
        name: the results file.
        columns: the columns to show, with their formats.
    """
    data = _result(name)
    lines = [f"{source_line({name: data})}:", "", f"| stack | {' | '.join(columns)} |"]
    lines.append("|---" * (1 + len(columns)) + "|")
    for row in data["rows"]:
        cells = [row["stack"], *(format(row[key], form) for key, form in columns.items())]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def layers_by_recipe(data: dict[str, Any]) -> str:
    """Returns a Markdown table with one row for each layer and precision, stacks side by side.

    It shows milliseconds of a step that is timed by itself and, of stacks whose energy was
    measured, joules of a step under sustained load.
    """
    rows = [row for row in data["rows"] if row["layer"] in LAYER_NAMES]
    found = {(row["layer"], row["stack"]): row for row in rows}
    precisions = [
        stack.removeprefix("apex_te ")
        for stack in dict.fromkeys(row["stack"] for row in rows)
        if stack.startswith("apex_te ") and "," not in stack
    ]

    def stack_of(column: str, precision: str) -> str:
        return f"{column} {precision}" if column in OUR_AND_THEIR_LAYERS else column

    columns = [
        (f"{title} J" if unit == "J" else title, column, unit)
        for unit in ("ms", "J")
        for column, title in LAYER_STACKS.items()
        if (unit == "ms" or column in OUR_AND_THEIR_LAYERS)
        and any(unit in row for row in rows if row["stack"].startswith(column))
    ]
    has_energy = any(unit == "J" for _, _, unit in columns)
    energy = ", and joules under sustained load" if has_energy else ""
    version = data.get("transformer_engine")
    peer = f" (Transformer Engine {version})" if version else ""
    # Without spaces beside the bars: they would count as words of a README that is to be short.
    lines = [
        f"Milliseconds{energy}, of a step{peer}:",
        "",
        f"|layer|recipe|{'|'.join(title for title, _, _ in columns)}|",
        "|---" * (2 + len(columns)) + "|",
    ]
    for layer in dict.fromkeys(row["layer"] for row in rows):
        for precision in precisions:
            cells = [layer, precision]
            for _, column, unit in columns:
                fits = column in OUR_AND_THEIR_LAYERS or precision == "bf16"
                row = found.get((layer, stack_of(column, precision)), {}) if fits else {}
                cells.append(f"{row[unit]:.2f}" if unit in row else "")
            lines.append(f"|{'|'.join(cells)}|")
    return "\n".join(lines)


def _result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _layer_times() -> dict[str, float]:
    """Returns the milliseconds of a Llama-3-8B layer by stack, each timed by itself."""
    rows = _result(LAYERS)["rows"]
    return {row["stack"]: row["ms"] for row in rows if row["layer"] == "Llama-3-8B"}


def _held_out_losses(data: dict[str, Any]) -> str:
    """Returns the README's line of what each FP8 recipe's last held-out loss is over bf16's."""
    runs = {run["name"]: run for run in data["runs"]}
    steps = [int(step) for step in runs["bf16"]["train"]]
    millions = runs["bf16"]["tokens"] / 1e6
    last = {name: run["held_out"][str(max(steps))] for name, run in runs.items()}
    over = {name: f"{loss / last['bf16'] - 1:.2%}" for name, loss in last.items()}
    return (
        f"- **{over['delayed']}** more held-out loss than bf16 (tensorwise {over['tensorwise']}, "
        f"blockwise {over['blockwise']}): 350 M parameters, {max(steps) * millions:.0f} M tokens, "
        f"the last {len(steps) * millions:.0f} M in FP8"
    )


def headline() -> str:
    """Returns the README's three figures, with machine, torch and date, and its layer table."""
    times = _layer_times()
    fp8, bf16 = times["apex_te delayed"], times["torch bf16"]
    compiled = times["torch bf16 compiled"]
    training, install = _result("pretrain_350m_branches"), _result("install_cpu")
    seconds = next(row["s"] for row in install["rows"] if row["what"].endswith("nothing built"))
    sources = [source_line({"": data}) for data in (_result(LAYERS), training, install)]
    lines = [
        f"- **{bf16 / fp8:.2f}x** the speed of PyTorch in bf16 ({compiled / fp8:.2f}x that of "
        f"`torch.compile`): a Llama-3-8B layer, 2 x 4096 tokens, forward and backward, with FP8 "
        f"(delayed scaling). {sources[0]}.",
        f"{_held_out_losses(training)}. {sources[1]}.",
        f"- **{seconds:.1f} s** for `pip install .`, which compiles nothing. 2 x86-64 cores, "
        f"{sources[2]}.",
    ]
    bullets = [textwrap.fill(line, 100, subsequent_indent="  ") for line in lines]
    return "\n".join([*bullets, "", layers_by_recipe(_result(LAYERS))])


def replaced(document: str, part: str, text: str) -> str:
    """Returns the document with ``text`` between the marks of ``part``."""
    begin, end = f"<!-- {part}: begin -->", f"<!-- {part}: end -->"
    before, _, rest = document.partition(begin)
    _, _, after = rest.partition(end)
    if not after:
        sys.exit(f"summary: the document must contain {begin} and {end}")
    return f"{before}{begin}\n{text}\n{end}{after}"


def documents() -> dict[Path, str]:
    """Returns the text of each document that shows results, written anew from them."""
    results = load()
    if not results:
        sys.exit("summary: no results with bandwidths in benchmarks/results")
    source = source_line(results)
    table = ops_table(results, every_shape=False)
    performance = PERFORMANCE.read_text()
    performance = replaced(performance, "ops", f"{source}, bf16, cold L2:\n\n{table}")
    performance = replaced(performance, "layers", layers_table(_result(LAYERS)))
    performance = replaced(performance, "gpt", layers_table(_result("transformer_gpt")))
    performance = replaced(performance, "gpt_te", layers_table(_result("transformer_gpt_te")))
    performance = replaced(performance, "head", stacks_table("linear_cross_entropy", HEAD_COLUMNS))
    performance = replaced(
        performance, "fused_loss", stacks_table("fused_loss", FUSED_LOSS_COLUMNS)
    )
    performance = replaced(
        performance, "accelerate", stacks_table("accelerate", ACCELERATE_COLUMNS)
    )
    performance = replaced(performance, "pretrain", stacks_table("pretrain_1.3b", PRETRAIN_COLUMNS))
    performance = replaced(performance, "lora", stacks_table("lora", LORA_COLUMNS))
    performance = replaced(performance, "tokens", layers_table(_result("transformer_tokens")))
    performance = replaced(performance, "host", host_table(_result("host")))
    every = ops_table(results, every_shape=True)
    return {
        README: replaced(README.read_text(), "headline", headline()),
        PERFORMANCE: performance,
        RESULTS / "ops.md": f"# Memory-bound ops\n\n{source}. Cold L2.\n\n{every}\n",
    }


def draw_layer() -> None:
    """Draws the README's chart: times of a Llama-3-8B layer by stack."""
    from matplotlib import pyplot

    times = _layer_times()
    wanted = ["torch bf16", "torch bf16 compiled", *(
        f"{library} {precision}"
        for precision in ("bf16", "blockwise", "tensorwise", "delayed")
        for library in ("Transformer Engine", "torchao", "apex_te")
    )]  # fmt: skip
    stacks = [stack for stack in wanted if stack in times]
    labels = [stack.replace("torch bf16", "PyTorch bf16") for stack in stacks]
    colors = ["tab:blue" if stack.startswith("apex_te") else "tab:gray" for stack in stacks]
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.28 * len(stacks)))
    bars = axes.barh(labels, [times[stack] for stack in stacks], color=colors)
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.invert_yaxis()
    axes.set_xlabel("ms, forward and backward of a Llama-3-8B layer, 2 x 4096 tokens")
    axes.set_xlim(0, 1.1 * max(times.values()))
    axes.set_title(source_line({LAYERS: _result(LAYERS)}), size=10)
    figure.set_layout_engine("constrained")
    figure.savefig(RESULTS / f"{LAYERS}.png", dpi=100)
    pyplot.close(figure)


def draw(name: str, data: dict[str, Any]) -> None:
    """Draws an op's headline rows as bars beside its peers', each with the copy's ceiling."""
    from matplotlib import pyplot

    rows = headlines(data["rows"])[: MAIN_FUNCTIONS.get(name)]
    contenders = ["apex_te", *dict.fromkeys(peer for row in rows for peer in peers(row))]
    bars = sum(1 + len(peers(row)) for row in rows)
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.24 * bars + 0.24 * len(rows)))
    labelled: set[str] = set()
    place, ticks = 0.0, []
    for row in rows:
        times = {"apex_te": row["us"], **peers(row)}
        num_bytes = row["TB/s"] * row["us"]
        ticks.append(place + 0.5 * (len(times) - 1))
        top = place - 0.5
        for contender, us in times.items():
            label = contender if contender not in labelled else None
            labelled.add(contender)
            color = f"C{contenders.index(contender)}"
            axes.barh(place, num_bytes / us, 0.86, label=label, color=color)
            place += 1.0
        if "of copy" in row:
            ceiling, label = row["TB/s"] / row["of copy"], "copy of as many bytes"
            axes.plot(
                [ceiling, ceiling], [top, place - 0.5], color="black", lw=1.5,
                label=None if label in labelled else label,
            )  # fmt: skip
            labelled.add(label)
        place += 1.0
    shapes = {row["shape"] for row in rows}
    same = len(shapes) == 1
    names = [row["function"] if same else f"{row['function']}\n{row['shape']}" for row in rows]
    axes.set_yticks(ticks, names, fontsize=10)
    axes.invert_yaxis()
    axes.set_xlabel("TB/s: bytes that must be read and written, over the time", fontsize=10)
    info = data["environment"]
    shape = f" of {shapes.pop()}" if same else ""
    axes.set_title(
        f"{name}{shape}, bf16, {info.get('gpu', '')}, torch {info['torch']}, {info['date']}",
        size=10,
    )
    figure.legend(fontsize=10, loc="outside lower center", ncols=5)
    figure.set_layout_engine("constrained")
    figure.savefig(RESULTS / f"{name}.png", dpi=100)
    pyplot.close(figure)


def main() -> None:
    """Writes the documents, and the charts where matplotlib is installed."""
    for path, text in documents().items():
        path.write_text(text)
    try:
        import matplotlib
    except ImportError:
        print("summary: no charts, matplotlib is missing (pip install apex_te[demo])")
        return
    matplotlib.use("Agg")
    draw_layer()
    for name, data in load().items():
        draw(name, data)


if __name__ == "__main__":
    main()
