"""Data, model and program of examples/pretrain, at sizes of seconds; its long runs are in L1."""

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("tokenizers")

from example_loader import EXAMPLES, parts

example = parts(
    "pretrain", "batches", "compare", "config", "generate", "logs", "model", "plot", "prepare",
    "schedule", "seeds", "train",
)  # fmt: skip
batches, config, model, prepare = example.batches, example.config, example.model, example.prepare
VOCABULARY, CONTEXT = 320, 32
TINY = [
    *("--model", "tiny", "--context", str(CONTEXT), "--vocabulary", str(VOCABULARY)),
    *("--batch", "4", "--device", "cpu", "--no-tensorboard", "--health-every", "0"),
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder of text files, with one that is no text and one that is there twice."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "inner").mkdir()
    for i in range(60):
        lines = (f"def function_{i}_{j}(x):\n    return x + {i * j}\n" for j in range(12))
        (folder / "inner" / f"file{i}.py").write_text("".join(lines))
    (folder / "again.md").write_text((folder / "inner" / "file7.py").read_text())
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "ignored.bin").write_bytes(b"text")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "skipped.py").write_text("skipped")
    return folder


@pytest.fixture(scope="module")
def folder(texts, tmp_path_factory):
    """The tokens of the texts, encoded in this process."""
    cache = tmp_path_factory.mktemp("tokens")
    return prepare.prepare([texts], cache, VOCABULARY, workers=1)


@pytest.fixture(scope="module")
def tokens(folder):
    return batches.Tokens(folder)


def documents(ids, tokenizer):
    ends = np.flatnonzero(ids == batches.END)
    assert ends[-1] == len(ids) - 1
    return [tokenizer.decode(part[part != 0].tolist()) for part in np.split(ids, ends[:-1] + 1)]


def test_tokens_are_the_texts(texts, tokens):
    tokenizer = tokens.tokenizer()
    train = documents(np.asarray(tokens.train), tokenizer)
    held_out = documents(np.asarray(tokens.held_out), tokenizer)
    found = {path.read_text() for path in texts.glob("inner/*.py")}
    assert len(found) == 60
    assert set(train) | set(held_out) == found
    assert len(train) + len(held_out) == 60
    assert not set(train) & set(held_out)
    assert tokens.meta["duplicate_files"] == 1
    assert tokens.meta["other_files"] == 1
    assert tokens.meta["train_tokens"] == len(tokens.train)
    assert tokens.train.dtype == np.uint16
    assert tokens.meta["vocabulary"] == VOCABULARY


def test_tokens_are_written_once(texts, folder):
    stamp = (folder / "train.bin").stat().st_mtime_ns
    assert prepare.prepare([texts], folder.parent, VOCABULARY) == folder
    assert (folder / "train.bin").stat().st_mtime_ns == stamp
    assert not list(folder.parent.glob("*.partial"))
    sources = prepare.find_sources([texts])
    assert prepare.key_of(sources, VOCABULARY) == folder.name
    assert prepare.key_of(sources, VOCABULARY + 1) != folder.name
    assert prepare.key_of(sources[1:], VOCABULARY) != folder.name


def test_the_digest_tells_equal_tokens(texts, tokens, tmp_path):
    copy = tmp_path / "texts"
    shutil.copytree(texts, copy, copy_function=shutil.copy)  # with other times

    def digest():
        made = prepare.prepare([copy], tmp_path / "tokens", VOCABULARY, workers=1)
        return json.loads((made / "meta.json").read_text())["digest"]

    assert digest() == tokens.meta["digest"]
    with open(next(copy.glob("inner/*.py")), "a") as file:
        file.write("x = 1\n")
    assert digest() != tokens.meta["digest"]


def test_sources_do_not_follow_the_alphabet_and_obey_a_limit(texts):
    sources = prepare.find_sources([texts])
    names = [source.name for source in sources]
    assert len(names) == 62
    assert names != sorted(names)
    size = sum(source.size for source in sources)
    limited = prepare.find_sources([texts], size // 2)
    assert size // 4 < sum(source.size for source in limited) <= size // 2
    one = texts / "ignored.bin"
    assert [source.path for source in prepare.find_sources([one])] == [str(one.resolve())]
    with pytest.raises(ValueError, match=r"--data must be .* that exist, got .*nowhere"):
        prepare.find_sources([texts / "nowhere"])


def test_default_folders_exist(monkeypatch, tmp_path):
    monkeypatch.setattr("site.getsitepackages", lambda: [str(tmp_path), str(tmp_path / "none")])
    found = prepare.default_folders()
    assert tmp_path in found
    assert all(folder.is_dir() for folder in found)


def test_a_single_file_is_an_error(texts, tmp_path):
    with pytest.raises(ValueError, match="--data must hold text for training and for evaluation"):
        prepare.prepare([texts / "again.md"], tmp_path, VOCABULARY, workers=1)


def test_order_sees_each_window_once_an_epoch():
    ids = np.arange(1, 1001, dtype=np.uint16)
    order = batches.Order(ids, 10, seed=3)
    assert order.windows == 99
    first, second = order.rows(0, 99), order.rows(99, 99)
    for epoch in (first, second):
        assert sorted(epoch[:, 0]) == [1 + 10 * i for i in range(99)]
        assert (epoch[:, 1:] == epoch[:, :-1] + 1).all()
    assert (first != second).any()
    again = batches.Order(ids, 10, seed=3)
    assert (again.rows(90, 20) == np.concatenate([first[90:], second[:11]])).all()
    assert (batches.Order(ids, 10, seed=4).rows(0, 99) != first).any()
    with pytest.raises(ValueError, match="tokens must be at least context \\+ 1 = 11, got 10"):
        batches.Order(ids[:10], 10, seed=3)


@pytest.mark.parametrize("packed", [False, True])
def test_ranks_and_microbatches_share_a_batch(tokens, packed):
    order = batches.Order(tokens.train, CONTEXT, 1)
    whole, targets = batches.TrainingBatches(order, 8, 8, 1, 0, packed).step(5)
    (whole,) = whole
    assert targets == (whole.targets != batches.IGNORED).sum()
    parted = [batches.TrainingBatches(order, 8, 2, 2, rank, packed).step(5) for rank in (0, 1)]
    assert all(count == targets for _, count in parted)
    own = [part for rank_parts, _ in parted for part in rank_parts]
    assert len(own) == 4
    dim = 1 if packed else 0
    assert torch.equal(torch.cat([part.inputs for part in own], dim), whole.inputs)
    assert torch.equal(torch.cat([part.targets for part in own], dim), whole.targets)


def test_packed_batches_tell_documents_apart():
    rows = np.array([[5, 6, 0, 7, 8, 9], [9, 0, 0, 4, 3, 0]])
    batch = batches.make_batch(rows, packed=True)
    assert batch.inputs.tolist() == [[5, 6, 0, 7, 8, 9, 0, 0, 4, 3]]
    assert batch.targets.tolist() == [[6, 0, -100, 8, 9, 0, -100, -100, 3, 0]]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 7, 8, 10]
    plain = batches.make_batch(rows, packed=False)
    assert plain.cu_seqlens is None
    assert plain.targets.tolist() == rows[:, 1:].tolist()


def test_held_out_batches_do_not_overlap():
    ids = np.arange(1, 301, dtype=np.uint16)
    found = batches.held_out_batches(ids, 10, 120, 5, packed=False)
    assert [len(batch.inputs) for batch in found] == [5, 5, 2]
    assert len(torch.cat([batch.inputs for batch in found]).unique()) == 120
    assert len(batches.held_out_batches(ids, 10, 10_000, 5, packed=False)) == 6


def llama(**options):
    made = model.Llama(config.SHAPES["tiny"], VOCABULARY, CONTEXT, **options)
    model.draw_weights(made, 1)
    return made


def drawn_batch(sequences=3):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, VOCABULARY, (sequences, CONTEXT + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loss_and_gradients(made, *batch):
    loss = made(*batch)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in made.parameters())]


@pytest.mark.parametrize("tied", [True, False])
def test_layers_of_torch_are_the_same_model(tied):
    ours, plain = llama(tied=tied), llama(tied=tied, layers="torch")
    shapes = [[p.shape for p in made.parameters()] for made in (ours, plain)]
    assert shapes[0] == shapes[1]
    expected = loss_and_gradients(plain, *drawn_batch())
    torch.testing.assert_close(
        loss_and_gradients(ours, *drawn_batch()), expected, rtol=1e-4, atol=1e-5
    )


def test_packed_documents_do_not_see_each_other():
    """A packed batch has the loss and gradients of its documents, one forward for each."""
    rows = torch.randint(1, VOCABULARY, (2, CONTEXT + 1)).numpy()
    for row, place in ((0, 4), (0, 17), (1, 0), (1, 30)):
        rows[row, place] = batches.END
    batch = batches.make_batch(rows, packed=True)
    assert len(batch.cu_seqlens) == 6 + 1
    packed, single = llama(packed=True), llama()
    found = loss_and_gradients(packed, *batch)
    total = torch.zeros(())
    for begin, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        own = slice(int(begin), int(end))
        loss = single(batch.inputs[:, own], batch.targets[:, own])
        loss.backward()
        total += loss.detach()
    expected = [total, *(parameter.grad for parameter in single.parameters())]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    # One document for all is another function: the test above can fail.
    whole = batch._replace(cu_seqlens=torch.tensor([0, 2 * CONTEXT], dtype=torch.int32))
    packed.context = 2 * CONTEXT
    packed.angles = torch.cat([packed.angles, packed.angles])
    assert not torch.allclose(packed(*whole), found[0], rtol=1e-4)


@pytest.mark.parametrize("packed", [False, True])
def test_generation_with_a_cache_is_that_without(packed):
    made = llama(packed=packed, tied=False)
    with torch.no_grad():  # sharper logits than those of a model that has learnt nothing
        made.tokens.weight.mul_(50)
        for parameter in made.blocks.parameters():
            parameter.mul_(5 if parameter.dim() > 1 else 1)
    prompt = [3, 14, 15, 92, 65]
    cached = example.generate.generate(made, prompt, 20)
    assert cached == example.generate.generate(made, prompt, 20, use_cache=False)
    assert len(set(cached)) > 3
    assert len(example.generate.generate(made, prompt, 100)) == CONTEXT - len(prompt)
    sampled = [
        example.generate.generate(made, prompt, 20, temperature=5.0, seed=seed)
        for seed in (0, 0, 1)
    ]
    assert sampled[0] == sampled[1] != sampled[2]
    assert made.training


def run(folder, out, *words):
    """Figures of a run, and its losses and norms by step."""
    figures = example.train.main([*TINY, *words, "--tokens", str(folder), "--out", str(out)])
    events = example.logs.read_log(out / "log.jsonl")
    steps = [event for event in events if event["kind"] == "step"]
    return figures, [(event["step"], event["loss"], event["grad_norm"]) for event in steps]


def test_a_run_learns_and_goes_on_to_the_bit(folder, tmp_path, capsys):
    words = ["--steps", "12", "--microbatch", "2", "--eval-every", "6", "--eval-tokens", "256"]
    words += ["--save-every", "5", "--keep", "1", "--sample", "4"]
    figures, losses = run(folder, tmp_path / "whole", *words)
    assert [step for step, _, _ in losses] == [*range(1, 13)]
    assert losses[-1][1] < losses[0][1] - 0.5
    assert figures["held_out_loss"] < losses[0][1] - 0.5
    assert "--- sample ---\ndef" in capsys.readouterr().out
    parted = tmp_path / "parted"
    run(folder, parted, *words, "--stop-at", "7")
    assert [path.name for path in sorted(parted.glob("step-*"))] == ["step-00000007"]
    moved = shutil.copytree(folder, tmp_path / "moved")
    again, resumed = run(moved, parted, *words, "--resume")
    assert resumed == losses
    assert again["held_out_loss"] == figures["held_out_loss"]
    kinds = [event["kind"] for event in example.logs.read_log(parted / "log.jsonl")]
    assert kinds.count("start") == 2
    assert kinds.count("end") == 1
    with pytest.raises(ValueError, match="seed must be 1 as in the saved run, got 2"):
        run(folder, parted, *words, "--resume", "--seed", "2")
    meta = json.loads((moved / "meta.json").read_text())
    (moved / "meta.json").write_text(json.dumps({**meta, "digest": "0"}))
    with pytest.raises(ValueError, match=rf"corpus must be '{meta['digest']}' as .*, got '0'"):
        run(moved, parted, *words, "--resume")


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
def test_a_branch_goes_on_from_another_run(folder, tmp_path, recipe):
    words = ["--steps", "8", "--eval-tokens", "0", "--sample", "0", "--save-every", "2"]
    _, whole = run(folder, tmp_path / "whole", *words, "--recipe", recipe)
    base, losses = tmp_path / "base", {}
    run(folder, base, *words, "--recipe", recipe, "--stop-at", "4")
    words += ["--branch-from", str(base)]
    for other in ("bf16", "delayed", "blockwise"):
        _, losses[other] = run(folder, tmp_path / other, *words, "--recipe", other)
        _, stopped = run(folder, tmp_path / "cut", *words, "--recipe", other, "--stop-at", "6")
        _, resumed = run(folder, tmp_path / "cut", *words, "--recipe", other, "--resume")
        assert [step for step, _, _ in stopped] == [5, 6]
        assert resumed == losses[other]
        shutil.rmtree(tmp_path / "cut")
    assert losses.pop(recipe) == whole[4:]
    for other in losses.values():  # same batches and weights, other roundings
        assert other != whole[4:]
        torch.testing.assert_close(other[0][1], whole[4][1], rtol=2e-3, atol=0)
        assert [step for step, _, _ in other] == [5, 6, 7, 8]
    _, seed = run(folder, tmp_path / "seed", *words, "--recipe", recipe, "--seed", "2")
    assert abs(seed[0][1] - whole[4][1]) > 1e-3  # another batch
    start = example.logs.read_log(tmp_path / "seed" / "log.jsonl")[0]
    assert (start["after"], start["branch_from"]) == (4, str(base))

    with pytest.raises(ValueError, match=r"steps must be 8 as in the saved run, got 9"):
        run(folder, tmp_path / "steps", *words, "--recipe", recipe, "--steps", "9")
    with pytest.raises(ValueError, match=r"--branch-from must be another folder than --out, got"):
        run(folder, base, *words, "--recipe", recipe, "--save-every", "0")
    with pytest.raises(ValueError, match=r"--branch-from must be a folder with checkpoints, got"):
        run(folder, tmp_path / "none", *words, "--branch-from", str(tmp_path / "nothing"))


def test_checkpoints_that_cannot_be_used(folder, tmp_path):
    """Another run's are not mixed with a new run's; a damaged one is named."""
    words = ["--steps", "2", "--eval-tokens", "0", "--sample", "0", "--save-every", "1"]
    run(folder, tmp_path, *words)
    with pytest.raises(ValueError, match=r"without --resume, got .*step-00000002"):
        run(folder, tmp_path, *words)
    (tmp_path / "step-of-mine").mkdir()  # no checkpoint
    state = tmp_path / "step-00000002" / "state.pt"
    state.write_bytes(state.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"step-00000002: state\.pt must be whole, got \w+ when"):
        run(folder, tmp_path, *words, "--resume")
    (tmp_path / "step-00000002" / "about.json").write_text("{")
    with pytest.raises(ValueError, match=r"step-00000002: about\.json must be whole"):
        run(folder, tmp_path, *words, "--resume")
    shutil.rmtree(state.parent)
    _, losses = run(folder, tmp_path, *words, "--resume")
    assert [step for step, _, _ in losses] == [1, 2]


def test_token_files_that_cannot_be_used(folder, tmp_path):
    with pytest.raises(ValueError, match=r"must be a folder that prepare.py has written, got File"):
        batches.Tokens(tmp_path / "none")
    copy = shutil.copytree(folder, tmp_path / "copy")
    data = (copy / "train.bin").read_bytes()
    (copy / "train.bin").write_bytes(data[:-2])
    with pytest.raises(ValueError, match=f"must have {len(data)} bytes, got {len(data) - 2}"):
        batches.Tokens(copy)
    (copy / "meta.json").write_text("{")
    with pytest.raises(ValueError, match=r"got JSONDecodeError when reading its meta.json"):
        batches.Tokens(copy)


@pytest.mark.parametrize("packed", [[], ["--packed"]])
def test_accumulated_microbatches_are_one_batch(folder, tmp_path, packed):
    words = ["--steps", "4", "--eval-tokens", "0", "--sample", "0", *packed]
    _, whole = run(folder, tmp_path / "whole", *words)
    _, parted = run(folder, tmp_path / "parted", *words, "--microbatch", "1")
    torch.testing.assert_close(torch.tensor(parted), torch.tensor(whole), rtol=1e-4, atol=1e-5)


def test_a_killed_run_leaves_a_log_that_is_read(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"kind":"start"}\n{"kind":"step","step":1}\n{"kind":"step","step":2}\n{"ki')
    assert len(example.logs.read_log(path)) == 3
    log = example.logs.RunLog(tmp_path, 1, False, None, {})
    log.write("step", step=2, loss=1.0)
    log.close()
    events = example.logs.read_log(path)
    assert [event.get("loss") for event in events] == [None, None, 1.0]


def test_schedule():
    rates = [example.schedule.learning_rate(step, 100, 10, 1e-3, 0.1) for step in range(101)]
    assert rates[0] == pytest.approx(1e-4)
    assert max(rates) == rates[9] == rates[10] == 1e-3
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(1e-4)


def test_curves_and_their_differences(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    plot = example.plot
    about = {"kind": "start", "layers": "apex_te", "batch": 2, "context": 8}
    for name, more in (("bf16", 0.0), ("delayed", 0.1)):
        events = [{**about, "recipe": name, "digest": name[:1]}]
        events += [{"kind": "step", "step": i, "loss": 5 - i / 10 + more} for i in range(1, 21)]
        events += [{"kind": "held_out", "step": i, "loss": 4.0 * (1 + more)} for i in (10, 20)]
        (tmp_path / name).mkdir()
        text = "\n".join(map(json.dumps, events))
        (tmp_path / name / "log.jsonl").write_text(text)
    curves = [plot.read_curve(tmp_path / name) for name in ("bf16", "delayed")]
    assert plot.smooth({1: 2.0, 2: 2.0}, 0.9) == pytest.approx({1: 2.0, 2: 2.0})
    gap = plot.difference(curves[1].held_out, curves[0].held_out)
    assert gap == pytest.approx({10: 10.0, 20: 10.0})
    assert "+10.000%" in plot.table(curves).splitlines()[2]
    runs, saved = [str(tmp_path / name) for name in ("bf16", "delayed")], tmp_path / "saved.json"
    plot.main([*runs, "--out", str(tmp_path / "a.png"), "--save", str(saved)])
    assert (tmp_path / "a.png").stat().st_size > 10_000
    assert "not trained on the tokens of bf16: delayed\n" in capsys.readouterr().out
    again = plot.read_curves(saved)
    assert [curve.name for curve in again] == ["bf16", "delayed"]
    for kept, curve in zip(again, curves, strict=True):
        assert kept.tokens == curve.tokens == 16
        assert kept.digest == curve.digest
        assert kept.train == pytest.approx(curve.train, abs=1e-5)
        assert kept.held_out == pytest.approx(curve.held_out, abs=1e-5)
    assert plot.table(again) == plot.table(curves)
    assert plot.table(again).splitlines()[2].count("%") == 3
    unknown = [curve._replace(digest=None) for curve in curves]
    assert (
        plot.other_data([curves[0], unknown[1]]) == plot.other_data([unknown[0], curves[1]]) == []
    )


def test_recipes_are_compared_over_seeds(tmp_path, capsys):
    plot, seeds = example.plot, example.seeds
    gaps = {"bf16": (0.0, 0.0, 0.0), "blockwise": (1.0, 2.0, -1.5)}
    for name, of_name in gaps.items():
        for seed, gap in enumerate(of_name):
            about = {"kind": "start", "layers": "apex_te", "recipe": name, "seed": seed}
            events = [{**about, "batch": 2, "context": 8, "digest": "d"}]
            events.append({"kind": "step", "step": 1, "loss": 5.0})
            loss = (4.0 + seed) * (1 + gap / 100)
            events += [{"kind": "held_out", "step": i, "loss": loss} for i in (10, 20)]
            (tmp_path / f"{name}-{seed}.jsonl").write_text("\n".join(map(json.dumps, events)))
    # The last seed of block scaling was not evaluated to its end.
    last = tmp_path / "blockwise-2.jsonl"
    last.write_text("\n".join(last.read_text().splitlines()[:-1]))
    logs = [tmp_path / f"{name}-{seed}.jsonl" for name in gaps for seed in range(3)]
    curves = [curve for log in logs for curve in plot.read_curves(log)]
    runs = seeds.by_seed(curves)
    (effect,) = seeds.effects(runs["blockwise"], runs["bf16"])
    deviation = np.std(gaps["blockwise"], ddof=1)
    assert effect[:2] == (10, 3)
    assert effect[2:] == pytest.approx((np.mean(gaps["blockwise"]), deviation / np.sqrt(3)))
    del runs["bf16"][2]  # a seed that the base lacks is left out
    halfway, end = seeds.effects(runs["blockwise"], runs["bf16"])
    assert (halfway.step, end.step, end.seeds) == (10, 20, 2)
    assert end[2:] == pytest.approx((1.5, 0.5))
    del runs["bf16"][1]
    (alone, _) = seeds.effects(runs["blockwise"], runs["bf16"])
    assert alone == (10, 1, pytest.approx(1.0), None)
    del runs["bf16"][0]
    assert seeds.effects(runs["blockwise"], runs["bf16"]) == []

    saved = tmp_path / "saved.json"
    seeds.main([*map(str, logs), "--save", str(saved)])
    printed = capsys.readouterr().out
    assert "+0.500%" in printed
    assert f"{100 * np.std([4, 5, 6], ddof=1) / 5:.3f}%" in printed  # of single runs
    seeds.main([str(saved)])
    assert capsys.readouterr().out == printed
    with pytest.raises(ValueError, match="got two of bf16, seed 0"):
        seeds.by_seed([curves[0], curves[0]])
    with pytest.raises(ValueError, match="got bf16 without one"):
        seeds.by_seed([curves[0]._replace(seed=None)])


def compared(monkeypatch, folder, out, *words, fails=""):
    """Runs compare.py with its runs in this process; returns its status and the runs it made."""
    made = []

    def begin(run, place):
        made.append((run.folder.name, place))
        code = f"import sys; sys.exit({int(run.folder.name == fails)})"
        if run.folder.name != fails:
            example.train.main(run.options)
        return subprocess.Popen([sys.executable, "-S", "-c", code])

    monkeypatch.setattr(example.compare, "start", begin)
    monkeypatch.setattr(example.compare.signal, "signal", lambda *args: None)
    own = ["--recipes", "bf16", "tensorwise", "--seeds", "3", "4", "--out", str(out)]
    words = [*TINY, "--tokens", str(folder), "--sample", "0", "--eval-tokens", "64", *words]
    return example.compare.main([*own, "--", *words]), made


@pytest.mark.long
def test_recipes_are_run_once_over_seeds(folder, tmp_path, capsys, monkeypatch):
    words = ("--steps", "2")
    status, made = compared(monkeypatch, folder, tmp_path, *words, fails="tensorwise-3")
    assert status == 1
    assert [name for name, _ in made] == ["bf16-3", "tensorwise-3", "bf16-4", "tensorwise-4"]
    printed = capsys.readouterr().out
    assert f"FAILED, see {tmp_path / 'tensorwise-3' / 'output.txt'}" in printed
    assert re.search(r"^bf16 +256 +2 ", printed, re.M)
    assert re.search(r"^tensorwise +256 +1 ", printed, re.M)
    # The runs that ended are kept.
    status, made = compared(monkeypatch, folder, tmp_path, *words)
    assert (status, [name for name, _ in made]) == (0, ["tensorwise-3"])
    printed = capsys.readouterr().out
    losses = [float(line.split()[3]) for line in printed.splitlines() if " 256 " in line]
    logs = [tmp_path / f"{recipe}-{seed}" / "log.jsonl" for recipe in ("bf16", "tensorwise")
            for seed in (3, 4)]  # fmt: skip
    ends = [example.logs.read_log(log)[-1]["held_out_loss"] for log in logs]
    assert losses == pytest.approx([np.mean(ends[:2]), np.mean(ends[2:])], abs=1e-4)
    message = rf"no runs of other options, got {tmp_path / 'bf16-3'} with lr 0.003 instead of 0.1"
    with pytest.raises(ValueError, match=message):
        compared(monkeypatch, folder, tmp_path, *words, "--lr", "0.1")
    with pytest.raises(SystemExit):
        compared(monkeypatch, folder, tmp_path, *words, "--seed", "1")
    assert "options of train.py must be without --recipe, --seed" in capsys.readouterr().err


def test_each_gpu_has_a_run_at_a_time(tmp_path, monkeypatch):
    compare = example.compare
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    slots = compare.places("auto")
    assert slots == [{"CUDA_VISIBLE_DEVICES": "4"}, {"CUDA_VISIBLE_DEVICES": "6"}]
    assert compare.places("cpu") == [{}]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in compare.places("cuda")] == ["0", "1"]

    busy, begun = set(), []

    class Process:
        returncode = 0

        def __init__(self, device):
            assert device not in busy
            busy.add(device)
            self.device, self.looks = device, 0

        def poll(self):
            self.looks += 1
            if self.looks > len(begun) % 3:
                busy.discard(self.device)
                return 0
            return None

    def begin(run, slot):
        begun.append(run)
        return Process(slot["CUDA_VISIBLE_DEVICES"])

    monkeypatch.setattr(compare, "POLL", 0)
    runs = [compare.Run(tmp_path / str(index), [], None) for index in range(7)]
    assert compare.work(runs, slots, begin) == []
    assert begun == runs
    assert not busy


def test_an_interrupted_comparison_ends_its_runs(tmp_path, monkeypatch):
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    processes = []

    def begin(run, slot):
        if processes:
            raise KeyboardInterrupt
        processes.append(subprocess.Popen(sleep))
        return processes[0]

    runs = [example.compare.Run(tmp_path / name, [], None) for name in "ab"]
    with pytest.raises(KeyboardInterrupt):
        example.compare.work(runs, [{}, {}], begin)
    assert processes[0].returncode == -15


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give one of --steps and --max-tokens"),
        (["--steps", "1", "--max-tokens", "9"], "give one of --steps and --max-tokens"),
        (["--steps", "1", "--batch", "0"], "--batch must be positive, got 0"),
        (["--steps", "1", "--sample", "-1"], "--sample must be 0 or more, got -1"),
        (["--steps", "1", "--clip", "-1"], "--clip must be 0 or more, got -1.0"),
        (["--steps", "1", "--lr", "nan"], "--lr must be positive, got nan"),
        (["--steps", "1", "--seed", "-1"], "--seed must be 0 or more, got -1"),
        (["--max-tokens", "-9"], "--max-tokens must be positive, got -9"),
        (["--steps", "1", "--fp8-params"], "--fp8-params needs a --recipe of FP8, got bf16"),
        (
            ["--steps", "1", "--layers", "torch", "--recipe", "delayed"],
            "--recipe must be bf16 with --layers torch, got delayed",
        ),
        (
            ["--steps", "1", "--layers", "torch", "--packed"],
            "--packed needs --layers apex_te, got torch",
        ),
        (["--steps", "1", "--layers", "torchao"], "--recipe must be tensorwise with --layers"),
        (["--steps", "1", "--graphs", "--packed"], "--graphs excludes --compile"),
        (["--steps", "1", "--save-small"], "--save-small needs a --recipe of FP8, got bf16"),
        (
            ["--steps", "1", "--recipe", "delayed", "--graphs", "--save-small"],
            "--graphs excludes --compile, --recompute, --packed, --main-grads and --save-small",
        ),
        (
            ["--steps", "1", "--recipe", "mxfp8", "--fp8-all-gather"],
            "--fp8-all-gather needs a --recipe other than mxfp8",
        ),
        (
            ["--steps", "1", "--recipe", "delayed", "--fp8-params", "--fp8-all-gather"],
            "--fp8-params excludes --fp8-all-gather",
        ),
    ],
)
def test_switches_that_do_not_fit(words, message, capsys):
    with pytest.raises(SystemExit):
        config.parse(words)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--microbatch", "3"], "--microbatch must divide the 4 sequences of a rank, got 3"),
        (["--tp", "2"], "--tp must divide the number of ranks \\(1\\), got 2"),
        (["--fp8-all-gather", "--recipe", "delayed"], "--fp8-all-gather needs data-parallel ranks"),
    ],
)
def test_sizes_that_do_not_fit(folder, tmp_path, words, message):
    with pytest.raises(ValueError, match=message):
        run(folder, tmp_path, "--steps", "1", *words)


def test_max_tokens_gives_steps():
    args = config.parse([*TINY, "--max-tokens", "1e4"])
    assert args.steps == 10_000 // (4 * CONTEXT)
    assert args.warmup == args.steps // 20
    assert args.lr == config.SHAPES["tiny"].lr


def test_shapes_have_the_sizes_that_they_are_called():
    for name, size in {"124m": 124e6, "350m": 350e6, "1.3b": 1.3e9}.items():
        shape = config.SHAPES[name]
        made = model.Llama(shape, 32768, 2048, tied=shape.tied, device="meta")
        count = sum(parameter.numel() for parameter in made.parameters())
        assert count == pytest.approx(size, rel=0.02)
        matrices = [p for n, p in made.named_parameters() if p.dim() > 1 and n != "tokens.weight"]
        products = sum(p.numel() for p in matrices) + shape.tied * made.tokens.weight.numel()
        attention = 6 * shape.layers * shape.dim * 2048
        assert shape.flops_per_token(32768, 2048) == 6 * products + attention


@pytest.mark.cover(0)
@pytest.mark.parametrize("words", [["--recipe", "tensorwise", "--main-grads"], [], ["--packed"]])
def test_experts_learn_and_go_on_to_the_bit(folder, tmp_path, words):
    words = ["--experts", "4", "--steps", "8", "--microbatch", "2", "--eval-tokens", "0", *words]
    words += ["--sample", "2", "--save-every", "4"]
    _, losses = run(folder, tmp_path / "whole", *words)
    assert losses[-1][1] < losses[0][1] - 0.3
    run(folder, tmp_path / "parted", *words, "--stop-at", "4")
    _, resumed = run(folder, tmp_path / "parted", *words, "--resume")
    assert resumed == losses
    with pytest.raises(ValueError, match="top_k must be 2 as in the saved run, got 1"):
        run(folder, tmp_path / "parted", *words, "--resume", "--top-k", "1")


def test_operations_of_experts():
    shape = config.SHAPES["tiny"]._replace(experts=4, top_k=2)
    made = model.Llama(shape, VOCABULARY, CONTEXT, device="meta")
    count = {n: p.numel() for n, p in made.named_parameters() if p.dim() > 1}
    products = sum(size / (2 if ".fc" in name else 1) for name, size in count.items())
    attention = 6 * shape.layers * shape.dim * CONTEXT
    assert shape.flops_per_token(VOCABULARY, CONTEXT) == 6 * products + attention


def test_modules_of_other_examples_stay(tmp_path):
    """The example's modules have names that others have, too."""
    assert EXAMPLES / "pretrain" != EXAMPLES / "char_gpt"
    found = sys.modules.get("train")
    assert found is None or found is not example.train


def test_devices_that_are_not_there(folder, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="--device must be auto, cpu or cuda, got tpu"):
        run(folder, tmp_path, "--steps", "1", "--device", "tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="must be auto or cpu without an NVIDIA GPU, got cuda:1"):
        run(folder, tmp_path, "--steps", "1", "--device", "cuda:1")
