"""Which rows stand in a batch together, and how they are laid out in it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import InputError

ORDERS = ("given", "sorted", "shuffled", "equal")
PADDINGS = ("left", "right")


def batches(lengths: Sequence[int], batch_size: int, order: str = "given", seed: int = 0) -> list[list[int]]:
    """Rows, by number, cut into batches.

    Args:
        lengths: tokens of each row.
        batch_size: rows of a batch; the last one, or with "equal" the last one of each length, may have fewer.
        order: ``"given"``, ``"sorted"`` (by length), ``"shuffled"`` (with ``seed``), or ``"equal"`` (only rows of equal
            length stand together, so that nothing is padded).
        seed: of shuffling.

    Raises:
        InputError: another order, or a batch size below 1.

    Example:
        >>> batches([3, 1, 3, 2], 2), batches([3, 1, 3, 2], 2, "sorted"), batches([3, 1, 3, 2], 2, "equal")
        ([[0, 1], [2, 3]], [[1, 3], [0, 2]], [[1], [3], [0, 2]])
    """
    if order not in ORDERS:
        raise InputError(f"unknown order {order!r}: choose one of {', '.join(ORDERS)}")
    if batch_size < 1:
        raise InputError(f"batch_size must be at least 1, got {batch_size}")
    rows = list(range(len(lengths)))
    if order == "shuffled":
        random.Random(seed).shuffle(rows)
    elif order != "given":
        rows.sort(key=lengths.__getitem__)
    groups = [rows]
    if order == "equal":
        groups = [[row for row in rows if lengths[row] == length] for length in sorted(set(lengths))]
    return [group[i : i + batch_size] for group in groups for i in range(0, len(group), batch_size)]


def padded(rows: Sequence[Sequence[int]], side: str, pad: int, width: int | None = None) -> tuple[Tensor, Tensor]:
    """Token ids of ragged rows in one batch.

    Args:
        rows: token ids of each.
        side: where the padding goes, ``"left"`` or ``"right"``.
        pad: the id of the padding.
        width: columns; by default those of the longest row.

    Returns:
        ``input_ids`` and ``attention_mask``, ``[B, L]`` int64 both.

    Raises:
        InputError: a row is longer than ``width``.
    """
    longest = max(map(len, rows))
    if width is not None and width < longest:
        raise InputError(f"pad_to is {width}, but a row has {longest} tokens: pad to more, or to no fixed length")
    width = longest if width is None else width
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        where = slice(width - len(row), width) if side == "left" else slice(len(row))
        ids[i, where] = torch.tensor(row, dtype=torch.int64)
        mask[i, where] = 1
    return ids, mask
