"""Row-wise attention: an attention implementation, registered with transformers, that hands each row to the model's.

A patched decoder and its attention modules read their configuration through a `config_view`, which differs from the
configuration in one answer: the attention implementation is ``"padding_free"``. So the model's code asks this file
for masks and for attention, while the configuration itself keeps saying ``"sdpa"`` or ``"eager"`` and can be changed
at any time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from .cache import RowStates
from .decoding import (
    Group,
    equal_rows,
    equal_rows_agree,
    may_share,
    ragged_rows,
    ragged_rows_agree,
    shared_attention,
)
from .errors import UnsupportedModelError
from .rows import Run

if TYPE_CHECKING:
    from .decoder import PackedCall

NAME = "padding_free"
FLASH = ("flash_attention_2", "flash_attention_3")
SUPPORTED = ("sdpa", "eager", *FLASH)


def base_implementation(config: Any) -> str:
    """The implementation that the user chose.

    Raises:
        UnsupportedModelError: rows cannot be handed to it one by one.
    """
    name = config._attn_implementation_internal
    if name not in SUPPORTED:
        raise UnsupportedModelError(
            f"the attention implementation {name!r} cannot run row by row; choose one of {', '.join(SUPPORTED)} with "
            'model.set_attn_implementation, or use level="positions"'
        )
    return cast(str, name)


class MaskRecipe:
    """What the model's own code wants its mask to be, evaluated for each row as if the row were alone.

    So sliding windows, chunks and every other pattern count real tokens, and a row that needs no mask gets none.
    """

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.made: dict[tuple[str, int, int], Any] = {}

    def of(self, run: Run, implementation: str) -> Any:
        """The mask of one row of the run, as ``[1, 1, query_length, key_length]`` or None."""
        key = (implementation, run.query_length, run.key_length)
        if key not in self.made:
            past = run.key_length - run.query_length
            own: dict[str, Any] = {"batch_size": 1, "kv_length": run.key_length, "kv_offset": 0, "attention_mask": None}
            if "cache_position" in self.arguments:  # transformers 4
                device = self.arguments["cache_position"].device
                own["cache_position"] = torch.arange(past, run.key_length, device=device)
            else:
                own |= {"q_length": run.query_length, "q_offset": past}
            self.made[key] = ALL_MASK_ATTENTION_FUNCTIONS[implementation](**(self.arguments | own))
        return self.made[key]

    def whole(self, implementation: str) -> Any:
        """The mask of a call that was not packed, as the implementation makes it."""
        return ALL_MASK_ATTENTION_FUNCTIONS[implementation](**self.arguments)


def row_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | RowStates,
    value: Tensor | RowStates,
    attention_mask: Any,
    padding_free: PackedCall | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Attention of a packed call, in transformers' attention interface.

    Args:
        query: ``[1, H, W, D]``, all rows' tokens.
        key, value: ``[1, H_kv, W, D]``, or the `RowStates` that a cache returned, or ``[1, H_kv, K, D]`` that was
            computed from them.
        attention_mask: the `MaskRecipe` of this layer.
        padding_free: the call. None in a call that was not packed (a four-dimensional mask), which runs as ever.

    Returns:
        ``[1, W, H, D]``, zeros for tokens of no row, and the weights of each run, ``[1, H, n, m]``, where the
        implementation gives them.
    """
    config: Any = module.config
    implementation = base_implementation(config)
    function = _function(module, implementation)
    if padding_free is None:
        if isinstance(attention_mask, MaskRecipe):
            attention_mask = attention_mask.whole(implementation)
        return cast("tuple[Tensor, Any]", function(module, query, key, value, attention_mask, **kwargs))
    padding_free.attended = True
    weights = None
    if implementation in FLASH and padding_free.runs:
        joined = _flash(module, query, key, value, padding_free.runs, implementation, **kwargs)[0]
    else:
        joined, weights = _each_row(function, module, query, key, value, attention_mask, padding_free, **kwargs)
    if others := query.shape[2] - len(joined):
        joined = F.pad(joined, (0, 0, 0, 0, 0, others))
    return joined[None], weights


def _each_row(
    function: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor | RowStates,
    value: Tensor | RowStates,
    attention_mask: Any,
    call: PackedCall,
    **kwargs: Any,
) -> tuple[Tensor, list[Tensor] | None]:
    """``[T, H, D]``, each row attending to itself, and the weights of each where there are any."""
    size = value.buffer.shape[-1] if isinstance(value, RowStates) else value.shape[-1]
    outputs = [query.new_empty(0, query.shape[1], size)]
    weights: list[Any] = []
    share = isinstance(key, RowStates) and may_share(kwargs)
    for group in _groups(module, query, key, attention_mask, call, share):
        q, k, v = query[:, :, group.tokens], _states(key, group), _states(value, group)
        if group.ragged:
            scale, dropout = kwargs.get("scaling"), kwargs.get("dropout", 0.0)
            output = shared_attention(q[0].transpose(0, 1), k, v, cast(Tensor, group.mask), scale, dropout)
        else:
            if len(group.runs) > 1:
                q = q.transpose(0, 2)  # [R, H, 1, D]
            output, weight = function(module, q, k, v, group.mask, **kwargs)  # [1, n, H, D] or [R, 1, H, D]
            output = output.flatten(0, 1)
            weights.append(weight)
        outputs.append(output)
    return torch.cat(outputs), weights if weights and weights[0] is not None else None


def _groups(
    module: nn.Module, query: Tensor, key: Tensor | RowStates, attention_mask: Any, call: PackedCall, share: bool
) -> list[Group]:
    """Which rows to call the attention with; found once for all layers that would find the same."""
    implementation = base_implementation(module.config)
    device, heads, size = query.device, query.shape[1], query.shape[-1]
    key_heads = key.buffer.shape[1] if isinstance(key, RowStates) else key.shape[1]
    same = (attention_mask, implementation, share, device, heads, key_heads, size)
    if same in call.groups:
        return call.groups[same]
    groups, steps = [], []
    for run in call.runs:
        mask = attention_mask.of(run, implementation) if isinstance(attention_mask, MaskRecipe) else attention_mask
        if share and implementation == "sdpa" and mask is None and run.decodes:
            steps.append(run)
        else:
            groups.append(Group([run], run.key_length, mask))
    if steps:
        threads = torch.get_num_threads()
        if not call.invariant:
            groups += equal_rows(steps, equal_rows_agree(device, query.dtype, threads, heads, size))
        elif ragged_rows_agree(device, query.dtype, threads, heads, key_heads, size):
            groups += ragged_rows(steps, device)
        else:
            groups += equal_rows(steps, share=False)
    call.groups[same] = sorted(groups, key=lambda group: group.runs[0].start)
    return call.groups[same]


def _states(states: Tensor | RowStates, group: Group) -> Tensor:
    """``[R, H_kv, length, D]``, a view."""
    if isinstance(states, RowStates):
        return states.buffer[group.rows, :, : group.length]
    return states[:, :, group.keys]


def _function(module: nn.Module, implementation: str) -> Callable[..., Any]:
    if implementation != "eager":
        return cast("Callable[..., Any]", ALL_ATTENTION_FUNCTIONS[implementation])
    for cls in type(module).__mro__:  # eager attention is not registered: it stands beside the module that calls it
        function = getattr(sys.modules[cls.__module__], "eager_attention_forward", None)
        if function is not None:
            return cast("Callable[..., Any]", function)
    raise UnsupportedModelError(f"{type(module).__name__} has no eager_attention_forward in its module")


def _flash(
    module: nn.Module,
    query: Tensor,
    key: Tensor | RowStates,
    value: Tensor | RowStates,
    runs: list[Run],
    implementation: str,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> Tensor:
    """Flash attention takes the packed form itself, with cumulative lengths. Not yet run: it needs a GPU."""
    from transformers.modeling_flash_attention_utils import _flash_attention_forward

    lengths = [(run.query_length, run.key_length) for run in runs]
    total = sum(n for n, _ in lengths)
    cumulative = torch.tensor([(0, 0), *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(query.device)
    joined = [
        torch.cat([_states(states, Group([run], run.key_length, None)).transpose(1, 2) for run in runs], 1)
        for states in (key, value)
    ]  # [1, keys of all rows, H_kv, D]
    return cast(
        Tensor,
        _flash_attention_forward(
            query[:, :, :total].transpose(1, 2),
            *joined,
            None,
            query_length=total,
            is_causal=True,
            dropout=dropout,
            softmax_scale=scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            cu_seq_lens_q=cumulative[:, 0].contiguous(),
            cu_seq_lens_k=cumulative[:, 1].contiguous(),
            max_length_q=max(n for n, _ in lengths),
            max_length_k=max(m for _, m in lengths),
            attn_implementation=implementation,
        ),
    )


AttentionInterface.register(NAME, row_attention)
AttentionMaskInterface.register(NAME, MaskRecipe)


def config_view(config: Any, experts: str | None = None) -> Any:
    """The same configuration (one ``__dict__``, so that a change of either shows in both) that answers `NAME` when
    asked for its attention implementation, and ``experts``, if given, when asked for that of its experts. A copy of it
    is a copy of the configuration: `apply` makes views."""
    base = type(config)

    def reduce(self: Any, protocol: Any) -> Any:
        return _itself, (self._viewed,)

    def set_attribute(self: Any, name: str, value: Any) -> None:
        if (name, value) != ("_attn_implementation_internal", NAME):  # a model built from the view repeats its answer
            setattr(self._viewed, name, value)

    members = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__slots__": ("_viewed",),
        "__reduce_ex__": reduce,
        "__setattr__": set_attribute,
        "_attn_implementation": property(lambda self: NAME),
        "validate": lambda self: self._viewed.validate(),
    }
    if experts is not None:
        members["_experts_implementation"] = property(lambda self: experts)
    view: Any = object.__new__(type(base.__name__, (base,), members))
    object.__setattr__(view, "__dict__", config.__dict__)
    object.__setattr__(view, "_viewed", config)
    return view


def _itself(config: Any) -> Any:
    return config
