"""One set of ranks for a test file and world size: over gloo on CPUs, over NCCL on GPUs."""

import pytest
from rank_sets import ranks_of
from ranks import Ranks


@pytest.fixture(scope="module")
def all_ranks():
    """Sets of ranks by (size, backend), started when first asked for."""
    found = {}
    yield found
    for ranks in found.values():
        ranks.close()


@pytest.fixture(params=[2, 4])
def ranks(request, all_ranks):
    """2 and 4 ranks on the CPU."""
    return ranks_of(all_ranks, request.param, "gloo")


@pytest.fixture
def two_ranks(all_ranks):
    """2 ranks on the CPU."""
    return ranks_of(all_ranks, 2, "gloo")


@pytest.fixture
def four_ranks(all_ranks):
    """4 ranks on the CPU."""
    return ranks_of(all_ranks, 4, "gloo")


@pytest.fixture
def two_gpus(all_ranks):
    """2 ranks, each with a GPU."""
    return ranks_of(all_ranks, 2, "nccl")


@pytest.fixture(params=["gloo", pytest.param("nccl", marks=pytest.mark.cuda)])
def each_two(request, all_ranks):
    """2 ranks on the CPU; and 2, each with a GPU."""
    return ranks_of(all_ranks, 2, request.param)


@pytest.fixture
def four_gpus(all_ranks):
    """4 ranks, each with a GPU."""
    return ranks_of(all_ranks, 4, "nccl")


@pytest.fixture
def fresh():
    """Two ranks of their own: what they construct stays in their registries."""
    ranks = Ranks(2)
    yield ranks
    ranks.close()
