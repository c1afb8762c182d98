"""Batched inference with Hugging Face decoder models that gives what single inference gives."""

from typing import TYPE_CHECKING, Any

from .deterministic import deterministic
from .errors import InputError, UnsupportedCacheError, UnsupportedModelError
from .families import Family, families, register
from .padding import PaddingScheme
from .patching import Status, applied, apply, remove, status
from .rows import position_ids
from .verify import Verification, verify

if TYPE_CHECKING:
    from .adapters import load_adapter

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
    """What is imported when it is first asked for: ``chatglm`` imports models, ``drift`` needs the extra's packages,
    ``load_adapter`` PEFT."""
    if name in ("chatglm", "drift", "load_adapter"):
        import importlib

        if name != "load_adapter":
            return importlib.import_module(f".{name}", __name__)
        return importlib.import_module(".adapters", __name__).load_adapter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
