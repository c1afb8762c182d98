"""ChatGLM2, ChatGLM3 and GLM-4 checkpoints as GlmForCausalLM: the same bits, the same tokens, or a refusal."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GlmForCausalLM
from transformers.convert_slow_tokenizer import SpmConverter
from typer.testing import CliRunner

import rope_pad_fix
from rope_pad_fix import InputError, UnsupportedModelError
from rope_pad_fix.chatglm import compat, convert, from_pretrained
from rope_pad_fix.chatglm.tokenizer import fast_tokenizer
from rope_pad_fix.cli import build
from rope_pad_fix.loading import load_model

from . import chatglm_code
from .chatglm_code import TEXTS, VOCABULARY
from .test_chatglm import batch, prompts

pytestmark = pytest.mark.filterwarnings("ignore:.*holds no tokenizer.model")
IDS = torch.randint(VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(5))
SIZES: list[tuple[str, dict[str, Any]]] = [
    ("chatglm2", {}),
    ("chatglm2", {"rope_ratio": 8}),  # of ChatGLM2-32k: scales positions
    ("chatglm3", {}),
    ("chatglm3", {"rope_ratio": 50}),
    ("chatglm3", {"rope_ratio": 500, "layernorm_epsilon": 1.5625e-07, "num_layers": 6}),  # of GLM-4-9B
    ("chatglm3", {"multi_query_group_num": 1}),
    ("chatglm3", {"multi_query_group_num": 4}),
    ("chatglm3", {"multi_query_attention": False}),
    ("chatglm3", {"kv_channels": 20}),
    ("chatglm3", {"add_qkv_bias": False}),
]


@torch.no_grad()
def logits_of_the_code(version: str = "chatglm3", **changes: Any) -> Tensor:
    with compat():
        result: Tensor = chatglm_code.model(version, **changes)(input_ids=IDS).logits
    return result


@torch.no_grad()
def logits(model: Any) -> Tensor:
    result: Tensor = model.eval()(input_ids=IDS).logits
    return result


@pytest.mark.parametrize(("version", "changes"), SIZES)
def test_bits_are_equal(version: str, changes: dict[str, Any], tmp_path: Path) -> None:
    source = chatglm_code.checkpoint(tmp_path / "source", version, **changes)
    target = convert(source, tmp_path / "target")
    wanted = logits_of_the_code(version, **changes)
    converted = AutoModelForCausalLM.from_pretrained(target)
    assert type(converted) is GlmForCausalLM
    assert wanted.abs().max() > 4
    assert torch.equal(logits(converted), wanted)
    converted.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), wanted)


def glm4(directory: Path) -> Path:
    """A checkpoint with the layout of GLM-4-9B: bfloat16, safetensors in shards, no Python files."""
    changes = {"rope_ratio": 500, "layernorm_epsilon": 1.5625e-07}
    with compat():
        weights = chatglm_code.model("chatglm3", **changes).bfloat16().state_dict()
    directory.mkdir()
    names = sorted(weights)
    shards = {f"model-0000{number}-of-00003.safetensors": names[number - 1 :: 3] for number in (1, 2, 3)}
    for file, held in shards.items():
        save_file({name: weights[name].contiguous() for name in held}, directory / file)
    index = {"metadata": {}, "weight_map": {name: file for file, held in shards.items() for name in held}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    settings = chatglm_code.settings_of_later(**changes, torch_dtype="bfloat16", num_hidden_layers=2)
    (directory / "config.json").write_text(json.dumps(settings | {"eos_token_id": [2, 5, 7], "pad_token_id": 2}))
    generation = {"eos_token_id": [2, 5, 7], "pad_token_id": 2, "do_sample": True, "temperature": 0.8, "top_p": 0.8}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def test_shards_and_generation_config(tmp_path: Path) -> None:
    source = glm4(tmp_path / "glm4")
    with pytest.raises(InputError, match=r"rope_ratio is 500, .*pass rope_scales='positions' for ChatGLM2-32k"):
        convert(source, tmp_path / "target")
    target = convert(source, tmp_path / "target", rope_scales="base")
    assert len(list(target.glob("model-*.safetensors"))) == 3
    converted = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    assert converted.dtype == torch.bfloat16
    config = converted.config
    assert getattr(config, "rope_parameters", {"rope_theta": getattr(config, "rope_theta", None)})["rope_theta"] == 5e6
    assert converted.generation_config.eos_token_id == [2, 5, 7]
    assert converted.generation_config.temperature == 0.8
    with compat():
        model = chatglm_code.model("chatglm3", rope_ratio=500, layernorm_epsilon=1.5625e-07).bfloat16().float()
        wanted = logits(model)
    assert torch.equal(logits(converted.float()), wanted)


@torch.no_grad()
@pytest.mark.parametrize("level", ["padding_free", "batch_invariant"])
def test_in_memory_and_patched(level: str, tmp_path: Path) -> None:
    """The way to the stronger levels: rows of a batch are the lone ones bit for bit."""
    source = chatglm_code.checkpoint(tmp_path / "source")
    model, tokenizer = from_pretrained(source, level=level)
    assert tokenizer is None
    status = rope_pad_fix.status(model)
    assert status is not None
    assert (status.level, status.family) == (level, "glm")
    with rope_pad_fix.applied(model, "padding_free"):
        assert torch.equal(logits(model)[:1], model(input_ids=IDS[:1]).logits)
    rows = prompts("chatglm3")
    for layout in ("left", "right", "holes"):
        ids, mask = batch(rows, layout)
        out = model(input_ids=ids, attention_mask=mask).logits
        for number, row in enumerate(rows):
            alone = model(input_ids=row[None]).logits[0]
            together = out[number][mask[number] != 0]
            assert torch.equal(together, alone) or (level == "padding_free" and (together - alone).abs().max() < 1e-5)
    assert torch.equal(logits(rope_pad_fix.remove(model)), logits_of_the_code())


REFUSED = [
    ({"rmsnorm": False}, "rmsnorm=False: layer norms"),
    ({"post_layer_norm": False}, "post_layer_norm=False"),
    ({"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm=True"),
    ({"add_bias_linear": True}, "add_bias_linear=True: biases"),
    ({"pre_seq_len": 8}, "pre_seq_len=8: a P-tuning prefix"),
    ({"quantization_bit": 4}, "quantization_bit=4: weights quantized"),
    ({"original_rope": False}, "original_rope=False: rotary halves"),
    ({"vision_config": {"layers": 1}}, "vision_config=.*: an image encoder"),
    ({"position_encoding_2d": True}, r"is ChatGLM-6B .*compat\(\)"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_cannot_be_represented_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(chatglm_code.settings_of_later(**change)))
    with pytest.raises(UnsupportedModelError, match=message):
        convert(tmp_path, tmp_path / "target")
    with pytest.raises(UnsupportedModelError, match=message):
        from_pretrained(tmp_path)


class TestBadInput:
    """Nothing is written unless all is right."""

    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        return chatglm_code.checkpoint(tmp_path / "source")

    def refused(self, source: Path, message: str, error: type[Exception] = InputError, **options: Any) -> None:
        target = source.parent / "target"
        with pytest.raises(error, match=message):
            convert(source, target, **options)
        assert sorted(path.name for path in source.parent.iterdir()) == ["source"]

    def test_no_checkpoint(self, source: Path) -> None:
        (source / "config.json").unlink()
        self.refused(source, "holds no config.json")

    def test_another_model(self, source: Path) -> None:
        (source / "config.json").write_text('{"model_type": "llama"}')
        self.refused(source, "model_type 'llama', not 'chatglm'")

    def test_no_weights(self, source: Path) -> None:
        (source / "pytorch_model.bin").unlink()
        self.refused(source, "holds no weights")

    def test_a_missing_shard(self, source: Path) -> None:
        index = {"weight_map": {"a": "pytorch_model-1.bin"}}
        (source / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        self.refused(source, "lacks the shard pytorch_model-1.bin")

    def test_a_missing_weight(self, source: Path) -> None:
        weights = torch.load(source / "pytorch_model.bin")
        del weights["transformer.output_layer.weight"]
        torch.save(weights, source / "pytorch_model.bin")
        self.refused(source, "lacks weights: lm_head.weight and 1 in all")
        with pytest.raises(InputError, match="lacks weights"):
            from_pretrained(source)

    def test_a_wrong_shape(self, source: Path) -> None:
        weights = torch.load(source / "pytorch_model.bin")
        weights["transformer.output_layer.weight"] = torch.zeros(3, 3)
        torch.save(weights, source / "pytorch_model.bin")
        self.refused(source, r"lm_head.weight has shape \(3, 3\), by config.json it is \(96, 64\)")

    def test_a_weight_too_many(self, source: Path) -> None:
        weights = torch.load(source / "pytorch_model.bin")
        torch.save(weights | {"classifier_head.weight": torch.zeros(2)}, source / "pytorch_model.bin")
        self.refused(source, "no place for the weight 'classifier_head.weight'", UnsupportedModelError)

    def test_a_target_that_exists(self, source: Path) -> None:
        with pytest.raises(InputError, match="exists; remove it"):
            convert(source, source)

    def test_an_unknown_scaling(self, source: Path) -> None:
        self.refused(source, "rope_scales is 'both': it must be 'base' or 'positions'", rope_scales="both")

    def test_code_is_not_run_unasked(self, source: Path) -> None:
        self.refused(source, r"are run, as the checkpoint's authors wrote them.*trust_remote_code", verify=True)
        with pytest.raises(InputError, match=r"which we never switch on: .*rope_pad_fix.chatglm"):
            load_model(source)


def test_verify(tmp_path: Path) -> None:
    source = chatglm_code.checkpoint(tmp_path / "source", rope_ratio=50)
    with pytest.raises(InputError, match="after conversion logits differ by up to"):
        convert(source, tmp_path / "target", rope_scales="positions", verify=True, trust_remote_code=True)
    assert not (tmp_path / "target").exists()
    convert(source, tmp_path / "target", verify=True, trust_remote_code=True)


def test_command(tmp_path: Path) -> None:
    source = chatglm_code.checkpoint(tmp_path / "source")
    run = CliRunner().invoke(build(), ["convert-chatglm", str(source), str(tmp_path / "target")])
    assert run.exit_code == 0, run.output
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "target")), logits_of_the_code())
    run = CliRunner().invoke(build(), ["convert-chatglm", str(source), str(tmp_path / "target")])
    assert run.exit_code == 2
    run = CliRunner().invoke(build(), ["convert-chatglm", str(source), str(tmp_path / "new"), "--rope-scales", "x"])
    assert run.exit_code == 2


SAMPLES = [
    *TEXTS,
    "a  b   c\n\nd\te",
    " before",
    "behind ",
    "😀 emoji ✓",
    "\n",
    "1234 5678",
    "Hello, world! 你好",
    "people and sop and eop",  # the names of two special tokens
    "  ",
    "\n\n  code()",
]


class TestTokenizer:
    """The fast tokenizers give the ids of the checkpoints' own."""

    @pytest.mark.parametrize("version", ["chatglm2", "chatglm3"])
    def test_sentencepiece(self, version: str, tmp_path: Path) -> None:
        if not hasattr(SpmConverter, "build_tokenizer_from_spm_proto"):
            pytest.skip("this release of transformers cannot make the fast tokenizer")
        pieces = chatglm_code.vocabulary(tmp_path)
        own = pieces + (5 if version == "chatglm2" else 9)
        source = chatglm_code.checkpoint(tmp_path, version, padded_vocab_size=own)
        converted = convert(source, tmp_path / "target")
        settings = json.loads((converted / "tokenizer_config.json").read_text(encoding="utf-8"))
        assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"  # transformers 4 has no TokenizersBackend
        fast = AutoTokenizer.from_pretrained(converted)
        assert (len(fast), fast.padding_side, fast.eos_token_id, fast.pad_token_id) == (own, "left", 2, 0)
        with compat():
            code = chatglm_code.code(version, "tokenization_chatglm")
            slow = code.ChatGLMTokenizer(str(tmp_path / "tokenizer.model"))
            for text in SAMPLES:
                ids = slow(text)["input_ids"]
                assert fast(text)["input_ids"] == ids, text
                assert fast.decode(ids, skip_special_tokens=True) == slow.decode(ids[2:]), text
            turns = [
                {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": "Hi, who are you?"},
                {"role": "user", "content": "one two"},
            ]
            if version == "chatglm2":
                chat = slow(slow.build_prompt("one two", [("Hello", "Hi, who are you?")]))["input_ids"]
            else:
                chat = slow.build_chat_input("one two", turns[:2])["input_ids"][0].tolist()
        assert fast.apply_chat_template(turns, add_generation_prompt=True)["input_ids"] == chat

    def test_tiktoken(self, tmp_path: Path) -> None:
        """GLM-4's: byte pairs in the order of their ranks."""
        tiktoken = pytest.importorskip("tiktoken")
        ranks = {bytes([byte]): byte for byte in range(256)}
        for pair in (b"th", b"he", b"the", b" t", b" the", b"el", b"lo", b"hel", b"llo", b"hello", b"12", b"\n\n"):
            ranks[pair] = len(ranks)
        ranks["你好".encode()] = len(ranks)
        lines = [base64.b64encode(token) + b" " + str(rank).encode() for token, rank in ranks.items()]
        (tmp_path / "tokenizer.model").write_bytes(b"\n".join(lines))
        special = ["<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>"]
        ids = {token: len(ranks) + number for number, token in enumerate(special)}
        added = {str(number): {"content": token, "special": True} for token, number in ids.items()}
        settings = {"added_tokens_decoder": added, "chat_template": "{{ messages }}", "model_max_length": 128}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        pattern = (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
        own = tiktoken.Encoding("glm4", pat_str=pattern, mergeable_ranks=ranks, special_tokens=ids)
        fast = fast_tokenizer(tmp_path)
        fast.save_pretrained(tmp_path / "saved")
        fast = AutoTokenizer.from_pretrained(tmp_path / "saved")
        for text in [*SAMPLES, "hello the thethe 123456", "<|user|>hello"]:
            encoded = own.encode(text, allowed_special="all")
            assert fast(text)["input_ids"] == [ids["[gMASK]"], ids["<sop>"], *encoded], text
            assert fast.decode(encoded) == text
        assert (fast.eos_token, fast.pad_token, fast.model_max_length) == ("<|endoftext|>", "<|endoftext|>", 128)
        del settings["added_tokens_decoder"]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        with pytest.raises(InputError, match="must name the special tokens with their ids from 269 on"):
            fast_tokenizer(tmp_path)

    def test_none(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"holds no tokenizer\.model"):
            fast_tokenizer(tmp_path)
