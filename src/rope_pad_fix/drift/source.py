"""The model and the tokenizer that are measured: from a path, a Hub id, a GGUF file, or objects."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import InputError
from ..loading import DTYPES, load_model, load_tokenizer
from .processes import device


class Source:
    """Where the model and its tokenizer come from.

    Attributes:
        name: for the report.
        tokenizer: loaded.
        own: the data type and attention implementation that the model has by itself.
    """

    def __init__(self, model: str | Path | nn.Module, tokenizer: Any = None) -> None:
        self.given: Any = model
        self._last: Any = None
        self.name = type(model).__name__ if isinstance(model, nn.Module) else str(model)
        if isinstance(model, nn.Module):
            if tokenizer is None:
                raise InputError("a model object needs its tokenizer: pass tokenizer")
            self.tokenizer = tokenizer
        else:
            self.tokenizer = tokenizer or load_tokenizer(model)
        if self.pad is None:
            raise InputError("the tokenizer has neither a pad token nor an end-of-sequence token: set pad_token")
        first = self.model(None)
        self.own = (str(first.dtype).removeprefix("torch."), first.config._attn_implementation)
        if self.own[1] == "padding_free":  # a patched base model shows its view
            self.own = (self.own[0], first.config._attn_implementation_internal)
        self.digest = _digest(first)

    @property
    def pad(self) -> int | None:
        """The pad token's id; the end-of-sequence token's where there is none."""
        pad: int | None = self.tokenizer.pad_token_id
        end: int | None = self.tokenizer.eos_token_id
        return end if pad is None else pad

    def model(self, dtype: str | None) -> Any:
        """The model in a data type, on the device of this process. An object in its own type is itself."""
        wanted = None if dtype is None else DTYPES[dtype]
        if isinstance(self.given, nn.Module):
            if wanted in (None, self.given.dtype):
                return self.given
            return copy.deepcopy(self.given).to(wanted)
        if self._last is None or wanted not in (None, self._last.dtype):
            self._last = None  # so that there are never two
            self._last = load_model(self.given, wanted or "auto").to(device()).eval()
        return self._last


def _digest(model: nn.Module) -> str:
    """Of a few numbers of every parameter: enough to see that it is another model."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        some = parameter.detach().flatten()[:8].float().tolist()
        digest.update(f"{name} {tuple(parameter.shape)} {some}".encode())
    return digest.hexdigest()[:16]
