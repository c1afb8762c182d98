"""ChatGLM-6B, ChatGLM2-6B, ChatGLM3-6B and GLM-4-9B as their checkpoints' own code runs them, at level "positions".

Three things about that code differ from transformers' models, whatever the release. ChatGLM-6B is a prefix language
model: its context is seen from both sides, and a position is a pair, (place in the context, place behind it). The
later ones count positions from 0 in every call, also with a cache, and look them up in a table of ``seq_length`` rows.
And all but GLM-4 run ``[length, batch, hidden]``.

Nothing here imports that code. Which of the two kinds a model is, is told by its modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..decoder import CACHE_NAMES
from ..rows import position_ids as positions_of
from . import Family


class PrefixCache(tuple):  # type: ignore[type-arg]
    """ChatGLM-6B's cache, ``((key, value), …)``, that remembers the context of each row.

    Attributes:
        context: ``[B]`` int64, where the row's answer begins, counted in real tokens.
        anchor: ``[B]`` int64, the place that all tokens of the answer stand at: that of its mask token. -1: they have
            places of their own.
    """

    context: Tensor
    anchor: Tensor


def decoder(module: Any, inner: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """``forward`` of a remote ``ChatGLMModel``: positions and masks come from the 2-D mask, and a pad shows what the
    last real token before it shows, so that whoever reads the last column reads a row's last token.

    Args:
        module: the model.
        inner: its own ``forward``.
        arguments: its arguments by name. ``attention_mask`` ``[B, P + L]`` covers past and present. ``inputs_embeds``
            alone are ``[B, L, hidden]``, for every version. A four-dimensional mask is left as it is.

    Raises:
        ValueError: the arguments contradict each other, or a position lies outside the model's table.
    """
    arguments = _remote_names(arguments)
    mask = arguments.get("attention_mask")
    if (isinstance(mask, Tensor) and mask.dim() != 2) or arguments.get("full_attention_mask") is not None:
        return inner(**arguments)
    prefix_lm = is_prefix_lm(module)
    length_first = not prefix_lm and bool(module.embedding(_zeros(module, 1, 2)).shape[0] == 2)
    batch_size, length = _take_input(module, arguments, prefix_lm, length_first)
    past = _past_length(module, arguments, prefix_lm or length_first)
    if mask is not None and mask.shape != (batch_size, past + length):
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}, but the cache holds {past} slots and the input is "
            f"{[batch_size, length]}: it must be {[batch_size, past + length]}, past and present"
        )
    if mask is None:
        mask = _zeros(module, batch_size, past + length) + 1
    context = None
    if prefix_lm:
        context = _prefix_lm(module, arguments, mask, past)
    else:
        _rotary(module, arguments, mask, past)
    return_dict = arguments.pop("return_dict", None)
    outputs = inner(**arguments, return_dict=True)
    outputs["last_hidden_state"] = _held(outputs["last_hidden_state"], mask[:, past:], prefix_lm or length_first)
    if context is not None and outputs.get("past_key_values") is not None:
        cache = PrefixCache(outputs["past_key_values"])
        cache.context, cache.anchor = context
        outputs["past_key_values"] = cache
    wants_dict = getattr(module.config, "return_dict", True) if return_dict is None else return_dict
    return outputs if wants_dict else outputs.to_tuple()


def causal_lm(module: Any, inner: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """``forward`` of a remote ``ChatGLMForConditionalGeneration``: labels that nothing real comes before are ignored;
    the cache may go by either of transformers' names."""
    from ..heads import positions_causal_lm

    return positions_causal_lm(module, inner, _remote_names(arguments))


def prepare_inputs_for_generation(
    self: Any,
    input_ids: Tensor,
    past_key_values: Any = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    use_cache: bool | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """What ``generate`` passes to the patched model: the 2-D mask, and positions only where the caller gave some."""
    past = own_cache(cache, past_key_values)
    prefix_lm = is_prefix_lm(self.transformer)
    inputs: dict[str, Any] = {"past_key_values": past, "attention_mask": attention_mask, "use_cache": use_cache}
    if inputs_embeds is not None and past is None:
        inputs["inputs_embeds"] = inputs_embeds
    else:
        inputs["input_ids"] = input_ids if past is None else input_ids[:, -1:]
    if prefix_lm:
        if past is not None:
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            inputs["position_ids"] = prefix_positions(self.config, mask, *answer_begins(self.config, input_ids, mask))[
                ..., -1:
            ]
    else:
        inputs["return_last_logit"] = True
        if position_ids is not None:
            inputs["position_ids"] = position_ids if past is None else position_ids[..., -1:]
    return inputs


def prepare_position_ids_for_generation(self: Any, inputs_tensor: Tensor, model_kwargs: dict[str, Any]) -> None:
    """None: `decoder` derives them in every call, whatever transformers would make of them."""


def update_model_kwargs_for_generation(
    self: Any, outputs: Any, model_kwargs: dict[str, Any], is_encoder_decoder: bool = False, **kwargs: Any
) -> dict[str, Any]:
    """A caller's own positions are counted on from the last real one, which a pad may follow."""
    from ..patching import unpatched_class

    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    if positions is not None and positions.dim() == 2 and mask is not None and mask.shape == positions.shape:
        model_kwargs["position_ids"] = positions.gather(1, _last_real(mask).to(positions.device))
    base: Any = unpatched_class(self)
    result: dict[str, Any] = base._update_model_kwargs_for_generation(
        self, outputs, model_kwargs, is_encoder_decoder, **kwargs
    )
    return result


def is_prefix_lm(module: Any) -> bool:
    """Whether a remote ``ChatGLMModel`` is ChatGLM-6B's."""
    return hasattr(module, "word_embeddings")


def own_cache(cache: Any, past_key_values: Any) -> Any:
    """The remote code's own cache under whichever name it came; a ``Cache`` of transformers is none it could fill."""
    past = past_key_values if cache is None else cache
    return None if past is None or hasattr(past, "get_seq_length") else past


def prefix_positions(config: Any, mask: Tensor, context: Tensor, anchor: Tensor) -> Tensor:
    """ChatGLM-6B's positions without its padding.

    Args:
        config: says whether positions are pairs.
        mask: ``[B, S]``, 1 at real tokens.
        context: ``[B]`` int64, as in `PrefixCache`.
        anchor: the same.

    Returns:
        ``[B, 2, S]`` int64, or ``[B, S]`` where ``config.position_encoding_2d`` is off.
    """
    count = positions_of(mask)
    place = torch.where((count < context[:, None]) | (anchor < 0)[:, None], count, anchor[:, None])
    if not config.position_encoding_2d:
        return place
    return torch.stack([place, (count - context[:, None] + 1).clamp(min=0)], 1)


def prefix_mask(mask: Tensor, context: Tensor, length: int) -> Tensor:
    """ChatGLM-6B's attention mask: all see the context, and besides it what comes before them.

    Args:
        mask: ``[B, S]``, 1 at real tokens, past and present.
        context: ``[B]`` int64, as in `PrefixCache`.
        length: ``L``, the tokens of this call.

    Returns:
        ``[B, 1, L, S]`` bool, True where nothing is seen.
    """
    column = torch.arange(mask.shape[1], device=mask.device)
    before = column <= column[-length:, None]
    seen = (mask != 0)[:, None] & (before | (positions_of(mask) < context[:, None])[:, None])
    return ~seen[:, None]


def _prefix_lm(module: Any, arguments: dict[str, Any], mask: Tensor, past: int) -> tuple[Tensor, Tensor] | None:
    """Complete the arguments of ChatGLM-6B; what its cache is to remember, if that is known."""
    ids, cache, positions = arguments.get("input_ids"), arguments.get("past_key_values"), arguments.get("position_ids")
    context = None
    if isinstance(cache, PrefixCache):
        context = cache.context, cache.anchor
    elif cache is None:
        if ids is None:
            raise ValueError(
                "ChatGLM-6B finds the end of a row's context by its token ids: pass input_ids, or besides "
                "inputs_embeds a four-dimensional attention_mask and position_ids [B, 2, L]"
            )
        context = answer_begins(module.config, ids, mask)
    if positions is None:
        if context is None:
            raise ValueError(
                "position_ids are needed: this cache does not know where each row's context ended. Pass the cache as "
                "the model returned it"
            )
        arguments["position_ids"] = prefix_positions(module.config, mask, *context)[..., past:]
    elif positions.dim() != 2 + bool(module.config.position_encoding_2d):
        raise ValueError(f"ChatGLM-6B takes position_ids [B, 2, L], got shape {tuple(positions.shape)}")
    length = mask.shape[1] - past
    # With a cache the context lies behind: a past without a note of it is seen as far as it is real.
    limit = mask.new_zeros(mask.shape[0]) if context is None else context[0]
    arguments["attention_mask"] = prefix_mask(mask, limit, length)
    return context


def answer_begins(config: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Where each row's context ends and where its mask token stands, ``[B]`` each, counted in real tokens.

    Raises:
        ValueError: a row holds no begin-of-answer or no mask token.
    """
    count, real = positions_of(mask), mask != 0

    def first(token: int) -> tuple[Tensor, Tensor]:
        here = (ids == token) & real
        return here.any(1), count.gather(1, here.long().argmax(1, keepdim=True))[:, 0]

    begins, context = first(config.bos_token_id)
    of_gmask, gmask = first(config.gmask_token_id)
    of_mask, anchor = first(config.mask_token_id)
    missing = ~(begins & (of_gmask | of_mask))
    if bool(missing.any()):
        row = int(missing.long().argmax())
        raise ValueError(
            f"row {row} of input_ids lacks the tokens that end a context of ChatGLM-6B, [gMASK] "
            f"({config.gmask_token_id}) or [MASK] ({config.mask_token_id}), and {config.bos_token_id}: the model's "
            "tokenizer adds them"
        )
    if not config.position_encoding_2d:  # there a [gMASK] does not hold the places that follow it
        gmask = torch.full_like(gmask, -1)
    return context, torch.where(of_gmask, gmask, anchor)


def _rotary(module: Any, arguments: dict[str, Any], mask: Tensor, past: int) -> None:
    """Complete the arguments of the later models."""
    given = arguments.get("position_ids")
    positions = positions_of(mask)[:, past:] if given is None else given
    arguments |= {"position_ids": positions, "attention_mask": None}
    last, padded = torch.stack([positions.max(), (mask == 0).any().to(positions)]).tolist()
    if last >= module.seq_length:
        source = "the mask" if given is None else "position_ids"
        raise ValueError(
            f"position {last}, from {source}, lies outside this model's {module.seq_length} (seq_length in its "
            "configuration): shorten the input"
        )
    if not padded:
        return  # the code's own causal mask, and its faster attention
    real = mask != 0
    column = torch.arange(mask.shape[1], device=mask.device)
    seen = real[:, None] & (column <= column[past:, None])
    seen = seen | ~seen.any(-1, keepdim=True)  # a pad that sees nothing would be a division of zero by zero
    if prefix := module.pre_seq_len or 0:
        seen = torch.cat([seen.new_ones(*seen.shape[:2], prefix), seen], -1)
    arguments["full_attention_mask"] = ~seen[:, None]


def _take_input(module: Any, arguments: dict[str, Any], prefix_lm: bool, length_first: bool) -> tuple[int, int]:
    """Batch size and length; embeddings that come alone are laid out as the code wants them."""
    ids, embeds = arguments.get("input_ids"), arguments.get("inputs_embeds")
    if ids is not None:
        return int(ids.shape[0]), int(ids.shape[1])
    if embeds is None:
        raise ValueError(f"{type(module).__name__} needs input_ids or inputs_embeds, got neither")
    batch_size, length = embeds.shape[:2]
    if not prefix_lm:
        arguments["input_ids"] = torch.zeros(batch_size, length, dtype=torch.long, device=embeds.device)
        arguments["inputs_embeds"] = embeds.transpose(0, 1).contiguous() if length_first else embeds
    return int(batch_size), int(length)


def _past_length(module: Any, arguments: dict[str, Any], length_first: bool) -> int:
    """The slots of a cache, virtual tokens of P-tuning left out."""
    cache = arguments.get("past_key_values")
    if cache is None:
        return 0
    return int(cache[0][0].shape[0 if length_first else 2]) - (module.pre_seq_len or 0)


def _held(hidden: Tensor, mask: Tensor, length_first: bool) -> Tensor:
    """``[B, L, hidden]``, or ``[L, B, hidden]``, with the last real token in place of the pads behind it."""
    last = _last_real(mask).to(hidden.device)
    row = torch.arange(len(last), device=hidden.device)
    return hidden[last.T, row] if length_first else hidden[row[:, None], last]


def _last_real(mask: Tensor) -> Tensor:
    """``[B, L]`` int64, for each column the last one up to it that is real; itself where there is none."""
    column = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    last = torch.where(mask != 0, column, -1).cummax(1).values
    return torch.where(last < 0, column, last)


def _remote_names(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with the cache under the only name the code knows; a cache it could not fill is left out."""
    given = [arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None]
    if len(given) > 1:
        raise ValueError("pass the cache as one of cache and past_key_values, not as both")
    kept = {name: value for name, value in arguments.items() if name not in CACHE_NAMES}
    return kept | {"past_key_values": own_cache(None, given[0] if given else None)}


def _zeros(module: Any, *shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.long, device=next(module.parameters()).device)


def refuses(module: Any) -> str | None:
    """Why a remote ``ChatGLMModel`` cannot be patched."""
    if getattr(module, "vision", None) is not None:
        return "the tokens of an image share a position, which no attention mask tells"
    return None


FAMILIES = (
    Family(
        "chatglm",
        decoders=("ChatGLMModel",),
        causal_lms=("ChatGLMForConditionalGeneration",),
        levels=("positions",),
        forwards={"decoder": decoder, "causal_lm": causal_lm},
        methods={
            "causal_lm": {
                "prepare_inputs_for_generation": prepare_inputs_for_generation,
                "_prepare_position_ids_for_generation": prepare_position_ids_for_generation,
                "_update_model_kwargs_for_generation": update_model_kwargs_for_generation,
            }
        },
        refuses=refuses,
        instead="rope_pad_fix.chatglm.from_pretrained loads the same checkpoint as transformers' GlmForCausalLM, which "
        "all levels run (all versions but ChatGLM-6B)",
    ),
)
