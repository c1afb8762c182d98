"""How answers are scored: one class for each task, and the interval of a difference of scores.

A task tallies each row, and makes scores of any selection of rows; so rows can be drawn again for a bootstrap.
"""

from __future__ import annotations

import json
import re
import string
import unicodedata
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from scipy.stats import bootstrap
from sklearn.metrics import f1_score

from ..errors import InputError

Tallies = NDArray[np.float64]
_CHINESE = r"[⺀-鿿豈-﫿\U00020000-\U0003ffff]"
_UNIT = re.compile(rf"{_CHINESE}|(?:(?!{_CHINESE})[\w.])+|\S")
_NO_PUNCTUATION = ".%\uff05\u2030"  # points in numbers, percent, its wide form, per mille
_PUNCTUATION = "^~\uff5e`+="  # symbols to Unicode; CMRC drops them (the third is the wide tilde)


class Task(ABC):
    """How predictions are scored.

    Attributes:
        name: of the task.
        metrics: names of the scores; the first is the one that drift is measured in. None without references.
        by_likelihood: whether a prediction is the likeliest of given choices, and not generated.
    """

    name: str
    metrics: tuple[str, ...] = ()
    by_likelihood = False

    @abstractmethod
    def tally(self, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> Tallies:
        """What each row contributes, ``[n, columns]``."""

    @abstractmethod
    def scores(self, tallies: Tallies) -> dict[str, float]:
        """The metrics, 0 to 1, of some rows of a tally; a row may be there more than once."""


class _Mean(Task):
    """Scores that are means over rows of the best value for any of a row's references."""

    metrics = ("f1", "exact_match")

    @abstractmethod
    def units(self, text: str) -> list[str]:
        """What is compared of an answer."""

    @abstractmethod
    def common(self, mine: list[str], theirs: list[str]) -> int:
        """How many units two answers share."""

    def score(self, prediction: str, reference: str) -> tuple[float, float]:
        """F1 and exact match for one reference."""
        mine, theirs = self.units(prediction), self.units(reference)
        same = float(mine == theirs)
        if not mine or not theirs:
            return same, same
        return 2 * self.common(mine, theirs) / (len(mine) + len(theirs)), same

    def tally(self, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> Tallies:
        rows = [
            np.max([self.score(prediction, reference) for reference in right], axis=0)
            for prediction, right in zip(predictions, references, strict=True)
        ]
        return np.array(rows, dtype=np.float64)

    def scores(self, tallies: Tallies) -> dict[str, float]:
        return dict(zip(self.metrics, map(float, tallies.mean(0)), strict=True))


class Squad(_Mean):
    """Token F1 and exact match as SQuAD 1.1 scores them (Rajpurkar et al. 2016); two empty answers agree, as in 2.0."""

    name = "squad"

    def units(self, text: str) -> list[str]:
        """Words in lower case, without punctuation (ASCII) and English articles."""
        text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
        return re.sub(r"\b(a|an|the)\b", " ", text).split()

    def common(self, mine: list[str], theirs: list[str]) -> int:
        return sum((Counter(mine) & Counter(theirs)).values())


class Cmrc(_Mean):
    """F1 of the longest common run and exact match as CMRC 2018 scores them (Cui et al. 2019): every Chinese character
    is a unit, so is every word or number; punctuation does not count. Here ASCII punctuation does not count either, nor
    do spaces between Chinese characters, and two empty answers agree."""

    name = "cmrc"

    def units(self, text: str) -> list[str]:
        """Punctuation is taken out, not put between: ``covid-19`` is one. Points in numbers and percent signs stay."""
        text = re.sub(r"(?<!\d)\.|\.(?!\d)", "", text.lower())
        return _UNIT.findall("".join(letter for letter in text if not _is_punctuation(letter)))

    def common(self, mine: list[str], theirs: list[str]) -> int:
        return SequenceMatcher(None, mine, theirs, autojunk=False).find_longest_match().size


def _is_punctuation(letter: str) -> bool:
    return letter in _PUNCTUATION or (unicodedata.category(letter)[0] == "P" and letter not in _NO_PUNCTUATION)


class Fields(Task):
    """Extraction of labelled values: micro and macro F1 of exact matches.

    An answer is a JSON object, or lines ``label: value`` up to an empty line, behind which a model of plain text goes
    on to other things. A value that is a list, or a label that comes again, makes several fields; null and an empty
    value are no field. Labels and values are compared without regard to case and to
    spaces; an answer that cannot be read has no fields. Macro F1 is the mean over the labels of the references. Only
    the first reference counts.
    """

    name = "fields"
    metrics = ("micro_f1", "macro_f1")

    def tally(self, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> Tallies:
        rows = [(fields(p), fields(right[0])) for p, right in zip(predictions, references, strict=True)]
        labels = sorted({label for _, right in rows for label, _ in right})
        return np.array([_counts(mine, right, labels) for mine, right in rows], dtype=np.float64)

    def scores(self, tallies: Tallies) -> dict[str, float]:
        hits, predicted, right = tallies.sum(0).reshape(-1, 3).T  # the last entry: labels that no reference has
        micro = _ratio(2 * hits.sum(), predicted.sum() + right.sum())
        each = [_ratio(2 * h, p + r) for h, p, r in zip(hits[:-1], predicted[:-1], right[:-1], strict=True) if r]
        return {"micro_f1": micro, "macro_f1": float(np.mean(each)) if each else micro}


def fields(text: str) -> Counter[tuple[str, str]]:
    """The labelled values of an answer, and how often each is there.

    Example:
        >>> sorted(fields("City: Bonn\\nZip: 53111")), fields('{"city": ["Bonn", "Bonn"]}')[("city", "bonn")]
        ([('city', 'bonn'), ('zip', '53111')], 2)
    """
    start, end = text.find("{"), text.rfind("}")
    if start >= 0 and text[:start].strip() in ("", "```", "```json"):
        try:
            found = json.loads(text[start : end + 1])
        except ValueError:
            return Counter()
        listed = ((label, value if isinstance(value, list) else [value]) for label, value in found.items())
        pairs = [(_plain(label), _plain(_written(one))) for label, values in listed for one in values]
    else:
        lines = (line.partition(":") for line in text.strip().partition("\n\n")[0].split("\n"))
        pairs = [(_plain(label), _plain(value)) for label, _, value in lines]
    return Counter((label, value) for label, value in pairs if label and value)


def _written(value: object) -> str:
    """A JSON value as text; null is none."""
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _counts(mine: Counter[tuple[str, str]], right: Counter[tuple[str, str]], labels: list[str]) -> list[float]:
    """For each label, and for all others together: fields that agree, that were predicted, that are right."""
    row: list[float] = []
    known = set(labels)
    for group in (*labels, None):
        for counter in (mine & right, mine, right):
            row.append(sum(n for (label, _), n in counter.items() if (label if label in known else None) == group))
    return row


def _ratio(part: float, whole: float) -> float:
    """1 where nothing was asked and nothing answered."""
    return float(part / whole) if whole else 1.0


class Classification(Task):
    """One label a row, the first line of the answer: macro F1 over the labels of the references (scikit-learn's), and
    accuracy. Case and spaces around a label do not count. Only the first reference counts."""

    name = "classification"
    metrics = ("macro_f1", "accuracy")

    def tally(self, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> Tallies:
        right = [_label(one[0]) for one in references]
        labels = sorted(set(right))
        number = {label: i for i, label in enumerate(labels)}
        mine = [number.get(_label(prediction), len(labels)) for prediction in predictions]
        return np.column_stack([mine, [number[label] for label in right]]).astype(np.float64)

    def scores(self, tallies: Tallies) -> dict[str, float]:
        mine, right = tallies.astype(int).T
        labels = sorted(set(right.tolist()))
        macro = f1_score(right, mine, labels=labels, average="macro", zero_division=0)
        return {"macro_f1": float(macro), "accuracy": float((mine == right).mean())}


class Choices(Classification):
    """The same by log-likelihood: the prediction is the likeliest of a row's choices."""

    name = "choices"
    by_likelihood = True


def _label(text: str) -> str:
    return _plain(text.strip().split("\n")[0])


class Text(Task):
    """No references: only whether answers change."""

    name = "text"

    def tally(self, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> Tallies:
        return np.zeros((len(predictions), 0))

    def scores(self, tallies: Tallies) -> dict[str, float]:
        return {}


TASKS: Mapping[str, Callable[[], Task]] = MappingProxyType(
    {"squad": Squad, "cmrc": Cmrc, "fields": Fields, "classification": Classification, "choices": Choices, "text": Text}
)


def task(name: str) -> Task:
    """The task of that name.

    Raises:
        InputError: there is none.
    """
    if name not in TASKS:
        raise InputError(f"unknown task {name!r}: choose one of {', '.join(TASKS)}")
    return TASKS[name]()


def drift_interval(
    task: Task, single: Tallies, batched: Tallies, seed: int = 0, resamples: int = 1000
) -> tuple[float, float]:
    """The 95 % interval of the drift of a task's first metric, by a paired percentile bootstrap over rows (Efron &
    Tibshirani 1993): the same rows are drawn for both sides, so rows that agree contribute nothing.

    Args:
        task: whose tallies they are.
        single, batched: ``[n, columns]`` each.
        seed: of the draws.
        resamples: how many.

    Returns:
        ``(low, high)``; ``(0, 0)`` where both are equal, and the drift itself twice if there is one row.
    """

    def drift(rows: NDArray[np.int64]) -> float:
        return task.scores(batched[rows])[metric] - task.scores(single[rows])[metric]

    if np.array_equal(single, batched):
        return 0.0, 0.0
    metric, rows = task.metrics[0], np.arange(len(single))
    if len(rows) == 1:
        return drift(rows), drift(rows)
    found = bootstrap(
        (rows,), drift, n_resamples=resamples, vectorized=False, method="percentile", rng=np.random.default_rng(seed)
    )
    return float(found.confidence_interval.low), float(found.confidence_interval.high)
