"""The handler library hands XLA's buffers and attributes to an op as they are."""

import ctypes
import threading

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax.extend.core import Primitive  # noqa: E402
from jax.interpreters import mlir  # noqa: E402
from probe_op import note  # noqa: E402

from apex_te.jax import _library  # noqa: E402
from apex_te.jax._call import Stacked, call  # noqa: E402

S = jax.ShapeDtypeStruct
DTYPES = {
    "float32": (2, 32), "float16": (2, 16), "bfloat16": (4, 16), "float64": (2, 64),
    "float8_e4m3fn": (10, 8), "float8_e5m2": (12, 8), "float8_e8m0fnu": (14, 8),
    "float8_e4m3fnuz": (11, 8), "float8_e5m2fnuz": (13, 8), "float8_e4m3b11fnuz": (9, 8),
    "float8_e4m3": (8, 8), "float8_e3m4": (7, 8), "bool": (6, 8), "int8": (0, 8),
    "int16": (0, 16), "int32": (0, 32), "int64": (0, 64), "uint8": (1, 8), "uint16": (1, 16),
    "uint32": (1, 32), "uint64": (1, 64), "complex64": (5, 64), "complex128": (5, 128),
    "int4": (3, 8),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _wide():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("name", [n for n in DTYPES if not n.startswith("complex")])
def test_each_dtype_arrives_as_dlpack_has_it(name):
    x = jnp.ones((3, 2), name)
    first = -1 if name == "int4" else x.view(jnp.uint8).reshape(-1)[0] if name != "bool" else 1
    found = note(x=x)
    assert tuple(found[:5]) == (*DTYPES[name], 2, 3, 2)
    if name != "int4":
        assert found[5] == first


def test_scalars_arrive_in_full_width_with_and_without_x64():
    values = {"i": -(2**53) + 1, "f": 0.1, "b": True, "fs": (0.1, 1e300, -0.0)}
    expected = [-1, 0, -(2**53) + 1, 0.1, 1, 3, 0.1, 1e300, 0, 7]
    assert note(**values)[: len(expected)] == expected
    result = {"notes": S((64,), "float64")}
    with jax.enable_x64(False):
        lowered = jax.jit(
            lambda x: call("probe", "probe_note", results=result, x=x, list=[], **values)
        ).lower(jnp.ones(2))
    assert "f = 1.000000e-01 : f64" in lowered.as_text()


@pytest.mark.parametrize("fs", [(), (2.5,), (1.0, 1.0)])
def test_float_lists_of_any_length(fs):
    assert note(fs=fs)[5 : 6 + len(fs)] == [len(fs), *fs]


def test_tensors_of_rank_0_and_without_elements():
    assert note(x=jnp.float32(0))[:4] == [2, 32, 0, 0]
    assert note(x=jnp.zeros((0, 5), "int32"))[:6] == [0, 32, 2, 0, 5, -1]


def test_lists_and_stacks_of_tensors():
    rows = [jnp.full((2, 3), k, "uint8") for k in (7, 8, 9)]
    described = [v for k in (7, 8, 9) for v in (1, 8, 2, 2, 3, k)]
    assert note(list=rows)[: 2 + len(described)] == [-1, 3, *described]
    stacked = note(list=Stacked(jnp.stack(rows)))
    assert stacked[: 2 + len(described)] == [-1, 3, *described]
    scalars = note(list=Stacked(jnp.arange(2, dtype="uint8")))
    assert scalars[:10] == [-1, 2, 1, 8, 0, 0, 1, 8, 0, 1]


def test_lists_and_stacks_of_results():
    made = call("probe", "probe_number", results={"outs": [S((2,), "float32"), S((), "float32")]})
    assert [v.tolist() for v in made["outs"]] == [[0, 0], 1]
    made = call("probe", "probe_number", results={"outs": Stacked(S((3, 2), "float32"))})
    assert made["outs"].tolist() == [[0, 0], [1, 1], [2, 2]]


def test_an_operand_that_is_overwritten_is_copied_where_it_is_needed():
    x = jnp.arange(4, dtype="float32")

    def twice(x):
        made = call("probe", "probe_double", x=x, results={"mode": S((), "int32")})
        return made["x"], x + 0

    doubled, kept = jax.jit(twice)(x)
    assert doubled.tolist() == [0, 2, 4, 6]
    assert kept.tolist() == x.tolist() == [0, 1, 2, 3]
    run = jax.jit(
        lambda x: call("probe", "probe_double", x=x, results={"mode": S((), "int32")})["x"],
        donate_argnums=0,
    )
    donated = jax.block_until_ready(jax.jit(lambda x: x + 1)(x))  # no view of the host holds it
    address = donated.unsafe_buffer_pointer()
    assert run(donated).unsafe_buffer_pointer() == address


def test_subnormal_numbers_are_kept_and_the_threads_mode_restored():
    tiny = jnp.full(4, 1e-40, "float32")

    def program(x):
        made = call("probe", "probe_double", x=x, results={"mode": S((), "int32")})
        return made["x"], made["mode"], x * jnp.float32(0.5)

    doubled, mode, halved = jax.jit(program)(tiny)
    bits = np.asarray(tiny).view("int32")
    assert np.asarray(doubled).view("int32").tolist() == (2 * bits).tolist()
    assert int(mode) & 0x8040 == 0
    assert not np.asarray(halved).any()  # XLA's own thread still flushes


@pytest.mark.parametrize(
    ("kind", "code"), [(1, "INVALID_ARGUMENT"), (2, "INVALID_ARGUMENT"), (3, "UNIMPLEMENTED"),
                       (4, "INTERNAL")],
)  # fmt: skip
def test_errors_keep_their_kind_and_text(kind, code):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"{code}: probe_fail: x must be better"):
        call("probe", "probe_fail", x=jnp.ones(1), results={"out": S((), "float32")}, kind=kind)


def raw(buffers, outputs=1, function="probe_fail", attributes=None, operands=1):
    """Calls a handler with attributes of the test's own."""
    target = _library.bind("probe", function, "cpu")
    primitive = Primitive("raw")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *x: [jax.core.ShapedArray((2,), np.float32)] * outputs)
    given = {"kind": np.int64(0)} if attributes is None else attributes
    given = given | ({} if buffers is None else {"buffers": np.array(buffers, np.int64)})
    rule = jax.ffi.ffi_lowering(target)
    mlir.register_lowering(primitive, lambda context, *x: rule(context, *x, **given))
    return jax.jit(primitive.bind)(*[jnp.ones(2, "float32")] * operands)


@pytest.mark.parametrize(
    ("buffers", "attributes", "text"),
    [
        ([0, -2], None, ""),
        ([0], None, "buffers must have an entry for each tensor, got fewer"),
        ([0, -2, 0], None, "buffers must end with the last tensor, got more entries"),
        ([1, -2], None, "buffers must name operands and results of the call, got 1"),
        ([0, -3], None, "buffers must name operands and results of the call, got -3"),
        ([-1, -2], None, "buffers must name operands and results of the call, got -1"),
        (None, None, "attributes must have buffers, got kind"),
        ([0, -2], {}, "attributes must have kind, got none"),
        ([0, -2], {"kind": np.int64(0), "zeta": np.int64(0)}, "attributes must end here, got zeta"),
        ([0, -2], {"kind": np.float64(0)}, "kind must be s64, got another attribute"),
        (None, {"kind": np.int64(0), "buffers": np.array([0.0, 1.0])}, "buffers must be an array"),
    ],
)
def test_plans_and_attributes_are_checked(buffers, attributes, text):
    if not text:
        raw(buffers, attributes=attributes)
        return
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"probe_fail: {text}"):
        raw(buffers, attributes=attributes)


def test_a_stack_must_have_the_lists_length():
    with pytest.raises(jax.errors.JaxRuntimeError, match="stack as many tensors as the list has"):
        raw([-3, -2], function="probe_number", attributes={}, operands=0)


def test_four_threads_call_at_once():
    @jax.jit
    def program(x):
        for _ in range(50):
            x = call("probe", "probe_double", x=x, results={"mode": S((), "int32")})["x"]
            x = x * 0.5
        return x

    x = jnp.arange(64, dtype="float32")
    program(x)
    results = []
    threads = [threading.Thread(target=lambda: results.append(program(x))) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(results) == 4
    assert all(np.array_equal(r, x) for r in results)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("check", [True, False])
def test_four_devices_each_call_for_their_shard(kind, check):
    if len(jax.devices()) < 4:
        pytest.skip("jax was started before this folder's conftest")
    spec = jax.sharding.PartitionSpec("d")
    axis = getattr(jax.sharding.AxisType, kind)
    mesh = jax.make_mesh((4,), ("d",), axis_types=(axis,), devices=jax.devices()[:4])
    x = jax.device_put(jnp.arange(8, dtype="float32"), jax.NamedSharding(mesh, spec))

    def local(x):
        return call("probe", "probe_double", x=x, results={"mode": S((), "int32")})["x"]

    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check)
    assert jax.jit(mapped)(x).tolist() == [0, 2, 4, 6, 8, 10, 12, 14]


def test_512_functions_can_be_bound_and_no_more():
    from apex_te.op_builder import get_builder

    opened = get_builder("apex_te_jax").open()
    with open(opened.path, "rb") as file:  # a copy has slots of its own
        copy = file.read()
    import tempfile

    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(copy)
        file.flush()
        library = ctypes.CDLL(file.name)
    bind = library.apex_te_jax_bind
    bind.restype = ctypes.c_void_p
    error = ctypes.create_string_buffer(512)
    address = ctypes.cast(bind, ctypes.c_void_p)

    def handler(signature=b"x: Tensor, out: Tensor!"):
        return bind(b"f", signature, address, 1, 0, error, ctypes.c_size_t(512))

    assert handler(b"x: Frog") is None
    assert error.value == b"f: signature must be valid, got unknown type 'Frog'"
    assert handler(b", ".join(b"x%d: int" % k for k in range(25))) is None
    assert error.value == b"f: signature must have at most 24 parameters, got more"
    found = {handler() for _ in range(512)}
    assert len(found) == 512
    assert None not in found
    assert handler() is None
    assert error.value == b"f: at most 512 functions can be bound, got one more"


def test_a_library_of_another_abi_is_refused(monkeypatch):
    with pytest.raises(ImportError, match=r"apex_te_jax: .* must have ABI 2, got 1"):
        _library._load("apex_te_jax", "cpu", "apex_te_jax_abi", 2)
    with pytest.raises(ImportError, match=r"apex_te_jax: .* must have ABI 1, got None"):
        _library._load("apex_te_jax", "cpu", "apex_te_abi", 1)
