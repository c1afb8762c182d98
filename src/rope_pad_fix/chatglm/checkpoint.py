"""convert and from_pretrained: ChatGLM2, ChatGLM3 and GLM-4 checkpoints as transformers' ``GlmForCausalLM``.

The two are the same model: the same rotary pairs over half of each head, the same norms, the same gate and up
projection in one matrix. Only names differ, and query, key and value are three matrices instead of one. So in float32
the logits are equal bit for bit.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import AutoModel, GenerationConfig, GlmConfig, GlmForCausalLM

from ..errors import InputError, UnsupportedModelError
from ..patching import DEFAULT_LEVEL, apply
from .compat import compat
from .tokenizer import VOCABULARY, fast_tokenizer, save_tokenizer

Scaling = Literal["base", "positions"]

_NAMES = {
    "transformer.embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "transformer.output_layer.weight": "lm_head.weight",
    "transformer.encoder.final_layernorm.weight": "model.norm.weight",
}
_IN_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.dense.weight": "self_attn.o_proj.weight",
    "mlp.dense_h_to_4h.weight": "mlp.gate_up_proj.weight",
    "mlp.dense_4h_to_h.weight": "mlp.down_proj.weight",
}
_LAYER = re.compile(r"transformer\.encoder\.layers\.(\d+)\.(.+)")
_COMPUTED = "transformer.rotary_pos_emb.inv_freq"
# What GlmForCausalLM has no counterpart for: the field, the only value that it runs, what it is.
_FIXED: tuple[tuple[str, Any, str], ...] = (
    ("rmsnorm", True, "layer norms instead of RMS norms"),
    ("post_layer_norm", True, "no norm behind the last layer"),
    ("apply_residual_connection_post_layernorm", False, "residuals taken behind the norms"),
    ("add_bias_linear", False, "biases in all linear layers"),
    ("pre_seq_len", None, "a P-tuning prefix; compat() runs it"),
    ("quantization_bit", 0, "weights quantized by the checkpoint's own code"),
    ("original_rope", True, "rotary halves instead of pairs"),
    ("vision_config", None, "an image encoder"),
)


def from_pretrained(
    directory: str | Path,
    level: str = DEFAULT_LEVEL,
    dtype: torch.dtype | str = "auto",
    rope_scales: Scaling | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Load a ChatGLM2, ChatGLM3 or GLM-4 checkpoint as ``GlmForCausalLM``, patched; none of its code is run.

    Args:
        directory: of the checkpoint, with its ``config.json``, weights and tokenizer.
        level: of `rope_pad_fix.apply`.
        dtype: of the weights; ``"auto"`` for that of the checkpoint.
        rope_scales: what ``rope_ratio`` scales, as in `convert`.
        options: of ``GlmForCausalLM.from_pretrained``.

    Returns:
        The model, and its tokenizer, or None where the directory holds no tokenizer.

    Raises:
        InputError: the directory is no such checkpoint, or not complete.
        UnsupportedModelError: ``GlmForCausalLM`` cannot represent it; the field is named.
    """
    source = _Source(Path(directory), rope_scales)
    weights: dict[str, Tensor] = {}
    for shard in _progress(source.shards, "converting"):
        weights |= source.converted(shard)
    source.check_complete({name: weight.shape for name, weight in weights.items()})
    config = source.config
    chosen = next(iter(weights.values())).dtype if dtype == "auto" else dtype
    model = GlmForCausalLM.from_pretrained(None, config=config, state_dict=weights, dtype=chosen, **options)
    model.generation_config = source.generation_config()
    return apply(model, level), source.tokenizer()


def convert(
    source_dir: str | Path,
    target_dir: str | Path,
    *,
    rope_scales: Scaling | None = None,
    verify: bool = False,
    trust_remote_code: bool = False,
) -> Path:
    """Write a ChatGLM2, ChatGLM3 or GLM-4 checkpoint anew as one of ``GlmForCausalLM``; none of its code is run.

    One shard is read, converted and written after the other. The target appears when it is complete.

    Args:
        source_dir: of the checkpoint: ``config.json``, and weights as safetensors or ``pytorch_model*.bin``, in one
            file or in shards.
        target_dir: for model, configuration, generation configuration and a fast tokenizer; must not exist.
        rope_scales: what ``rope_ratio`` scales: the ``"base"`` of the rotary embeddings (ChatGLM3-32k, GLM-4), or the
            ``"positions"`` (ChatGLM2-32k). By default this is read in the model file beside the weights.
        verify: load both afterwards and compare their logits in float32, which must be equal bit for bit. The source
            is run by its own code, so this needs ``trust_remote_code``.
        trust_remote_code: allow that code to run.

    Returns:
        The target directory.

    Raises:
        InputError: there is no such checkpoint, it is not complete, the target exists, or the logits differ.
        UnsupportedModelError: ``GlmForCausalLM`` cannot represent it; the field is named.
    """
    target = Path(target_dir)
    if target.exists():
        raise InputError(f"{target}: exists; remove it, or choose another directory")
    if verify and not trust_remote_code:
        raise InputError(
            f"to verify, the Python files in {source_dir} are run, as the checkpoint's authors wrote them: read them, "
            "then allow it with trust_remote_code"
        )
    source = _Source(Path(source_dir), rope_scales)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as unfinished:
        new = Path(unfinished) / "checkpoint"
        new.mkdir()
        _write_weights(source, new)
        source.config.save_pretrained(new)
        source.generation_config().save_pretrained(new)
        if (tokenizer := source.tokenizer()) is not None:
            save_tokenizer(tokenizer, new)
        if verify:
            _verify(source.directory, new)
        os.replace(new, target)
    return target


class _Source:
    """A checkpoint of ChatGLM2, ChatGLM3 or GLM-4."""

    def __init__(self, directory: Path, rope_scales: Scaling | None) -> None:
        if not (directory / "config.json").is_file():
            raise InputError(f"{directory}: holds no config.json; give the directory of a downloaded checkpoint")
        self.directory = directory
        self.settings: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        self.config = _glm_config(self.settings, directory, rope_scales)
        self.shards = _shards(directory)

    def converted(self, shard: Path) -> dict[str, Tensor]:
        """The tensors of a shard under their new names."""
        return dict(new for name, tensor in _tensors(shard) for new in self._renamed(name, tensor))

    def _renamed(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        if name == _COMPUTED:
            return
        match = _LAYER.fullmatch(name)
        layer, inner = (f"model.layers.{match[1]}.", match[2]) if match else ("", "")
        if inner.startswith("self_attention.query_key_value."):
            kind = inner.rpartition(".")[2]
            for part, rows in zip("qkv", self._split(tensor), strict=True):
                yield f"{layer}self_attn.{part}_proj.{kind}", rows.contiguous()
        elif new := _NAMES.get(name) or (match and inner in _IN_LAYER and layer + _IN_LAYER[inner]):
            yield new, tensor
        else:
            raise UnsupportedModelError(
                f"{self.directory}: GlmForCausalLM has no place for the weight {name!r}; it holds the causal language "
                "models of ChatGLM2, ChatGLM3 and GLM-4"
            )

    def _split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Query, key and value: one after the other with grouped queries, head by head without."""
        config = self.config
        heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        if self.settings.get("multi_query_attention"):
            return tuple(torch.split(tensor, [heads * size, groups * size, groups * size]))
        by_head = tensor.view(heads, 3, size, *tensor.shape[1:])
        return tuple(part.reshape(heads * size, *tensor.shape[1:]) for part in by_head.unbind(1))

    def check_complete(self, shapes: dict[str, torch.Size]) -> None:
        """Compare what was converted with what the model has."""
        with torch.device("meta"):
            wanted = {name: weight.shape for name, weight in GlmForCausalLM(self.config).state_dict().items()}
        if missing := sorted(wanted.keys() - shapes.keys()):
            raise InputError(f"{self.directory}: lacks weights: {', '.join(missing[:3])} and {len(missing)} in all")
        for name, shape in shapes.items():
            if shape != wanted.get(name):
                raise InputError(
                    f"{self.directory}: {name} has shape {tuple(shape)}, by config.json it is "
                    f"{tuple(wanted.get(name) or ())}"
                )

    def generation_config(self) -> GenerationConfig:
        """The checkpoint's own, with its end and pad tokens."""
        file = self.directory / "generation_config.json"
        own = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        own.pop("transformers_version", None)
        tokens = {name: self.settings[name] for name in ("eos_token_id", "pad_token_id") if name in self.settings}
        return GenerationConfig(**tokens | own)

    def tokenizer(self) -> Any:
        """The fast tokenizer, or None and a warning."""
        if not (self.directory / VOCABULARY).exists():
            warnings.warn(f"{self.directory}: holds no {VOCABULARY}, so there is no tokenizer", stacklevel=3)
            return None
        return fast_tokenizer(self.directory, self.config.vocab_size)


def _glm_config(settings: dict[str, Any], directory: Path, rope_scales: Scaling | None) -> GlmConfig:
    """The configuration of ``GlmForCausalLM`` for a remote one.

    Raises:
        InputError, UnsupportedModelError: as `convert`.
    """
    if settings.get("model_type") != "chatglm":
        raise InputError(
            f"{directory}: is a checkpoint of model_type {settings.get('model_type')!r}, not 'chatglm': load it with "
            "transformers, then call rope_pad_fix.apply"
        )
    if "inner_hidden_size" in settings or "position_encoding_2d" in settings:
        raise UnsupportedModelError(
            f"{directory}: is ChatGLM-6B (position_encoding_2d), whose pairs of positions and prefix attention "
            'GlmForCausalLM does not have: load it under rope_pad_fix.chatglm.compat() and apply level="positions"'
        )
    for name, value, what in _FIXED:
        given = settings.get(name, value)
        if given != value and (given or value):
            raise UnsupportedModelError(f"{directory}: GlmForCausalLM cannot represent {name}={given!r}: {what}")
    heads = settings["num_attention_heads"]
    rope = _rope(float(settings.get("rope_ratio", 1)), directory, rope_scales)
    return GlmConfig(
        vocab_size=settings["padded_vocab_size"],
        hidden_size=settings["hidden_size"],
        intermediate_size=settings["ffn_hidden_size"],
        num_hidden_layers=settings["num_layers"],
        num_attention_heads=heads,
        num_key_value_heads=settings["multi_query_group_num"] if settings.get("multi_query_attention") else heads,
        head_dim=settings.get("kv_channels") or settings["hidden_size"] // heads,
        max_position_embeddings=settings["seq_length"],
        rms_norm_eps=settings.get("layernorm_epsilon", 1e-5),
        attention_bias=bool(settings.get("add_qkv_bias", False)),
        attention_dropout=settings.get("attention_dropout", 0.0),
        pad_token_id=settings.get("pad_token_id"),
        eos_token_id=settings.get("eos_token_id"),
        bos_token_id=None,
        tie_word_embeddings=False,
        dtype=settings.get("torch_dtype") or settings.get("dtype"),
        **rope,
    )


def _rope(ratio: float, directory: Path, scales: Scaling | None) -> dict[str, Any]:
    """The rotary arguments of ``GlmConfig``, in the form that every release takes."""
    if scales not in (None, *get_args(Scaling)):
        raise InputError(f"rope_scales is {scales!r}: it must be 'base' or 'positions'")
    if ratio == 1:
        return {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    scales = scales or _scales(directory)
    if scales is None:
        raise InputError(
            f"{directory}: rope_ratio is {ratio:g}, and there is no model file beside the weights that says what it "
            "scales: pass rope_scales='positions' for ChatGLM2-32k, 'base' for the others"
        )
    if scales == "base":
        return {"rope_theta": 10000.0 * ratio, "partial_rotary_factor": 0.5}
    linear = {"rope_type": "linear", "factor": ratio}
    return {"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "rope_scaling": linear}


def _scales(directory: Path) -> Scaling | None:
    """What the model file beside the weights does with ``rope_ratio``; it is read, not run."""
    for file in sorted(directory.glob("modeling*.py")):
        text = file.read_text(encoding="utf-8")
        if re.search(r"\* *self\.rope_ratio", text):
            return "base"
        if re.search(r"/ *self\.rope_ratio", text):
            return "positions"
    return None


def _shards(directory: Path) -> list[Path]:
    """The weight files, safetensors where there are both kinds."""
    for whole, index in (
        ("model.safetensors", "model.safetensors.index.json"),
        ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ):
        if (directory / index).exists():
            listed = json.loads((directory / index).read_text(encoding="utf-8"))["weight_map"].values()
            shards = [directory / name for name in sorted(set(listed))]
            if missing := [shard.name for shard in shards if not shard.exists()]:
                raise InputError(f"{directory}: lacks the shard {missing[0]} that {index} lists; download it again")
            return shards
        if (directory / whole).exists():
            return [directory / whole]
    raise InputError(f"{directory}: holds no weights (model*.safetensors or pytorch_model*.bin)")


def _tensors(shard: Path) -> Iterator[tuple[str, Tensor]]:
    if shard.suffix == ".safetensors":
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                yield name, file.get_tensor(name)
    else:
        yield from torch.load(shard, map_location="cpu", mmap=True, weights_only=True).items()


def _write_weights(source: _Source, directory: Path) -> None:
    count = len(source.shards)
    shapes: dict[str, torch.Size] = {}
    files: dict[str, str] = {}
    size = 0
    for number, shard in enumerate(_progress(source.shards, "converting"), 1):
        name = "model.safetensors" if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
        weights = {new: tensor.contiguous() for new, tensor in source.converted(shard).items()}
        save_file(weights, directory / name, metadata={"format": "pt"})
        shapes |= {new: tensor.shape for new, tensor in weights.items()}
        files |= dict.fromkeys(weights, name)
        size += sum(tensor.nbytes for tensor in weights.values())
    source.check_complete(shapes)
    if count > 1:
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def _verify(source: Path, target: Path) -> None:
    """Compare the logits of both in float32 for random ids, one row and two."""
    with compat():
        old = AutoModel.from_pretrained(source, trust_remote_code=True, dtype=torch.float32).eval()
        new = GlmForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        ids = torch.randint(new.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            difference = (old(input_ids=ids).logits - new(input_ids=ids).logits).abs().max().item()
    if difference:
        raise InputError(f"{source}: after conversion logits differ by up to {difference:g}; nothing was written")


def _progress(shards: list[Path], what: str) -> Any:
    return tqdm(shards, desc=what, unit="shard", disable=None if len(shards) > 1 else True)
