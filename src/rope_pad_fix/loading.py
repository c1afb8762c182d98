"""Models and tokenizers by name: a path, a Hub id, a GGUF file, or "smollm2"."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from . import smollm2
from .errors import InputError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SMOLLM2 = "smollm2"  # in place of a path: the model of `rope_pad_fix.smollm2`

Result = TypeVar("Result")


def load_model(name: str | Path, dtype: torch.dtype | str = "auto", **options: Any) -> Any:
    """A causal language model.

    Args:
        name: a path, a Hub id, a ``.gguf`` file, or ``"smollm2"``.
        dtype: of the weights; ``"auto"`` for that of the checkpoint.
        options: of ``from_pretrained``.

    Raises:
        InputError: it cannot be loaded.
    """
    options = {"trust_remote_code": False} | options  # said, so that transformers does not ask
    return _loaded(name, lambda: AutoModelForCausalLM.from_pretrained(**_place(name), dtype=dtype, **options))


def load_tokenizer(name: str | Path) -> Any:
    """Its tokenizer.

    Raises:
        InputError: it cannot be loaded.
    """
    return _loaded(name, lambda: AutoTokenizer.from_pretrained(**_place(name), trust_remote_code=False))


def _place(name: str | Path) -> dict[str, str]:
    path = Path(name)
    if path.suffix == ".gguf":
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return {"pretrained_model_name_or_path": str(smollm2.checkpoint() if name == SMOLLM2 else name)}


def _loaded(name: str | Path, load: Callable[[], Result]) -> Result:
    try:
        return load()
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        if "trust_remote_code" in str(error):
            raise InputError(
                f"{name}: this model runs Python files of its checkpoint, which we never switch on: read them, load it "
                "with trust_remote_code=True and pass the model; for ChatGLM see rope_pad_fix.chatglm, which needs none"
            ) from error
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InputError(f"{name}: cannot be loaded as a causal language model: {reason}") from error
