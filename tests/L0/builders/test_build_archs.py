"""Parsing, choosing and covering CUDA archs; booleans of the environment."""

import pytest

from op_builder.jit import env
from op_builder.jit.backends import archs
from op_builder.jit.backends.archs import (
    Arch,
    choose,
    covered,
    own_arch,
    parse_arch_list,
    specialise,
)
from op_builder.jit.errors import ArchError, SettingError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8.0;9.0", ["8.0", "9.0"]),
        ("9.0, 8.0", ["8.0", "9.0"]),
        ("10.0 9.0a 8.6+PTX", ["8.6+PTX", "9.0a", "10.0"]),
        ("10.0f", ["10.0f"]),
        ("Hopper", ["9.0"]),
        ("hopper+PTX;Ampere", ["8.0", "8.6", "9.0+PTX"]),
        ("native", ["7.5", "9.0"]),
        ("8.0;8.0", ["8.0"]),
    ],
)
def test_parse(text, expected):
    assert [str(arch) for arch in parse_arch_list(text, lambda: [(9, 0), (7, 5)])] == expected


@pytest.mark.parametrize("text", ["9", "sm_90", "9.0b", "9.0+SASS", "Kepler", "-1.0"])
def test_parse_refuses(text):
    with pytest.raises(ArchError, match="example"):
        parse_arch_list(text)


def test_native_without_a_gpu():
    with pytest.raises(ArchError, match="needs a visible GPU"):
        parse_arch_list("native", list)


@pytest.mark.parametrize(
    ("arch", "device", "expected"),
    [
        ("8.0", (8, 0), True),
        ("8.0", (8, 9), True),
        ("8.9", (8, 0), False),
        ("8.0", (9, 0), False),
        ("9.0a", (9, 0), True),
        ("10.0a", (10, 3), False),
        ("10.0f", (10, 3), True),
        ("10.0f", (12, 0), False),
        ("8.0+PTX", (12, 0), True),
        ("9.0+PTX", (8, 9), False),
        ("9.0a+PTX", (10, 0), False),
    ],
)
def test_coverage(arch, device, expected):
    assert covered([arch], device) is expected


def test_gencode():
    assert Arch(9, 0, "a").gencode() == ["-gencode=arch=compute_90a,code=sm_90a"]
    assert Arch(10, 0, ptx=True).gencode() == [
        "-gencode=arch=compute_100,code=sm_100",
        "-gencode=arch=compute_100,code=compute_100",
    ]


def test_specific_files_turn_a_plain_arch_into_its_own():
    both = parse_arch_list("8.0 9.0")
    assert specialise(both, []) == both
    assert [str(arch) for arch in specialise(both, [(9, 0)])] == ["8.0", "9.0a"]
    with_ptx = specialise(parse_arch_list("9.0+PTX"), [(9, 0)])
    assert {str(arch) for arch in with_ptx} == {"9.0a", "9.0+PTX"}
    assert own_arch("csrc/op/op_sm90_cuda.cu") == Arch(9, 0, "a")
    assert own_arch("csrc/op/op_sm100_cuda.cu") == Arch(10, 0, "a")
    assert own_arch("csrc/op/op_cuda.cu") is None


def test_choice_order(monkeypatch):
    monkeypatch.setattr(archs, "visible_capabilities", list)
    assert choose("op", (8, 0), [], (9, 0)) == (Arch(9, 0),)
    with pytest.raises(ArchError, match=r'no GPU is visible.*APEX_TE_CUDA_ARCH_LIST="9.0"'):
        choose("op", (8, 0), [], None)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5 8.0")
    assert choose("op", (8, 0), [], None) == (Arch(8, 0),)
    monkeypatch.setenv("APEX_TE_CUDA_ARCH_LIST", "9.0")
    assert choose("op", (8, 0), [], None) == (Arch(9, 0),)
    with pytest.raises(ArchError, match=r"APEX_TE_CUDA_ARCH_LIST='9.0' does not cover .* 8.9"):
        choose("op", (8, 0), [], (8, 9))
    with pytest.raises(ArchError, match=r"needs a GPU of arch 8.0 or later, got 7.5"):
        choose("op", (8, 0), [], (7, 5))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", True),
        ("YES", True),
        ("on", True),
        ("true", True),
        ("0", False),
        ("no", False),
        ("OFF", False),
        ("False", False),
        ("", None),
        (" ", None),
    ],
)
def test_booleans(text, expected, monkeypatch):
    monkeypatch.setenv("APEX_BUILD_SOMETHING", text)
    assert env.boolean("APEX_BUILD_SOMETHING", None) is expected


@pytest.mark.parametrize("text", ["2", "y", "enabled", "-1"])
def test_no_boolean(text, monkeypatch):
    monkeypatch.setenv("APEX_TE_DISABLE_JIT", text)
    with pytest.raises(SettingError, match="APEX_TE_DISABLE_JIT must be one of"):
        env.jit_disabled()
