"""Rows to measure on: prompts, right answers and choices, from files, data sets or mappings."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import datasets

from ..errors import InputError

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Example:
    """One row.

    Attributes:
        prompt: its text, not empty.
        references: the right answers; any of them will do. Empty if there are none.
        choices: what may be answered, for classification by log-likelihood.
    """

    prompt: str
    references: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()


def load_examples(
    source: str | Path | Iterable[Row],
    *,
    prompt: str = "prompt",
    reference: str | None = "completion",
    choices: str | None = None,
    messages: str = "messages",
    split: str = "test",
    limit: int | None = None,
    tokenizer: Any = None,
) -> list[Example]:
    """Read rows.

    Args:
        source: a JSONL, JSON (a list of objects), CSV or Parquet file; a directory that `datasets` saved; a Hub id; or
            mappings. What stands in a CSV file is text, numbers too: ``01234`` stays as it is.
        prompt: the column with the prompts.
        reference: the column with the right answers: text, a number, a list of texts, an object (kept as JSON), or as
            in SQuAD an object with a list ``"text"``. None: there are none.
        choices: the column with lists of choices, or None.
        messages: the column with chats, lists of ``{"role": …, "content": …}``, which is used if there is no column of
            prompts. If the assistant has the last word, that is the right answer, and the rest is the prompt; if not,
            the right answer is in the column ``reference``.
        split: of a data set with several.
        limit: the first so many rows.
        tokenizer: whose chat template turns chats into prompts.

    Raises:
        InputError: there is no such file, column or split, no row, or something unusable in one.
    """
    if limit is not None and limit < 1:
        raise InputError(f"limit must be at least 1, got {limit}")
    name = str(source) if isinstance(source, (str, Path)) else "data"
    examples = []
    with rows_of(source, split) as rows:
        for where, row in itertools.islice(rows, limit):
            if isinstance(row, InputError):
                raise row
            if prompt not in row and messages in row:
                text, references = _chat(row[messages], tokenizer, where)
            else:
                text, references = _value(row, prompt, where), ()
            if reference is None:
                references = ()
            elif not references:
                references = _references(_value(row, reference, where), where)
            if not isinstance(text, str) or not text:
                raise InputError(f"{where}: the prompt must be a text that is not empty, got {text!r}")
            examples.append(Example(text, references, _choices(row, choices, where)))
    if not examples:
        raise InputError(f"{name}: no rows")
    return examples


@contextmanager
def rows_of(source: str | Path | Iterable[Row], split: str) -> Iterator[Iterator[tuple[str, Row | InputError]]]:
    """The rows of a source as in `load_examples`, each with its place in words; one that is no object, or a line that
    is no JSON, is the error that says so, for the caller to raise or to count.

    Raises:
        InputError: the source as a whole cannot be read.
    """
    name = str(source) if isinstance(source, (str, Path)) else "data"
    with _raw(source, split) as found:
        yield (_placed(f"{name}, row {number}", row) for number, row in enumerate(found))


def _placed(where: str, row: Any) -> tuple[str, Row | InputError]:
    if not isinstance(row, (Mapping, InputError)):
        row = InputError(f"{where}: expected an object, got {type(row).__name__}")
    return where, row


@contextmanager
def _raw(source: str | Path | Iterable[Row], split: str) -> Iterator[Iterable[Any]]:
    if not isinstance(source, (str, Path)):
        yield source
        return
    path = Path(source)
    if path.suffix in (".jsonl", ".json", ".csv", ".parquet") and not path.is_file():
        raise InputError(f"{path}: no such file")
    if path.suffix == ".jsonl":
        yield _json_lines(path)
    elif path.suffix == ".json":
        found = _parsed(_text(path), str(path))
        if not isinstance(found, list):
            raise InputError(f"{path}: expected a list of objects, got {type(found).__name__}")
        yield found
    elif path.is_file() and path.suffix not in (".csv", ".parquet"):
        raise InputError(f"{path}: unknown format {path.suffix!r}: give .jsonl, .json, .csv or .parquet")
    else:
        with tempfile.TemporaryDirectory() as cache:
            yield _data_set(source, path, split, cache)


def _data_set(source: str | Path, path: Path, split: str, cache: str) -> Any:
    log = datasets.utils.logging
    bars, verbosity = log.is_progress_bar_enabled(), log.get_verbosity()
    log.disable_progress_bar()
    try:
        if path.suffix in (".csv", ".parquet"):
            log.set_verbosity(log.CRITICAL)  # it logs what it then raises
            return (_csv if path.suffix == ".csv" else datasets.Dataset.from_parquet)(
                str(path), cache_dir=cache, keep_in_memory=True
            )
        if path.is_dir() and ((path / "state.json").exists() or (path / "dataset_dict.json").exists()):
            found = datasets.load_from_disk(str(path))
        else:
            return datasets.load_dataset(str(source), split=split)
        if isinstance(found, datasets.DatasetDict):
            if split not in found:
                raise InputError(f"{path}: no split {split!r}, there are {', '.join(found)}")
            return found[split]
        return found
    except InputError:
        raise
    except Exception as error:  # whatever datasets and the libraries below it raise
        told = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
        raise InputError(f"{source}: cannot be read as a data set: {_reason(told or error)}") from error
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()


def _csv(path: str, **options: Any) -> Any:
    """All columns as text: left to guess, pandas takes the zeros off 01234, and takes NA for a gap."""
    datasets.Dataset.from_csv(path, header=None, nrows=2, **options)  # raises if rows are longer than the header
    columns = datasets.Dataset.from_csv(path, nrows=1, **options).column_names
    features = datasets.Features({column: datasets.Value("string") for column in columns})
    return datasets.Dataset.from_csv(path, features=features, keep_default_na=False, **options)


def _reason(error: BaseException) -> str:
    """The first line of what an error says."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _json_lines(path: Path) -> Iterator[Any]:
    for number, line in enumerate(_text(path).split("\n"), 1):  # not splitlines: JSON strings may hold U+2028
        if line.strip():
            try:
                yield _parsed(line, f"{path}, line {number}")
            except InputError as error:
                yield error


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise InputError(f"{where}: not JSON: {error.msg} at {line}column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # numbers too long, lists too deep
        raise InputError(f"{where}: cannot be read as JSON: {_reason(error)}") from None


def _value(row: Row, column: str, where: str) -> Any:
    if column not in row:
        raise InputError(f"{where}: no column {column!r}, there are {', '.join(map(str, row))}")
    return row[column]


def _references(value: Any, where: str) -> tuple[str, ...]:
    if isinstance(value, Mapping) and isinstance(value.get("text"), list):  # SQuAD
        value = value["text"]
    values = value if isinstance(value, (list, tuple)) else [value]
    texts = []
    for one in values:
        if isinstance(one, Mapping):
            texts.append(json.dumps(one, ensure_ascii=False))
        elif isinstance(one, (str, Real)) and one == one:  # NaN, which stands for a gap, is not equal to itself
            texts.append(str(one))
        else:
            raise InputError(f"{where}: a right answer must be text, a number or an object, got {one!r}")
    return tuple(texts) or ("",)  # an empty list says that there is no answer


def _choices(row: Row, column: str | None, where: str) -> tuple[str, ...]:
    if column is None:
        return ()
    value = _value(row, column, where)
    texts = list(value) if isinstance(value, (list, tuple)) else []
    if len(texts) < 2 or not all(isinstance(text, str) and text for text in texts):
        raise InputError(f"{where}: choices must be a list of two texts or more, got {value!r}")
    return tuple(texts)


def chat_turns(value: Any, tokenizer: Any, where: str) -> list[Row]:
    """The turns of a chat, for a tokenizer that has a template.

    Raises:
        InputError: it is no chat, or there is no template.
    """
    turns = list(value) if isinstance(value, (list, tuple)) else []
    if not turns or not all(isinstance(turn, Mapping) and {"role", "content"} <= turn.keys() for turn in turns):
        raise InputError(f'{where}: a chat must be a list of objects with "role" and "content"')
    if getattr(tokenizer, "chat_template", None) is None:
        raise InputError(f"{where}: it is a chat, and the tokenizer has no chat template: give prompts instead")
    return turns


def chat_text(turns: Sequence[Row], tokenizer: Any, where: str, answering: bool) -> str:
    """Turns as the tokenizer's chat template writes them; ``answering`` opens the assistant's next one.

    Raises:
        InputError: the template does not take them.
    """
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=answering))
    except Exception as error:  # whatever the template raises
        raise InputError(f"{where}: the chat template does not take this chat: {_reason(error)}") from error


def _chat(value: Any, tokenizer: Any, where: str) -> tuple[str, tuple[str, ...]]:
    turns = chat_turns(value, tokenizer, where)
    answers: tuple[str, ...] = ()
    if turns[-1]["role"] == "assistant":
        answer, turns = turns[-1]["content"], turns[:-1]
        if not isinstance(answer, str):
            raise InputError(f"{where}: the last turn of a chat must have a text, got {answer!r}")
        answers = (answer,)
    if not turns:
        raise InputError(f"{where}: a chat needs a turn before the answer")
    return chat_text(turns, tokenizer, where, True), answers
