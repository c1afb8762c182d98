"""PaddingScheme and load_adapter: what is written down, what is refused, and that it is what training had."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model

import rope_pad_fix
from rope_pad_fix import InputError, PaddingScheme
from rope_pad_fix.adapters import save_adapter
from rope_pad_fix.padding import prompt_ids

from .conftest import batch, tiny, words_tokenizer

EOS = 2


@pytest.fixture
def tokenizer():
    return words_tokenizer()


def test_of_a_tokenizer(tokenizer):
    tokenizer.padding_side, tokenizer.truncation_side = "right", "left"
    scheme = PaddingScheme.of(tokenizer, max_length=64)
    assert scheme == PaddingScheme("right", EOS, "</s>", None, "longest", 64, "left", "batch_invariant")
    tokenizer.pad_token = None
    assert PaddingScheme.of(tokenizer).pad_token_id == EOS
    tokenizer.eos_token = None
    with pytest.raises(InputError, match="neither a pad token nor an end-of-sequence token"):
        PaddingScheme.of(tokenizer)


def test_configure_then_check(tokenizer):
    scheme = PaddingScheme("left", 3, "one", truncation_side="left")
    with pytest.raises(InputError, match=r"padding_side 'right', not 'left'; pad_token_id 2, not 3; truncation_side"):
        scheme.check(tokenizer)
    assert scheme.configure(tokenizer) is tokenizer
    scheme.check(tokenizer)
    assert PaddingScheme.of(tokenizer, level=scheme.level) == scheme
    with pytest.raises(InputError, match="pad_token: 'two' has the id 3 in the padding scheme and 4 in the tokenizer"):
        PaddingScheme("left", 3, "two").configure(tokenizer)
    with pytest.raises(InputError, match="'<pad>' has the id 3"):
        PaddingScheme("left", 3, "<pad>").configure(tokenizer)


def test_saved_and_loaded(tmp_path):
    scheme = PaddingScheme("left", 0, "<pad>", 8, "max_length", 32, "left", None)
    scheme.save(tmp_path)
    assert PaddingScheme.load(tmp_path) == scheme
    assert [path.name for path in tmp_path.iterdir()] == ["padding_scheme.json"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "expected an object, got list"),
        ('{"side": "left"}', "no pad_token_id"),
        ('{"side": "left", "pad_token_id": 0, "colour": 1}', "unknown colour: a padding scheme has side, pad_token_id"),
        ('{"side": "middle", "pad_token_id": 0}', "side is 'middle': choose one of left, right"),
        ('{"side": "left", "pad_token_id": -1}', "pad_token_id is -1: give a whole number of at least 0"),
        ('{"side": "left", "pad_token_id": true}', "pad_token_id is True"),
        (
            '{"side": "left", "pad_token_id": 0, "level": "best"}',
            "level is 'best': choose one of positions, padding_free",
        ),
        ('{"side": "left", "pad_token_id": 0, "length": "max_length"}', "max_length is None: say how long"),
        ('{"side": "left", "pad_token_id": 0, "pad_to_multiple_of": 0}', "pad_to_multiple_of is 0"),
    ],
)
def test_a_file_that_is_no_scheme(tmp_path, content, message):
    if content is not None:
        (tmp_path / "padding_scheme.json").write_text(content)
    with pytest.raises(InputError, match=r"padding_scheme\.json: ") as error:
        PaddingScheme.load(tmp_path)
    assert message in str(error.value)


@pytest.mark.parametrize("side", ["left", "right"])
def test_collator(side):
    rows = [[5, 6, EOS], [7, 8, 9, 10, EOS]]
    encoded = [{"input_ids": row, "labels": [-100, *row[1:]]} for row in rows]
    made = PaddingScheme(side, EOS).collator()(encoded)
    ids, mask = batch([torch.tensor(row) for row in rows], side, pad=EOS)
    assert torch.equal(made["input_ids"], ids)
    assert torch.equal(made["attention_mask"], mask)
    assert [row[row != -100].tolist() for row in made["labels"]] == [row[1:] for row in rows], "the EOS is a label"
    assert (made["labels"][mask == 0] == -100).all()
    unlabelled = PaddingScheme(side, EOS).collator()([{"input_ids": row} for row in rows])
    assert unlabelled.keys() == {"input_ids", "attention_mask"}


def test_columns():
    assert PaddingScheme("left", 0).columns(13) == 13
    assert PaddingScheme("left", 0, pad_to_multiple_of=8).columns(13) == 16
    assert PaddingScheme("left", 0, length="max_length", max_length=30, pad_to_multiple_of=8).columns(13) == 32
    with pytest.raises(InputError, match="a row has 13 tokens, more than max_length 12"):
        PaddingScheme("left", 0, max_length=12).columns(13)
    with pytest.raises(InputError, match="row 0 has 2 input_ids and 1 labels"):
        PaddingScheme("left", 0).collator()([{"input_ids": [1, 2], "labels": [1]}])


def test_encode_cuts_on_the_scheme_s_side(tokenizer):
    texts = ["one two three four", "five"]
    scheme = PaddingScheme.of(tokenizer, side="left", truncation_side="left", max_length=3)
    with pytest.raises(InputError, match="contradicts the padding scheme"):
        scheme.encode(tokenizer, texts)
    made = scheme.encode(scheme.configure(tokenizer), texts)
    two, three, four, five = tokenizer.convert_tokens_to_ids(["two", "three", "four", "five"])
    assert made["input_ids"].tolist() == [[two, three, four], [EOS, EOS, five]]
    assert made["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


def test_prompts_have_no_second_beginning_and_no_end(tokenizer):
    from tokenizers import processors

    one = tokenizer.convert_tokens_to_ids("one")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", EOS)]
    )
    assert prompt_ids(tokenizer, "one") == prompt_ids(tokenizer, "<s> one") == [1, one]
    assert prompt_ids(tokenizer, "one </s>") == [1, one, EOS, EOS]  # a text that ends so itself is left as it is


def adapter(directory, tokenizer, scheme, **config):
    """A random adapter, saved; and the model it is on."""
    torch.manual_seed(1)
    model = get_peft_model(tiny(**config), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_()
    save_adapter(model, directory, scheme, tokenizer)
    return model.eval()


@pytest.mark.parametrize("level", ["batch_invariant", "positions", None])
def test_an_adapter_is_loaded_with_its_scheme(tmp_path, tokenizer, level):
    scheme = PaddingScheme.of(tokenizer, side="left", truncation_side="left", level=level, max_length=16)
    trained = adapter(tmp_path, tokenizer, scheme)
    model, own = rope_pad_fix.load_adapter(tiny(), tmp_path)
    assert (own.padding_side, own.truncation_side, own.pad_token_id) == ("left", "left", EOS)
    patched = rope_pad_fix.status(model)
    assert (None if patched is None else patched.level) == level
    assert not model.training
    inputs = scheme.encode(own, ["one plus two", "five"])
    if level is not None:
        rope_pad_fix.apply(trained, level)
    assert torch.equal(model(**inputs).logits, trained(**inputs).logits)
    assert not torch.equal(model(**inputs).logits, tiny()(**inputs).logits)


def test_by_path_and_in_another_data_type(tmp_path, tokenizer):
    tiny().save_pretrained(tmp_path / "base")
    scheme = PaddingScheme.of(tokenizer)
    adapter(tmp_path / "adapter", tokenizer, scheme)
    model, own = rope_pad_fix.load_adapter(tmp_path / "base", tmp_path / "adapter", tokenizer, dtype=torch.bfloat16)
    assert own is tokenizer
    assert model.dtype == torch.bfloat16  # rounded weights are still the same base model's
    with pytest.raises(InputError, match="the adapter names no base model: pass base_model"):
        rope_pad_fix.load_adapter(None, tmp_path / "adapter")


def test_what_an_adapter_is_refused_for(tmp_path, tokenizer):
    adapter(tmp_path, tokenizer, PaddingScheme.of(tokenizer, side="left"))
    with pytest.raises(InputError, match="padding_side 'right', not 'left'"):
        rope_pad_fix.load_adapter(tiny(), tmp_path, tokenizer)
    for config, message in [
        ({"num_hidden_layers": 2}, "its layers is 3, this model's is 2"),
        ({"vocab_size": 256}, r"its embeddings is \[128, 64\], this model's is \[256, 64\]"),
        ({"family": "qwen2"}, "its model_type is llama, this model's is qwen2"),
    ]:
        with pytest.raises(InputError, match=rf"trained on another base model: {message}"):
            rope_pad_fix.load_adapter(tiny(**config), tmp_path)
    other = tiny()
    other.get_input_embeddings().weight.data.mul_(1.1)
    with pytest.raises(InputError, match="another base model of the same shape"):
        rope_pad_fix.load_adapter(other, tmp_path)
    with pytest.raises(InputError, match="holds no adapter"):
        rope_pad_fix.load_adapter(tiny(), tmp_path / "elsewhere")
    (tmp_path / "padding_scheme.json").unlink()
    with pytest.raises(InputError, match=r"padding_scheme\.json: cannot be read"):
        rope_pad_fix.load_adapter(tiny(), tmp_path)


def test_the_adapter_s_tensors_must_fit(tmp_path, tokenizer):
    adapter(tmp_path, tokenizer, PaddingScheme.of(tokenizer))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["query"]}))
    with pytest.raises(InputError, match="the adapter does not fit LlamaForCausalLM"):
        rope_pad_fix.load_adapter(tiny(), tmp_path)
