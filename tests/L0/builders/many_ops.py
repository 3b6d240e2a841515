"""Ops that compile in a moment, as many as a test wants, and a compiler that is watched."""

from tiny_op import write_op

from op_builder import CPUOpBuilder, CUDAOpBuilder


def make_op(root, name, body="", cuda=False):
    """An op of its own in a project."""
    write_op(root)
    folder = root / "csrc" / name
    folder.mkdir(exist_ok=True)
    code = f'extern "C" __attribute__((visibility("default"))) int {name}() {{ {body} return 1; }}'
    (folder / f"{name}_cpu.cpp").write_text(code)
    if cuda:
        (folder / f"{name}_cuda.cu").write_text(code)
    base = CUDAOpBuilder if cuda else CPUOpBuilder
    return type(name.title(), (base,), {"NAME": name})(root)


def watched_compiler(folder, sleep):
    """A compiler that notes when it starts and ends; (compiler, notes)."""
    notes, script = folder / "notes", folder / "watched-cxx"
    notes.write_text("")
    script.write_text(
        '#!/bin/sh\ncase " $* " in *" --version "*) echo watched; exit;;\n'
        '*" -E "*) exec g++ "$@";; esac\n'  # the question for what CPU it compiles
        f'echo + >> {notes}; sleep {sleep}\ng++ "$@"; code=$?\necho - >> {notes}\nexit $code\n'
    )
    script.chmod(0o755)
    return script, notes


def most_at_once(notes):
    """How many watched compilers ran at the same time."""
    running = most = 0
    for mark in notes.read_text().split():
        running += 1 if mark == "+" else -1
        most = max(most, running)
    return most
