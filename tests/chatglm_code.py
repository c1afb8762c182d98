"""The real code of ChatGLM-6B, ChatGLM2-6B and ChatGLM3-6B, from the package ``deep_training`` on PyPI, unmodified.

The package's own ``__init__`` files import far more than these models need, and fail on today's transformers. So its
folders are entered as bare packages, with the two names from elsewhere in it that the models import.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.utils import skip_init

from rope_pad_fix.chatglm import compat

VERSIONS = ("chatglm", "chatglm2", "chatglm3")
VOCABULARY = 96
PACKAGE = "deep_training.nlp.models"
# of the vocabulary: ChatGLM-6B's prompts end in [gMASK] <sop>
MASK, GMASK, BOS, EOS, PAD = 90, 91, 92, 93, 3


def folder(version: str) -> Path:
    """Where a version's files lie."""
    spec = PathFinder.find_spec("deep_training")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the code of ChatGLM is not there: pip install --no-deps deep_training==0.3.0")
    return Path(spec.submodule_search_locations[0]) / "nlp" / "models" / version


def code(version: str, part: str = "modeling_chatglm") -> Any:
    """A module of a version."""
    models = folder(version).parent
    places = {"deep_training": models.parent.parent, "deep_training.nlp": models.parent, PACKAGE: models}
    places[f"{PACKAGE}.{version}"] = models / version
    for name, place in places.items():
        if name not in sys.modules:
            package = ModuleType(name)
            package.__path__ = [str(place)]
            sys.modules[name] = package
    for name, value in (
        ("utils.torch_utils", {"skip_init": skip_init}),
        ("models.transformer", {"TransformerBase": object}),
    ):
        module = ModuleType(f"deep_training.nlp.{name}")
        vars(module).update(value)
        sys.modules.setdefault(module.__name__, module)
    return importlib.import_module(f"{PACKAGE}.{version}.{part}")


def config(version: str, **changes: Any) -> Any:
    """A small configuration."""
    module = code(version)
    if version == "chatglm":
        settings = {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "num_layers": 2,
            "num_attention_heads": 4,
            "inner_hidden_size": 128,
            "max_sequence_length": 128,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "mask_token_id": MASK,
            "gmask_token_id": GMASK,
            "pad_token_id": PAD,
            "use_cache": True,
            "precision": 32,
        }
        return module.ChatGLMConfig(**settings | changes)
    return module.ChatGLMConfig(**settings_of_later() | changes)


def settings_of_later(**changes: Any) -> dict[str, Any]:
    """``config.json`` of a small ChatGLM2 or 3."""
    return {
        "model_type": "chatglm",
        "num_layers": 2,
        "padded_vocab_size": VOCABULARY,
        "hidden_size": 64,
        "ffn_hidden_size": 96,
        "kv_channels": 16,
        "num_attention_heads": 4,
        "seq_length": 128,
        "add_qkv_bias": True,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "original_rope": True,
        "eos_token_id": 2,
        "pad_token_id": PAD,
        "torch_dtype": "float32",
    } | changes


def model(version: str, head: str = "ChatGLMForConditionalGeneration", **changes: Any) -> Any:
    """A small model with weights so large that attention matters: logits reach about 8."""
    settings = config(version, **changes)
    settings.torch_dtype = torch.float32
    return randomised(getattr(code(version), head)(settings).float())


def randomised(made: Any) -> Any:
    """Weights anew, by a seed."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "norm" in name and name.endswith("weight"):
                weight.fill_(1.0)
            else:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.25)
    return made.eval()


def checkpoint(directory: Path, version: str = "chatglm3", **changes: Any) -> Path:
    """A checkpoint as users have it: weights, ``config.json`` and the Python files it names."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = settings_of_later(**changes)
    with compat():
        made = model(version, **changes)
    weights = {name: tensor.contiguous() for name, tensor in made.state_dict().items()}
    torch.save(weights, directory / "pytorch_model.bin")
    for file in ("configuration_chatglm.py", "modeling_chatglm.py", "quantization.py", "tokenization_chatglm.py"):
        shutil.copy(folder(version) / file, directory / file)
    classes = {"AutoTokenizer": ["tokenization_chatglm.ChatGLMTokenizer", None]}
    settings["auto_map"] = classes | {
        "AutoConfig": "configuration_chatglm.ChatGLMConfig",
        "AutoModel": "modeling_chatglm.ChatGLMForConditionalGeneration",
        "AutoModelForCausalLM": "modeling_chatglm.ChatGLMForConditionalGeneration",
    }
    (directory / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    tokenizer = {
        "tokenizer_class": "ChatGLMTokenizer",
        "auto_map": {"AutoTokenizer": settings["auto_map"]["AutoTokenizer"]},
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return directory


TEXTS = (
    "Hello, who are you?",
    "one two three four five",
    "今天天气很好，我们去公园玩。",
    "Most of us sleep at night.",
)


def vocabulary(directory: Path) -> int:
    """Train ``tokenizer.model``, a SentencePiece model of the kind ChatGLM2 and 3 have; the number of its pieces."""
    sentencepiece = pytest.importorskip("sentencepiece")
    texts = [f"{number} {text}" for number in range(10) for text in TEXTS]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_prefix=str(directory / "tokenizer"),
        vocab_size=380,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        minloglevel=2,
    )
    return int(sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model")).vocab_size())
