"""Each metric against published rules or values worked out by hand, and the bootstrap."""

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, f1_score

from rope_pad_fix.drift import InputError
from rope_pad_fix.drift.metrics import TASKS, drift_interval, fields, task


def scores(name, predictions, references):
    scoring = task(name)
    right = [[one] if isinstance(one, str) else one for one in references]
    return scoring.scores(scoring.tally(predictions, right))


@pytest.mark.parametrize(
    ("prediction", "references", "f1", "exact"),
    [
        ("Paris", ["Paris"], 1, 1),
        ("the  Paris!", ["paris"], 1, 1),  # articles, punctuation, case, spaces
        ("in Paris, France", ["Paris"], 2 * 1 / (3 + 1), 0),
        ("Denver Broncos won", ["Carolina", "The Denver Broncos"], 2 * 2 / (3 + 2), 0),  # the best reference
        ("to be or not to be", ["to be"], 2 * 2 / (6 + 2), 0),  # a word counts as often as it is there
        ("", ["Paris"], 0, 0),
        ("", [""], 1, 1),
        ("the", [""], 1, 1),  # nothing is left of it
        ("Köln", ["köln"], 1, 1),
        ("rock'n'roll", ["rocknroll"], 1, 1),
        ("answer", ["a nswer"], 0, 0),  # "a" goes as a word, not as a letter
    ],
)
def test_squad(prediction, references, f1, exact):
    assert scores("squad", [prediction], [references]) == pytest.approx({"f1": f1, "exact_match": exact})


def test_means_are_over_rows():
    found = scores("squad", ["Paris", "Rome or Paris"], ["Paris", "Rome"])
    assert found == pytest.approx({"f1": (1 + 0.5) / 2, "exact_match": 0.5})


@pytest.mark.parametrize(
    ("prediction", "reference", "f1", "exact"),
    [
        ("北京", "北京", 1, 1),
        ("北京市。", "北京市", 1, 1),
        ("在北京市", "北京", 2 * 2 / (4 + 2), 0),
        ("北大京", "北京", 2 * 1 / (3 + 2), 0),  # the longest run, not all that is common
        ("1949年10月", "1949年", 2 * 2 / (4 + 2), 0),  # numbers are one unit
        ("NBA球队", "nba", 2 * 1 / (3 + 1), 0),
        ("。", "北京", 0, 0),
        ("", "北京", 0, 0),
        ("", "", 1, 1),
        ("《红楼梦》、曹雪芹", "红楼梦曹雪芹", 1, 1),
        ("北京,上海.", "北京、上海", 1, 1),  # ASCII punctuation
        ("COVID-19疫情", "covid19疫情", 1, 1),  # what is around punctuation stays one unit
        ("3.14", "3.14。", 1, 1),
        ("3.14", "314", 0, 0),
        ("50%", "50", 2 * 1 / (2 + 1), 0),
        ("$5", "5", 2 * 1 / (2 + 1), 0),
        ("Tom Hanks", "tomhanks", 0, 0),
        ("𠮷野家", "吉野家", 2 * 2 / (3 + 3), 0),  # beyond the basic plane
    ],
)
def test_cmrc(prediction, reference, f1, exact):
    assert scores("cmrc", [prediction], [reference]) == pytest.approx({"f1": f1, "exact_match": exact})


def test_fields():
    right = ["street: Main St\ncity: Bonn", "city: Ulm\nzip: 89073"]
    answers = ["Street:  main st\nCity: Berlin", '{"city": "Ulm"}']
    # Found and right 2, answered 3, right 4; street 1 of 1/1, city 1 of 2/2, zip 0 of 0/1.
    expected = {"micro_f1": 2 * 2 / (3 + 4), "macro_f1": (1 + 2 * 1 / (2 + 2) + 0) / 3}
    assert scores("fields", answers, right) == pytest.approx(expected)


def test_an_empty_line_ends_the_fields():
    assert fields("\n\na: x\nb: y\n\nb: z\na: x") == {("a", "x"): 1, ("b", "y"): 1}


def test_fields_that_come_again_or_cannot_be_read():
    assert fields('```json\n{"city": ["Bonn", "Bonn", 3]}\n```') == {("city", "bonn"): 2, ("city", "3"): 1}
    assert fields("no fields here") == fields('{"city": "Bonn"') == fields("") == {}
    assert scores("fields", ["a: x"], ["a: x\na: x"])["micro_f1"] == pytest.approx(2 * 1 / (1 + 2))
    assert scores("fields", ["a: x\na: x"], ["a: x"])["micro_f1"] == pytest.approx(2 * 1 / (2 + 1))
    # A label that no reference has costs precision, and has no mean of its own.
    assert scores("fields", ["a: x\nb: y"], ["a: x"]) == pytest.approx({"micro_f1": 2 / 3, "macro_f1": 1})
    assert scores("fields", ["rubbish"], ['{"a": "x"}']) == {"micro_f1": 0, "macro_f1": 0}
    # A data set fills up objects with nulls; they are no fields, nor are empty texts.
    assert fields('{"a": null, "b": "", "c": [null, "x"], "d": 0}') == {("c", "x"): 1, ("d", "0"): 1}
    assert fields("a: \n: b\nZeit: 12:30\r\nOrt: K\u2028ÖLN") == {("zeit", "12:30"): 1, ("ort", "k öln"): 1}
    assert fields('{"a": {"y": 1, "x": true}}') == fields('{"a": {"x": true, "y": 1}}')
    assert scores("fields", [""], [""]) == {"micro_f1": 1, "macro_f1": 1}


@pytest.mark.parametrize("name", ["classification", "choices"])
def test_classification_is_scikit_learns(name):
    generator = np.random.default_rng(0)
    right = generator.choice(["Sport", "politics", "art"], 60).tolist()
    mine = generator.choice(["sport", "Politics ", "art", "neither"], 60).tolist()
    plain = [label.strip().lower() for label in mine]
    labels = ["art", "politics", "sport"]
    truth = [label.lower() for label in right]
    expected = f1_score(truth, plain, labels=labels, average="macro", zero_division=0)
    assert scores(name, [f"{label}\nmore" for label in mine], right) == pytest.approx(
        {"macro_f1": expected, "accuracy": accuracy_score(truth, plain)}
    )
    assert task(name).by_likelihood == (name == "choices")


@pytest.mark.parametrize("seed", range(5))
def test_classification_of_drawn_rows_is_scikit_learns(seed):
    """Labels that only the whole data has do not count in a selection."""
    generator = np.random.default_rng(seed)
    names = np.array(["a", "b", "c", "d", "e"])
    right, mine = generator.choice(names[:4], 12), generator.choice(names, 12)
    scoring = task("classification")
    tallies = scoring.tally(mine.tolist(), [[label] for label in right])
    rows = generator.integers(0, 12, 6)
    labels = sorted(set(right[rows]))
    expected = f1_score(right[rows], mine[rows], labels=labels, average="macro", zero_division=0)
    assert scoring.scores(tallies[rows])["macro_f1"] == pytest.approx(expected)


def test_text_has_no_scores():
    assert scores("text", ["x", "y"], [[], []]) == {}
    assert task("text").metrics == ()


def test_unknown_task():
    with pytest.raises(InputError, match="unknown task 'bleu': choose one of squad, "):
        task("bleu")


@pytest.mark.parametrize("name", [name for name in TASKS if name != "text"])
def test_any_selection_of_rows_can_be_scored(name):
    scoring = task(name)
    tallies = scoring.tally(["a: x", "b: y", "a: z"], [["a: x"], ["b: x"], ["a: z"]])
    for rows in ([0], [1, 1], [2, 0, 2]):
        assert set(scoring.scores(tallies[rows])) == set(scoring.metrics)


def test_interval():
    scoring = task("squad")
    right = [["x"]] * 50
    single = scoring.tally(["x"] * 50, right)
    batched = scoring.tally(["y"] * 10 + ["x"] * 40, right)
    low, high = drift_interval(scoring, single, batched, seed=3)
    assert (low, high) == drift_interval(scoring, single, batched, seed=3)
    assert low < -0.2 < high < 0  # the drift is -0.2, its standard error 0.057
    assert high - low == pytest.approx(4 * 0.0566, rel=0.15)
    assert drift_interval(scoring, batched, single, seed=3) == pytest.approx((-high, -low))


def test_an_interval_is_paired():
    """Rows far from each other in score, none of which changes but one."""
    scoring = task("squad")
    right = [["x"]] * 40
    answers = ["x", "y"] * 20
    low, high = drift_interval(scoring, scoring.tally(answers, right), scoring.tally(["y", *answers[1:]], right))
    assert low >= -0.1
    assert high == 0


def test_intervals_without_a_difference_or_of_one_row():
    scoring = task("squad")
    one, other = scoring.tally(["x"], [["x"]]), scoring.tally(["y"], [["x"]])
    assert drift_interval(scoring, one, one) == (0, 0)
    assert drift_interval(scoring, one, other) == (-1, -1)
    none = task("text").tally(["x", "y"], [[], []])
    assert none.shape == (2, 0)
    assert drift_interval(task("text"), none, none) == (0, 0)
    two = drift_interval(scoring, np.repeat(one, 2, 0), np.repeat(other, 2, 0))
    assert two == (-1, -1)  # every draw is the same


def test_the_table_of_tasks_is_read_only():
    with pytest.raises(TypeError):
        TASKS["mine"] = TASKS["squad"]  # type: ignore[index]
