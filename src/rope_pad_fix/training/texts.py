"""What is learnt: rows of prompts and completions, chats or plain text, and their token ids and labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..drift.data import chat_text, chat_turns, rows_of
from ..errors import InputError
from ..padding import prompt_ids
from ..rows import IGNORED

Encoded = dict[str, list[int]]  # "input_ids" and "labels" of one row, of equal length


@dataclass(frozen=True)
class Text:
    """One row.

    Attributes:
        where: its place, in words.
        pieces: what stands in it, in order, and whether that is to be learnt.
        answer: what a model that has learnt it answers to what comes before the last piece; None in plain text.
    """

    where: str
    pieces: tuple[tuple[str, bool], ...]
    answer: str | None = None

    @property
    def prompt(self) -> str:
        """All before the last piece."""
        return "".join(text for text, _ in self.pieces[:-1])


def read_texts(
    source: str | Path | Iterable[Mapping[str, Any]],
    *,
    prompt: str = "prompt",
    completion: str = "completion",
    messages: str = "messages",
    text: str = "text",
    split: str = "train",
    tokenizer: Any = None,
) -> tuple[list[Text], list[InputError]]:
    """Read rows, each by the first of these columns that it has: prompt and completion, a chat, plain text.

    Args:
        source: as in `rope_pad_fix.drift.measure`.
        prompt, completion, messages, text: the columns.
        split: of a data set with several.
        tokenizer: whose chat template writes chats. All turns of the assistant are learnt.

    Returns:
        The rows, and what is wrong with those that cannot be used.

    Raises:
        InputError: the source as a whole cannot be read, or has no usable row.
    """
    texts: list[Text] = []
    bad: list[InputError] = []
    with rows_of(source, split) as rows:
        for where, row in rows:
            try:
                if isinstance(row, InputError):
                    raise row
                if prompt in row:
                    pieces = _filled(row, prompt, where), _filled(row, completion, where)
                    texts.append(Text(where, ((pieces[0], False), (pieces[1], True)), pieces[1]))
                elif messages in row:
                    texts.append(_chat(row[messages], tokenizer, where))
                elif text in row:
                    texts.append(Text(where, ((_filled(row, text, where), True),)))
                else:
                    raise InputError(
                        f"{where}: no column {prompt!r}, {messages!r} or {text!r}, there are {', '.join(row)}"
                    )
            except InputError as error:
                bad.append(error)
    if not texts:
        raise InputError(
            str(bad[0]) + (f" (and {len(bad) - 1} more)" if bad[1:] else "") if bad else f"{source}: no rows"
        )
    return texts, bad


def _filled(row: Mapping[str, Any], column: str, where: str) -> str:
    if column not in row:
        raise InputError(f"{where}: no column {column!r}, there are {', '.join(row)}")
    value = row[column]
    if not isinstance(value, str) or not value:
        raise InputError(f"{where}: {column!r} must be a text that is not empty, got {value!r}")
    return value


def _chat(value: Any, tokenizer: Any, where: str) -> Text:
    turns = chat_turns(value, tokenizer, where)
    if turns[-1]["role"] != "assistant":
        raise InputError(f"{where}: the assistant must have the last word in a chat to learn from")
    pieces: list[tuple[str, bool]] = []
    done = ""
    for i, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        for known, learnt in ((chat_text(turns[:i], tokenizer, where, True), False), (None, True)):
            upto = chat_text(turns[: i + 1], tokenizer, where, False) if known is None else known
            if not upto.startswith(done):
                raise InputError(
                    f"{where}: the chat template writes earlier turns anew: learn from single turns instead"
                )
            pieces.append((upto[len(done) :], learnt))
            done = upto
    return Text(where, tuple(pieces), str(turns[-1]["content"]))


def encode(tokenizer: Any, text: Text, max_length: int | None = None, everything: bool = False) -> Encoded:
    """Token ids and labels of one row.

    Pieces are tokenised apart, as a prompt is in inference, and which tokens are labels goes by their lengths: by token
    id the end of sequence could not be told from a pad token that is the same. The last piece ends with an end of
    sequence, a label too.

    Args:
        tokenizer: of the model.
        text: the row.
        max_length: tokens at most; a prompt is cut for it on the tokenizer's truncation side, a completion never.
        everything: learn prompts, too.

    Raises:
        InputError: what is learnt does not fit into ``max_length`` behind at least one token, or a prompt has no
            tokens.
    """
    end = tokenizer.eos_token_id
    last = _continued(tokenizer, text.pieces[-1][0])
    # A chat template may have written the end of sequence, and a line's end behind it.
    last = last[: len(last) - last[::-1].index(end)] if end in last else [*last, end]
    room = None if max_length is None else max_length - len(last)
    if room is not None and room < min(1, len(text.pieces) - 1):
        raise TooLongError(text.where, len(last) + min(1, len(text.pieces) - 1), max_length)
    ids: list[int] = []
    labels: list[int] = []
    for i, (piece, learnt) in enumerate(text.pieces):
        cut = room if len(text.pieces) == 2 else None
        if i == len(text.pieces) - 1:
            own = last if i else _begun(tokenizer) + last
        else:
            own = _continued(tokenizer, piece) if i else _prompt(tokenizer, text.where, piece, cut)
        ids += own
        labels += own if learnt or everything else [IGNORED] * len(own)
    if max_length is not None and len(ids) > max_length:
        raise TooLongError(text.where, len(ids), max_length)
    return {"input_ids": ids, "labels": [IGNORED, *labels[1:]]}


class TooLongError(InputError):
    """What is to be learnt of a row does not fit into ``max_length`` tokens."""

    def __init__(self, where: str, needed: int, max_length: int | None) -> None:
        super().__init__(f"{where}: needs {needed} tokens, more than --max-length {max_length}")
        self.needed = needed


def _prompt(tokenizer: Any, where: str, piece: str, max_length: int | None) -> list[int]:
    try:
        return prompt_ids(tokenizer, piece, max_length)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _begun(tokenizer: Any) -> list[int]:
    """What the tokenizer begins a text with."""
    return [tokenizer.bos_token_id] if tokenizer("").input_ids[:1] == [tokenizer.bos_token_id] else []


def _continued(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)
