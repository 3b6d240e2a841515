"""scripts/new_op.py: what it asks, writes, refuses and removes; the first tutorial."""

import io
import os
import shutil
import sys

import new_op
import pytest
import tutorial
from jit_templates import names, record, render, several
from programs import captured
from tiny_op import CHECKOUT

from op_builder.spec import parse_functions

EXTENSION = 'PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("twice", &twice); }\n'
ROOMS = {
    "apex_te/ops", "benchmarks/ops", "op_builder", "tests/L0/ops",
}  # fmt: skip


@pytest.fixture
def say(monkeypatch):
    return lambda text: monkeypatch.setattr("sys.stdin", io.StringIO(text))


def listing(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def refused(capsys, *arguments):
    """The message of a refusal, which writes nothing."""
    before = listing(new_op.ROOT)
    assert new_op.main(arguments) == 1
    assert listing(new_op.ROOT) == before
    err = capsys.readouterr().err
    assert err.startswith("new_op: ")
    return err


# What it writes -----------------------------------------------------------------------------------


@pytest.mark.long
def test_tutorial_from_nothing_to_a_benchmark(tmp_path):
    """The page's first section; what it does with nvcc is in tests/L1/builders."""
    checkout = tutorial.copy_checkout(tmp_path / "checkout")
    before = listing(checkout)
    outputs = tutorial.follow(
        "An op of the suite",
        checkout,
        tutorial.environment(checkout),
        without="scripts/check_cuda.py",
    )
    assert "passed" in outputs["python -m pytest tests/L0/ops/test_isru.py"]
    results = [path.name for path in (checkout / "results").iterdir()]
    assert results in (["isru.json"], ["isru_cpu.json"])
    shutil.rmtree(checkout / "results")
    assert listing(checkout) == before


def test_files_of_a_skeleton(tree):
    """One stem in the rooms of the tree, nothing at the top; only the device's files."""
    assert new_op.main(["my_op", "--cuda", "--yes"]) == 0
    assert new_op.main(["cpu_op", "--cpu", "--yes"]) == 0
    written = [path for path in listing(tree) if (tree / path).is_file()]
    assert {os.path.dirname(path) for path in written} == {
        *ROOMS, "csrc/my_op", "csrc/cpu_op", record.FOLDER,
    }  # fmt: skip
    assert all("my_op" in path or "cpu_op" in path for path in written)
    assert "csrc/my_op/my_op_cuda.cu" in written
    assert "csrc/cpu_op/cpu_op_cuda.cu" not in written
    assert "class MyOpBuilder(CUDAOpBuilder)" in (tree / "op_builder/my_op.py").read_text()
    assert "class CpuOpBuilder(CPUOpBuilder)" in (tree / "op_builder/cpu_op.py").read_text()
    for path in written:
        text = (tree / path).read_text()
        assert render.STEM not in text
        assert render.CLASS not in text
        assert "# if c" not in text


@pytest.mark.parametrize("cuda", [True, False])
@pytest.mark.parametrize("name", ["q", "Zeta2", "x" * names.LONGEST])
def test_generated_files_are_formatted(tmp_path, name, cuda):
    """Whatever the length of the name: ``make lint`` passes with a new op."""
    files = render.skeleton(name, cuda)
    sources = ["csrc/one.cpp", "csrc/two_with_a_long_name.cpp", "csrc/three.cpp"]
    exports = [f"{name}_{i}" for i in range(1 + 4 * cuda)]
    extension = render.extension(name, sources[: 1 + 2 * cuda], cuda, exports, ["csrc/include"])
    files |= {f"extension/{where}": text for where, text in extension.items()}
    for count, room in ((1, "few"), (several.MOST, "many")):
        long = [letter * (several.LONGEST - 1) for letter in "ios"]
        lists = [[f"{word}{i}" for i in range(count)] for word in long]
        arguments = several.Arguments(*lists) if count > 1 else several.Arguments(["a"], ["b"])
        made = several.files(name, arguments, cuda)
        files |= {
            f"{room}/{where}"
            if where[-3:] == ".py"
            else where.replace(name, f"{name}_{room}"): text
            for where, text in made.items()
        }
    for where, text in files.items():
        (tmp_path / where).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / where).write_text(text)
        if where.endswith(".py"):
            compile(text, where, "exec")
    (tmp_path / "apex_te" / "__init__.py").write_text("")  # whose package apex_te is
    shutil.copy(CHECKOUT / "pyproject.toml", tmp_path)
    shutil.copy(CHECKOUT / ".clang-format", tmp_path)
    native = [where for where in files if where.startswith("csrc/")]
    for tool, command in {
        "ruff": ["ruff", "check", "--no-cache", "."],
        "ruff ": ["ruff", "format", "--no-cache", "--check", "."],
        "clang-format": ["clang-format", "--dry-run", "-Werror", *native],
    }.items():
        if shutil.which(tool.strip()):
            captured(command, cwd=tmp_path)


# What it asks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "base"),
    [
        *((text, "CUDAOpBuilder") for text in ("", "Y", "y", "YES", "yes", " Yes ")),
        *((text, "CPUOpBuilder") for text in ("n", "N", "no", "NO")),
        ("perhaps\nno", "CPUOpBuilder"),
    ],
)
def test_answers(tree, say, answer, base):
    say(f"my_op\n{answer}\n\n")
    assert new_op.main([]) == 0
    assert base in (tree / "op_builder" / "my_op.py").read_text()


def test_questions_of_apex(tree, say, capsys):
    (tree / "csrc" / "old.cpp").write_text(EXTENSION)
    say("Y\n csrc/old.cpp ,\n")
    assert new_op.main(["old"]) == 0
    out = capsys.readouterr().out
    assert "Is this a CUDA module? (Y/n)" in out
    assert "Enter the sources (comma separated)" in out
    builder = (tree / "op_builder" / "old.py").read_text()
    assert 'BINDING = "pybind11"' in builder
    assert "CUDAOpBuilder" in builder
    assert 'return ["csrc/old.cpp"]' in builder


@pytest.mark.parametrize(
    ("arguments", "said", "instead"),
    [
        ([], "", "a name"),
        (["my_op"], "", "--cuda or --cpu, or --yes"),
        (["my_op", "--cuda"], "", "--sources or --yes"),
        (["my_op"], "y\n", "--sources or --yes"),
    ],
)
def test_no_answer(
    tree, say, capsys,
    arguments, said, instead
):  # fmt: skip
    say(said)
    assert f"stdin has ended: give {instead}" in refused(capsys, *arguments)


def test_without_a_stdin():
    script = str(CHECKOUT / "scripts" / "new_op.py")
    command = f"exec {sys.executable} {script} my_op --dry-run <&-"
    done = captured(["bash", "-c", command], check=False, cwd="/")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "stdin has ended: give --cuda or --cpu" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["my_op", "--cuda", "--cpu"], "not allowed with"),
        (["my_op", "--force"], "--force goes with --remove"),
        (["my_op", "--remove", "--cuda"], "--remove takes a name"),
    ],
)
def test_contradictions(tree, capsys, arguments, message):
    before = listing(tree)
    with pytest.raises(SystemExit) as stopped:
        new_op.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert listing(tree) == before


# What it refuses ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bad-name with space", "must be a letter, then letters, digits and _"),
        ("3d", "must be a letter"),
        ("_hidden", "must be a letter"),
        ("größe", "must be a letter"),
        ("../up", "must be a letter"),
        ("class", "must not be a word of Python"),
        ("print", "must not be a word of Python"),
        ("json", "is a Python module already"),
        ("torch", "is a Python module already"),
        ("optimizers", "is a Python module already: .*apex_te/optimizers"),
        ("rms_norm", "there is an op 'rms_norm' already: op_builder/builtin.py"),
        ("rmsNorm", "would both be RmsNormBuilder"),
        ("rms__norm", "would both be RmsNormBuilder"),
        ("RMS_Norm", "would both be APEX_BUILD_RMS_NORM"),
        ("cuda_ops", "APEX_BUILD_CUDA_OPS has a meaning already"),
        ("pythons", "APEX_BUILD_PYTHONS has a meaning already"),
        ("label", "APEX_BUILD_LABEL has a meaning already"),
        ("machine", "APEX_BUILD_MACHINE has a meaning already"),
        ("finder", "apex_te.compatibility.finder would not be the op's module"),
        ("apex", "apex_te.compatibility.apex would not be the op's module"),
        ("apex_te_core", "apex_te.compatibility.apex_te_core would not be the op's module"),
        ("scale", "is a name that the generated files use"),
        ("reference", "is a name that the generated files use"),
        ("relu_cuda", "must not end in a device"),
        ("x" * (names.LONGEST + 1), f"must have at most {names.LONGEST} characters"),
    ],
)
def test_names(tree, capsys, name, message):
    import re

    assert re.search(message, refused(capsys, name, "--cuda", "--yes"))


@pytest.mark.parametrize("where", [*render.skeleton("my_op", cuda=True), "op_builder/my_op/x"])
def test_never_overwrites(tree, capsys, where):
    (tree / where).parent.mkdir(parents=True, exist_ok=True)
    (tree / where).write_text("mine")
    assert "nothing is overwritten" in refused(capsys, "my_op", "--cuda", "--yes")
    assert (tree / where).read_text() == "mine"


def test_twice(tree, capsys):
    assert new_op.main(["my_op", "--cuda", "--yes"]) == 0
    assert "nothing is overwritten" in refused(capsys, "my_op", "--cuda", "--yes")


def test_sources_are_checked(tree, capsys):
    csrc = tree / "csrc"
    for name, text in {
        "good.cpp": EXTENSION,
        "kernel.cu": "",
        "none.cpp": '// PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("x", &x); }\n',
        "named.cpp": EXTENSION.replace("TORCH_EXTENSION_NAME", "other"),
        "macro.cpp": "PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { DEFINE_ALL(m) }",
        "good.cc": EXTENSION,
    }.items():
        (csrc / name).write_text(text)
    (tree / "outside.cpp").write_text(EXTENSION)

    def message(sources, *more):
        return refused(capsys, "my_ext", "--sources", sources, *more)

    assert "source csrc/lost.cpp is neither in" in message("csrc/good.cpp,csrc/lost.cpp")
    assert "must end in .cpp, .cu or .h, got csrc/good.cc" in message("csrc/good.cc")
    assert "must lie below" in message("outside.cpp")
    assert "csrc/good.cpp is given twice" in message("csrc/good.cpp,csrc/../csrc/good.cpp")
    assert "must have a PYBIND11_MODULE, 0 have" in message("csrc/none.cpp")
    assert "must have a PYBIND11_MODULE, 2 have" in message("csrc/good.cpp,csrc/named.cpp")
    assert "names the module other: call the op so" in message("csrc/named.cpp")
    assert "no exports can be read off the sources" in message("csrc/macro.cpp")
    assert "must be identifiers, got 'a b'" in message("csrc/macro.cpp", "--exports", "a b")
    assert "needs a CUDA module" in message("csrc/good.cpp,csrc/kernel.cu", "--cpu")
    assert "include folder nowhere" in message("csrc/good.cpp", "--include", "nowhere")
    exports = refused(capsys, "my_op", "--cpu", "--yes", "--exports", "a")
    assert "give its sources, too" in exports


def test_existing_extension(tree, monkeypatch):
    """Sources may be named from where the user is; the kernels make it a CUDA op."""
    (tree / "csrc" / "ext").mkdir()
    (tree / "csrc" / "ext" / "bind.cpp").write_text(EXTENSION)
    (tree / "csrc" / "ext" / "kernel.cu").write_text("")
    (tree / "csrc" / "ext" / "kernel.h").write_text("")  # named as apex's README does, not compiled
    before = {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()}
    monkeypatch.chdir(tree / "csrc")
    arguments = [
        "my_ext",
        "--sources",
        "ext/bind.cpp,ext/kernel.h,ext/kernel.cu",
        "--exports",
        "one,two",
    ]
    assert new_op.main([*arguments, "--include", "csrc/ext"]) == 0
    text = (tree / "op_builder" / "my_ext.py").read_text()
    assert "class MyExtBuilder(CUDAOpBuilder)" in text
    assert 'EXPORTS = ("one", "two")' in text
    assert 'return ["csrc/ext/bind.cpp", "csrc/ext/kernel.cu"]' in text
    assert 'return ["csrc/ext"]' in text
    assert new_op.main(["my_ext", "--remove"]) == 0
    assert {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()} == before


def test_folders_of_the_sources_are_include_folders(tree):
    """As apex's script has it; those that are given take their place."""
    for folder in ("ext", "ext/inner"):
        (tree / "csrc" / folder).mkdir()
    (tree / "csrc" / "ext" / "bind.cpp").write_text(EXTENSION)
    (tree / "csrc" / "ext" / "inner" / "kernel.h").write_text("")
    sources = "csrc/ext/bind.cpp,csrc/ext/inner/kernel.h"
    assert new_op.main(["my_ext", "--sources", sources]) == 0
    text = (tree / "op_builder" / "my_ext.py").read_text()
    assert 'return ["csrc/ext", "csrc/ext/inner"]' in text
    assert new_op.main(["my_ext", "--remove"]) == 0
    assert new_op.main(["my_ext", "--sources", sources, "--include", "csrc/ext"]) == 0
    assert 'return ["csrc/ext"]' in (tree / "op_builder" / "my_ext.py").read_text()


LISTS = ["--inputs", "x,g,r", "--outputs", "y,z", "--scalars", "alpha", "--yes"]


def test_op_of_several_tensors(tree):
    before = listing(tree)
    assert new_op.main(["my_op", *LISTS, "--cpu"]) == 0
    header = (tree / "csrc" / "my_op" / "my_op.h").read_text()
    assert parse_functions(header)["my_op_fwd"].signature == (
        "x: T[*r c], g: T[x], r: T[x], y: T[x]!, z: T[x]!, alpha: float"
    )
    assert parse_functions(header)["my_op_bwd"].signature == (
        "dy: T[x], dz: T[x], x: T[*r c], g: T[x], r: T[x],"
        " dx: T[x]!, dg: T[x]!, dr: T[x]!, alpha: float"
    )
    assert not (tree / "csrc" / "my_op" / "my_op_cuda.cu").exists()
    assert new_op.main(["my_op", "--remove"]) == 0
    assert listing(tree) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--inputs", "x"], "--outputs must be 1 to"),
        (["--outputs", "y"], "--inputs must be 1 to"),
        (["--inputs", ",".join("abcdefg"), "--outputs", "y"], "--inputs must be 1 to 6 names, got"),
        (["--inputs", "x,x", "--outputs", "y"], "'x' is the name of two arguments"),
        (["--inputs", "x,dx", "--outputs", "y"], "'dx' is the name of two arguments"),
        (["--inputs", "x", "--outputs", "ctx"], "'ctx' is a name that the generated files use"),
        (["--inputs", "x", "--outputs", "float"], "'float' is a name that the generated files"),
        (["--inputs", "a b", "--outputs", "y"], "must be an identifier, got 'a b'"),
        (["--inputs", "if", "--outputs", "y"], "must be an identifier, got 'if'"),
        (["--inputs", "x" * 11, "--outputs", "y"], "must have at most 9 characters"),
        (["--inputs", "x", "--outputs", "y", "--include", "csrc"], "not an extension"),
    ],
)
def test_lists_are_checked(tree, capsys, arguments, message):
    assert message in refused(capsys, "my_op", "--yes", *arguments)


@pytest.mark.long
def test_op_of_several_tensors_computes(tmp_path):
    checkout = tutorial.copy_checkout(tmp_path / "checkout")
    variables = tutorial.environment(checkout)
    for name, arguments in {
        "some_in": LISTS,
        "one_in": ["--inputs", "a", "--outputs", "b"],
    }.items():
        script = [sys.executable, "scripts/jit_module.py", name, *arguments, "--yes"]
        tutorial.run(script, checkout, variables)
    command = [sys.executable, "-m", "pytest", "-q", "tests/L0/ops"]
    assert " passed" in tutorial.run(command, checkout, variables)


# What it undoes -----------------------------------------------------------------------------------


def test_dry_run(tree, capsys):
    before = listing(tree)
    assert new_op.main(["my_op", "--cuda", "--yes", "--dry-run"]) == 0
    assert "csrc/my_op/my_op_cuda.cu" in capsys.readouterr().out
    assert listing(tree) == before
    assert new_op.main(["my_op", "--cuda", "--yes"]) == 0
    written = listing(tree)
    assert new_op.main(["my_op", "--remove", "--dry-run"]) == 0
    assert listing(tree) == written


def test_failure_leaves_nothing(tree, capsys):
    (tree / "tests" / "L0" / "ops").rmdir()
    (tree / "tests" / "L0" / "ops").write_text("a file where a folder is needed")
    assert "tests/L0/ops" in refused(capsys, "my_op", "--cuda", "--yes")


def test_removal(tree, capsys):
    before = listing(tree)
    assert "no op 'my_op' was generated" in refused(capsys, "my_op", "--remove")
    assert new_op.main(["my_op", "--cuda", "--yes"]) == 0
    assert new_op.main(["other", "--cpu", "--yes"]) == 0
    assert "generated: my_op, other" in refused(capsys, "third", "--remove")
    (tree / "csrc" / "my_op" / "my_op.h").write_text("changed")
    message = refused(capsys, "my_op", "--remove")
    assert "changed since it was generated: csrc/my_op/my_op.h; --force" in message
    (tree / "csrc" / "my_op" / "mine.h").write_text("")
    (tree / "op_builder" / "my_op.py").unlink()
    assert new_op.main(["my_op", "--remove", "--force"]) == 0
    assert "left: csrc/my_op, which holds files" in capsys.readouterr().out
    assert new_op.main(["other", "--remove"]) == 0
    assert listing(tree) == sorted([*before, "csrc/my_op", "csrc/my_op/mine.h"])


@pytest.mark.parametrize("stem", ["my_op", "my_op_cpu"])
def test_removal_takes_the_results_of_the_benchmark_along(tree, capsys, stem):
    assert new_op.main(["my_op", "--cpu", "--yes"]) == 0
    results = tree / "benchmarks" / "results"
    results.mkdir(parents=True, exist_ok=True)
    for name in (stem, "my_op_2"):
        (results / f"{name}.json").write_text("{}")
    assert new_op.main(["my_op", "--remove", "--dry-run"]) == 0
    assert f"  benchmarks/results/{stem}.json\n" in capsys.readouterr().out
    assert (results / f"{stem}.json").exists()
    assert new_op.main(["my_op", "--remove"]) == 0
    assert f"  benchmarks/results/{stem}.json\n" in capsys.readouterr().out
    assert [path.name for path in results.iterdir()] == ["my_op_2.json"]


def test_apex_name_of_the_script(tree):
    script = str(CHECKOUT / "scripts" / "jit_module.py")
    command = [sys.executable, script, "my_op", "--yes", "--dry-run"]
    done = captured(command)
    assert "  op_builder/my_op.py\n" in done.stdout


def test_record_cannot_lead_outside(tree, capsys):
    assert new_op.main(["my_op", "--cpu", "--yes"]) == 0
    path = tree / record.FOLDER / "my_op.json"
    victim = tree.parent / "victim"
    victim.write_text("")
    path.write_text(path.read_text().replace("op_builder/my_op.py", "../victim"))
    assert "outside of" in refused(capsys, "my_op", "--remove", "--force")
    path.write_text("{")
    assert "cannot be read" in refused(capsys, "my_op", "--remove", "--force")
    assert victim.exists()
