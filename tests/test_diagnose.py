"""`diagnose` names the cause of known defects, on models in which it is that strong, and leaves the model alone."""

import copy
import json

import pytest
import torch
from rich.console import Console
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

import rope_pad_fix
from rope_pad_fix.drift import InputError, diagnose
from rope_pad_fix.drift.diagnose import show
from rope_pad_fix.rows import position_ids

from .conftest import SIZES, batch, ragged, tiny


def scaled(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return model.eval()


def gpt2():
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
    return scaled(GPT2LMHeadModel(GPT2Config(vocab_size=128, bos_token_id=1, eos_token_id=2, **sizes)))


def of(config_class, model_class, **options):
    torch.manual_seed(0)
    return scaled(model_class(config_class(**(SIZES | options))))


def dynamic_ntk():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    return of(LlamaConfig, LlamaForCausalLM, max_position_embeddings=32, rope_parameters=rope)


def longrope():
    head = SIZES["hidden_size"] // SIZES["num_attention_heads"]
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
    rope |= {"short_factor": [1.0] * (head // 2), "long_factor": [1.0 + 2 * i for i in range(head // 2)]}
    return of(Phi3Config, Phi3ForCausalLM, original_max_position_embeddings=32, rope_parameters=rope)


def given(lengths=(5, 23, 40), layout="left", mask=True, **more):
    ids, real = batch(ragged(lengths), layout)
    return {"batch": {"input_ids": ids} | ({"attention_mask": real} if mask else {}) | more, "real_mask": real}


def with_positions(layout="left"):
    ids, real = batch(ragged(), layout)
    return {"batch": {"input_ids": ids, "attention_mask": real, "position_ids": position_ids(real)}}


RECIPES = {
    "R1 GPT-2, left": (gpt2, given(), "positions"),
    "R1 Llama, left": (tiny, given(), "rounding"),
    "R2 and R3, right": (tiny, given(layout="right"), "positions"),
    "R4, positions only with the prompt": (tiny, with_positions(), "positions"),
    "R5, holes": (tiny, given(layout="holes"), "positions"),
    "R7, dynamic NTK": (dynamic_ntk, given((10, 60)), "positions"),
    "R8, longrope": (longrope, given((10, 60)), "positions"),
    "R11, sliding window with holes": (
        lambda: of(MistralConfig, MistralForCausalLM, sliding_window=8),
        given(layout="holes"),
        "mask",
    ),
    "R15, no mask": (tiny, given(mask=False), "mask"),
    "bfloat16": (lambda: tiny(dtype=torch.bfloat16), given(), "rounding"),
    "patched": (lambda: rope_pad_fix.apply(tiny()), given(layout="holes"), "none"),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_known_defects(recipe):
    make, usage, verdict = RECIPES[recipe]
    found = diagnose(make(), **usage)
    assert found.verdict == verdict, found
    assert verdict in ("none", "rounding") or found.exact_drift > 0.05, "too weak to show anything"


def test_the_parts_of_a_diagnosis():
    found = diagnose(tiny(), **given(layout="right"))
    factors = {factor.name: factor for factor in found.factors}
    assert factors["padding side"].carries > 0.99
    assert factors["position_ids"].carries > 0.99
    assert factors["rope_pad_fix"].drift == 0
    assert factors["dtype bfloat16"].carries < 0.9
    assert factors["KV cache"].drift is not None
    assert factors["devices"].drift is None
    assert "left" in factors["padding side"].remedy
    assert json.loads(found.to_json())["verdict"] == "positions"
    console = Console(width=150, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    show(found, console)
    lines = console.export_text().strip().splitlines()
    assert lines[-2].startswith("Verdict: positions. Right padding")
    assert lines[-1].startswith("Shortest fix: rope_pad_fix.apply(model)")


def test_rounding_names_the_first_module():
    found = diagnose(tiny(dtype=torch.bfloat16), **given())
    assert found.first is not None
    assert found.first.module
    assert found.exact_drift < found.drift / 100


def test_sampling():
    model = rope_pad_fix.apply(tiny())
    model.generation_config.update(do_sample=True, temperature=0.7, top_p=0.9)
    found = diagnose(model, **given())
    assert found.verdict == "sampling"
    assert "temperature=0.7" in found.factors[0].note
    assert "top_p=0.9" in found.factors[0].note


@pytest.mark.parametrize("make", [tiny, dynamic_ntk, lambda: rope_pad_fix.apply(tiny(attention="eager")).train()])
def test_the_model_is_left_as_it_was(make):
    model = make()
    weights, config = copy.deepcopy(model.state_dict()), model.config.to_dict()
    status, training = rope_pad_fix.status(model), model.training
    buffers = copy.deepcopy(dict(model.named_buffers()))
    implementation = model.config._attn_implementation_internal
    diagnose(model, **given((10, 60)))
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert all(torch.equal(buffers[name], value) for name, value in model.named_buffers())
    assert model.config.to_dict() == config
    assert (rope_pad_fix.status(model), model.training) == (status, training)
    assert model.config._attn_implementation_internal == implementation


class Tokenizer:
    """A character a token."""

    padding_side, pad_token_id = "left", 0

    def __call__(self, text):
        return type("Encoding", (), {"input_ids": [ord(c) % 120 + 3 for c in text]})


def test_prompts():
    prompts = ["a", "a longer one", "the longest of them all"]
    assert diagnose(tiny(), Tokenizer(), prompts).verdict == "rounding"
    assert diagnose(tiny(), Tokenizer(), prompts, attention_mask=False).verdict == "mask"
    assert diagnose(tiny(), Tokenizer(), prompts, padding_side="right").verdict == "positions"
    assert diagnose(tiny(), Tokenizer(), prompts, position_ids=True).verdict == "positions"  # R4
    found = diagnose(tiny(), Tokenizer(), prompts, position_ids=True, decode_position_ids=True)
    assert found.verdict == "rounding"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "pass prompts"),
        ({"prompts": ["a"]}, "their tokenizer"),
        ({"prompts": [], "tokenizer": Tokenizer()}, "at least one text"),
        ({"prompts": ["a"], "tokenizer": Tokenizer(), "padding_side": "up"}, "'up'"),
        ({"batch": {"input_ids": torch.ones(2, 3).long()}}, "real_mask"),
        ({"batch": {"input_ids": torch.ones(3).long()}}, "[batch, length]"),
        ({"batch": {"input_ids": torch.ones(2, 3).long(), "attention_mask": torch.ones(2, 4)}}, "shape (2, 4)"),
        ({"batch": {"input_ids": torch.ones(2, 3).long(), "attention_mask": torch.zeros(2, 3)}}, "no real token"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(InputError) as error:
        diagnose(tiny(), **arguments)
    assert message in str(error.value)


@pytest.mark.slow
def test_a_real_model():
    """R21: left padding is rounding in both data types; right padding is not."""
    from rope_pad_fix import smollm2

    from .test_smollm2 import PROMPTS

    for dtype in (torch.float32, torch.bfloat16):
        model, tokenizer = smollm2.load(dtype)
        assert diagnose(model, tokenizer, PROMPTS, padding_side="left").verdict == "rounding"
        assert diagnose(model, tokenizer, PROMPTS, padding_side="right").verdict == "positions"
