"""A real model, SmolLM2-135M-Instruct, and real prompts of 5 to 100 tokens."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import rope_pad_fix

from .conftest import batch

PROMPTS = (
    "The capital of France is",
    "Q: What is 12 times 7?\nA:",
    "def fibonacci(n):\n    ",
    "Write a short story about a dog who finds an old map in the garden.",
    "Once upon a time, in a village by the sea, there lived an old fisherman who never",
    "List three reasons why the sky is blue, and explain each of them with an example from everyday life.",
    "Translate into German: " + "The weather is nice today, and we are going to the beach with our friends. " * 2,
    "Summarise the following text in one sentence. The old library at the corner of the square had been closed for "
    "years when a letter arrived at the town hall. It was written in a careful hand, and it asked, politely but "
    "firmly, that the building be opened again, for there were books in it that someone still wanted to read, and "
    "that nobody else in the whole country seemed to own any more.\nSummary:",
)
NEW = 48


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request, smollm2_path):
    dtype = getattr(torch, request.param)
    return AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=dtype).eval()


@pytest.fixture(scope="module")
def rows(smollm2_tokenizer):
    rows = [torch.tensor(smollm2_tokenizer(prompt).input_ids) for prompt in PROMPTS]
    assert min(map(len, rows)) == 5
    assert 80 <= max(map(len, rows)) <= 100
    return rows


def generate(model, ids, mask):
    out = model.generate(ids, attention_mask=mask, do_sample=False, min_new_tokens=NEW, max_new_tokens=NEW)
    return out[:, ids.shape[1] :]


@torch.no_grad()
def test_prompt_logits(model, rows):
    """Patched batch against patched lone rows, and these against unpatched lone rows, on both sides."""
    stock = [model(row[None]).logits[0] for row in rows]
    ids, mask = batch(rows, "left")
    drift = (model(ids, attention_mask=mask).logits[mask == 1].float() - torch.cat(stock).float()).abs().max()
    with rope_pad_fix.applied(model, "padding_free"):
        alone = [model(row[None]).logits[0] for row in rows]
        for mine, theirs in zip(alone, stock, strict=True):
            assert torch.equal(mine, theirs)
        reference = None
        for side in ("left", "right"):
            for extra in (0, 1, 7, 64):
                ids, mask = batch(rows, side, extra, pad=2 if extra else 0)
                got = model(ids, attention_mask=mask).logits[mask == 1]
                reference = got if reference is None else reference
                assert torch.equal(got, reference)
    if model.dtype == torch.bfloat16:
        assert drift > 0.25, "stock passes, so the test cannot fail"
        assert torch.equal(reference, torch.cat(alone))
    else:
        assert (reference - torch.cat(alone)).abs().max() < 1e-4


@torch.no_grad()
def test_greedy_text(model, rows):
    """fp32: every row as if alone. bf16: decoding one row takes another matrix kernel (M = 1) than eight rows do, and
    rows part from it after some tokens, at this level; both sides still give the same batch, bit for bit."""
    with rope_pad_fix.applied(model, "padding_free"):
        left, right = (generate(model, *batch(rows, side)) for side in ("left", "right"))
        assert torch.equal(left, right)
        if model.dtype == torch.float32:
            for row, batched in zip(rows, left, strict=True):
                assert torch.equal(generate(model, row[None], torch.ones(1, len(row)).long())[0], batched)
    assert (generate(model, *batch(rows, "right")) != left).any(), "stock passes, so the test cannot fail"


def test_every_bit_at_level_batch_invariant(model):
    """Prompts, decoding, keys and values; 9 heads of 3 key heads, which two threads cannot share evenly."""
    assert not rope_pad_fix.verify(model, cases=1, batch_size=4, max_length=16), "stock passes, so the test cannot fail"
    with rope_pad_fix.applied(model, "batch_invariant"):
        verdict = rope_pad_fix.verify(model, cases=3, batch_size=6, max_length=40)
    assert verdict, verdict
