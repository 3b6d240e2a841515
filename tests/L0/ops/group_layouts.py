"""Groups of rows that the tests of grouped_quantize share."""

import torch

from apex_te.ops import grouped_quantize as op

# (rows, splits): uneven, none, all in one, padding, groups across tiles of 256 rows, many groups.
LAYOUTS = [
    (24, [5, 0, 16, 3]),
    (40, [0, 7, 1, 16]),
    (64, [0, 0, 64, 0]),
    (1, [1]),
    (7, [0]),
    (600, [3, 290, 0, 17, 250]),
    (1040, [256, 16, 512, 256]),
    (190, [k % 5 for k in range(70)]),
    (2100, [1] * 1023),
]


def made(rows, splits, device, int64=False):
    dtype = torch.int64 if int64 else torch.int32
    return op.groups_of(torch.tensor(splits, dtype=dtype, device=device), rows)


def scales(count, device):
    return (torch.rand(count) * 10 + 0.1).to(device)


def nan_behind(x, splits):
    x[sum(splits) :] = float("nan")
    return x


def forged():
    """Tables of groups [ends, column ends, used, bad] that are none of 16 rows."""
    tables = [
        [4000, 8000, 4000, 8000, 1, 1, 0],
        [8, 4000, 16, 4000, 1, 1, 0],
        [-4000, 16, 16, 32, 1, 1, 0],
        [16, 8, 16, 32, 1, 1, 0],
        [8, 16, 4000, 8000, 1, 1, 0],
        [8, 16, -16, 16, 1, 1, 0],
        [2**31 - 1, 2**31 - 1, 2**31 - 1, 2**31 - 1, 1, 1, 0],
        [-(2**31), -(2**31), -(2**31), -(2**31), 1, 1, 0],
    ]
    generator = torch.Generator().manual_seed(5)
    for _ in range(100):
        large = torch.randint(-(2**31), 2**31, (6,), generator=generator)
        small = torch.randint(-40, 60, (6,), generator=generator)
        choice = torch.randint(0, 2, (6,), generator=generator).bool()
        tables.append([*torch.where(choice, large, small).tolist(), 0])
    return tables
