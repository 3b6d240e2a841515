"""Odd surroundings of a process in which a build and a load must work all the same."""

import os
import subprocess
import textwrap

import pytest
from attacks import finish
from tiny_op import start

CALL = """
    import ctypes
    def value():
        return ctypes.CDLL(Tiny({root!r}).open().proc_path).tiny()
"""
BEFORE = {
    "umask that takes all": "os.umask(0o777)",
    "umask that takes nothing": "os.umask(0)",
    "folder that is gone": "os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')",
    "no standard streams": "os.close(0); os.close(2); sys.stdin = sys.stderr = None",
    "few descriptors": "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))",
    "blocked signals": "import signal; signal.pthread_sigmask(0, signal.valid_signals())",
    "ignored signals": """import signal
for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
    signal.signal(each, signal.SIG_IGN)""",
    "signals all the time": """import signal
signal.signal(signal.SIGALRM, lambda *args: None)
signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)""",
}


@pytest.mark.parametrize("name", BEFORE)
def test_process(root, tmp_path, name):
    """A build works whatever the process did before."""
    before = f"os.chdir({str(tmp_path)!r})\n{BEFORE[name]}\n"
    code = before + textwrap.dedent(CALL.format(root=str(root))) + "print(value())"
    assert finish(start(code)) == "1\n"


@pytest.mark.parametrize(
    "variables",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"HOME": ""},
        {"TMPDIR": "/nonexistent"},
        {"CXXFLAGS": "-std=c++98", "LDFLAGS": "-lnope", "CPATH": ":", "GCC_COLORS": "error=01"},
        {"NINJA_STATUS": "%e ", "MAKEFLAGS": "-j4 --jobserver-auth=3,4", "CLICOLOR_FORCE": "1"},
        {"PYTHONHOME": "", "PYTHONOPTIMIZE": "2", "PYTHONWARNINGS": "error"},
    ],
    ids=lambda variables: next(iter(variables)),
)
def test_environment(root, variables):
    """A build works whatever variables of other programs say."""
    code = CALL.format(root=str(root)) + "    print(value())"
    assert finish(start(code, **variables)) == "1\n"


@pytest.mark.parametrize("options", ["noexec,size=1m", "size=4k"])
def test_temporary_folder(root, tmp_path, options):
    """Compilers put nothing where TMPDIR is: it may be full, or noexec."""
    place = tmp_path / "tmpdir"
    place.mkdir()
    mount = f"mount -t tmpfs -o {options} none {place} && head -c 4096 /dev/zero > {place}/x"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    code = f"""
    import subprocess
    os.execvp("unshare", ["unshare", "-rm", "sh", "-c", {mount + ' && exec "$@"'!r}, "sh",
        sys.executable, "-c", os.environ.pop("CODE")])
    """
    inner = "from tiny_op import Tiny\n" + textwrap.dedent(CALL.format(root=str(root)))
    here = os.path.dirname(__file__)
    process = start(code, CODE=inner + "print(value())", TMPDIR=str(place), PYTHONPATH=here)
    assert finish(process) == "1\n"


def test_threads_and_signals(root):
    """Threads that load at once, while signals come, get one library."""
    code = textwrap.dedent(CALL.format(root=str(root))) + textwrap.dedent("""
        import signal
        from concurrent.futures import ThreadPoolExecutor
        signal.signal(signal.SIGALRM, lambda *args: None)
        signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
        with ThreadPoolExecutor(8) as pool:
            print(sum(pool.map(lambda each: value(), range(8))))
    """)
    assert finish(start(code)) == "8\n"
