"""Rows from every kind of file, and what is said where they cannot be used."""

import json

import datasets
import numpy as np
import pytest

from rope_pad_fix.drift import InputError
from rope_pad_fix.drift.data import Example, load_examples

ROWS = [{"prompt": "Where?", "completion": "Here\u2028now"}, {"prompt": "Wo?", "completion": "hüben"}]
EXPECTED = [Example(row["prompt"], (row["completion"],)) for row in ROWS]


def written(tmp_path, kind):
    path = tmp_path / f"rows.{kind}"
    table = datasets.Dataset.from_list(ROWS)
    if kind == "jsonl":
        path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n\n", encoding="utf-8")
    elif kind == "json":
        path.write_text(json.dumps(ROWS), encoding="utf-8-sig")
    elif kind == "csv":
        table.to_csv(path)
    elif kind == "parquet":
        table.to_parquet(path)
    elif kind == "directory":
        table.save_to_disk(path)
    else:
        datasets.DatasetDict({"train": table.select([0]), "test": table}).save_to_disk(path)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "directory", "splits"])
def test_files(tmp_path, kind):
    path = written(tmp_path, kind)
    assert load_examples(path) == EXPECTED
    assert load_examples(str(path), limit=1) == EXPECTED[:1]
    assert load_examples(path, reference=None)[0].references == ()


@pytest.mark.parametrize(
    ("value", "references"),
    [
        ("x", ("x",)),
        (7, ("7",)),
        (0.5, ("0.5",)),
        (np.int64(7), ("7",)),
        (["x", "y"], ("x", "y")),
        ({"text": ["x", "y"], "answer_start": [1, 2]}, ("x", "y")),
        ({"text": [], "answer_start": []}, ("",)),
        ({"city": "Köln"}, ('{"city": "Köln"}',)),
        ([], ("",)),
    ],
)
def test_right_answers(value, references):
    assert load_examples([{"prompt": "p", "completion": value}])[0].references == references


def test_csv_is_text(tmp_path):
    """What pandas would take for numbers, gaps or the index stays as it is."""
    path = tmp_path / "rows.csv"
    path.write_text(',prompt,completion\n0,12,01234\n1,b,\n2,c,NA\n3,"d\ne",None\n4,f,7\n', encoding="utf-8-sig")
    expected = [("12", "01234"), ("b", ""), ("c", "NA"), ("d\ne", "None"), ("f", "7")]
    assert load_examples(path) == [Example(prompt, (right,)) for prompt, right in expected]


def test_nothing_is_left_behind_or_printed(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "temporary").mkdir()
    for kind in ("csv", "parquet"):
        path = written(tmp_path, kind)
        capfd.readouterr()  # of writing it
        before, verbosity = set(tmp_path.rglob("*")), datasets.utils.logging.get_verbosity()
        bars = datasets.utils.logging.is_progress_bar_enabled()
        load_examples(path)
        path.write_bytes(b'"')
        with pytest.raises(InputError):
            load_examples(path)
        assert capfd.readouterr() == ("", "")
        assert set(tmp_path.rglob("*")) == before
        assert datasets.utils.logging.get_verbosity() == verbosity
        assert datasets.utils.logging.is_progress_bar_enabled() == bars


def test_names_of_columns_and_choices():
    row = {"q": "p", "a": "yes", "options": ["yes", "no"]}
    (example,) = load_examples([row], prompt="q", reference="a", choices="options")
    assert example == Example("p", ("yes",), ("yes", "no"))


class Tokenizer:
    chat_template = "there is one"

    def apply_chat_template(self, turns, tokenize, add_generation_prompt):
        assert not tokenize
        assert add_generation_prompt
        if turns[0]["role"] != "user":
            raise ValueError("the user must begin\nthe chat")
        return "".join(f"<{turn['role']}>{turn['content']}" for turn in turns) + "<assistant>"


def test_chats():
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert load_examples([{"messages": turns}], tokenizer=Tokenizer()) == [Example("<user>Hi<assistant>", ("Hello",))]
    (open_end,) = load_examples([{"messages": turns[:1]}], tokenizer=Tokenizer(), reference=None)
    assert open_end == Example("<user>Hi<assistant>")
    (beside,) = load_examples([{"messages": turns[:1], "completion": "Hey"}], tokenizer=Tokenizer())
    assert beside == Example("<user>Hi<assistant>", ("Hey",))
    (hidden,) = load_examples([{"messages": turns}], tokenizer=Tokenizer(), reference=None)
    assert hidden == Example("<user>Hi<assistant>")  # the answer is no part of the prompt
    (own,) = load_examples([{"messages": turns, "prompt": "p", "completion": "c"}])
    assert own == Example("p", ("c",))
    with pytest.raises(InputError, match="no column 'completion', there are messages"):
        load_examples([{"messages": turns[:1]}], tokenizer=Tokenizer())
    with pytest.raises(InputError, match="must have a text, got None"):
        load_examples([{"messages": [turns[0], {"role": "assistant", "content": None}]}], tokenizer=Tokenizer())
    with pytest.raises(InputError, match=r"the chat template does not take this chat: the user must begin$"):
        load_examples([{"messages": turns[::-1]}], tokenizer=Tokenizer(), reference=None)
    with pytest.raises(InputError, match="no chat template"):
        load_examples([{"messages": turns}])
    with pytest.raises(InputError, match='"role" and "content"'):
        load_examples([{"messages": ["Hi"]}], tokenizer=Tokenizer())
    with pytest.raises(InputError, match="a turn before the answer"):
        load_examples([{"messages": turns[1:]}], tokenizer=Tokenizer())


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ([], {}, "no rows"),
        ([{"text": "p"}], {}, "no column 'prompt', there are text"),
        ([{"prompt": "p"}], {}, "no column 'completion', there are prompt"),
        ([{"prompt": ""}], {"reference": None}, "row 0: the prompt must be a text that is not empty"),
        ([{"prompt": 3}], {"reference": None}, "got 3"),
        ([{"prompt": "p", "completion": None}], {}, "got None"),
        ([{"prompt": "p", "completion": float("nan")}], {}, "got nan"),
        ([{"prompt": "p"}], {"limit": 0}, "limit must be at least 1, got 0"),
        ([{"prompt": "p", "c": ["x"]}], {"reference": None, "choices": "c"}, "two texts or more"),
        ([{"prompt": "p"}], {"reference": None, "choices": "c"}, "no column 'c'"),
        (["p"], {}, "expected an object, got str"),
        ("no/such/file.jsonl", {}, "no such file"),
        ("no/such/file.parquet", {}, "no such file"),
    ],
)
def test_bad_input(source, options, message):
    with pytest.raises(InputError) as error:
        load_examples(source, **options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_bad_files(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "p", "completion": "c"}\n{"prompt": \n')
    with pytest.raises(InputError, match=r"a.jsonl, line 2: not JSON: .* at column"):
        load_examples(tmp_path / "a.jsonl")
    (tmp_path / "b.json").write_text('{"prompt": "p"}')
    with pytest.raises(InputError, match="expected a list of objects, got dict"):
        load_examples(tmp_path / "b.json")
    (tmp_path / "c.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read"):
        load_examples(tmp_path / "c.jsonl")
    (tmp_path / "d.parquet").write_bytes(b"no parquet")
    with pytest.raises(InputError, match="cannot be read as a data set"):
        load_examples(tmp_path / "d.parquet")
    (tmp_path / "e.csv").write_text("prompt,completion\na,b\na,b,c,d\n")
    with pytest.raises(InputError, match=r"e.csv: cannot be read .*Expected 2 fields in line 3, saw 4"):
        load_examples(tmp_path / "e.csv")
    (tmp_path / "e.csv").write_text("prompt,completion\na,b,\na,b,\n")  # pandas would take a for the index
    with pytest.raises(InputError, match="Expected 2 fields in line 2, saw 3"):
        load_examples(tmp_path / "e.csv")
    (tmp_path / "f.csv").write_text("prompt,completion\n")
    with pytest.raises(InputError, match="no data"):
        load_examples(tmp_path / "f.csv")
    (tmp_path / "g.jsonl").write_text("\n")
    with pytest.raises(InputError, match="no rows"):
        load_examples(tmp_path / "g.jsonl")
    (tmp_path / "h.json").write_text('[{"prompt": "p"},\n {"prompt"')
    with pytest.raises(InputError, match=r"h.json: not JSON: .* at line 2, column 11"):
        load_examples(tmp_path / "h.json")
    for text in ("1" * 5000, "[" * 100_000):
        (tmp_path / "i.json").write_text(text)
        with pytest.raises(InputError, match=r"i.json: cannot be read as JSON: "):
            load_examples(tmp_path / "i.json")
    (tmp_path / "j.tsv").write_text("prompt\n")
    with pytest.raises(InputError, match=r"unknown format '.tsv': give .jsonl, .json, .csv or .parquet"):
        load_examples(tmp_path / "j.tsv")
    with pytest.raises(InputError, match="cannot be read as a data set"):
        load_examples(tmp_path / "no" / "such" / "directory")
    with pytest.raises(InputError, match="no split 'dev', there are train, test"):
        load_examples(written(tmp_path, "splits"), split="dev")
