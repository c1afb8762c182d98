"""`diagnose` names the cause of known defects, on models in which it is that strong, and leaves the model alone."""

import copy
import functools
import json

import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import ModelHook, add_hook_to_module
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
from rope_pad_fix.drift.diagnose import VERDICTS, show
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


def end_is_pad():
    model = tiny()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id
    return model


def with_positions(layout="left"):
    ids, real = batch(ragged(), layout)
    return {"batch": {"input_ids": ids, "attention_mask": real, "position_ids": position_ids(real)}}


RECIPES = {
    "R1 GPT-2, left": (gpt2, given(), "positions"),
    "R1 Llama, left": (tiny, given(), "rounding"),
    "R2, right, generate": (tiny, given(layout="right") | {"generate": True}, "positions"),
    "R3, right": (tiny, given(layout="right"), "positions"),
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
    "R15, no mask, generate": (end_is_pad, given(mask=False) | {"generate": True}, "mask"),
    "no mask, generate knows the pad token": (tiny, given(mask=False) | {"generate": True}, "rounding"),
    "no mask, right": (tiny, given(mask=False, layout="right"), "positions"),
    "no cache, right": (tiny, given(layout="right") | {"use_cache": False}, "positions"),
    "generate, left": (tiny, given() | {"generate": True}, "rounding"),
    "GPT-2, left, no mask": (gpt2, given(mask=False), "positions"),
    "bfloat16, holes": (lambda: tiny(dtype=torch.bfloat16), given(layout="holes"), "positions"),
    "bfloat16": (lambda: tiny(dtype=torch.bfloat16), given(), "rounding"),
    "patched": (lambda: rope_pad_fix.apply(tiny()), given(layout="holes"), "none"),
    "patched, right, generate": (
        lambda: rope_pad_fix.apply(tiny()),
        given(layout="right") | {"generate": True},
        "none",
    ),
    "patched, bfloat16": (lambda: rope_pad_fix.apply(tiny(dtype=torch.bfloat16)), given(), "none"),
}


@functools.cache
def diagnosed(recipe):
    make, usage, _ = RECIPES[recipe]
    return diagnose(make(), **usage)


@pytest.mark.parametrize("recipe", RECIPES)
def test_known_defects(recipe):
    found, verdict = diagnosed(recipe), RECIPES[recipe][2]
    assert found.verdict == verdict, found
    assert verdict in ("none", "rounding") or found.exact_drift > 0.05, "too weak to show anything"


def by_name(found):
    return {factor.name: factor for factor in found.factors}


def test_the_parts_of_a_diagnosis():
    found = diagnosed("R3, right")
    factors = by_name(found)
    assert found.verdict in VERDICTS
    assert all(factor.baseline == found.drift for factor in found.factors)
    assert not [factor.note for factor in found.factors if "cannot be tried" in factor.note]
    assert factors["padding side"].carries > 0.99
    assert factors["position_ids"].carries > 0.99
    assert factors["rope_pad_fix"].drift == 0
    assert factors["dtype bfloat16"].carries < 0.9
    assert factors["pad token id"].carries < 0.9
    assert factors["KV cache"].drift is not None
    assert "left" in factors["padding side"].remedy
    assert found.first is None, "the prompt's forward is right"


def test_what_does_not_apply_is_listed():
    factors = by_name(diagnosed("R1 Llama, left"))
    notes = {
        "sampling": "off",
        "attention mask": "passed",
        "dtype float32": "already",
        "devices": "one device",
        "autocast": "not active",
        "float32 matmul precision": "highest already",
        "rotary embeddings by length": "no (default)",
        "sliding window": "no window",
    }
    assert {name: factors[name].note for name in notes} == notes
    assert all(factors[name].drift is factors[name].carries is None for name in notes)


def test_json_says_everything():
    found = diagnosed("bfloat16")
    assert json.loads(found.to_json()) == found.to_dict()
    assert found.to_dict()["first"]["module"] == found.first.module
    assert len(found.to_dict()["factors"]) == len(found.factors)


def test_what_is_shown_ends_in_the_verdict_and_the_fix():
    found = diagnosed("R5, holes")
    console = Console(width=150, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    show(found, console)
    lines = console.export_text().strip().splitlines()
    assert lines[-3].startswith("First module whose output differs: model.layers.0.self_attn")
    assert lines[-2].startswith("Verdict: positions. Positions count the pads.")
    assert lines[-1].startswith("Shortest fix: rope_pad_fix.apply(model)")


def test_the_first_module_that_is_wrong():
    assert diagnosed("R1 GPT-2, left").first.module == "transformer.wpe"
    assert diagnosed("R5, holes").first.module.startswith("model.layers.0.self_attn")


def test_rounding_names_the_first_module():
    found = diagnosed("bfloat16")
    assert found.first is not None
    assert found.first.module
    assert found.exact_drift < found.drift / 100
    assert by_name(found)["dtype float32"].drift == pytest.approx(found.exact_drift)


def test_sampling():
    model = rope_pad_fix.apply(tiny())
    model.generation_config.update(do_sample=True, temperature=0.7, top_p=0.9)
    found = diagnose(model, **given())
    assert found.verdict == "sampling"
    for text in (found.factors[0].note, found.cause):
        assert "temperature=0.7" in text
        assert "top_p=0.9" in text
    model.generation_config.do_sample = False
    assert diagnose(model, **given()).verdict == "none"


def test_advice_is_measured():
    """The library cures a window over slots only where it is padding-free, and it does not know this architecture."""
    found = diagnosed("R11, sliding window with holes")
    assert not [factor for factor in found.factors if "apply" in factor.remedy]
    assert found.fix == "pad on the left, no holes"
    assert "apply" not in diagnosed("R7, dynamic NTK").fix
    assert diagnose(gpt2().bfloat16(), **given(), position_ids=True, decode_position_ids=True).fix == "run in float32"
    assert diagnosed("R1 GPT-2, left").fix.startswith('rope_pad_fix.apply(model, level="positions")')
    found = diagnosed("R2, right, generate")
    assert found.fix == 'rope_pad_fix.apply(model), or tokenizer.padding_side = "left"'


def test_rows_do_not_end_while_they_are_compared():
    model = rope_pad_fix.apply(tiny())
    model.generation_config.eos_token_id = 2
    ends = torch.zeros(128).index_fill(0, torch.tensor([2]), 1e3)
    model.lm_head.register_forward_hook(lambda module, inputs, output: output + ends)
    assert diagnose(model, **given(), generate=True).drift == 0


def test_a_row_is_compared_with_itself_in_the_same_way():
    ids, real = batch(ragged((9,)))
    usage = {"batch": {"input_ids": ids, "attention_mask": real}, "use_cache": False}
    assert diagnose(tiny(), **usage).verdict == "none"


def test_reduced_precision_is_rounding():
    with torch.autocast("cpu", torch.bfloat16):
        found = diagnose(tiny(), **given())
    assert (found.verdict, "autocast" in found.cause) == ("rounding", True)
    assert by_name(found)["autocast"].carries > 0.99
    assert found.exact_drift < found.drift / 100


def test_float32_precision_is_tried_and_restored():
    torch.set_float32_matmul_precision("high")
    try:
        factor = by_name(diagnose(tiny(), **given()))["float32 matmul precision"]
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert factor.drift is not None
    assert factor.note == "highest instead of high"


class Faulty(ModelHook):
    """Of Accelerate: what a transfer between devices that loses data does to every row but the first."""

    def post_forward(self, module, output):
        return torch.cat([output[:1], output[1:] * 0.5])


def test_devices():
    model = tiny()
    add_hook_to_module(model.model.layers[1].mlp, Faulty())
    model.hf_device_map = {"model.layers.0": "cpu", "model.layers.1": "disk"}
    found = diagnose(model, **given())
    assert found.verdict == "device"
    assert by_name(found)["devices"].carries > 0.99
    assert "cpu, disk" in by_name(found)["devices"].note


@pytest.mark.parametrize("layers", ["cpu", "disk"])
def test_a_model_under_accelerate_is_left_as_it_was(layers, tmp_path):
    """Its own ``to``, which copies keep, would convert the model that was copied."""
    model = tiny(dtype=torch.bfloat16)
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    places |= {"model.layers": layers}
    model = dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    assert "to" in vars(model)
    found = diagnose(model, **given(layout="holes"))
    assert found.verdict == "positions"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert diagnose(model, **given(layout="holes")).drift == found.drift


class Quantised(LlamaForCausalLM):
    """In bfloat16 for good."""

    def to(self, *args, **kwargs):
        raise ValueError("`.to` is not supported")


def test_a_model_that_has_no_float32():
    model = tiny(dtype=torch.bfloat16)
    model.__class__ = Quantised
    found = diagnose(model, **given(layout="holes"))
    assert (found.verdict, found.exact_drift) == ("positions", None)
    assert "cannot be tried: ValueError" in by_name(found)["dtype float32"].note
    found = diagnose(model, **given())
    assert (found.verdict, found.exact_drift) == ("rounding", None)
    assert "cannot be run in float32" in found.cause


def test_a_model_that_mixes_rows_is_no_padding_bug():
    model = tiny()
    model.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: output + output.mean(0, True))
    rows = torch.stack(ragged((9, 9, 9)))
    found = diagnose(model, batch={"input_ids": rows, "attention_mask": torch.ones_like(rows)})
    assert found.verdict == "rounding"
    assert "depends on the batch" in found.cause


def test_what_cannot_be_tried_is_noted():
    model = gpt2()
    model.config.n_positions = 44
    model.transformer.wpe = torch.nn.Embedding.from_pretrained(model.transformer.wpe.weight[:44])  # 64 pads do not fit
    found = diagnose(model, **given())
    assert found.verdict == "positions"
    assert "cannot be tried: IndexError" in by_name(found)["padding length"].note
    assert by_name(found)["padding length"].drift is None


def test_logits_that_are_no_numbers():
    model = tiny()
    broken = lambda module, inputs, output: output if len(output) == 1 else output * float("nan")  # noqa: E731
    model.lm_head.register_forward_hook(broken)
    found = diagnose(model, **given())
    assert found.verdict in ("mask", "rounding")
    assert "NaN" not in found.to_json()
    assert "Infinity" not in found.to_json()


@pytest.mark.parametrize(
    "make", [tiny, dynamic_ntk, longrope, lambda: rope_pad_fix.apply(tiny(attention="eager", dtype=torch.bfloat16))]
)
def test_the_model_is_left_as_it_was(make):
    model = make().train()
    model.model.layers[1].eval()
    model.generation_config.update(do_sample=True, top_k=9)
    buffers, config = copy.deepcopy(dict(model.named_buffers())), copy.deepcopy(vars(model.config))
    weights, generation = copy.deepcopy(model.state_dict()), model.generation_config.to_dict()
    modules = [(vars(module).keys(), type(module).__name__, module.training) for module in model.modules()]
    status, random = rope_pad_fix.status(model), torch.get_rng_state()
    diagnose(model, **given((10, 60)))
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert all(weights[name].dtype == value.dtype for name, value in model.state_dict().items())
    assert all(torch.equal(buffers[name], value) for name, value in model.named_buffers())
    assert vars(model.config) == config
    assert model.generation_config.to_dict() == generation
    assert [(vars(module).keys(), type(module).__name__, module.training) for module in model.modules()] == modules
    assert rope_pad_fix.status(model) == status
    assert torch.equal(torch.get_rng_state(), random)


def test_the_model_is_left_as_it_was_after_an_error():
    model = tiny(attention="eager").train()
    with pytest.raises(IndexError):
        diagnose(model, batch={"input_ids": torch.full((2, 3), 999), "attention_mask": torch.ones(2, 3)})
    assert model.training
    assert model.config._attn_implementation == "eager"


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
    found = diagnose(tiny(), Tokenizer(), prompts, position_ids=True, decode_position_ids=True, new_tokens=2)
    assert found.verdict == "rounding"
    assert "now the model's own" in by_name(found)["position_ids"].note


def test_a_batch_says_less_than_is_passed():
    """Its mask can be the truth without being passed, and positions can be asked for without being given."""
    ids, real = batch(ragged())
    usage = {"batch": {"input_ids": ids, "attention_mask": real.bool()}}
    assert diagnose(tiny(), **usage).verdict == "rounding"
    assert diagnose(tiny(), **usage, attention_mask=False).verdict == "mask"
    assert diagnose(tiny(), **usage, position_ids=True).verdict == "positions"
    assert diagnose(tiny(), **usage, position_ids=True, decode_position_ids=True).verdict == "rounding"


@pytest.mark.parametrize("layout", ["left", "right"])
def test_padding_is_told_by_the_pad_token(layout):
    ids, real = batch(ragged(), layout)
    told = diagnose(tiny(), batch={"input_ids": ids})
    known = diagnose(tiny(), batch={"input_ids": ids}, real_mask=real)
    assert (told.verdict, told.drift) == (known.verdict, known.drift)
    same = Tokenizer()
    same.eos_token_id = 0  # the pad token: at the end of a row it may be text, at the start it is padding
    if layout == "left":
        assert diagnose(tiny(), same, batch={"input_ids": ids}).drift == known.drift
    else:
        with pytest.raises(InputError, match="the pad token 0 is the eos_token_id, too"):
            diagnose(tiny(), same, batch={"input_ids": ids})


IDS, MASK = torch.full((2, 3), 5), torch.ones(2, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "pass prompts"),
        ({"prompts": ["a"], "batch": {"input_ids": IDS}}, "not both"),
        ({"prompts": ["a"]}, "their tokenizer"),
        ({"prompts": [], "tokenizer": Tokenizer()}, "at least one text"),
        ({"prompts": "text", "tokenizer": Tokenizer()}, "a list"),
        ({"prompts": ["a", ""], "tokenizer": Tokenizer()}, "no tokens"),
        ({"prompts": ["a"], "tokenizer": Tokenizer(), "padding_side": "up"}, "'up'"),
        ({"prompts": ["a"], "tokenizer": Tokenizer(), "new_tokens": -1}, "-1"),
        ({"prompts": ["a"], "tokenizer": Tokenizer(), "generate": True, "position_ids": True}, "its own position_ids"),
        ({"batch": {"input_ids": IDS, "attention_mask": MASK}, "padding_side": "left"}, "padded already"),
        ({"batch": {"input_ids": torch.tensor([[5, 0, 6]])}}, "real_mask, [batch, length]; the pad token 0 stands"),
        ({"batch": {"input_ids": IDS[0]}}, "[batch, length]"),
        ({"batch": {"input_ids": IDS.float()}}, "whole numbers"),
        ({"batch": {"input_ids": IDS, "labels": IDS}}, "batch has labels"),
        ({"batch": {"input_ids": IDS, "attention_mask": torch.ones(2, 4)}}, "shape (2, 4)"),
        ({"batch": {"input_ids": IDS, "attention_mask": MASK - 2}}, "1 at real tokens"),
        ({"batch": {"input_ids": IDS, "attention_mask": MASK * 0}}, "no real token"),
        ({"batch": {"input_ids": IDS, "attention_mask": MASK, "position_ids": IDS[:, :2]}}, "shape (2, 2)"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(InputError) as error:
        diagnose(tiny(), **arguments)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_without_a_pad_token_a_mask_is_needed():
    model = gpt2()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    with pytest.raises(InputError, match="no pad token to tell by"):
        diagnose(model, batch={"input_ids": IDS})


@pytest.mark.slow
def test_a_real_model():
    """R21: left padding is rounding in both data types; right padding is not."""
    from rope_pad_fix import smollm2

    from .test_smollm2 import PROMPTS

    for dtype in (torch.float32, torch.bfloat16):
        model, tokenizer = smollm2.load(dtype)
        assert diagnose(model, tokenizer, PROMPTS, padding_side="left").verdict == "rounding"
        assert diagnose(model, tokenizer, PROMPTS, padding_side="right").verdict == "positions"
