"""How a batch is given to a model: from prompts or from tensors, and what in it is real."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..rows import position_ids as positions_of


@dataclass(frozen=True, eq=False)
class Usage:
    """How a batch is given to a model.

    Attributes:
        rows: the real tokens of each, ``[n]``.
        ids: ``[B, L]``.
        real: ``[B, L]`` int64, 1 at real tokens.
        masked: whether an attention mask is passed.
        positions: passed with the prompt, ``[B or 1, L]``, or None.
        counted: whether positions by the mask are passed with each decoded token.
        embeds: whether embeddings of the prompt are passed instead of ids.
        cached: whether decoding uses a KV cache.
        generated: whether ``generate`` runs it.
    """

    rows: list[Tensor]
    ids: Tensor
    real: Tensor
    masked: bool = True
    positions: Tensor | None = None
    counted: bool = False
    embeds: bool = False
    cached: bool = True
    generated: bool = False


def special_tokens(name: str, model: Any, tokenizer: Any = None) -> list[int]:
    """The ids that the tokenizer and the model's configurations have under a name such as ``"eos_token_id"``."""
    holders = tokenizer, model.config, model.config.get_text_config(), getattr(model, "generation_config", None)
    found = [getattr(holder, name, None) for holder in holders]
    return [int(i) for ids in found if ids is not None for i in (ids if isinstance(ids, (list, tuple)) else [ids])]


def pad_token(model: Any, tokenizer: Any) -> int | None:
    """The pad token; a model without one is padded with its end of sequence."""
    ids = [i for name in ("pad_token_id", "eos_token_id") for i in special_tokens(name, model, tokenizer)]
    return next((i for i in ids if i >= 0), None)


def of_prompts(tokenizer: Any, prompts: Sequence[str], side: str | None, pad: int) -> Usage:
    """Texts, padded on a side; by default the tokenizer's.

    Raises:
        InputError: there is no text, no tokenizer, or no such side.
    """
    if tokenizer is None or not prompts or isinstance(prompts, str):
        raise InputError("prompts need a list of at least one text and their tokenizer")
    side = side or tokenizer.padding_side
    if side not in ("left", "right"):
        raise InputError(f"padding_side must be 'left' or 'right', got {side!r}")
    rows = [torch.tensor(tokenizer(text).input_ids, dtype=torch.int64) for text in prompts]
    if not all(map(len, rows)):
        raise InputError("a prompt has no tokens")
    return laid(Usage(rows, rows[0], rows[0]), side, pad)


def of_batch(batch: Mapping[str, Tensor], real_mask: Tensor | None, guessed: Callable[[Tensor], Tensor]) -> Usage:
    """Tensors as a model takes them; where no mask tells what is real, ``guessed`` of the ids does.

    Raises:
        InputError: they do not fit together.
    """
    ids, mask, positions = (batch.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    if ids is None or ids.dim() != 2 or ids.is_floating_point():
        raise InputError("batch needs input_ids of shape [batch, length], whole numbers")
    if unknown := batch.keys() - {"input_ids", "attention_mask", "position_ids", "token_type_ids"}:
        raise InputError(
            f"batch has {', '.join(sorted(unknown))}: give input_ids, attention_mask and position_ids only"
        )
    real = mask if mask is not None else real_mask if real_mask is not None else guessed(ids)
    if real.shape != ids.shape:
        raise InputError(f"the mask has shape {tuple(real.shape)}, input_ids have {tuple(ids.shape)}")
    if bool(((real != 0) & (real != 1)).any()):
        raise InputError("the mask must hold 1 at real tokens and 0 at padding")
    if positions is not None and (positions.dim() != 2 or positions.shape not in (ids.shape, (1, ids.shape[1]))):
        raise InputError(f"position_ids have shape {tuple(positions.shape)}, input_ids have {tuple(ids.shape)}")
    if not bool((real != 0).any(1).all()):
        raise InputError("a row of the batch has no real token")
    rows = [row[own != 0] for row, own in zip(ids, real, strict=True)]
    return Usage(rows, ids, (real != 0).long(), masked=mask is not None, positions=positions)


def guessed(ids: Tensor, pad: int | None, model: Any, tokenizer: Any) -> Tensor:
    """Which tokens are real, by the pad tokens at the ends of rows. ``[B, L]`` bool."""
    unclear = "batch has no attention_mask: say which tokens are real with real_mask, [batch, length]; "
    if pad is None:
        raise InputError(unclear + "there is no pad token to tell by")
    pads = (ids == pad).long()
    before, after = pads.cumprod(1) == 1, pads.flip(1).cumprod(1).flip(1) == 1
    if bool(((pads == 1) & ~before & ~after).any()):
        raise InputError(unclear + f"the pad token {pad} stands inside a row, as text or as padding")
    for which, name in ((before, "bos_token_id"), (after, "eos_token_id")):
        if pad in special_tokens(name, model, tokenizer) and bool(which.any()):
            raise InputError(unclear + f"the pad token {pad} is the {name}, too, and may be text")
    return ~(before | after)


def laid(usage: Usage, side: str, pad: int, extra: int = 0) -> Usage:
    """The rows padded anew, ``extra`` columns more than need be; positions by the mask if there were any."""
    width = max(map(len, usage.rows)) + extra
    ids = usage.rows[0].new_full((len(usage.rows), width), pad)
    real = torch.zeros_like(ids)
    for i, row in enumerate(usage.rows):
        where = slice(width - len(row), width) if side == "left" else slice(len(row))
        ids[i, where], real[i, where] = row, 1
    return replace(usage, ids=ids, real=real, positions=None if usage.positions is None else positions_of(real))
