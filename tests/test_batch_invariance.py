"""Level "batch_invariant": a row's logits, keys and values, and generated tokens are the same bits alone and in any
batch. No tolerances, except where a gradient is compared with that of another product."""

import copy
import json
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn

import rope_pad_fix
from rope_pad_fix import attention, cache, calibration, decoding, linear
from rope_pad_fix.calibration import Plan
from rope_pad_fix.linear import invariant_elementwise, invariant_linear
from rope_pad_fix.rows import Run
from rope_pad_fix.verify import first_difference

from .conftest import CACHE, FAMILIES, LAYOUTS, MIXTURES, batch, ragged, tiny

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EVERY = [*FAMILIES, *MIXTURES]
LEVEL = "batch_invariant"
CPU = torch.device("cpu")
STEPS = 3


def invariant(family="llama", **options):
    return rope_pad_fix.apply(tiny(family, **options), LEVEL)


def everything(model, rows, layout="left", extra=0, steps=STEPS):
    """Of each row: the logits of its prompt and of greedy steps, their tokens, the keys and values of all of them."""
    ids, mask = batch(rows, layout, extra)
    out = model(input_ids=ids, attention_mask=mask, use_cache=True)
    found = [[out.logits[i][real == 1]] for i, real in enumerate(mask)]
    for _ in range(steps):
        token = out.logits[:, -1:].argmax(-1)
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
        out = model(input_ids=token, attention_mask=mask, use_cache=True, **{CACHE: out[CACHE]})
        for i in range(len(rows)):
            found[i] += [token[i], out.logits[i]]
    for layer in out[CACHE].layers:
        for states in (layer.keys, layer.values):
            for i, real in enumerate(mask):
                found[i].append(states[i].transpose(0, 1)[real == 1])
    return found


def same(mine, theirs):
    return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def differing(model, rows, alone=None, **options):
    """The rows of a batch that are not as alone, of all layouts."""
    alone = [everything(model, [row])[0] for row in rows] if alone is None else alone
    return [
        (layout, i)
        for layout in LAYOUTS
        for i, mine in enumerate(everything(model, rows, layout, **options))
        if not same(mine, alone[i])
    ]


def logits(model, rows, layout="left", **inputs):
    """Of each row, the logits at its tokens."""
    ids, mask = batch(rows, layout)
    out = model(input_ids=ids, attention_mask=mask, **inputs).logits
    return [out[i][real == 1] for i, real in enumerate(mask)]


def weights_of(model):
    return [*model.parameters(), *model.buffers()]


# --- every family ----------------------------------------------------------------------------------------------------

SOME = [(family, list(DTYPES)[i % 3]) for i, family in enumerate(EVERY)]  # each family in one data type
CASES = [(family, dtype, "sdpa") for family in EVERY for dtype in DTYPES] + [(*some, "eager") for some in SOME]


@pytest.mark.parametrize(("family", "dtype", "attention"), CASES)
def test_verify_is_true_and_names_a_module_at_other_levels(family, dtype, attention):
    model = tiny(family, dtype=DTYPES[dtype], attention=attention)
    options = {"cases": 3, "batch_size": 3, "max_length": 24, "new_tokens": 2}
    names = dict(model.named_modules())
    for level in (None, "padding_free", LEVEL):
        if level is not None:
            rope_pad_fix.apply(model, level)
        found = rope_pad_fix.verify(model, **options)
        assert (found.cases, found.rows) == (3, 9)
        if level == LEVEL:
            assert found
            assert found.differing == 0
            assert found.first is None
        elif level is None or dtype == "fp32":  # two rows or more round alike in the others: decoding may be equal, too
            assert not found
            assert found.differing > 0
            assert found.first is not None
            assert found.first.module in names
            assert found.first.kind == type(names[found.first.module]).__name__
            assert found.first.largest > 0


@torch.no_grad()
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_batches_of_any_size(dtype, threads):
    torch.set_num_threads(threads)
    model = invariant(dtype=DTYPES[dtype])
    lengths = torch.randint(1, 13, (33,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = ragged(lengths)
    alone = [everything(model, [row])[0] for row in rows]
    order = torch.randperm(33, generator=torch.Generator().manual_seed(1)).tolist()
    for size in (*range(1, 18), 31, 32, 33):
        chosen = order[:size]
        wrong = differing(model, [rows[i] for i in chosen], [alone[i] for i in chosen], extra=size % 3)
        assert not wrong, (size, wrong)
    if dtype == "fp32":
        rope_pad_fix.apply(model, "padding_free")
        assert differing(model, rows[:7]), "the test cannot fail"


@torch.no_grad()
@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_batches_of_some_sizes(family, dtype):
    model = invariant(family, dtype=DTYPES[dtype])
    rows = ragged([7, 1, 12, 12, 3, 20, 5, 2, 9, 30, 8])
    alone = [everything(model, [row], steps=2)[0] for row in rows]
    for size in (3, 11):
        assert not differing(model, rows[:size], alone[:size], steps=2)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_rows(dtype):
    """More keys than one block of any attention kernel, more tokens than one tile of any product."""
    model = invariant(dtype=DTYPES[dtype], max_position_embeddings=1024)
    assert not differing(model, ragged((600, 33, 1, 257, 32)))


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sliding_window(dtype):
    """A row within its window beside one beyond it, while decoding."""
    model = invariant("qwen2", dtype=DTYPES[dtype], use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert "sliding_attention" in model.config.layer_types
    assert not differing(model, ragged((3, 30, 6, 8, 1)), extra=2)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_gets_one_token_while_another_gets_several(dtype):
    """And one that begins with one token while others go on: alone these are a decode step and a prompt."""
    model = invariant(dtype=DTYPES[dtype])
    rows = ragged((6, 9, 1))
    cuts = (5, 4, 0)

    def pieces(chosen):
        """Each row cut in two, as two calls that are padded each by itself; one where a part is empty."""
        mask, cache, found = torch.zeros(len(chosen), 0, dtype=torch.long), None, [[] for _ in chosen]
        for part in ([rows[i][: cuts[i]] for i in chosen], [rows[i][cuts[i] :] for i in chosen]):
            if not any(map(len, part)):
                continue
            ids, new = batch(part, "right")
            mask = torch.cat([mask, new], 1)
            out = model(input_ids=ids, attention_mask=mask, use_cache=True, **({CACHE: cache} if cache else {}))
            cache = out[CACHE]
            for i, real in enumerate(new):
                found[i].append(out.logits[i][real == 1])
        return [torch.cat(each) for each in found]

    together = pieces([0, 1, 2])
    for i in range(3):
        assert torch.equal(pieces([i])[0], together[i]), i


# --- generate --------------------------------------------------------------------------------------------------------


def generate(model, rows, layout="left", **options):
    ids, mask = batch(rows, layout)
    options = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0} | options
    out = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, output_scores=True, **options)
    return out, out.sequences[:, ids.shape[1] :]


@pytest.mark.parametrize(("family", "dtype"), SOME)
def test_greedy_tokens_and_scores(family, dtype):
    model, rows = invariant(family, dtype=DTYPES[dtype]), ragged((5, 23, 1, 23))
    alone = [generate(model, [row]) for row in rows]
    for layout in LAYOUTS:
        out, tokens = generate(model, rows, layout)
        assert torch.equal(tokens, torch.cat([own for _, own in alone]))
        for step, scores in enumerate(out.scores):
            assert torch.equal(scores, torch.cat([own.scores[step] for own, _ in alone]))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", "fp32"), ("llama", "fp16"), ("glm", "bf16"), ("mixtral", "fp32")]
)
def test_beams(family, dtype, threads):
    torch.set_num_threads(threads)
    model, rows = invariant(family, dtype=DTYPES[dtype]), ragged((5, 23, 1, 23))
    options = {"num_beams": 3, "num_return_sequences": 2}

    def scores_of(out):
        return torch.cat([each.sequences_scores for each, _ in out])

    alone = [generate(model, [row], **options) for row in rows]
    for layout in LAYOUTS:
        together = generate(model, rows, layout, **options)
        assert torch.equal(together[1], torch.cat([tokens for _, tokens in alone]))
        assert torch.equal(together[0].sequences_scores, scores_of(alone))
    if dtype == "fp32":
        rope_pad_fix.apply(model, "padding_free")
        alone = [generate(model, [row], **options) for row in rows]
        assert not torch.equal(scores_of([generate(model, rows, **options)]), scores_of(alone)), "it cannot fail"


@pytest.mark.parametrize("mode", [{"use_cache": False}, {"max_new_tokens": 40}], ids=str)
def test_modes(mode):
    model, rows = invariant(), ragged((5, 23, 1))
    alone = [generate(model, [row], **mode) for row in rows]
    for layout in LAYOUTS:
        out, tokens = generate(model, rows, layout, **mode)
        assert torch.equal(tokens, torch.cat([own for _, own in alone]))
        for step, scores in enumerate(out.scores):
            assert torch.equal(scores, torch.cat([own.scores[step] for own, _ in alone]))


# --- what may change after apply, and what else is computed ----------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_changed_after_apply(family, dtype):
    model, rows = invariant(family, dtype=DTYPES[dtype]), ragged((5, 23, 1, 12))
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert not differing(model, rows)


@torch.no_grad()
def test_dtype_changed_after_apply():
    model, rows = invariant(), ragged((5, 23, 1, 12))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert not differing(model.to(dtype), rows)


HEADS = {
    "tied": ("llama", {"tie_word_embeddings": True}),
    "untied": ("llama", {"tie_word_embeddings": False}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "odd sizes": ("llama", {"intermediate_size": 77, "vocab_size": 131}),
    "gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
}


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", HEADS)
def test_kinds_of_layers(kind, dtype):
    family, config = HEADS[kind]
    model = tiny(family, dtype=DTYPES[dtype], **config)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (kind == "tied")
    rope_pad_fix.apply(model, LEVEL)
    assert not differing(model, ragged((5, 23, 1, 12)))


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_to_keep_is_the_same_as_choosing_afterwards(dtype, layout):
    model = invariant(dtype=DTYPES[dtype])
    ids, mask = batch(ragged(), layout, extra=2)
    full = model(ids, mask).logits
    for keep, expected in ((1, full[:, -1:]), (4, full[:, -4:]), (torch.tensor([0, 7, -1]), full[:, [0, 7, -1]])):
        assert torch.equal(model(ids, mask, logits_to_keep=keep).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS)
def test_embeddings(layout):
    model, rows = invariant(), ragged()
    ids, mask = batch(rows, layout)
    out = model(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask).logits
    for i, row in enumerate(rows):
        assert torch.equal(out[i][mask[i] == 1], model(row[None]).logits[0])


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", [*FAMILIES, "mixtral"])
def test_classifier(family, dtype):
    """Three labels: a product of fewer outputs than libraries are made for."""
    model, rows = tiny(family, "classifier", dtype=DTYPES[dtype], num_labels=3), ragged()
    rope_pad_fix.apply(model, LEVEL)
    alone = torch.cat([model(row[None], attention_mask=torch.ones(1, len(row))).logits for row in rows])
    assert alone.unique().numel() > 3
    for layout in LAYOUTS:
        ids, mask = batch(rows, layout)
        assert torch.equal(model(ids, mask).logits, alone)


@torch.no_grad()
def test_hidden_states():
    model, rows = invariant(), ragged()
    ids, mask = batch(rows, "holes")
    together = model(ids, mask, output_hidden_states=True).hidden_states
    for i, row in enumerate(rows):
        alone = model(row[None], output_hidden_states=True).hidden_states
        assert all(torch.equal(a[i][mask[i] == 1], b[0]) for a, b in zip(together, alone, strict=True))


def test_two_threads_may_use_one_model():
    model = invariant("mixtral", dtype=torch.bfloat16)
    work = [ragged((5, 23, 40), seed=1), ragged((31, 2, 9, 17), seed=2)]
    with torch.no_grad():
        alone = [[logits(model, [row])[0] for row in rows] for rows in work]
    wrong, done = [], []
    start = threading.Barrier(2)

    def run(i):
        torch.set_num_threads(2)
        start.wait()
        with torch.no_grad():
            for _ in range(8):
                wrong.extend(k for k, mine in enumerate(logits(model, work[i])) if not torch.equal(mine, alone[i][k]))
        done.append(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == [0, 1]
    assert not wrong


# --- adapters and training -------------------------------------------------------------------------------------------


def adapted(model, std=0.3):
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM"))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=std)
    return model


@pytest.mark.parametrize("mode", ["no grad", "autocast", "training", "training under autocast"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_lora(when, family, dtype, mode):
    model = tiny(family, dtype=DTYPES[dtype])
    if when == "before":
        model = rope_pad_fix.apply(adapted(model), LEVEL)
    else:
        rope_pad_fix.apply(model, LEVEL)
        model = adapted(model)
    model.train(mode.startswith("training"))
    rows = ragged((5, 23, 1, 12))
    with (
        torch.set_grad_enabled(mode.startswith("training")),
        torch.autocast("cpu", torch.bfloat16, enabled=mode.endswith("autocast")),
    ):
        alone = [logits(model, [row])[0] for row in rows]
        assert alone[0].requires_grad == mode.startswith("training")
        for layout in LAYOUTS:
            assert same(logits(model, rows, layout), alone), layout
        with model.disable_adapter():
            assert not torch.equal(logits(model, rows)[1], alone[1]), "the adapter does not matter"


def test_lora_while_generating():
    model = adapted(invariant(dtype=torch.bfloat16)).eval()
    rows = ragged((5, 23, 1))
    alone = torch.cat([generate(model, [row])[1] for row in rows])
    for layout in LAYOUTS:
        assert torch.equal(generate(model, rows, layout)[1], alone)


def test_gradients_are_those_of_the_other_products():
    """The one tolerance: gradients come from other products than the level "padding_free" uses."""
    rows = ragged((5, 23, 1))
    ids, mask = batch(rows)
    found = []
    for level in ("padding_free", LEVEL):
        model = rope_pad_fix.apply(tiny(attention_bias=True), level).train()
        model(ids, mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in found[0].items():
        assert gradient.abs().max() > 0
        assert (found[1][name] - gradient).abs().max() <= 1e-4 * gradient.abs().max(), name


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n", "k"), [(1, 64), (3, 64), (16, 64), (64, 4), (77, 33), (128, 64)])
def test_linear_and_its_gradients(n, k, bias, dtype, autocast):
    """Against `F.linear`, within rounding; its own rows against each other, bit for bit."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 7, k), (n, k), *([(n,)] if bias else [])]
    leaves = [torch.randn(shape, generator=generator).to(DTYPES[dtype]) for shape in shapes]
    results = []
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for product in (F.linear, invariant_linear):
            own = [leaf.clone().requires_grad_() for leaf in leaves]
            out = product(*own)
            out.float().square().sum().backward()
            results.append([out.detach(), *(leaf.grad for leaf in own)])
        whole = invariant_linear(*leaves)
        for m in (1, 2, 3, 5, 7):
            assert torch.equal(invariant_linear(leaves[0][:, :m], *leaves[1:]), whole[:, :m])
        assert torch.equal(invariant_linear(leaves[0][0, 3], *leaves[1:]), whole[0, 3])  # a vector
        assert invariant_linear(leaves[0][:, :0], *leaves[1:]).shape == (2, 0, n)
    assert torch.equal(whole, results[1][0]), "with and without gradients"
    tolerance = 1e-5 if dtype == "fp32" and not autocast else 3e-2
    for theirs, mine in zip(*results, strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        assert (mine - theirs).abs().max() <= tolerance * theirs.abs().max()


def trained(layout, level):
    torch.manual_seed(0)
    model = adapted(tiny(), std=0.01)
    if level is not None:
        rope_pad_fix.apply(model, level)
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(20):
        ids, mask = batch(ragged((5, 23, 12), seed=step), layout)
        model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def test_finetuning_does_not_depend_on_the_layout():
    left = trained("left", LEVEL)
    for layout in ("right", "holes"):
        other = trained(layout, LEVEL)
        assert all(torch.equal(parameter, left[name]) for name, parameter in other.items()), layout
    stock = trained("left", None), trained("right", None)
    assert not any(torch.equal(parameter, stock[1][name]) for name, parameter in stock[0].items()), "it cannot fail"


# --- apply and remove ------------------------------------------------------------------------------------------------


def classes(model):
    return {name: type(module) for name, module in model.named_modules()}


@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize("head", ["causal_lm", "classifier"])
def test_remove_leaves_nothing_behind(family, head):
    if (FAMILIES | MIXTURES)[family][2] is None and head == "classifier":
        pytest.skip("transformers has no such classifier")
    model = tiny(family, head)
    before, attributes = classes(model), {name: dict(vars(module)) for name, module in model.named_modules()}
    rope_pad_fix.apply(model, LEVEL)
    assert rope_pad_fix.status(model).level == LEVEL
    linears = {name for name, cls in before.items() if cls is nn.Linear}
    assert linears
    patched = classes(model)
    assert not {name for name in linears if patched[name] is nn.Linear}
    for name, cls in before.items():  # and nothing shows
        assert issubclass(patched[name], cls)
        assert (patched[name].__name__, patched[name].__module__) == (cls.__name__, cls.__module__)
    assert repr(model) == repr(tiny(family, head))
    rope_pad_fix.remove(model)
    assert classes(model) == before
    for name, module in model.named_modules():
        assert vars(module).keys() == attributes[name].keys()
        assert all(value is attributes[name][key] for key, value in vars(module).items()), name


@pytest.mark.parametrize("other", ["padding_free", "positions"])
def test_switching_levels(other):
    model, rows = tiny(), ragged((1, 2))  # few rows, where the levels' products differ
    before = classes(model)
    rope_pad_fix.apply(model, other)
    expected, there = classes(model), logits(model, rows)
    rope_pad_fix.apply(model, LEVEL)
    mine = logits(model, rows)
    assert other == "positions" or not same(mine, there), "it cannot fail"
    rope_pad_fix.apply(model, LEVEL)  # twice is once
    assert same(logits(model, rows), mine)
    rope_pad_fix.apply(model, other)
    assert rope_pad_fix.status(model).level == other
    assert {n for n, c in classes(model).items() if c is nn.Linear} == {
        n for n, c in expected.items() if c is nn.Linear
    }
    assert same(logits(model, rows), there)
    with rope_pad_fix.applied(model, LEVEL):
        assert same(logits(model, rows), mine)
    assert rope_pad_fix.status(model).level == other
    assert classes(rope_pad_fix.remove(model)) == before


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_state_and_saved_files_stay_as_they_are(tmp_path, family):
    model = tiny(family)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path / "before")
    rope_pad_fix.apply(model, LEVEL)
    logits(model, ragged())
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    model.save_pretrained(tmp_path / "after")
    files = {path.name: path.read_bytes() for path in (tmp_path / "before").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "after").iterdir()} == files


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_a_copy_keeps_the_level(family, copied):
    model, rows = invariant(family), ragged()
    expected = logits(model, rows)
    twin = copied(model)
    assert rope_pad_fix.status(twin).level == LEVEL
    assert same(logits(twin, rows), expected)
    assert same([logits(twin, [row])[0] for row in rows], expected)
    rope_pad_fix.remove(twin)
    assert classes(twin) == classes(tiny(family))
    assert same(logits(model, rows), expected)  # the original is as it was


@torch.no_grad()
@pytest.mark.parametrize("family", EVERY)
def test_no_weight_is_copied(family):
    model = tiny(family)
    pointers = [tensor.data_ptr() for tensor in weights_of(model)]
    size = sum(tensor.nbytes for tensor in weights_of(model))
    for level in (LEVEL, "padding_free", LEVEL):
        rope_pad_fix.apply(model, level)
        everything(model, ragged())
        assert [tensor.data_ptr() for tensor in weights_of(model)] == pointers
        assert sum(tensor.nbytes for tensor in weights_of(model)) == size
        hidden = [v for m in model.modules() for v in vars(m).values() if isinstance(v, torch.Tensor)]
        assert not hidden, "tensors beside parameters and buffers"


def test_a_linear_layer_with_a_forward_of_its_own_keeps_it():
    model = tiny()
    calls = []

    def own(x):
        calls.append(len(x))
        return F.linear(x, model.lm_head.weight)

    model.lm_head.forward = own
    rope_pad_fix.apply(model, LEVEL)
    logits(model, ragged())
    assert calls
    assert not differing(model, ragged((5, 23, 1, 12)))  # the product in it is replaced while it runs


# --- calibration -----------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache directory, and no plan remembered, before and after."""
    monkeypatch.setenv("ROPE_PAD_FIX_CACHE", str(tmp_path))
    calibration.plan_for.cache_clear()
    yield tmp_path
    calibration.plan_for.cache_clear()


@pytest.fixture
def use(monkeypatch):
    """``use(name=product, ...)`` makes these the only products there are."""

    def only(**products):
        for name, product in products.items():
            monkeypatch.setitem(calibration.PRODUCTS, name, product)
        monkeypatch.setattr(calibration, "products", lambda device, dtype: list(products))

    return only


@pytest.fixture
def count(monkeypatch):
    """The layer shapes that were calibrated."""
    calls = []
    calibrate = calibration.calibrate

    def counting(device, dtype, n, k):
        calls.append((n, k))
        return calibrate(device, dtype, n, k)

    monkeypatch.setattr(calibration, "calibrate", counting)
    return calls


def below(rows):
    """A stand-in for a product of 16 outputs that rounds otherwise below so many rows."""

    def product(x, weight, bias):
        return x[:, :16] + (1 if len(x) < rows else 0)

    return product


def never(x, weight, bias):
    """Another result for every number of rows."""
    return x[:, :16] + len(x)


def plan(n=16, k=32, dtype=torch.float32):
    return calibration.plan_for(CPU, dtype, 2, n, k)


def file_of(directory):
    (path,) = directory.glob("plans-*.json")
    return path


def test_calibration_finds_the_smallest_tile(fresh, use):
    for rows, tile in ((1, 2), (2, 2), (3, 4), (5, 8), (8, 8), (33, 64)):
        use(odd=below(rows))
        assert calibration.calibrate(CPU, torch.float32, 16, 32) == Plan("odd", tile)
    use(odd=below(8))
    x = torch.arange(9.0 * 32).view(9, 32)
    with torch.no_grad():
        for m in range(1, 10):
            assert torch.equal(invariant_linear(x[:m], torch.zeros(16, 32)), x[:m, :16])


def test_calibration_prefers_the_first_of_equal_tiles(use):
    use(first=below(3), second=below(4))
    assert calibration.calibrate(CPU, torch.float32, 16, 32) == Plan("first", 4)
    use(first=below(8), second=below(2))
    assert calibration.calibrate(CPU, torch.float32, 16, 32) == Plan("second", 2)


def test_calibration_sees_where_a_row_stands(use):
    """A product that gives the rows behind the eighth another result: no number of rows agrees at every offset."""

    def product(x, weight, bias):
        return x[:, :16] + (torch.arange(len(x)) >= 8)[:, None]

    use(torch=product)
    assert calibration.calibrate(CPU, torch.float32, 16, 32).fixed


def test_a_product_that_never_agrees_gets_a_fixed_shape(fresh, use):
    use(torch=never)
    assert plan() == Plan("torch", 64, fixed=True)
    x = torch.randn(200, 32, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(never(x[:3], None, None), never(x, None, None)[:3])
    with torch.no_grad():
        whole = invariant_linear(x, torch.zeros(16, 32))
        for m in (*range(1, 70), 127, 128, 129, 200):
            assert torch.equal(invariant_linear(x[:m], torch.zeros(16, 32)), whole[:m])


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_with_fixed_shapes(monkeypatch, dtype):
    monkeypatch.setattr(linear, "plan_for", lambda *key: Plan("torch", 64, fixed=True))
    model, rows = invariant(dtype=DTYPES[dtype]), ragged((5, 23, 1, 70))
    assert not differing(model, rows)


def test_plans_are_kept_and_read_back(fresh, use, count):
    use(odd=below(8))
    assert plan() == plan() == Plan("odd", 8)
    assert count == [(16, 32)]
    assert list(json.loads(file_of(fresh).read_text()).values()) == [["odd", 8, False]]
    calibration.plan_for.cache_clear()  # as in another process
    assert plan() == Plan("odd", 8)
    assert count == [(16, 32)]
    assert plan(k=64) == Plan("odd", 8)  # another shape is another question, and joins the file
    assert count == [(16, 32), (16, 64)]
    assert len(json.loads(file_of(fresh).read_text())) == 2
    assert not [path for path in fresh.iterdir() if path.suffix not in (".json", ".lock")]
    assert len(list(fresh.glob("*.json"))) == 1, "temporary files are left"


def test_fixed_plans_are_kept_too(fresh, use, count):
    use(torch=never)
    assert plan() == Plan("torch", 64, fixed=True)
    calibration.plan_for.cache_clear()
    assert plan() == Plan("torch", 64, fixed=True)
    assert count == [(16, 32)]


@pytest.mark.parametrize("entry", [["odd", 2, False], ["odd", 4, False], ["gone", 2, False]], ids=str)
def test_a_wrong_plan_is_noticed_and_corrected(fresh, use, count, entry):
    use(odd=below(8))
    plan()
    path = file_of(fresh)
    (key,) = json.loads(path.read_text())
    path.write_text(json.dumps({key: entry, "another": ["odd", 2, False]}))
    calibration.plan_for.cache_clear()
    assert plan() == Plan("odd", 8)
    assert count == [(16, 32)] * 2
    assert json.loads(path.read_text()) == {key: ["odd", 8, False], "another": ["odd", 2, False]}


BROKEN_FILES = [b"", b"{", b"[]", b"null", b'"plans"', b"\xff\xfe\x00"]
BROKEN_ENTRIES = [
    5,
    "odd",
    [],
    ["odd"],
    ["odd", "8", False],
    ["odd", 0, False],
    ["odd", 8, False, 1],
    {"odd": 8},
    [[], 8],
]
BROKEN_ENTRIES += [["odd", -8, False], ["odd", 0, True], ["odd", 2.5, False], ["odd", None, True], [None, 8, True]]


@pytest.mark.parametrize("content", BROKEN_FILES, ids=repr)
def test_a_broken_file_is_written_anew(fresh, use, content):
    use(odd=below(8))
    plan()
    path = file_of(fresh)
    good = path.read_text()
    path.write_bytes(content)
    calibration.plan_for.cache_clear()
    assert plan() == Plan("odd", 8)
    assert path.read_text() == good


@pytest.mark.parametrize("entry", BROKEN_ENTRIES, ids=repr)
def test_a_broken_entry_is_corrected(fresh, use, entry):
    use(odd=below(8))
    plan()
    path = file_of(fresh)
    good = json.loads(path.read_text())
    path.write_text(json.dumps(dict.fromkeys(good, entry)))
    calibration.plan_for.cache_clear()
    assert plan() == Plan("odd", 8)
    assert json.loads(path.read_text()) == good


def test_a_directory_that_cannot_be_written_only_costs_time(fresh, use, count, monkeypatch):
    use(odd=below(8))
    (fresh / "file").write_text("in the way")
    monkeypatch.setenv("ROPE_PAD_FIX_CACHE", str(fresh / "file" / "plans"))
    assert plan() == plan() == Plan("odd", 8)
    calibration.plan_for.cache_clear()
    assert plan() == Plan("odd", 8)
    assert len(count) == 2
    assert [path.name for path in fresh.iterdir()] == ["file"]


def test_a_file_that_cannot_be_replaced_only_costs_time(fresh, use, monkeypatch):
    use(odd=below(8))

    def refuse(*args):
        raise PermissionError("read-only")

    monkeypatch.setattr(calibration.os, "replace", refuse)
    assert plan() == Plan("odd", 8)
    assert not list(fresh.glob("*.json")), "the temporary file is left"


def test_sums_that_cancel_show_what_ordinary_data_hides():
    """bfloat16, one row against 64. In every other row of `_data` the exact result is 0."""
    x, weight = calibration._data(CPU, torch.bfloat16, 64, 576, 1536)
    whole = F.linear(x, weight)
    other = torch.stack([F.linear(x[i : i + 1], weight)[0] != whole[i] for i in range(len(x))])
    if not other.any():
        pytest.skip("on this CPU a product of one row rounds like one of many in bfloat16: there is nothing to show")
    cancelling, ordinary = other[::2], other[1::2]
    assert cancelling.any(1).float().mean() > 0.5
    assert cancelling.float().mean() > 10 * ordinary.float().mean()


def test_the_data_cancel():
    x, weight = calibration._data(CPU, torch.float32, 8, 16, 33)
    out = x.double() @ weight.double().t()
    assert out[::2].abs().max() < 1e-12
    assert out[1::2].abs().min() > 1e-6
    for dtype in (torch.bfloat16, torch.float16):
        x, weight = calibration._data(CPU, dtype, 8, 16, 33)
        assert (x.double() @ weight.double().t())[::2].abs().max() < 1e-12


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("n", "k"), [(16, 64), (576, 1536), (1536, 576), (100, 99)])
def test_products_of_any_number_of_rows(n, k, threads, dtype):
    """Real products, on data that the plan was not found with."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(7)
    half = torch.randn(n, k // 2, generator=generator), torch.randn(400, k // 2, generator=generator)
    odd = torch.zeros(n, k % 2), torch.zeros(400, k % 2)
    weight = torch.cat([half[0], -half[0], odd[0]], 1).to(DTYPES[dtype])
    x = torch.cat([half[1], half[1], odd[1]], 1)
    x[1::2] += torch.randn(200, k, generator=generator)
    x = x.to(DTYPES[dtype])
    whole = invariant_linear(x, weight)
    for m in (*range(1, 34), 47, 63, 64, 65, 100, 200, 399):
        for start in (0, 1, 400 - m):
            assert torch.equal(invariant_linear(x[start : start + m], weight), whole[start : start + m]), (m, start)


# --- activations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", [torch.sigmoid, F.silu, F.gelu, torch.tanh], ids=lambda f: f.__name__)
def test_elementwise(function, dtype, threads):
    torch.set_num_threads(threads)
    whole = (4 * torch.randn(2 * 32768 * threads + 200, generator=torch.Generator().manual_seed(0))).to(DTYPES[dtype])
    sizes = [*range(1, 201), *(32768 * threads + i for i in (-1, 0, 1, 17, 50, 64)), 2 * 32768 * threads + 5]
    plain, mine = function(whole), invariant_elementwise(function, whole)
    apart = 0
    for size in sizes:
        for start in (0, 3):
            part = whole[start : start + size].clone()
            assert torch.equal(invariant_elementwise(function, part), mine[start : start + size])
            apart += not torch.equal(function(part), plain[start : start + size])
    if function is torch.sigmoid and dtype == "fp32" and not apart:
        pytest.skip("on this CPU sigmoid is the same wherever an element stands: there is nothing to repair")
    assert (mine.float() - plain.float()).abs().max() <= 2 * torch.finfo(DTYPES[dtype]).eps * plain.float().abs().max()


def test_elementwise_of_any_shape():
    x = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0))
    flat = invariant_elementwise(torch.sigmoid, x.flatten())
    assert torch.equal(invariant_elementwise(torch.sigmoid, x), flat.view(3, 5, 7))
    turned = x.transpose(0, 2)
    assert torch.equal(invariant_elementwise(torch.sigmoid, turned), flat.view(3, 5, 7).transpose(0, 2))
    assert torch.equal(invariant_elementwise(torch.sigmoid, x[:, :, 0]), flat.view(3, 5, 7)[:, :, 0])
    assert invariant_elementwise(torch.sigmoid, x[:0]).shape == (0, 5, 7)
    assert torch.equal(invariant_elementwise(torch.sigmoid, x[0, 0, 0]), flat[0])
    wide = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))  # of a whole number of vectors
    assert torch.equal(invariant_elementwise(F.silu, wide.t()), invariant_elementwise(F.silu, wide).t())


def test_elementwise_has_gradients():
    x = torch.randn(77, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (mine,) = torch.autograd.grad(invariant_elementwise(F.silu, x).sum(), x)
    (theirs,) = torch.autograd.grad(F.silu(x).sum(), x)
    assert (mine - theirs).abs().max() < 1e-6


# --- verify ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "glm", "mixtral"])
@pytest.mark.parametrize("part", ["self_attn.o_proj", "mlp", "input_layernorm", "mlp.act_fn", ""])
def test_first_difference_names_the_module(family, part):
    model, rows = invariant(family), ragged((5, 23, 12))
    parts = dict(model.model.layers[1].named_modules())
    name = ".".join(["model.layers.1", *([part] if part else [])])
    if part == "mlp.act_fn":
        part = next(each for each in parts if each.endswith("act_fn") or each.endswith("activation_fn"))
        name = f"model.layers.1.{part}"
        if family == "mixtral":
            pytest.skip("its activation sees the tokens of one expert, in no row's order")
    together = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: together.append(len(kwargs["input_ids"])), with_kwargs=True
    )

    def disturb(module, args, output):
        if together[-1] == 1:
            return output
        return (output[0] + 1e-3, *output[1:]) if isinstance(output, tuple) else output + 1e-3

    assert first_difference(model, rows) is None
    handle = parts[part].register_forward_hook(disturb)
    for layout in LAYOUTS:
        found = first_difference(model, rows, layout)
        assert (found.module, found.kind, found.row) == (name, type(parts[part]).__name__, 0)
        assert 5e-4 < found.largest < 2e-3
    verdict = rope_pad_fix.verify(model, cases=1, batch_size=3, max_length=12)
    assert not verdict
    assert verdict.first.module == name
    handle.remove()
    assert rope_pad_fix.verify(model, cases=1, batch_size=3, max_length=12)


@pytest.mark.parametrize("wrong", [{"cases": 0}, {"batch_size": 0}, {"max_length": 0}, {"cases": -1}], ids=str)
def test_verify_refuses_numbers_that_are_not_positive(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got {wrong[name]}"):
        rope_pad_fix.verify(tiny(), **wrong)


def test_verify_leaves_the_model_as_it_is():
    model = invariant().train()
    before = classes(model)
    state = torch.random.get_rng_state()
    assert rope_pad_fix.verify(model, cases=1, batch_size=2, max_length=4)
    assert model.training
    assert all(module.training for module in model.modules())
    assert classes(model) == before
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())

    def fail(module, args):
        raise RuntimeError("on purpose")

    model.model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        rope_pad_fix.verify(model, cases=1)
    assert model.training


def test_verify_says_the_same_twice():
    model = tiny()
    first = rope_pad_fix.verify(model, cases=2, batch_size=3, max_length=12, new_tokens=0)
    assert first == rope_pad_fix.verify(model, cases=2, batch_size=3, max_length=12, new_tokens=0)
    assert (first.cases, first.rows) == (2, 6)
    assert bool(first) == first.equal == (first.differing == 0)


# --- attention that rows share while decoding -------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads",
    [
        {"num_attention_heads": 4, "num_key_value_heads": 4},
        {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96},
        {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 64},
        {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 112},
        {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 96, "head_dim": 20},
    ],
    ids=lambda heads: "-".join(map(str, heads.values())),
)
def test_layouts_of_heads(heads, dtype, threads):
    """While decoding, a kernel's rounding can depend on the thread that a head lands on."""
    torch.set_num_threads(threads)
    assert rope_pad_fix.verify(invariant(dtype=DTYPES[dtype], **heads), cases=2)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "key_heads", "size"), [(9, 3, 64), (14, 2, 64), (4, 4, 20), (8, 1, 128), (5, 5, 96)])
def test_rows_of_any_lengths_share_a_call(heads, key_heads, size, dtype, threads):
    """Keys beyond a row's own, up to a longer row's, change no bit of it: what `ragged_rows_agree` tries, and more."""
    torch.set_num_threads(threads)
    if not decoding.ragged_rows_agree(CPU, DTYPES[dtype], threads, heads, key_heads, size):
        pytest.skip("rows do not share calls on this CPU")
    generator = torch.Generator().manual_seed(1)
    for longest in (40, 300, 1500):
        lengths = torch.randint(1, longest + 1, (5,), generator=generator)
        padded = cache.round_up(longest)
        query = torch.randn(5, heads, size, generator=generator).to(DTYPES[dtype])
        key, value = torch.randn(2, 5, key_heads, padded, size, generator=generator).to(DTYPES[dtype])
        mask = (torch.arange(padded) < lengths[:, None])[:, None, None]
        together = decoding.shared_attention(query, key, value, mask)
        for i, own in enumerate(map(cache.round_up, lengths.tolist())):
            row = slice(i, i + 1)
            alone = decoding.shared_attention(query[row], key[row, :, :own], value[row, :, :own], mask[row, ..., :own])
            assert torch.equal(alone[0], together[i])


def test_sharing_is_tried_and_not_assumed(monkeypatch):
    """The attempt tells the number of queries that does from one that does not."""
    torch.set_num_threads(2)
    shape = CPU, torch.float32, 2, 9, 3, 64
    agree = decoding.ragged_rows_agree.__wrapped__
    monkeypatch.setattr(decoding, "_QUERIES", 3)
    if agree(*shape):
        pytest.skip("on this CPU rows share a call of three queries without a difference: there is nothing to show")
    monkeypatch.undo()
    assert agree(*shape)


def test_which_rows_share_a_call():
    def groups(lengths, rows=None):
        runs = [Run(row, 1, n, i, 0) for i, (row, n) in enumerate(zip(rows or range(9), lengths, strict=False))]
        return [[run.key_length for run in group.runs] for group in decoding.ragged_rows(runs, CPU)]

    assert groups([10, 20, 200, 190]) == [[10, 20, 200, 190]]
    assert groups([10, 20, 500, 200]) == [[10, 20], [500, 200]]
    assert groups([10, 2000, 1900, 10]) == [[10], [2000, 1900], [10]]  # too many keys for nothing
    assert groups([10, 20], rows=[0, 2]) == [[10], [20]]  # a view of neighbours copies no keys


def test_without_sharing_rows_are_equal_too(monkeypatch):
    monkeypatch.setattr(attention, "ragged_rows_agree", lambda *args: False)
    assert rope_pad_fix.verify(invariant(), cases=2)
