"""Every public function in a CUDA graph and on a stream beside the default one."""

import pytest
from checks import assert_runs_in_graph_and_on_stream
from public_functions import FORMS, PADDED_FORMS, Call

pytestmark = pytest.mark.cuda
# Products that torch chooses kernels for, which may differ on another stream.
OF_TORCH = ("emulated_gemm.", "grouped_gemm.contract_groups", "grouped_gemm.multiply_groups")
# Their kernels change with the length of a row.
SIZES = [(512, 288), (64, 4096), (16, 24576), (4, 128256)]
# The longest rows that some functions take.
LONGEST = {"moe_router.moe_router_fwd": 1024, "moe_router.moe_router_bwd": 1024}
# Its matrix is a map, which other values would not be.
OF_A_MAP = "moe_permute.tokens_of_rows"
# Rows that some functions want multiples of.
ROWS = {"grouped_gemm.scaled_contract_groups": 16, "qkv_cast.qkv_cast_weight": 8}
NAMES = [name for name in (*FORMS, *PADDED_FORMS) if not name.startswith(OF_TORCH)]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        (name, size)
        for name in NAMES
        for size in SIZES
        if size[0] % ROWS.get(name, 1) == 0 and size[1] <= LONGEST.get(name, size[1])
    ],
    ids=str,
)
def test_captured_and_on_a_side_stream_it_gives_the_same_bits(name, size):
    """Replayed also with other values of its first matrix."""
    call = Call(name, "cuda", *size)
    at = next((i for i, t in enumerate(call.tensors) if t.dim() > 1 and t.is_floating_point()), 0)

    def run(*values):
        tensors = [t.clone() for t in call.tensors]
        for value in values:
            tensors[at] = value.clone()
        return call.filled(call(*tensors))

    assert_runs_in_graph_and_on_stream(run, [] if name == OF_A_MAP else [call.tensors[at]])
