"""The patched forward of a base decoder: `positions_decoder`, and `padding_free_decoder` for the two levels above it.

A padding-free call is packed by the first patched module that it reaches (a head, or the decoder itself) and restored
by the same one on the way out. What lies between learns of it by the keyword argument ``padding_free``, which
transformers passes down to every attention function; so two threads may use one model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from . import cache as caches
from .calibration import TILES
from .decoding import Group
from .linear import make_invariant
from .rows import Rows, Run

CACHE_NAMES = ("cache", "past_key_values")  # transformers 5.2x, and before
# Arguments that describe the padded or packed form the caller had in mind, and are wrong for ours.
_DROPPED = ("cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


@dataclass(eq=False)
class PackedCall:
    """One call on its way through a packed decoder."""

    rows: Rows
    runs: list[Run]
    cache: Cache | None  # the caller's own
    before: Tensor | None  # [B, hidden], what each row showed last in earlier calls
    invariant: bool  # level "batch_invariant"
    groups: dict[Any, list[Group]] = field(default_factory=dict)  # of rows that share calls of attention
    decoded: bool = False  # a patched decoder has seen it
    attended: bool = False  # row-wise attention has seen it


def padding_free_decoder(module: Any, inner: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """``forward`` of a decoder at the levels ``"padding_free"`` and ``"batch_invariant"``."""
    call: PackedCall | None = arguments.get("padding_free")
    if call is not None:  # packed further out, restored there
        return _decode(inner, arguments, call)
    packed = pack(module, arguments)
    if packed is None:
        return inner(**arguments)
    arguments, call = packed
    return_dict = arguments.pop("return_dict", None)
    outputs = unpack(module, _decode(inner, arguments, call), call)
    return outputs if wants_dict(module, return_dict) else outputs.to_tuple()


def _decode(inner: Callable[..., Any], arguments: dict[str, Any], call: PackedCall) -> Any:
    """Run the packed decoder; behind its tokens put what rows without a token are to show."""
    call.decoded = True
    outputs = inner(**arguments | {"return_dict": True})
    hidden = outputs["last_hidden_state"]
    if call.cache is not None and call.cache.layers:
        call.cache.layers[0].last = call.rows.last(hidden, call.before).detach()
    if call.rows.held is not None and call.before is not None:
        outputs["last_hidden_state"] = torch.cat([hidden, call.before[None].to(hidden.device)], 1)
    return outputs


def positions_decoder(module: Any, inner: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """``forward`` of a decoder at level ``"positions"``: the mask gives the positions, nothing else changes."""
    mask = arguments.get("attention_mask")
    if arguments.get("position_ids") is None and isinstance(mask, Tensor) and mask.dim() == 2:
        batch_size, length = _input(module, arguments).shape[:2]
        cache = next((arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None), None)
        past = 0 if cache is None else cache.get_seq_length()
        _check_batch(mask, batch_size)
        if isinstance(past, int) and (mask.shape[1] < past + length or (cache is None and mask.shape[1] > length)):
            raise ValueError(_width_message(mask, past, length))
        columns = torch.arange(length, device=mask.device) + past
        positions = ((mask != 0).cumsum(1) - 1).clamp(min=0)
        arguments["position_ids"] = positions.index_select(1, columns)
    return inner(**arguments)


def pack(module: Any, arguments: dict[str, Any]) -> tuple[dict[str, Any], PackedCall] | None:
    """The arguments of a padded call, packed; None if the call is to run as it is (a mask that is not ``[B, S]``).

    Args:
        module: the patched module whose ``forward`` takes the arguments.
        arguments: by name; ``input_ids`` ``[B, L]`` or ``inputs_embeds`` ``[B, L, hidden]``, ``attention_mask``
            ``[B, P + L]`` or None, a cache with ``P`` slots or None, ``position_ids`` or None. Every other tensor
            whose first dimensions are ``[B, L]`` is packed with them.

    Raises:
        ValueError: the arguments contradict each other.
        UnsupportedCacheError: the cache cannot be kept row by row.
    """
    tokens = _input(module, arguments)
    given = [name for name in CACHE_NAMES if arguments.get(name) is not None]
    if len(given) > 1:
        raise ValueError("pass the cache as one of cache and past_key_values, not as both")
    cache = caches.check(arguments[given[0]]) if given else None
    mask = arguments.get("attention_mask")
    if mask is not None and not isinstance(mask, (Tensor, dict)):  # a dict: one four-dimensional mask a layer type
        raise TypeError(f"attention_mask must be a torch.Tensor, got {type(mask).__name__}")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
        if isinstance(mask, Tensor) and mask.dim() != 4:
            raise ValueError(f"attention_mask must have two or four dimensions, got shape {tuple(mask.shape)}")
        return None

    decoder = next(m for m in module.modules() if getattr(m, "_padding_free_decoder", False))
    invariant = module._rope_pad_fix.level == "batch_invariant"
    if invariant and tokens.shape[1] > 1:
        make_invariant(module)  # layers that came after `apply`, such as an adapter's
    if cache is None and _uses_cache(decoder, arguments):
        cache = DynamicCache()
        cache.layer_class_to_replicate = caches.RowLayer
    rows = _rows(tokens, mask, cache, arguments, decoder.config)
    if invariant:
        rows = replace(rows, tile=TILES[0])  # here once, instead of in every linear layer
    before = None
    if cache is not None:
        caches.take_over(cache, rows)
        if not rows.dense and cache.layers:
            before = cache.layers[0].last
            rows = rows if before is None else rows.holding()

    batch = tuple(tokens.shape[:2])
    packed = {name: value for name, value in arguments.items() if name not in (*CACHE_NAMES, *_DROPPED)}
    for name, value in packed.items():
        if isinstance(value, Tensor) and tuple(value.shape[:2]) == batch and name != "position_ids":
            packed[name] = rows.strip(value)
    own = arguments.get("position_ids")
    packed["position_ids"] = rows.positions() if own is None else rows.strip_positions(own)
    # A mask of ones, not None: with None transformers would look for packed sequences in the positions.
    packed["attention_mask"] = torch.ones_like(packed["position_ids"].flatten(0, -2)[:1])
    call = PackedCall(rows, rows.runs(), cache, before, invariant)
    if cache is not None:
        packed[module._cache_name] = caches.RowCacheView(cache, rows)
    packed["padding_free"] = call
    return packed, call


def unpack(module: Any, outputs: Any, call: PackedCall) -> Any:
    """The outputs of a packed call with their hidden states and attentions laid back into the batch.

    Raises:
        RuntimeError: something on the way dropped the ``padding_free`` argument, so that the rows were not kept apart.
    """
    if not call.decoded or not call.attended:
        part = "attention" if call.decoded else "decoder"
        raise RuntimeError(
            f"the packed rows did not reach the {part}: a forward that replaced the model's own does not pass its "
            'keyword arguments on. Let it, or use rope_pad_fix.apply(model, level="positions")'
        )
    rows = call.rows
    if (hidden := outputs.get("last_hidden_state")) is not None:
        outputs["last_hidden_state"] = rows.restore(hidden)
    if (states := outputs.get("hidden_states")) is not None:
        outputs["hidden_states"] = tuple(None if state is None else rows.restore(state) for state in states)
    if (attentions := outputs.get("attentions")) is not None:
        outputs["attentions"] = tuple(None if a is None else rows.restore_attentions(a) for a in attentions)
    if call.cache is not None:
        outputs[module._cache_name] = call.cache
    return outputs


def wants_dict(module: Any, return_dict: bool | None) -> bool:
    """Whether a caller gets an output object (True) or a tuple: what was passed, else what the configuration says."""
    return bool(getattr(module.config, "return_dict", True)) if return_dict is None else return_dict


def _input(module: Any, arguments: dict[str, Any]) -> Tensor:
    ids, embeds = arguments.get("input_ids"), arguments.get("inputs_embeds")
    if (ids is None) == (embeds is None):
        got = "neither" if ids is None else "both"
        raise ValueError(f"{type(module).__name__} needs exactly one of input_ids and inputs_embeds, got {got}")
    if ids is not None and ids.dim() != 2:
        raise ValueError(f"input_ids must be [batch, length], got shape {tuple(ids.shape)}")
    if embeds is not None and embeds.dim() != 3:
        raise ValueError(f"inputs_embeds must be [batch, length, hidden], got shape {tuple(embeds.shape)}")
    return cast(Tensor, embeds if ids is None else ids)


def _uses_cache(decoder: Any, arguments: dict[str, Any]) -> bool:
    use_cache = arguments.get("use_cache")
    if use_cache is None:
        use_cache = getattr(decoder.config, "use_cache", False)
    checkpointing = getattr(decoder, "gradient_checkpointing", False) and decoder.training and torch.is_grad_enabled()
    return bool(use_cache) and not checkpointing


def _rows(tokens: Tensor, mask: Tensor | None, cache: Cache | None, arguments: dict[str, Any], config: Any) -> Rows:
    batch_size, length = tokens.shape[:2]
    past = 0 if cache is None else cache.get_seq_length()
    cached = None if cache is None else caches.slot_mask(cache)
    held = batch_size if cache is None else caches.batch_size(cache)
    if held not in (None, batch_size):
        raise ValueError(f"the cache holds {held} rows, the input has {batch_size}")
    own = arguments.get("position_ids")
    if own is not None and (own.shape[-1] != length or (own.dim() > 1 and own.shape[-2] not in (1, batch_size))):
        raise ValueError(f"position_ids have shape {tuple(own.shape)}, the input has {(batch_size, length)}")
    if mask is not None:
        _check_batch(mask, batch_size)
        if mask.shape[1] != past + length:
            raise ValueError(_width_message(mask, past, length))
        return Rows.from_mask(mask.to(tokens.device), length, cached)
    if past:
        before = tokens.new_ones(batch_size, past, dtype=torch.bool) if cached is None else cached
        return Rows.from_mask(torch.cat([before, before.new_ones(batch_size, length)], 1), length)
    if length > 1 and "input_ids" in arguments and arguments["input_ids"] is not None:
        pad = getattr(config, "pad_token_id", None)
        # Only where padding stands: chats hold the token between their turns, and `generate` drops a mask of ones.
        if pad is not None and bool((tokens[:, [0, -1]] == pad).any()):
            warnings.warn(
                f"input_ids contain the pad token {pad} at an end of a row, but there is no attention_mask: each "
                "token is taken as real. Pass the tokenizer's attention_mask",
                UserWarning,
                stacklevel=2,
            )
    if own is not None and own.dim() == 2 and length > 1:
        return Rows.packed(own.expand(batch_size, length))
    return Rows.full(batch_size, length, tokens.device)


def _check_batch(mask: Tensor, batch_size: int) -> None:
    if mask.shape[0] != batch_size:
        raise ValueError(f"attention_mask has {mask.shape[0]} rows, the input has {batch_size}")


def _width_message(mask: Tensor, past: int, length: int) -> str:
    return (
        f"attention_mask has {mask.shape[1]} columns, but the cache holds {past} slots and the input adds {length}: it "
        f"must cover all {past + length}, past and present"
    )
