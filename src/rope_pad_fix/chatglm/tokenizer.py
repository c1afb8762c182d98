"""The tokenizers of ChatGLM2, ChatGLM3 and GLM-4 as fast tokenizers of transformers.

ChatGLM2 and 3 have a SentencePiece model and number their special tokens behind it; GLM-4 has a table of byte pairs in
tiktoken's format and names its special tokens in ``tokenizer_config.json``.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ..errors import InputError

VOCABULARY = "tokenizer.model"
# zai-org/chatglm2-6b and chatglm3-6b, tokenization_chatglm.py. There the last two are "sop" and "eop" and never looked
# for in a text; a fast tokenizer looks for its special tokens, and would find one in "people".
_SPECIAL = ("[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>")
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_ROUNDS = (  # ChatGLM2's chats are plain text
    "[gMASK]<sop>{% for message in messages %}{% if message.role == 'user' %}[Round {{ loop.index0 // 2 + 1 }}]\n\n"
    "问：{{ message.content }}\n\n答：{% else %}{{ message.content }}\n\n{% endif %}{% endfor %}"
)
_TURNS = (  # ChatGLM3's; each text is encoded by itself, so that a space stands before it
    "[gMASK]<sop>{% for message in messages %}<|{{ message.role }}|>\n {{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# zai-org/glm-4-9b, tokenization_chatglm.py
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_PREFIX = ("[gMASK]", "<sop>")


def fast_tokenizer(directory: Path, vocab_size: int | None = None) -> PreTrainedTokenizerFast:
    """The tokenizer of a ChatGLM2, ChatGLM3 or GLM-4 checkpoint, without its code.

    It begins every text with ``[gMASK] <sop>`` and pads on the left, as the checkpoint's own does. Unlike that of
    ChatGLM2 and 3 it reads special tokens that stand in the text, for chat templates.

    Args:
        directory: of the checkpoint; holds ``tokenizer.model``.
        vocab_size: of its model. ChatGLM3 has room for four tokens that ChatGLM2 does not have.

    Raises:
        InputError: there is no vocabulary, it is of neither format, or a package to read it is missing.
    """
    file = directory / VOCABULARY
    if not file.exists():
        raise InputError(f"{directory}: holds no {VOCABULARY}; the checkpoint's tokenizer cannot be made without it")
    settings_file = directory / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text(encoding="utf-8")) if settings_file.exists() else {}
    content = file.read_bytes()
    if _is_tiktoken(content):
        tokenizer, special = _from_tiktoken(content, settings, directory)
        names = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    else:
        tokenizer, special = _from_sentencepiece(content, vocab_size)
        names = {"unk_token": "<unk>", "pad_token": "<unk>", "eos_token": "</s>"}
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    _begin_with_prefix(tokenizer, names["eos_token"])
    template = settings.get("chat_template") or (_TURNS if "<|user|>" in special else _ROUNDS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        chat_template=template,
        **names,
        **({"model_max_length": settings["model_max_length"]} if "model_max_length" in settings else {}),
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write what `fast_tokenizer` made. The class goes by the name that transformers 4 knows and 5 still takes."""
    tokenizer.save_pretrained(directory)
    file = directory / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(settings, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _is_tiktoken(content: bytes) -> bool:
    first = content.partition(b"\n")[0].split()
    return len(first) == 2 and first[1].isdigit()


def _from_tiktoken(content: bytes, settings: dict[str, Any], directory: Path) -> tuple[Tokenizer, list[str]]:
    """Byte pairs by rank: the lowest rank among neighbours is joined first, whatever its parts."""
    ranks = {
        base64.b64decode(token): int(rank) for token, rank in map(bytes.split, content.splitlines() if content else ())
    }
    named = {int(index): token["content"] for index, token in settings.get("added_tokens_decoder", {}).items()}
    special = [named[index] for index in sorted(named)]
    if sorted(named) != list(range(len(ranks), len(ranks) + len(named))) or "<|endoftext|>" not in special:
        raise InputError(
            f"{directory}: tokenizer_config.json must name the special tokens with their ids from {len(ranks)} on, in "
            "added_tokens_decoder"
        )
    letters = _byte_letters()
    written = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = []
    for token, rank in ranks.items():
        for middle in range(1, len(token)):
            left, right = token[:middle], token[middle:]
            if left in ranks and right in ranks:
                merges.append((rank, ranks[left], ranks[right], (written[left], written[right])))
    vocabulary = {written[token]: rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, [merge[-1] for merge in sorted(merges)], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, special


def _from_sentencepiece(content: bytes, vocab_size: int | None) -> tuple[Tokenizer, list[str]]:
    try:
        from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]
        from transformers.convert_slow_tokenizer import SpmConverter
    except ImportError as error:
        raise InputError("reading tokenizer.model needs more packages: pip install sentencepiece protobuf") from error
    build = getattr(SpmConverter, "build_tokenizer_from_spm_proto", None)
    if build is None:
        raise InputError(
            "making a fast tokenizer of a SentencePiece model needs transformers 5.24: convert there; what is written "
            "works on older releases, too"
        )
    proto = ModelProto()
    proto.ParseFromString(content)
    pieces = [piece.piece for piece in proto.pieces]
    bpe = proto.trainer_spec.model_type == proto.trainer_spec.BPE
    vocabulary: Any = [(piece.piece, piece.score) for piece in proto.pieces]
    if bpe:
        vocabulary = {piece: index for index, piece in enumerate(pieces)}
    special = [*_SPECIAL, *_ROLES]
    if vocab_size is not None and len(pieces) + len(special) > vocab_size:
        special = list(_SPECIAL)
    return build(proto, vocabulary), special


def _begin_with_prefix(tokenizer: Tokenizer, eos: str) -> None:
    begin = " ".join(_PREFIX)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A",
        pair=f"{begin} $A $B {eos}",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (*_PREFIX, eos)],
    )


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in byte-level vocabularies (Radford et al. 2019, GPT-2's encoder.py)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    other = (chr(256 + count) for count in range(256))
    return [chr(byte) if byte in plain else next(other) for byte in range(256)]
