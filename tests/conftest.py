"""Fixtures shared by all tests: the device under test and poisoned memory."""

import ctypes
import gc
import os
import sys
from collections import Counter, defaultdict
from pathlib import Path

# Before torch loads OpenMP. Two processes' threads on the same cores would mostly wait for each
# other, and by default they spin while they wait: six times the CPU time of the work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# As many threads as cores in all. Calls of an op with more of them have tests of their own.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    threads = len(os.sched_getaffinity(0)) // int(workers)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, threads)))
# glibc gives large blocks back to the system, and takes new pages for each tensor: a quarter of the
# CPU time of the ops' tests. Kept from here on (-3 is M_MMAP_THRESHOLD, -1 M_TRIM_THRESHOLD).
if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
    mallopt(-3, 1 << 28)
    mallopt(-1, 1 << 29)
# Before the first product on a GPU: PyTorch looks once, and refuses products while
# torch.use_deterministic_algorithms is on unless it has found this.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from covering import covering

ROOT = Path(__file__).resolve().parent.parent
GPU_MEMORY_OF_A_WORKER = 10 << 30  # bytes; 14 workers took 131 GiB
# Folders whose products run in pairs without a mark: ops branch by two values, L1 may take long.
IN_PAIRS = {"L1", "ops", "recipe", "quantizer"}
try:
    import apex_te  # noqa: F401
except ModuleNotFoundError:  # an uninstalled checkout
    sys.path.insert(0, str(ROOT))

if not torch.cuda.is_available():
    # Without a device, torch.manual_seed formats the stack of its call for each kind of device,
    # in milliseconds, and keeps it.
    torch.manual_seed = torch.default_generator.manual_seed


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="run all cases, also those left out")


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    """Removes the plugin that adds handlers to all loggers three times a test, in a millisecond."""
    config.pluginmanager.unregister(name="logging-plugin")


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc):
    """Leaves out cases on CUDA where there is no GPU, and long ones without ``--long``.

    Long are those marked ``long``, and those besides a choice of each test's cases, on each device:
    one in which every row of every ``parametrize`` and every parameter of a fixture occurs; all
    combinations of n of them with a mark ``cover(n)``, and of two in ``IN_PAIRS``. A node id asks
    for a case, whatever it is. A test of which nothing would be left keeps its cases here. Done
    before there are items: a hundred thousand take pytest a minute.
    """
    result = yield
    if any("::" in arg for arg in metafunc.config.args):
        return result
    calls = metafunc._calls
    if not torch.cuda.is_available():
        calls = [call for call in calls if not is_marked(call, "cuda")] or calls
    if not metafunc.config.getoption("--long"):
        calls = [call for call in calls if not is_marked(call, "long")] or calls
        mark = metafunc.definition.get_closest_marker("cover")
        in_pairs = not IN_PAIRS.isdisjoint(metafunc.definition.nodeid.split("/"))
        strength = mark.args[0] if mark else 2 if in_pairs else 1
        rows = {}  # of an argument: the first one of those that it comes with
        for parametrize in metafunc.definition.iter_markers("parametrize"):
            names = parametrize.args[0]
            names = names.replace(",", " ").split() if isinstance(names, str) else names
            rows.update(dict.fromkeys(names, names[0]))
        families = defaultdict(list)
        for call in calls:
            values = defaultdict(list)
            for name, value in call.params.items():
                values[rows.get(name, name)].append(id(value))
            device = values.pop("device", None)
            family = families[device and device[0]]
            family.append((call, [hash(tuple(row)) for row in values.values()]))
        calls = []
        for family in families.values():
            cases = [case for _, case in family]
            chosen = covering(cases, strength) if len(cases[0]) > strength else range(len(cases))
            calls += [family[i][0] for i in sorted(chosen)]
    metafunc._calls[:] = calls
    return result


def is_marked(call, name):
    return any(mark.name == name for mark in call.marks)


def pytest_collection_modifyitems(config, items):
    """Leaves out tests whose cases are all on CUDA where there is no GPU, or all long."""
    if any("::" in arg for arg in config.args):
        return
    left_out = set()
    if not torch.cuda.is_available():
        left_out.update(item for item in items if item.get_closest_marker("cuda"))
    if len(left_out) == len(items):
        left_out.clear()  # they are skipped, and the run ends well
    if not config.getoption("--long"):
        left_out.update(item for item in items if item.get_closest_marker("long"))
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Skips a test marked ``cuda``, before its fixtures are made, where there is no GPU."""
    if item.get_closest_marker("cuda") is not None and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU in this process")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Number of processes for ``-n auto``: the cores, or fewer if the GPU has too little memory."""
    if not torch.cuda.is_available():
        return None  # what pytest-xdist takes by itself
    memory = torch.cuda.get_device_properties(0).total_memory
    return max(1, min(len(os.sched_getaffinity(0)), memory // GPU_MEMORY_OF_A_WORKER))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collects tests without garbage collections, which would take a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.set_threshold(50_000, 20, 20)  # the compiler's tests make many objects that stay


def pytest_terminal_summary(terminalreporter):
    """Prints the counts of each folder if a run enters several, so that a missing one shows."""
    if not torch.cuda.is_available():
        terminalreporter.line("no GPU: cases on CUDA were left out")
    folders = defaultdict(Counter)
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            folder = report.nodeid.partition("::")[0].split("/")[:-1]
            folders["/".join(folder[:3])][outcome] += 1
    if len(folders) > 1:
        terminalreporter.section("folders")
        for folder, counts in sorted(folders.items()):
            text = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
            terminalreporter.line(f"{folder}: {text}")


@pytest.fixture(autouse=True, scope="module")
def _settled():
    """Keeps what outlives a test file, such as imported modules, out of garbage collections.

    Captures of CUDA graphs, the compiler and tests of lifetimes collect garbage, and would search
    the whole process for half a second each time.
    """
    gc.collect()
    gc.freeze()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # what a process keeps without need, the other ones lack


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    """Each device in turn; where there is no GPU, the run says that CUDA cases were left out."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(1234)


@pytest.fixture(autouse=True)
def _fp32_products():
    """Takes back the TF32 products that transformers and Accelerate turn on for good."""
    products = torch.backends.cuda.matmul
    before, product = torch.backends.fp32_precision, products.fp32_precision
    yield
    if torch.backends.fp32_precision != before:
        torch.backends.fp32_precision = before
    if products.fp32_precision != product:  # through the older interface, which this resets, too
        torch.set_float32_matmul_precision("highest")


@pytest.fixture
def poison(monkeypatch):
    """Fills what torch.empty returns with NaN bytes, so that unwritten outputs show."""
    # Imported under the patches below, Dynamo would take them for the functions to trace later.
    import torch._dynamo

    def fill(tensor):
        if tensor.numel():
            tensor.view(torch.uint8).fill_(0x7F) if tensor.element_size() == 1 else tensor.fill_(
                float("nan") if tensor.is_floating_point() else -1
            )
        return tensor

    empty, empty_like, new_empty = torch.empty, torch.empty_like, torch.Tensor.new_empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: fill(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: fill(empty_like(*a, **k)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: fill(new_empty(*a, **k)))
