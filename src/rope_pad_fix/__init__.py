"""Batched inference with Hugging Face decoder models that gives what single inference gives."""

from .errors import UnsupportedCacheError, UnsupportedModelError
from .families import Family, families, register
from .patching import Status, applied, apply, remove, status
from .rows import position_ids
from .verify import Verification, verify

__all__ = [
    "Family",
    "Status",
    "UnsupportedCacheError",
    "UnsupportedModelError",
    "Verification",
    "applied",
    "apply",
    "families",
    "position_ids",
    "register",
    "remove",
    "status",
    "verify",
]
