"""compat: what the remote code of ChatGLM checkpoints misses in transformers, put back while it is wanted.

That code was written for transformers 4.27 to 4.44 and leans on what later releases took away. `compat` adds to its
classes, never to transformers' own, when they are defined or, if they are there already, at once.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..decoder import CACHE_NAMES
from ..families import chatglm as remote
from ..rows import position_ids

_LIBRARY = "transformers.models."
_MISSING: Any = object()
_MAX_LENGTH = 20  # what configurations had as `max_length`; the code only keeps it


def compat() -> Compat:
    """Let the unmodified remote code of ChatGLM-6B, ChatGLM2-6B, ChatGLM3-6B and GLM-4-9B load and generate.

    It acts at once, until `Compat.undo` is called or, used in a ``with`` statement, the block ends. Nothing about
    padding is put right; `rope_pad_fix.apply` does that, at level ``"positions"``. ``trust_remote_code`` stays with the
    caller: it runs the Python files of the checkpoint, so read them first, or use `from_pretrained`, which needs none.

    Example:
        >>> with compat():
        ...     pass  # AutoModel.from_pretrained("chatglm2-6b", trust_remote_code=True)
    """
    return Compat()


class Compat:
    """What `compat` changed, so that it can be undone."""

    def __init__(self) -> None:
        self._changed: list[tuple[type, str, Any]] = []
        for base, adapt in (
            (PretrainedConfig, self._adapt_config),
            (PreTrainedModel, self._adapt_model),
            (PreTrainedTokenizerBase, self._adapt_tokenizer),
        ):
            self._watch(base, adapt)
            for cls in _subclasses(base):
                if _is_remote(cls):
                    adapt(cls)

    def undo(self) -> None:
        """Take everything back. Models of the remote code that are there can no longer generate, then."""
        while self._changed:
            owner, name, value = self._changed.pop()
            if value is _MISSING:
                if name in vars(owner):
                    delattr(owner, name)
            else:
                setattr(owner, name, value)

    def __enter__(self) -> Compat:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def _set(self, owner: type, name: str, value: Any) -> None:
        before = self._own(owner, name)
        self._changed.append((owner, name, before))
        setattr(owner, name, value)

    def _own(self, owner: type, name: str) -> Any:
        """What a class had. One made from an adapted class (transformers adds its generation that way) has a copy."""
        value = vars(owner).get(name, _MISSING)
        return next((had for cls, key, had in self._changed if key == name and vars(cls).get(key) is value), value)

    def _watch(self, base: Any, adapt: Callable[[type], None]) -> None:
        """Adapt each remote class when it is defined."""
        before = vars(base).get("__init_subclass__")

        def init_subclass(cls: Any, /, **kwargs: Any) -> None:
            if before is None:
                super(base, cls).__init_subclass__(**kwargs)
            else:
                before.__func__(cls, **kwargs)
            if _is_remote(cls):
                adapt(cls)

        self._set(base, "__init_subclass__", classmethod(init_subclass))

    def _adapt_config(self, cls: Any) -> None:
        self._set(cls, "attribute_map", {**cls.attribute_map, "num_hidden_layers": "num_layers"})
        if not hasattr(cls, "use_cache"):
            self._set(cls, "use_cache", True)

    def _adapt_model(self, cls: Any) -> None:
        if not hasattr(cls, "all_tied_weights_keys"):
            self._set(cls, "all_tied_weights_keys", {})
            self._set(cls, "_dynamic_tied_weights_keys", ["lm_head.weight"])  # to save ChatGLM-6B with release 4
        if "__init__" in vars(cls):
            self._set(cls, "__init__", _with_max_length(self._own(cls, "__init__")))
        if "_init_weights" in vars(cls):
            self._set(cls, "_init_weights", _with_inv_freq(self._own(cls, "_init_weights")))
        if "prepare_inputs_for_generation" in vars(cls):
            if not issubclass(cls, GenerationMixin):  # transformers adds it only to what its Auto classes load
                self._changed.append((cls, "__bases__", cls.__bases__))
                cls.__bases__ = (*cls.__bases__, GenerationMixin)
            prefix_lm = "mask_positions" in inspect.signature(cls.get_position_ids).parameters
            prepare = _prepare_prefix_lm if prefix_lm else _prepare(self._own(cls, "prepare_inputs_for_generation"))
            self._set(cls, "prepare_inputs_for_generation", prepare)
            self._set(cls, "_update_model_kwargs_for_generation", _update_model_kwargs)
            self._set(cls, "_supports_default_dynamic_cache", classmethod(lambda cls: False))

    def _adapt_tokenizer(self, cls: Any) -> None:
        if "__init__" in vars(cls):
            self._set(cls, "__init__", _with_vocabulary(self._own(cls, "__init__")))
        if "_pad" in vars(cls):
            self._set(cls, "_pad", _pad)
        if not hasattr(cls, "batch_encode_plus"):
            self._set(cls, "batch_encode_plus", _batch_encode_plus)


def _is_remote(cls: type) -> bool:
    """Whether it is a class of the remote code, and not one that `rope_pad_fix.apply` made from such."""
    if "_rope_pad_fix" in vars(cls):
        return False
    return cls.__name__.startswith("ChatGLM") and not cls.__module__.startswith(_LIBRARY)


def _subclasses(base: Any) -> list[type]:
    found: list[type] = list(base.__subclasses__())
    for cls in found:
        found.extend(cls.__subclasses__())
    return found


def _with_max_length(init: Callable[..., None]) -> Callable[..., None]:
    """For its length, the configuration has the ``max_length`` it had; left there, ``generate`` would refuse it."""

    @functools.wraps(init)
    def wrapped(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        missing = not hasattr(config, "max_length")
        if missing:
            config.max_length = _MAX_LENGTH
        try:
            init(self, config, *args, **kwargs)
        finally:
            if missing:
                del config.max_length
        if missing and getattr(self, "generation_config", None) is not None:
            self.generation_config.max_length = GenerationConfig().max_length

    return wrapped


def _with_inv_freq(init_weights: Callable[..., None]) -> Callable[..., None]:
    """Models are built without memory and filled from the checkpoint: frequencies that it lacks are computed."""

    @functools.wraps(init_weights)
    def wrapped(self: Any, module: Any) -> None:
        init_weights(self, module)
        if type(module).__name__ == "RotaryEmbedding" and isinstance(getattr(module, "inv_freq", None), torch.Tensor):
            size = 2 * module.inv_freq.numel()
            frequencies = 1.0 / (10000 ** (torch.arange(0, size, 2).float() / size))
            with torch.no_grad():
                module.inv_freq.copy_(frequencies)

    return wrapped


def _prepare(prepare: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """The code's own, with the cache under the name it knows."""

    @functools.wraps(prepare)
    def wrapped(
        self: Any, input_ids: Any, past_key_values: Any = None, cache: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        return prepare(self, input_ids, past_key_values=remote.own_cache(cache, past_key_values), **kwargs)

    return wrapped


def _prepare_prefix_lm(
    self: Any,
    input_ids: torch.Tensor,
    past_key_values: Any = None,
    attention_mask: torch.Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """ChatGLM-6B's pairs of positions and its four-dimensional mask, from a 2-D mask, which its own code drops."""
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    past = remote.own_cache(cache, past_key_values)
    context = remote.answer_begins(self.config, input_ids, mask)
    length = input_ids.shape[1] if past is None else 1
    return {
        "input_ids": input_ids[:, -length:],
        "past_key_values": past,
        "position_ids": remote.prefix_positions(self.config, mask, *context)[..., -length:],
        "attention_mask": remote.prefix_mask(mask, context[0], length),
    }


def _update_model_kwargs(
    self: Any, outputs: Any, model_kwargs: dict[str, Any], is_encoder_decoder: bool = False, **kwargs: Any
) -> dict[str, Any]:
    """transformers' own; the positions counted on, which release 4 left to the code; and the code's cache kept under
    the name whose value beam search reorders."""
    before = model_kwargs.get("position_ids")
    updated: dict[str, Any] = GenerationMixin._update_model_kwargs_for_generation(
        self, outputs, model_kwargs, is_encoder_decoder, **kwargs
    )
    if before is not None and updated["position_ids"] is before:
        updated["position_ids"] = torch.cat([before, before[..., -1:] + 1], -1)
    if (past := outputs.get("past_key_values")) is not None:
        known = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
        updated[next(name for name in CACHE_NAMES if name in known)] = past
    updated["is_first_forward"] = False
    return updated


def _with_vocabulary(init: Callable[..., None]) -> Callable[..., None]:
    """transformers asks a tokenizer for its vocabulary while it is being made: it must be there before."""

    @functools.wraps(init)
    def wrapped(self: Any, vocab_file: str, *args: Any, **kwargs: Any) -> None:
        vars(self).setdefault("_special_tokens_map", {})
        vars(self).setdefault("verbose", False)
        sentencepiece = getattr(sys.modules[type(self).__module__], "SPTokenizer", None)
        if sentencepiece is not None:
            images = kwargs.get("num_image_tokens")
            vocabulary = sentencepiece(vocab_file, **({} if images is None else {"num_image_tokens": images}))
            vars(self).update(tokenizer=vocabulary, sp_tokenizer=vocabulary)
            if not hasattr(vocabulary, "text_tokenizer"):  # not ChatGLM-6B's
                named = {"<bos>": vocabulary.bos_id, "<eos>": vocabulary.eos_id, "<pad>": vocabulary.pad_id}
                vars(self).update(name="GLMTokenizer", special_tokens=named)
        init(self, vocab_file, *args, **kwargs)

    return wrapped


def _pad(self: Any, encoded_inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """transformers' own padding, on either side: a 2-D mask, and positions from it for those that take them so."""
    padded = PreTrainedTokenizerBase._pad(self, encoded_inputs, *args, **kwargs)
    mask = padded.setdefault("attention_mask", [1] * len(padded["input_ids"]))
    if not hasattr(self, "gmask_token"):  # ChatGLM-6B's are pairs, and found by its model
        padded["position_ids"] = position_ids(torch.tensor([mask]))[0].tolist()
    return padded


def _batch_encode_plus(
    self: Any, rows: Any, add_special_tokens: bool = True, padding: Any = False, return_tensors: Any = None, **_: Any
) -> Any:
    """What chats are encoded with: rows of ids, or pairs of them, that get their special tokens and padding."""
    pairs = [row if isinstance(row, tuple) else (row, None) for row in rows]
    encoded = [self.prepare_for_model(*pair, add_special_tokens=add_special_tokens) for pair in pairs]
    return self.pad(encoded, padding=padding, return_tensors=return_tensors)
