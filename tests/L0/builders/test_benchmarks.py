"""The benchmarks' own arithmetic: energy of a span, kernel families, tables of layers."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch.autograd import DeviceType

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import harness
import kernel_families
import power
import run
import slower
import summary

CAP, THERMAL = 0x4, 0x20


def sample(time, joules=None, watts=None, mhz=None, reasons=None):
    return power.Sample(time, joules, watts, mhz, reasons)


def test_energy_counts_between_the_counters_moves():
    # 600 W; the counter moves every 0.1 s, while power says what was a second ago.
    span = [sample(i * 0.02, 60.0 * (i // 5), 100.0) for i in range(53)]
    assert power.mean_watts([span]) == pytest.approx(600.0)
    other = [sample(9 + i * 0.02, 40.0 * (i // 5), 100.0) for i in range(53)]
    assert power.mean_watts([span, other]) == pytest.approx(500.0)


def test_power_is_the_samples_mean_without_an_energy_counter():
    assert power.mean_watts([[sample(0, None, 500.0), sample(1, None, 700.0)]]) == 600.0
    still = [sample(0, 5.0, 500.0), sample(1, 5.0, 700.0)]
    assert power.mean_watts([still]) == 600.0
    assert power.mean_watts([[], [sample(0)]]) is None


def test_figures_name_reasons_and_leave_out_what_is_unknown():
    span = [sample(i, None, None, 1500 + i, CAP | (THERMAL if i == 0 else 0)) for i in range(4)]
    told = {"SM MHz": 1501, "throttle": "power cap 100%, thermal 25%"}
    assert power.figures([span]) == told
    assert power.figures([[sample(0, reasons=0)]]) == {"throttle": "none"}
    assert power.figures([]) == {}


def test_a_meter_reads_only_inside_its_spans():
    times = iter(range(10**6))

    def read():
        return sample(float(next(times)), mhz=1000)

    with power.PowerMeter(read) as meter:
        while len(meter.samples) < 5:
            pass
    assert meter.figures([power.Span(1.0, 3.0)]) == {"SM MHz": 1000}
    assert meter.figures([power.Span(-2.0, -1.0)]) == {}


def test_without_nvml_there_are_no_figures(monkeypatch, capsys):
    def missing():
        raise OSError("libnvidia-ml.so.1: no such file")

    monkeypatch.setattr(power, "Nvml", missing)
    with power.PowerMeter() as meter:
        pass
    assert meter.figures([power.Span(0.0, 1e12)]) == {}
    assert "no such file" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kernel", "family"),
    [
        ("nvjet_qqtst_256x128_128x4_2x1_v_bz_coopA_TNT", "products"),
        ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize64x128x128", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16>", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128", "attention"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true>", "attention"),
        ("void apex_te::cast_transpose_kernel<__nv_bfloat16>", "rest"),
        ("Memset (Device)", "rest"),
    ],
)
def test_kernels_have_families(kernel, family):
    assert kernel_families.family(kernel) == family
    assert kernel_families.by_family({kernel: 2.0})[family] == 2.0


def layers(**theirs):
    environment = {"gpu": "G", "driver": "1", "torch": "2", "date": "2026-01-01"}
    rows = [
        {"stack": "torch bf16", "ms": 20.0, "J": 14.0},
        {"stack": "apex_te bf16", "ms": 19.0, "J": 13.0, "ms sustained": 18.5},
        {"stack": "apex_te delayed", "ms": 12.0, "J": 8.0},
        {"stack": "apex_te delayed, CUDA graph", "ms": 11.5},
        {"stack": "Transformer Engine delayed", "ms": 12.5, **theirs},
    ]
    rows = [{"layer": "GPT", "measure": "GPU", **row} for row in rows]
    rows.append({**rows[2], "layer": "GPT, 2 x 31 tokens", "per token": 1.25})
    return {"environment": environment, "rows": rows}


def test_cards_stand_side_by_side_without_blank_cells():
    row = {"ms sustained": 12.0, "J": 8.0, "peak GiB above": 1.5}
    rows = [{"stack": stack, **row} for stack in summary.CARD_STACKS]
    cards = {"A": {"rows": rows}, "B": {"rows": [{**r, "ms sustained": 11.0} for r in rows]}}
    lines = summary.cards_table(cards).splitlines()
    assert lines[0] == "|Llama-3-8B layer|A ms|A J|B ms|B J|GiB|"
    assert lines[-1] == "|apex_te delayed|12.00|8.00|11.00|8.00|1.50|"
    assert len(lines) == 2 + len(summary.CARD_STACKS)


def test_both_cards_were_measured_at_one_commit_with_all_stacks():
    folder = Path(summary.__file__).parent / "results"
    found = [json.loads((folder / f"{name}.json").read_text()) for name in summary.CARDS.values()]
    assert len({data["environment"]["commit"] for data in found}) == 1
    for card, data in zip(summary.CARDS, found, strict=True):
        assert card in data["environment"]["gpu"]
        assert set(summary.CARD_STACKS) <= {row["stack"] for row in data["rows"]}


def test_kinds_of_figures_of_layers_have_tables_of_their_own():
    text = summary.layers_table(layers())
    assert text.startswith("GPU, G, driver 1, torch 2, 2026-01-01.\n\nTime:\n")
    lines = text.splitlines()
    assert "| layer | library | ms | ms sustained |" in lines
    assert "| GPT | apex_te bf16 | 19.00 | 18.50 |" in lines
    assert "| GPT | apex_te bf16 | 13.00 |" in lines
    assert "| GPT, 2 x 31 tokens | apex_te delayed | 1.250 |" in lines
    assert not any("measure" in line or "GiB" in line for line in lines)


def test_what_is_the_same_in_all_rows_is_no_column():
    data = layers()
    data["rows"] = [{**row, "throttle": "power cap"} for row in data["rows"][:-1]]
    lines = summary.layers_table(data).splitlines()
    assert lines[0].startswith("GPT, GPU, power cap, G, driver 1")
    assert "| torch bf16 | 14.00 |" in lines
    assert "| library | J |" in lines


def test_cases_of_all_ops_are_measured_by_name(monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match=r"names must be of .*, got rope_and_more"):
        run.main(["rope_and_more"])
    assert set(summary.load()) <= set(harness.CASES)
    rows = {"a": [{"us": 1.5}], "b": [{"us": 2.5}, {"us": 3.5}]}
    monkeypatch.setattr(harness, "CASES", {})
    monkeypatch.setattr(harness, "SUMS", {})
    monkeypatch.setattr(harness, "sm_clock_mhz", lambda: "1000")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("OUT", str(tmp_path))
    harness.case("op", ["a", "b"])(rows.__getitem__)
    harness.case("op", sums=lambda found: {"count": len(found)})(lambda: [{"us": 4.5}])
    run.main(["op"])
    told = json.loads((tmp_path / "op_cpu.json").read_text())
    assert [row["us"] for row in told["rows"]] == [1.5, 2.5, 3.5, 4.5]
    assert told["count"] == 4


def test_charts_fit_a_page(tmp_path, monkeypatch):
    image = pytest.importorskip("matplotlib.image", reason="matplotlib is not installed")
    monkeypatch.setattr(summary, "RESULTS", tmp_path)
    rows = [
        {"function": f"op {i}", "shape": "8x8", "us": 2.0, "TB/s": 3.0, "of copy": 0.9,
         "over torch": 1.5, "torch us": 3.0}
        for i in range(12)
    ]  # fmt: skip
    summary.draw("many", {"rows": rows, "environment": layers()["environment"]})
    assert 700 <= image.imread(tmp_path / "many.png").shape[1] <= 1000


def test_committed_charts_fit_a_page():
    image = pytest.importorskip("matplotlib.image", reason="matplotlib is not installed")
    drawn = [*summary.load(), summary.LAYERS]
    folder = Path(summary.__file__).parent / "results"
    for name in drawn:
        if (folder / f"{name}.png").exists():
            assert 700 <= image.imread(folder / f"{name}.png").shape[1] <= 1000, name


def test_events_are_told_apart_by_device():
    """The profiler makes an object of the device's type for each event."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as run:
        torch.ones(4).add(1)
    events = run.key_averages()
    assert all(kernel_families.is_on(event, DeviceType.CPU) for event in events)
    assert not any(kernel_families.is_on(event, DeviceType.CUDA) for event in events)
    assert len(events)


def test_what_got_slower_is_named():
    """By ratios: the fresh run's clock is half, of which nothing may be seen."""
    old = [
        {"function": "norm", "shape": "8x8", "us": 10.0, "over torch": 1.2, "of copy": 0.9},
        {"case": "causal", "contender": "torch", "ms": 2.0, "peak GiB above": 0.5},
        {"case": "causal", "contender": "apex_te", "ms": 1.0, "peak GiB above": 0.5},
    ]
    new = [{k: 2 * v if k in ("us", "ms") else v for k, v in row.items()} for row in old]
    assert list(slower.worse(old, new, 0.03)) == []
    new[0]["over torch"] = 1.1
    new[2]["ms"], new[2]["peak GiB above"] = 2.2, 0.6
    new.append({"function": "new", "over torch": 0.1})
    assert list(slower.worse(old, new, 0.03)) == [
        "function norm, shape 8x8: over torch 1.200 -> 1.100",
        "case causal, contender apex_te: peak GiB above 0.500 -> 0.600",
        "case causal, contender apex_te: ms to the first 0.500 -> 0.550",
    ]
    assert list(slower.worse(old, new, 0.25)) == []


def test_committed_results_are_not_slower_than_themselves(capsys):
    assert slower.main(["rms_norm", "transformer", "moe_block", "--against", "HEAD"]) == 0
    assert capsys.readouterr().out == "0 figures got worse by more than 3%\n"
    rows = json.loads((slower.RESULTS / "moe_block.json").read_text())["rows"]
    assert len(slower.figures(rows)) > 50
