"""What an installation builds beforehand, and what importing the builders costs."""

import importlib.util
import os
import sys

import pytest
from programs import captured
from tiny_op import CHECKOUT, TinyCuda

from op_builder import CPUOpBuilder, CUDAOpBuilder, all_builders, apex_names, get_builder
from op_builder.jit.errors import SettingError, UnknownOpError
from op_builder.jit.prebuild import install


class One(CPUOpBuilder):
    NAME = "one"


class Two(CUDAOpBuilder):
    NAME = "two"


BUILDERS = {"one": One(), "two": Two()}


def chosen(monkeypatch, variables, cuda=False):
    for name, value in variables.items():
        monkeypatch.setenv(f"APEX_BUILD_{name}", value)
    monkeypatch.setattr(install, "cuda_expected", lambda: cuda)
    return [f"{each.op}:{each.device}" for each in install.select(BUILDERS) if each.wanted]


@pytest.mark.parametrize(
    ("variables", "cuda", "expected"),
    [
        ({}, True, []),
        ({"CPP_OPS": "1"}, True, ["one:cpu", "two:cpu"]),
        ({"CUDA_OPS": "1"}, False, ["one:cpu", "two:cpu", "two:cuda"]),
        ({"CUDA_OPS": "0", "CPP_OPS": "off"}, True, []),
        ({"TWO": "1"}, False, ["two:cpu"]),
        ({"TWO": "1"}, True, ["two:cpu", "two:cuda"]),
        ({"ONE": "yes"}, True, ["one:cpu"]),
        ({"CUDA_OPS": "1", "TWO": "0"}, True, ["one:cpu"]),
        ({"CPP_OPS": "1", "ONE": "no", "TWO": "1"}, True, ["two:cpu", "two:cuda"]),
        ({"CPP_OPS": "1", "CUDA_OPS": "0", "TWO": ""}, True, ["one:cpu", "two:cpu"]),
    ],
)
def test_selection(variables, cuda, expected, monkeypatch):
    assert chosen(monkeypatch, variables, cuda) == expected


@pytest.mark.parametrize("name", ["ONE", "CPP_OPS", "CUDA_OPS"])
def test_selection_refuses_other_text(name, monkeypatch):
    with pytest.raises(SettingError, match=f"APEX_BUILD_{name} must be one of"):
        chosen(monkeypatch, {name: "maybe"})


def test_cuda_is_expected_with_an_arch_list(monkeypatch):
    monkeypatch.setattr(install, "visible_capabilities", list)
    monkeypatch.setattr(install, "torch_has_cuda", lambda: False)
    assert not install.cuda_expected()
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert install.cuda_expected()


def test_selection_says_why(monkeypatch):
    monkeypatch.setattr(install, "cuda_expected", lambda: False)

    def reasons(**variables):
        for name in ("CPP_OPS", "CUDA_OPS", "ONE", "TWO"):
            monkeypatch.setenv(f"APEX_BUILD_{name}", variables.get(name, ""))
        found = install.select(BUILDERS)
        return {f"{each.op}:{each.device}": each.reason for each in found if not each.wanted}

    assert set(reasons().values()) == {"not asked for"}
    assert reasons(CUDA_OPS="1", TWO="no") == dict.fromkeys(
        ("two:cpu", "two:cuda"), "APEX_BUILD_TWO=no"
    )
    assert reasons(CPP_OPS="1") == {"two:cuda": "APEX_BUILD_CPP_OPS asks for CPU libraries"}
    assert "no arch list is set, no GPU is visible" in reasons(TWO="1")["two:cuda"]
    assert [each.insisted for each in install.select(BUILDERS)] == [False, True, True]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "APEX_BUILD_TOW",
            "APEX_BUILD_TOW is set and belongs to no op; did you mean APEX_BUILD_TW",
        ),
        ("APEX_BUILD_TWO\u200b", r"APEX_BUILD_TWO\\u200b .*; did you mean APEX_BUILD_TWO\?"),
        ("APEX_BUILD_CPQ_OPS", r"did you mean APEX_BUILD_CPP_OPS\?"),
        ("APEX_BUILD_XYZXYZXYZXYZ", "there are: APEX_BUILD_CPP_OPS, .*APEX_BUILD_PYTHONS"),
    ],
)
def test_misspelt_variable_is_refused(name, told, monkeypatch):
    monkeypatch.setenv(name, "1")
    with pytest.raises(SettingError, match=told):
        install.check_install(BUILDERS)


@pytest.mark.parametrize(
    ("variables", "ops"),
    [
        ({"AMP_C": "1"}, ["multi_tensor"]),
        ({"FUSED_DENSE": "1"}, ["activation", "bias_gelu"]),
        ({"FUSED_LAYER_NORM": "1", "XENTROPY": "1"}, ["cross_entropy", "layer_norm", "rms_norm"]),
        ({"SCALED_UPPER_TRIANG_MASKED_SOFTMAX_CUDA": "1"}, ["scaled_softmax"]),
        ({"MLP": "1"}, []),  # served by PyTorch
        ({"AMP_C": "0", "BNP": "0"}, []),
        ({"AMP_C": "1", "MULTI_TENSOR": "0"}, []),
    ],
)
def test_variables_of_apex_ask_for_the_ops_that_serve_its_extensions(variables, ops, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(f"APEX_BUILD_{name}", value)
    monkeypatch.setattr(install, "cuda_expected", lambda: False)
    assert [each.op for each in install.check_install(all_builders()) if each.wanted] == ops


def test_every_variable_of_apex_builds_what_serves_its_extension(monkeypatch):
    """One that no module serves is an error, one that needs no library a note."""
    monkeypatch.setattr(install, "cuda_expected", lambda: False)
    builders = all_builders()
    for extension in apex_names.EXTENSIONS:
        variable = f"APEX_BUILD_{extension.variable}"
        monkeypatch.setenv(variable, "1")
        serving = apex_names.served_by(extension.module)
        if serving is None:
            told = f"{variable} asks for {extension.module}, an extension of apex .* not serve"
            with pytest.raises(SettingError, match=told):
                install.check_install(builders)
        else:
            choices = install.check_install(builders)
            assert {each.op for each in choices if each.wanted} == set(serving)
            needs_none = [f"{variable}: {extension.module} runs on PyTorch and needs no library"]
            assert install.notes(builders) == ([] if serving else needs_none)
        monkeypatch.delenv(variable)


def test_extensions_of_apex_are_those_of_the_document():
    """A module that is added to compatibility/apex belongs to one of apex's variables."""
    modules = {extension.module for extension in apex_names.EXTENSIONS}
    folder = CHECKOUT / "compatibility" / "apex"
    assert {path.stem for path in folder.glob("[!_]*.py")} <= modules
    document = (CHECKOUT / "docs" / "apex.md").read_text()
    assert [module for module in modules if f"| `{module}` |" not in document] == []


def test_variables_of_apex_that_are_not_applicable(monkeypatch):
    for name in ("BUILD_VERSION", "DESIRED_CUDA", "APEX_COMMIT", "USE_ROCM_AITER_ROPE_BACKEND"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("APEX_BUILD_STRING", "text")
    install.check_install(BUILDERS)
    found = install.notes(BUILDERS)
    assert len(found) == 5
    assert all(" is not applicable: " in note for note in found)
    assert any("BUILD_VERSION" in note and "APEX_BUILD_LABEL" in note for note in found)


def test_groups_of_apexs_builders(monkeypatch):
    """APEX_BUILD_CPU_OPS is APEX_BUILD_CPP_OPS in apex; a builder may have a group of its own."""

    class Grouped(CPUOpBuilder):
        NAME = "grouped"
        INCLUDE_FLAG = "APEX_BUILD_MY_OPS"

    builders = {**BUILDERS, "grouped": Grouped()}
    wanted = lambda: [  # noqa: E731
        f"{each.op}:{each.device}" for each in install.check_install(builders) if each.wanted
    ]
    monkeypatch.setenv("APEX_BUILD_MY_OPS", "1")
    assert wanted() == ["grouped:cpu"]
    monkeypatch.setenv("APEX_BUILD_CPU_OPS", "1")
    assert wanted() == ["grouped:cpu", "one:cpu", "two:cpu"]
    monkeypatch.setenv("APEX_BUILD_CPP_OPS", "0")
    assert wanted() == ["grouped:cpu"]


@pytest.mark.parametrize(("option", "variable"), [("--cpp_ext", "CPP"), ("--cuda_ext", "CUDA")])
def test_options_of_apex_are_not_ignored(option, variable):
    with pytest.raises(SettingError, match=f"{option} .* APEX_BUILD_{variable}_OPS=1 instead"):
        install.check_install(BUILDERS, ["setup.py", "bdist_wheel", option])


def test_prebuild_and_disabled_jit_contradict(monkeypatch):
    monkeypatch.setenv("APEX_TE_DISABLE_JIT", "1")
    assert not any(choice.wanted for choice in install.check_install(BUILDERS))
    monkeypatch.setenv("APEX_BUILD_ONE", "1")
    with pytest.raises(SettingError, match="APEX_TE_DISABLE_JIT"):
        install.check_install(BUILDERS)


def test_builder_classes_are_checked():
    assert (TinyCuda.BUILD_VAR, TinyCuda.INCLUDE_FLAG) == (
        "APEX_BUILD_TINY",
        "APEX_BUILD_CUDA_OPS",
    )
    with pytest.raises(TypeError, match="INCLUDE_FLAG must be the name of an environment"):
        type("Bad", (CPUOpBuilder,), {"NAME": "bad", "INCLUDE_FLAG": "a b"})
    with pytest.raises(TypeError, match="NAME must be an identifier, got 'a b'"):
        type("Bad", (CPUOpBuilder,), {"NAME": "a b"})


def test_every_op_has_a_builder_and_a_module():
    folders = {path.parent.name for path in (CHECKOUT / "csrc").glob("*/*_cpu.cpp")}
    assert folders <= set(all_builders())
    for name, builder in all_builders().items():
        spec = importlib.util.find_spec(f"apex_te.compatibility.{name}")
        assert spec is not None
        assert spec.origin == str(CHECKOUT / "op_builder" / "core.py")
        assert builder.functions()
        assert builder.is_compatible()
    with pytest.raises(UnknownOpError, match="there is no op 'nothing'; there are: "):
        get_builder("nothing")


def test_importing_the_builders_is_cheap():
    code = (
        "import sys; import op_builder; op_builder.all_builders()\n"
        "print([n for n in ('torch', 'pybind11', 'ninja', 'setuptools') if n in sys.modules])"
    )
    command = [sys.executable, "-S", "-B", "-c", code]
    done = captured(command, check=False, cwd=CHECKOUT)
    assert (done.stdout, done.stderr) == ("[]\n", "")


LOADER = """
import sys, types
names = ("subprocess.Popen", "os.posix_spawn", "os.fork")
import importlib.util
import torch
started = []
sys.addaudithook(lambda event, args: started.append(event) if event in names else None)
import apex_te
name = "apex_te.compatibility.cast_transpose"
spec = importlib.util.find_spec(name)
module = importlib.import_module(name)
assert type(module) is types.ModuleType, type(module)
assert module.__spec__.name == spec.name and module.__file__ == spec.origin
assert "cast_transpose" in dir(module) and "cast_transpose" in module.__all__
assert hasattr(module, "cast_transpose") and not hasattr(module, "nothing")
assert type(module.cast_transpose) is types.FunctionType
assert "scale: f32[1]" in module.cast_transpose.__doc__
assert importlib.reload(module) is module
assert started == [], started
try:
    module.cast_transpose()
except apex_te.op_builder.BuildError as error:
    print("disabled" if "APEX_TE_DISABLE_JIT" in str(error) else error)
"""


@pytest.mark.long
def test_loader_compiles_only_when_called(cache_dir):
    environment = {**os.environ, "APEX_TE_DISABLE_JIT": "1", "PYTHONPATH": str(CHECKOUT)}
    done = captured([sys.executable, "-B", "-c", LOADER], check=False, env=environment)
    assert (done.returncode, done.stdout) == (0, "disabled\n"), done.stderr
    assert list(cache_dir.iterdir()) == []
