"""The alias ``transformer_engine`` as files of an environment: writing, use by pip, and removal."""

import base64
import csv
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from apex_te.compatibility.aliases import TRANSFORMER_ENGINE as TE
from apex_te.compatibility.aliases import AliasError, commands
from apex_te.compatibility.aliases.files import (
    installed_in,
    on_path,
    purelib,
    remove_files,
    write_files,
)
from apex_te.op_builder.jit.cli import Command, main
from programs import captured

import apex_te

ROOT = Path(__file__).resolve().parents[3]
VERSION = f"2.14.0+apexte.{apex_te.__version__}"
COMMANDS = {
    "install-alias": Command("install", commands.add_install_arguments, commands.install),
    "remove-alias": Command("remove", commands.add_remove_arguments, commands.remove),
}


def all_files(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*")) if path.is_file()
    }  # fmt: skip


def python(*arguments, folder=None, program=sys.executable):
    """Runs Python and returns what it prints, after its exit status."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("APEX_TE_T")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PIP_DISABLE_PIP_VERSION_CHECK"] = environment["PIP_NO_INDEX"] = "1"
    environment["PYTHONPATH"] = f"{folder}:{ROOT}" if folder else ""
    done = captured([program, *arguments], check=False, env=environment)
    return f"{done.returncode} {done.stdout}{done.stderr}"


def test_record_has_the_hash_and_size_of_each_file(tmp_path):
    assert write_files(TE, tmp_path, VERSION) == "installed"
    info = f"transformer_engine-{VERSION}.dist-info"
    written = all_files(tmp_path)
    assert set(written) == {
        "transformer_engine/__init__.py", f"{info}/INSTALLER", f"{info}/METADATA",
        f"{info}/RECORD", f"{info}/WHEEL", f"{info}/top_level.txt",
    }  # fmt: skip
    rows = {row[0]: row[1:] for row in csv.reader(written[f"{info}/RECORD"].decode().splitlines())}
    assert rows.pop(f"{info}/RECORD") == ["", ""]
    assert set(rows) == set(written) - {f"{info}/RECORD"}
    for path, (digest, size) in rows.items():
        data = written[path]
        expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        assert (digest, size) == (f"sha256={expected}", str(len(data)))


def test_writing_again_keeps_the_files_and_another_version_renews_them(tmp_path):
    write_files(TE, tmp_path, VERSION)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert write_files(TE, tmp_path, VERSION) == "kept"
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    other = VERSION.replace("2.14.0", "2.6.0")
    assert write_files(TE, tmp_path, other) == "renewed"
    found = installed_in(TE, tmp_path)
    assert found is not None
    assert (found.version, found.made_for) == (other, apex_te.__version__)
    assert {path.name for path in tmp_path.iterdir()} == {
        "transformer_engine", f"transformer_engine-{other}.dist-info",
    }  # fmt: skip
    fresh = tmp_path / "fresh"
    write_files(TE, fresh, other)
    expected = all_files(fresh)
    assert {k: v for k, v in all_files(tmp_path).items() if not k.startswith("fresh")} == expected


def test_what_a_killed_process_left_is_mended(tmp_path):
    write_files(TE, tmp_path, VERSION)
    whole = all_files(tmp_path)
    info = tmp_path / f"transformer_engine-{VERSION}.dist-info"
    for lost in (info / "METADATA", info / "RECORD", tmp_path / "transformer_engine/__init__.py"):
        lost.unlink()
        assert write_files(TE, tmp_path, VERSION) == "renewed"
        assert all_files(tmp_path) == whole
    for path in info.iterdir():  # killed before the dist-info came
        path.unlink()
    info.rmdir()
    stale = tmp_path / ".apex_te_alias-abc"
    stale.mkdir()
    (stale / "file").touch()
    assert write_files(TE, tmp_path, VERSION) == "installed"
    assert all_files(tmp_path) == whole
    assert not stale.exists()


@pytest.mark.long
def test_removal_leaves_no_file_but_those_of_others(tmp_path):
    (tmp_path / "other_package").mkdir()
    (tmp_path / "other_package" / "__init__.py").touch()
    before = set(tmp_path.rglob("*"))
    write_files(TE, tmp_path, VERSION)
    assert python("-c", "import transformer_engine", folder=tmp_path) == "0 "
    assert list((tmp_path / "transformer_engine" / "__pycache__").glob("*.pyc"))
    assert len(remove_files(TE, tmp_path)) == 6
    assert set(tmp_path.rglob("*")) == before
    assert remove_files(TE, tmp_path) == []
    write_files(TE, tmp_path, VERSION)
    kept = tmp_path / "transformer_engine" / "mine.py"
    kept.touch()
    remove_files(TE, tmp_path)
    assert set(tmp_path.rglob("*")) == before | {kept, kept.parent}


def test_files_that_were_changed_are_removed_by_force_only(tmp_path):
    write_files(TE, tmp_path, VERSION)
    stub = tmp_path / "transformer_engine" / "__init__.py"
    stub.write_text("# another package's\n")
    before = all_files(tmp_path)
    with pytest.raises(AliasError, match=f"{stub} must be as apex_te wrote it.*--force"):
        remove_files(TE, tmp_path)
    assert all_files(tmp_path) == before
    assert len(remove_files(TE, tmp_path, force=True)) == 6
    assert not list(tmp_path.iterdir())


def test_a_record_names_no_other_files(tmp_path):
    victim = tmp_path / "victim.py"
    victim.touch()
    folder = tmp_path / "site"
    write_files(TE, folder, VERSION)
    record = folder / f"transformer_engine-{VERSION}.dist-info" / "RECORD"
    for path in ("../victim.py", str(victim), "transformer_engine/../../victim.py"):
        record.write_text(f"{path},,\n")
        with pytest.raises(AliasError, match="RECORD must list files of the alias"):
            remove_files(TE, folder, force=True)
    assert victim.exists()


BROKEN_RECORDS = {
    "a blank line": b"\n",
    "one column": b"transformer_engine/__init__.py\n",
    "four columns": b"transformer_engine/__init__.py,,,\n",
    "a NUL": b"\0,,\n",
    "no UTF-8": b"\xff,,\n",
    "a long field": b"x" * 200_000 + b",,\n",
    "a long file": b"transformer_engine/__init__.py,,\n" * 50_000,
    "a folder above": b"transformer_engine/..,,\n",
    "an open quote": b'"transformer_engine/__init__.py,,\n',
    "escapes": b"\x1b[2J/\x9b2J\xc2\x9b2J,,\n",
}


@pytest.mark.parametrize("content", BROKEN_RECORDS.values(), ids=BROKEN_RECORDS)
def test_a_broken_record_is_one_line_of_error(content, tmp_path, capsys):
    """A RECORD that is not one is refused in one short printable line, and nothing is removed."""
    folder = purelib(str(tmp_path))
    write_files(TE, folder, VERSION)
    (folder / f"transformer_engine-{VERSION}.dist-info" / "RECORD").write_bytes(content)
    before = all_files(folder)
    assert main(["remove-alias", "--force", "--prefix", str(tmp_path)], COMMANDS) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(r"apex_te: remove-alias: .*/RECORD must (list files of the|be a list)", line)
    assert len(line) < 800
    assert line.isprintable()
    assert all_files(folder) == before


def test_a_record_that_is_a_pipe_does_not_hang(tmp_path):
    write_files(TE, tmp_path, VERSION)
    info = tmp_path / f"transformer_engine-{VERSION}.dist-info"
    (info / "RECORD").unlink()
    os.mkfifo(info / "RECORD")
    with pytest.raises(AliasError, match=r"RECORD must be a list of files"):
        remove_files(TE, tmp_path, force=True)
    (info / "INSTALLER").unlink()
    os.mkfifo(info / "INSTALLER")
    assert remove_files(TE, tmp_path, force=True) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_an_empty_prefix_is_refused(command, tmp_path, monkeypatch, capsys):
    """It is what an unset variable gives, and names no environment."""
    monkeypatch.chdir(tmp_path)
    assert main([command, "--prefix", ""], COMMANDS) == 1
    wanted = f"apex_te: {command}: --prefix must be the folder of an environment, got ''\n"
    assert capsys.readouterr().err == wanted
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("part", ["lib", "site", "package", "cache", "info"])
def test_links_are_not_followed_out_of_the_prefix(command, part, tmp_path, capsys):
    """A link to another environment is refused, and what it leads to stays as it is."""
    prefix, other = tmp_path / "prefix", tmp_path / "other"
    folder, outside = purelib(str(prefix)), purelib(str(other))
    for place in (folder, outside):
        write_files(TE, place, VERSION)
        (place / "transformer_engine" / "__pycache__").mkdir()
        (place / "transformer_engine" / "__pycache__" / "__init__.cpython-311.pyc").touch()
    path = {
        "lib": prefix / "lib",
        "site": folder,
        "package": folder / "transformer_engine",
        "cache": folder / "transformer_engine" / "__pycache__",
        "info": folder / f"transformer_engine-{VERSION}.dist-info",
    }[part]
    path.rename(tmp_path / "away")
    path.symlink_to(other / path.relative_to(prefix))
    before = all_files(other)
    words = [command, "--prefix", str(prefix)]
    words += ["--version", "2.9.0"] if command == "install-alias" else ["--force"]
    assert main(words, COMMANDS) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(rf"apex_te: {command}: .* must be .*, got a link to {other}", line)
    assert all_files(other) == before


def test_a_prefix_that_is_a_link_is_an_environment(tmp_path, capsys):
    """The prefix itself, and links within it, such as lib64, may be links."""
    (tmp_path / "real" / "lib").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "lib64").symlink_to("lib")
    assert main(["install-alias", "--prefix", str(tmp_path / "link")], COMMANDS) == 0
    assert installed_in(TE, purelib(str(tmp_path / "real"))) is not None


def test_the_commands_print_no_escapes(tmp_path, capsys):
    """The prefix and the files in it may have any name."""
    prefix = tmp_path / "\x1b[2J\x9b"
    for words in (["install-alias"], ["install-alias"], ["remove-alias"], ["remove-alias"]):
        assert main([*words, "--prefix", str(prefix)], COMMANDS) == 0
    (prefix / "file").touch()
    assert main(["install-alias", "--prefix", str(prefix / "file")], COMMANDS) == 1
    done = capsys.readouterr()
    assert all(line.isprintable() for line in (done.out + done.err).splitlines())


def test_the_dist_info_of_pip_is_not_ours(tmp_path):
    info = tmp_path / "transformer_engine-2.9.0.dist-info"
    info.mkdir()
    (info / "INSTALLER").write_text("pip\n")
    assert installed_in(TE, tmp_path) is None
    assert remove_files(TE, tmp_path, force=True) == []
    assert (info / "INSTALLER").exists()


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(AliasError, match=r"install-alias: .*file/site must be a folder"):
        write_files(TE, tmp_path / "file" / "site", VERSION)


@pytest.mark.long
def test_the_stub_says_that_apex_te_is_gone_or_another(tmp_path):
    write_files(TE, tmp_path, VERSION)
    gone = "import sys; sys.modules['apex_te'] = None; import transformer_engine"
    output = python("-c", gone, folder=tmp_path)
    assert "ImportError: transformer_engine is an alias of apex_te, which cannot be" in output
    stub = tmp_path / "transformer_engine" / "__init__.py"
    mark = f'__apex_te_alias__ = "{apex_te.__version__}"'
    assert mark in stub.read_text()
    stub.write_text(stub.read_text().replace(mark, '__apex_te_alias__ = "0.0.10"'))
    output = python("-c", "import transformer_engine", folder=tmp_path)
    expected = f"the alias was written by apex_te 0.0.10, and apex_te is {apex_te.__version__} now"
    assert f"ImportError: transformer_engine: {expected}" in output
    body = "from apex_te.integrations import transformer_engine as s; s.install()"
    assert f"AliasError: install(): {expected}" in python("-c", body, folder=tmp_path)
    assert write_files(TE, tmp_path, VERSION) == "renewed"
    assert python("-c", "import transformer_engine", folder=tmp_path) == "0 "


def test_eight_processes_install_at_once(tmp_path):
    body = f"""
import sys, types
for name, folders in (
    ("apex_te", [{str(ROOT / "apex_te")!r}, {str(ROOT)!r}]),
):
    module = sys.modules[name] = types.ModuleType(name)  # no torch, to be quick
    module.__path__ = folders
from pathlib import Path
from apex_te.compatibility.aliases import TRANSFORMER_ENGINE as TE
from apex_te.compatibility.aliases.files import remove_files, write_files
print("ready", flush=True)
sys.stdin.readline()
folder = Path({str(tmp_path / "site")!r})
for _ in range(20):
    write_files(TE, folder, sys.argv[1])
"""
    versions = [VERSION, VERSION.replace("2.14.0", "2.6.0")]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", body, versions[i % 2]], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for i in range(8)
    ]  # fmt: skip
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    found = installed_in(TE, tmp_path / "site")
    assert found is not None
    assert found.version in versions
    fresh = tmp_path / "fresh"
    write_files(TE, fresh, found.version)
    assert all_files(tmp_path / "site") == all_files(fresh)
    remove_files(TE, tmp_path / "site")
    assert not list((tmp_path / "site").iterdir())


def test_the_commands_write_and_remove(tmp_path, monkeypatch, capsys):
    folder = purelib(str(tmp_path))

    def command(*words):
        status = main([*words, "--prefix", str(tmp_path)], COMMANDS)
        done = capsys.readouterr()
        return status, done.out + done.err

    assert command("install-alias") == (0, f"transformer_engine {VERSION}: installed in {folder}\n")
    assert command("install-alias")[1].endswith(f"kept in {folder}\n")
    status, text = command("install-alias", "--version", "2.9.0.dev1")
    assert (status, text[:32]) == (0, "transformer_engine 2.9.0.dev1+ap")
    monkeypatch.setenv("APEX_TE_TE_VERSION", "2.10.0")
    assert "transformer_engine 2.10.0+apexte" in command("install-alias")[1]
    status, text = command("install-alias", "--version", "2.9+mine")
    assert status == 1
    assert "level must be a version such as 2.14.0, got '2.9+mine'" in text
    monkeypatch.syspath_prepend(folder)
    assert on_path(TE) == installed_in(TE, folder)
    other = tmp_path / "other"
    assert main(["remove-alias", "--prefix", str(other)], COMMANDS) == 0
    assert capsys.readouterr().out == (
        f"transformer_engine: no alias in {purelib(str(other))}; there is one in {folder}\n"
    )
    (folder / "transformer_engine" / "__init__.py").write_text("")
    status, text = command("remove-alias")
    assert status == 1
    assert text.startswith("apex_te: remove-alias: ")
    assert command("remove-alias", "--force") == (
        0, f"transformer_engine: removed from {folder}\n",
    )  # fmt: skip
    assert not list(folder.iterdir())


@pytest.mark.long
def test_pip_lists_checks_and_uninstalls_the_alias(tmp_path):
    pytest.importorskip("ensurepip")
    venv = tmp_path / "venv"
    made = python("-m", "venv", "--system-site-packages", str(venv), folder=None)
    assert made == "0 "
    program = str(venv / "bin" / "python")
    folder = purelib(str(venv))
    info = folder / f"apex_te-{apex_te.__version__}.dist-info"  # as an editable install has it
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: apex_te\nVersion: {apex_te.__version__}\n"
    (info / "METADATA").write_text(metadata)
    before = all_files(folder)

    def pip(*words):
        return python("-m", "pip", *words, program=program)

    status = main(["install-alias", "--prefix", str(venv)], COMMANDS)
    assert status == 0
    shown = pip("show", "transformer-engine")
    assert f"Version: {VERSION}" in shown
    assert "Requires: apex-te" in shown.replace("apex_te", "apex-te")
    listed = [line.split() for line in pip("list").lower().replace("_", "-").splitlines()]
    assert ["transformer-engine", VERSION.lower()] in listed
    assert not [line for line in pip("check").splitlines() if "transformer" in line.lower()]
    for wanted in ("transformer-engine[pytorch]>=2.0", "transformer_engine==2.14.0"):
        answer = pip("install", wanted)
        assert answer.startswith("0 "), answer
        assert re.search("Requirement already satisfied: transformer[-_]engine", answer), answer
        assert "Successfully installed" not in answer
    assert pip("uninstall", "-y", "transformer-engine").startswith("0 ")
    assert all_files(folder) == before
    assert not [path for path in folder.iterdir() if "transformer" in path.name]
    main(["install-alias", "--prefix", str(venv)], COMMANDS)
    main(["remove-alias", "--prefix", str(venv)], COMMANDS)
    assert all_files(folder) == before
