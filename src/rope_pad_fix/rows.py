"""What an attention mask says about the rows of a batch: lengths, positions, the way into the packed form and back.

A batch of ``B`` rows and ``L`` columns is packed into one sequence of its ``T`` real tokens, row by row, and its
results are laid back into ``[B, L]``. Everything here is pure torch and knows nothing of transformers.

    mask  0 1 1    slots  0 1 2        packed  1 2 3 5        lengths  [2, 2]
          1 0 1           3 4 5        (slots)                positions 0 1 0 1
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # a label that is no target


@dataclass(frozen=True)
class Run:
    """A row that has tokens in a call."""

    row: int
    query_length: int  # tokens in this call
    key_length: int  # tokens in this call and before it
    start: int  # where it begins in the packed sequence
    key_start: int  # and among the packed tokens of past and present

    @property
    def decodes(self) -> bool:
        """Whether it adds one token to a past."""
        return self.query_length == 1 < self.key_length


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one call.

    Attributes:
        batch_size: ``B``.
        query_length: ``L``, the columns of this call.
        lengths: real tokens of each row in this call. There are ``B`` rows, or more where `packed` found several
            sequences in one.
        past_lengths: real tokens of each row before this call.
        mask: ``[B, P + L]`` bool, True at the slots that a cache holds after this call (``P`` columns are past).
        index: ``[T]`` int64, the slot ``b * L + l`` of each packed token.
        columns: ``[T]`` int64, how many real tokens of its row come before a packed token, past ones included.
        back: ``[B, L]`` int64, the packed token that a slot shows: its own, at a pad the last one before it in its
            row ("hold the last"), -1 where there is none.
        drops: whether the mask leaves out tokens that the cache holds.
        held: ``[B, L]`` like ``back``, except that a pad before the first token of this call shows entry ``W + b``:
            what row ``b`` showed last in an earlier call. None if that is not known.
        tile: the packed sequence is filled up to a multiple of it with tokens of no row, copies of slot 0, so that
            its width is ``W`` and not ``T``. A batch without a single real token has a width of one tile.
    """

    batch_size: int
    query_length: int
    lengths: list[int]
    past_lengths: list[int]
    mask: Tensor
    index: Tensor
    columns: Tensor
    back: Tensor
    drops: bool = False
    held: Tensor | None = None
    tile: int = 1

    @classmethod
    def full(cls, batch_size: int, query_length: int, device: torch.device | str = "cpu") -> Rows:
        """Rows without padding and without a past: no mask was given and there is no cache."""
        index = torch.arange(batch_size * query_length, device=device)
        return cls(
            batch_size,
            query_length,
            [query_length] * batch_size,
            [0] * batch_size,
            torch.ones(batch_size, query_length, dtype=torch.bool, device=device),
            index,
            index % max(query_length, 1),
            index.view(batch_size, query_length),
        )

    @classmethod
    def from_mask(cls, attention_mask: Tensor, query_length: int, cached: Tensor | None = None) -> Rows:
        """Analyse a mask with one transfer to the host.

        Args:
            attention_mask: ``[B, P + L]`` of any dtype, 1 at real tokens and 0 at padding, for past and present.
            query_length: ``L``.
            cached: ``[B, P]`` bool, the slots whose tokens a cache holds; None if it holds all of them. The mask may
                leave cached tokens out (padding after an end of sequence), but cannot ask for absent ones.

        Raises:
            ValueError: the mask has another shape, other values than 0 and 1, or contradicts ``cached``.

        Example:
            >>> rows = Rows.from_mask(torch.tensor([[0, 1, 1], [1, 0, 1]]), 3)
            >>> rows.lengths, rows.index.tolist(), rows.columns.tolist(), rows.back.tolist()
            ([2, 2], [1, 2, 3, 5], [0, 1, 0, 1], [[-1, 0, 1], [2, 2, 3]])
        """
        if attention_mask.dim() != 2:
            raise ValueError(f"attention_mask must be [batch, slots], got shape {tuple(attention_mask.shape)}")
        batch_size, slots = attention_mask.shape
        past = slots - query_length
        if past < 0:
            raise ValueError(
                f"attention_mask has {slots} columns, fewer than the {query_length} of the input: it must cover every "
                "column of the input, and every one of the cache before it"
            )
        mask = attention_mask != 0
        present = mask[:, past:]
        flags = [torch.zeros((), dtype=torch.bool, device=mask.device)] * 3
        if attention_mask.dtype != torch.bool:
            flags[0] = (mask & (attention_mask != 1)).any()
        if cached is not None:
            flags[1] = (mask[:, :past] & ~cached).any()
            flags[2] = (cached & ~mask[:, :past]).any()
        counts = torch.cat([present.sum(1), mask[:, :past].sum(1), torch.stack(flags)]).tolist()
        lengths, past_lengths = counts[:batch_size], counts[batch_size : 2 * batch_size]
        odd, absent, drops = counts[2 * batch_size :]
        if odd:
            value = attention_mask[mask & (attention_mask != 1)][0].item()
            raise ValueError(
                f"attention_mask must hold 1 at real tokens and 0 at padding, found {value}: an additive mask "
                "(0 and -inf) has to be four-dimensional"
            )
        if absent:
            raise ValueError(
                "attention_mask contradicts the cache: it is 1 in a past column where the cache holds no token. Pass "
                "the mask of the earlier turn, extended by the new columns"
            )
        return cls._build(mask, present, lengths, past_lengths, mask.cumsum(1)[:, past:] - 1, bool(drops))

    @classmethod
    def packed(cls, position_ids: Tensor) -> Rows:
        """Sequences that follow each other in one row: transformers' packed format, given by positions alone.

        A sequence starts in the first column and wherever the positions go back to 0. Each becomes a row of its own.
        A cache keeps the last sequence of each row, the only one that can go on.

        Args:
            position_ids: ``[B, L]`` int64.

        Example:
            >>> Rows.packed(torch.tensor([[0, 1, 2, 0, 1]])).lengths
            [3, 2]
        """
        batch_size, length = position_ids.shape
        starts = position_ids == 0
        starts[:, 0] = True
        mask = starts.flip(1).cumsum(1).flip(1) - starts.long() == 0
        columns = torch.arange(length, device=starts.device)
        columns = columns - torch.where(starts, columns, 0).cummax(1).values
        begins = [slot for slot, start in enumerate(starts.flatten().tolist()) if start]
        lengths = [b - a for a, b in zip(begins, [*begins[1:], batch_size * length], strict=True)]
        return cls._build(mask, torch.ones_like(mask), lengths, [0] * len(lengths), columns)

    @classmethod
    def _build(
        cls,
        mask: Tensor,
        present: Tensor,
        lengths: list[int],
        past_lengths: list[int],
        columns: Tensor,
        drops: bool = False,
    ) -> Rows:
        batch_size, query_length = present.shape
        total = sum(lengths)
        slots = torch.arange(batch_size * query_length, device=mask.device)
        if total == slots.numel():
            index, columns, back = slots, columns.flatten(), slots.view_as(present)
            return cls(batch_size, query_length, lengths, past_lengths, mask, index, columns, back, drops)
        order = (present.flatten().cumsum(0) - 1).view_as(present)
        # Where each real slot goes; every pad goes to one spare place at the end. No shape depends on device data.
        target = torch.where(present, order, total).flatten()
        index = slots.new_zeros(total + 1).scatter_(0, target, slots)[:total]
        columns = columns.flatten().index_select(0, index)
        back = torch.where(present.cumsum(1) > 0, order, -1)
        return cls(batch_size, query_length, lengths, past_lengths, mask, index, columns, back, drops)

    @functools.cached_property
    def total(self) -> int:
        """``T``, the real tokens of this call."""
        return sum(self.lengths)

    @functools.cached_property
    def width(self) -> int:
        """``W``, the length of the packed sequence: ``T`` and what fills it up to whole tiles."""
        if not self.batch_size * self.query_length:
            return 0
        return max(self.total + -self.total % self.tile, self.tile)

    @property
    def past_slots(self) -> int:
        """``P``, the columns before this call, padding included."""
        return self.mask.shape[1] - self.query_length

    @property
    def dense(self) -> bool:
        """Whether no slot of this call is padding: restoring is then only a view."""
        return self.total == self.batch_size * self.query_length

    @functools.cached_property
    def batch_index(self) -> Tensor:
        """``[T]`` int64, the row of the batch that each packed token stands in."""
        return torch.div(self.index, max(self.query_length, 1), rounding_mode="floor")

    def runs(self) -> list[Run]:
        """The rows that have a token in this call."""
        found, start, key_start = [], 0, 0
        for row, (query, past) in enumerate(zip(self.lengths, self.past_lengths, strict=True)):
            if query:
                found.append(Run(row, query, query + past, start, key_start))
                start, key_start = start + query, key_start + query + past
        return found

    @functools.cached_property
    def key_index(self) -> tuple[Tensor, Tensor]:
        """``[K]`` int64 each: row, and place in it, of the tokens that the rows of this call attend to, row by row."""
        device = self.index.device
        rows = [torch.full((run.key_length,), run.row, device=device) for run in self.runs()]
        return torch.cat(rows), torch.cat([torch.arange(run.key_length, device=device) for run in self.runs()])

    def strip(self, x: Tensor) -> Tensor:
        """``[B, L, ...]`` to the packed ``[1, W, ...]``; a view if nothing has to be left out or filled up."""
        flat = x.flatten(0, 1)
        if self.width == flat.shape[0] == self.total:
            return flat[None]
        return flat.index_select(0, self._slots.to(x.device))[None]

    def strip_positions(self, position_ids: Tensor) -> Tensor:
        """``[..., B or 1, L]`` to ``[..., 1, W]``: a caller's own positions."""
        shape = (*position_ids.shape[:-2], self.batch_size, self.query_length)
        flat = position_ids.expand(shape).flatten(-2)
        return flat.index_select(-1, self._slots.to(flat.device)).unsqueeze(-2)

    def strip_labels(self, labels: Tensor) -> Tensor:
        """``[B, L]`` to ``[1, W]``; the first token of each row is ignored, for nothing comes before it; so are
        tokens of no row and entries that follow the packed tokens."""
        ignored = F.pad(self.columns == 0, (0, self.width - self.total), value=True).to(labels.device)
        packed = self.strip(labels).masked_fill(ignored, IGNORED)
        if self.held is not None:
            packed = torch.cat([packed, packed.new_full((1, self.batch_size), IGNORED)], 1)
        return packed

    def positions(self) -> Tensor:
        """``[1, W]`` int64: each token's place in its own row."""
        return F.pad(self.columns, (0, self.width - self.total))[None]

    def holding(self) -> Rows:
        """The same rows with `held` filled in: what each row showed last is going to follow the packed tokens."""
        rows = torch.arange(self.batch_size, device=self.back.device)[:, None]
        earlier = self.mask[:, : self.past_slots].any(1, keepdim=True)
        return replace(self, held=torch.where((self.back < 0) & earlier, self.width + rows, self.back))

    def last(self, x: Tensor, before: Tensor | None) -> Tensor:
        """``[B, ...]``: what each row of the packed ``[1, W, ...]`` shows last; what it showed ``before`` if it has no
        token in this call, zeros if there is no before."""
        back = self.back[:, -1].to(x.device)
        out = x[0].index_select(0, back.clamp(min=0))
        if self.dense:
            return out
        return torch.where((back < 0)[:, None], torch.zeros_like(out) if before is None else before, out)

    def restore(self, x: Tensor, slots: Tensor | None = None) -> Tensor:
        """The packed ``[1, W, ...]`` back to ``[B, L, ...]``: pads hold the last real token before them, zeros where
        there is none. With ``slots``, ``x`` holds one entry for each of them instead (see `kept`) and the shape of
        ``slots`` leads the result."""
        if slots is None:
            if self.dense:
                return x[0, : self.total].view(self.batch_size, self.query_length, *x.shape[2:])
            back = self.back if self.held is None or x.shape[1] == self.width else self.held
            back = back.to(x.device)
            out = x[0].index_select(0, back.clamp(min=0).flatten()).view(*back.shape, *x.shape[2:])
        else:
            back = self._shown.flatten()[slots].to(x.device)
            out = x[0].reshape(*slots.shape, *x.shape[2:]).clone()
        empty = (back < 0).reshape(*back.shape, *[1] * (out.dim() - back.dim()))
        return out.masked_fill_(empty, 0)  # `out` is a fresh copy: no second one of what may be [B, L, vocabulary]

    def kept(self, slots: Tensor) -> Tensor:
        """For slots of any shape, the packed tokens they show, ``[N]``: what to compute for `restore` with slots."""
        return self._shown.flatten()[slots.flatten()].clamp(min=0)

    @property
    def _shown(self) -> Tensor:
        return self.back if self.held is None else self.held

    def restore_attentions(self, per_run: list[Tensor]) -> Tensor:
        """Attention weights of each run, ``[1, H, n, m]``, to ``[B, H, L, P + L]`` with zeros at pads."""
        sample = per_run[0] if per_run else torch.zeros(0, 1)
        heads = sample.shape[1]
        out = sample.new_zeros(self.batch_size, heads, self.query_length, self.mask.shape[1])
        index, mask = self.index.to(out.device), self.mask.to(out.device)
        for run, weights in zip(self.runs(), per_run, strict=True):
            slots = index[run.start : run.start + run.query_length]
            row, query = int(slots[0]) // self.query_length, slots % self.query_length
            # A row's keys are the real slots of its past and present, or, of several sequences, its own queries.
            real = mask[row].nonzero().squeeze(1)
            keys = real if real.numel() == run.key_length else query + self.past_slots
            out[row, :, query[:, None], keys] = weights[0]
        return out

    @functools.cached_property
    def _slots(self) -> Tensor:
        return F.pad(self.index, (0, self.width - self.total))


def position_ids(attention_mask: Tensor, query_length: int | None = None) -> Tensor:
    """Positions from a mask under any padding: each real token counts the real ones before it; a pad holds the last
    position before it (0 if there is none), so that counting on from the last column is right on either side.

    Args:
        attention_mask: ``[B, S]`` of any dtype, nonzero at real tokens, for past and present.
        query_length: the last columns to return; all of them by default.

    Returns:
        ``[B, query_length]`` int64, on the mask's device.

    Raises:
        ValueError: the mask is not two-dimensional, or has fewer columns than ``query_length``.

    Example:
        >>> position_ids(torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0]])).tolist()
        [[0, 0, 0, 1], [0, 1, 1, 1]]
    """
    if attention_mask.dim() != 2:
        raise ValueError(f"attention_mask must be [batch, slots], got shape {tuple(attention_mask.shape)}")
    slots = attention_mask.shape[1]
    length = slots if query_length is None else query_length
    if not 0 <= length <= slots:
        raise ValueError(f"query_length must lie between 0 and the {slots} columns of attention_mask, got {length}")
    return ((attention_mask != 0).cumsum(1) - 1).clamp(min=0)[:, slots - length :]
