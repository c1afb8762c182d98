"""The patched forwards of the heads that stand on a decoder; the padding-free ones serve both levels without padding.

A head packs the call before its decoder does, so that it, too, computes nothing at padding, and its loss sees real
tokens only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from .decoder import pack, unpack, wants_dict
from .rows import IGNORED, Rows


def padding_free_causal_lm(module: Any, inner: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """``forward`` of a language model whose padding is removed.

    ``labels`` at padding and at the first real token of each row are ignored: nothing real comes before them. So a
    batch padded on the left and one padded on the right are the same computation.

    With ``logits_to_keep`` besides, the loss is over all labels as ever (transformers has no meaning for both), but
    logits are made only where a label is predicted from and where they are kept: training that reads nothing but the
    loss makes none of a prompt's. Finding those places costs another host synchronisation.
    """
    if arguments.get("padding_free") is not None:  # a forward that stands around this one has come through it
        return inner(**arguments)
    own = {name: arguments[name] for name in ("labels", "logits_to_keep") if name in arguments}
    packed = pack(module, {name: value for name, value in arguments.items() if name not in own})
    if packed is None:
        return inner(**arguments)
    arguments, call = packed
    rows = call.rows
    labels = own.get("labels")
    if labels is not None:
        if labels.shape != rows.back.shape:
            raise ValueError(f"labels have shape {tuple(labels.shape)}, the input has {tuple(rows.back.shape)}")
        labels = arguments["labels"] = rows.strip_labels(labels)
    slots = _kept_slots(rows, own.get("logits_to_keep", 0))
    targets = 0  # logits that are there for the loss alone
    if slots is not None:
        kept = rows.kept(slots)
        if labels is not None:
            following = F.pad(labels[0, 1:], (0, 1), value=IGNORED)
            predicting = (following != IGNORED).nonzero()[:, 0]
            targets = len(predicting)
            arguments["shift_labels"] = F.pad(following[predicting], (0, len(kept)), value=IGNORED)[None]
            kept = torch.cat([predicting.to(kept.device), kept])
        arguments["logits_to_keep"] = kept
    return_dict = arguments.pop("return_dict", None)
    outputs = unpack(module, inner(**arguments, return_dict=True), call)
    outputs["logits"] = rows.restore(outputs["logits"][:, targets:], slots)
    return outputs if wants_dict(module, return_dict) else outputs.to_tuple()


def positions_causal_lm(module: Any, inner: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """``forward`` of a language model at level ``"positions"``: the decoder under it derives the positions; here the
    same labels are ignored as without padding."""
    labels, mask = arguments.get("labels"), arguments.get("attention_mask")
    if labels is not None and isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape == labels.shape:
        real = mask.to(labels.device) != 0
        arguments["labels"] = labels.masked_fill(~real | (real.cumsum(1) == 1), IGNORED)
    return inner(**arguments)


def padding_free_classifier(module: Any, inner: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """``forward`` of transformers' ``GenericForSequenceClassification`` whose padding is removed.

    The pooled token is the last real one by the mask, not the last one that differs from the pad token: text may end in
    a token that is also the pad token, and embeddings have no pad token.
    """
    if getattr(inner, "func", None) is not GenericForSequenceClassification.forward:
        return inner(**arguments)  # another's forward: the decoder packs, and a row's last column is its last token
    labels = arguments.pop("labels", None)
    packed = pack(module, arguments)
    if packed is None:
        return inner(**arguments, labels=labels)
    arguments, call = packed
    rows = call.rows
    return_dict = arguments.pop("return_dict", None)
    decoder = getattr(module, module.base_model_prefix)
    outputs = decoder(**arguments, return_dict=True)
    logits = module.score(outputs.last_hidden_state)  # [1, T, labels]
    pooled = rows.restore(logits)[:, -1]
    loss = None
    if labels is not None:
        loss = module.loss_function(logits=logits, labels=labels, pooled_logits=pooled, config=module.config)
    outputs = unpack(module, outputs, call)
    cache = {module._cache_name: outputs.get(module._cache_name)}
    result = SequenceClassifierOutputWithPast(
        loss=loss, logits=pooled, hidden_states=outputs.hidden_states, attentions=outputs.attentions, **cache
    )
    return result if wants_dict(module, return_dict) else result.to_tuple()


def _kept_slots(rows: Rows, keep: int | Tensor) -> Tensor | None:
    """``logits_to_keep`` as slots ``b * L + l`` of any shape, chosen as transformers chooses columns; None for all."""
    if isinstance(keep, int) and not 0 < keep < rows.query_length:
        return None
    table = torch.arange(rows.batch_size * rows.query_length, device=rows.back.device).view(rows.back.shape)
    if isinstance(keep, int):
        return table[:, -keep:]
    keep = keep.to(table.device)
    if keep.dim() < 2:
        return table[:, keep]
    return table[keep] if keep.dtype == torch.bool else table.gather(1, keep)
