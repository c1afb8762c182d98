"""Everything `generate` does with a cache, each row against its lone run on the unpatched model."""

import copy

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache

import rope_pad_fix
from rope_pad_fix.cache import RowLayer

from .conftest import CACHE, FAMILIES, LAYOUTS, batch, ragged, tiny

NEW = 12
V5 = Version(transformers.__version__).major >= 5
needs_v5 = pytest.mark.skipif(not V5, reason="transformers 4 gives chunks positions that count padding")


def generate(model, ids, mask, **kwargs):
    """Greedy by default, new tokens only."""
    out = model.generate(
        ids, attention_mask=mask, **({"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0} | kwargs)
    )
    return out[:, ids.shape[1] :]


def alone(model, rows, **kwargs):
    return torch.cat([generate(model, row[None], torch.ones(1, len(row)).long(), **kwargs) for row in rows])


def steps(model, ids, mask, tokens=5, **kwargs):
    """Greedy decoding by hand: one forward with a cache, then single tokens, positions left to the model."""
    out = model(ids, attention_mask=mask, use_cache=True, **kwargs)
    picked = []
    for _ in range(tokens):
        picked.append(out.logits[:, -1:].argmax(-1))
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        out = model(picked[-1], attention_mask=mask, **{CACHE: out[CACHE]})
    return torch.cat(picked, 1), out[CACHE], mask


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy(family, layout):
    """FACTS R2: stock right padding gets hardly a token right."""
    model, rows = tiny(family), ragged()
    expected = alone(model, rows)
    ids, mask = batch(rows, layout)
    stock = generate(model, ids, mask)
    rope_pad_fix.apply(model)
    assert torch.equal(alone(model, rows), expected)
    assert torch.equal(generate(model, ids, mask), expected)
    if layout == "right":
        assert not torch.equal(stock, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "mode",
    [
        {"use_cache": False},
        pytest.param({"prefill_chunk_size": 7}, marks=needs_v5),
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 2, "top_k": 1},
        {"repetition_penalty": 1.3},
        {"cache_implementation": "dynamic"},
    ],
    ids=lambda mode: "-".join(mode),
)
def test_modes(mode, layout):
    model, rows = tiny(), ragged()
    expected = alone(model, rows, **mode)
    rope_pad_fix.apply(model)
    ids, mask = batch(rows, layout)
    assert torch.equal(generate(model, ids, mask, **mode), expected)


@needs_v5
def test_chunks_of_nothing_but_padding():
    """A chunk that holds no real token of any row computes nothing and moves on."""
    model, row = tiny(), ragged((6,))
    expected = alone(model, row)
    rope_pad_fix.apply(model)
    for layout in ("left", "right"):
        ids, mask = batch(row, layout, extra=20)
        assert torch.equal(generate(model, ids, mask, prefill_chunk_size=4), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("with_ids", [False, True])
def test_from_embeddings(layout, with_ids):
    model, rows = tiny(), ragged()
    expected = alone(model, rows)
    rope_pad_fix.apply(model)
    ids, mask = batch(rows, layout)
    out = model.generate(
        *([ids] if with_ids else []),
        inputs_embeds=model.get_input_embeddings()(ids),
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=NEW,
        pad_token_id=0,
    )
    assert torch.equal(out[:, -NEW:], expected)


@pytest.mark.parametrize("assistant", ["model", "prompt_lookup"])
def test_assisted_decoding_of_one_row(assistant):
    model, draft = tiny(), tiny(num_hidden_layers=1)
    row = ragged((23,))
    expected = alone(model, row)
    rope_pad_fix.apply(model)
    kwargs = (
        {"assistant_model": draft} if assistant == "model" else {"prompt_lookup_num_tokens": 3, "eos_token_id": 127}
    )
    ids, mask = batch(row)
    assert torch.equal(generate(model, ids, mask, **kwargs), expected)
    rope_pad_fix.apply(draft)
    assert torch.equal(generate(model, ids, mask, **kwargs), expected)


def test_sampling_follows_the_seed():
    model, rows = tiny(), ragged()
    ids, mask = batch(rows)
    torch.manual_seed(1)
    stock = generate(model, ids, mask, do_sample=True)
    rope_pad_fix.apply(model)
    torch.manual_seed(1)
    assert torch.equal(generate(model, ids, mask, do_sample=True), stock)


@torch.no_grad()
@pytest.mark.parametrize("second", LAYOUTS)
@pytest.mark.parametrize("first", LAYOUTS)
def test_a_second_turn_continues_the_first(first, second):
    """Both turns padded, in any layout: the cache holds no pad of either."""
    model, turn1, turn2 = tiny(), ragged(), ragged((9, 2, 14), seed=1)
    expected = alone(model, [torch.cat(pair) for pair in zip(turn1, turn2, strict=True)])
    rope_pad_fix.apply(model)
    ids1, mask1 = batch(turn1, first)
    ids2, mask2 = batch(turn2, second)
    cache = model(ids1, attention_mask=mask1, use_cache=True)[CACHE]
    assert cache.get_seq_length() == ids1.shape[1]
    ids, mask = torch.cat([ids1, ids2], 1), torch.cat([mask1, mask2], 1)
    assert torch.equal(generate(model, ids, mask, **{CACHE: cache}), expected)


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cache_of_the_unpatched_model_is_taken_over(layout):
    model, turn1, turn2 = tiny(), ragged(), ragged((9, 2, 14), seed=1)
    expected = alone(model, [torch.cat(pair) for pair in zip(turn1, turn2, strict=True)])
    ids1, mask1 = batch(turn1, layout)
    positions = rope_pad_fix.position_ids(mask1)
    cache = model(ids1, attention_mask=mask1, position_ids=positions, use_cache=True)[CACHE]
    before = [copy.deepcopy(layer.keys) for layer in cache.layers]
    kept = [layer.keys for layer in cache.layers]
    rope_pad_fix.apply(model)
    ids2, mask2 = batch(turn2, "left")
    ids, mask = torch.cat([ids1, ids2], 1), torch.cat([mask1, mask2], 1)
    assert torch.equal(generate(model, ids, mask, **{CACHE: cache}), expected)
    assert all(isinstance(layer, RowLayer) for layer in cache.layers)
    for old, now in zip(before, kept, strict=True):
        assert torch.equal(old, now)  # the caller's own tensors were not written to


@torch.no_grad()
def test_rows_that_ended_early_go_on_without_their_padding():
    """After an end of sequence `generate` feeds pads as real tokens; the next turn's mask may leave them out."""
    model, turn1, turn2 = tiny(), ragged(), ragged((9, 2, 14), seed=1)
    rope_pad_fix.apply(model)
    ids1, mask1 = batch(turn1)
    out = model.generate(
        ids1, attention_mask=mask1, do_sample=False, max_new_tokens=6, pad_token_id=0, return_dict_in_generate=True
    )
    said = torch.tensor([6, 2, 4])  # of each row's six tokens, the first so many count
    mask = torch.cat([mask1, (torch.arange(6) < said[:, None]).long()], 1)
    ids2, mask2 = batch(turn2, "left")
    ids, mask = torch.cat([out.sequences, ids2], 1), torch.cat([mask, mask2], 1)
    rows = [row[real == 1] for row, real in zip(ids, mask, strict=True)]
    assert torch.equal(generate(model, ids, mask, **{CACHE: out[CACHE]}), alone(model, rows))


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_by_hand_need_no_positions(layout):
    model, rows = tiny(), ragged()
    expected = alone(model, rows, max_new_tokens=5)
    rope_pad_fix.apply(model)
    assert torch.equal(steps(model, *batch(rows, layout))[0], expected)


@torch.no_grad()
def test_without_a_mask_the_cache_remembers_its_padding():
    model, rows = tiny(), ragged()
    rope_pad_fix.apply(model)
    _, cache, mask = steps(model, *batch(rows, "right"))
    again = copy.deepcopy(cache)
    new = torch.tensor([[7], [8], [9]])
    given = model(new, attention_mask=torch.cat([mask, mask.new_ones(3, 1)], 1), **{CACHE: cache}).logits
    assert torch.equal(model(new, **{CACHE: again}).logits, given)


@torch.no_grad()
def test_crop_takes_back_slots():
    model, rows = tiny(), ragged()
    rope_pad_fix.apply(model)
    ids, mask = batch(rows, "right")
    _, cache, longer = steps(model, ids, mask, tokens=3)
    first = model(ids[:, :1], attention_mask=longer[:, :-1], **{CACHE: cropped(cache, -2)}).logits
    fresh = model(ids, attention_mask=mask, use_cache=True)
    picked = fresh.logits[:, -1:].argmax(-1)
    two = torch.cat([mask, mask.new_ones(3, 1)], 1)
    again = model(picked, attention_mask=two, **{CACHE: fresh[CACHE]})[CACHE]
    assert torch.equal(model(ids[:, :1], attention_mask=longer[:, :-1], **{CACHE: again}).logits, first)


def cropped(cache, slots):
    cache = copy.deepcopy(cache)
    cache.crop(slots)
    return cache


@torch.no_grad()
def test_reorder_select_and_repeat_move_rows():
    model, rows = tiny(), ragged()
    rope_pad_fix.apply(model)
    _, cache, mask = steps(model, *batch(rows, "holes"), tokens=2)
    new = torch.tensor([[7], [8], [9]])

    def step(cache, order):
        full = torch.cat([mask[order], mask.new_ones(len(order), 1)], 1)
        return model(new[order], attention_mask=full, **{CACHE: cache}).logits

    def moved(method, argument):
        copied = copy.deepcopy(cache)
        getattr(copied, method)(argument)
        return copied

    every = step(copy.deepcopy(cache), torch.tensor([0, 1, 2]))
    for method, argument, order in (
        ("reorder_cache", torch.tensor([2, 0, 1]), [2, 0, 1]),
        ("batch_select_indices", torch.tensor([2, 1, 0]), [2, 1, 0]),
        ("batch_repeat_interleave", 2, [0, 0, 1, 1, 2, 2]),
    ):
        got = step(moved(method, argument), torch.tensor(order))
        assert (got - every[order]).abs().max() < 1e-4, method
    reset = copy.deepcopy(cache)
    reset.reset()
    assert reset.get_seq_length() == 0


@torch.no_grad()
def test_buffers_grow_by_doubling_and_hold_no_padding():
    model, rows = tiny(), ragged((5, 23, 40))
    rope_pad_fix.apply(model)
    ids, mask = batch(rows, "left", extra=50)
    cache = model(ids, attention_mask=mask, use_cache=True)[CACHE]
    assert cache.layers[0].key_buffer.shape[2] == 64  # 40, in whole buckets of 32
    capacities = []
    for _ in range(45):
        mask = torch.cat([mask, mask.new_ones(3, 1)], 1)
        model(ids[:, :1], attention_mask=mask, **{CACHE: cache})
        capacities.append(cache.layers[0].key_buffer.shape[2])
    assert sorted(set(capacities)) == [64, 128]


@torch.no_grad()
def test_a_patched_cache_reads_as_a_padded_one():
    """`layer.keys` shows what stock would hold at the real slots, and zeros at pads; unpatched code can go on."""
    model, rows = tiny(), ragged()
    ids, mask = batch(rows, "left")
    positions = rope_pad_fix.position_ids(mask)
    stock = model(ids, attention_mask=mask, position_ids=positions, use_cache=True)[CACHE]
    rope_pad_fix.apply(model)
    cache = model(ids, attention_mask=mask, use_cache=True)[CACHE]
    real = mask.bool()
    for mine, theirs in zip(cache.layers, stock.layers, strict=True):
        for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            assert a.shape == b.shape
            assert (a.transpose(1, 2)[real] - b.transpose(1, 2)[real]).abs().max() < 1e-4
            assert not a.transpose(1, 2)[~real].any()
    rope_pad_fix.remove(model)
    full = torch.cat([mask, mask.new_ones(3, 1)], 1)
    step = {"attention_mask": full, "position_ids": rope_pad_fix.position_ids(full, 1)}
    got, expected = (model(ids[:, :1], **step, **{CACHE: c}).logits for c in (cache, stock))
    assert (got - expected).abs().max() < 1e-4


def test_an_inference_mode_cache_goes_on_outside_of_it():
    model, rows = tiny(), ragged()
    rope_pad_fix.apply(model)
    ids, mask = batch(rows)
    with torch.inference_mode():
        cache = model(ids, attention_mask=mask, use_cache=True)[CACHE]
        for _ in range(2):
            mask = torch.cat([mask, mask.new_ones(3, 1)], 1)
            expected = model(ids[:, :1], attention_mask=mask, **{CACHE: copy.deepcopy(cache)}).logits
            model(ids[:, :1], attention_mask=mask, **{CACHE: cache})
    mask = torch.cat([mask, mask.new_ones(3, 1)], 1)
    with torch.no_grad():
        assert torch.isfinite(model(ids[:, :1], attention_mask=mask, **{CACHE: cache}).logits).all()
    assert torch.isfinite(expected).all()


@torch.no_grad()
def test_a_cache_given_empty_is_filled_in_place():
    model, rows = tiny(), ragged()
    rope_pad_fix.apply(model)
    ids, mask = batch(rows)
    for cache in (DynamicCache(), DynamicCache(config=model.config)):
        out = model(ids, attention_mask=mask, **{CACHE: cache})
        assert out[CACHE] is cache
        assert cache.get_seq_length() == ids.shape[1]
