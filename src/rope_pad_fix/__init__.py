"""Batched inference with Hugging Face decoder models that gives what single inference gives."""

from typing import Any

from .adapters import load_adapter
from .deterministic import deterministic
from .errors import InputError, UnsupportedCacheError, UnsupportedModelError
from .families import Family, families, register
from .padding import PaddingScheme
from .patching import Status, applied, apply, remove, status
from .rows import position_ids
from .verify import Verification, verify

__all__ = [
    "Family",
    "InputError",
    "PaddingScheme",
    "Status",
    "UnsupportedCacheError",
    "UnsupportedModelError",
    "Verification",
    "applied",
    "apply",
    "deterministic",
    "families",
    "load_adapter",
    "position_ids",
    "register",
    "remove",
    "status",
    "verify",
]


def __getattr__(name: str) -> Any:
    """``rope_pad_fix.drift``, when it is first asked for: it needs the extra's packages."""
    if name == "drift":
        import importlib

        return importlib.import_module(".drift", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
