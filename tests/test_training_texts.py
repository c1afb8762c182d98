"""What is learnt: token ids and labels of prompts and completions, chats and plain text."""

import pytest
from datasets import Dataset
from tokenizers import processors

from rope_pad_fix import InputError
from rope_pad_fix.training import Text, encode, read_texts

from .conftest import words_tokenizer

EOS = 2
PAIR = Text("row 0", (("one plus one is", False), ("two", True)), "two")
CHAT = [
    {"role": "user", "content": "one plus one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "times two"},
    {"role": "assistant", "content": "four"},
]
TEMPLATE = (
    "{% for m in messages %}{{ 'what ' if m.role == 'user' else 'is ' }}{{ m.content }}"
    "{{ ' </s> ' if m.role == 'assistant' else ' ' }}{% endfor %}{{ 'is ' if add_generation_prompt else '' }}"
)


@pytest.fixture
def tokenizer():
    return words_tokenizer()


def ids(tokenizer, text):
    return tokenizer.convert_tokens_to_ids(text.split())


def test_labels_are_completion_and_end_of_sequence(tokenizer):
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == EOS
    made = encode(tokenizer, PAIR)
    assert made == {
        "input_ids": ids(tokenizer, "one plus one is two </s>"),
        "labels": [-100] * 4 + [made["input_ids"][4], EOS],
    }
    everything = encode(tokenizer, PAIR, everything=True)
    assert everything["labels"] == [-100, *made["input_ids"][1:]], "nothing comes before the first token"


def test_a_tokenizer_that_begins_and_ends_texts(tokenizer):
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", EOS)]
    )
    made = encode(tokenizer, PAIR)
    assert made["input_ids"] == ids(tokenizer, "<s> one plus one is two </s>")
    assert made["labels"] == [-100] * 5 + made["input_ids"][5:]
    plain = encode(tokenizer, Text("row 0", (("one plus one", True),)))
    assert plain["input_ids"] == ids(tokenizer, "<s> one plus one </s>")
    assert plain["labels"] == [-100, *plain["input_ids"][1:]]


def test_chats(tokenizer):
    """All turns of the assistant are learnt, as the template writes them, with one end of sequence at the end."""
    tokenizer.chat_template = TEMPLATE
    (text,), bad = read_texts([{"messages": CHAT}], tokenizer=tokenizer)
    assert not bad
    assert text.answer == "four"
    assert text.prompt == tokenizer.apply_chat_template(CHAT[:3], tokenize=False, add_generation_prompt=True)
    made = encode(tokenizer, text)
    words = ids(tokenizer, "what one plus one is two </s> what times two is four </s>")
    assert made["input_ids"] == words
    learnt = [5, 6, 11, 12]
    assert made["labels"] == [word if i in learnt else -100 for i, word in enumerate(words)]


def test_chats_that_cannot_be_learnt(tokenizer):
    rows = [{"messages": CHAT}]
    with pytest.raises(InputError, match="row 0: it is a chat, and the tokenizer has no chat template"):
        read_texts(rows, tokenizer=tokenizer)
    tokenizer.chat_template = TEMPLATE
    with pytest.raises(InputError, match="the assistant must have the last word"):
        read_texts([{"messages": CHAT[:3]}], tokenizer=tokenizer)
    tokenizer.chat_template = "{{ messages | length }} what"
    with pytest.raises(InputError, match="the chat template writes earlier turns anew"):
        read_texts(rows, tokenizer=tokenizer)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "directory"])
def test_sources(tmp_path, kind):
    rows = Dataset.from_list([{"q": "one", "a": "two"}, {"q": "three", "a": "four"}])
    path = tmp_path / f"rows.{kind}"
    {"jsonl": rows.to_json, "csv": rows.to_csv, "parquet": rows.to_parquet, "directory": rows.save_to_disk}[kind](path)
    texts, bad = read_texts(path, prompt="q", completion="a")
    assert [(text.prompt, text.answer) for text in texts] == [("one", "two"), ("three", "four")]
    assert not bad


def test_room(tokenizer):
    long = Text("row 7", (("one two three four", False), ("five six", True)), "five six")
    tokenizer.truncation_side = "left"
    assert encode(tokenizer, long, 5)["input_ids"] == ids(tokenizer, "three four five six </s>")
    tokenizer.truncation_side = "right"
    assert encode(tokenizer, long, 5)["input_ids"] == ids(tokenizer, "one two five six </s>")
    with pytest.raises(InputError, match="row 7: needs 4 tokens, more than --max-length 3"):
        encode(tokenizer, long, 3)
    with pytest.raises(InputError, match="row 8: needs 4 tokens, more than --max-length 3"):
        encode(tokenizer, Text("row 8", (("one two three", True),)), 3)
    assert len(encode(tokenizer, Text("row 8", (("one two three", True),)), 4)["input_ids"]) == 4
