"""train/finetune.py: the labels, what it says about bad input, and that padding and interruptions leave no trace."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from train import finetune

from .conftest import batch, tiny

DATA = Path(__file__).parent.parent / "examples" / "data" / "arithmetic.jsonl"
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
WORDS += ("plus", "minus", "times", "is", "what", "how", "many")
ROWS = [
    {"prompt": "one plus one is", "completion": "two"},
    {"prompt": "what is two times two", "completion": "four"},
    {"prompt": "one plus two plus three plus one plus two is", "completion": "nine"},
    {"prompt": "ten minus one", "completion": "is nine"},
    {"prompt": "four plus one is", "completion": "five"},
    {
        "prompt": "how many is one plus one plus one plus one plus one plus one",
        "completion": "one two three four five six",
    },
    {"prompt": "seven", "completion": "eight nine ten"},
]
EOS = 2


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory):
    """A random Llama and a tokenizer of whole words, whose pad token is its end of sequence."""
    directory = tmp_path_factory.mktemp("model")
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(directory)
    tiny(pad_token_id=EOS).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def tokenizer(model_directory):
    return AutoTokenizer.from_pretrained(model_directory)


@pytest.fixture
def start(tmp_path, model_directory):
    """Start a run into a directory under tmp_path, and return its adapter's weights."""

    def start(name, *options, rows=ROWS):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
        directory = tmp_path / name
        fixed = ["--model", model_directory, "--train-file", file, "--output-dir", directory, "--batch-size", 3]
        finetune.main([*map(str, fixed), "--steps", "6", "--learning-rate", "1e-2", "--lora-r", "4", *options])
        return load_file(directory / "adapter_model.safetensors")

    return start


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_labels_are_completion_and_end_of_sequence(tokenizer):
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == EOS
    row = finetune.encode(tokenizer, "one plus one is", "two")
    one, plus, is_, two = tokenizer.convert_tokens_to_ids(["one", "plus", "is", "two"])
    assert row == {"input_ids": [one, plus, one, is_, two, EOS], "labels": [-100] * 4 + [two, EOS]}


def test_a_tokenizer_that_begins_and_ends_texts(model_directory):
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", EOS)]
    )
    one, two = tokenizer.convert_tokens_to_ids(["one", "two"])
    row = finetune.encode(tokenizer, "one", "two")
    assert row == {"input_ids": [1, one, two, EOS], "labels": [-100, -100, two, EOS]}


@pytest.mark.parametrize("side", ["left", "right"])
def test_collator_keeps_labels_with_their_tokens(side):
    rows = [[5, 6, EOS], [7, 8, 9, 10, EOS]]
    encoded = [{"input_ids": row, "labels": [-100, *row[1:]]} for row in rows]
    made = finetune.Collator(EOS, side)(encoded)
    ids, mask = batch([torch.tensor(row) for row in rows], side, pad=EOS)
    assert torch.equal(made["input_ids"], ids)
    assert torch.equal(made["attention_mask"], mask)
    assert [row[row != -100].tolist() for row in made["labels"]] == [row[1:] for row in rows]
    assert (made["labels"][mask == 0] == -100).all()


@pytest.mark.parametrize("level", ["padding_free", "none"])
def test_the_side_of_padding(start, level):
    """It leaves no trace in the adapter, which it does on the stock model."""
    left, right = (start(side, "--padding-side", side, "--level", level) for side in ("left", "right"))
    assert any(weight.abs().max() > 0 for name, weight in left.items() if "lora_B" in name)
    assert equal(left, right) == (level != "none")


def test_resuming(start, tmp_path, monkeypatch):
    """A run that dies after step 4 of 6 and leaves a half-written checkpoint behind ends as one that did not."""
    whole = start("whole")
    collate = finetune.Collator.__call__
    collated = []

    def dying(self, rows):
        collated.append(rows)
        if len(collated) == 6:
            raise KeyboardInterrupt
        return collate(self, rows)

    monkeypatch.setattr(finetune.Collator, "__call__", dying)
    with pytest.raises(KeyboardInterrupt):
        start("resumed", "--save-steps", "2")
    checkpoint = tmp_path / "resumed" / "checkpoint-4"
    shutil.copytree(checkpoint, checkpoint.with_name("checkpoint-5"), ignore=lambda *_: ["trainer_state.json"])
    assert not equal(load_file(checkpoint / "adapter_model.safetensors"), whole)

    collated.clear()
    monkeypatch.setattr(finetune.Collator, "__call__", lambda self, rows: collated.append(rows) or collate(self, rows))
    assert equal(start("resumed", "--save-steps", "2", "--resume"), whole)
    assert len(collated) == 2, "it began anew"


def test_the_newest_checkpoint_goes_by_number(tmp_path):
    for step in (100, 20, 3):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").touch()
    assert [path.name for path in finetune.checkpoints(tmp_path)] == [f"checkpoint-{step}" for step in (100, 20, 3)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "one"', "line 9: not JSON: Expecting ',' delimiter at column 17"),
        ('["one", "two"]', 'line 9: expected an object with "prompt" and "completion", got list'),
        ('{"prompt": "one"}', 'line 9: no "completion"'),
        ('{"prompt": "one", "completion": 2}', 'line 9: "completion" must be a string, got int'),
        ('{"prompt": "", "completion": "two"}', 'line 9: "prompt" is empty'),
        ('{"prompt": " ", "completion": "two"}', 'line 9: "prompt" has no tokens'),
        (json.dumps({"prompt": "one " * 40, "completion": "two"}), "line 9: 42 tokens, more than --max-length 40"),
    ],
)
def test_a_bad_row_is_named(start, capsys, line, message):
    with pytest.raises(SystemExit) as exit:
        start("bad", "--max-length", "40", rows=[*ROWS, "\n", line])
    assert exit.value.code == 2
    assert f"rows.jsonl, {message}\n" in capsys.readouterr().err


def test_other_errors(start, capsys):
    for options, rows, message in [
        (["--resume"], ROWS, "--resume: there is no checkpoint in"),
        ([], ["\n"], "rows.jsonl: no rows"),
        (["--steps", "0"], ROWS, "--steps: must be at least 1"),
        (["--train-file", "missing.jsonl"], ROWS, "missing.jsonl: cannot be read"),
    ]:
        with pytest.raises(SystemExit):
            start("bad", *options, rows=rows)
        assert message in capsys.readouterr().err
    start("done", "--save-steps", "6")
    with pytest.raises(SystemExit):
        start("done")
    assert "holds checkpoint-6 of an earlier run" in capsys.readouterr().err


def test_the_example_data():
    rows = finetune.read_rows(DATA)
    assert len({row.prompt for row in rows}) == len(rows) == 60
    assert all(row.completion.startswith(" ") and row.completion.strip().isdigit() for row in rows)
    assert all(row.prompt == row.prompt.strip() for row in rows)
