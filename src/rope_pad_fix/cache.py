"""Keys and values kept row by row, without padding, behind transformers' `DynamicCache`.

The caller's cache object stays what it is; its layers become `RowLayer`s. A decoder is handed a `RowCacheView` of it
for one call, which knows that call's rows. Lengths are still answered in padded slots, because `generate` counts in
them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from .errors import UnsupportedCacheError
from .rows import Rows

BUCKET = 32
_REMEDY = 'use a DynamicCache, or rope_pad_fix.apply(model, level="positions"), which leaves caches alone'


@dataclass(frozen=True, eq=False)
class RowStates:
    """Keys or values of every row: ``[B, H, capacity, D]``, the tokens of row ``b`` in its first places.

    Most models hand them on to their attention function. Whoever computes with them before that, as attention with
    latent keys does to expand them, gets the tensor `packed`.
    """

    buffer: Tensor
    rows: Rows

    @functools.cached_property
    def packed(self) -> Tensor:
        """``[1, H, K, D]``: the tokens of all rows that have one in this call, past and present, row by row."""
        rows, columns = (index.to(self.buffer.device) for index in self.rows.key_index)
        return self.buffer.transpose(1, 2)[rows, columns].transpose(0, 1)[None]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.packed, name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.packed[index]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A function of torch: on the packed tensors."""
        args, kwargs = tree_map_only(cls, lambda states: states.packed, (args, kwargs or {}))
        return function(*args, **kwargs)


class RowLayer(CacheLayerMixin):
    """A cache layer whose rows have their own lengths.

    The buffers grow by doubling, so a decode step writes its tokens and copies nothing else. ``mask`` (``[B, slots]``
    bool) tells which of the padded slots that `get_seq_length` counts hold a token. ``last``, on the first layer of a
    cache only, is the decoder's output at each row's last token (``[B, hidden]``): a call in which a row has no token,
    such as a chunk of right padding, goes on showing it.
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self) -> None:
        self.key_buffer: Tensor | None = None
        self.value_buffer: Tensor | None = None
        self.mask: Tensor | None = None
        self.last: Tensor | None = None

    @classmethod
    def adopt(cls, keys: Tensor, values: Tensor) -> RowLayer:
        """A layer with what a padded cache holds, ``[B, H, S, D]``: every slot a token until `keep` says otherwise."""
        layer = cls()
        layer.key_buffer, layer.value_buffer = keys, values
        layer.mask = torch.ones(keys.shape[0], keys.shape[2], dtype=torch.bool, device=keys.device)
        return layer

    def append(self, keys: Tensor, values: Tensor, rows: Rows) -> tuple[Tensor | RowStates, Tensor | RowStates]:
        """Store the packed ``[1, H, W, D]`` of one call and return what its queries attend to: the same tensors while
        there is no past, else the states of each row."""
        has_past = any(rows.past_lengths)
        longest = max((q + p for q, p in zip(rows.lengths, rows.past_lengths, strict=True)), default=0)
        where = (rows.batch_index.to(keys.device), rows.columns.to(keys.device)) if rows.total else None
        new_keys, new_values = keys[:, :, : rows.total], values[:, :, : rows.total]
        if where is not None and len(rows.lengths) != rows.batch_size:
            # Several sequences in a row: the last one goes on.
            goes_on = rows.mask.flatten()[rows.index].nonzero().squeeze(1).to(keys.device)
            where = (where[0][goes_on], where[1][goes_on])
            new_keys, new_values = keys.index_select(2, goes_on), values.index_select(2, goes_on)
        self.key_buffer = _write(self.key_buffer, new_keys, where, rows.batch_size, longest)
        self.value_buffer = _write(self.value_buffer, new_values, where, rows.batch_size, longest)
        self.mask = rows.mask
        if not has_past:
            return keys, values
        return RowStates(self.key_buffer, rows), RowStates(self.value_buffer, rows)

    def keep(self, mask: Tensor) -> None:
        """Drop the tokens at slots where ``mask`` (``[B, slots]`` bool) is False; the others close up."""
        if self.key_buffer is None or self.value_buffer is None or self.mask is None:
            return
        mask = mask.to(self.mask.device)
        slots = torch.sort(mask, dim=1, descending=True, stable=True).indices  # kept slots first, in order
        places = (self.mask.cumsum(1) - 1).clamp(min=0).gather(1, slots)[:, None, :, None]
        self.key_buffer = _gather(self.key_buffer, places)
        self.value_buffer = _gather(self.value_buffer, places)
        self.mask = mask
        self.last = None

    def _padded(self, buffer: Tensor | None) -> Tensor | None:
        if buffer is None or self.mask is None:
            return None
        mask = self.mask.to(buffer.device)
        places = (mask.cumsum(1) - 1).clamp(min=0)[:, None, :, None]
        return _gather(buffer, places) * mask[:, None, :, None]

    @property
    def keys(self) -> Tensor | None:
        """``[B, H, slots, D]`` as a padded cache holds them, zeros at pads; a copy."""
        return self._padded(self.key_buffer)

    @property
    def values(self) -> Tensor | None:
        """``[B, H, slots, D]`` as a padded cache holds them, zeros at pads; a copy."""
        return self._padded(self.value_buffer)

    @property
    def is_initialized(self) -> bool:
        return self.mask is not None

    # The rest is what transformers' `Cache` and `generate` ask of a layer.

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """For a decoder that runs padded (a four-dimensional mask, a model no longer patched): every slot a token."""
        batch_size, _, length, _ = key_states.shape
        past = self.mask
        if past is None:
            past = torch.ones(batch_size, 0, dtype=torch.bool, device=key_states.device)
        rows = Rows.from_mask(torch.cat([past, past.new_ones(batch_size, length)], 1), length)
        keys, values = (s.transpose(0, 1).flatten(1, 2)[None] for s in (key_states, value_states))  # [1, H, B L, D]
        self.append(keys, values, rows)
        return self.keys, self.values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None: ...

    def get_seq_length(self) -> int:
        return 0 if self.mask is None else self.mask.shape[1]

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        return self.get_seq_length() + _query_length(query_length), 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` slots. A positive number is the length to keep, as in transformers 4."""
        slots = self.get_seq_length()
        if self.mask is not None and tokens_to_remove:
            left = tokens_to_remove if tokens_to_remove > 0 else max(slots + tokens_to_remove, 0)
            self.mask = self.mask[:, :left]
            self.last = None

    def _select(self, index: Tensor) -> None:
        if self.key_buffer is not None and self.value_buffer is not None and self.mask is not None:
            self.key_buffer = self.key_buffer.index_select(0, index.to(self.key_buffer.device))
            self.value_buffer = self.value_buffer.index_select(0, index.to(self.value_buffer.device))
            self.mask = self.mask.index_select(0, index.to(self.mask.device))
            self.last = None if self.last is None else self.last.index_select(0, index.to(self.last.device))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.mask is not None:
            self._select(torch.arange(self.mask.shape[0], device=self.mask.device).repeat_interleave(repeats))

    def reset(self) -> None:
        self.key_buffer = self.value_buffer = self.mask = self.last = None


class RowCacheView(Cache):
    """A caller's cache as a decoder sees it during one call."""

    def __init__(self, cache: Cache, rows: Rows) -> None:
        self.cache = cache
        self.rows = rows
        self.layers = cache.layers
        self.layer_class_to_replicate = None
        self.offloading = False

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        while len(self.layers) <= layer_idx:
            self.layers.append(RowLayer())
        return self.layers[layer_idx].append(key_states, value_states, self.rows)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.rows.past_slots

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
        return self.rows.past_slots + _query_length(query_length), 0


def check(cache: object) -> Cache:
    """The cache, if its rows can be kept without padding.

    Raises:
        UnsupportedCacheError: it is static, quantised, offloaded, or no transformers cache at all.
    """
    if not isinstance(cache, DynamicCache):
        raise UnsupportedCacheError(f"rows cannot be kept without padding in a {type(cache).__name__}: {_REMEDY}")
    if cache.offloading:
        raise UnsupportedCacheError(f"an offloaded DynamicCache cannot be kept row by row: {_REMEDY}")
    for layer in cache.layers:
        if type(layer) not in (RowLayer, DynamicLayer, DynamicSlidingWindowLayer):
            raise UnsupportedCacheError(f"rows cannot be kept without padding in a {type(layer).__name__}: {_REMEDY}")
        held = getattr(layer, "cumulative_length", None)
        if held is not None and layer.keys is not None and layer.keys.numel() and layer.keys.shape[-2] != held:
            raise UnsupportedCacheError(
                f"a {type(layer).__name__} that has dropped tokens beyond its window cannot be taken over: start from "
                "an empty cache"
            )
    return cache


def slot_mask(cache: Cache) -> Tensor | None:
    """``[B, slots]`` bool: which slots of a checked cache hold a token; None if it has none or holds all of them."""
    layer = next((layer for layer in cache.layers if isinstance(layer, RowLayer)), None)
    return None if layer is None else layer.mask


def batch_size(cache: Cache) -> int | None:
    """The rows that a checked cache holds; None if it is empty."""
    for layer in cache.layers:
        held = layer.mask if isinstance(layer, RowLayer) else layer.keys
        if held is not None and held.numel():
            return int(held.shape[0])
    return None


def take_over(cache: Cache, rows: Rows) -> None:
    """Make every layer of a checked cache a `RowLayer` that holds just the past tokens of ``rows``."""
    past_mask = rows.mask[:, : rows.past_slots]
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, RowLayer):
            if rows.drops:
                layer.keep(past_mask)
        else:
            empty = layer.keys is None or not layer.keys.numel()
            cache.layers[i] = RowLayer() if empty else RowLayer.adopt(layer.keys, layer.values)
            cache.layers[i].keep(past_mask)
    if cache.layer_class_to_replicate is not None:
        cache.layer_class_to_replicate = RowLayer


def round_up(length: int) -> int:
    """The length of the bucket that a row of so many keys belongs to; capacities are whole buckets."""
    return length + -length % BUCKET


def _query_length(query: int | Tensor) -> int:
    """transformers 5 gives the query length, transformers 4 the positions of the query in the cache."""
    return query if isinstance(query, int) else query.shape[0]


def _gather(buffer: Tensor, places: Tensor) -> Tensor:
    return buffer.gather(2, places.expand(-1, buffer.shape[1], -1, buffer.shape[3]))


def _write(
    buffer: Tensor | None, new: Tensor, where: tuple[Tensor, Tensor] | None, batch_size: int, longest: int
) -> Tensor:
    """Put ``new``, ``[1, H, T, D]``, at its places of ``buffer``, ``[B, H, capacity, D]``, which grows if need be."""
    if buffer is None:
        buffer = new.new_zeros(batch_size, new.shape[1], round_up(longest), new.shape[3])
    elif longest > buffer.shape[2]:
        grown = buffer.new_zeros(*buffer.shape[:2], round_up(max(longest, 2 * buffer.shape[2])), buffer.shape[3])
        grown[:, :, : buffer.shape[2]] = buffer
        buffer = grown
    if where is None:
        return buffer
    tokens = new[0].transpose(0, 1)  # [T, H, D]
    if buffer.requires_grad or (new.requires_grad and torch.is_grad_enabled()):
        # Autograd still needs what was there before.
        return buffer.transpose(1, 2).index_put(where, tokens).transpose(1, 2)
    if buffer.is_inference() and not torch.is_inference_mode_enabled():
        buffer = buffer.clone()
    buffer.transpose(1, 2).index_put_(where, tokens)
    return buffer
