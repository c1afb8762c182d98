"""`Rows` against a plain Python loop, for any mask."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rope_pad_fix import position_ids
from rope_pad_fix.rows import Rows


@st.composite
def masks(draw):
    """A mask ``[B, P + L]`` and its ``L``: any zeros and ones, empty rows and single tokens included."""
    batch = draw(st.integers(1, 5))
    past, length = draw(st.integers(0, 6)), draw(st.integers(1, 8))
    rows = draw(
        st.lists(
            st.lists(st.integers(0, 1), min_size=past + length, max_size=past + length), min_size=batch, max_size=batch
        )
    )
    dtype = draw(st.sampled_from([torch.int64, torch.bool, torch.float32, torch.int32, torch.uint8]))
    return torch.tensor(rows).to(dtype), length


def plain(mask, length):
    """The same analysis, one slot at a time."""
    rows = mask.int().tolist()
    past = len(rows[0]) - length
    index, columns, back, lengths, past_lengths = [], [], [], [], []
    for b, row in enumerate(rows):
        seen = past_lengths_b = sum(row[:past])
        last, shown = -1, []
        for column in range(length):
            if row[past + column]:
                last = len(index)
                index.append(b * length + column)
                columns.append(seen)
                seen += 1
            shown.append(last)
        back.append(shown)
        past_lengths.append(past_lengths_b)
        lengths.append(seen - past_lengths_b)
    return index, columns, back, lengths, past_lengths


@given(masks())
def test_analysis_agrees_with_a_plain_loop(case):
    mask, length = case
    rows = Rows.from_mask(mask, length)
    index, columns, back, lengths, past_lengths = plain(mask, length)
    assert rows.index.tolist() == index
    assert rows.columns.tolist() == columns
    assert rows.back.tolist() == back
    assert (rows.lengths, rows.past_lengths) == (lengths, past_lengths)
    assert rows.batch_index.tolist() == [i // length for i in index]
    assert rows.total == len(index)
    assert torch.equal(rows.mask, mask != 0)


@given(masks())
def test_restore_after_strip_holds_the_last_real_token(case):
    mask, length = case
    rows = Rows.from_mask(mask, length)
    x = torch.arange(1, mask.shape[0] * length + 1).view(mask.shape[0], length, 1).float().expand(-1, -1, 3)
    restored = rows.restore(rows.strip(x))
    for b, row in enumerate(mask[:, mask.shape[1] - length :].int().tolist()):
        held = torch.zeros(3)
        for column, real in enumerate(row):
            held = x[b, column] if real else held
            assert torch.equal(restored[b, column], held)


@given(masks(), st.data())
def test_restoring_chosen_slots_is_choosing_from_the_restored(case, data):
    mask, length = case
    rows = Rows.from_mask(mask, length)
    packed = torch.randn(1, max(rows.total, 1), 2)
    slots = torch.tensor(
        [data.draw(st.lists(st.integers(0, mask.shape[0] * length - 1), min_size=1, max_size=4)) for _ in range(1)]
    )
    chosen = rows.restore(packed.index_select(1, rows.kept(slots)), slots)
    assert torch.equal(chosen, rows.restore(packed).flatten(0, 1)[slots])


@given(masks(), st.sampled_from([2, 4, 64]))
def test_tokens_of_no_row_fill_up_the_width_and_are_seen_nowhere(case, tile):
    mask, length = case
    plain, tiled = (dataclasses.replace(Rows.from_mask(mask, length), tile=n) for n in (1, tile))
    x = torch.arange(mask.shape[0] * length).view(-1, length) + 1
    packed = tiled.strip(x)
    assert packed.shape == tiled.positions().shape == tiled.strip_positions(x).shape == (1, tiled.width)
    assert tiled.width == max(-(-plain.total // tile), 1) * tile
    assert torch.equal(tiled.restore(packed), plain.restore(plain.strip(x)))
    assert torch.equal(tiled.last(packed[..., None], None), plain.last(plain.strip(x)[..., None], None))
    labels = tiled.strip_labels(x)
    assert (labels[:, plain.total :] == -100).all()
    assert torch.equal(labels[:, : plain.total], plain.strip_labels(x)[:, : plain.total])


@given(masks())
def test_runs_are_the_rows_with_tokens(case):
    mask, length = case
    rows = Rows.from_mask(mask, length)
    expected, start = [], 0
    for row, (n, past) in enumerate(zip(rows.lengths, rows.past_lengths, strict=True)):
        if n:
            expected.append((row, n, n + past, start))
        start += n
    assert [(run.row, run.query_length, run.key_length, run.start) for run in rows.runs()] == expected


@given(masks())
def test_position_ids_count_real_tokens_and_hold_the_last(case):
    mask, length = case
    positions = position_ids(mask, length)
    for row, expected in zip(mask.int().tolist(), positions.tolist(), strict=True):
        counted = [max(sum(row[: column + 1]) - 1, 0) for column in range(len(row))]
        assert counted[len(row) - length :] == expected


@given(masks())
def test_labels_of_pads_and_first_tokens_are_ignored(case):
    mask, length = case
    rows = Rows.from_mask(mask, length)
    labels = torch.arange(mask.shape[0] * length).view(mask.shape[0], length)
    packed = rows.strip_labels(labels)[0].tolist()
    if not rows.total:
        assert packed == [-100]
        return
    index, columns, *_ = plain(mask, length)
    assert packed == [-100 if column == 0 else slot for slot, column in zip(index, columns, strict=True)]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_packed_sequences_become_rows(lengths):
    rows = Rows.packed(torch.cat([torch.arange(n) for n in lengths])[None])
    assert rows.lengths == lengths
    assert rows.columns.tolist() == [i for n in lengths for i in range(n)]
    assert rows.mask.tolist() == [[False] * sum(lengths[:-1]) + [True] * lengths[-1]]


def test_own_positions_that_do_not_restart_stay_one_row():
    assert Rows.packed(torch.tensor([[0, 1, 2, 7, 8], [3, 4, 5, 6, 7]])).lengths == [5, 5]


def test_full_is_a_mask_of_ones():
    full, masked = Rows.full(2, 3), Rows.from_mask(torch.ones(2, 3), 3)
    assert full.lengths == masked.lengths
    for name in ("index", "columns", "back", "mask"):
        assert torch.equal(getattr(full, name), getattr(masked, name))


def test_cached_tokens_may_be_left_out_but_not_asked_for():
    cached = torch.tensor([[True, False]])
    assert Rows.from_mask(torch.tensor([[0, 0, 1]]), 1, cached).drops
    assert not Rows.from_mask(torch.tensor([[1, 0, 1]]), 1, cached).drops
    with pytest.raises(ValueError, match="contradicts the cache"):
        Rows.from_mask(torch.tensor([[1, 1, 1]]), 1, cached)
