"""[N] Llama and Qwen checkpoints of Hugging Face's: config.json and tensors, both ways.

Names and layouts are those of transformers' llama, qwen2 and qwen3. Rows of a projection are heads;
both keep the two halves of a rotated head side by side.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from models.checkpoint.fields import MOST_LAYERS, Fields
from models.checkpoint.layout import (
    CheckpointError,
    Part,
    Table,
    heads_in,
    heads_out,
    leaf_of,
    plain,
)
from models.layers.rope import KINDS, RopeScaling
from models.llama.config import LlamaConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
MODEL_TYPES = ("llama", "qwen2", "qwen3")


_ORIGINAL = "original_max_position_embeddings"
_FREQUENCIES = {"linear": (), "llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ()}
_YARN = ("beta_fast", "beta_slow", "attention_factor")


def read_config(table: Mapping[str, Any]) -> LlamaConfig:
    """The policy that a config.json describes; `CheckpointError` where none here is that."""
    fields = Fields(table)
    kind = table["model_type"]
    width, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"num_key_value_heads = {kv_heads}: needs a divisor of num_attention_heads = {heads}"
        )
    if "head_dim" not in table and kind != "qwen3" and width % heads:
        raise CheckpointError(
            f"num_attention_heads = {heads}: needs a divisor of hidden_size = {width}"
        )
    fields.only("hidden_act", "silu", "silu")
    fields.only("use_sliding_window", False, False)
    fields.only("mlp_bias", False, False)
    if kind != "qwen2":  # whose flag says nothing: queries, keys and values have biases
        fields.only("attention_bias", False, False)
    theta, scaling = _rope(fields)
    return LlamaConfig(
        vocab_size=fields.count("vocab_size"),
        width=width,
        layers=fields.count("num_hidden_layers", most=MOST_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=fields.count("head_dim", 128 if kind == "qwen3" else width // heads),
        ffn_width=fields.count("intermediate_size"),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        tied=fields.flag("tie_word_embeddings", False),
        qk_norm=kind == "qwen3",
        qkv_bias=kind == "qwen2",
        max_positions=_longest(fields),
    )


def _longest(fields: Fields) -> int | None:
    name = "max_position_embeddings"
    return None if fields.get(name) is None else fields.count(name)


def _rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """Base and scaling, by the names of transformers 5 or of those before."""
    new = fields.table("rope_parameters")
    theta = new.number("rope_theta", fields.number("rope_theta", 10000.0))
    scaling = new if new.get("rope_type") else fields.table("rope_scaling")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in KINDS:
        raise CheckpointError(f"rope_type = {kind!r}: there is default, {', '.join(KINDS)}")
    given: dict[str, Any] = {name: scaling.number(name) for name in _FREQUENCIES[kind]}
    if kind != "linear":
        given["original_max_positions"] = scaling.count(_ORIGINAL, _longest(fields))
    if kind == "yarn":
        for name in ("mscale", "mscale_all_dim"):
            scaling.only(name, None, None)
        given["whole_pairs"] = scaling.flag("truncate", True)
        for name in _YARN:
            if scaling.get(name) is not None:
                given[name] = scaling.number(name)
    return theta, RopeScaling(kind, scaling.number("factor"), **given)


def frequencies(config: LlamaConfig) -> np.ndarray:
    """float64[head_dim / 2]: rope_theta^(-2i / head_dim), which Llama 2 stores in every layer."""
    return config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)


def tensor_table(config: LlamaConfig) -> Table:
    """How every parameter is made of tensors."""
    embedding = (config.vocab_size, config.width)
    table = {"embedding": leaf_of(plain(EMBEDDING, embedding))}
    for number in range(config.layers):
        ours, theirs = f"blocks/block_{number}", f"model.layers.{number}"
        table |= {f"{ours}/{name}": leaf for name, leaf in _block(config, theirs).items()}
    table["norm/scale"] = leaf_of(plain("model.norm.weight", (config.width,)))
    if not config.tied:
        table["head"] = leaf_of(plain(HEAD, embedding))
    return table


def _block(config: LlamaConfig, layer: str) -> Table:
    width, ffn, head_dim = config.width, config.ffn_width, config.head_dim
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    table = {
        "attention_norm/scale": leaf_of(plain(f"{layer}.input_layernorm.weight", (width,))),
        "ffn_norm/scale": leaf_of(plain(f"{layer}.post_attention_layernorm.weight", (width,))),
        "ffn/gate": leaf_of(plain(f"{mlp}.gate_proj.weight", (ffn, width), (1, 0))),
        "ffn/up": leaf_of(plain(f"{mlp}.up_proj.weight", (ffn, width), (1, 0))),
        "ffn/down": leaf_of(plain(f"{mlp}.down_proj.weight", (width, ffn), (1, 0))),
        "attention/out": heads_in(f"{attention}.o_proj.weight", width, config.heads, head_dim),
    }
    sizes = {"query": config.heads, "key": config.kv_heads, "value": config.kv_heads}
    for name, heads in sizes.items():
        theirs = f"{attention}.{name[0]}_proj"
        table[f"attention/{name}"] = heads_out(f"{theirs}.weight", heads, head_dim, width)
        if config.qkv_bias:
            split = (heads, head_dim)
            part = Part(f"{theirs}.bias", (heads * head_dim,), split, (0, 1))
            table[f"attention/{name}_bias"] = leaf_of(part)
    if config.qk_norm:
        for name in ("query", "key"):
            part = plain(f"{attention}.{name[0]}_norm.weight", (head_dim,))
            table[f"attention/{name}_norm/scale"] = leaf_of(part)
    return table
