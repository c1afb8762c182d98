"""Rows that decode one token each share calls of attention, where that is shown to change no bit.

One call a row would be exact and slow. But rows of one call are not by themselves the same bits as alone: kernels
multiply by blocks that depend on the numbers of queries and keys, and torch spreads heads over threads in a way that
shows, in float32, when the number of queries is odd. With two queries at a time neither matters on the CPUs
measured, whatever the lengths: masked keys then only add zeros. It is tried for the shapes at hand all the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .cache import round_up
from .rows import Run

_QUERIES = 2
_CALL = 512  # keys: computing so many for nothing takes about as long as another call


@dataclass(frozen=True)
class Group:
    """Rows of one call of attention: one row, or neighbours with one token each.

    Attributes:
        runs: the rows.
        length: keys of each row, those of the longest row or more.
        mask: the mask of the call; of ragged rows ``[R, 1, 1, length]`` bool, each row's own keys.
        ragged: whether the call is one of `shared_attention`; else it is one of the model's own attention.
    """

    runs: list[Run]
    length: int
    mask: Tensor | None
    ragged: bool = False

    @property
    def rows(self) -> slice:
        """Of the batch."""
        return slice(self.runs[0].row, self.runs[-1].row + 1)

    @property
    def tokens(self) -> slice:
        """Of the packed sequence."""
        last = self.runs[-1]
        return slice(self.runs[0].start, last.start + last.query_length)

    @property
    def keys(self) -> slice:
        """Of the packed tokens of past and present."""
        last = self.runs[-1]
        return slice(self.runs[0].key_start, last.key_start + last.key_length)


def equal_rows(steps: list[Run], share: bool) -> list[Group]:
    """Groups of neighbouring rows with equal numbers of keys; of one row each unless they may ``share``."""

    def fits(members: list[Run], run: Run) -> bool:
        return share and run.key_length == members[0].key_length

    return [Group(members, members[0].key_length, None) for members in _neighbours(steps, fits)]


def ragged_rows(steps: list[Run], device: torch.device) -> list[Group]:
    """Groups of neighbouring rows of any lengths for `shared_attention`, as long as filling up their keys costs less
    than another call. Its masks are made on the device."""

    def fits(members: list[Run], run: Run) -> bool:
        lengths = [round_up(member.key_length) for member in (*members, run)]
        before = max(lengths[:-1]) * len(members)
        return max(lengths) * len(lengths) - before - lengths[-1] <= _CALL

    groups = []
    for members in _neighbours(steps, fits):
        length = round_up(max(run.key_length for run in members))
        keys = torch.tensor([run.key_length for run in members])
        mask = (torch.arange(length) < keys[:, None])[:, None, None].to(device)
        groups.append(Group(members, length, mask, ragged=True))
    return groups


def _neighbours(steps: list[Run], fits: Callable[[list[Run], Run], bool]) -> list[list[Run]]:
    groups: list[list[Run]] = []
    for run in steps:
        last = groups[-1][-1] if groups else None
        adjacent = last is not None and (run.row, run.start) == (last.row + 1, last.start + 1)
        if adjacent and fits(groups[-1], run):
            groups[-1].append(run)
        else:
            groups.append([run])
    return groups


def shared_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None = None, dropout: float = 0.0
) -> Tensor:
    """Scaled dot-product attention of one query a row, with the query heads that share a key head as its queries, two
    at a time.

    Args:
        query: ``[R, H, D]``.
        key, value: ``[R, H_kv, length, D]``.
        mask: ``[R, 1, 1, length]`` bool.
        scale, dropout: as in ``torch.nn.functional.scaled_dot_product_attention``.

    Returns:
        ``[R, H, D]``.
    """
    rows, heads = key.shape[:2]
    q = query.view(rows, heads, -1, query.shape[-1])  # [R, H_kv, H / H_kv, D]
    own = q.shape[2]
    missing = -own % _QUERIES
    if missing:
        q = torch.cat((q, q[:, :, :1].expand(-1, -1, missing, -1)), 2)
    grouped = q.shape[2] > _QUERIES
    q = q.view(rows, -1, _QUERIES, q.shape[-1])
    out = F.scaled_dot_product_attention(
        q, key, value, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=grouped
    )
    return out.reshape(rows, heads, own + missing, -1)[:, :, :own].reshape(rows, heads * own, -1)


@functools.cache
def ragged_rows_agree(
    device: torch.device, dtype: torch.dtype, threads: int, heads: int, key_heads: int, size: int
) -> bool:
    """Whether rows in a call of `shared_attention` are the same bits as alone, each then with its own number of keys
    rounded up. Tried with torch's current number of threads; no result is assumed for another one."""
    generator = torch.Generator().manual_seed(0)
    for keys in ([3, 33, 20], [64, 1, 100, 37, 128, 90], [250, 130, 190, 224, 70], [700, 520, 350, 610]):
        longest = round_up(max(keys))
        mask = (torch.arange(longest) < torch.tensor(keys)[:, None])[:, None, None].to(device)
        for q, k, v in _data(device, dtype, len(keys), heads, key_heads, longest, size, generator):
            q = q[:, :, 0]
            together = _exactly(shared_attention, q, k, v, mask)
            for i, own in enumerate(map(round_up, keys)):
                row = slice(i, i + 1)
                alone = _exactly(shared_attention, q[row], k[row, :, :own], v[row, :, :own], mask[row, ..., :own])
                if not torch.equal(alone[0], together[i]):
                    return False
    return True


@functools.cache
def equal_rows_agree(device: torch.device, dtype: torch.dtype, threads: int, heads: int, size: int) -> bool:
    """Whether rows with equal numbers of keys, in one call without a mask, are the same bits as alone; tried with
    torch's current number of threads."""
    generator = torch.Generator().manual_seed(0)
    for length, rows in ((2, 3), (7, 8), (33, 5), (100, 2), (257, 3)):
        for q, k, v in _data(device, dtype, rows, heads, heads, length, size, generator):
            together = _exactly(F.scaled_dot_product_attention, q, k, v)
            for i in range(rows):
                alone = _exactly(F.scaled_dot_product_attention, *(x[i : i + 1] for x in (q, k, v)))
                if not torch.equal(alone[0], together[i]):
                    return False
    return True


def _data(
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    heads: int,
    key_heads: int,
    length: int,
    size: int,
    generator: torch.Generator,
) -> list[list[Tensor]]:
    """Queries, keys and values: normal ones, and ones whose terms cancel in scores or in values, which show any other
    order of summation."""
    kinds = []
    for kind in ("normal", "scores", "values"):
        shapes = ((rows, heads, 1, size), *[(rows, key_heads, length, size)] * 2)
        q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
        if kind == "scores":
            half = size // 2
            q[..., half : 2 * half], k[..., half : 2 * half] = q[..., :half], -k[..., :half]
            q, k = q * 1000, k * 1000
        elif kind == "values":
            pairs = length // 2 * 2
            k[:, :, 1:pairs:2], v[:, :, 1:pairs:2] = k[:, :, 0:pairs:2], -v[:, :, 0:pairs:2]
        kinds.append([x.to(device, dtype) for x in (q, k, v)])
    return kinds


def _exactly(attend: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
    with torch.no_grad(), torch.autocast(arguments[0].device.type, enabled=False):
        return attend(*arguments)


def may_share(kwargs: dict[str, Any]) -> bool:
    """Whether an attention call asks for nothing that `shared_attention` does not do."""
    return all(kwargs.get(name) is None for name in ("position_bias", "softcap", "s_aux"))
