"""train/finetune.py and train/evaluate.py: what is learnt, what is refused, and that padding, interruptions and the
number of processes leave no trace."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

import rope_pad_fix
from rope_pad_fix import PaddingScheme
from rope_pad_fix.padding import Collator
from train import evaluate, finetune

from .conftest import tiny, words_tokenizer

ROOT = Path(__file__).parent.parent
DATA = ROOT / "examples" / "data" / "arithmetic.jsonl"
ROWS = [
    {"prompt": "one plus one is", "completion": "two"},
    {"prompt": "what is two times two", "completion": "four"},
    {"prompt": "one plus two plus three plus one plus two is", "completion": "nine"},
    {"prompt": "ten minus one", "completion": "is nine"},
    {"prompt": "four plus one is", "completion": "five"},
    {
        "prompt": "how many is one plus one plus one plus one plus one plus one",
        "completion": "one two three four five six",
    },
    {"prompt": "seven", "completion": "eight nine ten"},
    {"prompt": "nine plus one is", "completion": "ten"},
]


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory):
    """A random Llama and a tokenizer of whole words, whose pad token is its end of sequence."""
    directory = tmp_path_factory.mktemp("model")
    words_tokenizer().save_pretrained(directory)
    tiny(pad_token_id=2).save_pretrained(directory)
    return directory


@pytest.fixture
def command(tmp_path, model_directory):
    """The command line of a run into a directory under tmp_path; later options win."""

    def command(name, *options, rows=ROWS):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
        fixed = ["--model", model_directory, "--train-file", file, "--output-dir", tmp_path / name]
        fixed += ["--per-device-train-batch-size", 4, "--max-steps", 6, "--learning-rate", "1e-2", "--lora-r", 4]
        fixed += ["--eval-share", 0, "--max-new-tokens", 4, "--disable-tqdm", "true"]
        return [*map(str, fixed), *map(str, options)]

    return command


@pytest.fixture
def start(tmp_path, command):
    """Run it here, and return the adapter's weights."""

    def start(name, *options, rows=ROWS):
        finetune.main(command(name, *options, rows=rows))
        return load_file(tmp_path / name / "adapter_model.safetensors")

    return start


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("level", ["batch_invariant", "padding_free", "none"])
def test_the_side_of_padding(start, level):
    """It leaves no trace in the adapter, which it does on the stock model."""
    options = ["--level", level, "--pad-to-multiple-of", 16]
    left, right = (start(side, "--padding-side", side, *options) for side in ("left", "right"))
    assert any(weight.abs().max() > 0 for name, weight in left.items() if "lora_B" in name)
    assert equal(left, right) == (level != "none")


def test_again_with_the_same_seed(start):
    first, again, other = start("first"), start("again"), start("other", "--seed", 7)
    assert equal(first, again)
    assert not equal(first, other)


@pytest.mark.parametrize(
    "options",
    [
        ("--use-dora", "true"),
        ("--use-rslora", "true", "--target-modules", "q_proj", "v_proj"),
        ("--lora-dropout", "0.1", "--gradient-checkpointing", "true", "--gradient-accumulation-steps", "2"),
        ("--bf16", "true"),
        ("--dtype", "bfloat16"),
        ("--train-sampling-strategy", "group_by_length"),
    ],
    ids=" ".join,
)
def test_options_leave_the_sides_equal(start, options):
    left, right = (start(side, "--padding-side", side, *options) for side in ("left", "right"))
    assert equal(left, right)
    assert not equal(left, start("plain"))


def test_all_weights(command, tmp_path):
    weights = []
    for side in ("left", "right"):
        finetune.main(command(side, "--full", "true", "--padding-side", side, "--learning-rate", "1e-3"))
        weights.append(load_file(tmp_path / side / "model.safetensors"))
        assert PaddingScheme.load(tmp_path / side).side == side
    assert equal(*weights)
    assert "AutoModelForCausalLM.from_pretrained('left')" in (tmp_path / "left" / "README.md").read_text()


def test_resuming(start, tmp_path, monkeypatch):
    """A run that dies after step 4 of 6 and leaves a half-written checkpoint behind ends as one that did not."""
    options = ["--save-steps", 2, "--lora-dropout", 0.1]
    whole = start("whole", *options)
    collate = Collator.__call__
    collated = []

    def dying(self, rows):
        collated.append(rows)
        if len(collated) == 6:
            raise KeyboardInterrupt
        return collate(self, rows)

    monkeypatch.setattr(Collator, "__call__", dying)
    with pytest.raises(KeyboardInterrupt):
        start("resumed", *options)
    checkpoint = tmp_path / "resumed" / "checkpoint-4"
    for name, state in (("checkpoint-5", None), ("checkpoint-6", '{"half": ')):
        half = checkpoint.with_name(name)
        shutil.copytree(checkpoint, half, ignore=lambda *_: ["trainer_state.json"])
        if state is not None:
            (half / "trainer_state.json").write_text(state)
    assert not equal(load_file(checkpoint / "adapter_model.safetensors"), whole)

    collated.clear()
    monkeypatch.setattr(Collator, "__call__", lambda self, rows: collated.append(rows) or collate(self, rows))
    assert equal(start("resumed", *options, "--resume", "true"), whole)
    assert len(collated) == 2, "it began anew"


def test_killed_and_resumed(command, start, tmp_path):
    """SIGKILL in the middle of a run in a process of its own; what it goes on to is what an undisturbed run gives."""
    options = ["--save-steps", 1, "--max-steps", 40, "--lora-dropout", 0.1]
    run = [sys.executable, "train/finetune.py", *command("killed", *options)]
    process = subprocess.Popen(run, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "killed").glob("checkpoint-*/trainer_state.json")):
        assert process.poll() is None, "it ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "adapter_model.safetensors").exists()
    subprocess.run([*run, "--resume"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    resumed = load_file(tmp_path / "killed" / "adapter_model.safetensors")
    assert equal(resumed, start("whole", *options))


def test_two_processes_train_the_same_adapter(command, start, tmp_path):
    """With the same global batch; gradients are summed in another order."""
    options = ["--task", "squad", "--eval-file", tmp_path / "rows.jsonl", "--drift-rows", 3]
    one = start("one", *options)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--main_process_port", "0"]
    launch += ["--multi_gpu", "train/finetune.py"]  # without GPUs that is two processes on the CPU, by gloo
    run = [*launch, *command("two", *options, "--per-device-train-batch-size", 2)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    outcome = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    two = load_file(tmp_path / "two" / "adapter_model.safetensors")
    assert one.keys() == two.keys()
    assert max((one[name] - two[name]).abs().max().item() for name in one) < 1e-5
    scores = [json.loads((tmp_path / name / "finetuning.json").read_text())["scores"] for name in ("one", "two")]
    assert scores[0]["f1"] == scores[1]["f1"]
    report = json.loads((tmp_path / "two" / "drift" / "report.json").read_text())
    assert report["environment"]["processes"] == "2"


def test_what_is_written_beside_the_adapter(start, tmp_path, model_directory, monkeypatch):
    start("adapter", "--task", "squad", "--eval-share", 0.5, "--padding-side", "left", "--drift-rows", 3)
    directory = tmp_path / "adapter"
    assert PaddingScheme.load(directory) == PaddingScheme("left", 2, "</s>", None, "longest", 512, "left")
    record = json.loads((directory / "finetuning.json").read_text())
    assert record["scores"].keys() == {"loss", "f1", "exact_match"}
    assert record["settings"]["lora_r"] == 4
    assert record["facts"]["rows"] == 4
    report = json.loads((directory / "drift" / "report.json").read_text())
    found = {(cell["setting"]["level"], cell["setting"]["padding"]): cell for cell in report["cells"]}
    assert found.keys() == {(level, side) for level in ("stock", "batch_invariant") for side in ("left", "right")}
    assert all(cell["n"] == 3 for cell in found.values())
    for side in ("left", "right"):
        cell = found["batch_invariant", side]
        assert (cell["drift"], cell["rows_changed"], cell["prompt"]["largest_logit"]) == (0, 0, 0)
    assert found["stock", "right"]["rows_changed"] > 0, "there was nothing to fix"
    assert any((directory / "runs").rglob("events.*")), "no TensorBoard log"

    card = (directory / "README.md").read_text()
    assert "| side | left |" in card
    code = card.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(code.replace('"…"', '"one plus one is"'), names)
    assert rope_pad_fix.status(names["model"]).level == "batch_invariant"


def test_scores_while_training(start, tmp_path):
    """Evaluation generates: its scores are logged, and with early stopping the best checkpoint is kept."""
    options = ["--task", "squad", "--eval-file", tmp_path / "rows.jsonl", "--drift-rows", 0, "--eval-steps", 2]
    kept = start("best", *options, "--early-stopping", 1, "--max-steps", 40, "--learning-rate", "1e-9")
    states = sorted((tmp_path / "best").glob("checkpoint-*/trainer_state.json"))
    history = json.loads(states[-1].read_text())["log_history"]
    assert [entry["step"] for entry in history if "eval_f1" in entry] == [2, 4], "nothing was learnt, and it went on"
    assert equal(kept, load_file(tmp_path / "best" / "checkpoint-2" / "adapter_model.safetensors"))


def test_evaluate_an_adapter(start, tmp_path, capsys):
    start("adapter")
    options = ["--adapter", tmp_path / "adapter", "--data", tmp_path / "rows.jsonl", "--task", "squad"]
    options += ["--max-new-tokens", 4, "--output", tmp_path / "evaluation"]
    assert evaluate.main(map(str, options)) == 0
    report = json.loads((tmp_path / "evaluation" / "report.json").read_text())
    assert report["model"].startswith("adapter on ")
    assert {cell["setting"]["level"] for cell in report["cells"]} == {"stock", "batch_invariant"}
    assert all(cell["rows_changed"] == 0 for cell in report["cells"] if cell["setting"]["level"] != "stock")
    for wrong, message in [
        (["--data", "rows.jsonl"], "give --adapter, --model, or both"),
        (["--data", "rows.jsonl", "--adapter", str(tmp_path)], "holds no adapter"),
    ]:
        with pytest.raises(SystemExit):
            evaluate.main(wrong)
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "one"', "line 10: not JSON: Expecting ',' delimiter at column 17"),
        ('["one", "two"]', "row 8: expected an object, got list"),
        ('{"prompt": "one"}', "row 8: no column 'completion', there are prompt"),
        ('{"question": "one"}', "row 8: no column 'prompt', 'messages' or 'text', there are question"),
        ('{"prompt": "one", "completion": 2}', "row 8: 'completion' must be a text that is not empty, got 2"),
        ('{"prompt": "", "completion": "two"}', "row 8: 'prompt' must be a text that is not empty, got ''"),
        ('{"prompt": " ", "completion": "two"}', "row 8: a prompt has no tokens: ' '"),
        ('{"messages": [{"role": "user"}]}', 'row 8: a chat must be a list of objects with "role" and "content"'),
    ],
)
def test_a_bad_row_is_skipped_and_said_or_refused(start, tmp_path, capsys, line, message):
    rows = [*ROWS, "\n", line]
    whole = start("whole")
    assert equal(start("skipping", rows=rows), whole)
    said = capsys.readouterr().err
    assert f"skipped: {tmp_path / 'rows.jsonl'}, {message}\n" in said
    assert "1 unusable rows skipped, 0 prompts cut to fit" in said
    with pytest.raises(SystemExit) as exit:
        start("strict", "--strict", "true", rows=rows)
    assert exit.value.code == 2
    assert f"{message} (1 unusable rows; leave out --strict to skip them)" in capsys.readouterr().err
    assert not (tmp_path / "strict").exists()


def test_long_rows(start, capsys):
    """A long prompt is cut on the scheme's side; a completion never is."""
    long = {"prompt": "what " * 40 + "is two plus two", "completion": "four"}
    cut = {"prompt": "what " * 15 + "is two plus two", "completion": "four"}
    assert equal(start("long", "--max-length", 21, rows=[*ROWS, long]), start("cut", rows=[*ROWS, cut]))
    assert "0 unusable rows skipped, 1 prompts cut to fit" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        start("bad", "--max-length", 6)
    message = "row 5: needs 8 tokens, more than --max-length 6 (1 rows do not fit; --max-length 8 would do)"
    assert message in capsys.readouterr().err


def test_other_errors_come_before_any_training(start, capsys, monkeypatch, tmp_path):
    start("done", "--save-steps", 6)

    def never(*_, **__):
        raise AssertionError("it trained")

    monkeypatch.setattr(finetune.PaddingFreeTrainer, "train", never)
    capsys.readouterr()
    for name, options, rows, message in [
        ("bad", ["--resume", "true"], ROWS, "--resume: there is no checkpoint in"),
        ("bad", [], ["\n"], "rows.jsonl: no rows"),
        ("bad", ["--train-file", "missing.jsonl"], ROWS, "missing.jsonl: no such file"),
        ("bad", ["--target-modules", "q_proj", "query"], ROWS, "no module query in the model, there are"),
        ("bad", ["--level", "best"], ROWS, "--level is 'best': choose one of positions, padding_free"),
        ("bad", ["--task", "bleu"], ROWS, "unknown task 'bleu'"),
        ("bad", ["--task", "choices"], ROWS, "--task choices compares log-likelihoods of choices"),
        ("bad", ["--load-in-4bit", "true"], ROWS, "need bitsandbytes"),
        ("bad", ["--early-stopping", 1], ROWS, "--early-stopping needs evaluations"),
        ("bad", ["--eval-share", 1], ROWS, "--eval-share is 1.0"),
        ("bad", ["--model", str(tmp_path)], ROWS, "cannot be loaded as a causal language model"),
        ("done", [], ROWS, "holds checkpoint-6 of an earlier run: add --resume, or choose another one"),
        ("done", ["--resume", "true", "--lora-r", 8], ROWS, "had lora_r 4, now it is 8"),
        ("done", ["--resume", "true"], ROWS[1:], "had train_rows"),
    ]:
        with pytest.raises(SystemExit) as exit:
            start(name, *options, rows=rows)
        assert exit.value.code == 2
        assert message in capsys.readouterr().err


def test_the_example_data():
    rows = [json.loads(line) for line in DATA.read_text().splitlines()]
    assert len({row["prompt"] for row in rows}) == len(rows) == 60
    assert all(row["completion"].startswith(" ") and row["completion"].strip().isdigit() for row in rows)
    assert all(row["prompt"] == row["prompt"].strip() for row in rows)


def test_the_tokenizer_beside_the_adapter_pads_as_in_training(start, tmp_path):
    start("adapter", "--padding-side", "left")
    PaddingScheme.load(tmp_path / "adapter").check(AutoTokenizer.from_pretrained(tmp_path / "adapter"))
