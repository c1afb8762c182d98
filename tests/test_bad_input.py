"""Bad input gets an error that names the argument, the value and the remedy; hostile input gets its result."""

from __future__ import annotations

import copy
import re
import warnings

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaModel,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import QuantizedCache

import rope_pad_fix
from rope_pad_fix import UnsupportedCacheError, UnsupportedModelError

from .conftest import LAYOUTS, batch, ragged, tiny

ROWS = ragged()
IDS, MASK = batch(ROWS)  # [3, 40], padded on the left


def run(model, ids=IDS, mask=MASK, **kwargs):
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, **kwargs)


@pytest.fixture
def model():
    """A patched model that has to be as it was when the test is over, whatever errors it has raised."""
    model = rope_pad_fix.apply(tiny())
    before, status = run(model).logits, rope_pad_fix.status(model)
    yield model
    assert rope_pad_fix.status(model) == status
    assert torch.equal(run(model).logits, before)


def refused(error, *parts):
    """An error whose message holds all of these texts, in this order."""
    return pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, parts)))


# --- apply ---------------------------------------------------------------------------------------------------------

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 128,
}


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=128, pad_token_id=0)).eval()


def bert():
    torch.manual_seed(0)
    return BertModel(BertConfig(**SMALL, pad_token_id=0)).eval()


def roberta():
    return RobertaModel(RobertaConfig(**SMALL, pad_token_id=0))


def t5():
    return T5ForConditionalGeneration(T5Config(d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, vocab_size=128))


UNSUPPORTED = {
    "GPT2LMHeadModel": (gpt2, 'level="positions" works'),
    "BertModel": (bert, 'level="positions" works'),
    "RobertaModel": (roberta, "no level works"),  # its positions start behind the pad token, not at 0
    "T5ForConditionalGeneration": (t5, "no level works"),
    "Linear": (lambda: torch.nn.Linear(2, 2), "no level works"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_model_of_no_family_is_refused_by_name_and_left_as_it_was(name):
    build, remedy = UNSUPPORTED[name]
    model = build()
    before = [(type(module), dict(vars(module))) for module in model.modules()]
    with refused(UnsupportedModelError, name, "chatglm, glm, glm4, glm4_moe, glm4_moe_lite, llama", remedy):
        rope_pad_fix.apply(model)
    if remedy == "no level works":
        with refused(UnsupportedModelError, name, remedy):
            rope_pad_fix.apply(model, "positions")
    for (cls, attributes), module in zip(before, model.modules(), strict=True):
        assert type(module) is cls
        assert vars(module).keys() == attributes.keys()
        assert all(vars(module)[key] is value for key, value in attributes.items())
    assert rope_pad_fix.status(model) is None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("build", [gpt2, bert])
def test_the_level_that_the_error_names_does_work(build, layout):
    model = build()
    ids, mask = batch(ROWS, layout)
    alone = [run(model, row[None], None)[0][0] for row in ROWS]
    outputs = run(rope_pad_fix.apply(model, "positions"), ids, mask)[0]
    for output, real, expected in zip(outputs, mask.bool(), alone, strict=True):
        assert (output[real] - expected).abs().max() < 1e-4


@pytest.mark.parametrize("level", ["fast", "", None, 3])
def test_an_unknown_level_is_refused_with_the_known_ones(model, level):
    with refused(ValueError, "level", repr(level), "'positions'", "'padding_free'"):
        rope_pad_fix.apply(model, level=level)


@pytest.mark.parametrize("value", ["a/name", None, {}, LlamaForCausalLM, LlamaConfig()])
@pytest.mark.parametrize("function", ["apply", "remove", "status"])
def test_what_is_no_module_is_refused(function, value):
    with refused(TypeError, "model must be a torch.nn.Module, got", type(value).__name__):
        getattr(rope_pad_fix, function)(value)


def test_what_is_no_module_is_refused_by_applied():
    with refused(TypeError, "model must be a torch.nn.Module, got str"), rope_pad_fix.applied("a/name"):
        pass


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 32,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_frequencies_that_depend_on_the_batch_are_refused(rope):
    model = tiny(rope_parameters=rope)
    with refused(UnsupportedModelError, "LlamaForCausalLM", repr(rope["rope_type"]), 'level="positions" works'):
        rope_pad_fix.apply(model)
    assert rope_pad_fix.status(model) is None
    assert torch.isfinite(run(rope_pad_fix.apply(model, "positions")).logits).all()


def test_a_level_that_is_refused_leaves_the_level_before():
    model = rope_pad_fix.apply(
        tiny(rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}), "positions"
    )
    before = run(model).logits
    with pytest.raises(UnsupportedModelError):
        rope_pad_fix.apply(model, "padding_free")
    assert rope_pad_fix.status(model).level == "positions"
    assert torch.equal(run(model).logits, before)


# --- masks ---------------------------------------------------------------------------------------------------------

BAD_MASKS = {
    "rows missing": (MASK[:2], ["attention_mask has 2 rows", "the input has 3"]),
    "rows too many": (MASK[[0, 1, 2, 0]], ["attention_mask has 4 rows", "the input has 3"]),
    "too short": (MASK[:, :-1], ["attention_mask has 39 columns", "the input adds 40", "must cover all 40"]),
    "too long": (
        torch.cat([MASK, MASK], 1),
        ["attention_mask has 80 columns", "the input adds 40", "must cover all 40"],
    ),
    "1-D": (MASK[0], ["attention_mask must", "two", "(40,)"]),
    "3-D": (MASK[:, None], ["attention_mask must", "two", "(3, 1, 40)"]),
    "5-D": (MASK[:, None, None, None], ["attention_mask must", "two", "(3, 1, 1, 1, 40)"]),
}


@pytest.mark.parametrize("kind", BAD_MASKS)
def test_a_mask_of_another_shape_is_refused(model, kind):
    mask, message = BAD_MASKS[kind]
    with refused(ValueError, *message):
        run(model, mask=mask)


@pytest.mark.parametrize("kind", [kind for kind in BAD_MASKS if "D" not in kind])
def test_a_mask_of_another_shape_is_refused_at_level_positions(model, kind):
    mask, message = BAD_MASKS[kind]
    with rope_pad_fix.applied(model, "positions"), refused(ValueError, *message):
        run(model, mask=mask)


@pytest.mark.parametrize("value", [2.0, -1.0, 0.5, float("-inf"), float("nan")])
def test_a_mask_of_other_values_is_refused(model, value):
    mask = MASK.float()
    mask[1, -1] = value
    with refused(ValueError, "attention_mask must hold 1", "found " + str(value), "four-dimensional"):
        run(model, mask=mask)


@pytest.mark.parametrize("value", [2, -1])
def test_an_integer_mask_of_other_values_is_refused(model, value):
    with refused(ValueError, "attention_mask must hold 1", "found " + str(value)):
        run(model, mask=MASK * value)


def test_an_additive_mask_of_two_dimensions_is_refused(model):
    additive = torch.zeros(3, 40).masked_fill(MASK == 0, torch.finfo(torch.float32).min)
    with refused(ValueError, "attention_mask must hold 1", "additive mask", "four-dimensional"):
        run(model, mask=additive)


@pytest.mark.parametrize("mask", [MASK.tolist(), MASK.numpy()], ids=["list", "numpy"])
def test_a_mask_that_is_no_tensor_is_refused(model, mask):
    with refused(TypeError, "attention_mask must be a torch.Tensor, got", type(mask).__name__):
        run(model, mask=mask)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int32, torch.float16, torch.bfloat16, torch.float32]
)
@pytest.mark.parametrize("level", ["positions", "padding_free"])
def test_a_mask_of_any_dtype_is_accepted(model, dtype, level):
    with rope_pad_fix.applied(model, level):
        assert torch.equal(run(model, mask=MASK.to(dtype)).logits, run(model).logits)


# --- other arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["head", "decoder", "classifier"])
def test_ids_and_embeddings_are_one_or_the_other(model, part):
    if part == "classifier":
        model = rope_pad_fix.apply(tiny(head="classifier"))
    decoder, module = model.model, model.model if part == "decoder" else model
    name = type(module).__name__
    with refused(ValueError, name, "exactly one of input_ids and inputs_embeds", "got both"):
        module(input_ids=IDS, inputs_embeds=decoder.embed_tokens(IDS), attention_mask=MASK)
    with refused(ValueError, name, "exactly one of input_ids and inputs_embeds", "got neither"):
        module(attention_mask=MASK)


def test_ids_and_embeddings_of_another_shape_are_refused(model):
    with refused(ValueError, "input_ids must be [batch, length]", "(40,)"):
        run(model, ids=IDS[0])
    with refused(ValueError, "inputs_embeds must be [batch, length, hidden]", "(40, 64)"):
        model(inputs_embeds=torch.zeros(40, 64))


def test_labels_of_another_shape_are_refused(model):
    with refused(ValueError, "labels", "(3, 39)", "(3, 40)"):
        run(model, labels=IDS[:, 1:])
    with refused(ValueError, "labels", "(2, 40)", "(3, 40)"):
        run(model, labels=IDS[:2])


@pytest.mark.parametrize("shape", [(3, 41), (3, 39), (2, 40)])
def test_positions_of_another_shape_are_refused(model, shape):
    with refused(ValueError, "position_ids", str(shape), "(3, 40)"):
        run(model, position_ids=torch.zeros(shape, dtype=torch.long))


def test_positions_may_be_the_same_for_all_rows(model):
    positions = torch.arange(40)[None]
    assert torch.equal(
        run(model, position_ids=positions).logits, run(model, position_ids=positions.expand(3, -1)).logits
    )


# --- caches --------------------------------------------------------------------------------------------------------


def prefilled(model, rows=slice(None)):
    """A cache with the three rows in it, 40 slots."""
    return run(model, IDS[rows], MASK[rows], use_cache=True).cache


NEXT = torch.full((3, 1), 7)
LONGER = torch.cat([MASK, MASK.new_ones(3, 1)], 1)


def test_two_caches_are_refused(model):
    with refused(ValueError, "one of cache and past_key_values"):
        run(model, cache=DynamicCache(), past_key_values=DynamicCache())


def test_a_mask_that_asks_for_tokens_the_cache_does_not_hold_is_refused(model):
    with refused(ValueError, "attention_mask contradicts the cache", "extended"):
        run(model, NEXT, torch.ones_like(LONGER), cache=prefilled(model))


@pytest.mark.parametrize("mask", [LONGER[:, 40:], MASK, torch.cat([LONGER, LONGER[:, 40:]], 1)])
def test_a_mask_that_does_not_fit_the_cache_is_refused(model, mask):
    message = f"attention_mask has {mask.shape[1]} columns", "cache holds 40 slots", "input adds 1", "must cover all 41"
    with refused(ValueError, *message):
        run(model, NEXT, mask, cache=prefilled(model))


@pytest.mark.parametrize("mask", [LONGER[:, 40:], MASK])
def test_a_mask_that_is_too_short_for_the_cache_is_refused_at_level_positions(model, mask):
    message = f"attention_mask has {mask.shape[1]} columns", "cache holds 40 slots", "input adds 1", "must cover all 41"
    with rope_pad_fix.applied(model, "positions"), refused(ValueError, *message):
        run(model, NEXT, mask, cache=prefilled(model))


def test_a_cache_of_another_batch_is_refused(model):
    with refused(ValueError, "cache holds 3 rows", "input has 2"):
        run(model, NEXT[:2], LONGER[:2], cache=prefilled(model))
    with refused(ValueError, "cache holds 2 rows", "input has 3"):
        run(model, NEXT, LONGER, cache=prefilled(model, slice(2)))


def test_a_padded_cache_of_another_batch_is_refused(model):
    with rope_pad_fix.applied(model, "positions"):
        cache = prefilled(model, slice(2))
    with refused(ValueError, "cache holds 2 rows", "input has 3"):
        run(model, NEXT, LONGER, cache=cache)


def test_a_refused_call_leaves_the_cache_as_it_was(model):
    cache, twin = prefilled(model), prefilled(model)
    for ids, mask in [(NEXT, torch.ones_like(LONGER)), (NEXT, MASK), (NEXT[:2], LONGER[:2])]:
        with pytest.raises(ValueError, match="cache"):
            run(model, ids, mask, cache=cache)
    assert cache.get_seq_length() == 40
    assert torch.equal(run(model, NEXT, LONGER, cache=cache).logits, run(model, NEXT, LONGER, cache=twin).logits)


def of_quantised_layers(config):
    cache = DynamicCache()
    cache.layers = QuantizedCache("fp8", config).layers
    return cache


def legacy(config):
    return tuple((torch.zeros(3, 2, 4, 16), torch.zeros(3, 2, 4, 16)) for _ in range(config.num_hidden_layers))


FOREIGN_CACHES = {
    "StaticCache": lambda config: StaticCache(config=config, max_cache_len=64),
    "QuantizedCache": lambda config: QuantizedCache("fp8", config),
    "Fp8QuantizedLayer": of_quantised_layers,
    "offloaded DynamicCache": lambda config: DynamicCache(offloading=True),
    "tuple": legacy,
}


@pytest.mark.parametrize("name", FOREIGN_CACHES)
def test_a_cache_that_cannot_be_kept_row_by_row_is_refused(model, name):
    with refused(UnsupportedCacheError, name, "DynamicCache", 'level="positions"'):
        run(model, cache=FOREIGN_CACHES[name](model.config))


@pytest.mark.parametrize("kind", ["static", "offloaded_static"])
def test_generate_with_a_static_cache_is_refused(model, kind):
    with refused(UnsupportedCacheError, "StaticCache", "DynamicCache", 'level="positions"'):
        model.generate(IDS, attention_mask=MASK, max_new_tokens=3, do_sample=False, cache_implementation=kind)


def test_generate_with_an_offloaded_cache_is_refused(model):
    with refused(UnsupportedCacheError, "offloaded DynamicCache", 'level="positions"'):
        model.generate(IDS, attention_mask=MASK, max_new_tokens=3, do_sample=False, cache_implementation="offloaded")


def test_generate_with_a_static_cache_works_at_the_level_that_the_error_names(model):
    settings = {"attention_mask": MASK, "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(IDS, **settings)
    with rope_pad_fix.applied(model, "positions"):
        assert torch.equal(model.generate(IDS, **settings, cache_implementation="static"), expected)


# --- warnings ------------------------------------------------------------------------------------------------------


def test_pads_without_a_mask_are_warned_of(model):
    with pytest.warns(UserWarning, match=r"input_ids contain the pad token 0 .* no attention_mask.*Pass the"):
        run(model, mask=None)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: run(model),
        lambda model: run(model, ROWS[0][None], None),
        lambda model: run(model, torch.zeros(3, 1, dtype=torch.long), None),
        lambda model: model(inputs_embeds=model.model.embed_tokens(IDS)),
    ],
    ids=["mask", "no pads", "one token", "embeddings"],
)
def test_nothing_else_is_warned_of(model, call):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(model)


def test_pads_are_not_looked_for_where_there_is_no_pad_token():
    model = rope_pad_fix.apply(tiny(pad_token_id=None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model, mask=None)


# --- position_ids --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [MASK[0], MASK[:, None], torch.tensor(1)])
def test_position_ids_of_a_mask_that_is_not_two_dimensional_are_refused(mask):
    with refused(ValueError, "attention_mask must be [batch, slots]", str(tuple(mask.shape))):
        rope_pad_fix.position_ids(mask)


@pytest.mark.parametrize("length", [-1, 41])
def test_position_ids_of_a_length_that_the_mask_does_not_have_are_refused(length):
    with refused(ValueError, "query_length must lie between 0 and the 40 columns", str(length)):
        rope_pad_fix.position_ids(MASK, length)


# --- hostile input: rows without a token ---------------------------------------------------------------------------

EVERY_KIND = pytest.mark.parametrize(
    ("dtype", "attention"),
    [(torch.float32, "sdpa"), (torch.float32, "eager"), (torch.bfloat16, "sdpa"), (torch.bfloat16, "eager")],
    ids=lambda value: str(value).removeprefix("torch."),
)


def with_empty_row(ids, mask, place):
    """The batch with a row of padding put in at a place, and the places of the other rows."""
    others = [i for i in range(len(ids) + 1) if i != place]
    new_ids, new_mask = ids.new_zeros(len(ids) + 1, ids.shape[1]), mask.new_zeros(len(ids) + 1, ids.shape[1])
    new_ids[others], new_mask[others] = ids, mask
    return new_ids, new_mask, others


@EVERY_KIND
@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_empty_row_is_zero_and_its_neighbours_do_not_notice(dtype, attention, place, layout):
    model = rope_pad_fix.apply(tiny(dtype=dtype, attention=attention))
    ids, mask = batch(ROWS, layout)
    expected = run(model, ids, mask, output_hidden_states=True)
    ids, mask, others = with_empty_row(ids, mask, place)
    got = run(model, ids, mask, output_hidden_states=True)
    for output, reference in zip(
        (got.logits, *got.hidden_states), (expected.logits, *expected.hidden_states), strict=True
    ):
        assert torch.equal(output[others], reference)
        assert torch.equal(output[place], torch.zeros_like(output[place]))


@EVERY_KIND
def test_an_empty_row_in_generate(dtype, attention):
    model = rope_pad_fix.apply(tiny(dtype=dtype, attention=attention))
    ids, mask, others = with_empty_row(IDS, MASK, 1)
    settings = {"max_new_tokens": 6, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    got = model.generate(ids, attention_mask=mask, **settings)
    assert all(torch.isfinite(scores).all() for scores in got.scores)
    if dtype == torch.float32:  # while decoding, matrix kernels see the row count
        expected = model.generate(IDS, attention_mask=MASK, **settings)
        assert torch.equal(got.sequences[others], expected.sequences)


def test_an_empty_row_has_no_loss_and_no_gradient():
    model = rope_pad_fix.apply(tiny())
    model(input_ids=IDS, attention_mask=MASK, labels=IDS).loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    ids, mask, _ = with_empty_row(IDS, MASK, 1)
    model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(model.parameters(), gradients, strict=True))


def test_an_empty_row_of_a_classifier_is_zero():
    model = rope_pad_fix.apply(tiny(head="classifier"))
    ids, mask, others = with_empty_row(IDS, MASK, 1)
    logits = run(model, ids, mask).logits
    assert torch.equal(logits[others], run(model).logits)
    assert torch.equal(logits[1], torch.zeros(2))


@EVERY_KIND
@pytest.mark.parametrize("head", ["causal_lm", "classifier"])
def test_a_batch_of_empty_rows_is_zero(dtype, attention, head):
    model = rope_pad_fix.apply(tiny(head=head, dtype=dtype, attention=attention))
    got = run(model, torch.zeros_like(IDS), torch.zeros_like(MASK), output_hidden_states=True)
    for output in (got.logits, *got.hidden_states):
        assert output.shape[0] == 3
        assert torch.equal(output, torch.zeros_like(output))


def test_generate_from_a_batch_of_empty_rows_is_finite(model):
    got = model.generate(
        torch.zeros_like(IDS),
        attention_mask=torch.zeros_like(MASK),
        max_new_tokens=3,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    assert got.sequences.shape == (3, 43)
    assert all(torch.isfinite(scores).all() for scores in got.scores)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)])
def test_a_batch_of_nothing(shape):
    """Whatever the stock model does."""
    ids, mask = torch.ones(shape, dtype=torch.long), torch.ones(shape, dtype=torch.long)
    try:
        expected = run(tiny(), ids, mask).logits.shape
    except Exception as error:
        with pytest.raises(type(error)):
            run(rope_pad_fix.apply(tiny()), ids, mask)
    else:
        assert run(rope_pad_fix.apply(tiny()), ids, mask).logits.shape == expected


# --- hostile input: padding ----------------------------------------------------------------------------------------


def real(model, ids, mask, **kwargs):
    """The logits of the real tokens, row after row."""
    return run(model, ids, mask, **kwargs).logits[mask.bool()]


@EVERY_KIND
@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_far_beyond_the_longest_position_changes_no_bit(dtype, attention, layout):
    model = rope_pad_fix.apply(tiny(dtype=dtype, attention=attention))
    assert torch.equal(real(model, *batch(ROWS, layout, extra=500)), real(model, IDS, MASK))


@EVERY_KIND
def test_holes_everywhere_change_no_bit(dtype, attention):
    model = rope_pad_fix.apply(tiny(dtype=dtype, attention=attention))
    generator = torch.Generator().manual_seed(0)
    mask = (torch.rand(8, 60, generator=generator) < 0.5).long()
    ids = torch.randint(3, 128, (8, 60), generator=generator)
    packed_ids, packed_mask = batch([row[real] for row, real in zip(ids, mask.bool(), strict=True)], "right")
    assert torch.equal(real(model, ids, mask), real(model, packed_ids, packed_mask))


@pytest.mark.parametrize("pad", [-100, -1, 2, 127, 10**6])
def test_what_stands_at_padding_is_never_looked_at(model, pad):
    ids = IDS.masked_fill(MASK == 0, pad)
    assert torch.equal(run(model, ids).logits, run(model).logits)


def test_embeddings_at_padding_may_be_nan(model):
    embeds = model.model.embed_tokens(IDS).detach()
    hostile = embeds.masked_fill((MASK == 0)[..., None], float("nan"))
    assert torch.equal(run(model, None, MASK, inputs_embeds=hostile).logits, run(model).logits)


def test_position_ids_at_padding_may_be_anything(model):
    positions = rope_pad_fix.position_ids(MASK)
    hostile = positions.masked_fill(MASK == 0, -(10**9))
    assert torch.equal(run(model, position_ids=hostile).logits, run(model, position_ids=positions).logits)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_a_single_token(model, layout):
    rows = ragged((1, 23, 1, 40, 1))
    logits = real(model, *batch(rows, layout))
    expected = torch.cat([run(model, row[None], None).logits[0] for row in rows])
    assert (logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("extra", [0, 7])
def test_a_batch_of_one_gives_the_bits_of_the_lone_row(model, layout, extra):
    for row in ROWS:
        assert torch.equal(real(model, *batch([row], layout, extra)), run(model, row[None], None).logits[0])


# --- hostile input: tensors ----------------------------------------------------------------------------------------


def test_tensors_that_are_not_contiguous(model):
    labels = IDS.masked_fill(MASK == 0, -100)
    expected = run(model, labels=labels)
    twisted = [x.t().contiguous().t() for x in (IDS, MASK, labels)]
    assert not any(x.is_contiguous() for x in twisted)
    got = run(model, *twisted[:2], labels=twisted[2])
    assert torch.equal(got.logits, expected.logits)
    assert torch.equal(got.loss, expected.loss)


def test_tensors_that_are_expanded(model):
    ids, mask = IDS[:1].expand(3, -1), MASK[:1].expand(3, -1)
    assert torch.equal(run(model, ids, mask).logits, run(model, ids.contiguous(), mask.contiguous()).logits)


def test_tensors_of_every_second_column(model):
    ids, mask = IDS.repeat_interleave(2, 1)[:, ::2], MASK.repeat_interleave(2, 1)[:, ::2]
    assert torch.equal(run(model, ids, mask).logits, run(model).logits)


def test_int32_ids(model):
    assert torch.equal(run(model, IDS.int()).logits, run(model).logits)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_embeddings_that_require_a_gradient_get_that_of_the_lone_row_and_zero_at_padding(layout):
    model = rope_pad_fix.apply(tiny())
    ids, mask = batch(ROWS, layout)
    embeds = model.model.embed_tokens(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embeds, attention_mask=mask).logits
    logits[mask.bool()].square().sum().backward()
    assert torch.equal(embeds.grad[mask == 0], torch.zeros_like(embeds.grad[mask == 0]))
    for row, gradient, real in zip(ROWS, embeds.grad, mask.bool(), strict=True):
        alone = model.model.embed_tokens(row[None]).detach().requires_grad_()
        model(inputs_embeds=alone).logits.square().sum().backward()
        assert (gradient[real] - alone.grad[0]).abs().max() < 1e-4 * alone.grad.abs().max()


def test_a_call_changes_none_of_its_arguments(model):
    arguments = {
        "input_ids": IDS,
        "attention_mask": MASK,
        "labels": IDS,
        "position_ids": rope_pad_fix.position_ids(MASK),
    }
    before = copy.deepcopy(arguments)
    kept = dict(arguments)
    model(**arguments)
    assert all(arguments[name] is kept[name] for name in kept)
    assert all(torch.equal(arguments[name], before[name]) for name in before)


def test_inference_mode(model):
    expected = run(model, use_cache=True)
    with torch.inference_mode():
        got = model(input_ids=IDS, attention_mask=MASK, use_cache=True)
    assert torch.equal(got.logits, expected.logits)
    assert torch.equal(
        run(model, NEXT, LONGER, cache=got.cache).logits, run(model, NEXT, LONGER, cache=expected.cache).logits
    )
