"""Running the guides of docs: their files, changes and commands, section by section."""

import os
import re
import shutil
import subprocess
import sys

from tiny_op import CHECKOUT

from op_builder.jit.find import cache

# Before a fixture takes them away: a dispatcher that the machine has need not be built again.
SHARED_CACHE = cache.named_cache() or cache.default_cache()
LIMIT = 500  # seconds of one command
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PATH = re.compile(r"(?://|#) ([\w./]+/[\w.]+|[\w.]+\.toml)\n")
_COPIED = ("apex_te", "op_builder", "compatibility", "csrc", "scripts", "benchmarks")


def copy_checkout(target):
    """A checkout to generate ops in, without tests but with what they share."""
    ignore = shutil.ignore_patterns("__pycache__", "results")
    for name in _COPIED:
        shutil.copytree(CHECKOUT / name, target / name, ignore=ignore)
    (target / "tests" / "L0" / "ops").mkdir(parents=True)
    for path in (*(CHECKOUT / "tests").glob("*.py"), CHECKOUT / "pyproject.toml"):
        shutil.copy(path, target / path.relative_to(CHECKOUT))
    for name in (".clang-format", "README.md"):
        shutil.copy(CHECKOUT / name, target)
    return target


def environment(root, **more):
    """For commands that use the checkout ``root`` and leave everything else alone."""
    (root / "results").mkdir(exist_ok=True)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH")))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PATH": f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', '')}",
        "APEX_TE_CACHE_PATH": SHARED_CACHE,
        "OUT": str(root / "results"),
        **more,
    }


def run(command, folder, variables, text=""):
    """Output of a command that must succeed."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=variables,
        input=text,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def section(title, page="new_op.md"):
    """(language, text) of the code blocks below a heading."""
    text = (CHECKOUT / "docs" / page).read_text(encoding="utf-8")
    (part,) = [part for part in text.split("\n## ")[1:] if part.startswith(f"{title}\n")]
    return _BLOCK.findall(part)


def follow_commands(title, folder, variables, only):
    """Run those commands of a section that contain ``only``, in ``folder``; output by command."""
    commands = [text for language, text in section(title) if language == "bash"]
    chosen = [line for line in "".join(commands).splitlines() if only in line]
    return {line: run(["bash", "-c", line], folder, variables) for line in chosen}


def follow(title, folder, variables, without="\0", page="new_op.md"):
    """Do what a section says, in ``folder``, but commands with ``without``; output by command."""
    outputs = {}
    for language, text in section(title, page):
        path = _PATH.match(text)
        if language == "bash":
            for command in text.strip().splitlines():
                if without not in command:
                    outputs[command] = run(["bash", "-c", command], folder, variables)
        elif language == "diff":
            run(["git", "apply", "-"], folder, variables, text)
        elif path is not None:
            target = folder / path[1]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        else:
            assert language == "python", f"a {language} block must begin with its file's path"
            outputs[text] = run([sys.executable, "-c", text], folder, variables)
    return outputs
