"""The model and the tokenizer that are measured: from a path, a Hub id, a GGUF file, or objects."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from .. import smollm2
from .processes import device
from .results import InputError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SMOLLM2 = "smollm2"  # in place of a path: the model of `rope_pad_fix.smollm2`

Result = TypeVar("Result")


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
            self.tokenizer = tokenizer or self._loaded(self._load_tokenizer)
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
            self._last = self._loaded(lambda: self._load_model(wanted or "auto")).to(device()).eval()
        return self._last

    def _load_model(self, dtype: Any) -> Any:
        if self.given == SMOLLM2:
            return smollm2.load(torch.float32 if dtype == "auto" else dtype)[0]
        return AutoModelForCausalLM.from_pretrained(**self._place(), dtype=dtype)

    def _load_tokenizer(self) -> Any:
        if self.given == SMOLLM2:
            return AutoTokenizer.from_pretrained(smollm2.checkpoint())
        return AutoTokenizer.from_pretrained(**self._place())

    def _place(self) -> dict[str, Any]:
        path = Path(str(self.given))
        if path.suffix == ".gguf":
            return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        return {"pretrained_model_name_or_path": str(self.given)}

    def _loaded(self, load: Callable[[], Result]) -> Result:
        try:
            return load()
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise InputError(f"{self.given}: cannot be loaded as a causal language model: {reason}") from error


def _digest(model: nn.Module) -> str:
    """Of a few numbers of every parameter: enough to see that it is another model."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        some = parameter.detach().flatten()[:8].float().tolist()
        digest.update(f"{name} {tuple(parameter.shape)} {some}".encode())
    return digest.hexdigest()[:16]
