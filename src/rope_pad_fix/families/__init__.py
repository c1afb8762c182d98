"""The architectures that can be patched: which classes are decoders, and which heads stand on them.

One small file a family holds only what is special about it. `register` adds one; a class is recognised by its name or
a base class's name, so nothing of transformers is imported before a model exists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Role = Callable[[Any, Callable[..., Any], dict[str, Any]], Any]
LEVELS = ("positions", "padding_free", "batch_invariant")


@dataclass(frozen=True)
class Family:
    """An architecture.

    Attributes:
        name: shown by `status`, unique.
        decoders: names of the classes whose ``forward`` runs the layers and returns hidden states.
        causal_lms: names of the classes that put a language-model head on such a decoder. A head that is not named
            still works on a patched decoder; it is then computed at padding, too.
        classifiers: names of the classes that pool the last token of each row.
        levels: of `rope_pad_fix.apply` that run it.
        forwards: for a part (``"decoder"``, ``"causal_lm"``, ``"classifier"``) the function
            ``(module, inner forward, arguments by name)`` that runs in place of the level's own.
        methods: for a part, methods that a patched module has besides ``forward``.
        refuses: says of a decoder why it cannot be patched, or None.
        instead: what to do for a level that does not run it.
    """

    name: str
    decoders: tuple[str, ...]
    causal_lms: tuple[str, ...] = ()
    classifiers: tuple[str, ...] = ()
    levels: tuple[str, ...] = LEVELS
    forwards: Mapping[str, Role] = field(default_factory=dict, repr=False, compare=False)
    methods: Mapping[str, Mapping[str, Callable[..., Any]]] = field(default_factory=dict, repr=False, compare=False)
    refuses: Callable[[Any], str | None] | None = field(default=None, repr=False, compare=False)
    instead: str = field(default="", repr=False, compare=False)


def _builtin() -> dict[str, Family]:
    from . import chatglm, glm, llama, moe, qwen2

    return {family.name: family for module in (llama, qwen2, glm, chatglm, moe) for family in module.FAMILIES}


_registry = _builtin()  # the one registry of the library, like transformers' own of attention functions


def families() -> tuple[Family, ...]:
    """The registered families, by name."""
    return tuple(_registry[name] for name in sorted(_registry))


def register(family: Family) -> None:
    """Add a family, or replace the one of that name.

    Raises:
        TypeError: it is no `Family`.
        ValueError: it names no decoder, or a class that another family has.
    """
    if not isinstance(family, Family):
        raise TypeError(f"family must be a rope_pad_fix.Family, got {type(family).__name__}")
    if unknown := [level for level in family.levels if level not in LEVELS]:
        raise ValueError(f"family {family.name!r} names unknown levels {unknown}: there are {', '.join(LEVELS)}")
    for part in ("decoders", "causal_lms", "classifiers"):
        if isinstance(getattr(family, part), str):  # a forgotten comma: every letter would be a name
            raise TypeError(f"{part} of family {family.name!r} must be a tuple of class names, got a string")
    if not family.decoders:
        raise ValueError(f"family {family.name!r} names no decoder class")
    named = {*family.decoders, *family.causal_lms, *family.classifiers}
    for other in families():
        if other.name != family.name and (both := named & {*other.decoders, *other.causal_lms, *other.classifiers}):
            raise ValueError(f"{', '.join(sorted(both))} of family {family.name!r} already belongs to {other.name!r}")
    _registry[family.name] = family


def find(cls: type) -> tuple[Family, str] | None:
    """The family of a class and its part in it: ``"decoder"``, ``"causal_lm"`` or ``"classifier"``."""
    for base in cls.__mro__:
        for family in _registry.values():
            for part in ("decoder", "causal_lm", "classifier"):
                if base.__name__ in getattr(family, part + "s"):
                    return family, part
    return None
