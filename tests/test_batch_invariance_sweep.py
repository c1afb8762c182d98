"""Level "batch_invariant" on drawn batches: any rows, under any mask, in any pieces, give the bits they give alone.

A row is given to the model in pieces of some of its tokens: a piece is as long alone as in the batch, where every call
is padded by itself, in a drawn layout. Some pieces are empty; alone they are no call at all."""

import functools
import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rope_pad_fix

from .conftest import CACHE, FAMILIES, LAYOUTS, MIXTURES, tiny

DTYPES = ("float32", "bfloat16", "float16")
STEPS = 2  # greedy ones, after all pieces


@dataclass(frozen=True)
class Call:
    """One call of a batch: how many tokens each row gets, and how they lie in its columns."""

    counts: tuple[int, ...]
    layouts: tuple[str, ...]
    extra: int  # columns beyond the longest
    seed: int  # of the places, in the layout "anywhere"


@st.composite
def pieces(draw):
    """All calls of a batch of one to six rows; every row gets a token in one of them."""
    count = draw(st.integers(1, 6))
    split = draw(st.sampled_from(["one prefill", "chunks", "step by step"]))
    calls, longest = {"one prefill": (1, 20), "chunks": (draw(st.integers(2, 4)), 9), "step by step": (6, 1)}[split]
    drawn = []
    for call in range(calls):
        counts = draw(st.lists(st.integers(0, longest), min_size=count, max_size=count))
        if call == 0:
            first = counts
        if call == calls - 1:
            before = [sum(column) for column in zip(first, *(each.counts for each in drawn), strict=True)]
            counts = [n if n or seen else 1 for n, seen in zip(counts, before, strict=True)]
        layouts = st.lists(st.sampled_from([*LAYOUTS, "anywhere"]), min_size=count, max_size=count)
        extra, seed = draw(st.integers(0, 5)), draw(st.integers(0, 99))
        drawn.append(Call(tuple(counts), tuple(draw(layouts)), extra, seed))
    return drawn


batches = {
    "family": st.sampled_from([*FAMILIES, *MIXTURES, "window"]),
    "dtype": st.sampled_from(DTYPES),
    "attention": st.sampled_from(["sdpa", "eager"]),
    "threads": st.sampled_from([1, 2]),
    "calls": pieces(),
    "tokens": st.integers(0, 2**32 - 1),
}


@functools.cache
def model_of(family, dtype, attention, level="batch_invariant"):
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1} if family == "window" else {}
    family = "qwen2" if window else family
    return rope_pad_fix.apply(tiny(family, dtype=getattr(torch, dtype), attention=attention, **window), level)


def places(call, row, width):
    """The columns of a row's tokens."""
    n, layout = call.counts[row], call.layouts[row]
    if layout == "anywhere":
        return sorted(random.Random(call.seed * 100 + row).sample(range(width), n))
    head = {"left": 0, "right": n, "holes": n // 2}[layout]
    return [*range(head), *range(width - (n - head), width)]


def forward(model, ids, mask, cache):
    return model(input_ids=ids, attention_mask=mask, use_cache=True, **({CACHE: cache} if cache else {}))


@torch.no_grad()
def run(model, rows, calls):
    """Of each row: the logits of all its tokens and greedy steps, the tokens of these, its keys and values."""
    logits = [[] for _ in rows]
    given = [0] * len(rows)
    mask, cache = torch.zeros(len(rows), 0, dtype=torch.long), None
    for call in calls:
        width = max(call.counts) + call.extra
        if not width:
            continue
        ids, new = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
        for i, row in enumerate(rows):
            columns = places(call, i, width)
            ids[i, columns] = row[given[i] : given[i] + len(columns)]
            new[i, columns] = 1
            given[i] += len(columns)
        mask = torch.cat([mask, new], 1)
        out = forward(model, ids, mask, cache)
        cache = out[CACHE]
        for i in range(len(rows)):
            logits[i].append(out.logits[i][new[i] == 1])
    last = out.logits[:, -1:]  # what each row showed last, whichever call it was in
    picked = []
    for _ in range(STEPS):
        picked.append(last.argmax(-1))
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
        out = forward(model, picked[-1], mask, cache)
        last = out.logits
        for i in range(len(rows)):
            logits[i].append(last[i])
    states = [x.transpose(1, 2) for layer in cache.layers for x in (layer.keys, layer.values)]
    picked = torch.cat(picked, 1)
    return [(torch.cat(logits[i]), picked[i], *(x[i][real == 1] for x in states)) for i, real in enumerate(mask)]


def differing(model, calls, tokens):
    """Of each row, whether anything about it is not what it is alone, in the same pieces."""
    lengths = [sum(counts) for counts in zip(*(call.counts for call in calls), strict=True)]
    generator = torch.Generator().manual_seed(tokens)
    rows = [torch.randint(0, 128, (n,), generator=generator) for n in lengths]
    together = run(model, rows, calls)
    found = []
    for i, row in enumerate(rows):
        own = [Call((call.counts[i],), ("left",), 0, 0) for call in calls if call.counts[i]]
        (alone,) = run(model, [row], own)
        assert len(alone[0]) == len(row) + STEPS
        found.append(not all(torch.equal(a, b) for a, b in zip(alone, together[i], strict=True)))
    return found


def check(family, dtype, attention, threads, calls, tokens):
    torch.set_num_threads(threads)
    assert not any(differing(model_of(family, dtype, attention), calls, tokens))


common = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=60, **common)
@given(**batches)
def test_a_row_is_as_alone(**drawn):
    check(**drawn)


@pytest.mark.slow
@settings(max_examples=2000, derandomize=True, database=None, **common)
@given(**batches)
def test_a_row_is_as_alone_in_two_thousand_batches(**drawn):
    check(**drawn)


@pytest.mark.parametrize(
    "counts", [[(5, 9, 2)], [(2, 4, 1), (3, 5, 1)], [(1, 1, 1)] * 3], ids=["one", "chunks", "steps"]
)
def test_other_levels_fail(counts):
    """In float32, where the number of rows shows in any product. Without this the sweep could be blind."""
    calls = [Call(each, ("left", "right", "holes"), 1, 0) for each in counts]
    assert any(differing(model_of("llama", "float32", "sdpa", "padding_free"), calls, 0))
    assert not any(differing(model_of("llama", "float32", "sdpa"), calls, 0))
