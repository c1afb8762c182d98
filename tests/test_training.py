"""Training sees real tokens only: a left-padded and a right-padded step are the same computation."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

import rope_pad_fix

from .conftest import FAMILIES, LAYOUTS, MIXTURES, batch, ragged, tiny


def gradients(model, layout, rows=None, embeds=False, **kwargs):
    """Loss and gradients of one training step."""
    ids, mask = batch(ragged() if rows is None else rows, layout)
    model.zero_grad()
    inputs = {"inputs_embeds": model.get_input_embeddings()(ids)} if embeds else {"input_ids": ids}
    loss = model(**inputs, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), **kwargs).loss
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def equal(a, b):
    return torch.equal(a[0], b[0]) and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_gives_the_same_gradients_bit_for_bit(family, dtype, attention):
    model = tiny(family, dtype=dtype, attention=attention).train()
    assert not equal(gradients(model, "left"), gradients(model, "right"))
    rope_pad_fix.apply(model)
    left = gradients(model, "left")
    assert all(gradient.isfinite().all() for gradient in left[1])
    for layout in LAYOUTS:
        assert equal(gradients(model, layout), left)


@pytest.mark.parametrize("options", [{"use_cache": False}, {"use_cache": True}, {"embeds": True}], ids=str)
def test_cache_and_embeddings_change_no_gradient(options):
    model = rope_pad_fix.apply(tiny().train())
    reference = gradients(model, "right")
    assert torch.equal(gradients(model, "holes", **options)[0], reference[0])
    for a, b in zip(gradients(model, "holes", **options)[1], reference[1], strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_bit(reentrant):
    model = rope_pad_fix.apply(tiny().train())
    plain = gradients(model, "left")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    assert equal(gradients(model, "left"), plain)
    assert equal(gradients(model, "right"), plain)


def test_batch_gradients_are_those_of_its_rows():
    model = rope_pad_fix.apply(tiny().train())
    rows = ragged()
    _, batched = gradients(model, "left")
    targets = [len(row) - 1 for row in rows]
    summed = None
    for row, n in zip(rows, targets, strict=True):
        _, own = gradients(model, "left", rows=[row])
        weighted = [g * n / sum(targets) for g in own]
        summed = weighted if summed is None else [a + b for a, b in zip(summed, weighted, strict=True)]
    for a, b in zip(batched, summed, strict=True):
        assert (a - b).abs().max() <= 1e-4 * b.abs().max()


def test_gradients_flow_through_a_cache():
    """A prefix whose states are trained, then text: as if both were one sequence."""
    model = rope_pad_fix.apply(tiny().train())
    prefix, text = ragged((6, 6)), ragged((5, 9), seed=1)
    ids1, mask1 = batch(prefix)
    ids2, mask2 = batch(text)
    mask = torch.cat([mask1, mask2], 1)

    def last_logits(cached):
        model.zero_grad()
        if cached:
            past = model(ids1, attention_mask=mask1, use_cache=True)
            name = "cache" if "cache" in past else "past_key_values"
            logits = model(ids2, attention_mask=mask, **{name: past[name]}).logits[:, -1]
        else:
            logits = model(torch.cat([ids1, ids2], 1), attention_mask=mask).logits[:, -1]
        logits.square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    for a, b in zip(last_logits(True), last_logits(False), strict=True):
        assert (a - b).abs().max() <= 1e-3 * b.abs().max()


def test_lora_weights_after_training_do_not_depend_on_the_layout():
    def trained(layout):
        torch.manual_seed(0)
        model = get_peft_model(tiny(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
        rope_pad_fix.apply(model).train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for step in range(5):
            ids, mask = batch(ragged(seed=step), layout)
            model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: p for name, p in model.named_parameters() if p.requires_grad}

    left = trained("left")
    assert any(p.abs().max() > 0 for name, p in left.items() if "lora_B" in name)
    for layout in ("right", "holes"):
        for name, parameter in trained(layout).items():
            assert torch.equal(parameter, left[name]), name


def test_no_gradient_reaches_the_pad_embedding():
    model = tiny().train()
    gradients(model, "left")
    row = model.get_input_embeddings()
    row.padding_idx = None  # otherwise torch zeroes that gradient itself
    rope_pad_fix.apply(model)
    model.lm_head.weight.requires_grad_(False)
    gradients(model, "left")
    assert not row.weight.grad[0].any()


@pytest.mark.parametrize("level", ["padding_free", "batch_invariant"])
@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])
def test_logits_only_where_labels_are_predicted_from(family, level):
    """With logits_to_keep the loss is over all labels, which stock transformers has no meaning for."""
    model = tiny(family).train()
    ids, mask = batch(ragged(), "left")
    labels = ids.masked_fill(mask.cumsum(1) <= 3, -100)  # a prompt of three tokens in each row
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    with pytest.raises((ValueError, RuntimeError)):
        model(**inputs, logits_to_keep=1)
    rope_pad_fix.apply(model, level)
    made = []
    model.lm_head.register_forward_hook(lambda module, given, output: made.append(output.shape[1]))
    outcomes = []
    for options in ({}, {"logits_to_keep": 1}):
        model.zero_grad()
        output = model(**inputs, **options)
        output.loss.backward()
        outcomes.append((output, [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    (whole, gradients), (short, others) = outcomes
    assert torch.allclose(short.loss, whole.loss, rtol=1e-6)
    for one, other in zip(others, gradients, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()
    assert short.logits.shape == (3, 1, 128)
    assert (short.logits - whole.logits[:, -1:]).abs().max() < 1e-4
    targets = int((labels != -100).sum())
    assert made[0] >= int(mask.sum())
    assert made[1] == targets + 3


def test_logits_to_keep_leaves_the_sides_equal():
    model = rope_pad_fix.apply(tiny().train())
    left, right = (gradients(model, side, logits_to_keep=1) for side in ("left", "right"))
    assert equal(left, right)
