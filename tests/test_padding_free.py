"""A row of a batch gives what it gives alone: forward, outputs, inputs of every kind. And stock does not.

Stated bits: bf16 logits are equal bit for bit, since every matrix kernel with two or more rows rounds alike there; in
fp32 the kernels still see the number of rows, so a row is compared within 1e-4 (of logits up to 30).
"""

import pytest
import torch

import rope_pad_fix

from .conftest import CACHE, FAMILIES, LAYOUTS, batch, ragged, tiny

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.0}


def lone_logits(model, rows, **kwargs):
    return [model(input_ids=row[None], **kwargs).logits[0] for row in rows]


def difference(logits, mask, alone):
    return max((logits[i][mask[i] == 1] - one).abs().max().item() for i, one in enumerate(alone))


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_batch_equals_single_and_single_equals_unpatched(family, dtype, attention):
    model = tiny(family, dtype=dtype, attention=attention)
    rows = ragged()
    unpatched = lone_logits(model, rows)
    stock = {layout: model(*batch(rows, layout)).logits for layout in LAYOUTS}
    rope_pad_fix.apply(model, "padding_free")
    alone = lone_logits(model, rows)
    for mine, stocks in zip(alone, unpatched, strict=True):
        assert torch.equal(mine, stocks)
    for layout in LAYOUTS:
        ids, mask = batch(rows, layout)
        patched = model(ids, mask).logits
        assert difference(patched, mask, alone) <= TOLERANCE[dtype]
        assert torch.isfinite(patched).all()
        # Stock fails this. (In fp32 it hides contiguous padding: RoPE sees distances only.)
        if layout == "holes" or (layout == "left" and dtype == torch.bfloat16):
            assert difference(stock[layout], mask, alone) > (1 if layout == "holes" else 0), "the test cannot fail"


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_layout_padding_length_and_pad_token_change_no_bit(dtype):
    model = rope_pad_fix.apply(tiny(dtype=dtype), "padding_free")
    rows = ragged()
    ids, mask = batch(rows)
    reference = model(ids, mask).logits[mask == 1]
    for layout in LAYOUTS:
        for extra in (0, 1, 7, 64):
            for pad in (0, 5):
                ids, mask = batch(rows, layout, extra, pad)
                assert torch.equal(model(ids, mask).logits[mask == 1], reference)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_neighbours_and_order_change_no_bit(dtype):
    """The same number of rows reaches the matrix kernels: only who is beside whom changes."""
    model = rope_pad_fix.apply(tiny(dtype=dtype), "padding_free")
    needle, *others = ragged((9, 23, 40, 5))
    strangers = ragged((23, 40, 5), seed=1)

    def logits_of_needle(rows, place):
        ids, mask = batch([*rows[:place], needle, *rows[place:]])
        return model(ids, mask).logits[place][mask[place] == 1]

    reference = logits_of_needle(others, 0)
    for rows in (others, others[::-1], strangers):
        for place in range(4):
            assert torch.equal(logits_of_needle(rows, place), reference)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_pads_hold_the_last_real_token_and_zeros_before_the_first(family):
    model = rope_pad_fix.apply(tiny(family), "padding_free")
    rows = ragged()
    ids, mask = batch(rows, "left", extra=2)
    left = model(ids, mask).logits
    assert not left[mask == 0].any()
    ids, mask = batch(rows, "right", extra=2)
    right = model(ids, mask).logits
    for i, row in enumerate(rows):
        assert torch.equal(right[i, len(row) :], right[i, len(row) - 1].expand(right.shape[1] - len(row), -1))
        assert torch.equal(right[i, -1], left[i, -1])


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_to_keep_is_the_same_as_choosing_afterwards(layout):
    """bf16, where the kernels of two or more rows round alike, whatever their number."""
    model = rope_pad_fix.apply(tiny(dtype=torch.bfloat16), "padding_free")
    ids, mask = batch(ragged(), layout, extra=2)
    full = model(ids, mask).logits
    columns = torch.tensor([[0, 5], [1, 1], [3, 41]])
    keep_bool = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.3
    for keep, expected in (
        (1, full[:, -1:]),
        (4, full[:, -4:]),
        (1000, full),
        (torch.tensor([0, 7, 3, -1]), full[:, [0, 7, 3, -1]]),
        (columns, full.take_along_dim(columns[..., None], 1)),
        (keep_bool, full[keep_bool]),
    ):
        assert torch.equal(model(ids, mask, logits_to_keep=keep).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS)
def test_hidden_states_and_attentions_are_laid_back(layout):
    model = rope_pad_fix.apply(tiny(attention="eager"), "padding_free")
    rows = ragged((3, 9, 6))
    ids, mask = batch(rows, layout, extra=1)
    out = model(ids, mask, output_hidden_states=True, output_attentions=True)
    assert len(out.hidden_states) == 4
    assert len(out.attentions) == 3
    for i, row in enumerate(rows):
        alone = model(row[None], output_hidden_states=True, output_attentions=True)
        real = mask[i].nonzero().squeeze(1)
        for batched, single in zip(out.hidden_states, alone.hidden_states, strict=True):
            assert (batched[i, real] - single[0]).abs().max() < 1e-4
        for batched, single in zip(out.attentions, alone.attentions, strict=True):
            assert batched.shape == (3, 4, ids.shape[1], ids.shape[1])
            assert (batched[i][:, real][:, :, real] - single[0]).abs().max() < 1e-5
            pads = (mask[i] == 0).nonzero().squeeze(1)
            assert not batched[i][:, pads].any()
            assert not batched[i][:, :, pads].any()


@torch.no_grad()
def test_attentions_of_a_cached_step_cover_the_past():
    model = rope_pad_fix.apply(tiny(attention="eager"), "padding_free")
    ids, mask = batch(ragged((3, 9)), "right")
    cache = model(ids, mask, use_cache=True)[CACHE]
    mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
    attentions = model(ids[:, :1], mask, **{CACHE: cache}, output_attentions=True).attentions
    assert attentions[0].shape == (2, 4, 1, 10)
    assert torch.equal(attentions[0][0, 0, 0] != 0, mask[0] == 1)


@torch.no_grad()
def test_tuple_output_holds_what_the_object_holds():
    model = rope_pad_fix.apply(tiny(), "padding_free")
    ids, mask = batch(ragged())
    for module in (model, model.model):
        expected = module(ids, mask)
        got = module(ids, mask, return_dict=False)
        assert isinstance(got, tuple)
        assert len(got) == len(expected.to_tuple())
        assert torch.equal(got[0], expected[0])
    model.config.return_dict = False
    assert isinstance(model(ids, mask), tuple)


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS)
def test_embeddings_give_what_ids_give(layout):
    model = rope_pad_fix.apply(tiny(), "padding_free")
    ids, mask = batch(ragged(), layout)
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(model(inputs_embeds=embeds, attention_mask=mask).logits, model(ids, mask).logits)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.float32, torch.bfloat16])
def test_masks_of_any_dtype(dtype):
    model = rope_pad_fix.apply(tiny(), "padding_free")
    ids, mask = batch(ragged(), "holes")
    assert torch.equal(model(ids, mask.to(dtype)).logits, model(ids, mask).logits)


@torch.no_grad()
def test_without_a_mask_every_token_is_real():
    model = tiny()
    ids = torch.stack(ragged((12, 12)))
    stock = model(ids).logits
    rope_pad_fix.apply(model, "padding_free")
    assert torch.equal(model(ids).logits, stock)


@torch.no_grad()
def test_own_positions_are_respected():
    model = tiny()
    row = ragged((12,))[0]
    positions = torch.arange(12)[None] * 3 + 5
    stock = model(row[None], attention_mask=torch.ones(1, 12), position_ids=positions).logits
    rope_pad_fix.apply(model, "padding_free")
    assert torch.equal(model(row[None], attention_mask=torch.ones(1, 12), position_ids=positions).logits, stock)
    ids, mask = batch([row, row[:4]], "left")
    padded = torch.zeros_like(ids)
    padded[0], padded[1, 8:] = positions[0], positions[0, :4]
    got = model(ids, mask, position_ids=padded).logits
    assert (got[0] - stock[0]).abs().max() < 1e-4
    assert (got[0] - model(row[None]).logits[0]).abs().max() > 0.1, "the positions did not matter"


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_four_dimensional_mask_runs_as_ever(attention):
    model = tiny(attention=attention)
    ids, mask = batch(ragged(), "left")
    causal = torch.tril(torch.ones(40, 40, dtype=torch.bool))[None, None] & mask[:, None, None].bool()
    additive = torch.zeros(causal.shape).masked_fill(~causal, torch.finfo(torch.float32).min)
    stock = model(ids, attention_mask=additive).logits
    rope_pad_fix.apply(model, "padding_free")
    assert torch.equal(model(ids, attention_mask=additive).logits, stock)


@torch.no_grad()
def test_sliding_window_counts_real_tokens():
    model = tiny("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert "sliding_attention" in model.config.layer_types
    rows = ragged()
    alone = lone_logits(model, rows)
    ids, mask = batch(rows, "holes")
    assert difference(model(ids, mask).logits, mask, alone) > 1
    rope_pad_fix.apply(model, "padding_free")
    assert difference(model(ids, mask).logits, mask, alone) < 1e-4
    for one, row in zip(alone, rows, strict=True):
        assert torch.equal(model(row[None]).logits[0], one)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_classifier_pools_the_last_real_token(family, layout):
    """Pad equals end of sequence, and rows end in it; embeddings have no pad token at all (FACTS R13)."""
    model = tiny(family, "classifier", num_labels=3)
    rows = [torch.cat([row, torch.tensor([0])]) for row in ragged()]  # token 0 is the pad token
    ids, mask = batch(rows, layout, extra=1)
    embeds = model.get_input_embeddings()(ids)
    stock = model(ids, mask).logits, model(inputs_embeds=embeds, attention_mask=mask).logits
    rope_pad_fix.apply(model, "padding_free")
    ones = [torch.ones(1, len(row)) for row in rows]
    alone = torch.cat([model(row[None], attention_mask=one).logits for row, one in zip(rows, ones, strict=True)])
    assert (stock[0] - alone).abs().max() > 0.1, "the test cannot fail"
    assert layout == "left" or (stock[1] - alone).abs().max() > 0.1, "the test cannot fail"
    labels = torch.tensor([0, 2, 1])
    out = model(ids, mask, labels=labels)
    assert (out.logits - alone).abs().max() < 1e-4
    assert torch.allclose(out.loss, torch.nn.functional.cross_entropy(alone, labels), atol=1e-5)
    assert torch.equal(model(inputs_embeds=embeds, attention_mask=mask).logits, out.logits)
    assert torch.equal(model(ids, mask, return_dict=False)[0], out.logits)


@torch.no_grad()
def test_lone_classifier_equals_unpatched():
    model = tiny(head="classifier", num_labels=3)
    rows = ragged()
    stock = [model(row[None]).logits for row in rows]
    rope_pad_fix.apply(model, "padding_free")
    for one, row in zip(stock, rows, strict=True):
        assert torch.equal(model(row[None]).logits, one)


@torch.no_grad()
def test_packed_sequences_without_a_mask_are_kept_apart():
    """Restarting positions and no mask are transformers' packed format; stock keeps it only without a cache."""
    model = tiny()
    rows = ragged((7, 4, 9))
    flat = torch.cat(rows)[None]
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    alone = torch.cat(lone_logits(model, rows))
    assert (model(flat, position_ids=positions, use_cache=True).logits[0] - alone).abs().max() > 1
    rope_pad_fix.apply(model, "padding_free")
    for use_cache in (False, True):
        out = model(flat, position_ids=positions, use_cache=use_cache)
        assert (out.logits[0] - alone).abs().max() < 1e-4
    # The cache goes on with the last sequence.
    step = model(torch.tensor([[5]]), **{CACHE: out[CACHE]}).logits[0, -1]
    assert (step - model(torch.cat([rows[2], torch.tensor([5])])[None]).logits[0, -1]).abs().max() < 1e-4


# The recipes of the measured facts: each fails on the unpatched model.


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_r3_right_padded_prefill_then_a_step_without_positions(family):
    model = tiny(family)
    rows, new = ragged((5, 23)), torch.tensor([[7], [9]])

    def step():
        ids, mask = batch(rows, "right")
        cache = model(ids, mask, use_cache=True)[CACHE]
        full = torch.cat([mask, mask.new_ones(2, 1)], 1)
        return model(new, attention_mask=full, **{CACHE: cache}).logits[:, -1]

    alone = torch.stack([model(torch.cat([row, n])[None]).logits[0, -1] for row, n in zip(rows, new, strict=True)])
    assert (step() - alone).abs().max() > 0.3
    rope_pad_fix.apply(model, "padding_free")
    assert (step() - alone).abs().max() < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("level", ["padding_free", "positions"])
def test_r4_left_padded_prefill_with_positions_then_a_step_without(level):
    model = tiny()
    rows, new = ragged((5, 23)), torch.tensor([[7], [9]])

    def step():
        ids, mask = batch(rows, "left")
        cache = model(ids, mask, position_ids=rope_pad_fix.position_ids(mask), use_cache=True)[CACHE]
        full = torch.cat([mask, mask.new_ones(2, 1)], 1)
        return model(new, attention_mask=full, **{CACHE: cache}).logits[:, -1]

    alone = torch.stack([model(torch.cat([row, n])[None]).logits[0, -1] for row, n in zip(rows, new, strict=True)])
    assert (step() - alone).abs().max() > 0.3
    rope_pad_fix.apply(model, level)
    assert (step() - alone).abs().max() < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("level", ["padding_free", "positions"])
def test_r5_padding_between_prefix_and_text(level):
    model = tiny()
    rows = ragged()
    alone = lone_logits(model, rows)
    ids, mask = batch(rows, "holes", extra=4)
    assert difference(model(ids, mask).logits, mask, alone) > 1
    rope_pad_fix.apply(model, level)
    assert difference(model(ids, mask).logits, mask, alone) < 1e-4


@pytest.mark.parametrize("level", ["padding_free", "positions"])
def test_r14_left_padding_adds_no_target(level):
    model = tiny()
    rows = ragged()

    def losses():
        out = []
        for layout in ("left", "right"):
            ids, mask = batch(rows, layout)
            out.append(model(ids, mask, labels=ids.masked_fill(mask == 0, -100)).loss)
        return out

    left, right = losses()
    assert (left - right).abs() > 1e-2
    rope_pad_fix.apply(model, level)
    left, right = losses()
    if level == "padding_free":
        assert torch.equal(left, right)
    assert (left - right).abs() < 1e-5
    targets = torch.cat([model(row[None]).logits[0, :-1] for row in rows])
    expected = torch.nn.functional.cross_entropy(targets, torch.cat([row[1:] for row in rows]))
    assert (left - expected).abs() < 1e-4


@torch.no_grad()
def test_r16_positions_without_a_mask_mean_the_same_with_and_without_a_cache():
    model = tiny()
    rows = ragged((6, 9))
    ids, mask = batch(rows, "left")
    clamped = rope_pad_fix.position_ids(mask)
    gap = torch.tensor([[0, 1, 2, 7, 8, 9, 10, 11, 12]] * 2)

    def drift(positions):
        apart = [model(ids, position_ids=positions, use_cache=use_cache).logits for use_cache in (False, True)]
        return (apart[0] - apart[1])[mask == 1].abs().max().item()

    assert drift(clamped) > 1
    assert drift(gap) > 1
    model.config.pad_token_id = None  # without a mask, pads cannot be told; no warning here
    rope_pad_fix.apply(model, "padding_free")
    assert drift(clamped) == 0
    assert drift(gap) == 0
