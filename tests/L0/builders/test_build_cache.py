"""Which cache folders are used, and which are refused."""

import os
import shutil
import stat
import warnings
from pathlib import Path

import pytest
from tiny_op import Tiny

from op_builder.jit.errors import CacheError
from op_builder.jit.find import cache


def test_fresh_folder_is_private(root, tmp_path, monkeypatch):
    monkeypatch.setenv("APEX_TE_CACHE_DIR", str(tmp_path / "a" / "b"))
    previous = os.umask(0)
    try:
        opened = Tiny(root).open()
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    for path in Path(opened.path).parents[:2]:
        assert not stat.S_IMODE(path.stat().st_mode) & 0o022


def test_order_of_default_folders(tmp_path, monkeypatch):
    monkeypatch.delenv("APEX_TE_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    home = str(tmp_path / ".cache" / "apex_te")
    for value, expected in (("", home), ("relative", home), ("/x", "/x/apex_te")):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache.user_cache().path == expected
    monkeypatch.setenv("APEX_TE_CACHE_DIR", "/named")
    assert cache.user_cache().path == "/named"


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o755])
def test_open_mode_is_refused(root, cache_dir, forget, mode):
    Tiny(root).open()
    forget()
    cache_dir.chmod(mode)
    with pytest.raises(CacheError, match=r"APEX_TE_CACHE_DIR=.* cannot be used: .*mode"):
        Tiny(root).open()
    with pytest.raises(CacheError, match="cannot be used"):
        Tiny(root).find()


def test_linked_folder_is_refused(root, cache_dir, forget):
    Tiny(root).open()
    forget()
    real = cache_dir.with_name("real")
    cache_dir.rename(real)
    cache_dir.symlink_to(real)
    with pytest.raises(CacheError, match="must be a real folder"):
        Tiny(root).open()


def test_file_in_place_of_the_folder(root, cache_dir):
    cache_dir.rmdir()
    cache_dir.write_text("")
    with pytest.raises(CacheError, match=r"APEX_TE_CACHE_DIR=.* cannot be used"):
        Tiny(root).open()


def plant_link(library):
    library.rename(library.with_suffix(".real"))
    library.symlink_to(library.with_suffix(".real"))


def open_file(library):
    library.chmod(0o666)


def open_entry(library):
    library.parent.chmod(0o777)


def link_entry(library):
    library.parent.rename(library.parent.with_name("real"))
    library.parent.symlink_to(library.parent.with_name("real"))


def plant_fifo(library):
    library.unlink()
    os.mkfifo(library)


@pytest.mark.parametrize("plant", [plant_link, open_file, open_entry, link_entry, plant_fifo])
def test_planted_entry_is_refused(root, forget, plant):
    library = Path(Tiny(root).open().path)
    forget()
    plant(library)
    with pytest.raises(CacheError, match="must"):
        Tiny(root).find()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
def test_foreign_owner_is_refused(root, cache_dir, forget):
    library = Path(Tiny(root).open().path)
    forget()
    os.chown(library, 12345, 12345)
    with pytest.raises(CacheError, match="must belong to user 0, it belongs to 12345"):
        Tiny(root).open()
    os.chown(library, 0, 0)
    os.chown(cache_dir, 12345, 12345)
    with pytest.raises(CacheError, match="must belong to user 0"):
        Tiny(root).open()


def test_unsafe_extra_cache_is_skipped_with_one_warning(
    root, cache_dir, tmp_path, forget, monkeypatch
):
    Tiny(root).open()
    forget()
    extra = tmp_path / "extra"
    shutil.copytree(cache_dir, extra)
    extra.chmod(0o777)
    shutil.rmtree(cache_dir)
    cache_dir.mkdir(mode=0o700)
    monkeypatch.setenv("APEX_TE_CACHE_PATH", str(extra))
    with pytest.warns(RuntimeWarning, match="skipping a cache: .*extra must not be writable"):
        assert Tiny(root).find() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Tiny(root).find() is None


def test_unusable_default_falls_back_with_one_warning(root, tmp_path, forget, monkeypatch):
    home = tmp_path / "xdg"
    (home / "apex_te").mkdir(parents=True)
    (home / "apex_te").chmod(0o777)
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    monkeypatch.delenv("APEX_TE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    with pytest.warns(RuntimeWarning, match="default cache cannot be used") as caught:
        opened = Tiny(root).open()
    assert len(caught) == 1
    assert opened.path.startswith(str(runtime / "apex_te"))
    forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Tiny(root).open().path == opened.path


def test_fresh_folder_where_no_other_is_safe(root, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.delenv("APEX_TE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(shared))
    with pytest.warns(RuntimeWarning, match="default cache cannot be used"):
        opened = Tiny(root).open()
    folder = Path(opened.path).parents[2]
    assert folder.name.startswith("apex_te-")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(shared.iterdir()) == []
