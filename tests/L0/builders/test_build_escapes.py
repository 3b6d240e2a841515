"""Names and files from elsewhere in the commands' output: no escapes, no tracebacks."""

import json
import os

import pytest
from planted import plant

import op_builder
from op_builder import CPUOpBuilder
from op_builder.jit import cli
from op_builder.jit.find import cache, inventory
from op_builder.jit.text import printable

# clears the screen, sets the title, in 8 bits; deletes, turns the text around, breaks the line
HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b2J\x7f\u202eabc\u2066\r\n\x00"


class Hostile(CPUOpBuilder):
    """An op whose attributes a hostile package has chosen."""

    NAME = "tiny"


def shown(capfd, *words):
    """What a command prints, which must be printable lines."""
    cli.main(words)
    done = capfd.readouterr()
    text = done.out + done.err
    assert text
    unfit = [line for line in text.split("\n") if not line.isprintable()]
    assert not unfit, unfit
    return text


def test_escapes():
    """Printable text stays as it is, and each other character becomes its escape."""
    assert printable("a/b-c d, \u00e9 \u4e2d") == "a/b-c d, \u00e9 \u4e2d"
    for text in (HOSTILE, "\t", "\udcff", "\u200b", "\x85", "\u2028"):
        assert printable(text).isascii()
        assert printable(text).isprintable()
    assert printable("\x1b[31m") == "\\x1b[31m"


@pytest.fixture
def hostile(root, cache_dir, monkeypatch):
    """A builder, settings and an entry of the cache with hostile texts."""
    builder = Hostile(root)
    monkeypatch.setattr(op_builder, "user_builders", lambda: {HOSTILE: builder})
    plant(cache_dir, builder, compiler=HOSTILE, op=HOSTILE, flags=[HOSTILE], extras=[HOSTILE])
    plant(cache_dir, builder, key="0" * 64, machine=HOSTILE, sources={HOSTILE: HOSTILE})
    for name in ("APEX_TE_HOSTILE", "APEX_TE_CUDA_ARCH_LIST", "CXX", "MAX_JOBS"):
        monkeypatch.setenv(name, HOSTILE.replace("\0", ""))
    folder = cache_dir.parent / HOSTILE.replace("\0", "")
    cache_dir.rename(folder)
    monkeypatch.setenv("APEX_TE_CACHE_DIR", str(folder))
    return builder


def test_commands_print_no_escapes(hostile, monkeypatch, capfd):
    """Names of folders and ops, manifests and settings reach the terminal as escapes."""
    monkeypatch.setattr(op_builder, "get_builder", _getter(hostile))
    for words in (
        ["list"], ["list", "--json"], ["report"], ["report", "--paths"], ["why", "tiny"],
        ["why", HOSTILE], ["clean", HOSTILE], ["clean", "--stale", "--dry-run"], ["clean", "--all"],
    ):  # fmt: skip
        shown(capfd, *words)
    monkeypatch.setenv("APEX_TE_CACHE_DIR", "/proc/\x1b[2J")
    assert "\\x1b[2J" in shown(capfd, "list")


def _getter(builder):
    known = op_builder.get_builder

    def get(name):
        found = builder if name == "tiny" else known(name)
        assert isinstance(found, op_builder.OpBuilder)
        return found  # type: ignore[return-value]

    return get


WRONG = {
    "key": [5, None, ["x"]],
    "archs": [5, None, [5], {"a": 1}],
    "flags": [5, "-O3", [None]],
    "extras": [5, [5], {}],
    "sources": [5, [], {"a": 5}],
    "compiler": [5, [], {}],
    "seconds": ["1", [], 10**400, float("nan"), -1],
    "time": ["1", {}, 10**400, float("inf")],
    "size": ["1", None, 1e30],
    "op": [5, []],
}


def test_wrong_manifests_are_listed(root, cache_dir, monkeypatch, capfd):
    """A manifest whose entries have wrong types, or that nests deeply, is damaged, no traceback."""
    builder = Hostile(root)
    monkeypatch.setattr(op_builder, "user_builders", lambda: {"tiny": builder})
    monkeypatch.setattr(op_builder, "get_builder", _getter(builder))
    entry = plant(cache_dir, builder)
    manifest = entry / cache.MANIFEST
    right = json.loads(manifest.read_text())
    texts = [json.dumps({**right, name: value}) for name in WRONG for value in WRONG[name]]
    for text in (*texts, '{"a":' * 50_000, "5", "null", "[" * 100_000):
        manifest.write_text(text)
        (found,) = inventory.entries(cache.user_cache())
        assert "it is damaged" in found.problem, text[:300]
    for words in (["list", "tiny"], ["why", "tiny"], ["clean", "--stale", "--dry-run"]):
        assert "damaged" in shown(capfd, *words)


def test_undecodable_folder(tmp_path, monkeypatch, capfd):
    """A path that is not UTF-8 is printed, too."""
    folder = os.fsencode(tmp_path) + b"/\xff\x1b"
    os.mkdir(folder, 0o700)
    monkeypatch.setenv("APEX_TE_CACHE_DIR", os.fsdecode(folder))
    assert "\\udcff\\x1b" in shown(capfd, "list")
