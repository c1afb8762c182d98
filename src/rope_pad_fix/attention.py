"""Row-wise attention: an attention implementation, registered with transformers, that hands each row to the model's.

A patched decoder and its attention modules read their configuration through a `config_view`, which differs from the
configuration in one answer: the attention implementation is ``"padding_free"``. So the model's code asks this file
for masks and for attention, while the configuration itself keeps saying ``"sdpa"`` or ``"eager"`` and can be changed
at any time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from .cache import RowStates, round_up
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
        query: ``[1, H, T, D]``, all rows' tokens.
        key, value: ``[1, H_kv, T, D]``, or the `RowStates` that a cache returned.
        attention_mask: the `MaskRecipe` of this layer.
        padding_free: the call. None in a call that was not packed (a four-dimensional mask), which runs as ever.

    Returns:
        ``[1, T, H, D]``, and the weights of each run, ``[count, H, n, m]``, where the implementation gives them.
    """
    config: Any = module.config
    implementation = base_implementation(config)
    function = _function(module, implementation)
    if padding_free is None:
        if isinstance(attention_mask, MaskRecipe):
            attention_mask = attention_mask.whole(implementation)
        return cast("tuple[Tensor, Any]", function(module, query, key, value, attention_mask, **kwargs))
    padding_free.attended = True
    runs = padding_free.runs
    if not runs:  # no row has a token: the one that is there belongs to none
        return torch.zeros_like(query.transpose(1, 2)), []
    if implementation in FLASH:
        return _flash(module, query, key, value, runs, implementation, **kwargs), None
    outputs: list[Tensor] = []
    weights: list[Any] = []
    steps: list[Run] = []  # to be decoded together
    for run in runs:
        mask = attention_mask.of(run, implementation) if isinstance(attention_mask, MaskRecipe) else attention_mask
        if padding_free.invariant and implementation == "sdpa" and mask is None and run.decodes:
            steps.append(run)
            continue
        q, k, v = _split(query, run), _states(key, run), _states(value, run)
        output, weight = function(module, q, k, v, mask, **kwargs)  # [count, n, H, D]
        outputs.append(output.flatten(0, 1))
        weights.append(weight)
    order = None
    if steps and isinstance(key, RowStates) and isinstance(value, RowStates):
        plan = padding_free.decode_plan(steps)
        outputs += _decode(function, module, query, key, value, plan, **kwargs)
        order = plan.order
    joined = torch.cat(outputs)
    if order is not None:
        joined = joined.index_select(0, order)
    return joined[None], weights if weights and weights[0] is not None else None


@dataclass(frozen=True)
class Bucket:
    """Rows that decode one token each and have about as many keys, rounded up to `length`."""

    rows: Tensor | slice  # of the batch
    tokens: Tensor | slice  # of the packed sequence
    length: int
    mask: Tensor  # [rows, 1, 1, length] bool, a row's own keys


@dataclass(frozen=True)
class DecodePlan:
    """How the rows of a call that decode one token each share calls of attention."""

    buckets: list[Bucket]
    order: Tensor | None  # [T], where each packed token stands in the other rows' outputs and these; None if in order


def decode_plan(runs: list[Run], steps: list[Run], device: torch.device) -> DecodePlan:
    """Buckets for those ``steps`` among the ``runs`` of a call."""
    members: dict[int, list[tuple[int, int, int]]] = {}
    for run in steps:
        rows = [(run.first + i, run.start + i, run.key_length) for i in range(run.count)]
        members.setdefault(round_up(run.key_length), []).extend(rows)
    buckets = []
    tokens = [run.start + i for run in runs if run not in steps for i in range(run.count * run.query_length)]
    for length, rows in sorted(members.items()):
        first, token, keys = (list(column) for column in zip(*rows, strict=True))
        mask = torch.arange(length) < torch.tensor(keys)[:, None]
        buckets.append(Bucket(_index(first, device), _index(token, device), length, mask[:, None, None].to(device)))
        tokens += token
    if tokens == sorted(tokens):
        return DecodePlan(buckets, None)
    return DecodePlan(buckets, torch.tensor(sorted(range(len(tokens)), key=tokens.__getitem__)).to(device))


def _index(numbers: list[int], device: torch.device) -> Tensor | slice:
    if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return slice(numbers[0], numbers[0] + len(numbers))
    return torch.tensor(numbers).to(device)


def _decode(
    function: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: RowStates,
    value: RowStates,
    plan: DecodePlan,
    **kwargs: Any,
) -> list[Tensor]:
    """One token a row: rows whose numbers of keys round up to the same share a call, in which each has the shape that
    it has alone. ``[1, H, T, D]`` to ``[rows, H, D]`` of each bucket."""
    tokens = query[0].transpose(0, 1)[:, :, None]  # [T, H, 1, D]
    outputs = []
    for bucket in plan.buckets:
        q = tokens[bucket.tokens]
        k, v = key.up_to(bucket.rows, bucket.length), value.up_to(bucket.rows, bucket.length)
        outputs.append(function(module, q, k, v, bucket.mask, **kwargs)[0][:, 0])  # [rows, H, D]
    return outputs


def _split(packed: Tensor, run: Run) -> Tensor:
    """``[1, H, T, D]`` to ``[count, H, query_length, D]``, a view."""
    tokens = packed[0, :, run.start : run.start + run.count * run.query_length]
    return tokens.view(-1, run.count, run.query_length, packed.shape[-1]).transpose(0, 1)


def _states(states: Tensor | RowStates, run: Run) -> Tensor:
    return states.of(run) if isinstance(states, RowStates) else _split(states, run)


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

    lengths = [(run.query_length, run.key_length) for run in runs for _ in range(run.count)]
    cumulative = torch.tensor([(0, 0), *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(query.device)
    joined = [
        torch.cat([_states(states, run).transpose(1, 2).flatten(0, 1) for run in runs])[None] for states in (key, value)
    ]  # [1, keys of all rows, H_kv, D]
    return cast(
        Tensor,
        _flash_attention_forward(
            query.transpose(1, 2),
            *joined,
            None,
            query_length=query.shape[2],
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
