"""What is found without a compiler, and what counts as another library."""

import ctypes
import os
import shutil
import time
from pathlib import Path

import pytest
from tiny_op import Tiny, TinyCuda, start, write_op

from op_builder.jit.backends import toolchain
from op_builder.jit.errors import JitDisabledError, ReentrantLoadError, UnknownOpError


def call(opened):
    return int(ctypes.CDLL(opened.proc_path).tiny())


def test_build_then_find(root, forget):
    builder = Tiny(root)
    assert builder.find() is None
    assert call(builder.open()) == 1
    forget()
    found = builder.find()
    assert found is not None
    assert found.kind == "cache"
    assert os.path.samestat(os.fstat(found.fd), os.stat(found.path))


def test_loaded_library_is_kept(root):
    builder = Tiny(root)
    assert builder.open() is builder.open()
    assert Tiny(root).open() is builder.open()


def test_relocation_is_a_hit(root, tmp_path):
    Tiny(root).open()
    moved = tmp_path / "elsewhere" / "deep"
    shutil.copytree(root, moved)
    os.utime(moved / "csrc/tiny/tiny_cpu.cpp", (1, 1))
    assert Tiny(moved).key("cpu") == Tiny(root).key("cpu")
    assert Tiny(moved).find() is not None


def test_header_change_is_a_miss(root, forget):
    builder = Tiny(root)
    assert call(builder.open()) == 1
    write_op(root, value=22)
    forget()
    assert builder.find() is None
    assert call(builder.open()) == 22


def test_key_follows_flags_not_environment(root, monkeypatch):
    class Flagged(Tiny):
        def cxx_args(self):
            return ["-DEXTRA"]

    plain = Tiny(root).key("cpu")
    assert Flagged(root).key("cpu") != plain
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    monkeypatch.setenv("CXX", "another-compiler")
    assert Tiny(root).key("cpu") == plain
    assert set(Tiny(root).compile_flags("cpu")) < set(Flagged(root).compile_flags("cpu"))


def test_system_folders_are_not_in_the_key(root):
    class Wheel(Tiny):
        def cxx_args(self):
            return ["-I/opt/a"]

    class OtherWheel(Tiny):
        def cxx_args(self):
            return ["-I/somewhere/b"]

    assert Wheel(root).key("cpu") == OtherWheel(root).key("cpu")


def test_hit_needs_no_path_and_no_writable_cache(root, cache_dir):
    Tiny(root).open()
    for folder, names, files in os.walk(cache_dir, topdown=False):
        for name in (*names, *files):
            os.chmod(os.path.join(folder, name), 0o500)
    os.chmod(cache_dir, 0o500)
    before = sorted(cache_dir.rglob("*"))
    code = f"""
        import ctypes
        started = []
        names = ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.fork", "os.system")
        sys.addaudithook(lambda event, args: started.append(event) if event in names else None)
        opened = Tiny({str(root)!r}).open()
        print(ctypes.CDLL(opened.proc_path).tiny(), started)
    """
    done = start(code, PATH="")
    out, err = done.communicate(timeout=60)
    assert (out.split(), err) == (["1", "[]"], "")
    assert sorted(cache_dir.rglob("*")) == before
    os.chmod(cache_dir, 0o700)


def test_lookup_is_fast(root):
    builder = Tiny(root)
    os.close(os.dup(builder.open().fd))
    times = []
    for _ in range(20):
        begun = time.thread_time()  # what a loaded machine does not lengthen
        found = builder.find()
        times.append(time.thread_time() - begun)
        assert found is not None
        os.close(found.fd)
    assert sorted(times)[len(times) // 2] < 1e-3


def test_extra_read_only_cache(root, cache_dir, tmp_path, monkeypatch):
    Tiny(root).open()
    extra = tmp_path / "extra"
    cache_dir.rename(extra)
    extra.chmod(0o755)
    monkeypatch.setenv("APEX_TE_CACHE_PATH", f"relative:/nowhere:{extra}")
    found = Tiny(root).find()
    assert found is not None
    assert found.kind == "extra"


def test_prebuilt_comes_first(root, cache_dir):
    Tiny(root).open()
    shutil.copytree(cache_dir, root / "prebuilt")
    os.chmod(root / "prebuilt", 0o755)
    found = Tiny(root).find()
    assert found is not None
    assert found.kind == "prebuilt"


def test_truncated_library_is_not_loaded(root, forget):
    builder = Tiny(root)
    path = Path(builder.open().path)
    path.write_bytes(path.read_bytes()[:1000])
    forget()
    with pytest.warns(RuntimeWarning, match="is damaged: 1000 bytes instead of"):
        assert builder.find() is None
    assert call(builder.open()) == 1


def test_broken_manifest_is_a_miss(root, forget):
    builder = Tiny(root)
    (Path(builder.open().path).parent / "manifest.json").write_text("{")
    forget()
    assert builder.find() is None
    assert builder.open().fd >= 0


def test_manifest(root):
    import hashlib
    import json

    opened = Tiny(root).open()
    manifest = json.loads((Path(opened.path).parent / "manifest.json").read_text())
    content = Path(opened.path).read_bytes()
    assert manifest["key"] == Tiny(root).key("cpu")
    assert manifest["sha256"] == hashlib.sha256(content).hexdigest()
    assert (manifest["op"], manifest["device"], manifest["size"]) == ("tiny", "cpu", len(content))
    assert manifest["compiler"] == toolchain.cxx_version()
    assert manifest["archs"] == []
    assert "-ffp-contract=off" in manifest["flags"]
    assert manifest["seconds"] > 0


def test_disabled_jit(root, monkeypatch, forget):
    monkeypatch.setenv("APEX_TE_DISABLE_JIT", "1")
    with pytest.raises(JitDisabledError, match=r"(?s)tiny.*APEX_BUILD_TINY=1 pip install \."):
        Tiny(root).open()
    monkeypatch.setenv("APEX_TE_DISABLE_JIT", "0")
    Tiny(root).open()
    forget()
    monkeypatch.setenv("APEX_TE_DISABLE_JIT", "1")
    assert call(Tiny(root).open()) == 1


def test_jit_load_builds_again(root, forget):
    from op_builder.jit.build.service import open_library

    first = Path(Tiny(root).open().path)
    inode = first.stat().st_ino
    second = open_library(Tiny(root), "cpu", force=True)
    assert Path(second.path) == first
    assert os.fstat(second.fd).st_ino != inode
    assert call(second) == 1


def test_reentrant_load(root):
    class Loop(Tiny):
        def cxx_args(self):
            self.open()
            return []

    with pytest.raises(ReentrantLoadError, match="asked for the same library again"):
        Loop(root).open()


def test_devices(root):
    with pytest.raises(UnknownOpError, match="device must be one of cpu, got 'cuda'"):
        Tiny(root).open("cuda")
    (root / "csrc/tiny/tiny_cuda.cu").unlink()
    with pytest.raises(UnknownOpError, match="no cuda source"):
        TinyCuda(root).open("cuda", (9, 0))


def test_functions_are_read_from_the_header(root):
    functions = Tiny(root).functions()
    assert functions == {
        "tiny": ("x: Tensor, y: float -> int", ("cpu", "cuda")),
        "tiny_cuda_only": ("x: Tensor", ("cuda",)),
    }
