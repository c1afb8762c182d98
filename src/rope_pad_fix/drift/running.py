"""A model over rows, alone or in a batch: what it answers, and how far its logits are from those of the lone rows."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor

from .batching import padded

_SAMPLES = 0.02  # seconds between two looks at the resident memory


@dataclass(frozen=True)
class Item:
    """What is run: a prompt, and the text that is laid behind it to compare logits.

    Attributes:
        row: number of the example it belongs to; one of several choices has that of its example.
        prompt: token ids.
        continuation: token ids, may be empty.
    """

    row: int
    prompt: list[int]
    continuation: list[int]


@dataclass(frozen=True)
class Answer:
    """Generated token ids, up to but not including an end of sequence, and whether one came."""

    tokens: list[int]
    ended: bool


@dataclass(frozen=True)
class Sums:
    """Differences of logits of one item, summed so that items can be added up.

    Attributes:
        largest: the largest absolute difference of a logit.
        logits, log_probs: sums of absolute differences.
        logit_count, log_prob_count: of how many.
    """

    largest: float = 0.0
    logits: float = 0.0
    logit_count: int = 0
    log_probs: float = 0.0
    log_prob_count: int = 0


@dataclass(frozen=True)
class Compared:
    """One item in a batch against the same item alone.

    Attributes:
        prompt: over the prompt's tokens.
        continuation: over the tokens from which the continuation is predicted.
        score: log-probability of the continuation, in the batch.
        lone_score: the same alone.
    """

    prompt: Sums
    continuation: Sums
    score: float
    lone_score: float


class Runner:
    """One model at one setting.

    Args:
        model: a causal language model.
        pad: the pad token's id.
        path: ``"ids"`` or ``"embeds"``.
        max_new_tokens: of each answer.
    """

    def __init__(self, model: Any, pad: int, path: str, max_new_tokens: int) -> None:
        self.model = model
        self.pad = pad
        self.path = path
        self.max_new_tokens = max_new_tokens
        ends = model.generation_config.eos_token_id
        self.ends = set(ends if isinstance(ends, (list, tuple)) else () if ends is None else (ends,))

    @torch.inference_mode()
    def answers(self, prompts: Sequence[list[int]], side: str, width: int | None = None) -> tuple[list[Answer], float]:
        """Greedy answers to the prompts in one batch, and the seconds they took."""
        ids, mask = padded(prompts, side, self.pad, width)
        inputs = self._inputs(ids, mask)
        start = time.perf_counter()
        options = {"do_sample": False, "num_beams": 1, "max_new_tokens": self.max_new_tokens, "pad_token_id": self.pad}
        sequences = self.model.generate(**inputs, **options)
        new = sequences[:, inputs["input_ids"].shape[1] if "input_ids" in inputs else 0 :].tolist()
        return [self._answer(row) for row in new], time.perf_counter() - start

    @torch.inference_mode()
    def compare(self, items: Sequence[Item], side: str, width: int | None = None) -> tuple[list[Compared], float]:
        """Logits of the items in one batch against those of each alone, and the seconds of the batch.

        The layout is that of `generate`: padded prompts, and behind them, in the same columns of every row, the
        continuations. So under right padding there are pads between the two.
        """
        ids, mask = padded([item.prompt for item in items], side, self.pad, width)
        more, more_mask = padded([item.continuation for item in items], "right", self.pad)
        start = time.perf_counter()
        logits = self._logits(torch.cat([ids, more], 1), torch.cat([mask, more_mask], 1))
        seconds = time.perf_counter() - start
        found = []
        for item, batched, real in zip(items, logits, torch.cat([mask, more_mask], 1), strict=True):
            tokens = torch.tensor([*item.prompt, *item.continuation])[None]
            alone = self._logits(tokens, torch.ones_like(tokens))[0]
            found.append(_compared(item, batched[real.to(batched.device) == 1], alone, tokens[0]))
        return found, seconds

    def _logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.model(**self._inputs(ids, mask), use_cache=False).logits
        return logits

    def _inputs(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        device = self.model.device
        ids, mask = ids.to(device), mask.to(device)
        if self.path == "embeds":
            return {"inputs_embeds": self.model.get_input_embeddings()(ids), "attention_mask": mask}
        return {"input_ids": ids, "attention_mask": mask}

    def _answer(self, tokens: list[int]) -> Answer:
        end = next((i for i, token in enumerate(tokens) if token in self.ends), None)
        return Answer(tokens[:end], end is not None)


def _compared(item: Item, batched: Tensor, alone: Tensor, tokens: Tensor) -> Compared:
    batched, alone, tokens = batched.float(), alone.float(), tokens.to(batched.device)
    difference = (batched - alone).abs()
    mine, theirs = (_log_probs(logits, tokens) for logits in (batched, alone))
    n = len(item.prompt)
    apart = (mine - theirs).abs()
    return Compared(
        _sums(difference[:n], apart[: n - 1]),
        _sums(difference[n - 1 : -1], apart[n - 1 :]),
        mine[n - 1 :].double().sum().item(),
        theirs[n - 1 :].double().sum().item(),
    )


def _log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """``[n - 1]``: of each token but the first, its log-probability after those before it."""
    chosen = logits[:-1].gather(1, tokens[1:, None])[:, 0]
    return chosen - logits[:-1].logsumexp(1)


def _sums(logits: Tensor, log_probs: Tensor) -> Sums:
    if not logits.numel():
        return Sums()
    return Sums(
        logits.max().item(),
        logits.sum(dtype=torch.float64).item(),
        logits.numel(),
        log_probs.sum(dtype=torch.float64).item(),
        log_probs.numel(),
    )


class Memory:
    """The most memory in use while it was watched, in bytes."""

    peak = 0


@contextmanager
def watched(device: torch.device) -> Iterator[Memory]:
    """Watch memory in a ``with`` block: the allocator's on a CUDA device, else the process's resident memory."""
    memory = Memory()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield memory
        memory.peak = torch.cuda.max_memory_allocated(device)
        return
    process, done = psutil.Process(), threading.Event()

    def look() -> None:
        while True:
            memory.peak = max(memory.peak, process.memory_info().rss)
            if done.wait(_SAMPLES):
                return

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield memory
    finally:
        done.set()
        watcher.join()
