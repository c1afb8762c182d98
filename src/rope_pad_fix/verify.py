"""Does a row give the same bits in a batch as alone, on this machine? And if not, where do they part?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .calibration import TILES
from .decoder import CACHE_NAMES
from .deterministic import evaluation

LAYOUTS = ("left", "right", "holes")


@dataclass(frozen=True)
class Difference:
    """The first module, in the order in which they finish, whose output for a row is not the same in both runs.

    Attributes:
        module: its name, as in ``named_modules``.
        kind: its class's name.
        row: the first row of the batch that differs.
        largest: the largest absolute difference of its output.
    """

    module: str
    kind: str
    row: int
    largest: float


@dataclass(frozen=True)
class Verification:
    """What `verify` found; true if everything was equal.

    Attributes:
        equal: whether every row of every batch was equal bit for bit.
        cases: how many batches were compared.
        rows: how many rows.
        differing: how many of them differ in a logit or a cached key or value.
        first: where the first one parts, if it does so in a module of the prompt's forward.
    """

    equal: bool
    cases: int
    rows: int
    differing: int
    first: Difference | None

    def __bool__(self) -> bool:
        return self.equal


def verify(
    model: nn.Module,
    cases: int = 12,
    batch_size: int = 8,
    max_length: int = 48,
    new_tokens: int = 4,
    seed: int = 0,
) -> Verification:
    """Compare rows of random ragged batches with the same rows alone, bit for bit.

    Compared are the logits at every real position, the keys and values that the cache shows there, and the logits of
    ``new_tokens`` greedy steps. The batches have ``batch_size`` rows of 1 to ``max_length`` random tokens, padded on
    the left, on the right, and inside, in turn. The model is run as it is; it need not be patched.

    Args:
        model: a causal language model.
        cases: batches.
        batch_size: rows of each.
        max_length: the longest row, in tokens.
        new_tokens: greedy steps after the prompt.
        seed: of the batches.

    Returns:
        The verdict, and where a row parts from itself if one does.

    Raises:
        ValueError: a number that is not positive.
    """
    for name, value in {"cases": cases, "batch_size": batch_size, "max_length": max_length}.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    generator = torch.Generator().manual_seed(seed)
    rows_seen = differing = 0
    first: Difference | None = None
    with evaluation(model), torch.no_grad():
        for case in range(cases):
            rows = random_rows(model, batch_size, max_length, generator)
            layout = LAYOUTS[case % len(LAYOUTS)]
            batched = _outputs(model, *padded(rows, layout), new_tokens)
            for i, row in enumerate(rows):
                alone = _outputs(model, *padded([row], "left"), new_tokens)
                rows_seen += 1
                if not all(torch.equal(a[0], b[i]) for a, b in zip(alone, batched, strict=True)):
                    differing += 1
                    first = first or first_difference(model, rows, layout)
    return Verification(not differing, cases, rows_seen, differing, first)


def first_difference(model: nn.Module, rows: Sequence[Tensor], layout: str = "left") -> Difference | None:
    """Run rows in a batch and alone, and find the first module whose output for a row is not the same.

    Args:
        model: a decoder model, patched or not.
        rows: the token ids of each row, ``[n]`` int64.
        layout: ``"left"``, ``"right"`` or ``"holes"``.

    Returns:
        The module, or None if all outputs are equal bit for bit.
    """
    ids, mask = padded(rows, layout)
    return parting(model, rows, mask, {"input_ids": ids, "attention_mask": mask})


def parting(model: nn.Module, rows: Sequence[Tensor], mask: Tensor, inputs: Mapping[str, Tensor]) -> Difference | None:
    """`first_difference` for a batch of any layout, called in any way.

    Args:
        model: a decoder model, patched or not.
        rows: the token ids of each row, ``[n]`` int64.
        mask: ``[B, L]``, 1 where the batch holds them.
        inputs: what the model is called with for the batch.
    """
    with evaluation(model), torch.no_grad():
        batched = _module_outputs(model, inputs)
        alone = [_module_outputs(model, {"input_ids": row[None]}) for row in rows]
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    for name, out in batched.items():
        for i in range(len(rows)):
            if name not in alone[i]:
                continue
            (one,) = _by_row(alone[i][name], torch.ones(1, len(rows[i])))
            mine = _by_row(out, mask)[i]
            if one is not None and mine is not None and one.shape == mine.shape and not torch.equal(one, mine):
                return Difference(name, kinds[name], i, (one.float() - mine.float()).abs().max().item())
    return None


def random_rows(
    model: nn.Module, batch_size: int, max_length: int, generator: torch.Generator | None = None
) -> list[Tensor]:
    """Ragged rows of random token ids, on the model's device."""
    config: Any = model.config
    vocabulary = config.get_text_config().vocab_size
    lengths = torch.randint(1, max_length + 1, (batch_size,), generator=generator).tolist()
    device = next(model.parameters()).device
    return [torch.randint(vocabulary, (n,), generator=generator).to(device) for n in lengths]


def padded(rows: Sequence[Tensor], layout: str, pad: int = 0) -> tuple[Tensor, Tensor]:
    """``(input_ids, attention_mask)``, ``[B, L]`` both. "holes" puts the padding behind each row's first token."""
    width = max(map(len, rows))
    ids = rows[0].new_full((len(rows), width), pad)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        n = len(row)
        head = {"left": 0, "right": n, "holes": min(1, n - 1)}[layout]
        slots = torch.cat([torch.arange(head), torch.arange(width - (n - head), width)]).to(ids.device)
        ids[i, slots] = row
        mask[i, slots] = 1
    return ids, mask


def _outputs(model: Any, ids: Tensor, mask: Tensor, new_tokens: int) -> list[list[Tensor]]:
    """For each thing compared, a list with one tensor a row."""
    out = model(input_ids=ids, attention_mask=mask, use_cache=True)
    found = [_real(out.logits, mask)]
    name = next(name for name in CACHE_NAMES if name in out)
    for _ in range(new_tokens):
        token = out.logits[:, -1:].argmax(-1)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        out = model(input_ids=token, attention_mask=mask, use_cache=True, **{name: out[name]})
        found.append(list(out.logits))
    for layer in out[name].layers:
        found += [_real(states.transpose(1, 2), mask) for states in (layer.keys, layer.values)]
    return found


def _real(x: Tensor, mask: Tensor) -> list[Tensor]:
    return [row[real != 0] for row, real in zip(x, mask, strict=True)]


def _module_outputs(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The output of every module in one forward, in the order in which they finish."""
    outputs: dict[str, Tensor] = {}

    def recorder(name: str) -> Callable[..., None]:
        def record(module: nn.Module, arguments: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, (tuple, list)) and output else output
            if isinstance(tensor, Tensor) and name not in outputs:
                outputs[name] = tensor.detach().clone()

        return record

    handles = [module.register_forward_hook(recorder(name)) for name, module in model.named_modules() if name]
    try:
        model(**inputs, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return outputs


def _by_row(x: Tensor, mask: Tensor) -> list[Tensor | None]:
    """A module's output, of a padded or a packed call, cut into rows; None where it has no tokens to cut."""
    lengths = mask.sum(1).int().tolist()
    batch, total = mask.shape[0], sum(lengths)
    if x.dim() > 1 and x.shape[:2] == mask.shape:
        return list(_real(x, mask))
    if x.dim() > 1 and x.shape[0] == 1 and total <= x.shape[1] < total + TILES[0]:  # packed, and filled up
        return list(x[0, :total].split(lengths))
    if x.shape[:1] == (mask.numel(),):
        return list(_real(x.view(*mask.shape, *x.shape[1:]), mask))
    if x.dim() and total <= x.shape[0] < total + TILES[0]:
        return list(x[:total].split(lengths))
    return [None] * batch
