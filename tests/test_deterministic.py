"""What `deterministic` sets, and that it takes all of it back."""

import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from rope_pad_fix import deterministic

from .conftest import batch, ragged, tiny


def switches():
    return {
        "precision": torch.get_float32_matmul_precision(),
        "matmul tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn tf32": torch.backends.cudnn.allow_tf32,
        "benchmark": torch.backends.cudnn.benchmark,
        "algorithms": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    }


def draw():
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_numbers_repeat_and_the_generators_go_on_as_if_nothing_had_been():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = [draw(), draw()]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    first = draw()
    with deterministic(7):
        inside = draw()
    assert [first, draw()] == expected
    with deterministic(7):
        assert draw() == inside
    with deterministic(8):
        assert draw() != inside


def fail(inside):
    with deterministic():
        inside |= switches() | {"dtype": (torch.ones(2, 2) @ torch.ones(2, 2)).dtype}
        raise ZeroDivisionError


def test_everything_is_as_before_even_after_an_error():
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.benchmark = True
    inside = {}
    try:
        with torch.autocast("cpu", torch.bfloat16):
            before, random_state = switches(), torch.get_rng_state()
            with pytest.raises(ZeroDivisionError):
                fail(inside)
            assert switches() == before
            assert torch.equal(torch.get_rng_state(), random_state)
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.benchmark = False
    assert before["precision"] == "medium"
    assert (inside.pop("workspace") is not None) == torch.cuda.is_available()
    assert inside == {
        "precision": "highest",
        "matmul tf32": False,
        "cudnn tf32": False,
        "benchmark": False,
        "algorithms": True,
        "warn only": True,
        "autocast": False,
        "dtype": torch.float32,
    }


def test_blocks_nest():
    before = switches()
    with deterministic(1):
        first = draw()
        between = switches()
        with deterministic(2):
            draw()
        assert switches() == between
        after = draw()
    assert switches() == before
    with deterministic(1):
        assert (draw(), draw()) == (first, after)


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "fp32_precision"), reason="since torch 2.9")
def test_the_newer_interface_to_tf32_is_restored_too():
    """In a process of its own: once set, it cannot be taken back to what the older interface can read."""
    code = """
import torch
from torch import backends
from rope_pad_fix import deterministic
for part in (backends.cudnn.conv, backends.cuda.matmul, backends.mkldnn.matmul, backends):
    part.fp32_precision = "tf32"
    with deterministic():
        assert part.fp32_precision in ("ieee", "none"), part.fp32_precision
        assert torch.get_float32_matmul_precision() == "highest"
        assert torch.backends.cudnn.allow_tf32 is False
    assert part.fp32_precision == "tf32"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_model_decodes_greedily():
    model = tiny().train()
    model.generation_config.update(do_sample=True, temperature=5.0, top_k=7)
    before = model.generation_config.to_dict()
    ids, mask = batch(ragged())
    with deterministic(0, model):
        assert not model.training
        first = model.generate(ids, attention_mask=mask, max_new_tokens=8, pad_token_id=0)
    with deterministic(1, model):
        assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=8, pad_token_id=0), first)
    assert model.training
    assert model.generation_config.to_dict() == before
    sampled = [model.generate(ids, attention_mask=mask, max_new_tokens=8, pad_token_id=0) for _ in range(3)]
    assert not all(torch.equal(sample, first) for sample in sampled), "without it the model samples"


def test_what_a_model_asks_for_is_left_as_it_was():
    model = tiny().train()
    model.model.layers[1].eval()
    del model.generation_config.min_p  # of another version
    model.generation_config.update(do_sample=True, num_beams=3, top_p=0.9, num_return_sequences=2)
    before, modes = dict(vars(model.generation_config)), [module.training for module in model.modules()]
    with deterministic(model=model):
        config = model.generation_config
        assert (config.do_sample, config.num_beams, config.num_return_sequences, config.top_p) == (False, 1, 1, None)
    assert vars(model.generation_config) == before
    assert [module.training for module in model.modules()] == modes
    with deterministic(model=torch.nn.Linear(2, 2)):
        pass
