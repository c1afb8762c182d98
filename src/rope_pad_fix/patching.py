"""apply, remove, applied, status: what is patched on a model, and how that is undone.

A patched module is an instance whose ``__class__`` is a subclass of its own class, of the same name, with another
``forward``. Nothing is stored on the instance, so its attributes, weights and saved files are what they were; setting
``__class__`` back undoes it. `_Forward` says how it stays patched whoever replaces ``forward`` on the instance.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from torch import nn

from .attention import base_implementation, config_view
from .decoder import CACHE_NAMES, padding_free_decoder, positions_decoder
from .errors import UnsupportedModelError
from .families import Family, Role, families, find
from .heads import padding_free_causal_lm, padding_free_classifier, positions_causal_lm
from .linear import PARTS, InvariantLinear, make_invariant, parts, tiles
from .rows import position_ids

Model = TypeVar("Model", bound=nn.Module)

LEVELS: dict[str, dict[str, Role]] = {
    "positions": {"decoder": positions_decoder, "causal_lm": positions_causal_lm},
    "padding_free": {
        "decoder": padding_free_decoder,
        "causal_lm": padding_free_causal_lm,
        "classifier": padding_free_classifier,
    },
}
LEVELS["batch_invariant"] = LEVELS["padding_free"]  # and what is in `linear`
DEFAULT_LEVEL = "batch_invariant"
ROPE_BY_LENGTH = ("dynamic", "longrope")  # their frequencies depend on the longest row of the batch


@dataclass(frozen=True)
class Status:
    """What is patched on a model.

    Attributes:
        level: ``"positions"``, ``"padding_free"`` or ``"batch_invariant"``.
        family: name of the family, or of the class for a decoder that belongs to none.
        decoder: the patched decoder's name in the model, as in ``named_modules`` (``""`` is the model itself).
        modules: names of the patched heads and decoders.
        tiles: at level ``"batch_invariant"``, for each shape ``(outputs, inputs)`` of the linear layers the product
            used and the tile that rows are padded to, such as ``"onednn 2"``.
    """

    level: str
    family: str
    decoder: str
    modules: tuple[str, ...]
    tiles: dict[tuple[int, int], str] = field(default_factory=dict, compare=False)


def apply(model: Model, level: str = DEFAULT_LEVEL) -> Model:
    """Make every row of a padded batch give what it gives alone.

    Args:
        model: a decoder model of transformers (``…ForCausalLM``, ``…ForSequenceClassification``, a base model), or any
            module that contains one: a PEFT model, a model under DDP or Accelerate. Patched in place; other models of
            the same class are not touched.
        level: ``"batch_invariant"``: no padding is computed, and nothing that a row goes through depends on the rows
            beside it, so that it gives the same bits in any batch. ``"padding_free"``: no padding is computed; matrix
            products still see the number of rows, and a lone row gives the bits of the unpatched model.
            ``"positions"``: only position_ids are derived from the mask; for ``torch.compile``, static caches, and
            architectures that the others do not cover. Calling again switches the level.

    Returns:
        The model.

    Raises:
        TypeError: ``model`` is no ``torch.nn.Module``.
        ValueError: there is no such level.
        UnsupportedModelError: the level cannot run this model; nothing has been changed then.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> tiny = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        ...                                     num_attention_heads=2, vocab_size=64))
        >>> status(apply(tiny, level="padding_free"))
        Status(level='padding_free', family='llama', decoder='model', modules=('', 'model'), tiles={})
        >>> status(remove(tiny)) is None
        True
    """
    _check_module(model)
    if level not in LEVELS:
        raise ValueError(f"unknown level {level!r}: choose one of {', '.join(map(repr, LEVELS))}")
    targets = _targets(model, level)
    remove(model)
    for module, family, part in targets:
        if role := family.forwards.get(part, LEVELS[level].get(part)):
            patch = Patch(level, family.name, part, role, tuple(family.methods.get(part, {}).items()))
            module.__class__ = _patched_class(type(module), patch)
            _view_configs(module)
    if level == "batch_invariant":
        for module, family, _ in targets:
            for inner, part in list(parts(module)):
                if _patch(inner) is None:
                    inner.__class__ = _patched_class(type(inner), Patch(level, family.name, part))
            make_invariant(module)
    return model


def remove(model: Model) -> Model:
    """Undo `apply`: afterwards nothing on the model differs from before. A model that is not patched is left alone.

    Returns:
        The model.
    """
    _check_module(model)
    for module in model.modules():
        patch = _patch(module)
        if type(module) is InvariantLinear:
            module.__class__ = nn.Linear  # type: ignore[assignment]
        elif patch is not None:
            viewed = getattr(getattr(module, "config", None), "_viewed", None)
            if viewed is not None:
                _set_configs(module, viewed)
            module.__class__ = unpatched_class(module)
    return model


@contextmanager
def applied(model: Model, level: str = DEFAULT_LEVEL) -> Iterator[Model]:
    """`apply` for the length of a ``with`` block; afterwards the model is patched as it was before, or not at all."""
    before = status(model)
    try:
        yield apply(model, level)
    finally:
        if before is None:
            remove(model)
        else:
            apply(model, before.level)


def status(model: nn.Module) -> Status | None:
    """What is patched on a model, or None."""
    _check_module(model)
    patched = {name: patch for name, module in model.named_modules() if (patch := _patch(module)) is not None}
    decoders = [name for name, patch in patched.items() if patch.part == "decoder"]
    if not decoders:
        return None
    patch = patched[decoders[0]]
    modules = tuple(name for name, patch in patched.items() if patch.part not in PARTS)
    return Status(patch.level, patch.family, decoders[0], modules, tiles(model))


@dataclass(frozen=True)
class Patch:
    """How one module is patched; kept on its class."""

    level: str
    family: str
    part: str
    role: Role | None = None  # None for the parts in `linear`
    methods: tuple[tuple[str, Callable[..., Any]], ...] = ()


def _check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")


def _patch(module: nn.Module) -> Patch | None:
    return cast("Patch | None", getattr(type(module), "_rope_pad_fix", None))


def _targets(model: nn.Module, level: str) -> list[tuple[nn.Module, Family, str]]:
    """The modules to patch, with family and part. Every check is made here, before anything is changed."""
    found = []
    for module in model.modules():
        match = find(unpatched_class(module))
        if match is not None:
            found.append((module, *match))
    decoders = [(module, family) for module, family, part in found if part == "decoder"]
    if not decoders and level == "positions":
        decoder = _any_decoder(model)
        if decoder is not None:
            name = unpatched_class(decoder).__name__
            return [(decoder, Family(name, decoders=(name,)), "decoder")]
    name = unpatched_class(model).__name__
    if not decoders:
        known = ", ".join(family.name for family in families())
        works = 'level="positions" works'
        if _any_decoder(model) is None:
            works = "no level works: it has no decoder that takes attention_mask and position_ids from 0"
        raise UnsupportedModelError(f"{name} holds no decoder of a registered family ({known}); {works}")
    for decoder, family in decoders:
        if family.refuses is not None and (reason := family.refuses(decoder)):
            raise UnsupportedModelError(f"{name} cannot be patched: {reason}")
        if level not in family.levels:
            works = " and ".join(f"level={level!r}" for level in family.levels)
            raise UnsupportedModelError(f"{name} runs at {works}, not at {level!r}; {family.instead}")
        if level != "positions":
            base_implementation(decoder.config)
            kind = rope_type(decoder.config)
            if kind in ROPE_BY_LENGTH:
                raise UnsupportedModelError(
                    f"{name} uses {kind!r} rotary embeddings, whose frequencies depend on the longest row of a batch; "
                    'level="positions" works, one row at a time or with rows of equal length'
                )
    return found


def rope_type(config: Any) -> str:
    """The kind of rotary embeddings that a configuration asks for; ``"default"`` where it names none."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    return str(rope.get("rope_type", rope.get("type", "default")))


def _any_decoder(model: nn.Module) -> nn.Module | None:
    """A decoder outside the registered families that at least takes positions."""
    for module in model.modules():
        get_decoder = getattr(module, "get_decoder", None)
        decoder = get_decoder() if callable(get_decoder) else None
        if isinstance(decoder, nn.Module):
            parameters = _parameters(unpatched_class(decoder))
            if "attention_mask" in parameters and "position_ids" in parameters and not _counts_from_pad(decoder):
                return decoder
    return None


def _counts_from_pad(module: nn.Module) -> bool:
    """Whether its positions start behind the pad token's id (RoBERTa and its kin): then 0, 1, 2 … are wrong."""
    embeddings = ((name, part) for name, part in module.named_modules() if isinstance(part, nn.Embedding))
    return any("position" in name and part.padding_idx is not None for name, part in embeddings)


def _view_configs(module: nn.Module) -> None:
    """Make a newly patched decoder ask row-wise attention for its masks and its attention."""
    patch = _patch(module)
    if patch is not None and patch.part == "decoder" and patch.level != "positions":
        # Experts one after the other, with products that `linear` can replace.
        experts = "eager" if patch.level == "batch_invariant" else None
        _set_configs(module, config_view(module.config, experts))


def _set_configs(decoder: nn.Module, config: Any) -> None:
    """Give a decoder, and every module in it that shares its configuration, another view of that configuration."""
    before = decoder.config
    for module in decoder.modules():
        if getattr(module, "config", None) is before:
            module.config = config


def _parameters(cls: type[nn.Module]) -> tuple[str, ...]:
    """The arguments of a class's ``forward`` that can be passed by position."""
    parameters = inspect.signature(cls.forward).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)[1:]


def unpatched_class(module: nn.Module) -> type[nn.Module]:
    """A module's class without the patch, and without what another library has derived from the patched class."""
    for cls in type(module).__mro__:
        if "_rope_pad_fix" in vars(cls):
            return cast("type[nn.Module]", cls.__base__)
    return type(module)


class _Forward:
    """``forward`` on a patched class, as a data descriptor: it comes before an instance's own ``forward``.

    Whatever is assigned to the instance, before or after patching (Accelerate's hooks, another library's forward),
    becomes the inner forward that the patched one calls. Python's ``module.forward(...)`` gets the patched one, too.
    """

    def __init__(self, base: type[nn.Module]) -> None:
        self.base = base
        self.__doc__ = base.forward.__doc__

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None:
            return self.base.forward
        return _BoundForward(module, module.__dict__.get("forward"))

    def __set__(self, module: nn.Module, value: Any) -> None:
        module.__dict__["forward"] = value

    def __delete__(self, module: nn.Module) -> None:
        try:
            del module.__dict__["forward"]
        except KeyError:
            raise AttributeError("forward") from None


class _BoundForward:
    """The patched ``forward`` of one module, around an inner one. Others may hold on to it (Accelerate keeps the
    ``forward`` it replaces), so it asks at each call how its module is patched by then."""

    __slots__ = ("inner", "module")
    __name__ = "forward"

    def __init__(self, module: Any, inner: Callable[..., Any] | None) -> None:
        self.module = module
        self.inner = inner  # None: its class's own

    @property
    def __wrapped__(self) -> Callable[..., Any]:  # for `inspect.signature`; torch.compile cannot trace `update_wrapper`
        return self.inner or unpatched_class(self.module).forward.__get__(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Not a bound method: torch.compile would read it as `module.forward`, which is this.
        inner = self.inner or functools.partial(unpatched_class(self.module).forward, self.module)
        patch = _patch(self.module)
        if patch is None:
            return inner(*args, **kwargs)
        if patch.role is None:
            return PARTS[patch.part](inner, *args, **kwargs)
        names = self.module._parameter_names
        if len(args) > len(names):
            raise TypeError(f"forward() takes {len(names)} positional arguments but {len(args)} were given")
        arguments = dict(zip(names, args, strict=False))
        if doubled := arguments.keys() & kwargs.keys():
            raise TypeError(f"forward() got multiple values for argument {min(doubled)!r}")
        return patch.role(self.module, inner, arguments | kwargs)


def _patched_class(base: type[nn.Module], patch: Patch) -> type[nn.Module]:
    parameters = _parameters(base)
    members: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": _reduce,
        "__setstate__": _set_state,
        "forward": _Forward(base),
        "_rope_pad_fix": patch,
        "_parameter_names": parameters,
        "_cache_name": next((name for name in CACHE_NAMES if name in parameters), CACHE_NAMES[0]),
        "_padding_free_decoder": patch.part == "decoder",
    }
    if patch.part == "causal_lm" and hasattr(base, "_prepare_position_ids_for_generation"):
        members["_prepare_position_ids_for_generation"] = _positions_for_generation
    members |= dict(patch.methods)
    return type(base.__name__, (base,), members)


def _positions_for_generation(self: Any, inputs_tensor: Any, model_kwargs: dict[str, Any]) -> Any:
    """``generate`` counts on from the last column, which may be a pad: there the last real position must stand."""
    mask = model_kwargs.get("attention_mask")
    if mask is not None and mask.dim() == 2:
        return position_ids(mask)
    base: Any = unpatched_class(self)
    return base._prepare_position_ids_for_generation(self, inputs_tensor, model_kwargs)


def _reduce(self: nn.Module, protocol: Any) -> Any:
    """Pickling and copying go by the unpatched class and patch the new instance in the same way."""
    patch = cast(Patch, _patch(self))
    base = unpatched_class(self)
    state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
    return _rebuild, (base, patch), state


def _set_state(self: nn.Module, state: dict[str, Any]) -> None:
    base: Any = unpatched_class(self)
    base.__setstate__(self, state)
    _view_configs(self)  # the copied configuration is none


def _rebuild(base: type[nn.Module], patch: Patch) -> nn.Module:
    return cast(nn.Module, copyreg.__newobj__(_patched_class(base, patch)))  # type: ignore[attr-defined]
