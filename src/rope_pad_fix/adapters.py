"""Adapters and the padding scheme that they were trained with: saved together, and loaded so that both hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn

from .errors import InputError
from .loading import load_model, load_tokenizer
from .padding import PaddingScheme
from .patching import apply
from .storage import write_atomically

_BASE = "base_model.json"
_SAMPLES = 64  # embedding weights to know a base model by


def save_adapter(model: Any, directory: str | Path, scheme: PaddingScheme, tokenizer: Any) -> None:
    """Save a PEFT model's adapter with its padding scheme, its tokenizer, and what its base model is known by."""
    directory = Path(directory)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    write_atomically(directory / _BASE, json.dumps(_known_by(model), indent=2) + "\n")
    scheme.save(directory)


def load_adapter(
    base_model: str | Path | nn.Module | None,
    directory: str | Path,
    tokenizer: Any = None,
    *,
    dtype: torch.dtype | str = "auto",
) -> tuple[Any, Any]:
    """Load a PEFT adapter, and run it as it was trained: with the padding scheme and the level that lie beside it.

    Args:
        base_model: a model, or its path, Hub id or ``.gguf`` file; None for the one that the adapter names. A model is
            wrapped in place.
        directory: what `save_adapter` or ``train/finetune.py`` wrote.
        tokenizer: the caller's, which must pad as the scheme says; by default the one that was saved, configured.
        dtype: of the base model's weights, if it is not a model already.

    Returns:
        The model in evaluation mode, patched at the scheme's level, and the tokenizer.

    Raises:
        InputError: the tokenizer contradicts the scheme, the adapter was trained on another base model, or the
            directory holds no adapter with a padding scheme.
        UnsupportedModelError: the scheme's level cannot run this model.
    """
    directory = Path(directory)
    named = base_of(directory)
    scheme = PaddingScheme.load(directory)
    if tokenizer is None:
        tokenizer = scheme.configure(load_tokenizer(directory))
    else:
        scheme.check(tokenizer)
    if base_model is None:
        if not named:
            raise InputError(f"{directory}: the adapter names no base model: pass base_model")
        base_model = named
    base = base_model if isinstance(base_model, nn.Module) else load_model(base_model, dtype)
    _check_base(base, directory)
    try:
        model = PeftModel.from_pretrained(base, str(directory))
    except (ValueError, RuntimeError) as error:
        raise InputError(f"{directory}: the adapter does not fit {type(base).__name__}: {error}") from error
    model.generation_config.pad_token_id = scheme.pad_token_id
    model.eval()
    return (model if scheme.level is None else apply(model, scheme.level)), tokenizer


def base_of(directory: Path) -> str | None:
    """The base model that an adapter names.

    Raises:
        InputError: the directory holds no adapter.
    """
    path = directory / "adapter_config.json"
    try:
        named: str | None = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{directory} holds no adapter: {path.name} cannot be read: {error}") from None
    return named


def _known_by(model: Any) -> dict[str, Any]:
    """Kind and shape of a model, and some embedding weights: those are the same in any data type but for rounding."""
    weight = model.get_input_embeddings().weight.detach().flatten()
    places = torch.linspace(0, weight.numel() - 1, _SAMPLES, dtype=torch.float64).long()
    return {
        "model_type": model.config.model_type,
        "embeddings": list(model.get_input_embeddings().weight.shape),
        "layers": model.config.get_text_config().num_hidden_layers,
        "weights": weight[places.to(weight.device)].double().tolist(),
    }


def _check_base(base: nn.Module, directory: Path) -> None:
    """Raises InputError where this is not the model that the adapter was trained on; bfloat16's rounding is allowed."""
    path = directory / _BASE
    if not path.exists():  # not ours; PEFT checks the shapes
        return
    right, mine = json.loads(path.read_text(encoding="utf-8")), _known_by(base)
    for name in ("model_type", "layers", "embeddings"):
        if mine[name] != right[name]:
            raise InputError(
                f"{directory}: the adapter was trained on another base model: its {name} is {right[name]}, "
                f"this model's is {mine[name]}. Load it on {base_of(directory)}"
            )
    weights = torch.tensor(mine["weights"]), torch.tensor(right["weights"])
    if not torch.allclose(*weights, rtol=2**-7, atol=1e-6):
        raise InputError(
            f"{directory}: the adapter was trained on another base model of the same shape: embedding weights "
            f"differ by up to {(weights[0] - weights[1]).abs().max():.2g}. Load it on {base_of(directory)}"
        )
