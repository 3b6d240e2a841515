"""peer_exchange on one GPU, whose own buffers stand for those of peers."""

import pytest
import torch
from checks import in_pairs

from apex_te.ops.peer_exchange import HEADER, await_rank, join, send, sum_pieces

pytestmark = pytest.mark.cuda
SECOND = 1000


@pytest.fixture(autouse=True)
def _gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")


def _buffer(size):
    buffer = torch.full((HEADER + size,), 0x7F, dtype=torch.uint8, device="cuda")
    buffer[:HEADER] = 0
    return buffer


def _numbers(buffer):
    return buffer[:HEADER].view(torch.int32)


def _sent(source, targets, own, rank, number):
    """Sends, and waits; the event of the end."""
    side = torch.cuda.Stream()
    fork, sent = torch.cuda.Event(), torch.cuda.Event()
    fork.record()
    sent.record()
    send(source, targets, own, rank, number, side, fork, sent)
    return sent


@pytest.mark.parametrize("size", [1, 15, 4096, 1 << 20])
def test_sends_to_all(size):
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    buffers = [_buffer(3 * size) for _ in range(3)]
    torch.cuda._sleep(1_000_000)
    source.add_(1)  # what the stream has is sent
    sent = _sent(source, buffers[:2], buffers[2], 1, 7)
    for buffer in buffers[:2]:
        await_rank(buffer, 1, 7, 60 * SECOND)
        assert torch.equal(buffer[HEADER + size : HEADER + 2 * size], source)
    join(buffers[2], sent)
    assert torch.equal(buffers[2][HEADER + size : HEADER + 2 * size], source)
    for buffer, number in zip(buffers, (7, 7, 0), strict=True):
        numbers = _numbers(buffer).tolist()
        assert numbers == [0, number, *[0] * (len(numbers) - 2)]
        assert bool((buffer[HEADER : HEADER + size] == 0x7F).all())
        assert bool((buffer[HEADER + 2 * size :] == 0x7F).all())


@in_pairs(
    cols=[8, 1000, 1001], ranks=[2, 3, 8], dtype=[torch.float32, torch.bfloat16, torch.float16]
)
def test_sums_by_rank(dtype, ranks, cols):
    parts = torch.randn(ranks, 33, cols, device="cuda").to(dtype)
    parts[1, 3, 4] = torch.nan
    parts[0, 5, 6] = torch.inf
    buffer = _buffer(parts.nbytes)
    own = ranks - 1
    buffer[HEADER + own * parts[0].nbytes :] = parts[own].view(-1).view(torch.uint8)
    for rank in range(own):
        _sent(parts[rank].contiguous().view(-1).view(torch.uint8), [buffer], None, rank, 1)
    out = torch.full_like(parts[0], torch.nan)
    sum_pieces(buffer, ranks, own, 1, 60 * SECOND, out)
    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part.float()
    torch.testing.assert_close(out, expected.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_numbers_wrap():
    buffer = _buffer(16)
    source = torch.zeros(16, dtype=torch.uint8, device="cuda")
    for number in ((1 << 32) - 1, 0, 1):
        _sent(source, [buffer], None, 0, number)
        await_rank(buffer, 0, number, 60 * SECOND)
    await_rank(buffer, 0, (1 << 32) - 1, 60 * SECOND)  # long past
    torch.cuda.synchronize()


def test_too_small_buffers_are_refused():
    buffer = _buffer(100)
    source = torch.zeros(51, dtype=torch.uint8, device="cuda")
    with pytest.raises(ValueError, match="a buffer of 612 bytes must hold the piece of rank 1"):
        _sent(source, [buffer], None, 1, 1)
    with pytest.raises(ValueError, match="must hold the piece of rank 128"):
        await_rank(buffer, 128, 1, SECOND)
    with pytest.raises(ValueError, match="must hold the piece of rank 1"):
        sum_pieces(buffer, 2, 0, 1, SECOND, torch.empty(26, device="cuda"))
    with pytest.raises(TypeError, match="out"):
        sum_pieces(buffer, 2, 0, 1, SECOND, torch.empty(2, device="cuda", dtype=torch.int32))


def test_empty_pieces():
    buffer = _buffer(0)
    _sent(buffer[:0], [buffer], None, 1, 3)
    out = torch.empty(0, 8, device="cuda")
    sum_pieces(buffer, 2, 0, 3, 60 * SECOND, out)
    torch.cuda.synchronize()
