"""Is it a bug or is it rounding? One factor of a batch at a time is changed, and what drift remains is measured."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from ..decoder import CACHE_NAMES
from ..deterministic import GREEDY, deterministic
from ..errors import UnsupportedModelError
from ..patching import DEFAULT_LEVEL, applied
from ..rows import position_ids as positions_of
from ..verify import Difference, evaluating, parting
from .results import InputError

VERDICTS = ("mask", "positions", "device", "sampling", "rounding", "none")
_BUG = 1e-3  # of the largest logit, in float32: rounding is a hundred times less, known bugs ten times more
_PADS = (1, 16, 64)
_APPLY = "rope_pad_fix.apply(model)"


@dataclass(frozen=True)
class Factor:
    """What remains of the drift when one thing is changed and all else is left.

    Attributes:
        name: what is changed.
        drift: the largest absolute difference of a logit then; null where there is nothing to change.
        carries: the share of the drift that goes away, 0 to 1 (less than 0 where the change makes it worse); null where
            there is no drift or nothing to change.
        note: what was changed to what, or why not.
        remedy: what to do if this factor carries the drift.
    """

    name: str
    drift: float | None
    carries: float | None
    note: str
    remedy: str


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found.

    Attributes:
        verdict: ``"mask"``, ``"positions"``, ``"device"``, ``"sampling"``, ``"rounding"`` or ``"none"``.
        cause: one sentence.
        fix: the shortest one.
        drift: the largest absolute difference of a logit between a batch and the lone rows, as it is used now.
        exact_drift: the same in float32.
        largest_logit: of the lone rows, to compare with.
        dtype: of the model.
        factors: what remains when one thing is changed.
        first: the first module whose output for a row differs from that of the lone row, if any.
    """

    verdict: str
    cause: str
    fix: str
    drift: float
    exact_drift: float
    largest_logit: float
    dtype: str
    factors: list[Factor]
    first: Difference | None

    def to_json(self) -> str:
        """Every attribute under its own name."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False)


@dataclass(frozen=True, eq=False)
class Usage:
    """How a batch is given to a model.

    Attributes:
        rows: the real tokens of each, ``[n]``.
        ids: ``[B, L]``.
        real: ``[B, L]`` int64, 1 at real tokens.
        masked: whether an attention mask is passed.
        positions: passed with the prompt, ``[B, L]``, or None.
        counted: whether positions by the mask are passed with each decoded token.
        embeds: whether embeddings are passed instead of ids.
        cached: whether decoding uses a KV cache.
    """

    rows: list[Tensor]
    ids: Tensor
    real: Tensor
    masked: bool = True
    positions: Tensor | None = None
    counted: bool = False
    embeds: bool = False
    cached: bool = True


def diagnose(
    model: nn.Module,
    tokenizer: Any = None,
    prompts: Sequence[str] | None = None,
    *,
    batch: Mapping[str, Tensor] | None = None,
    real_mask: Tensor | None = None,
    padding_side: str | None = None,
    attention_mask: bool = True,
    position_ids: bool = False,
    decode_position_ids: bool = False,
    steps: int = 4,
) -> Diagnosis:
    """Find out why a batch gives other results than its rows alone, and what to do.

    The batch is run as described: one forward over the prompts and ``steps`` more with one token each, the tokens
    that the lone rows choose greedily. Its logits at real tokens are compared with those of each row alone, without
    padding. A difference above a thousandth of the largest logit that stays in float32 is a bug; one that does not is
    rounding. The model is left as it is.

    Args:
        model: a causal language model, patched or not.
        tokenizer, prompts: what to run, as texts; or
        batch: as tensors, ``input_ids`` ``[B, L]``, and ``attention_mask`` and ``position_ids`` if you pass them.
        real_mask: ``[B, L]``, 1 at real tokens, where ``batch`` has no attention mask.
        padding_side: of the prompts; by default the tokenizer's.
        attention_mask: whether you pass one with the prompts.
        position_ids: whether you pass positions counted by the mask with the prompts.
        decode_position_ids: whether you pass them with each decoded token.
        steps: tokens to decode.

    Raises:
        InputError: neither or both of prompts and batch, or tensors that do not fit.
    """
    pad = _pad(model, tokenizer)
    if (prompts is None) == (batch is None):
        raise InputError("pass prompts (and their tokenizer), or batch, and not both")
    if batch is not None:
        usage = _of_batch(batch, real_mask, decode_position_ids)
    else:
        if tokenizer is None or not prompts:
            raise InputError("prompts need at least one text and their tokenizer")
        rows = [torch.tensor(tokenizer(text).input_ids) for text in prompts]
        side = padding_side or tokenizer.padding_side
        if side not in ("left", "right"):
            raise InputError(f"padding_side must be 'left' or 'right', got {side!r}")
        usage = _laid(Usage(rows, rows[0], rows[0], attention_mask, counted=decode_position_ids), side, pad)
        if position_ids:
            usage = replace(usage, positions=positions_of(usage.real))
    device = next(model.parameters()).device
    usage = replace(
        usage,
        rows=[row.to(device) for row in usage.rows],
        ids=usage.ids.to(device),
        real=usage.real.to(device),
        positions=None if usage.positions is None else usage.positions.to(device),
    )
    return _Examination(model, usage, pad, steps).diagnosis()


def _pad(model: Any, tokenizer: Any) -> int:
    known = (getattr(tokenizer, "pad_token_id", None), getattr(model.config, "pad_token_id", None))
    return next((int(pad) for pad in known if pad is not None), 0)


def _of_batch(batch: Mapping[str, Tensor], real_mask: Tensor | None, counted: bool) -> Usage:
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if ids is None or ids.dim() != 2:
        raise InputError("batch needs input_ids of shape [batch, length]")
    real = mask if mask is not None else real_mask
    if real is None:
        raise InputError("batch has no attention_mask: say which tokens are real with real_mask, [batch, length]")
    if real.shape != ids.shape:
        raise InputError(f"the mask has shape {tuple(real.shape)}, input_ids have {tuple(ids.shape)}")
    if not bool((real != 0).any(1).all()):
        raise InputError("a row of the batch has no real token")
    rows = [row[own != 0] for row, own in zip(ids, real, strict=True)]
    return Usage(rows, ids, (real != 0).long(), mask is not None, batch.get("position_ids"), counted)


def _laid(usage: Usage, side: str, pad: int, extra: int = 0) -> Usage:
    """The rows padded anew, ``extra`` columns more than need be; positions by the mask if there were any."""
    width = max(map(len, usage.rows)) + extra
    ids = usage.rows[0].new_full((len(usage.rows), width), pad)
    real = torch.zeros_like(ids)
    for i, row in enumerate(usage.rows):
        where = slice(width - len(row), width) if side == "left" else slice(len(row))
        ids[i, where], real[i, where] = row, 1
    positions = None if usage.positions is None else positions_of(real)
    return replace(usage, ids=ids, real=real, positions=positions)


@dataclass(frozen=True)
class _Alone:
    """The lone rows: logits over the prompt and of each step, ``[n + steps, vocabulary]``, and the tokens chosen."""

    logits: list[Tensor]
    tokens: Tensor  # [B, steps]


class _Examination:
    """A model and a usage, and everything that is tried on them."""

    def __init__(self, model: Any, usage: Usage, pad: int, steps: int) -> None:
        self.by_length = _rope_type(model.config) in ("dynamic", "longrope")
        # Dynamic rotary embeddings keep a state between calls, which would be left on the caller's model.
        self.model = copy.deepcopy(model) if self.by_length else model
        self.usage, self.pad, self.steps = usage, pad, steps
        self.side = "left" if bool((usage.real[:, -1] == 1).all()) else "right"
        self.level = _strongest_level(self.model)
        self.apply = _APPLY if self.level == DEFAULT_LEVEL else "run rows of one length together, or one at a time"
        if self.level == "positions":
            self.apply = 'rope_pad_fix.apply(model, level="positions")'
        self.holes = bool((usage.real.diff(dim=1) == -1).any()) and bool((usage.real[:, -1] == 1).any())
        with evaluating(self.model):
            self.alone = self._run_alone(self.model)
            self.scale = max(logits.float().abs().max().item() for logits in self.alone.logits)
            self.drift = self._drift(self.model, usage, self.alone)

    def diagnosis(self) -> Diagnosis:
        """Try everything and judge."""
        model, usage = self.model, self.usage
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        with evaluating(model):
            factors = [self._factor(*one) for one in self._tried()]
            exact = self.drift if dtype == "float32" else self._in_dtype(torch.float32)
            verdict, cause, fix = self._judged(exact)
            inputs = self._inputs(usage)
            first = parting(model, usage.rows, usage.real, inputs) if self.drift else None
        return Diagnosis(verdict, cause, fix, self.drift, exact, self.scale, dtype, factors, first)

    def _factor(self, name: str, drift: float | None, note: str, remedy: str) -> Factor:
        carries = None if drift is None or not self.drift else 1 - drift / self.drift
        return Factor(name, drift, carries, note, remedy)

    def _tried(self) -> Iterator[tuple[str, float | None, str, str]]:
        """Name, remaining drift, note and remedy of every factor."""
        model, usage, config = self.model, self.usage, self.model.config
        generation = getattr(model, "generation_config", None)
        sampling = {
            n: v for n in GREEDY if n != "num_beams" and (v := getattr(generation, n, None)) not in (None, False)
        }
        on = bool(sampling.get("do_sample"))
        note = "on: " + ", ".join(f"{n}={v}" for n, v in sampling.items()) if on else "off"
        yield "sampling", None, note, "generate(..., do_sample=False)"

        note = "passed" if usage.masked else "not passed; now passed"
        yield (
            "attention mask",
            None if usage.masked else self._with(masked=True),
            note,
            "pass the tokenizer's attention_mask",
        )

        other = "right" if self.side == "left" else "left"
        moved = self._of(_laid(usage, other, self.pad))
        yield "padding side", moved, f"{other} instead of {self.side}", f"tokenizer.padding_side = {other!r}"

        longer = [self._of(_laid(usage, self.side, self.pad, extra)) for extra in (0, *_PADS)]
        note = "; ".join(f"+{n}: {_number(d)}" for n, d in zip((0, *_PADS), longer, strict=True))
        yield "padding length", max(longer), f"most of {note}", self.apply

        counted = self._of(self._counted())
        yield (
            "position_ids",
            counted,
            "counted by the mask",
            "pass rope_pad_fix.position_ids(attention_mask), or " + self.apply,
        )

        vocabulary = config.get_text_config().vocab_size
        id_ = (self.pad + 1) % vocabulary
        ids = usage.ids.masked_fill(usage.real == 0, id_)
        yield "pad token id", self._of(replace(usage, ids=ids)), f"{id_} instead", "pass the tokenizer's attention_mask"

        yield "batch size", self._equal_lengths(), "rows of one length, nothing padded", self.apply

        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            if dtype != next(model.parameters()).dtype:
                name = str(dtype).removeprefix("torch.")
                yield f"dtype {name}", self._in_dtype(dtype), name, f"model.to(torch.{name})"

        implementation = config._attn_implementation_internal
        instead = "eager" if implementation == "sdpa" else "sdpa"
        yield (
            "attention implementation",
            self._with_attention(instead),
            f"{instead} instead of {implementation}",
            f"model.set_attn_implementation({instead!r})",
        )
        yield "KV cache", self._with(cached=False), "off", self.apply

        places = set(map(str, (getattr(model, "hf_device_map", None) or {}).values()))
        note = f"layers on {', '.join(sorted(places))}" if len(places) > 1 else "one device"
        yield "devices", None, note, "load the model on one device"

        device = next(model.parameters()).device.type
        active = torch.is_autocast_enabled(device)
        off = self._under(lambda: torch.autocast(device, enabled=False)) if active else None
        yield "autocast", off, "active; now off" if active else "not active", "leave the autocast block"

        precision = torch.get_float32_matmul_precision()
        exact = precision == "highest"
        note = "already highest" if exact else f"highest instead of {precision}"
        remedy = 'torch.set_float32_matmul_precision("highest")'
        yield "float32 matmul precision", None if exact else self._under(deterministic), note, remedy

        yield (
            "deterministic algorithms",
            self._under(deterministic),
            "on, with all that rope_pad_fix.deterministic sets",
            "with rope_pad_fix.deterministic(): ...",
        )
        kind = _rope_type(config)
        yield (
            "rotary embeddings by length",
            self._equal_lengths() if self.by_length else None,
            f"{kind}: frequencies by the longest row; now rows of one length" if self.by_length else f"no ({kind})",
            "run rows of one length together, or one at a time",
        )
        window = _window(config)
        dense = self._of(_laid(usage, "left", self.pad)) if window and (self.holes or self.side == "right") else None
        note = f"window of {window}; now padded on the left, without holes" if dense is not None else ""
        if not note:
            note = f"window of {window}, padded on the left without holes" if window else "no window"
        yield "sliding window", dense, note, self.apply

        embedding = model.get_input_embeddings() is not None
        yield "inputs_embeds", self._with(embeds=True) if embedding else None, "instead of input_ids", "either will do"

        patched, note = self._patched()
        yield "rope_pad_fix", patched, note, self.apply

    def _judged(self, exact: float) -> tuple[str, str, str]:
        """Verdict, cause and fix."""
        model, usage = self.model, self.usage
        if exact > _BUG * self.scale:
            judge = self if next(model.parameters()).dtype == torch.float32 else None
            if judge is None:
                judge = _Examination(copy.deepcopy(model).to(torch.float32), usage, self.pad, self.steps)
            with evaluating(judge.model):
                return judge._bug(_BUG * self.scale)
        generation = getattr(model, "generation_config", None)
        if getattr(generation, "do_sample", False):
            return "sampling", "The generation configuration samples: every run gives another text.", "do_sample=False"
        if self.drift:
            dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
            cause = f"Rounding in {dtype}: other shapes take other kernels; in float32 {_number(exact)} remains."
            return "rounding", cause, self.apply
        return "none", "Every row gives in the batch what it gives alone, bit for bit.", "nothing to do"

    def _bug(self, limit: float) -> tuple[str, str, str]:
        usage = self.usage
        counted = self._counted()
        if not usage.masked and self._with(masked=True) <= limit:
            cause = "Padding is taken for text, since no attention mask is passed."
            return "mask", cause, "pass the tokenizer's attention_mask"
        if self._of(counted) <= limit:
            if self.side == "right" and usage.positions is None:
                cause = "Right padding: decoded tokens get positions that count pads, and generate reads at a pad."
            elif usage.positions is not None and not usage.counted:
                cause = "Decoded tokens get positions that count the pads, unlike the prompt's."
            else:
                cause = "Positions count the pads."
            without = "" if usage.masked else "pass the attention_mask, and "
            return "positions", cause, f"{without}{self.apply}, or pass rope_pad_fix.position_ids(attention_mask)"
        if self.by_length:
            cause = f"{_rope_type(self.model.config)} rotary embeddings take their frequencies from the longest row."
            return "positions", cause, "run rows of one length together, or one at a time"
        places = set(map(str, (getattr(self.model, "hf_device_map", None) or {}).values()))
        if len(places) > 1:
            return "device", "Layers are spread over devices, and nothing else explains it.", "load it on one device"
        if _window(self.model.config):
            return "mask", "The sliding window counts pads and holes instead of tokens.", self.apply
        return "mask", "Padding reaches the real tokens even with the mask and the right positions.", self.apply

    # What is tried.

    def _counted(self) -> Usage:
        return replace(self.usage, masked=True, positions=positions_of(self.usage.real), counted=True)

    def _of(self, usage: Usage) -> float:
        return self._drift(self.model, usage, self.alone)

    def _with(self, **changes: Any) -> float:
        return self._of(replace(self.usage, **changes))

    def _under(self, context: Callable[[], Any]) -> float:
        with context():
            return self._drift(self.model, self.usage, self._run_alone(self.model))

    def _in_dtype(self, dtype: torch.dtype) -> float:
        model = copy.deepcopy(self.model).to(dtype)
        return self._drift(model, self.usage, self._run_alone(model))

    def _with_attention(self, implementation: str) -> float | None:
        before = self.model.config._attn_implementation_internal
        try:
            self.model.set_attn_implementation(implementation)
            return self._drift(self.model, self.usage, self._run_alone(self.model))
        except (ValueError, ImportError):  # the model has no such attention
            return None
        finally:
            self.model.set_attn_implementation(before)

    def _equal_lengths(self) -> float:
        longest = max(self.usage.rows, key=len)
        rows = [longest] * len(self.usage.rows)
        usage = _laid(replace(self.usage, rows=rows), "left", self.pad)
        return self._drift(self.model, usage, self._run_alone(self.model, rows))

    def _patched(self) -> tuple[float | None, str]:
        """What remains with the library applied, at the strongest level that the model can have."""
        if self.level is None:
            return None, "cannot be applied to this model"
        with applied(self.model, self.level):
            alone = self._run_alone(self.model)
            usage = replace(self.usage, masked=True, positions=None, counted=False)
            return self._drift(self.model, usage, alone), f"level {self.level}, with the mask"

    # How it is run.

    def _run_alone(self, model: Any, rows: list[Tensor] | None = None) -> _Alone:
        found, chosen = [], []
        for row in self.usage.rows if rows is None else rows:
            own = copy.deepcopy(model) if self.by_length else model
            out = own(input_ids=row[None], use_cache=True)
            logits, tokens = [out.logits[0]], []
            for _ in range(self.steps):
                tokens.append(logits[-1][-1:].argmax(-1))
                out = own(input_ids=tokens[-1][None], use_cache=True, **_cache(out))
                logits.append(out.logits[0])
            found.append(torch.cat(logits))
            chosen.append(torch.cat(tokens) if tokens else row[:0])
        return _Alone(found, torch.stack(chosen))

    def _drift(self, model: Any, usage: Usage, alone: _Alone) -> float:
        batched = self._run(model, usage, alone.tokens)
        pairs = zip(batched, alone.logits, strict=True)
        return max((mine.float() - theirs.float()).abs().max().item() for mine, theirs in pairs)

    def _run(self, model: Any, usage: Usage, tokens: Tensor) -> list[Tensor]:
        """Of each row, the logits at its prompt's tokens and of each step."""
        out = model(**self._inputs(usage, model), use_cache=usage.cached)
        found = [[logits[own == 1]] for logits, own in zip(out.logits, usage.real, strict=True)]
        real, ids = usage.real, usage.ids
        for step in range(self.steps):
            token = tokens[:, step : step + 1]
            real = torch.cat([real, torch.ones_like(token)], 1)
            ids = torch.cat([ids, token], 1)
            inputs: dict[str, Any] = {"input_ids": token if usage.cached else ids}
            positions = positions_of(real)
            if usage.cached:
                inputs |= _cache(out)
                positions = positions[:, -1:]
            elif usage.positions is not None:
                positions = torch.cat([usage.positions.expand_as(usage.ids), positions[:, usage.ids.shape[1] :]], 1)
            if usage.masked:
                inputs["attention_mask"] = real
            if usage.counted:
                inputs["position_ids"] = positions
            out = model(**inputs, use_cache=usage.cached)
            for i, logits in enumerate(out.logits):
                found[i].append(logits[-1:])
        return [torch.cat(logits) for logits in found]

    def _inputs(self, usage: Usage, model: Any = None) -> dict[str, Tensor]:
        model = self.model if model is None else model
        inputs = {"input_ids": usage.ids}
        if usage.embeds:
            inputs = {"inputs_embeds": model.get_input_embeddings()(usage.ids)}
        if usage.masked:
            inputs["attention_mask"] = usage.real
        if usage.positions is not None:
            inputs["position_ids"] = usage.positions
        return inputs


def _strongest_level(model: Any) -> str | None:
    for level in (DEFAULT_LEVEL, "positions"):
        try:
            with applied(model, level):
                return level
        except UnsupportedModelError:
            pass
    return None


def _cache(out: Any) -> dict[str, Any]:
    name = next(name for name in CACHE_NAMES if name in out)
    return {name: out[name]}


def _rope_type(config: Any) -> str:
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    return str(rope.get("rope_type", rope.get("type", "default")))


def _window(config: Any) -> int | None:
    text = config.get_text_config()
    sizes = (getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size"))
    used = getattr(text, "use_sliding_window", True)
    return next((int(size) for size in sizes if size and used), None)


def _number(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print the factors, the first module that differs, and the verdict."""
    table = Table(
        title=f"Largest |Δ logit| in the batch: {_number(diagnosis.drift)}, of {diagnosis.largest_logit:.1f} "
        f"({diagnosis.dtype}; in float32: {_number(diagnosis.exact_drift)})",
        caption="remains: the largest |Δ logit| with this one thing changed; carries: the share that goes away",
    )
    for name in ("factor", "now", "remains", "carries", "remedy"):
        table.add_column(name, justify="right" if name in ("remains", "carries") else "left")
    for factor in diagnosis.factors:
        remains = "" if factor.drift is None else _number(factor.drift)
        carries = "" if factor.carries is None else f"{max(factor.carries, -9.99):.0%}"
        strong = factor.carries is not None and factor.carries > 0.9
        table.add_row(
            factor.name, factor.note, remains, carries, factor.remedy if strong else "", style="bold" if strong else ""
        )
    console.print(table)
    if diagnosis.first is not None:
        first = diagnosis.first
        console.print(
            f"First module whose output differs: {first.module} ({first.kind}), row {first.row}, by {first.largest:.1e}"
        )
    console.print(f"Verdict: {diagnosis.verdict}. {diagnosis.cause}", style="bold", markup=False)
    console.print(f"Shortest fix: {diagnosis.fix}", markup=False)
