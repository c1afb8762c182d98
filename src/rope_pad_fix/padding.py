"""PaddingScheme: how rows become a batch, written down once, so that training and inference do it alike."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import InputError
from .patching import DEFAULT_LEVEL, LEVELS
from .rows import IGNORED
from .storage import write_atomically

SIDES = ("left", "right")
LENGTHS = ("longest", "max_length")
FILE = "padding_scheme.json"


@dataclass(frozen=True)
class PaddingScheme:
    """How rows are padded, cut, and run.

    Attributes:
        side: where padding goes, ``"left"`` or ``"right"``.
        pad_token_id: the id that padding has.
        pad_token: its text; None if it is not known.
        pad_to_multiple_of: columns of a batch are rounded up to a multiple of it; None does not.
        length: ``"longest"``, the longest row of a batch, or ``"max_length"``, every batch to `max_length`.
        max_length: tokens of a row at most, in training prompt and completion together; None for no limit.
        truncation_side: where a prompt that is too long is cut, ``"left"`` or ``"right"``.
        level: what `rope_pad_fix.apply` is given; None is stock transformers.

    Raises:
        InputError: a value is none of these.
    """

    side: str
    pad_token_id: int
    pad_token: str | None = None
    pad_to_multiple_of: int | None = None
    length: str = "longest"
    max_length: int | None = None
    truncation_side: str = "right"
    level: str | None = DEFAULT_LEVEL

    def __post_init__(self) -> None:
        for name, known in (("side", SIDES), ("truncation_side", SIDES), ("length", LENGTHS), ("level", _LEVELS)):
            if getattr(self, name) not in known:
                raise InputError(f"{name} is {getattr(self, name)!r}: choose one of {', '.join(map(str, known))}")
        for name, least in (("pad_token_id", 0), ("pad_to_multiple_of", 1), ("max_length", 1)):
            value = getattr(self, name)
            if value is None and name != "pad_token_id":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(f"{name} is {value!r}: give a whole number of at least {least}")
        if self.length == "max_length" and self.max_length is None:
            raise InputError("length is 'max_length', but max_length is None: say how long")

    @classmethod
    def of(cls, tokenizer: Any, **settings: Any) -> PaddingScheme:
        """That of a tokenizer, which is padded with its end of sequence where it has no pad token.

        Args:
            tokenizer: whose sides and pad token count.
            settings: attributes to have otherwise, or that a tokenizer does not have (``max_length``, ``level`` …).

        Raises:
            InputError: it has neither of the two tokens, or a setting is none.
        """
        token = tokenizer.eos_token if tokenizer.pad_token_id is None else tokenizer.pad_token
        number = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        if number is None:
            raise InputError("the tokenizer has neither a pad token nor an end-of-sequence token: set pad_token")
        own = {"side": tokenizer.padding_side, "truncation_side": tokenizer.truncation_side}
        return _made(cls, own | {"pad_token_id": int(number), "pad_token": token} | settings)

    def configure(self, tokenizer: Any) -> Any:
        """Give a tokenizer, in place, this scheme's sides and pad token; returns it.

        Raises:
            InputError: the pad token has another id in it: it belongs to another model.
        """
        token = tokenizer.convert_ids_to_tokens(self.pad_token_id) if self.pad_token is None else self.pad_token
        number = tokenizer.convert_tokens_to_ids(token) if token is not None else None
        if number != self.pad_token_id or token not in tokenizer.get_vocab():
            raise InputError(
                f"pad_token: {self.pad_token!r} has the id {self.pad_token_id} in the padding scheme and {number} in "
                "the tokenizer: use the tokenizer that was saved with the scheme"
            )
        tokenizer.padding_side, tokenizer.truncation_side, tokenizer.pad_token = self.side, self.truncation_side, token
        tokenizer.init_kwargs |= {"padding_side": self.side, "truncation_side": self.truncation_side}  # what it saves
        return tokenizer

    def check(self, tokenizer: Any) -> None:
        """See that a tokenizer pads as this scheme does.

        Raises:
            InputError: it does not; the message has both values of all that differs.
        """
        pairs = {
            "padding_side": (tokenizer.padding_side, self.side),
            "pad_token_id": (tokenizer.pad_token_id, self.pad_token_id),
            "truncation_side": (tokenizer.truncation_side, self.truncation_side),
        }
        differing = [f"{name} {mine!r}, not {right!r}" for name, (mine, right) in pairs.items() if mine != right]
        if differing:
            raise InputError(
                f"the tokenizer contradicts the padding scheme: it has {'; '.join(differing)}. "
                "Call PaddingScheme.configure(tokenizer), or use the tokenizer that was saved with the scheme"
            )

    def encode(self, tokenizer: Any, texts: Sequence[str]) -> Any:
        """Prompts in one batch, ``input_ids`` and ``attention_mask``, ``[B, L]`` int64: what the model is to be given.

        Raises:
            InputError: the tokenizer contradicts the scheme.
        """
        self.check(tokenizer)
        return self.collator()([{"input_ids": prompt_ids(tokenizer, text, self.max_length)} for text in texts])

    def collator(self) -> Collator:
        """What puts tokenised rows together as this scheme says; for a `Trainer` or a ``DataLoader``."""
        return Collator(self)

    def columns(self, longest: int) -> int:
        """Columns of a batch whose longest row has so many tokens.

        Raises:
            InputError: that is more than `max_length`.
        """
        if self.max_length is not None and longest > self.max_length:
            raise InputError(
                f"a row has {longest} tokens, more than max_length {self.max_length}: cut it, or allow more"
            )
        width = longest if self.length == "longest" or self.max_length is None else self.max_length
        step = self.pad_to_multiple_of or 1
        return -(-width // step) * step

    def save(self, directory: str | Path) -> None:
        """Write it as ``padding_scheme.json``, beside an adapter or a model."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        write_atomically(Path(directory) / FILE, json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, directory: str | Path) -> PaddingScheme:
        """Read ``padding_scheme.json`` in a directory.

        Raises:
            InputError: there is none, or it is no padding scheme.
        """
        path = Path(directory) / FILE
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: cannot be read: {error}") from None
        if not isinstance(found, dict):
            raise InputError(f"{path}: expected an object, got {type(found).__name__}")
        try:
            return _made(cls, found)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None


@dataclass(frozen=True)
class Collator:
    """Puts tokenised rows into one padded batch. Labels go where their tokens go; padding has the label -100."""

    scheme: PaddingScheme

    def __call__(self, rows: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, Tensor]:
        """Of rows with ``input_ids``, and all or none with ``labels`` of the same length: both, and
        ``attention_mask``, each ``[B, L]`` int64.

        Raises:
            InputError: a row is longer than the scheme's `max_length`, or its labels do not fit.
        """
        scheme = self.scheme
        width = scheme.columns(max(len(row["input_ids"]) for row in rows))
        fills = {"input_ids": scheme.pad_token_id, "attention_mask": 0}
        if any("labels" in row for row in rows):
            fills["labels"] = IGNORED
        batch = {name: torch.full((len(rows), width), fill) for name, fill in fills.items()}
        for i, row in enumerate(rows):
            length = len(row["input_ids"])
            if "labels" in fills and len(row.get("labels", ())) != length:
                raise InputError(f"row {i} has {length} input_ids and {len(row.get('labels', ()))} labels")
            columns = slice(width - length, None) if scheme.side == "left" else slice(length)
            for name in batch:
                batch[name][i, columns] = 1 if name == "attention_mask" else torch.as_tensor(row[name])
        return batch


def prompt_ids(tokenizer: Any, text: str, max_length: int | None = None) -> list[int]:
    """Token ids of a prompt that a completion is to follow: with what the tokenizer begins a text with, but once (a
    chat template may have written it already), and without what it ends one with.

    Args:
        tokenizer: with its truncation side.
        text: the prompt.
        max_length: tokens at most; a longer prompt is cut.

    Raises:
        InputError: it has no token.
    """
    ids: list[int] = list(tokenizer(text, truncation=max_length is not None, max_length=max_length).input_ids)
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    if begin is not None and ids[:2] == [begin, begin]:
        ids = ids[1:]
    if ids[-1:] == [end] and tokenizer(text, add_special_tokens=False).input_ids[-1:] != [end]:
        ids = ids[:-1]
    if not ids:
        raise InputError(f"a prompt has no tokens: {text!r}")
    return ids


_LEVELS = (*LEVELS, None)


def _made(cls: type[PaddingScheme], values: Mapping[str, Any]) -> PaddingScheme:
    names = [field.name for field in fields(cls)]
    if unknown := sorted(values.keys() - set(names)):
        raise InputError(f"unknown {', '.join(unknown)}: a padding scheme has {', '.join(names)}")
    if missing := [name for name in ("side", "pad_token_id") if name not in values]:
        raise InputError(f"no {' and no '.join(missing)}")
    return cls(**values)
