"""Writes the tables and charts of the documents from benchmarks/results.

    python benchmarks/summary.py    # README.md, docs/performance.md, results/ops.md, results/*.png

A function's first row in a results file is its headline. TB/s are the bytes that must be
read and written over the time; the ceiling is a copy_ of as many bytes, timed in the same run.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterable, Sequence
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
    "Time per token relative to 2 x 4096 tokens": {
        "per token": ".3f", "per token in turns": ".3f", "per token sustained": ".3f"},
    "Energy of a step, sustained": {"J": ".2f", "W": ".0f", "SM MHz": ".0f", "throttle": ""},
    "Memory": {"peak GiB": ".2f", "peak GiB above": ".2f"},
}  # fmt: skip
LAYER_NAMES = ("Llama-3-8B", "GPT")
# How the documents word names of the results.
TITLES = {
    "stack": "library", "host us": "us", "products ms": "GEMM ms", "ms in turns": "ms interleaved",
    "per token in turns": "per token interleaved", "over torch": "vs torch",
    "of torch": "vs torch", "of bf16": "vs bf16", "time of torch's": "time vs torch",
    "from torch's": "error vs torch", "over transformers": "vs transformers",
    "of the step GiB": "step GiB", "gradients from transformers'": "gradient error",
    "apex_te delayed, SwiGLU apart": "apex_te delayed, separate SwiGLU",
    "product + op": "matmul + op",
}  # fmt: skip
# Columns of the tables of a head's loss, of a model's, and of Accelerate's switch.
HEAD_COLUMNS = {"ms": ".1f", "over torch": ".2f", "peak GiB": ".2f", "from torch's": ".1e"}
FUSED_LOSS_COLUMNS = {
    "ms": ".0f", "over transformers": ".2f", "peak GiB": ".1f", "of the step GiB": ".1f",
    "gradients from transformers'": ".3f",
}  # fmt: skip
ACCELERATE_COLUMNS = {"tokens/s": ",", "of bf16": ".2f", "peak GiB": ".1f"}
PRETRAIN_COLUMNS = {
    "tokens/s": ",", "of bf16": ".2f", "of torch": ".2f", "ms": ".0f", "MFU": ".1%",
    "peak GiB": ".1f", "J": ".0f",
}  # fmt: skip
LORA_COLUMNS = {
    "weight MiB": ".0f", "of bf16": ".3f", "peak MiB": ".0f", "ms": ".1f", "time of torch's": ".3f",
}  # fmt: skip
CARDS = {"H100": "transformer_h100", "H200": "transformer_h200"}  # the README's table
CARD_STACKS = {  # its rows: how a results file names a stack, and how the README does
    "torch bf16 compiled": "PyTorch bf16, `torch.compile`",
    "torchao tensorwise compiled": "torchao tensorwise, `torch.compile`",
    "Transformer Engine delayed": "Transformer Engine delayed",
    "apex_te tensorwise": "apex_te tensorwise",
    "apex_te delayed": "apex_te delayed",
}

# Functions that docs/performance.md shows of an op with many: its first ones. ops.md has all.
MAIN_FUNCTIONS = {
    "activation": 5,
    "bias_gelu": 6,
    "bias_dropout_add": 2,
    "block_quantize": 5,
    "current_scale": 3,
    "grouped_cast": 3,
    "grouped_quantize": 2,
    "hif8": 2,
    "moe_permute": 5,
    "moe_router": 3,
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
    titles = ["function", "shape", "us", "TB/s", "of a copy", "best peer", "times faster"]
    lines = _header(titles)
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
            times = f"{row['us']:.1f}", f"{row['TB/s']:.2f}"
            lines.append(_line([name, row["shape"], *times, of_copy, best, faster]))
    return "\n".join(lines)


def source_line(results: dict[str, dict[str, Any]]) -> str:
    """Returns GPU, driver and torch of the files, and their dates."""
    infos = [data["environment"] for data in results.values()]
    machines: dict[str, list[str]] = {}  # GPUs by driver and torch
    for i in infos:
        driver = f"driver {i['driver']}, " if i.get("driver") else ""
        machines.setdefault(f"{driver}torch {i['torch']}", []).append(i.get("gpu", "no GPU"))
    dates = sorted({i["date"] for i in infos})
    named = {software: " and ".join(sorted(set(gpus))) for software, gpus in machines.items()}
    text = "; ".join(f"{gpus}, {software}" for software, gpus in named.items())
    return f"{text}, {dates[0]}" + (f" to {dates[-1]}" if len(dates) > 1 else "")


def _titled(name: str) -> str:
    return TITLES.get(name, name)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _header(names: list[str]) -> list[str]:
    return [_line(map(_titled, names)), "|---" * len(names) + "|"]


def layers_table(data: dict[str, Any]) -> str:
    """Returns a Markdown table for each kind of figure; what all rows share stands above them."""
    rows = data["rows"]
    names = ("layer", "stack", "measure")
    values = {key: {row.get(key) for row in rows} for key in (*names, "throttle")}
    shared = [key for key in values if len(values[key]) == 1 and values[key] != {None}]
    shown = [key for key in names if key not in shared]
    parts = [f"{', '.join([*(rows[0][key] for key in shared), source_line({LAYERS: data})])}."]
    for title, columns in LAYER_COLUMNS.items():
        known = {key for row in rows for key, figure in row.items() if figure is not None}
        keys = [key for key in columns if key in known - set(shared)]
        lines = [f"{title}:", "", *_header([*shown, *keys])]
        for row in rows:
            figures = [(row.get(key), columns[key]) for key in keys]
            cells = ["" if figure is None else format(figure, form) for figure, form in figures]
            if any(cells):
                lines.append(_line([*(_titled(row[key]) for key in shown), *cells]))
        if keys:
            parts.append("\n".join(lines))
    return "\n\n".join(parts)


def stacks_table(name: str, columns: dict[str, str], labels: Sequence[str] = ("stack",)) -> str:
    """Returns a Markdown table of a results file, a row for each stack; columns with formats."""
    data = _result(name)
    lines = [f"{source_line({name: data})}:", "", *_header([*labels, *columns])]
    for row in data["rows"]:
        figures = (format(row[key], form) for key, form in columns.items())
        lines.append(_line([*(_titled(row[key]) for key in labels), *figures]))
    return "\n".join(lines)


def _rows_by_stack(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["stack"]: row for row in data["rows"]}


def cards_table(cards: dict[str, dict[str, Any]]) -> str:
    """Returns a Markdown table of a layer's step under sustained load, by the GPU's short name."""
    columns = [f"{card} {unit}" for card in cards for unit in ("ms", "J")]
    # Without spaces beside the bars: they would count as words of a README that is to be short.
    lines = [f"|Llama-3-8B layer|{'|'.join(columns)}|GiB|", "|---" * (2 + len(columns)) + "|"]
    for stack, title in CARD_STACKS.items():
        rows = [_rows_by_stack(data)[stack] for data in cards.values()]
        cells = [f"{row[key]:.2f}" for row in rows for key in ("ms sustained", "J")]
        memory = max(row["peak GiB above"] for row in rows)
        lines.append(f"|{title}|{'|'.join(cells)}|{memory:.2f}|")
    return "\n".join(lines)


def _result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _held_out_losses(data: dict[str, Any]) -> str:
    """Returns the README's line of how far each recipe's held-out loss is above bf16's."""
    runs = {run["name"]: run for run in data["runs"]}
    steps = [int(step) for step in runs["bf16"]["train"]]
    millions = runs["bf16"]["tokens"] / 1e6
    last = {name: run["held_out"][str(max(steps))] for name, run in runs.items()}
    over = {name: f"{loss / last['bf16'] - 1:.2%}" for name, loss in last.items()}
    return (
        f"- **Held-out loss {over['delayed']} above bf16** with delayed scaling (tensorwise "
        f"{over['tensorwise']}, blockwise {over['blockwise']}): 350M parameters, "
        f"{max(steps) * millions:.0f}M tokens, the last {len(steps) * millions:.0f}M in FP8 from a "
        "shared bf16 start; one run each, 2.3 epochs of Python sources"
    )


def _gains(steps: dict[str, dict[str, Any]], stack: str) -> str:
    rows = map(_rows_by_stack, steps.values())
    ratios = [each[stack]["ms"] / each["apex_te delayed"]["ms"] for each in rows]
    return " and ".join(f"{ratio:.2f}x" for ratio in ratios)


def headline() -> str:
    """Returns the README's figures, with machine, torch and date, and its table of layers."""
    cards = {card: _result(name) for card, name in CARDS.items()}
    steps = {card: _result(f"pretrain_1.3b_{card.lower()}") for card in CARDS}
    training = _result("pretrain_350m_branches")
    install = _result("install_cpu")
    seconds = next(row["s"] for row in install["rows"] if row["what"].endswith("nothing built"))
    rows = _rows_by_stack(steps["H200"])
    ours, compiled = rows["apex_te delayed"], rows["torch bf16 compiled"]
    lines = [
        f"- **A training step {_gains(steps, 'torch bf16 compiled')} as fast as compiled PyTorch "
        f"in bf16** ({', '.join(steps)}), {_gains(steps, 'torchao tensorwise compiled')} as fast "
        f"as torchao's FP8; peak memory {ours['peak GiB']:.1f} GiB, compiled PyTorch "
        f"{compiled['peak GiB']:.1f}: 1.3B parameters, 8 x 4096 tokens, delayed scaling; same "
        f"machines as below.",
        f"{_held_out_losses(training)}. {source_line({'': training})}.",
        f"- **`pip install` in {seconds:.1f} s**: nothing is compiled until an op is used. "
        f"2 x86-64 cores, {source_line({'': install})}.",
    ]
    bullets = [textwrap.fill(line, 100, subsequent_indent="  ") for line in lines]
    about = (
        f"One layer, forward and backward, 2 x 4096 tokens, libraries in turns under sustained "
        f"load; J: energy of a step; GiB: peak above what is allocated before it (Transformer "
        f"Engine "
        f"{cards['H100']['transformer_engine']}, torchao {cards['H100']['torchao']}; "
        f"{source_line({**cards, **{f'step {card}': data for card, data in steps.items()}})}):"
    )
    return "\n".join([*bullets, "", textwrap.fill(about, 100), "", cards_table(cards)])


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
    layers = {**{card.lower(): name for card, name in CARDS.items()}, "layers": LAYERS}
    layers |= {part: f"transformer_{part}" for part in ("gpt", "gpt_te", "tokens")}
    stacks = {
        "head": ("linear_cross_entropy", HEAD_COLUMNS),
        "fused_loss": ("fused_loss", FUSED_LOSS_COLUMNS),
        "accelerate": ("accelerate", ACCELERATE_COLUMNS),
        "lora": ("lora", LORA_COLUMNS),
    }
    steps = [stacks_table(f"pretrain_1.3b_{card.lower()}", PRETRAIN_COLUMNS) for card in CARDS]
    parts = {
        "ops": f"{source}, bf16, cold L2:\n\n{table}",
        **{part: layers_table(_result(name)) for part, name in layers.items()},
        **{part: stacks_table(*table) for part, table in stacks.items()},
        "pretrain": "\n\n".join(steps),
        "host": stacks_table("host", {"host us": ".0f", "of torch": ".2f"}, ("layer", "stack")),
    }
    performance = PERFORMANCE.read_text()
    for part, text in parts.items():
        performance = replaced(performance, part, text)
    every = ops_table(results, every_shape=True)
    return {
        README: replaced(README.read_text(), "headline", headline()),
        PERFORMANCE: performance,
        RESULTS / "ops.md": f"# Memory-bound ops\n\n{source}. Cold L2.\n\n{every}\n",
    }


def draw_layer() -> None:
    from matplotlib import pyplot

    cards = {card: _rows_by_stack(_result(name)) for card, name in CARDS.items()}
    wanted = ["torch bf16", "torch bf16 compiled", *(
        f"{library} {precision}"
        for precision in ("bf16", "blockwise", "tensorwise", "delayed")
        for library in ("Transformer Engine", "torchao", "apex_te")
    )]  # fmt: skip
    rows = next(iter(cards.values()))
    stacks = [name for each in wanted for name in (each, f"{each} compiled") if name in rows]
    stacks = [*dict.fromkeys(stacks)]
    labels = [stack.replace("torch bf16", "PyTorch bf16") for stack in stacks]
    height = 0.8 / len(cards)
    figure, axes = pyplot.subplots(figsize=(9, 1.4 + 0.42 * len(stacks)))
    for index, (card, found) in enumerate(cards.items()):
        pair = (("tab:blue", "tab:gray"), ("tab:cyan", "silver"))[index]
        colors = [pair[0] if stack.startswith("apex_te") else pair[1] for stack in stacks]
        places = [number + index * height for number in range(len(stacks))]
        times = [found[stack]["ms sustained"] for stack in stacks]
        bars = axes.barh(places, times, height, color=colors)
        axes.bar_label(bars, [f"{time:.1f}  {card}" for time in times], padding=3, size=9)
    axes.set_yticks([number + height / 2 for number in range(len(stacks))], labels)
    axes.invert_yaxis()
    axes.set_xlabel("ms, forward and backward of a Llama-3-8B layer, 2 x 4096 tokens, sustained")
    axes.set_xlim(0, 1.15 * max(row["ms sustained"] for c in cards.values() for row in c.values()))
    source = source_line({card: _result(name) for card, name in CARDS.items()})
    axes.set_title(textwrap.fill(source, 100), size=9)
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
            shown = None if label in labelled else label
            axes.plot([ceiling] * 2, [top, place - 0.5], color="black", lw=1.5, label=shown)
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
    source = f"{info.get('gpu', '')}, torch {info['torch']}, {info['date']}"
    axes.set_title(f"{name}{shape}, bf16, {source}", size=10)
    figure.legend(fontsize=10, loc="outside lower center", ncols=5)
    figure.set_layout_engine("constrained")
    figure.savefig(RESULTS / f"{name}.png", dpi=100)
    pyplot.close(figure)


def main() -> None:
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
