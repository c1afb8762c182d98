"""Do rows of any lengths that share a call of attention keep their bits? By the number of queries given at a time.

    python benchmarks/shared_attention.py

Each trial is a batch of rows with one query and 1 to 2,100 keys; every row is compared with itself alone, at its own
number of keys rounded up. Two queries at a time is what `rope_pad_fix.decoding` uses. Prints markdown.
"""

from __future__ import annotations

import random

import torch
from common import environment, markdown_table, progress
from torch import Tensor

from rope_pad_fix import decoding
from rope_pad_fix.cache import round_up

# Key heads, query heads for each, size of a head.
LAYOUTS = (
    *((3, 3, 64), (2, 7, 64), (1, 7, 16), (8, 1, 64), (9, 1, 64)),
    *((4, 1, 20), (2, 8, 128), (1, 4, 256), (3, 2, 80), (5, 5, 96)),
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUERIES = (1, 2, 4)
TRIALS = 14


def differing(dtype: torch.dtype, layout: tuple[int, int, int]) -> tuple[int, int]:
    """Rows that differ, and rows compared, with torch's current number of threads."""
    key_heads, each, size = layout
    generator, numbers = torch.Generator().manual_seed(0), random.Random(0)
    found = count = 0
    for trial in range(TRIALS):
        rows, longest = numbers.choice((2, 3, 5, 8, 13)), numbers.choice((40, 130, 300, 500, 1000, 2100))
        keys = [numbers.randint(1, longest) for _ in range(rows)]
        width = round_up(longest)
        query, key, value = data(rows, key_heads, each, width, size, trial, generator)
        q, k, v = (x.to(dtype) for x in (query, key, value))
        mask = (torch.arange(width) < torch.tensor(keys)[:, None])[:, None, None]
        together = decoding.shared_attention(q, k, v, mask)
        for i, own in enumerate(map(round_up, keys)):
            row = slice(i, i + 1)
            alone = decoding.shared_attention(q[row], k[row, :, :own], v[row, :, :own], mask[row, ..., :own])
            found += not torch.equal(alone[0], together[i])
            count += 1
    return found, count


def data(
    rows: int, key_heads: int, each: int, width: int, size: int, trial: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """By turns normal numbers, and ones whose terms cancel in scores or in values, which show any other order."""
    query = torch.randn(rows, key_heads * each, size, generator=generator)
    key, value = torch.randn(2, rows, key_heads, width, size, generator=generator)
    half = size // 2
    if trial % 3 == 1:
        query[..., half : 2 * half], key[..., half : 2 * half] = query[..., :half], -key[..., :half]
        query, key = query * 1000, key * 1000
    elif trial % 3 == 2:
        key[:, :, 1::2], value[:, :, 1::2] = key[:, :, ::2], -value[:, :, ::2]
    return query, key, value


def main() -> None:
    """Try everything, print the table."""
    lines = []
    for queries in QUERIES:
        decoding._QUERIES = queries
        cells = []
        for name, dtype in DTYPES.items():
            progress(f"{queries} at a time, {name}")
            found = []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                found += [differing(dtype, layout) for layout in LAYOUTS]
            cells.append(f"{sum(bad for bad, _ in found)} of {sum(count for _, count in found)}")
        lines.append((str(queries), *cells))
    print(markdown_table(("queries at a time", *DTYPES), lines))
    print(f"\n{environment()} (1 to 3 threads)")


if __name__ == "__main__":
    main()
