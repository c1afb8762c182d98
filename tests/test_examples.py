"""The examples and the benchmark run as they are; each in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def output(*command):
    result = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, encoding="utf-8", check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_quickstart(smollm2_path):
    stock, patched = output("examples/quickstart.py").split("patched", 1)
    assert "OTHER TEXT" in stock
    assert patched.count("logits differ by 0.00000, same text") == 6


def test_inputs_embeds(smollm2_path):
    stock, patched = output("examples/inputs_embeds.py").split("patched", 1)
    assert float(stock.split("logits differ by ")[1].split(",")[0]) > 1
    differences = [float(part.split(",")[0]) for part in patched.split("logits differ by ")[1:]]
    assert len(differences) == 2
    assert max(differences) < 1e-3


def test_chatglm():
    text = output("examples/chatglm.py")
    assert "stock, padded on the right: 3 of 3" not in text
    assert text.count("patched, padded on the left: 3 of 3") == text.count("patched, padded on the right: 3 of 3") == 1
    assert "the gradients of both are equal bit for bit" in text
    before, after = (float(part.split()[0]) for part in text.split("loss ")[2:])
    assert after < before


@pytest.mark.slow
def test_batch_invariant_benchmark(smollm2_path):
    assert "| float32 | 2 | forward |" in output("benchmarks/batch_invariant.py", "--quick")


@pytest.mark.slow
def test_padding_free_benchmark(smollm2_path):
    text = output("benchmarks/padding_free.py", "--quick")
    assert text.count("| float32 | left |") == text.count("| float32 | right |") == 1
    assert "`logits_to_keep=1`" in text
    assert "python benchmarks/padding_free.py --quick`" in text
