"""`measure` and ``rope-pad-fix drift`` on a tiny model: cells, resuming, several processes, errors."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import rope_pad_fix
from rope_pad_fix import cli
from rope_pad_fix.drift import InputError, Report, measure
from rope_pad_fix.drift.batching import batches, padded
from rope_pad_fix.drift.running import Runner

from .conftest import tiny

LETTERS = "abcdefghijklmnopqrstuvwxyz .:,?0123456789"
ROWS = [
    {"prompt": text, "completion": right, "options": [right, "b", "cc"]}
    for text, right in [
        ("a", "x y"),
        ("where is the cat?", "x"),
        ("the longest of all these prompts, by far.", "y"),
        ("one two three", "a: 1"),
        ("four", "z"),
    ]
]
OPTIONS = {"batch_sizes": (3,), "max_new_tokens": 6}


def character_tokenizer():
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {letter: i + 3 for i, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer()


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tokenizer):
    """A directory with a model, and a file with rows."""
    directory = tmp_path_factory.mktemp("saved")
    tiny(vocab_size=64).save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    (directory / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return directory


def without_times(report):
    times = {"tokens_per_second", "single_tokens_per_second", "peak_memory"}
    cells = [{k: v for k, v in cell.items() if k not in times} for cell in dataclasses.asdict(report)["cells"]]
    return json.loads(json.dumps(cells))


def test_cells(saved, tokenizer):
    report = measure(
        saved / "model",
        ROWS,
        task="squad",
        dtypes=("float32", "bfloat16"),
        levels=("stock", "positions", "padding_free", "batch_invariant"),
        paths=("ids", "embeds"),
        **OPTIONS,
    )
    assert len(report.cells) == 2 * 4 * 2 * 2
    by_level = {}
    for cell in report.cells:
        by_level.setdefault(cell.setting.level, []).append(cell)
        assert cell.n == 5
        assert cell.drift == pytest.approx(cell.batched["f1"] - cell.single["f1"])
        assert len(cell.padding) == len(cell.largest_logit) == 5
        lengths = [len(row["prompt"]) for row in ROWS]
        slots = 3 * max(lengths[:3]) + 2 * max(lengths[3:])
        assert cell.padding_fraction == pytest.approx(1 - sum(lengths) / slots)
        assert cell.padding == [max(lengths[:3]) - n for n in lengths[:3]] + [max(lengths[3:]) - n for n in lengths[3:]]
        assert cell.peak_memory > 1e6
        assert cell.tokens_per_second > 0
        assert len(cell.examples) == cell.rows_changed == len(cell.first_tokens)
    for cell in by_level["batch_invariant"]:
        assert cell.rows_changed == 0
        assert cell.drift == 0
        assert cell.drift_interval == (0, 0)
        assert max(cell.largest_logit) == 0
    for cell in by_level["stock"]:
        assert max(cell.largest_logit) > 0
        if cell.setting.padding == "right":
            assert cell.rows_changed > 0
            assert max(cell.largest_logit) > 1  # with holes behind the prompts
            assert cell.median_first_token <= 1
            assert cell.examples[0].single != cell.examples[0].batched
    stock, positions = (
        [max(c.largest_logit) for c in by_level[level] if c.setting.dtype == "float32"]
        for level in ("stock", "positions")
    )
    assert max(positions) < 1e-3 < max(stock)
    assert Report.from_json(report.to_json()) == report


def test_orders(saved):
    def cell(**options):
        found = measure(saved / "model", ROWS, levels=["stock"], paddings=["left"], **OPTIONS | options)
        return found.cells[0]

    assert cell(order="equal").padding_fraction == 0
    assert cell(order="sorted").padding_fraction < cell(order="given").padding_fraction
    assert cell(pad_to=64).padding_fraction > 0.7
    assert cell(order="shuffled", seed=1).padding != cell(order="shuffled", seed=2).padding
    with pytest.raises(InputError, match="pad_to is 8, but a row has 41 tokens"):
        cell(pad_to=8)


def test_batches():
    assert batches([1, 2, 1, 2, 1], 2, "equal") == [[0, 2], [4], [1, 3]]
    assert sorted(row for members in batches(range(9), 4, "shuffled", seed=5) for row in members) == list(range(9))
    assert batches([5, 6], 1, "shuffled", 5) == batches([5, 6], 1, "shuffled", 5)
    ids, mask = padded([[7], [8, 9]], "left", 0, 4)
    assert ids.tolist() == [[0, 0, 0, 7], [0, 0, 8, 9]]
    assert mask.tolist() == [[0, 0, 0, 1], [0, 0, 1, 1]]


def test_choices_are_taken_by_log_likelihood(saved, tokenizer):
    report = measure(saved / "model", ROWS, task="choices", choices="options", levels=["stock", "batch_invariant"])
    model = tiny(vocab_size=64)
    right = 0
    for row in ROWS:
        likelihoods = []
        for choice in row["options"]:
            prompt, ids = (tokenizer(text, add_special_tokens=False).input_ids for text in (row["prompt"], choice))
            with torch.no_grad():
                logits = model(torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
            places = range(len(prompt) - 1, len(prompt) + len(ids) - 1)
            likelihoods.append(sum(logits[at, token].item() for at, token in zip(places, ids, strict=True)))
        right += max(range(3), key=likelihoods.__getitem__) == 0
    for cell in report.cells:
        assert cell.single["accuracy"] == pytest.approx(right / 5)
        assert cell.continuation is not None
        assert cell.first_tokens == []
    assert report.max_new_tokens == 0
    assert all(max(cell.largest_logit) == 0 for cell in report.cells if cell.setting.level == "batch_invariant")


def test_text_needs_no_references(saved):
    report = measure(saved / "model", [{"prompt": row["prompt"]} for row in ROWS], **OPTIONS)
    assert report.metrics == []
    for cell in report.cells:
        assert (cell.drift, cell.drift_interval, cell.single, cell.batched) == (None, None, {}, {})
        assert cell.continuation is not None, "along the lone answer"
    assert any(cell.rows_changed for cell in report.cells)


@pytest.mark.parametrize("level", [None, "padding_free"])
def test_a_model_object_is_left_as_it_was(tokenizer, level):
    model = tiny(vocab_size=64).train()
    if level is not None:
        rope_pad_fix.apply(model, level)
    status = rope_pad_fix.status(model)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    report = measure(model, ROWS, tokenizer, attentions=["eager"], dtypes=["float32", "bfloat16"], **OPTIONS)
    assert rope_pad_fix.status(model) == status
    assert model.training
    assert model.dtype == torch.float32
    assert model.config._attn_implementation_internal == "sdpa"
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert {cell.setting.attention for cell in report.cells} == {"eager"}


def test_an_interrupted_run_goes_on(saved, tmp_path, monkeypatch):
    def run(progress=None):
        return measure(saved / "model", ROWS, task="squad", output=tmp_path / "out", progress=progress, **OPTIONS)

    def interrupt(what, done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(interrupt)
    ran = []
    compare = Runner.compare
    monkeypatch.setattr(Runner, "compare", lambda self, items, *args: ran.append(1) or compare(self, items, *args))
    went_on = run()
    assert len(ran) == 3 * 2, "of four cells one was finished"
    ran.clear()
    again = run()
    assert not ran
    assert again == went_on
    monkeypatch.undo()
    assert without_times(went_on) == without_times(measure(saved / "model", ROWS, task="squad", **OPTIONS))


def test_output_directories(saved, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="holds other files"):
        measure(saved / "model", ROWS, output=tmp_path, **OPTIONS)
    ours = tmp_path / "ours"
    measure(saved / "model", ROWS, levels=["stock"], output=ours, **OPTIONS)
    with pytest.raises(InputError, match=r"another data"):
        measure(saved / "model", ROWS[:3], output=ours, **OPTIONS)
    with pytest.raises(InputError, match=r"another max_new_tokens \(6, now 5\)"):
        measure(saved / "model", ROWS, output=ours, **OPTIONS | {"max_new_tokens": 5})
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be used for the output"):
        measure(saved / "model", ROWS, output=tmp_path / "file", **OPTIONS)
    # More cells of the same measurement are welcome.
    assert len(measure(saved / "model", ROWS, output=ours, **OPTIONS).cells) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levels": ["best"]}, "levels: 'best' is not one of stock, positions"),
        ({"levels": []}, "levels is empty"),
        ({"paddings": ["up"]}, "paddings: 'up'"),
        ({"paths": ["text"]}, "paths: 'text'"),
        ({"dtypes": ["int8"]}, "dtypes: 'int8'"),
        ({"order": "random"}, "order: 'random'"),
        ({"batch_sizes": [0]}, "batch_sizes must be at least 1, got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"task": "bleu"}, "unknown task 'bleu'"),
        ({"task": "choices"}, "needs the column of the choices"),
        ({"task": "squad", "reference": None}, "needs references"),
        ({"attentions": ["none such"]}, "none such"),
    ],
)
def test_bad_arguments(saved, options, message):
    with pytest.raises(InputError) as error:
        measure(saved / "model", ROWS, **options)
    assert message in str(error.value)


def test_models_that_cannot_be_loaded(tmp_path, tokenizer):
    with pytest.raises(InputError, match="cannot be loaded"):
        measure(tmp_path, ROWS)
    with pytest.raises(InputError, match="needs its tokenizer"):
        measure(tiny(), ROWS)
    bare = character_tokenizer()
    bare.pad_token = bare.eos_token = None
    with pytest.raises(InputError, match="set pad_token"):
        measure(tiny(), ROWS, bare)


def test_drift_and_its_libraries_are_imported_when_asked_for():
    program = (
        "import sys, rope_pad_fix\n"
        "assert 'sklearn' not in sys.modules\n"
        "rope_pad_fix.drift.measure\n"
        "assert 'sklearn' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert rope_pad_fix.drift.measure is measure


# --- the command ---------------------------------------------------------------------------------------------------


def command(*arguments):
    return CliRunner().invoke(cli.build(), [*map(str, arguments)])


def drift(saved, *arguments):
    return command("drift", saved / "model", saved / "rows.jsonl", "--batch-size", 3, "--max-new-tokens", 6, *arguments)


def test_the_command_writes_a_report(saved, tmp_path):
    result = drift(saved, "--task", "squad", "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "batch_invariant" in result.output
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"report.json", "report.md", "report.html", "scores.png", "logits.png", "first_token.png"}
    assert len(Report.from_json((tmp_path / "out" / "report.json").read_text()).cells) == 4
    compared = command("drift", "--compare", tmp_path / "out", tmp_path / "out" / "report.json")
    assert compared.exit_code == 0, compared.output
    assert "1.00x" in compared.output


def test_the_command_fails_over_a_limit(saved):
    rows = ("--task", "squad", "--padding", "right", "--fail-over")
    assert drift(saved, *rows, 0.0, "--level", "batch_invariant").exit_code == 0
    # The model's answers are gibberish, so what is right for it is what it says.
    report = measure(saved / "model", ROWS, **OPTIONS)
    answers = {row.row: row.single for cell in report.cells for row in cell.examples}
    told = [{"prompt": ROWS[row]["prompt"], "completion": text} for row, text in answers.items()]
    (saved / "told.jsonl").write_text("\n".join(map(json.dumps, told)))
    arguments = ("drift", saved / "model", saved / "told.jsonl", "--batch-size", 3, "--max-new-tokens", 6, *rows, 0.01)
    failed = command(*arguments, "--level", "stock")
    assert failed.exit_code == 1, failed.output
    assert "more than 0.01" in failed.output
    assert command(*arguments, "--level", "batch_invariant").exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("--task", "bleu"),
        ("--task", "squad", "--reference", "answer"),
        ("--prompt", "question"),
        ("--level", "best"),
        ("--limit", "0"),
        ("--compare", "no", "such"),
        ("--output", __file__),
    ],
)
def test_unusable_input_is_one_line_and_status_2(saved, arguments):
    result = drift(saved, *arguments)
    assert result.exit_code == 2, result.output
    if result.stderr.startswith("rope-pad-fix: "):  # else typer's own box
        assert result.stderr.count("\n") == 1


def test_the_command_needs_a_model_and_data():
    assert command("drift").exit_code == 2
    assert command("drift", "no/such/model", "no.jsonl").exit_code == 2


def test_diagnose_command(saved):
    result = command("diagnose", saved / "model", "one", "another, longer", "--padding-side", "right", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["verdict"] == "positions"
    shown = command("diagnose", saved / "model", "--data", saved / "rows.jsonl", "--limit", 3)
    assert shown.exit_code == 0, shown.output
    assert "Verdict: rounding" in shown.output
    assert command("diagnose", saved / "model").exit_code == 2
    assert command("diagnose", saved / "model", "a", "--padding-side", "up").exit_code == 2


def test_two_processes_give_the_report_of_one(saved, tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    arguments = [str(saved / "model"), str(saved / "rows.jsonl"), "--task", "squad", "--batch-size", "2"]
    arguments += ["--max-new-tokens", "6", "--output"]
    program = ["-m", "rope_pad_fix.cli", "drift", *arguments]
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    for name, command_line in {"one": program, "two": [*launch, *program]}.items():
        done = subprocess.run(
            [sys.executable, *command_line, str(tmp_path / name)], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
    one, two = (Report.from_json((tmp_path / name / "report.json").read_text()) for name in ("one", "two"))
    assert (one.environment["processes"], two.environment["processes"]) == ("1", "2")
    assert without_times(one) == without_times(two)
