"""Rotary embedding of the modules against plain float64 arithmetic and ops.rope."""

from __future__ import annotations

import pytest
import torch

import apex_te
from apex_te.module.attention.rotary import apply_fused_qkv_rotary_pos_emb
from apex_te.ops.rope import rope

LENGTHS = (5, 0, 7, 3)


def starts_of(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)


def turned(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotates float64 ``x`` [..., h, d] by ``angles`` [..., 1, pairs], pair by pair."""
    out, pairs = x.clone(), angles.shape[-1]
    for i in range(pairs):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + pairs)
        cos, sin = angles[..., i].cos(), angles[..., i].sin()
        out[..., a] = x[..., a] * cos - x[..., b] * sin
        out[..., b] = x[..., b] * cos + x[..., a] * sin
    return out


def table_of(dim: int, positions: int, base: float = 10000.0) -> torch.Tensor:
    pair = torch.arange(dim // 2, dtype=torch.float64)
    return torch.arange(positions, dtype=torch.float64)[:, None] / base ** (2 * pair / dim)


@pytest.mark.parametrize("interleaved", [False, True])
def test_angles_are_position_times_frequency(interleaved: bool) -> None:
    module = apex_te.RotaryPositionEmbedding(64, 0.5, rotary_base=5000.0, interleaved=interleaved)
    angles = module(11, offset=3)
    assert angles.shape == (11, 1, 1, 32)
    assert angles.dtype is torch.float32
    assert angles.is_contiguous()
    expected = table_of(32, 14, 5000.0)[3:].float()
    wide = expected.repeat_interleave(2, -1) if interleaved else expected.repeat(1, 2)
    torch.testing.assert_close(angles[:, 0, 0], wide, rtol=3e-6, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(11, offset=3), angles)
    assert torch.equal(module.bfloat16()(2)[0], torch.zeros(1, 1, 32))
    assert [*module.state_dict()] == ["inv_freq"]


@pytest.mark.parametrize(("positions", "divisor"), [(16, 4.0), (80, 5.0)])
def test_positions_are_interpolated(positions: int, divisor: float) -> None:
    module = apex_te.RotaryPositionEmbedding(
        16, seq_len_interpolation_factor=4, pretrained_max_position_embeddings=16
    )
    plain = apex_te.RotaryPositionEmbedding(16)(positions)
    torch.testing.assert_close(module(positions), plain / divisor, rtol=1e-6, atol=0)


@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("has_starts", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_float64(
    layout: str, interleaved: bool, has_starts: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    sequences, tokens = len(LENGTHS), 6
    shape = {"sbhd": (tokens, sequences), "bshd": (sequences, tokens), "thd": (sum(LENGTHS),)}
    x = torch.randn(*shape[layout], 3, 16, dtype=dtype, requires_grad=True)
    cu = starts_of(LENGTHS) if layout == "thd" else None
    starts = torch.tensor([4, 9, 0, 2], dtype=torch.int32) if has_starts else None
    freqs = apex_te.RotaryPositionEmbedding(16, 0.5, interleaved=interleaved)(20)
    out = apex_te.apply_rotary_pos_emb(
        x, freqs, layout, starts, interleaved, fused=False, cu_seqlens=cu
    )
    assert torch.equal(
        out, rope(x, freqs, layout=layout, starts=starts, cu_seqlens=cu, interleaved=interleaved)
    )
    begin = torch.zeros(sequences, dtype=torch.int64) if starts is None else starts.long()
    if layout == "thd":
        position = torch.cat([torch.arange(n) + b for n, b in zip(LENGTHS, begin, strict=True)])
    else:
        position = torch.arange(tokens)[:, None] + begin
        position = position.T if layout == "bshd" else position
    table = freqs[:, 0, 0].double()
    table = table[:, ::2] if interleaved else table[:, :4]
    angles = table[position][..., None, :]
    # One rounding of the result, and those of float32 before it.
    precision = {"rtol": 1e-6 if dtype is torch.float32 else 2**-8, "atol": 1e-6}
    torch.testing.assert_close(out.double(), turned(x.double(), angles, interleaved), **precision)
    grad = torch.randn_like(out)
    out.backward(grad)
    back = turned(grad.double(), -angles, interleaved)
    torch.testing.assert_close(x.grad.double(), back, **precision)


def test_angles_may_be_bfloat16() -> None:
    x = torch.randn(6, 2, 3, 16, dtype=torch.bfloat16)
    freqs = apex_te.RotaryPositionEmbedding(16)(6).bfloat16()
    out = apex_te.apply_rotary_pos_emb(x, freqs, fused=True)
    assert torch.equal(out, apex_te.apply_rotary_pos_emb(x, freqs.float()))


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_chunks_of_ranks_make_the_whole(layout: str) -> None:
    x, ranks = torch.randn(12, 12, 2, 8), 3
    freqs, time = apex_te.RotaryPositionEmbedding(8)(16), layout.index("s")
    whole = apex_te.apply_rotary_pos_emb(x, freqs, layout).chunk(2 * ranks, time)
    chunks = x.chunk(2 * ranks, time)
    for rank in range(ranks):
        last = 2 * ranks - 1 - rank
        own = torch.cat((chunks[rank], chunks[last]), time)
        out = apex_te.apply_rotary_pos_emb(own, freqs, layout, cp_size=ranks, cp_rank=rank)
        assert torch.equal(out, torch.cat((whole[rank], whole[last]), time))


def test_chunks_of_packed_sequences_make_the_whole() -> None:
    ranks, lengths = 2, (8, 4, 12)
    x, cu = torch.randn(sum(lengths), 2, 8), starts_of(lengths)
    freqs = apex_te.RotaryPositionEmbedding(8)(16)
    whole = apex_te.apply_rotary_pos_emb(x, freqs, "thd", cu_seqlens=cu)
    for rank in range(ranks):
        places = []
        for begin, length in zip(cu.tolist(), lengths, strict=False):
            chunks = torch.arange(begin, begin + length).chunk(2 * ranks)
            places += [chunks[rank], chunks[2 * ranks - 1 - rank]]
        own = torch.cat(places)
        out = apex_te.apply_rotary_pos_emb(
            x[own], freqs, "thd", cu_seqlens=cu, cp_size=ranks, cp_rank=rank
        )
        torch.testing.assert_close(out, whole[own], rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("repeats", [1, 4])
@pytest.mark.parametrize("has_starts", [False, True])
def test_joined_queries_keys_and_values_rotate_as_apart(
    layout: str, interleaved: bool, repeats: int, has_starts: bool
) -> None:
    torch.manual_seed(0)
    size, groups = 8, 3
    sizes = [repeats * size, size, size]
    shape = {"sbhd": (6, 4), "bshd": (4, 6), "thd": (sum(LENGTHS),)}[layout]
    qkv = torch.randn(*shape, groups, sum(sizes), requires_grad=True)
    q_freqs = apex_te.RotaryPositionEmbedding(size, 0.5)(20)
    k_freqs = apex_te.RotaryPositionEmbedding(size, 0.5, rotary_base=100.0)(20)
    options = {"tensor_format": layout, "interleaved": interleaved}
    options["start_positions"] = torch.tensor([4, 9, 0, 2]) if has_starts else None
    options["cu_seqlens"] = starts_of(LENGTHS) if layout == "thd" else None
    q, k, v = qkv.split(sizes, -1)
    q = q.reshape(*shape, groups * repeats, size)
    expected = (
        apex_te.apply_rotary_pos_emb(q, q_freqs, **options),
        apex_te.apply_rotary_pos_emb(k, k_freqs, **options),
        v,
    )
    grads = [torch.randn_like(x) for x in expected]
    (wanted,) = torch.autograd.grad(expected, qkv, grads)
    out = apply_fused_qkv_rotary_pos_emb(qkv, q_freqs, k_freqs, sizes, **options)
    (got,) = torch.autograd.grad(out, qkv, grads)
    for x, y in zip((*out, got), (*expected, wanted), strict=True):
        assert torch.equal(x, y)


def test_arguments_are_checked() -> None:
    x, freqs = torch.randn(4, 2, 2, 8), torch.rand(4, 1, 1, 8)
    apply = apex_te.apply_rotary_pos_emb
    with pytest.raises(ValueError, match="tensor_format must be 'sbhd', 'bshd' or 'thd'"):
        apply(x, freqs, "bhsd")
    with pytest.raises(ValueError, match="cu_seqlens must be given with tensor_format 'thd'"):
        apply(x[0], freqs, "thd")
    with pytest.raises(ValueError, match="t must have two equal chunks of each of cp_size = 2 ran"):
        apply(x[:3], freqs, start_positions=torch.zeros(2, dtype=torch.int32), cp_size=2)
    with pytest.raises(ValueError, match="freqs must have 8 positions"):
        apply(x, freqs, cp_size=2)
    with pytest.raises(ValueError, match="must be even and at least 2, got 3"):
        apex_te.RotaryPositionEmbedding(6, 0.5)
    with pytest.raises(ValueError, match="qkv_split_arg_list must be the sizes"):
        apply_fused_qkv_rotary_pos_emb(x, freqs, freqs, [3, 2, 3])


@pytest.mark.parametrize("bounds", [[0, 4, 2, 6], [-1, 4, 6], [0, 4, 7], [3, 2]])
@pytest.mark.parametrize("cp_size", [1, 2])
def test_sequences_that_do_not_fit_the_tokens_are_refused(bounds, cp_size):
    cu, freqs = torch.tensor([cp_size * b for b in bounds], dtype=torch.int32), torch.ones(16, 4)
    with pytest.raises(ValueError, match=r"cu_seqlens must ascend from 0 or more .*, got \["):
        apex_te.apply_rotary_pos_emb(
            torch.ones(6, 2, 4), freqs, "thd", cu_seqlens=cu, cp_size=cp_size, cp_rank=0
        )
    if cp_size == 1:
        with pytest.raises(ValueError, match="cu_seqlens must ascend from 0 or more"):
            apply_fused_qkv_rotary_pos_emb(
                torch.ones(6, 2, 12), freqs, freqs, (4, 4, 4), "thd", cu_seqlens=cu
            )


def part_of(x: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """The two chunks of dimension 1 that a rank has."""
    chunks = x.chunk(2 * ranks, 1)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]), 1)


@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("fused_qkv", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_start_positions_of_a_rank_s_chunks(
    interleaved: bool, fused_qkv: bool, ranks: int, layout: str
) -> None:
    """A rank's two chunks rotate as they do in whole sequences that start elsewhere."""
    if fused_qkv and layout == "thd":
        pytest.skip("refused for every cp_size above 1")
    torch.manual_seed(0)
    size, starts = 4 * ranks, torch.tensor([3, 0, 7], dtype=torch.int32)
    freqs = apex_te.RotaryPositionEmbedding(8)(size + 8)
    x = torch.randn(3, size, 2, 24 if fused_qkv else 8)
    options = {"start_positions": starts, "tensor_format": layout, "interleaved": interleaved}

    def rotated(x: torch.Tensor, **more) -> list[torch.Tensor]:
        if fused_qkv:
            sizes = [8, 8, 8]
            return list(apply_fused_qkv_rotary_pos_emb(x, freqs, freqs, sizes, **options, **more))
        return [apex_te.apply_rotary_pos_emb(x, freqs, **options, **more)]

    def laid(x: torch.Tensor) -> torch.Tensor:
        return {"bshd": x, "sbhd": x.transpose(0, 1), "thd": x.flatten(0, 1)}[layout]

    packed = {}
    if layout == "thd":
        packed["cu_seqlens"] = torch.arange(4, dtype=torch.int32) * size
    whole = rotated(laid(x), **packed)
    whole = [w.unflatten(0, (3, -1)) if layout == "thd" else laid(w) for w in whole]
    for rank in range(ranks):
        own = rotated(laid(part_of(x, rank, ranks)), cp_size=ranks, cp_rank=rank, **packed)
        for got, want in zip(own, whole, strict=True):
            assert torch.equal(got, laid(part_of(want, rank, ranks)))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scaling_factor": 0.5}, ValueError, "scaling_factor must be at least 1"),
        ({"scaling_factor": "4"}, TypeError, "scaling_factor must be a float"),
        ({"original_max_position_embeddings": 0}, ValueError, "original_max_position_embeddings"),
        ({"beta_slow": 0.0}, ValueError, "beta_slow must be above 0"),
        ({"beta_fast": 1.0, "beta_slow": 2.0}, ValueError, "beta_fast must be at least beta_slow"),
        ({"rotary_base": 1.0}, ValueError, "rotary_base must not be 1"),
    ],
)
def test_yarn_refuses(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"YarnRotaryEmbedding: .*{message}"):
        apex_te.YarnRotaryEmbedding(8, **options)
