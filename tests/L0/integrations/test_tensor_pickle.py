"""Reading pickles without unpickling: hostile blobs raise and run nothing; plain ones come back."""

import io
import pickle
import sys
import warnings
import zipfile

import pytest
import torch
from te_blobs import as_uint8, pickled_with_recipe, saved, tensors

from apex_te.integrations._tensor_pickle import TensorPickleError, read_pickle, read_saved
from apex_te.integrations.te_state import TEStateError, load_te_extra_state, read_te_extra_state
from apex_te.module.linear import Linear


class Attack:
    """Appends to a list when it is unpickled."""

    ran: list = []  # noqa: RUF012

    def __init__(self, call):
        self.call = call

    def __reduce__(self):
        return self.call


def ran(*args):
    Attack.ran.append(args)
    return {}


class SetsState:
    def __setstate__(self, state):
        Attack.ran.append(state)


class Reduces(dict):
    def __reduce__(self):
        return (dict, (), None, None, iter([(1, 2)]))


def _opcodes(*parts):
    return b"\x80\x04" + b"".join(parts) + b"."


HOSTILE = {
    "a call": lambda: pickle.dumps(Attack((ran, (1,)))),
    "a call inside": lambda: pickle.dumps(tensors() | {"more": [Attack((ran, (1,)))]}),
    "a call inside a recipe": lambda: pickled_with_recipe({"x": Attack((ran, (1,)))})
    .numpy()
    .tobytes(),
    "os.system": lambda: b"cos\nsystem\n(S'true'\ntR.",
    "a global alone": lambda: pickle.dumps({"scale_fwd": ran}),
    "eval": lambda: pickle.dumps(Attack((eval, ("1",)))),
    "getattr of a module's global": lambda: pickle.dumps(Attack((getattr, (ran, "__code__")))),
    "__setstate__": lambda: pickle.dumps(SetsState()),
    "protocol 0": lambda: pickle.dumps(Attack((ran, (1,))), protocol=0),
    "an instance": lambda: b"(iposix\nsystem\n.",
    "an object": lambda: _opcodes(b"(cposix\nsystem\nV1\no"),
    "an extension": lambda: _opcodes(b"\x82\x01"),
    "state for a dict": lambda: _opcodes(b"}", b"}", b"b"),
    "state for a function": lambda: _opcodes(
        b"ctorch._utils\n_rebuild_tensor_v2\n", b"}X\x08\x00\x00\x00__code__K\x01s", b"b"
    ),
    "a call of a dict": lambda: _opcodes(b"}", b")", b"R"),
    "items into a dict's class": lambda: pickle.dumps(Reduces()),
    "a name with dots": lambda: _opcodes(b"\x8c\x0ccollections.\x94\x8c\x0bOrderedDict\x94\x93)R"),
    "torch.load": lambda: _opcodes(b"ctorch\nload\n", b"(V/etc/passwd\nt", b"R"),
    "set_default_tensor_type": lambda: _opcodes(b"ctorch\nset_default_dtype\n", b")", b"R"),
    "a missing mark": lambda: _opcodes(b"K\x01K\x02t"),
    "an empty stack": lambda: _opcodes(b"0"),
    "two values": lambda: _opcodes(b"K\x01K\x02"),
    "an unknown memo": lambda: _opcodes(b"h\x07"),
    "a truncated pickle": lambda: pickle.dumps(tensors())[:-40],
    "an unhashable key": lambda: _opcodes(b"}", b"]", b"K\x01", b"s"),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("container", ["pickle", "zip", "old file"])
def test_hostile_blobs_raise_and_run_nothing(name, container):
    Attack.ran.clear()
    raw = HOSTILE[name]()
    if container == "pickle":
        blob = as_uint8(raw)
    elif container == "zip":
        blob = io.BytesIO()
        with zipfile.ZipFile(blob, "w") as archive:
            archive.writestr("archive/data.pkl", raw)
    else:
        genuine = saved(None, _use_new_zipfile_serialization=False).getvalue()
        start = genuine.rindex(pickle.dumps(None, protocol=2)[:2] + b"N.")
        blob = io.BytesIO(genuine[:start] + raw + pickle.dumps([], protocol=2))
    modules = set(sys.modules)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TEStateError, match="must hold tensors and plain values, but"):
            read_te_extra_state(blob)
    assert not Attack.ran
    assert {
        name for name in set(sys.modules) - modules if not name.startswith("encodings.")
    } == set()
    state_dict = {"_extra_state": blob}
    with pytest.raises(TEStateError):
        load_te_extra_state(Linear(4, 4), state_dict)
    assert not Attack.ran
    assert list(state_dict) == ["_extra_state"]


def test_the_attacks_would_run_if_unpickled():
    Attack.ran.clear()
    for name in ("a call", "__setstate__", "protocol 0"):
        pickle.loads(HOSTILE[name]())
    assert Attack.ran == [(1,), (1,)]  # SetsState without state sets none


def _tensor_pickle(offset, size, stride, elements=4, key="0", kind="ctorch\nFloatStorage\n"):
    """A zip file with one tensor as described, over a storage of 16 bytes."""

    def ints(values):
        return b"(" + b"".join(b"I%d\n" % v for v in values) + b"t"

    pid = b"(Vstorage\n" + kind.encode() + b"V%s\nVcpu\nI%d\nt" % (key.encode(), elements)
    raw = b"ctorch._utils\n_rebuild_tensor_v2\n(" + pid + b"Q" + b"I%d\n" % offset
    raw += ints(size) + ints(stride) + b"I00\n}tR."
    blob = io.BytesIO()
    with zipfile.ZipFile(blob, "w") as archive:
        archive.writestr("archive/data.pkl", raw)
        archive.writestr("archive/data/0", bytes(16))
    return blob.getvalue()


def test_a_tensor_made_by_hand_is_read():
    assert torch.equal(read_saved(_tensor_pickle(0, (2, 2), (2, 1))), torch.zeros(2, 2))
    assert read_saved(_tensor_pickle(0, (0, 2), (2, 1))).shape == (0, 2)


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({"offset": 1, "size": (4,), "stride": (1,)}, "must lie in its storage"),
        ({"offset": 0, "size": (2, 2), "stride": (4, 1)}, "must lie in its storage"),
        ({"offset": -1, "size": (1,), "stride": (1,)}, "at least 0, got -1"),
        ({"offset": 0, "size": (-1,), "stride": (1,)}, "at least 0, got -1"),
        ({"offset": 0, "size": (1 << 40,), "stride": (0,)}, "must lie in its storage"),
        ({"offset": 0, "size": (2, 2), "stride": (1,)}, "must have a shape"),
        ({"offset": 0, "size": (4,), "stride": (1,), "elements": 5}, "must have 20 bytes, got 16"),
        ({"offset": 0, "size": (4,), "stride": (1,), "key": "../x"}, "damaged: KeyError"),
        ({"offset": 0, "size": (4,), "stride": (1,), "kind": "ctorch\nload\n"}, "torch.load"),
        (
            {"offset": 0, "size": (4,), "stride": (1,), "kind": "Vtext\n"},
            "must have a type of torch",
        ),
    ],
)
def test_tensors_outside_their_storage_are_refused(description, message):
    with pytest.raises(TensorPickleError, match=message):
        read_saved(_tensor_pickle(**description))


def test_compressed_and_big_endian_files_are_refused():
    for name, value, options, message in (
        ("data.pkl", b"N.", {"compression": zipfile.ZIP_DEFLATED}, "without compression"),
        ("byteorder", b"big", {}, "little-endian"),
    ):
        blob = io.BytesIO()
        with zipfile.ZipFile(blob, "w", **options) as archive:
            archive.writestr(f"archive/{name}", value)
            if name != "data.pkl":
                archive.writestr("archive/data.pkl", b"N.")
        with pytest.raises(TensorPickleError, match=message):
            read_saved(blob.getvalue())


def test_plain_values_come_back():
    value = {"a": [1, -2, 1 << 80, 1.5, "t", b"b", None, True], "b": (1, (2, 3), ()), 3: {"c": []}}
    assert read_saved(saved(value, pickle_protocol=3).getvalue()) == value
    for protocol in range(3, pickle.HIGHEST_PROTOCOL + 1):
        assert read_pickle(pickle.dumps(value, protocol=protocol)) == value
    del value["a"][5]  # earlier protocols call a function for bytes
    for protocol in range(3):
        assert read_pickle(pickle.dumps(value, protocol=protocol)) == value
    shared = [1]
    same = read_pickle(pickle.dumps([shared, shared]))
    assert same[0] is same[1]
    assert sorted(read_pickle(pickle.dumps({1, 2}))) == [1, 2]


def test_many_tensors_of_one_storage_take_its_memory_once():
    """A list of references to one tensor, whose copies would be 200 times the file."""
    one, blob = torch.arange(10000.0), io.BytesIO()
    values = [one[i:] for i in range(200)]
    torch.save(values, blob)
    found = read_saved(blob.getvalue())
    assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == 1
    assert found[0].untyped_storage().nbytes() <= len(blob.getvalue())
    for value, read in zip(values, found, strict=True):
        assert torch.equal(value, read)


def test_a_message_does_not_print_shared_containers_out():
    """Forty tuples, each the one before twice, print as 2**40 items."""
    nested = b"N" + b"".join(b"2\x86" for _ in range(40))
    with pytest.raises(TensorPickleError, match="a reference must be to a storage, got tuple"):
        read_pickle(b"\x80\x02" + nested + b"Q.")
