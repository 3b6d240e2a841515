"""apex's names as modules: real ones, found on request only, that compile nothing on a look."""

import importlib
import importlib.util
import inspect
import os
import pickle
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest
import torch
from apex_te.compatibility import apex
from programs import captured

ROOT = Path(__file__).resolve().parents[3]
SERVED = """
_apex_nccl_allocator: get_nccl_allocator
amp_C: multi_tensor_adagrad multi_tensor_adam multi_tensor_adam_capturable
  multi_tensor_adam_capturable_master multi_tensor_axpby multi_tensor_l2norm multi_tensor_l2norm_mp
  multi_tensor_l2norm_scale multi_tensor_lamb multi_tensor_lamb_mp multi_tensor_lamb_stage1_cuda
  multi_tensor_lamb_stage2_cuda multi_tensor_lars multi_tensor_novograd multi_tensor_scale
  multi_tensor_sgd multi_tensor_unscale_l2norm update_scale_hysteresis
apex_C: flatten unflatten
bnp: bn_addrelu_bwd_nhwc bn_addrelu_bwd_nhwc_occupancy bn_addrelu_fwd_eval_nhwc bn_addrelu_fwd_nhwc
  bn_addrelu_fwd_nhwc_occupancy bn_bwd_nhwc bn_bwd_nhwc_occupancy bn_fwd_eval_nhwc bn_fwd_nhwc
  bn_fwd_nhwc_occupancy close_remote_data get_buffer_size get_data_ptr get_remote_data_ptr
distributed_adam_cuda: multi_tensor_fused_adam multi_tensor_fused_adam_capturable
  multi_tensor_fused_adam_with_param_remainders
distributed_lamb_cuda: multi_tensor_lamb_compute_update_term multi_tensor_lamb_update_weights
fast_multihead_attn: additive_mask_softmax_dropout_backward additive_mask_softmax_dropout_forward
  encdec_multihead_attn_backward encdec_multihead_attn_forward
  encdec_multihead_attn_norm_add_backward encdec_multihead_attn_norm_add_forward
  mask_softmax_dropout_backward mask_softmax_dropout_forward self_attn_backward
  self_attn_bias_additive_mask_backward self_attn_bias_additive_mask_forward
  self_attn_bias_backward self_attn_bias_forward self_attn_forward self_attn_norm_add_backward
  self_attn_norm_add_forward
focal_loss_cuda: backward forward
fused_adam_cuda: adam adam_mt maybe_adam_undo maybe_cast maybe_cast_mt reversible_adam
  strided_check_finite
fused_bias_swiglu: backward forward
fused_conv_bias_relu: backward backward_cscale_cbias_relu backward_no_relu forward
  forward_cscale_cbias_relu forward_mask forward_no_relu
fused_dense_cuda: linear_bias_backward linear_bias_forward linear_gelu_linear_backward
  linear_gelu_linear_forward
fused_index_mul_2d: float_backward float_backward_backward float_forward half_backward
  half_backward_backward half_forward
fused_lamb_cuda: lamb
fused_layer_norm_cuda: backward backward_affine forward forward_affine forward_affine_mixed_dtypes
  rms_backward rms_backward_affine rms_forward rms_forward_affine rms_forward_affine_mixed_dtypes
fused_rotary_positional_embedding: backward backward_2d backward_cached backward_thd forward
  forward_2d forward_cached forward_thd
fused_weight_gradient_mlp_cuda: wgrad_gemm_accum_fp16 wgrad_gemm_accum_fp32
generic_scaled_masked_softmax_cuda: backward forward
mlp_cuda: backward forward
nccl_p2p_cuda: add_delay get_unique_nccl_id init_nccl_comm left_right_halo_exchange
  left_right_halo_exchange_inplace
peer_memory_cuda: allocate_raw blob_view_float blob_view_half blob_view_int free_raw
  get_raw_ipc_address get_raw_peers push_pull_halos_1d zero
scaled_masked_softmax_cuda: backward forward get_batch_per_block
scaled_softmax_cuda: backward forward
scaled_upper_triang_masked_softmax_cuda: backward forward
syncbn: batchnorm_backward batchnorm_backward_c_last batchnorm_forward batchnorm_forward_c_last
  reduce_bn reduce_bn_c_last relu_bw_c_last welford_mean_var welford_mean_var_c_last
  welford_parallel
transducer_joint_cuda: backward forward
transducer_loss_cuda: backward forward
xentropy_cuda: backward forward
"""
_LINES = [line.split(":") for line in SERVED.strip().replace("\n  ", " ").splitlines()]
EXPORTS = {name: set(functions.split()) for name, functions in _LINES}
_OTHERS = """

"""
NOT_SERVED = _OTHERS.split()


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    """The interpreter's import state as it was, and none of the names imported."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    apex.uninstall()
    found = {name: sys.modules.pop(name) for name in apex.NAMES if name in sys.modules}
    yield
    apex.uninstall()
    for name in apex.NAMES:  # also stand-ins of an installed apex
        sys.modules.pop(name, None)
    sys.modules.update(found)


def is_ours(spec):
    return spec is not None and Path(spec.origin).parent == Path(apex.__file__).parent.resolve()


def check_module(module, name):
    """Flaw by flaw what a stand-in object in sys.modules gets wrong."""
    assert isinstance(module, ModuleType)
    assert os.path.isfile(module.__file__)
    assert module.__spec__.name == module.__name__ == name
    assert importlib.util.find_spec(name) is module.__spec__
    assert module.__version__
    assert module.__doc__
    exports = EXPORTS[name.rpartition(".")[2]]
    assert set(module.__all__) == exports
    assert exports <= set(dir(module))
    for function in exports:
        assert callable(getattr(module, function))
        assert getattr(module, function).__doc__
    assert not hasattr(module, "no_such_function")
    before = {f: getattr(module, f) for f in exports}
    assert importlib.reload(module) is module
    assert sys.modules[name] is module
    assert set(before) <= set(dir(module))


@pytest.mark.parametrize("name", apex.NAMES)
def test_modules_in_the_package_are_real(name):
    check_module(getattr(apex, name), f"{apex.__name__}.{name}")


@pytest.mark.parametrize("name", apex.NAMES)
def test_modules_at_top_level_are_real(name):
    assert not is_ours(importlib.util.find_spec(name))
    apex.install()
    if not is_ours(importlib.util.find_spec(name)):
        pytest.skip(f"another {name} is installed, which is looked for first")
    module = importlib.import_module(name)
    source = getattr(apex, name)
    assert module is not source
    for function in EXPORTS[name]:
        assert getattr(module, function) is getattr(source, function)
    check_module(module, name)
    assert inspect.getsource(module) == Path(source.__file__).read_text()


def test_every_name_is_offered_and_documented():
    folder = Path(apex.__file__).parent
    files = {p.stem for p in folder.glob("*.py")}
    public = {name for name in files if not name.startswith("_")} | {"_apex_nccl_allocator"}
    assert public == set(apex.NAMES) == set(EXPORTS)
    assert {*apex.NAMES, "install", "uninstall"} <= set(dir(apex))
    document = (ROOT / "docs/apex.md").read_text()
    rows = [line.split("|")[1].strip() for line in document.splitlines() if line.startswith("| `")]
    listed = [row.strip("`") for row in rows]
    assert sorted(x for x in listed if x in {*apex.NAMES, *NOT_SERVED}) == sorted(
        [*apex.NAMES, *NOT_SERVED]
    )
    assert len({*apex.NAMES, *NOT_SERVED}) == 28


def test_functions_survive_pickle():
    apex.install(first=True)
    import amp_C

    assert pickle.loads(pickle.dumps(amp_C.multi_tensor_scale)) is amp_C.multi_tensor_scale


def write_real(folder, monkeypatch):
    """A folder with somebody else's amp_C, on the path."""
    (folder / "amp_C.py").write_text("real = True\n")
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()


def test_an_installed_apex_wins_unless_told_otherwise(tmp_path, monkeypatch):
    write_real(tmp_path, monkeypatch)
    apex.install()
    assert importlib.import_module("amp_C").real
    # What is imported stays what it is.
    apex.install(first=True)
    assert importlib.import_module("amp_C").real
    del sys.modules["amp_C"]
    assert importlib.import_module("amp_C").multi_tensor_scale
    assert sys.meta_path.count(sys.meta_path[0]) == 1
    apex.install()
    assert is_ours(importlib.util.find_spec("amp_C"))
    del sys.modules["amp_C"]
    assert importlib.import_module("amp_C").real


def test_uninstall_undoes_install(tmp_path, monkeypatch):
    before = list(sys.meta_path)
    apex.install(first=True)
    assert len(sys.meta_path) == len(before) + 3
    ours = importlib.import_module("fused_lamb_cuda")
    write_real(tmp_path, monkeypatch)
    apex.install()
    real = importlib.import_module("amp_C")
    apex.uninstall()
    assert sys.meta_path == before
    assert "fused_lamb_cuda" not in sys.modules
    assert sys.modules["amp_C"] is real
    assert not is_ours(importlib.util.find_spec("fused_lamb_cuda"))
    assert callable(ours.lamb)
    apex.uninstall()
    assert sys.meta_path == before


def test_only_the_names_are_found():
    apex.install(first=True)
    for name in ("apex", "amp_C.sub", "no_such_module"):
        spec = importlib.util.find_spec(name) if "." not in name else None
        assert not is_ours(spec)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("amp_C.sub")


def test_threads_that_import_and_call_together():
    """None of them sees a module without its functions."""
    apex.install(first=True)
    barrier, results = threading.Barrier(8), []

    def work():
        barrier.wait()
        try:
            module = importlib.import_module("amp_C")
            x, out = [torch.ones(3)], [torch.zeros(3)]
            flag = torch.zeros(1, dtype=torch.int32)
            module.multi_tensor_scale(2048 * 32, flag, [x, out], 2.0)
            results.append(out[0].sum().item())
        except BaseException as error:
            results.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [6.0] * 8


def run(body, tmp_path, **variables):
    """Standard output of a fresh process with an empty cache and an empty PATH."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("APEX_")}
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700, exist_ok=True)
    env.update(PYTHONPATH=os.pathsep.join(sys.path), PATH="", APEX_TE_CACHE_DIR=str(cache))
    env.update(variables)
    done = captured([sys.executable, "-c", body], check=False, env=env)
    return done.stdout + done.stderr, list(cache.iterdir())


LOOK = """
import importlib, importlib.util, sys
import apex_te
assert "apex_te.compatibility" not in sys.modules
def ours(name):
    spec = importlib.util.find_spec(name)
    return spec is not None and "compatibility" in str(spec.origin)
from apex_te.compatibility import apex
assert not any(map(ours, apex.NAMES)), "found by surprise"
apex.install(first=True)
import torch
from apex_te.op_builder import BuildError
for name in apex.NAMES:
    module = importlib.import_module(name)
    assert set(module.__all__) <= set(dir(module))
    assert all(hasattr(module, f) for f in module.__all__) and not hasattr(module, "nothing")
    importlib.reload(module)
assert not torch.cuda.is_initialized()
import amp_C
for _ in range(2):
    try:
        amp_C.multi_tensor_scale(1, torch.zeros(1, dtype=torch.int32), [[torch.ones(1)]] * 2, 1.0)
    except BuildError as error:
        print(type(error).__name__)
"""


def test_looking_compiles_nothing(tmp_path):
    """Not even with a compiler forbidden and no PATH; a call then fails as the op itself does."""
    output, cached = run(LOOK, tmp_path, APEX_TE_DISABLE_JIT="1")
    assert output.split() == ["JitDisabledError"] * 2
    assert cached == []


@pytest.mark.long
def test_environment_variable(tmp_path):
    body = "import apex_te, sys, importlib.util as u; s = u.find_spec('fused_lamb_cuda')\n"
    body += "import fused_lamb_cuda; print(s.origin, fused_lamb_cuda.lamb.__name__)"
    output, cached = run(body, tmp_path, APEX_TE_TOPLEVEL_COMPAT="1")
    assert output.endswith("compatibility/apex/fused_lamb_cuda.py lamb\n")
    assert cached == []
    output, _ = run("import apex_te", tmp_path, APEX_TE_TOPLEVEL_COMPAT="maybe")
    assert "SettingError: APEX_TE_TOPLEVEL_COMPAT must be one of 1/0" in output


@pytest.mark.parametrize("value", ["", "0", "false"])
def test_environment_variable_that_is_off(monkeypatch, value):
    monkeypatch.setenv("APEX_TE_TOPLEVEL_COMPAT", value)
    before = list(sys.meta_path)
    apex.install_from_environment()
    assert sys.meta_path == before
