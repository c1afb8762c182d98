"""apply, remove, applied, status, families and register: what a patched model is, and that it stays patched."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import itertools
import pickle
import subprocess
import sys
import threading
import types

import pytest
import torch
from accelerate import Accelerator
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from accelerate.state import AcceleratorState, GradientState
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModel,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    MistralModel,
)

import rope_pad_fix
from rope_pad_fix import Family, Status, UnsupportedModelError

from .conftest import FAMILIES, LAYOUTS, SIZES, batch, ragged, tiny

ROWS = ragged()
CLOSE = 1e-4  # fp32: the lone row takes other matrix kernels than the rows of a batch
WRONG = 0.3  # and what a stock model is off by, at least, when there are holes
LEVELS = ("positions", "padding_free", "batch_invariant")


def first(output):
    """Logits of a head, hidden states of a decoder."""
    return output[0]


def lone(call, rows=ROWS):
    """What each row gives alone."""
    with torch.no_grad():
        return [first(call(input_ids=row[None]))[0] for row in rows]


def padded(call, layout="holes", rows=ROWS):
    """What the rows give as one padded batch."""
    ids, mask = batch(rows, layout)
    with torch.no_grad():
        return first(call(input_ids=ids, attention_mask=mask))


def distance(call, expected, layouts=LAYOUTS):
    """How far the rows of padded batches are, at their real tokens, from what they give alone."""
    worst = 0.0
    for layout in layouts:
        mask = batch(ROWS, layout)[1].bool()
        for output, real, alone in zip(padded(call, layout), mask, expected, strict=True):
            output = output if alone.dim() == 1 else output[real]
            worst = max(worst, (output - alone).abs().max().item())
    return worst


def snapshot(model):
    """Everything there is to see on a model: classes, every attribute of every module, configuration, signature."""
    return {
        "classes": {name: type(module) for name, module in model.named_modules()},
        "attributes": {
            name: {key: id(value) for key, value in vars(module).items()} for name, module in model.named_modules()
        },
        "state": {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()},
        "config": model.config.to_dict(),
        "signature": inspect.signature(model.forward),
    }


def adapted(model, **config):
    """A model under LoRA whose adapter matters."""
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], **config))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return model.eval()


class Counting(ModelHook):
    """A hook as Accelerate's own, that only counts."""

    def __init__(self):
        self.calls = 0

    def pre_forward(self, module, *args, **kwargs):
        self.calls += 1
        return args, kwargs


@pytest.fixture
def registry(monkeypatch):
    """A copy of the registry, for one test."""
    module = sys.modules["rope_pad_fix.families"]
    monkeypatch.setattr(module, "_registry", dict(module._registry))


@pytest.fixture
def accelerator_state():
    """Accelerate keeps one state a process; a test leaves none behind."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def mistral():
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)).eval()


# --- apply, status, remove -----------------------------------------------------------------------------------------


def test_apply_returns_the_model_itself():
    model = tiny()
    assert rope_pad_fix.apply(model) is model


def test_apply_twice_is_apply_once():
    model = tiny()
    before = snapshot(model)
    once, state = padded(rope_pad_fix.apply(model)), rope_pad_fix.status(model)
    assert rope_pad_fix.status(rope_pad_fix.apply(model)) == state
    assert torch.equal(padded(model), once)
    assert snapshot(rope_pad_fix.remove(model)) == before


@pytest.mark.parametrize("head", ["causal_lm", "classifier"])
@pytest.mark.parametrize("family", FAMILIES)
def test_patched_rows_are_as_alone_where_stock_ones_are_not(family, head):
    model = tiny(family, head)
    expected = lone(model)
    assert distance(model, expected, ["holes"]) > WRONG
    assert distance(rope_pad_fix.apply(model), expected) < CLOSE


@pytest.mark.parametrize("level", ["positions", "padding_free"])
def test_a_patched_model_gives_a_lone_row_what_the_stock_model_gives_it(level):
    model = tiny()
    expected = lone(model)
    assert all(map(torch.equal, lone(rope_pad_fix.apply(model, level)), expected))


def test_the_strongest_level_is_the_default():
    assert rope_pad_fix.status(rope_pad_fix.apply(tiny())).level == "batch_invariant"


@pytest.mark.parametrize(("to", "other"), itertools.permutations(LEVELS, 2))
def test_applying_another_level_switches_to_it(to, other):
    model = tiny()
    before = snapshot(model)
    direct, state = padded(rope_pad_fix.apply(model, to)), rope_pad_fix.status(model)
    rope_pad_fix.apply(model, other)
    assert rope_pad_fix.status(model).level == other
    rope_pad_fix.apply(model, to)
    assert rope_pad_fix.status(model) == state
    assert torch.equal(padded(model), direct)
    assert snapshot(rope_pad_fix.remove(model)) == before


def test_status_of_a_model_that_is_not_patched_is_none():
    assert rope_pad_fix.status(tiny()) is None
    assert rope_pad_fix.status(torch.nn.Linear(2, 2)) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_status_names_level_family_decoder_and_modules(family):
    model = rope_pad_fix.apply(tiny(family))
    assert rope_pad_fix.status(model) == Status("batch_invariant", family, "model", ("", "model"))
    assert rope_pad_fix.status(model.model) == Status("batch_invariant", family, "", ("",))


def test_status_of_a_classifier():
    model = tiny(head="classifier")
    assert rope_pad_fix.status(rope_pad_fix.apply(model)) == Status("batch_invariant", "llama", "model", ("", "model"))
    assert rope_pad_fix.status(rope_pad_fix.apply(model, "positions")).decoder == "model"


def test_status_of_a_model_inside_another_names_the_decoder_by_its_path():
    model = rope_pad_fix.apply(torch.nn.ModuleDict({"inner": tiny()}))
    assert rope_pad_fix.status(model) == Status("batch_invariant", "llama", "inner.model", ("inner", "inner.model"))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("head", ["causal_lm", "classifier", "base"])
@pytest.mark.parametrize("family", FAMILIES)
def test_remove_leaves_nothing_behind(family, head, level):
    model = tiny(family, "causal_lm").model if head == "base" else tiny(family, head)
    before, stock = snapshot(model), padded(model)
    rope_pad_fix.apply(model, level)
    padded(model)
    assert rope_pad_fix.remove(model) is model
    assert snapshot(model) == before
    assert rope_pad_fix.status(model) is None
    assert torch.equal(padded(model), stock)


def test_remove_of_a_model_that_is_not_patched_changes_nothing():
    model = tiny()
    before = snapshot(model)
    assert rope_pad_fix.remove(model) is model
    assert snapshot(model) == before


def test_remove_takes_a_patch_off_a_part_of_a_model():
    model = rope_pad_fix.apply(tiny())
    rope_pad_fix.remove(model.model)
    assert rope_pad_fix.status(model.model) is None


def test_a_patched_model_looks_like_itself():
    model = tiny()
    before = snapshot(model)
    rope_pad_fix.apply(model)
    after = snapshot(model)
    assert (after["state"], after["config"], after["signature"]) == (
        before["state"],
        before["config"],
        before["signature"],
    )
    assert all(list(after["attributes"][name]) == list(before["attributes"][name]) for name in before["attributes"])
    assert isinstance(model, LlamaForCausalLM)
    assert isinstance(model.model, LlamaModel)
    assert (type(model).__name__, type(model).__module__) == ("LlamaForCausalLM", LlamaForCausalLM.__module__)
    assert model.config.architectures == before["config"]["architectures"]


def test_weights_load_into_a_patched_model():
    model, other = rope_pad_fix.apply(tiny()), tiny()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    model.load_state_dict(other.state_dict())
    assert torch.equal(padded(model), padded(rope_pad_fix.apply(other)))


# --- opt-in and per instance ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_other_models_stay_as_they_are(level):
    model, sibling = tiny(), tiny()
    of_same_config = type(model)(model.config).eval()
    of_same_config.load_state_dict(model.state_dict())
    stock = padded(sibling)
    rope_pad_fix.apply(model, level)
    padded(model)
    for other in (sibling, of_same_config):
        assert rope_pad_fix.status(other) is None
        assert torch.equal(padded(other), stock)
    later = type(of_same_config)(of_same_config.config).eval()
    later.load_state_dict(model.state_dict())
    assert torch.equal(padded(later), stock)


def test_classes_stay_as_they_are():
    model = tiny()
    classes = {base for module in model.modules() for base in type(module).__mro__}
    before = {cls: dict(vars(cls)) for cls in classes}
    rope_pad_fix.apply(model)
    padded(model)
    changed = [cls for cls in classes if {**vars(cls)}.keys() ^ before[cls].keys()]
    changed += [cls for cls in classes for key, value in before[cls].items() if vars(cls).get(key) is not value]
    assert [cls for cls in changed if not cls.__module__.startswith(("abc", "torch", "builtins"))] == []


@pytest.mark.parametrize("build", [LlamaModel, AutoModel.from_config])
def test_a_model_built_from_a_patched_decoders_configuration_is_a_stock_one(build):
    stock = tiny()
    model = rope_pad_fix.apply(tiny())
    new = build(model.model.config).eval()
    new.load_state_dict(model.model.state_dict())
    assert rope_pad_fix.status(new) is None
    assert torch.equal(padded(new), padded(stock.model))
    assert distance(model, lone(stock)) < CLOSE


def test_importing_the_library_imports_no_model():
    code = "import sys, rope_pad_fix; print(*[m for m in sys.modules if '.modeling_' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    models = [name for name in done.stdout.split() if name.startswith("transformers.models.")]
    assert set(models) <= {"transformers.models.auto.modeling_auto"}  # only a table of names


def test_what_is_imported_when_it_is_asked_for():
    code = "import rope_pad_fix; print(rope_pad_fix.chatglm.convert, rope_pad_fix.load_adapter)"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- applied -------------------------------------------------------------------------------------------------------


def test_applied_patches_for_the_length_of_a_block():
    model = tiny()
    before = snapshot(model)
    with rope_pad_fix.applied(model, "positions") as inside:
        assert inside is model
        assert rope_pad_fix.status(model).level == "positions"
    assert snapshot(model) == before


def test_applied_restores_after_an_exception():
    model = tiny()
    before = snapshot(model)
    with pytest.raises(KeyError, match="from the block"), rope_pad_fix.applied(model):
        raise KeyError("from the block")
    assert snapshot(model) == before


@pytest.mark.parametrize("raises", [False, True])
def test_applied_restores_the_level_before(raises):
    model = rope_pad_fix.apply(tiny(), "positions")
    state = rope_pad_fix.status(model)
    try:
        with rope_pad_fix.applied(model, "padding_free"):
            assert rope_pad_fix.status(model).level == "padding_free"
            if raises:
                raise KeyError
    except KeyError:
        pass
    assert rope_pad_fix.status(model) == state


def test_applied_with_a_level_that_does_not_exist_leaves_the_patch_alone():
    model = rope_pad_fix.apply(tiny(), "positions")
    with pytest.raises(ValueError, match="no_such_level"), rope_pad_fix.applied(model, "no_such_level"):
        pass
    assert rope_pad_fix.status(model).level == "positions"


# --- saving and copying --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("head", ["causal_lm", "classifier", "base"])
def test_save_pretrained_writes_the_same_bytes(tmp_path, head, level):
    model = tiny().model if head == "base" else tiny(head=head)
    model.save_pretrained(tmp_path / "stock")
    rope_pad_fix.apply(model, level).save_pretrained(tmp_path / "patched")
    stock, patched = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("stock", "patched")
    )
    assert patched == stock
    assert type(model).__name__.encode() in patched["config.json"]


def test_a_saved_patched_model_loads_unpatched(tmp_path):
    model = tiny()
    stock = padded(model)
    rope_pad_fix.apply(model).save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert rope_pad_fix.status(loaded) is None
    assert torch.equal(padded(loaded), stock)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def torch_saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = pytest.mark.parametrize("copied", [copy.deepcopy, pickled, torch_saved])


@COPIES
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("head", ["causal_lm", "classifier", "base"])
def test_a_copy_is_patched_and_gives_the_same(copied, head, level):
    model = rope_pad_fix.apply(tiny().model if head == "base" else tiny(head=head), level)
    twin = copied(model)
    assert rope_pad_fix.status(twin) == rope_pad_fix.status(model)
    assert torch.equal(padded(twin), padded(model))
    assert type(rope_pad_fix.remove(twin)) is type(rope_pad_fix.remove(model))


@COPIES
def test_a_copy_and_its_original_are_independent(copied):
    model = tiny()
    stock = padded(model)
    patched = padded(rope_pad_fix.apply(model))
    twin = copied(model)
    rope_pad_fix.remove(twin)
    assert torch.equal(padded(twin), stock)
    assert torch.equal(padded(model), patched)
    other = copied(model)
    rope_pad_fix.remove(model)
    assert torch.equal(padded(other), patched)
    assert torch.equal(padded(model), stock)


@COPIES
def test_a_copys_attention_implementation_is_its_own(copied):
    model = rope_pad_fix.apply(tiny())
    twin = copied(model)
    twin.set_attn_implementation("eager")
    ids, mask = batch(ROWS)
    assert twin(input_ids=ids, attention_mask=mask, output_attentions=True).attentions is not None
    assert torch.equal(padded(twin), padded(rope_pad_fix.apply(tiny(attention="eager"))))
    assert model.config._attn_implementation == "sdpa"
    assert rope_pad_fix.remove(twin).model.config is twin.config


@COPIES
def test_a_copy_of_an_unpatched_copy_is_stock(copied):
    model = tiny()
    stock = padded(model)
    twin = copied(rope_pad_fix.remove(copied(rope_pad_fix.apply(model))))
    assert rope_pad_fix.status(twin) is None
    assert torch.equal(padded(twin), stock)


def test_a_copied_decoder_is_patched_too():
    model = rope_pad_fix.apply(tiny())
    assert torch.equal(padded(copy.deepcopy(model.model)), padded(model.model))


@COPIES
def test_a_copied_configuration_of_a_patched_decoder_is_independent(copied):
    model = rope_pad_fix.apply(tiny())
    config = copied(model.model.config)
    config.use_cache = False
    assert model.config.use_cache
    assert config.to_dict() == model.config.to_dict() | {"use_cache": False}


# --- the attention implementation ----------------------------------------------------------------------------------


def test_attention_implementation_can_be_changed_on_a_patched_model():
    model = rope_pad_fix.apply(tiny())
    ids, mask = batch(ROWS)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(input_ids=ids, attention_mask=mask, output_attentions=True).attentions
    assert [weights.shape for weights in attentions] == [(3, 4, 40, 40)] * 3
    assert torch.equal(padded(model), padded(rope_pad_fix.apply(tiny(attention="eager"))))
    assert distance(model, lone(tiny(attention="eager"))) < CLOSE
    model.set_attn_implementation("sdpa")
    assert torch.equal(padded(model), padded(rope_pad_fix.apply(tiny())))


def test_attention_implementation_changed_while_patched_stays_after_remove():
    model = rope_pad_fix.apply(tiny())
    model.set_attn_implementation("eager")
    rope_pad_fix.remove(model)
    assert model.config._attn_implementation == "eager"
    assert torch.equal(padded(model), padded(tiny(attention="eager")))


def test_attention_implementation_can_be_changed_on_a_patched_base_model():
    model = rope_pad_fix.apply(tiny().model)
    model.set_attn_implementation("eager")
    assert torch.equal(padded(model), padded(rope_pad_fix.apply(tiny(attention="eager").model)))


def test_attentions_can_be_asked_for_in_the_configuration_of_a_patched_base_model(tmp_path):
    model = rope_pad_fix.apply(tiny(attention="eager").model)
    model.config.output_attentions = True
    ids, mask = batch(ROWS)
    assert [weights.shape for weights in model(input_ids=ids, attention_mask=mask).attentions] == [(3, 4, 40, 40)] * 3
    model.save_pretrained(tmp_path)
    assert rope_pad_fix.remove(model).config.output_attentions


def test_an_attention_implementation_that_cannot_run_row_by_row_is_refused_by_apply():
    model = tiny()
    model.config._attn_implementation_internal = "flex_attention"
    before = snapshot(model)
    with pytest.raises(UnsupportedModelError, match=r"'flex_attention'.*sdpa.*level=\"positions\""):
        rope_pad_fix.apply(model)
    assert snapshot(model) == before


def test_an_attention_implementation_that_cannot_run_row_by_row_is_refused_when_called():
    model = tiny()
    expected = lone(model)
    rope_pad_fix.apply(model)
    model.config._attn_implementation_internal = "flex_attention"
    with pytest.raises(UnsupportedModelError, match=r"'flex_attention'.*sdpa.*level=\"positions\""):
        padded(model)
    model.set_attn_implementation("sdpa")
    assert distance(model, expected) < CLOSE


# --- however the forward is reached --------------------------------------------------------------------------------

WAYS = {
    "model(...)": lambda model: model,
    "model.forward(...)": lambda model: model.forward,
    "model.model(...)": lambda model: model.model,
    "model.model.forward(...)": lambda model: model.model.forward,
    "positional": lambda model: lambda input_ids, attention_mask=None: model(input_ids, attention_mask),
    "positional forward": lambda model: lambda input_ids, attention_mask=None: model.forward(input_ids, attention_mask),
    "tuple output": lambda model: functools.partial(model, return_dict=False),
    "decoder's tuple output": lambda model: functools.partial(model.model, return_dict=False),
    "embeddings": lambda model: (
        lambda input_ids, **rest: model(inputs_embeds=model.model.embed_tokens(input_ids), **rest)
    ),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("way", WAYS)
def test_the_patched_forward_runs_however_it_is_called(way, level):
    model = tiny()
    expected = lone(WAYS[way](model))
    assert distance(WAYS[way](model), expected, ["holes"]) > WRONG
    rope_pad_fix.apply(model, level)
    assert distance(WAYS[way](model), expected) < CLOSE


def test_an_argument_given_twice_is_refused_as_python_does():
    ids, _ = batch(ROWS)
    with pytest.raises(TypeError, match="multiple values for argument 'input_ids'"):
        rope_pad_fix.apply(tiny())(ids, input_ids=ids)


def test_too_many_positional_arguments_are_refused_as_python_does():
    ids, _ = batch(ROWS)
    with pytest.raises(TypeError, match="positional arguments"):
        rope_pad_fix.apply(tiny())(ids, *[None] * 20)


# LoRA

LORA = {
    "language model": ("causal_lm", "CAUSAL_LM"),
    "classifier": ("classifier", "SEQ_CLS"),
    "base model": ("base", "FEATURE_EXTRACTION"),
}


@pytest.mark.parametrize("when", ["before", "after"])  # LoRA, seen from `apply`
@pytest.mark.parametrize("kind", LORA)
def test_lora(kind, when):
    head, task = LORA[kind]

    def stock():
        return tiny().model if head == "base" else tiny(head=head)

    reference = adapted(stock(), task_type=task)
    expected = lone(reference)
    assert distance(reference, expected, ["holes"]) > WRONG
    assert max((a - b).abs().max().item() for a, b in zip(lone(stock()), expected, strict=True)) > 0.1
    if when == "before":
        model = rope_pad_fix.apply(adapted(stock(), task_type=task))
    else:
        model = adapted(rope_pad_fix.apply(stock()), task_type=task)
    assert rope_pad_fix.status(model).decoder.startswith("base_model.model")
    assert distance(model, expected) < CLOSE
    assert torch.equal(padded(rope_pad_fix.remove(model)), padded(reference))


def test_lora_merged_and_unloaded_is_still_patched():
    expected = lone(adapted(tiny(), task_type="CAUSAL_LM"))
    model = adapted(rope_pad_fix.apply(tiny()), task_type="CAUSAL_LM").merge_and_unload()
    assert rope_pad_fix.status(model).decoder == "model"
    assert distance(model, expected) < CLOSE


def test_lora_saves_the_same_adapter(tmp_path):
    adapted(tiny(), task_type="CAUSAL_LM").save_pretrained(tmp_path / "stock")
    rope_pad_fix.apply(adapted(tiny(), task_type="CAUSAL_LM")).save_pretrained(tmp_path / "patched")
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "patched" / file).read_bytes() == (tmp_path / "stock" / file).read_bytes()


# Accelerate

PARTS = pytest.mark.parametrize("part", ["decoder", "head", "classifier"])
WHEN = pytest.mark.parametrize("when", ["before", "after"])  # the other library's change, seen from `apply`


def with_part(part):
    """A model, and the part of it under test."""
    model = tiny(head="classifier" if part == "classifier" else "causal_lm")
    return model, model.model if part == "decoder" else model


def patch_and(change, model, when, level="padding_free"):
    """Both, in the order under test; the patched model."""
    if when == "before":
        change()
    model = rope_pad_fix.apply(model, level)
    if when == "after":
        change()
    return model


@PARTS
@WHEN
def test_accelerate_hook(part, when):
    (model, module), hook = with_part(part), Counting()
    expected = lone(model)
    patch_and(lambda: add_hook_to_module(module, hook), model, when)
    assert distance(model, expected) < CLOSE
    assert distance(module.forward, lone(with_part(part)[1])) < CLOSE
    hook.calls = 0
    padded(model)
    assert hook.calls == 1


@PARTS
@WHEN
def test_accelerate_hook_removed_again(part, when):
    (model, module), hook = with_part(part), Counting()
    expected, stock = lone(model), padded(model)
    patch_and(lambda: add_hook_to_module(module, hook), model, when)
    remove_hook_from_module(module)
    assert distance(model, expected) < CLOSE
    assert torch.equal(padded(rope_pad_fix.remove(model)), stock)
    assert hook.calls == 0


@PARTS
@WHEN
def test_accelerate_hook_stays_when_the_patch_is_removed(part, when):
    (model, module), hook = with_part(part), Counting()
    stock = padded(model)
    patch_and(lambda: add_hook_to_module(module, hook), model, when)
    rope_pad_fix.remove(model)
    assert torch.equal(padded(model), stock)
    assert hook.calls == 1
    remove_hook_from_module(module)
    assert torch.equal(padded(model), stock)
    assert hook.calls == 1


@PARTS
def test_patch_and_accelerate_hook_come_and_go_in_turns(part):
    model, module = with_part(part)
    expected = lone(model)
    for _ in range(3):
        rope_pad_fix.apply(model)
        add_hook_to_module(module, Counting())
        rope_pad_fix.remove(model)
        remove_hook_from_module(module)
    assert distance(rope_pad_fix.apply(model), expected) < CLOSE


@COPIES
def test_a_copy_of_a_patched_model_with_an_accelerate_hook(copied):
    model = rope_pad_fix.apply(tiny())
    add_hook_to_module(model.model, Counting())
    if copied is not copy.deepcopy:  # Accelerate's hooks themselves cannot be pickled
        remove_hook_from_module(model.model)
    twin = copied(model)
    rope_pad_fix.remove(model)
    assert torch.equal(padded(twin), padded(rope_pad_fix.apply(tiny())))


@pytest.mark.usefixtures("accelerator_state")
@WHEN
def test_accelerator_prepare_and_unwrap(when):
    model, accelerator = tiny(), Accelerator(cpu=True)
    expected = lone(model)
    patch_and(lambda: accelerator.prepare(model), model, when)
    assert distance(model, expected) < CLOSE
    assert accelerator.unwrap_model(model) is model
    assert distance(model, expected) < CLOSE


@pytest.mark.usefixtures("accelerator_state")
@WHEN
@pytest.mark.parametrize("keep", [True, False])
def test_accelerator_mixed_precision_and_unwrap(when, keep):
    model, accelerator = tiny(), Accelerator(cpu=True, mixed_precision="bf16")
    expected = lone(model)
    patch_and(lambda: accelerator.prepare(model), model, when)
    assert CLOSE < distance(model, expected) < WRONG  # it is bfloat16, and the rows are right
    unwrapped = accelerator.unwrap_model(model, keep_fp32_wrapper=keep)
    assert distance(unwrapped, expected) < (WRONG if keep else CLOSE)
    assert type(rope_pad_fix.remove(unwrapped)) is LlamaForCausalLM


@WHEN
def test_distributed_data_parallel(tmp_path, when):
    model = tiny()
    expected = lone(model)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        if when == "before":
            model = rope_pad_fix.apply(torch.nn.parallel.DistributedDataParallel(model))
        else:
            model = torch.nn.parallel.DistributedDataParallel(rope_pad_fix.apply(model))
        assert rope_pad_fix.status(model).decoder == "module.model"
        assert distance(model, expected) < CLOSE
    finally:
        torch.distributed.destroy_process_group()


# Other libraries


def rebound_to_the_class(module):
    """As Liger-Kernel does: another function in place of ``forward``, here one that calls the class's own."""
    original = type(module).forward

    def forward(self, *args, **kwargs):
        return original(self, *args, **kwargs)

    module.forward = types.MethodType(forward, module)


def rebound_to_the_instance(module):
    """Around whatever ``module.forward`` was."""
    original = module.forward

    @functools.wraps(original)
    def forward(*args, **kwargs):
        return original(*args, **kwargs)

    module.forward = forward


@PARTS
@WHEN
@pytest.mark.parametrize("rebind", [rebound_to_the_class, rebound_to_the_instance])
@pytest.mark.parametrize("level", LEVELS)
def test_forward_rebound_by_another_library(rebind, level, part, when):
    model, module = with_part(part)
    expected, stock = lone(model), padded(model)
    patch_and(lambda: rebind(module), model, when, level)
    assert distance(model, expected) < CLOSE
    assert distance(model.forward, expected) < CLOSE
    assert torch.equal(padded(rope_pad_fix.remove(model)), stock)


def test_a_forward_rebound_by_another_library_is_called():
    """It does not have to do what the model's own does."""
    for part in ("decoder", "head", "classifier"):
        model, module = with_part(part)
        rope_pad_fix.apply(model)
        called, original = [], module.forward
        module.forward = lambda *args, original=original, called=called, **kwargs: (
            called.append(1) or original(*args, **kwargs)
        )
        padded(model)
        assert called == [1], part


@PARTS
def test_a_rebound_forward_can_be_deleted_again(part):
    model, module = with_part(part)
    expected = padded(rope_pad_fix.apply(model))
    rebound_to_the_instance(module)
    del module.forward
    assert torch.equal(padded(model), expected)
    with pytest.raises(AttributeError, match="forward"):
        del module.forward


def test_labels_are_stripped_once_under_a_rebound_head():
    ids, mask = batch(ROWS, "right")
    labels = ids.masked_fill(mask == 0, -100)
    model = rope_pad_fix.apply(tiny())
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    rebound_to_the_instance(model)
    assert torch.equal(model(input_ids=ids, attention_mask=mask, labels=labels).loss, loss)


@pytest.mark.parametrize("part", ["decoder", "head"])
def test_a_rebound_forward_that_drops_keyword_arguments_is_an_error_that_says_so(part):
    model, module = with_part(part)
    expected = padded(rope_pad_fix.apply(model))
    original = type(module).forward

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, use_cache=None, **dropped):
        return original(
            self, input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=use_cache
        )

    module.forward = types.MethodType(forward, module)
    with pytest.raises(RuntimeError, match=r"does not pass its keyword arguments on.*level=\"positions\""):
        padded(model)
    del module.forward
    assert torch.equal(padded(model), expected)


def watched(module):
    """The shapes that forward hooks of a module see: of its input, and of its output."""
    seen = []
    module.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape), with_kwargs=True)
    module.register_forward_hook(lambda _, args, output: seen.append(output[0].shape))
    return seen


def test_a_subclass_put_on_the_module_by_another_library():
    """As FSDP2 does; taken off again before `remove`."""
    model = tiny()
    expected, tokens = lone(model), model.generate(ROWS[0][None], max_new_tokens=4, do_sample=False)
    rope_pad_fix.apply(model)
    patched = [(module, type(module)) for module in (model, model.model)]
    for module, cls in patched:
        module.__class__ = type(f"Sharded{cls.__name__}", (cls,), {})
    assert rope_pad_fix.status(model) == Status("batch_invariant", "llama", "model", ("", "model"))
    assert distance(model, expected) < CLOSE
    assert torch.equal(model.generate(ROWS[0][None], max_new_tokens=4, do_sample=False), tokens)
    assert torch.equal(padded(copy.deepcopy(model)), padded(model))
    for module, cls in patched:
        module.__class__ = cls
    assert torch.equal(padded(rope_pad_fix.remove(model)), padded(tiny()))


@pytest.mark.parametrize(("part", "width"), [("decoder", 64), ("head", 128)])
def test_forward_hooks_of_the_called_module_see_the_padded_batch(part, width):
    model, module = with_part(part)
    rope_pad_fix.apply(model)
    seen = watched(module)
    ids, mask = batch(ROWS)
    for _ in range(2):
        module(input_ids=ids, attention_mask=mask)
    assert seen == [ids.shape, (*ids.shape, width)] * 2
    rope_pad_fix.remove(model)
    module(input_ids=ids, attention_mask=mask)
    assert seen == [ids.shape, (*ids.shape, width)] * 3


def test_forward_hooks_of_a_decoder_under_its_head_see_the_packed_batch():
    """A head packs before its decoder does; hooks on the module that was called see the padded batch."""
    model = rope_pad_fix.apply(tiny())
    seen = watched(model.model)
    ids, mask = batch(ROWS)
    model(input_ids=ids, attention_mask=mask)
    total = int(mask.sum())
    assert seen == [(1, total), (1, total, 64)]


def test_forward_hooks_of_a_decoder_under_its_head_fire_once_a_call():
    model = rope_pad_fix.apply(tiny())
    seen = watched(model.model)
    padded(model)
    assert len(seen) == 2


def test_a_forward_pre_hook_may_change_the_batch():
    model = rope_pad_fix.apply(tiny())
    ids, mask = batch(ROWS)
    expected = padded(model, "left")
    model.register_forward_pre_hook(lambda _, args, kwargs: (args, kwargs | {"attention_mask": mask}), with_kwargs=True)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, expected)


@pytest.mark.parametrize("part", ["decoder", "head"])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_at_level_positions(part, fullgraph):
    model = tiny(num_hidden_layers=1)
    module = model.model if part == "decoder" else model
    expected = lone(module)
    eager = padded(rope_pad_fix.apply(module, "positions"))
    compiled = torch.compile(module, backend="eager", fullgraph=fullgraph)
    try:
        assert torch.equal(padded(compiled), eager)
        assert distance(compiled, expected, ["holes"]) < CLOSE
    finally:
        torch._dynamo.reset()


def test_two_threads_may_use_one_model():
    model = rope_pad_fix.apply(tiny())
    batches = [batch(ragged((5, 23, 40), seed=1), "left"), batch(ragged((31, 2, 9, 17), seed=2), "holes")]

    def run(ids, mask):
        with torch.no_grad():
            return model(input_ids=ids, attention_mask=mask).logits

    expected = [run(*each) for each in batches]
    results = [[], []]
    start = threading.Barrier(2)

    def work(i):
        start.wait()
        results[i] += [run(*batches[i]) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outputs, alone in zip(results, expected, strict=True):
        assert len(outputs) == 20
        assert all(torch.equal(output, alone) for output in outputs)


# --- changes to the model while it is patched ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("convert", "tolerance"),
    [
        (lambda model: model.to(torch.bfloat16), 0.2),
        (lambda model: model.half(), 0.02),
        (lambda model: model.to(torch.bfloat16).float(), CLOSE),
    ],
    ids=["bfloat16", "half", "float"],
)
def test_dtype_changed_while_patched(convert, tolerance):
    model = convert(rope_pad_fix.apply(tiny()))
    stock = convert(tiny())
    assert rope_pad_fix.status(model).level == "batch_invariant"
    assert padded(model).dtype == stock.dtype
    assert distance(model, lone(stock)) < tolerance < WRONG < distance(stock, lone(stock), ["holes"])
    assert torch.equal(padded(rope_pad_fix.remove(model)), padded(stock))


def test_embeddings_resized_while_patched():
    model = rope_pad_fix.apply(tiny())
    state = rope_pad_fix.status(model)
    model.resize_token_embeddings(140, mean_resizing=False)
    assert rope_pad_fix.status(model) == state
    assert (model.config.vocab_size, model.model.config.vocab_size) == (140, 140)
    assert padded(model).shape[-1] == 140
    assert torch.equal(padded(model)[..., :128], padded(rope_pad_fix.apply(tiny())))
    rope_pad_fix.remove(model)
    assert torch.equal(padded(model)[..., :128], padded(tiny()))


def test_training_mode_and_gradient_checkpointing_can_be_switched_while_patched():
    ids, mask = batch(ROWS)
    model = rope_pad_fix.apply(tiny()).train()
    model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert rope_pad_fix.status(model.eval()).level == "batch_invariant"


# --- families and register -----------------------------------------------------------------------------------------

MISTRAL = Family("mistral", decoders=("MistralModel",), causal_lms=("MistralForCausalLM",))


def test_families_are_sorted_and_hold_the_built_in_ones():
    names = [family.name for family in rope_pad_fix.families()]
    assert names == sorted(names)
    assert {"llama", "qwen2", "glm", "glm4"} <= set(names)


class OwnModel(LlamaModel):
    """A user's subclass, in no family."""


class OwnForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = OwnModel(config)


@COPIES
def test_a_subclass_is_found_by_the_names_of_its_bases(copied):
    stock = tiny()
    own = OwnForCausalLM(stock.config).eval()
    own.load_state_dict(stock.state_dict())
    rope_pad_fix.apply(own)
    assert rope_pad_fix.status(own) == Status("batch_invariant", "llama", "model", ("", "model"))
    assert distance(own, lone(stock)) < CLOSE
    assert torch.equal(padded(copied(own)), padded(own))
    rope_pad_fix.remove(own)
    assert (type(own), type(own.model)) == (OwnForCausalLM, OwnModel)


class OwnClassifier(LlamaForSequenceClassification):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 2
        return output


def test_a_subclass_keeps_the_forward_it_overrides():
    stock = tiny(head="classifier")
    own = OwnClassifier(stock.config).eval()
    own.load_state_dict(stock.state_dict())
    expected = [2 * logits for logits in lone(stock)]
    assert distance(rope_pad_fix.apply(own), expected) < CLOSE


@pytest.mark.usefixtures("registry")
def test_a_registered_family_is_patched():
    model = mistral()
    expected = lone(model)
    assert distance(model, expected, ["holes"]) > CLOSE
    with pytest.raises(UnsupportedModelError, match=r"MistralForCausalLM.*level=\"positions\" works"):
        rope_pad_fix.apply(model)
    rope_pad_fix.register(MISTRAL)
    assert MISTRAL in rope_pad_fix.families()
    rope_pad_fix.apply(model)
    assert rope_pad_fix.status(model) == Status("batch_invariant", "mistral", "model", ("", "model"))
    assert distance(model, expected) < CLOSE


@pytest.mark.usefixtures("registry")
def test_a_family_without_heads_leaves_the_head_alone():
    rope_pad_fix.register(Family("mistral", decoders=("MistralModel",)))
    model = mistral()
    expected = lone(model)
    rope_pad_fix.apply(model)
    assert rope_pad_fix.status(model).modules == ("model",)
    assert distance(model, expected) < CLOSE


def test_an_unregistered_family_runs_at_level_positions():
    model = mistral()
    expected = lone(model)
    before = snapshot(model)
    assert distance(model, expected, ["holes"]) > CLOSE
    rope_pad_fix.apply(model, "positions")
    assert rope_pad_fix.status(model) == Status("positions", "MistralModel", "model", ("model",))
    assert distance(model, expected) < CLOSE
    assert snapshot(rope_pad_fix.remove(model)) == before
    assert type(model.model) is MistralModel


@pytest.mark.usefixtures("registry")
def test_register_replaces_the_family_of_the_same_name():
    rope_pad_fix.register(MISTRAL)
    wider = Family("mistral", ("MistralModel", "OtherModel"))
    rope_pad_fix.register(wider)
    assert [family for family in rope_pad_fix.families() if family.name == "mistral"] == [wider]


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("family", "error", "message"),
    [
        ("mistral", TypeError, r"must be a rope_pad_fix\.Family, got str"),
        (Family("empty", decoders=()), ValueError, "'empty' names no decoder"),
        (Family("mine", decoders=("LlamaModel",)), ValueError, "LlamaModel of family 'mine' .* belongs to 'llama'"),
        (
            Family("mine", decoders=("MineModel",), causal_lms=("Qwen2ForCausalLM",)),
            ValueError,
            "Qwen2ForCausalLM of family 'mine' already belongs to 'qwen2'",
        ),
        (Family("mine", decoders="MineModel"), TypeError, "decoders of family 'mine' must be a tuple"),
    ],
)
def test_register_refuses_what_is_no_family(family, error, message):
    before = rope_pad_fix.families()
    with pytest.raises(error, match=message):
        rope_pad_fix.register(family)
    assert rope_pad_fix.families() == before
