"""ChatGLM-6B, ChatGLM2-6B and ChatGLM3-6B as their own code runs them: it loads and generates, and padding is right."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

import rope_pad_fix
from rope_pad_fix import UnsupportedModelError
from rope_pad_fix.chatglm import compat

from . import chatglm_code
from .chatglm_code import BOS, EOS, GMASK, PAD, VERSIONS

LAYOUTS = ("left", "right", "holes")
LATER = VERSIONS[1:]
WIDTH, NEW = 15, 8
TOLERANCE = 1e-5  # float32, logits up to about 8


@pytest.fixture(autouse=True)
def _compat() -> Iterator[None]:
    with compat():
        yield


def prompts(version: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(4, 88, (length,), generator=generator) for length in (5, 9, 12)]
    if version == "chatglm":
        rows = [torch.cat([row, torch.tensor([GMASK, BOS])]) for row in rows]
    return rows


def batch(rows: list[Tensor], layout: str, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    """The rows, padded: ids and mask."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.full((len(rows), width), PAD)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for number, row in enumerate(rows):
        places = {
            "left": torch.arange(width - len(row), width),
            "right": torch.arange(len(row)),
            "holes": torch.randperm(width, generator=generator)[: len(row)].sort().values,
        }[layout]
        ids[number, places], mask[number, places] = row, 1
    return ids, mask


def difference(logits: Tensor, mask: Tensor, lone: list[Tensor]) -> float:
    return max((row[real != 0] - alone).abs().max().item() for row, real, alone in zip(logits, mask, lone, strict=True))


def answers(model: Any, ids: Tensor | None = None, new: int = NEW, **arguments: Any) -> Tensor:
    settings = {"max_new_tokens": new, "do_sample": False, "pad_token_id": PAD, "eos_token_id": EOS}
    generated: Tensor = model.generate(ids, **settings | arguments)
    return generated if ids is None else generated[:, ids.shape[1] :]


def alike(model: Any, version: str, layout: str, **arguments: Any) -> list[bool]:
    """For each row, whether a batch generates what the row generates alone."""
    rows = prompts(version)
    ids, mask = batch(rows, layout)
    together = answers(model, ids, attention_mask=mask, **arguments)
    alone = [answers(model, row[None], **arguments)[0] for row in rows]
    return [torch.equal(a[: len(b)], b) for a, b in zip(together, alone, strict=True)]


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("version", VERSIONS)
def test_forward(version: str, layout: str) -> None:
    model = chatglm_code.model(version)
    rows = prompts(version)
    ids, mask = batch(rows, layout)
    lone = [model(input_ids=row[None]).logits[0] for row in rows]
    assert lone[0].abs().max() > 4
    if version == "chatglm":
        with pytest.raises(RuntimeError, match="boolean masks"):
            model(input_ids=ids, attention_mask=mask)
    elif layout == "holes":
        assert difference(model(input_ids=ids, attention_mask=mask).logits, mask, lone) > 1

    with rope_pad_fix.applied(model, "positions"):
        assert difference(model(input_ids=ids, attention_mask=mask).logits, mask, lone) < TOLERANCE
        unmasked = [model(input_ids=row[None]).logits[0] for row in rows]
    assert all(torch.equal(a, b) for a, b in zip(unmasked, lone, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("version", VERSIONS)
def test_generate(version: str, layout: str, use_cache: bool) -> None:
    model = chatglm_code.model(version)
    if layout == "right" and use_cache:
        assert not all(alike(model, version, layout))
    rope_pad_fix.apply(model, "positions")
    assert all(alike(model, version, layout, use_cache=use_cache))


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("version", VERSIONS)
def test_beam_search(version: str, layout: str) -> None:
    model = chatglm_code.model(version)
    if layout == "right":
        assert not all(alike(model, version, layout, num_beams=3))
    rope_pad_fix.apply(model, "positions")
    assert all(alike(model, version, layout, num_beams=3))


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("version", VERSIONS)
def test_decoding_by_hand(version: str, layout: str) -> None:
    """A cache and the grown mask are enough: the code itself counts positions from 0 in every call."""
    model = chatglm_code.model(version)
    rows = prompts(version)
    longer = [torch.cat([row, torch.tensor([7, 8])]) for row in rows]
    wanted = [model(input_ids=row[None]).logits[0, -2:] for row in longer]

    def decode(ids: Tensor, mask: Tensor) -> list[Tensor]:
        cache = model(input_ids=ids, attention_mask=mask, use_cache=True).past_key_values
        steps = []
        for token in (7, 8):
            mask = torch.cat([mask, mask.new_ones(len(ids), 1)], 1)
            out = model(
                input_ids=mask.new_full((len(ids), 1), token),
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
            )
            cache = out.past_key_values
            steps.append(out.logits[:, -1])
        return steps

    ids, mask = batch(rows, layout)
    if version == "chatglm":
        with pytest.raises((AttributeError, RuntimeError)):
            decode(rows[0][None], torch.ones(1, len(rows[0]), dtype=torch.long))
    else:
        stock = decode(rows[0][None], torch.ones(1, len(rows[0]), dtype=torch.long))
        assert (stock[1][0] - wanted[0][1]).abs().max() > 1  # one row, without any padding
    rope_pad_fix.apply(model, "positions")
    for step, logits in enumerate(decode(ids, mask)):
        for row, alone in zip(logits, wanted, strict=True):
            assert (row - alone[step]).abs().max() < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("version", LATER)
def test_inputs_embeds(version: str, layout: str) -> None:
    model = chatglm_code.model(version)
    rows = prompts(version)
    ids, mask = batch(rows, layout)
    embeds = model.get_input_embeddings()(ids)
    lone = [model(input_ids=row[None]).logits[0] for row in rows]
    alone = [answers(model, row[None])[0] for row in rows]
    with pytest.raises(AttributeError):
        model(inputs_embeds=embeds, attention_mask=mask)
    rope_pad_fix.apply(model, "positions")
    assert difference(model(inputs_embeds=embeds, attention_mask=mask).logits, mask, lone) < TOLERANCE
    together = answers(model, inputs_embeds=embeds, attention_mask=mask)
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


def test_inputs_embeds_of_a_prefix_lm() -> None:
    model = rope_pad_fix.apply(chatglm_code.model("chatglm"), "positions")
    with pytest.raises(ValueError, match="finds the end of a row's context by its token ids"):
        model(inputs_embeds=torch.zeros(1, 5, 64), attention_mask=torch.ones(1, 5))
    with pytest.raises(ValueError, match=r"row 1 of input_ids lacks"):
        model(input_ids=torch.tensor([[5, GMASK, BOS], [5, 6, BOS]]))


@pytest.mark.parametrize("position_encoding_2d", [True, False])
@torch.no_grad()
def test_prefix_lm_without_pairs(position_encoding_2d: bool) -> None:
    model = chatglm_code.model("chatglm", position_encoding_2d=position_encoding_2d)
    rows = prompts("chatglm")
    lone = [model(input_ids=row[None]).logits[0] for row in rows]
    rope_pad_fix.apply(model, "positions")
    for layout in LAYOUTS:
        ids, mask = batch(rows, layout)
        assert difference(model(input_ids=ids, attention_mask=mask).logits, mask, lone) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("version", VERSIONS)
def test_lora(version: str, layout: str) -> None:
    model = chatglm_code.model(version)
    lora = get_peft_model(model, LoraConfig(target_modules=["query_key_value"], r=4, init_lora_weights=False))
    torch.manual_seed(0)
    for name, weight in lora.named_parameters():
        if "lora_" in name:
            weight.normal_(std=0.1)
    if layout == "right":
        assert not all(alike(model, version, layout))
    rope_pad_fix.apply(lora, "positions")
    rows = prompts(version)
    ids, mask = batch(rows, layout)
    lone = [lora(input_ids=row[None]).logits[0] for row in rows]
    assert difference(lora(input_ids=ids, attention_mask=mask).logits, mask, lone) < TOLERANCE
    if version == "chatglm":
        wanted = [answers(model, row[None])[0] for row in rows]
        together = answers(model, ids, attention_mask=mask)
        assert all(torch.equal(a, b) for a, b in zip(together, wanted, strict=True))
    else:
        together = lora.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=PAD, eos_token_id=EOS
        )[:, WIDTH:]
        alone = [answers(model, row[None])[0] for row in rows]
        assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("version", LATER)
def test_prefix_of_p_tuning(version: str) -> None:
    """The prefix is not rotated, so that positions are not relative any more: plain left padding is wrong."""
    model = chatglm_code.model(version, pre_seq_len=4)
    rows = prompts(version)
    lone = [model(input_ids=row[None]).logits[0] for row in rows]
    ids, mask = batch(rows, "left")
    assert difference(model(input_ids=ids, attention_mask=mask).logits, mask, lone) > 1e-2
    assert not all(alike(model, version, "right"))
    rope_pad_fix.apply(model, "positions")
    for layout in LAYOUTS:
        ids, mask = batch(rows, layout)
        assert difference(model(input_ids=ids, attention_mask=mask).logits, mask, lone) < TOLERANCE
        assert all(alike(model, version, layout))


@torch.no_grad()
def test_classifier_pools_the_last_real_token() -> None:
    model = chatglm_code.model("chatglm3", "ChatGLMForSequenceClassification", num_labels=3)
    rows = prompts("chatglm3")
    ids, mask = batch(rows, "right")
    lone = torch.cat([model(input_ids=row[None]).logits for row in rows])
    assert (model(input_ids=ids, attention_mask=mask).logits - lone).abs().max() > 1
    rope_pad_fix.apply(model, "positions")
    for layout in LAYOUTS:
        ids, mask = batch(rows, layout)
        assert (model(input_ids=ids, attention_mask=mask).logits - lone).abs().max() < TOLERANCE


@torch.no_grad()
def test_chatglm2_in_bfloat16_behind_many_pads() -> None:
    """It makes its table of positions in the data type of the weights: 1,000 and 1,001 are then the same."""
    model = chatglm_code.model("chatglm2", seq_length=2048)
    row = torch.randint(4, 88, (1, 24), generator=torch.Generator().manual_seed(3))
    exact = model(input_ids=row).logits[0]
    model = model.bfloat16()
    lone = model(input_ids=row).logits[0]
    noise = (lone - exact).abs().max().item()
    ids, mask = batch([row[0]], "left", 1024)
    stock = model(input_ids=ids, attention_mask=mask).logits[0, -24:]
    assert (stock - lone).abs().max() > 2 * noise
    rope_pad_fix.apply(model, "positions")
    patched = model(input_ids=ids, attention_mask=mask).logits[0, -24:]
    assert (patched - lone).abs().max() <= noise


@torch.no_grad()
@pytest.mark.parametrize("version", LATER)
def test_table_of_positions(version: str) -> None:
    model = chatglm_code.model(version, seq_length=16)
    rows = prompts(version)
    ids, mask = batch(rows, "left", 24)
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=ids, attention_mask=mask)
    lone = [model(input_ids=row[None]).logits[0] for row in rows]
    rope_pad_fix.apply(model, "positions")
    assert difference(model(input_ids=ids, attention_mask=mask).logits, mask, lone) < TOLERANCE
    with pytest.raises(ValueError, match=r"position 19, from the mask, lies outside this model's 16 \(seq_length"):
        model(input_ids=torch.full((1, 20), 5))
    with pytest.raises(ValueError, match="position 30, from position_ids"):
        model(input_ids=torch.full((1, 20), 5), position_ids=torch.arange(11, 31)[None])


@torch.no_grad()
@pytest.mark.parametrize("version", LATER)
def test_positions_of_the_caller_are_kept(version: str) -> None:
    model = chatglm_code.model(version)
    rows = prompts(version)
    ids, mask = batch(rows, "right")
    own = torch.arange(WIDTH).expand(3, -1) * 2
    lone = [model(input_ids=row[None], position_ids=own[:1, : len(row)]).logits[0] for row in rows]
    rope_pad_fix.apply(model, "positions")
    given = model(input_ids=ids, attention_mask=mask, position_ids=own).logits
    assert difference(given, mask, lone) < TOLERANCE
    # generate counts on from the last real one
    usual = rope_pad_fix.position_ids(mask) * mask
    assert torch.equal(
        answers(model, ids, attention_mask=mask, position_ids=usual), answers(model, ids, attention_mask=mask)
    )


@torch.no_grad()
@pytest.mark.parametrize("version", VERSIONS)
def test_training_ignores_what_nothing_comes_before(version: str) -> None:
    model = chatglm_code.model(version)

    def difference_of_sides() -> Tensor:
        left, right = (batch(prompts(version), layout) for layout in ("left", "right"))
        losses = [model(input_ids=ids, attention_mask=mask, labels=ids).loss for ids, mask in (left, right)]
        return (losses[0] - losses[1]).abs()

    if version != "chatglm":  # which takes no such mask
        assert difference_of_sides() > 0.01
    rope_pad_fix.apply(model, "positions")
    assert difference_of_sides() < TOLERANCE


@pytest.mark.parametrize("version", VERSIONS)
def test_stronger_levels_are_refused(version: str) -> None:
    model = chatglm_code.model(version)
    with pytest.raises(UnsupportedModelError, match=r"'positions', not at 'padding_free'; .*chatglm.from_pretrained"):
        rope_pad_fix.apply(model, "padding_free")
    assert rope_pad_fix.status(model) is None
    family = next(family for family in rope_pad_fix.families() if family.name == "chatglm")
    assert family.levels == ("positions",)


def test_images_are_refused() -> None:
    model = chatglm_code.model("chatglm3")
    model.transformer.vision = torch.nn.Linear(1, 1)
    with pytest.raises(UnsupportedModelError, match="tokens of an image share a position"):
        rope_pad_fix.apply(model, "positions")


@torch.no_grad()
@pytest.mark.parametrize("version", VERSIONS)
def test_copies_and_removal(version: str) -> None:
    model = chatglm_code.model(version)
    ids, mask = batch(prompts(version), "holes")
    rope_pad_fix.apply(model, "positions")
    out = model(input_ids=ids, attention_mask=mask).logits
    assert torch.equal(copy.deepcopy(model)(input_ids=ids, attention_mask=mask).logits, out)
    assert type(rope_pad_fix.remove(model)) is chatglm_code.code(version).ChatGLMForConditionalGeneration


def test_bad_arguments() -> None:
    model = rope_pad_fix.apply(chatglm_code.model("chatglm3"), "positions")
    with pytest.raises(ValueError, match=r"attention_mask has shape \(1, 4\), .*must be \[1, 5\]"):
        model(input_ids=torch.zeros(1, 5, dtype=torch.long), attention_mask=torch.ones(1, 4))
    with pytest.raises(ValueError, match="needs input_ids or inputs_embeds"):
        model(attention_mask=torch.ones(1, 4))
    model = rope_pad_fix.apply(chatglm_code.model("chatglm"), "positions")
    ids = torch.tensor([[5, 6, GMASK, BOS]])
    cache = tuple(model(input_ids=ids, use_cache=True).past_key_values)
    with pytest.raises(ValueError, match="this cache does not know where each row's context ended"):
        model(input_ids=ids[:, :1], past_key_values=cache)
    with pytest.raises(ValueError, match=r"takes position_ids \[B, 2, L\]"):
        model(input_ids=ids, position_ids=torch.arange(4)[None])


class TestCompat:
    """What compat does by itself."""

    def test_is_undone(self) -> None:
        cls = chatglm_code.code("chatglm2").ChatGLMForConditionalGeneration
        bases = (PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase)

        def state() -> list[dict[str, Any]]:
            return [{**vars(c), "bases": c.__bases__} for c in (cls, cls.config_class, *bases)]

        before = state()
        with compat():
            assert state() != before
        assert state() == before

    def test_loads_a_checkpoint_of_remote_code(self, tmp_path: Path) -> None:
        source = chatglm_code.checkpoint(tmp_path / "chatglm3")
        model = AutoModel.from_pretrained(source, trust_remote_code=True)
        wanted = chatglm_code.model("chatglm3")
        ids = prompts("chatglm3")[0][None]
        with torch.no_grad():
            assert torch.equal(model(input_ids=ids).logits, wanted(input_ids=ids).logits)
        assert torch.equal(answers(model, ids), answers(wanted, ids))
        assert torch.equal(answers(model, ids, num_beams=3), answers(wanted, ids, num_beams=3))
        rope_pad_fix.apply(model, "positions")
        model.save_pretrained(tmp_path / "saved")
        assert (tmp_path / "saved" / "model.safetensors").exists()
        assert all(alike(model, "chatglm3", "right"))

    def test_frequencies_that_a_checkpoint_lacks_are_computed(self, tmp_path: Path) -> None:
        """Built without memory, the buffer would hold whatever was there."""
        model = chatglm_code.model("chatglm")
        model.save_pretrained(tmp_path)
        weights = load_file(tmp_path / "model.safetensors")
        kept = {name: tensor for name, tensor in weights.items() if not name.endswith("inv_freq")}
        assert len(kept) < len(weights)
        save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
        loaded = type(model).from_pretrained(tmp_path)
        for layer, own in zip(loaded.transformer.layers, model.transformer.layers, strict=True):
            assert torch.equal(layer.attention.rotary_emb.inv_freq, own.attention.rotary_emb.inv_freq)

    @pytest.mark.parametrize("side", ["left", "right"])
    @pytest.mark.parametrize("version", VERSIONS)
    def test_tokenizers_pad(self, version: str, side: str, tmp_path: Path) -> None:
        chatglm_code.vocabulary(tmp_path)
        part = "tokenization" if version == "chatglm" else "tokenization_chatglm"
        tokenizer = chatglm_code.code(version, part).ChatGLMTokenizer(str(tmp_path / "tokenizer.model"))
        tokenizer.padding_side = side
        texts = ["Hello", "one two three"]
        out = tokenizer(texts, padding=True, return_tensors="pt")
        for ids, mask, text in zip(out["input_ids"], out["attention_mask"], texts, strict=True):
            assert ids[mask != 0].tolist() == tokenizer(text)["input_ids"]
        assert out["attention_mask"][0].tolist() != out["attention_mask"][1].tolist()
        if version != "chatglm":
            assert torch.equal(out["position_ids"], rope_pad_fix.position_ids(out["attention_mask"]))

    @torch.no_grad()
    def test_from_texts_to_texts(self, tmp_path: Path) -> None:
        """What users write, with the checkpoint's own tokenizer and right padding."""
        pieces = chatglm_code.vocabulary(tmp_path)
        source = chatglm_code.checkpoint(tmp_path, padded_vocab_size=pieces + 9)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=True, padding_side="right")
        model = rope_pad_fix.apply(AutoModel.from_pretrained(source, trust_remote_code=True), "positions")
        texts = ["Hello", "one two three"]
        settings = {"max_new_tokens": NEW, "do_sample": False}
        inputs = tokenizer(texts, padding=True, return_tensors="pt")
        together = model.generate(**inputs, **settings)[:, inputs["input_ids"].shape[1] :]
        for text, answer in zip(texts, together, strict=True):
            lone = tokenizer([text], return_tensors="pt")
            alone = model.generate(**lone, **settings)[0, lone["input_ids"].shape[1] :]
            assert torch.equal(answer[: len(alone)], alone)
