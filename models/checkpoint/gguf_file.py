"""[H] A GGUF file of llama.cpp's, seen as the Hugging Face checkpoint it was made of.

Quantised tensors are dequantised row by row as they are read. llama.cpp keeps the two halves of
each query and key head interleaved; rows come out in Hugging Face's order.
"""

import json
import re
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from models.checkpoint.bpe import tokenizer_json
from models.checkpoint.fields import Fields
from models.checkpoint.layout import CheckpointError, Tensor
from models.checkpoint.safetensors import read_run
from models.checkpoint.source import CONFIG, TEMPLATE, TOKENIZER, TOKENIZER_CONFIG, File

_TOKENIZER = "tokenizer.ggml."
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class GgufFile:
    """The checkpoint in the file `path`, of architecture llama. Needs the package gguf."""

    def __init__(self, path: Path):
        fields, tensors = _read(path)
        self.config_file = str(path)
        try:
            self.config = _config(fields, {str(t.name) for t in tensors})
            text = json.dumps(self.config, indent=2) + "\n"
            self.carried = _carried(fields) | {CONFIG: text.encode()}
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        self._file = path
        self._places: dict[str, tuple[int, Any]] = {}
        self.tensors: dict[str, Tensor] = {}
        for tensor in tensors:
            name = _name(str(tensor.name))
            shape = tuple(int(n) for n in reversed(tensor.shape))
            _check_kind(path, str(tensor.name), shape, tensor.tensor_type)
            self.tensors[name] = Tensor(str(path), "F32", shape)
            self._places[name] = int(tensor.data_offset), tensor.tensor_type
        self.files = (File("model.safetensors", {"format": "pt"}, tuple(self.tensors)),)

    def run(self, name: str, start: int, count: int) -> np.ndarray:
        """See `Source`; whole rows are dequantised, whole heads where they are interleaved."""
        shape = self.tensors[name].shape
        width = shape[-1] if len(shape) > 1 else 1
        first, last = start // width, -(-(start + count) // width)
        head = self._interleaved(name)
        if head:
            low, high = first // head * head, -(-last // head) * head
            rows = self._rows(name, low, high).reshape(-1, head // 2, 2, width)
            rows = rows.swapaxes(1, 2).reshape(-1, width)[first - low : last - low]
        else:
            rows = self._rows(name, first, last)
        return rows.reshape(-1)[start - first * width :][:count]

    def _interleaved(self, name: str) -> int:
        """Rows of a head whose halves are interleaved; 0 for other tensors."""
        found = re.search(r"self_attn\.[qk]_proj\.", name)
        return self.config["head_dim"] if found else 0

    def _rows(self, name: str, first: int, last: int) -> np.ndarray:
        from gguf import quants
        from gguf.constants import GGML_QUANT_SIZES

        offset, kind = self._places[name]
        numbers, size = GGML_QUANT_SIZES[kind]
        shape = self.tensors[name].shape
        row = prod(shape[1:]) // numbers * size if len(shape) > 1 else size
        byte = np.dtype(np.uint8)
        raw = read_run(str(self._file), offset + first * row, byte, (last - first) * row)
        data = raw.reshape(last - first, row)
        return quants.dequantize(data, kind).reshape(last - first, -1)


def _read(path: Path) -> tuple[dict[str, Any], list[Any]]:
    """Values by key, and what the file says of its tensors."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise CheckpointError(
            f"{path}: reading GGUF needs the package gguf: pip install 'rl-jax[hf]'"
        ) from None
    try:
        reader = GGUFReader(path)
        return {n: field.contents() for n, field in reader.fields.items()}, list(reader.tensors)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
        raise CheckpointError(f"{path}: truncated or no GGUF file ({error})") from error


def _check_kind(path: Path, name: str, shape: tuple[int, ...], kind: Any) -> None:
    """Whether rows of the tensor can be dequantised, tried on a block of zeros."""
    from gguf import quants
    from gguf.constants import GGML_QUANT_SIZES

    numbers, size = GGML_QUANT_SIZES[kind]
    try:
        quants.dequantize(np.zeros((1, size), np.uint8), kind)
    except NotImplementedError:
        raise CheckpointError(f"{path}: {name} is {kind.name}: it cannot be read") from None
    row = shape[-1] if len(shape) > 1 else 1
    if row % numbers:
        raise CheckpointError(
            f"{path}: {name} is {kind.name} in rows of {row}: needs a multiple of {numbers}"
        )


def _name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if found and found[2] in _BLOCK_NAMES:
        return f"model.layers.{found[1]}.{_BLOCK_NAMES[found[2]]}.{found[3]}"
    return name


def _config(fields: dict[str, Any], tensors: set[str]) -> dict[str, Any]:
    """The config.json that llama.cpp's converter read."""
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"general.architecture = {json.dumps(architecture)}: there is llama")

    own = Fields({n.removeprefix("llama."): v for n, v in fields.items()}, "llama.")
    width, heads = own.count("embedding_length"), own.count("attention.head_count")
    head_dim = own.count("attention.key_length", width // heads)
    own.only("rope.dimension_count", head_dim, head_dim)
    own.only("rope.scaling.type", "none", "none")
    for name in ("rope.scaling.factor", "rope.scale_linear"):
        own.only(name, 1.0, 1.0)
    tokens = fields.get("tokenizer.ggml.tokens")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tokens) if isinstance(tokens, list) else own.count("vocab_size"),
        "hidden_size": width,
        "intermediate_size": own.count("feed_forward_length"),
        "num_hidden_layers": own.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": own.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": own.count("context_length"),
        "rms_norm_eps": _shortest(own.number("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(own.number("rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }


def _shortest(value: float) -> float:
    """A number of single precision as the shortest decimal that is the same."""
    return float(str(np.float32(value)))


def _carried(fields: dict[str, Any]) -> dict[str, bytes]:
    """The tokenizer and the chat template, as files."""
    own = Fields({n.removeprefix("tokenizer.ggml."): v for n, v in fields.items()}, _TOKENIZER)
    tokens = own.strings("tokens")
    if not tokens:
        return {}
    if (kind := own.get("model")) != "gpt2":
        raise CheckpointError(
            f"tokenizer.ggml.model = {json.dumps(kind)}: there is gpt2, byte-level BPE"
        )
    first = _token(own, "bos", tokens) if own.flag("add_bos_token", False) else None
    types = own.get("token_type", ())
    if types and len(types) != len(tokens):
        raise CheckpointError(
            f"tokenizer.ggml.token_type: has {len(types)} entries for {len(tokens)} tokens"
        )
    text = tokenizer_json(tokens, own.strings("merges"), types, own.get("pre"), first)
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    told: dict[str, Any] = {
        f"{short}_token": tokens[number]
        for short, role in roles.items()
        if (number := _token(own, role, tokens)) is not None
    }
    told |= {"add_bos_token": first is not None, "tokenizer_class": "PreTrainedTokenizerFast"}
    files = {TOKENIZER: text}
    if isinstance(template := fields.get("tokenizer.chat_template"), str):
        files[TEMPLATE] = template
        told["chat_template"] = template
    files[TOKENIZER_CONFIG] = json.dumps(told, ensure_ascii=False, indent=1)
    return {name: text.encode() for name, text in files.items()}


def _token(own: Fields, role: str, tokens: Sequence[str]) -> int | None:
    """The number of the token with this role; None where there is none."""
    name = f"{role}_token_id"
    if own.get(name) is None:
        return None
    number = own.count(name, least=0)
    if number >= len(tokens):
        raise CheckpointError(
            f"tokenizer.ggml.{name} = {number}: needs one of {len(tokens)} tokens"
        )
    return number
