"""Is it a bug or is it rounding? One factor of a batch at a time is changed, and what drift remains is measured."""

from __future__ import annotations

import copy
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from accelerate.hooks import remove_hook_from_module
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from ..decoder import CACHE_NAMES
from ..deterministic import GREEDY, deterministic, deterministic_algorithms, evaluation, full_precision
from ..errors import InputError, UnsupportedModelError
from ..patching import DEFAULT_LEVEL, ROPE_BY_LENGTH, applied, rope_type
from ..rows import position_ids as positions_of
from ..verify import Difference, parting
from .usage import Usage, guessed, laid, of_batch, of_prompts, pad_token, special_tokens

VERDICTS = ("mask", "positions", "sampling", "device", "rounding", "none")
# Of the largest logit, in float32. Measured on tiny models of eight families: rounding 4e-7 to 2e-6, bugs 0.4 to 1.
# Without a run in float32, of the data type's spacing: rounding in bfloat16 is 3 of them, and 56 where experts change.
_BUG, _BUG_SPACINGS = 1e-3, 32
_NO_NUMBER = torch.finfo(torch.float32).max
_PADS = (0, 1, 16, 64)
_LONE = "run rows of one length together, or one at a time"
_Found = tuple[float | None, str]  # the drift that remains, None where there is nothing to change; what was changed


@dataclass(frozen=True)
class Factor:
    """What remains of the drift when one thing is changed and all else is left.

    Attributes:
        name: what is changed.
        drift: the largest absolute difference of a logit then; null where there is nothing to change.
        baseline: the same before the change.
        carries: the share of the drift that goes away, 0 to 1 (less than 0 where the change makes it worse); null where
            there is no drift or nothing to change.
        note: what was changed to what, or why not.
        remedy: what to do if this factor carries the drift.
    """

    name: str
    drift: float | None
    baseline: float
    carries: float | None
    note: str
    remedy: str


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found.

    Attributes:
        verdict: ``"mask"``, ``"positions"``, ``"sampling"``, ``"device"``, ``"rounding"`` or ``"none"``.
        cause: one sentence.
        fix: the shortest one.
        drift: the largest absolute difference of a logit between the batch and the lone rows, as it is used now;
            that of float32's largest number where one of them is not a number.
        exact_drift: the same in float32, without autocast and TF32; null if the model cannot be run so.
        largest_logit: of the lone rows, to compare with.
        dtype: of the model.
        factors: what remains when one thing is changed; those that do not apply are listed, too.
        first: the first module in the prompt's forward whose output for a row is not that of the lone row. For a bug,
            the first that is off by more than rounding; null if rows part only while decoding.
    """

    verdict: str
    cause: str
    fix: str
    drift: float
    exact_drift: float | None
    largest_logit: float
    dtype: str
    factors: list[Factor]
    first: Difference | None

    def to_dict(self) -> dict[str, Any]:
        """Every attribute under its own name."""
        return asdict(self)

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False)


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
    use_cache: bool = True,
    generate: bool = False,
    new_tokens: int = 4,
) -> Diagnosis:
    """Find out why a batch gives other results than its rows alone, and what to do.

    The batch is run as described: a forward over the prompts and ``new_tokens`` more with one token each, the tokens
    that the lone rows choose greedily. Its logits at real tokens are compared with those of each row alone, without
    padding and with positions from 0.

    A difference of more than a thousandth of the largest logit that stays in float32 is a bug. Rounding is hundreds of
    times less there (4e-7 to 2e-6 of the largest logit, measured), but not in bfloat16 (1e-2 to 4e-1), so that a model
    in another data type is judged by a copy in float32. float64 would not separate them better: rotary embeddings and
    norms compute in float32 there, too. A model that cannot be copied to float32 is judged by 32 spacings of its data
    type. Which bug it is, is told by the one change that removes it. The model is left as it is.

    Args:
        model: a causal language model, patched or not.
        tokenizer, prompts: what to run, as texts; or
        batch: as tensors, ``input_ids`` ``[B, L]``, and ``attention_mask`` and ``position_ids`` if you pass them.
        real_mask: ``[B, L]``, 1 at real tokens, where ``batch`` has no attention mask. Without either, pad tokens at
            the ends of rows are padding.
        padding_side: of the prompts; by default the tokenizer's.
        attention_mask: False if you do not pass it to the model.
        position_ids: whether you pass positions counted by the mask with the prompts.
        decode_position_ids: whether you pass them with each decoded token.
        use_cache: False if you run the whole sequence again for each token.
        generate: whether you call ``generate``, which makes its own positions and reads each row's next token in the
            last column. Only its logits for new tokens are compared.
        new_tokens: tokens to decode.

    Raises:
        InputError: neither or both of prompts and batch, tensors that do not fit, or no way to tell padding from text.
    """
    if (prompts is None) == (batch is None):
        raise InputError("pass prompts (and their tokenizer), or batch, and not both")
    if new_tokens < 0:
        raise InputError(f"new_tokens must not be negative, got {new_tokens}")
    if generate and (position_ids or decode_position_ids or "position_ids" in (batch or {})):
        raise InputError("generate makes its own position_ids: leave them out, or set generate=False")
    pad = pad_token(model, tokenizer)
    if batch is None:
        usage = of_prompts(tokenizer, prompts or (), padding_side, 0 if pad is None else pad)
    elif padding_side is not None:
        raise InputError("padding_side says how to pad prompts; a batch is padded already")
    else:
        usage = of_batch(batch, real_mask, lambda ids: guessed(ids, pad, model, tokenizer))
    positions = positions_of(usage.real) if position_ids and usage.positions is None else usage.positions
    device = next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))
    usage = Usage(
        [row.to(device) for row in usage.rows],
        usage.ids.to(device),
        usage.real.to(device),
        masked=usage.masked and attention_mask,
        positions=None if positions is None else positions.to(device),
        counted=decode_position_ids,
        cached=use_cache,
        generated=generate,
    )
    with evaluation(model), torch.no_grad():
        return _Examination(model, usage, 0 if pad is None else pad, new_tokens).diagnosis()


def _measure(function: Callable[[_Examination], _Found]) -> functools.cached_property[_Found]:
    """Measured once; what the model cannot do is noted, and does not end the diagnosis."""

    @functools.wraps(function)
    def measured(examination: _Examination) -> _Found:
        try:
            return function(examination)
        except Exception as error:  # any: these are ways in which nobody said the model could be run
            return None, f"cannot be tried: {type(error).__name__}: {next(iter(str(error).splitlines()), '')[:80]}"

    return functools.cached_property(measured)


class _Examination:
    """A model and a usage, and everything that is tried on them, when it is first asked for."""

    def __init__(self, model: Any, usage: Usage, pad: int, steps: int, tokens: Tensor | None = None) -> None:
        self.model, self.usage, self.pad, self.steps = model, usage, pad, steps
        self.side = "left" if bool((usage.real[:, -1] == 1).all()) else "right"
        self.other = "right" if self.side == "left" else "left"
        self.alone, self.tokens = self._alone(model, usage, tokens)
        self.scale = max(_largest(logits, torch.zeros_like(logits)) for logits in self.alone)
        self.drift = self._of(usage)
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        self.dtype = min(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)
        self.device = usage.ids.device.type

    # What can be changed, and what remains of the drift then.

    @_measure
    def sampling(self) -> _Found:
        config = getattr(self.model, "generation_config", None)
        settings = {name: getattr(config, name, None) for name in GREEDY if not name.startswith("num_")}
        if not settings["do_sample"]:
            return None, "off"
        return None, "on: " + ", ".join(f"{name}={value}" for name, value in settings.items() if value is not None)

    @_measure
    def masked(self) -> _Found:
        if self.usage.masked:
            return None, "passed"
        eos = self.pad in special_tokens("eos_token_id", self.model)
        return self._with(masked=True), "not passed" + (", and pad is eos" if eos else "") + "; now passed"

    @_measure
    def moved(self) -> _Found:
        return self._of(laid(self.usage, self.other, self.pad)), f"{self.other} instead of {self.side}"

    @_measure
    def longer(self) -> _Found:
        drifts = [self._of(laid(self.usage, self.side, self.pad, extra)) for extra in _PADS]
        note = "; ".join(f"+{n}: {_number(drift)}" for n, drift in zip(_PADS, drifts, strict=True))
        return max(drifts), f"most of {note}"

    @_measure
    def counted(self) -> _Found:
        """With the right positions in the prompt and while decoding, or, where they are passed, with none."""
        usage, right = self.usage, positions_of(self.usage.real)
        if usage.counted and usage.positions is not None and torch.equal(usage.positions.expand_as(right), right):
            return self._with(positions=None, counted=False), "by the mask already; now the model's own"
        note = "by the mask" + (", with the prompt and each token" if usage.positions is not None else "")
        now = replace(usage, masked=True, positions=right, counted=True, generated=False)
        return self._of(now), note + ("" if usage.masked else ", and the mask passed")

    @_measure
    def padded_otherwise(self) -> _Found:
        other = (self.pad + 1) % self.model.config.get_text_config().vocab_size
        ids = self.usage.ids.masked_fill(self.usage.real == 0, other)
        if torch.equal(ids, self.usage.ids):
            return None, "no padding"
        return self._with(ids=ids), f"{other} at pads"

    @_measure
    def equal(self) -> _Found:
        """Without padding: every row repeated to the length of the longest."""
        width = max(map(len, self.usage.rows))
        rows = [row.repeat(-(-width // len(row)))[:width] for row in self.usage.rows]
        usage = laid(replace(self.usage, rows=rows), "left", self.pad)
        alone, tokens = self._alone(self.model, usage)
        note = f"{len(rows)} rows of {width} tokens, no padding: what remains is due to their number"
        return self._of(usage, alone=alone, tokens=tokens), note

    def _in_dtype(self, dtype: torch.dtype) -> _Found:
        if dtype == self.dtype:
            return None, "already"
        return self._both(_copied(self.model, dtype)), f"{_name(dtype)} instead of {_name(self.dtype)}"

    in_float32 = _measure(lambda self: self._in_dtype(torch.float32))
    in_bfloat16 = _measure(lambda self: self._in_dtype(torch.bfloat16))
    in_float16 = _measure(lambda self: self._in_dtype(torch.float16))

    @_measure
    def attended(self) -> _Found:
        config = self.model.config
        before = config._attn_implementation_internal
        other = "eager" if before == "sdpa" else "sdpa"
        try:
            self.model.set_attn_implementation(other)
            if config._attn_implementation_internal != other:
                return None, f"{before}, which the model cannot change"
            return self._both(), f"{other} instead of {before}"
        finally:
            self.model.set_attn_implementation(before)

    @_measure
    def cached(self) -> _Found:
        usage = replace(self.usage, cached=not self.usage.cached)
        return self._both(usage=usage), "on" if usage.cached else "off"

    @_measure
    def whole(self) -> _Found:
        places = sorted(set(map(str, (getattr(self.model, "hf_device_map", None) or {}).values())))
        if len(places) < 2:
            return None, "one device"
        model, device = remove_hook_from_module(copy.deepcopy(self.model), recurse=True), self.usage.ids.device
        return self._both(type(model).to(model, device)), f"a copy on {device} instead of {', '.join(places)}"

    @_measure
    def uncast(self) -> _Found:
        if not torch.is_autocast_enabled(self.device):
            return None, "not active"
        note = f"off; it was {_name(torch.get_autocast_dtype(self.device))}"
        return self._under(torch.autocast(self.device, enabled=False)), note

    @_measure
    def in_full_precision(self) -> _Found:
        before = _precision()
        if before == "highest":
            return None, "highest already"
        return self._under(full_precision()), f"highest instead of {before}"

    @_measure
    def repeatable(self) -> _Found:
        if torch.are_deterministic_algorithms_enabled():
            return None, "on already"
        return self._under(deterministic_algorithms()), "on"

    @_measure
    def separate(self) -> _Found:
        """Rows each by itself, padded as they are, with the right positions: no frequencies of a longer row."""
        kind = rope_type(self.model.config)
        if kind not in ROPE_BY_LENGTH:
            return None, f"no ({kind})"
        now = replace(self.usage, masked=True, positions=positions_of(self.usage.real), counted=True, generated=False)
        drifts = []
        for i, row in enumerate(now.rows):
            one = slice(i, i + 1)
            positions = None if now.positions is None else now.positions[one]
            usage = replace(now, rows=[row], ids=now.ids[one], real=now.real[one], positions=positions)
            drifts.append(self._of(usage, alone=self.alone[one], tokens=self.tokens[one]))
        return max(drifts), f"{kind}: by the longest row; now each padded row by itself, with positions by the mask"

    @_measure
    def dense(self) -> _Found:
        """Padded on the left and without holes: there a window of slots is a window of tokens."""
        window = _window(self.model.config)
        if window is None:
            return None, "no window"
        usage = replace(laid(self.usage, "left", self.pad), masked=True)
        if torch.equal(usage.real, self.usage.real):
            return None, f"window of {window}, padded on the left without holes"
        return self._of(usage), f"window of {window}, in slots; now padded on the left, without holes"

    @_measure
    def embedded(self) -> _Found:
        if self.model.get_input_embeddings() is None:
            return None, "the model has none"
        return self._with(embeds=True), "inputs_embeds instead of input_ids"

    @_measure
    def patched(self) -> _Found:
        if self.level is None:
            return None, "no level can run this model"
        with applied(self.model, self.level):
            usage = replace(self.usage, masked=True, positions=None, counted=False)
            return self._both(usage=usage), f'level "{self.level}", with the mask'

    @functools.cached_property
    def level(self) -> str | None:
        """The strongest level that can run the model."""
        for level in (DEFAULT_LEVEL, "positions"):
            try:
                with applied(self.model, level):
                    return level
            except (UnsupportedModelError, RuntimeError):
                pass
        return None

    @property
    def apply(self) -> str:
        """How to patch the model, or what to do where that does not help."""
        remains = self.patched[0]
        if remains is None or remains > 0.1 * self.drift:
            return _LONE
        return "rope_pad_fix.apply(model" + ("" if self.level == DEFAULT_LEVEL else f', level="{self.level}"') + ")"

    # What follows from it.

    def diagnosis(self) -> Diagnosis:
        """Try everything and judge."""
        factors = [self._factor(*one) for one in _FACTORS]
        with deterministic():
            exact = self._exact()
            if exact is None:
                judge, limit = self, _BUG_SPACINGS * torch.finfo(self.dtype).eps * self.scale
            else:
                judge, limit = exact, _BUG * exact.scale
            bug = judge.drift > limit
            verdict, cause, fix = judge.bug(limit) if bug else self.no_bug(exact)
            first = judge.first(limit / judge.scale) if bug and judge.scale else None
        if self.drift and not bug:
            with _rope_kept(self.model):
                first = parting(self.model, self.usage.rows, self.usage.real, self._inputs(self.model, self.prompt))
        drift = None if exact is None else exact.drift
        return Diagnosis(verdict, cause, fix, self.drift, drift, self.scale, _name(self.dtype), factors, first)

    @property
    def prompt(self) -> Usage:
        """The usage with the positions that `generate` makes for the prompt, if it does."""
        return replace(self.usage, positions=positions_of(self.usage.real)) if self.usage.generated else self.usage

    def _factor(self, name: str, measure: str, remedy: str) -> Factor:
        drift, note = getattr(self, measure)
        if drift == _NO_NUMBER:
            drift, note = None, f"{note}: gives logits that are not numbers"
        carries = None if drift is None or not self.drift else 1 - drift / self.drift
        return Factor(name, drift, self.drift, carries, note, remedy.format(apply=self.apply, other=self.other))

    def _exact(self) -> _Examination | None:
        """The same in float32, where nothing lowers its precision."""
        lowered = any(found[0] is not None for found in (self.uncast, self.in_full_precision))
        model, wide = self.model, self.dtype in (torch.float32, torch.float64)
        if wide and not lowered:
            return self
        try:
            model = model if wide else _copied(model, torch.float32)
            return _Examination(model, self.usage, self.pad, self.steps, self.tokens)
        except Exception:  # any: quantised, offloaded, too large
            return None

    def bug(self, limit: float) -> tuple[str, str, str]:
        """Verdict, cause and fix where the drift is no rounding."""
        usage = self.usage

        def gone(found: _Found) -> bool:
            return found[0] is not None and found[0] <= limit

        applies = [self.apply] if gone(self.patched) else []
        moves = ['tokenizer.padding_side = "left"'] if self.side == "right" and gone(self.moved) else []
        if gone(self.masked):
            return "mask", "Padding is taken for text, since no attention mask is passed.", "pass the attention_mask"
        if gone(self.counted):
            passes = [] if usage.generated else ["pass rope_pad_fix.position_ids(attention_mask)"]
            cause = "Positions count the pads."
            if self.side == "right" and usage.generated:
                cause = "Right padding: generate reads the next token in the column of a pad and counts on from there."
            elif self.side == "right" and usage.positions is None:
                cause = "Right padding: decoded tokens get positions that count pads, and generate reads at a pad."
            elif usage.positions is not None and not usage.counted:
                cause = "Decoded tokens get positions that count the pads, unlike the prompt's."
                passes = ["pass rope_pad_fix.position_ids(attention_mask)[:, -1:] with each decoded token"]
            if not usage.masked:
                cause = "No attention mask is passed, so padding is text, and positions count it."
            without = "" if usage.masked else "pass the attention_mask, and "
            return "positions", cause, without + (", or ".join([*applies, *moves, *passes][:2]) or _LONE)
        if gone(self.separate):
            return "positions", f"{self.separate[1].split(':')[0]} rotary embeddings are set by the longest row.", _LONE
        if gone(self.whole):
            return "device", "It goes away on one device: the layers are spread over several.", "load it on one device"
        if gone(self.dense):
            cause, moves = "The sliding window counts pads and holes instead of tokens.", ["pad on the left, no holes"]
        elif self.equal[0] is not None and not gone(self.equal):
            cause = "Rows of one length without padding differ, too: the model's own computation depends on the batch."
            return "rounding", cause, applies[0] if applies else "run rows one at a time"
        else:
            cause = "Padding reaches the real tokens even with the mask and the right positions."
        return "mask", cause, ", or ".join([*applies, *moves]) or _LONE

    def no_bug(self, exact: _Examination | None) -> tuple[str, str, str]:
        """Verdict, cause and fix where the drift, if there is any, is rounding."""
        sampling = self.sampling[1]
        if sampling != "off":
            cause = f"The generation configuration samples ({sampling[4:]}): every run gives another text."
            return "sampling", cause, "model.generate(..., do_sample=False)"
        if not self.drift:
            return "none", "Every row gives in the batch what it gives alone, bit for bit.", "nothing to do"
        kind = _name(self.dtype)
        for (drift, _), name in ((self.in_full_precision, "lowered float32 precision"), (self.uncast, "autocast")):
            kind = kind if drift is None else name
        remains = "the model cannot be run in float32" if exact is None else f"float32 leaves {_number(exact.drift)}"
        cause = f"Rounding in {kind}: other shapes take other kernels ({_number(self.drift)}; {remains})."
        coarse = exact is not None and exact.drift < 0.1 * self.drift
        fix = "run in float32" if coarse else "nothing is wrong: run rows one at a time where every bit counts"
        return "rounding", cause, self.apply if self.patched[0] == 0 else fix

    def first(self, limit: float) -> Difference | None:
        """The first module in the prompt's forward whose output is off by more than ``limit`` of its largest value."""
        usage, model = self.usage, self.model
        batched = _hidden(model, self._inputs(model, self.prompt))
        alone = [_hidden(model, {"input_ids": row[None]}) for row in usage.rows]
        for name, (kind, out) in batched.items():
            for i, own in enumerate(usage.real == 1):
                one = alone[i].get(name, (kind, out[:0]))[1]
                if out.shape[:2] in (own.shape, (1, *own.shape), usage.real.shape) and one.shape[:1] == (1,):
                    mine = out[i if len(out) > 1 else 0][own]
                    off = _largest(mine, one[0]) if mine.shape == one[0].shape else 0.0
                    if off > limit * one.float().abs().max().item():
                        return Difference(name, kind, i, off)
        return None

    # How it is run.

    def _of(self, usage: Usage, model: Any = None, alone: Any = None, tokens: Tensor | None = None) -> float:
        """The largest absolute difference of a logit from the lone rows'."""
        tokens = self.tokens if tokens is None else tokens
        batched = self._run(self.model if model is None else model, usage, tokens)[0]
        pairs = zip(batched, self.alone if alone is None else alone, strict=True)
        return max(_largest(mine, one[len(one) - len(mine) :]) for mine, one in pairs)

    def _with(self, **changes: Any) -> float:
        return self._of(replace(self.usage, **changes))

    def _both(self, model: Any = None, usage: Usage | None = None) -> float:
        """The drift where the lone rows have to be run anew, too."""
        model, usage = self.model if model is None else model, self.usage if usage is None else usage
        return self._of(usage, model, self._alone(model, usage, self.tokens)[0])

    def _under(self, context: AbstractContextManager[Any]) -> float:
        with context:
            return self._both()

    def _alone(self, model: Any, usage: Usage, tokens: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
        """Logits of each row by itself, without padding, and the tokens of the steps."""
        found = []
        for i, row in enumerate(usage.rows):
            own = Usage([row], row[None], torch.ones_like(row[None]), cached=usage.cached)
            found.append(self._run(model, own, None if tokens is None else tokens[i : i + 1]))
        return [logits[0] for logits, _ in found], torch.cat([chosen for _, chosen in found])

    def _run(self, model: Any, usage: Usage, forced: Tensor | None) -> tuple[list[Tensor], Tensor]:
        """Of each row, the logits at its prompt's tokens and of each step, ``[n + steps, vocabulary]``, and the tokens
        of the steps, ``[B, steps]``: those that are forced, or the likeliest."""
        with _rope_kept(model):
            if usage.generated and forced is not None:
                return self._generate(model, usage, forced), forced
            out = model(**self._inputs(model, usage), use_cache=usage.cached)
            found = [[logits[own == 1]] for logits, own in zip(out.logits, usage.real, strict=True)]
            real, ids, width = usage.real, usage.ids, usage.ids.shape[1]
            for step in range(self.steps):
                token = torch.stack([self._likeliest(logits[-1]) for logits in found])
                token = token if forced is None else forced[:, step : step + 1]
                real, ids = torch.cat([real, torch.ones_like(token)], 1), torch.cat([ids, token], 1)
                inputs: dict[str, Any] = {"input_ids": token if usage.cached else ids}
                if usage.masked:
                    inputs["attention_mask"] = real
                if usage.counted:
                    positions = positions_of(real)
                    if usage.positions is not None:
                        positions = torch.cat([usage.positions.expand_as(usage.ids), positions[:, width:]], 1)
                    inputs["position_ids"] = positions[:, -1:] if usage.cached else positions
                if usage.cached:
                    name = next(name for name in CACHE_NAMES if name in out)
                    inputs[name] = out[name]
                out = model(**inputs, use_cache=usage.cached)
                for i, logits in enumerate(out.logits):
                    found[i].append(logits[-1:])
            return [torch.cat(logits) for logits in found], ids[:, width:]

    def _generate(self, model: Any, usage: Usage, forced: Tensor) -> list[Tensor]:
        steps = iter(torch.cat([forced, torch.zeros_like(usage.ids[:, :1])], 1).T)

        def force(_: Tensor, scores: Tensor) -> Tensor:
            return torch.full_like(scores, -math.inf).scatter_(1, next(steps)[:, None], 0.0)

        out = model.generate(
            **self._inputs(model, usage),
            **{name: value for name, value in GREEDY.items() if value is not None},
            logits_processor=[force],
            max_new_tokens=self.steps + 1,
            use_cache=usage.cached,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return list(torch.stack(out.logits, 1))

    def _likeliest(self, logits: Tensor) -> Tensor:
        """The next token, ``[1]``, but no end of sequence: `generate` would stop there."""
        ends = [i for i in special_tokens("eos_token_id", self.model) if 0 <= i < logits.shape[-1]]
        last = logits[-1:].clone()
        last[:, ends] = -math.inf
        return last.argmax(-1)

    def _inputs(self, model: Any, usage: Usage) -> dict[str, Tensor]:
        inputs = {"input_ids": usage.ids}
        if usage.embeds:
            inputs = {"inputs_embeds": model.get_input_embeddings()(usage.ids)}
        if usage.masked:
            inputs["attention_mask"] = usage.real
        if usage.positions is not None:
            inputs["position_ids"] = usage.positions
        return inputs


# Name, measurement of `_Examination`, and remedy if it carries the drift.
_FACTORS: tuple[tuple[str, str, str], ...] = (
    ("sampling", "sampling", "model.generate(..., do_sample=False)"),
    ("attention mask", "masked", "pass the tokenizer's attention_mask"),
    ("padding side", "moved", 'tokenizer.padding_side = "{other}"'),
    ("padding length", "longer", "{apply}"),
    ("position_ids", "counted", "pass rope_pad_fix.position_ids(attention_mask), or {apply}"),
    ("pad token id", "padded_otherwise", "pass the tokenizer's attention_mask"),
    ("batch size", "equal", "{apply}"),
    ("dtype float32", "in_float32", "model.to(torch.float32)"),
    ("dtype bfloat16", "in_bfloat16", "model.to(torch.bfloat16)"),
    ("dtype float16", "in_float16", "model.to(torch.float16)"),
    ("attention implementation", "attended", "model.set_attn_implementation(...)"),
    ("KV cache", "cached", "{apply}"),
    ("devices", "whole", "load the model on one device"),
    ("autocast", "uncast", "leave the autocast block"),
    ("float32 matmul precision", "in_full_precision", 'torch.set_float32_matmul_precision("highest")'),
    ("deterministic algorithms", "repeatable", "with rope_pad_fix.deterministic(): ..."),
    ("rotary embeddings by length", "separate", _LONE),
    ("sliding window", "dense", "pad on the left without holes, or {apply}"),
    ("ids or embeddings", "embedded", "either will do"),
    ("rope_pad_fix", "patched", "{apply}"),
)


@contextmanager
def _rope_kept(model: nn.Module) -> Iterator[None]:
    """Rotary embeddings that are set by length keep their state between calls; afterwards it is as before."""
    modules = [module for module in model.modules() if any("inv_freq" in name for name in module._buffers)]
    kept = [(module, dict(vars(module)), dict(module._buffers), copy.deepcopy(module._buffers)) for module in modules]
    try:
        yield
    finally:
        for module, attributes, buffers, values in kept:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
            for name, value in values.items():
                if value is not None:
                    module.get_buffer(name).copy_(value)


def _hidden(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, tuple[str, Tensor]]:
    """Class and output of every module in one forward, in the order in which they finish, without rotary angles."""
    found: dict[str, tuple[str, Tensor]] = {}

    def record(name: str, module: nn.Module, _: Any, output: Any) -> None:
        angles = (
            isinstance(output, tuple) and len(output) == 2 and any("inv_freq" in n for n, _ in module.named_buffers())
        )
        tensor = output[0] if isinstance(output, (tuple, list)) and output else output
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dim() > 1 and not angles:
            found.setdefault(name, (type(module).__name__, tensor.clone()))

    modules = ((name, module) for name, module in model.named_modules() if name)
    handles = [module.register_forward_hook(functools.partial(record, name)) for name, module in modules]
    try:
        with _rope_kept(model):
            model(**inputs, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _largest(a: Tensor, b: Tensor) -> float:
    """The largest absolute difference; `_NO_NUMBER` where only one is a number, 0 where neither is."""
    off = (a.float() - b.float()).abs().masked_fill((a == b) | (a.isnan() & b.isnan()), 0)
    return off.nan_to_num(nan=_NO_NUMBER, posinf=_NO_NUMBER).max().item() if off.numel() else 0.0


def _precision() -> str:
    """torch's float32 precision in one word; "lowered" where only the newer interface can tell."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "lowered"


def _copied(model: Any, dtype: torch.dtype) -> Any:
    """A copy in another data type. Not by its own ``to``: Accelerate puts one on models, which copies keep, and which
    would change the model that was copied."""
    copied = copy.deepcopy(model)
    return type(copied).to(copied, dtype)


def _window(config: Any) -> int | None:
    text = config.get_text_config()
    sizes = (getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size"))
    used = getattr(text, "use_sliding_window", True)
    return next((int(size) for size in sizes if size and used), None)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _number(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print the factors, the first module that differs, and in the last two lines the verdict and the shortest fix."""
    exact = "cannot be run" if diagnosis.exact_drift is None else _number(diagnosis.exact_drift)
    table = Table(
        title=f"Largest |Δ logit| in the batch: {_number(diagnosis.drift)}, of {diagnosis.largest_logit:.1f} "
        f"({diagnosis.dtype}; in float32: {exact})",
        caption="remains: the largest |Δ logit| with this one thing changed; carries: the share that goes away",
    )
    for name in ("factor", "now", "remains", "carries", "remedy"):
        table.add_column(name, justify="right" if name in ("remains", "carries") else "left")
    for factor in diagnosis.factors:
        strong = factor.carries is not None and factor.carries > 0.9
        remains = "n/a" if factor.drift is None else _number(factor.drift)
        carries = "" if factor.carries is None else "worse" if factor.carries < -0.1 else f"{factor.carries:.0%}"
        cells = factor.name, factor.note, remains, carries, factor.remedy if strong else ""
        table.add_row(*map(escape, cells), style="bold" if strong else "")
    console.print(table)
    if (first := diagnosis.first) is not None:
        place = f"{first.module} ({first.kind}), row {first.row}, by {first.largest:.1e}"
        console.print(f"First module whose output differs: {place}", markup=False)
    elif diagnosis.drift:
        console.print("Every module gives the same in the prompt's forward: rows part while decoding.")
    console.print(f"Verdict: {diagnosis.verdict}. {diagnosis.cause}", style="bold", markup=False)
    console.print(f"Shortest fix: {diagnosis.fix}", markup=False)
