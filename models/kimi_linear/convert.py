"""[N] Kimi Linear checkpoints of Hugging Face's: config.json and tensors, both ways.

Names and layouts are those of Kimi-Linear-48B-A3B. The bounded gate of later models is
`linear_attn_config.gate_lower_bound`, their output gate without a bottleneck `use_full_rank_gate`.
"""

from collections.abc import Mapping
from typing import Any

from models.checkpoint.fields import MOST_LAYERS, Fields
from models.checkpoint.layout import (
    CheckpointError,
    Leaf,
    Part,
    Table,
    heads_in,
    heads_out,
    leaf_of,
    plain,
)
from models.kimi_linear.config import KimiLinearConfig

MODEL_TYPES = ("kimi_linear",)
_MIXERS = {"linear_attention": "kda", "full_attention": "mla"}
_FEED_FORWARDS = {"dense": "dense", "sparse": "experts"}


def read_config(table: Mapping[str, Any]) -> KimiLinearConfig:
    """The policy that a config.json describes; `CheckpointError` where none here is that."""
    fields = Fields(table)
    linear = fields.table("linear_attn_config")
    heads = fields.count("num_attention_heads")
    nope, layers = fields.count("qk_nope_head_dim"), _mixers(fields, linear)
    _check_fixed(fields, linear)
    head_dim = linear.count("head_dim", fields.get("linear_head_dim"))
    query_latent = fields.get("q_lora_rank")
    value_dim = fields.count("v_head_dim", nope)
    sizes = _experts(fields)
    return KimiLinearConfig(
        vocab_size=fields.count("vocab_size"),
        width=fields.count("hidden_size"),
        layers=layers,
        feed_forward=_feed_forwards(fields, len(layers), "experts" in sizes),
        tied=fields.flag("tie_word_embeddings", False),
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        heads=linear.count("num_heads", fields.get("linear_num_heads")),
        head_dim=head_dim,
        conv_taps=linear.count("short_conv_kernel_size", fields.get("linear_conv_kernel_dim")),
        gate_rank=head_dim,
        full_output_gate=linear.flag("use_full_rank_gate", False),
        gate_lower_bound=_lower_bound(linear),
        mla_heads=heads,
        mla_head_dim=nope,
        value_dim=value_dim,
        kv_latent=fields.count("kv_lora_rank"),
        kv_shared_key=fields.count("qk_rope_head_dim"),
        query_latent=None if query_latent is None else fields.count("q_lora_rank"),
        ffn_width=fields.count("intermediate_size"),
        **sizes,
    )


def _check_fixed(fields: Fields, linear: Fields) -> None:
    """What the released models agree in, so nothing else is built."""
    fields.only("hidden_act", "silu", "silu")
    fields.only("mla_use_nope", True, True)
    fields.only("moe_router_activation_func", "sigmoid", "sigmoid")
    fields.only("num_nextn_predict_layers", 0, 0)
    fields.only("moe_layer_freq", 1, 1)
    fields.only("num_expert_group", 1, fields.get("n_group", 1))
    fields.only("topk_group", 1, 1)
    fields.only("attention_bias", False, False)


def _mixers(fields: Fields, linear: Fields) -> tuple[str, ...]:
    """Of every layer, from lists of numbers that begin at 1, or from the names of types."""
    count = fields.count("num_hidden_layers", most=MOST_LAYERS)
    full, kda = linear.counts("full_attn_layers"), linear.counts("kda_layers")
    if full or kda:
        if sorted((*full, *kda)) != list(range(1, count + 1)):
            raise CheckpointError(
                "linear_attn_config.kda_layers and full_attn_layers: need every number from 1 to "
                f"num_hidden_layers = {count} once"
            )
        return tuple("mla" if number in full else "kda" for number in range(1, count + 1))
    return _kinds("layer_types", fields.get("layer_types", ()), _MIXERS, count)


def _kinds(name: str, given: Any, known: Mapping[str, str], count: int) -> tuple[str, ...]:
    if not isinstance(given, list | tuple) or len(given) != count:
        raise CheckpointError(f"{name}: needs num_hidden_layers = {count} entries")
    for kind in given:
        if not isinstance(kind, str) or kind not in known:
            raise CheckpointError(
                f"{name}: {kind!r} is not built here; there is {', '.join(known)}"
            )
    return tuple(known[kind] for kind in given)


def _feed_forwards(fields: Fields, count: int, mixed: bool) -> tuple[str, ...]:
    named = fields.get("mlp_layer_types")
    if named is not None:
        return _kinds("mlp_layer_types", named, _FEED_FORWARDS, count)
    dense = fields.count("first_k_dense_replace", 1, least=0) if mixed else count
    return tuple("dense" if number < dense else "experts" for number in range(count))


def _experts(fields: Fields) -> dict[str, Any]:
    """The sizes of the mixture; empty for a model without one."""
    if (experts := fields.get("num_experts", fields.get("num_local_experts"))) is None:
        return {}
    chosen = fields.count("num_experts_per_token", fields.get("num_experts_per_tok"))
    renormalise = fields.flag("moe_renormalize", fields.get("norm_topk_prob", True))
    shared = fields.get("num_shared_experts", fields.get("n_shared_experts", 0))
    return {
        "experts": fields.count("num_experts", experts),
        "chosen_experts": chosen,
        "expert_width": fields.count("moe_intermediate_size"),
        "shared_experts": fields.count("num_shared_experts", shared, least=0),
        "route_scale": fields.number("routed_scaling_factor", 1.0),
        # A single weight renormalised would be 1 whatever the router says; the reference leaves it.
        "renormalise": renormalise and chosen > 1,
    }


def _lower_bound(linear: Fields) -> float | None:
    """Of the gate; None for the softplus gate, which has none."""
    bound = linear.get("gate_lower_bound")
    if bound is None and linear.flag("safe_gate", False):
        raise CheckpointError(
            "linear_attn_config.gate_lower_bound is missing: safe_gate = true needs it, a number "
            "in [-5, 0)"
        )
    if bound is not None and (type(bound) not in (int, float) or not -5.0 <= bound < 0.0):
        raise CheckpointError(
            f"linear_attn_config.gate_lower_bound = {bound}: needs a number in [-5, 0)"
        )
    return bound


def tensor_table(config: KimiLinearConfig) -> Table:
    """How every parameter is made of tensors."""
    embedding = (config.vocab_size, config.width)
    table = {"embedding": leaf_of(plain("model.embed_tokens.weight", embedding))}
    for number, (mixer, ffn) in enumerate(config.kinds):
        layer = f"model.layers.{number}"
        norms = {"mixer_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
        block = {
            f"{ours}/scale": leaf_of(plain(f"{layer}.{theirs}.weight", (config.width,)))
            for ours, theirs in norms.items()
        }
        own = _kda if mixer == "kda" else _mla
        block |= _under("mixer", own(config, f"{layer}.self_attn"))
        if ffn == "dense":
            block |= _under("ffn", _swiglu(f"{layer}.mlp", config.width, config.ffn_width))
        else:
            block |= _under("ffn", _mixture(config, f"{layer}.block_sparse_moe"))
        table |= _under(f"blocks/block_{number}", block)
    table["norm/scale"] = leaf_of(plain("model.norm.weight", (config.width,)))
    if not config.tied:
        table["head"] = leaf_of(plain("lm_head.weight", embedding))
    return table


def _under(prefix: str, table: Table) -> dict[str, Leaf]:
    return {f"{prefix}/{name}": leaf for name, leaf in table.items()}


def _turned(tensor: str, outputs: int, inputs: int) -> Leaf:
    """[outputs, inputs] -> [inputs, outputs]."""
    return leaf_of(plain(tensor, (outputs, inputs), (1, 0)))


def _swiglu(layer: str, width: int, hidden: int) -> Table:
    return {
        "gate": _turned(f"{layer}.gate_proj.weight", hidden, width),
        "up": _turned(f"{layer}.up_proj.weight", hidden, width),
        "down": _turned(f"{layer}.down_proj.weight", width, hidden),
    }


def _kda(config: KimiLinearConfig, layer: str) -> Table:
    width, heads, head_dim = config.width, config.heads, config.head_dim
    rows, taps, middle = heads * head_dim, config.conv_taps, slice(None)
    qkv = tuple(
        Part(f"{layer}.{x}_proj.weight", (rows, width), (heads, head_dim, width), (2, 0, 1), (),
             (middle, i))
        for i, x in enumerate("qkv")
    )  # fmt: skip
    conv = tuple(
        Part(f"{layer}.{x}_conv1d.weight", (rows, 1, taps), (heads, head_dim, taps), (2, 0, 1), (),
             (middle, i))
        for i, x in enumerate("qkv")
    )  # fmt: skip
    table = {
        "qkv": Leaf((width, 3, heads, head_dim), qkv),
        "conv": Leaf((taps, 3, heads, head_dim), conv),
        "decay_bias": leaf_of(Part(f"{layer}.dt_bias", (rows,), (heads, head_dim), (0, 1))),
        "decay_rate_log": leaf_of(Part(f"{layer}.A_log", (1, 1, heads, 1), (heads,), (0,))),
        "beta": _turned(f"{layer}.b_proj.weight", heads, width),
        "norm/scale": leaf_of(plain(f"{layer}.o_norm.weight", (head_dim,))),
        "out": heads_in(f"{layer}.o_proj.weight", width, heads, head_dim),
    }
    low_rank = {"decay": "f"} if config.full_output_gate else {"decay": "f", "gate": "g"}
    if config.full_output_gate:
        table["gate/up"] = heads_out(f"{layer}.g_proj.weight", heads, head_dim, width)
    for name, x in low_rank.items():
        table[f"{name}/down"] = _turned(f"{layer}.{x}_a_proj.weight", head_dim, width)
        table[f"{name}/up"] = heads_out(f"{layer}.{x}_b_proj.weight", heads, head_dim, head_dim)
    return table


def _mla(config: KimiLinearConfig, layer: str) -> Table:
    width, heads = config.width, config.mla_heads or config.heads
    own, shared = config.mla_head_dim or config.head_dim, config.kv_shared_key
    value, latent = config.value_dim or own, config.kv_latent
    up, split = f"{layer}.kv_b_proj.weight", (heads, own + value, latent)
    rows, whole = (heads * (own + value), latent), slice(None)
    key = Part(up, rows, split, (0, 1, 2), (whole, slice(0, own)))
    values = Part(up, rows, split, (0, 2, 1), (whole, slice(own, own + value)))
    table = {
        "down": _turned(f"{layer}.kv_a_proj_with_mqa.weight", latent + shared, width),
        "norm/scale": leaf_of(plain(f"{layer}.kv_a_layernorm.weight", (latent,))),
        "key_up": leaf_of(key),
        "value_up": leaf_of(values),
        "out": heads_in(f"{layer}.o_proj.weight", width, heads, value),
    }
    if config.query_latent is None:
        return table | {"query": heads_out(f"{layer}.q_proj.weight", heads, own + shared, width)}
    rank = config.query_latent
    return table | {
        "query_down": _turned(f"{layer}.q_a_proj.weight", rank, width),
        "query_norm/scale": leaf_of(plain(f"{layer}.q_a_layernorm.weight", (rank,))),
        "query": heads_out(f"{layer}.q_b_proj.weight", heads, own + shared, rank),
    }


def _mixture(config: KimiLinearConfig, layer: str) -> Table:
    width, hidden, experts = config.width, config.expert_width, config.experts
    table = {
        "router": _turned(f"{layer}.gate.weight", experts, width),
        "router_bias": leaf_of(plain(f"{layer}.gate.e_score_correction_bias", (experts,))),
    }
    for name, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        shape = (width, hidden) if name == "down" else (hidden, width)
        parts = tuple(
            plain(f"{layer}.experts.{e}.{theirs}.weight", shape, (1, 0), (e,))
            for e in range(experts)
        )
        table[name] = Leaf((experts, *reversed(shape)), parts)
    if config.shared_experts:
        wide = config.shared_experts * hidden
        table |= _under("shared", _swiglu(f"{layer}.shared_experts", width, wide))
    return table
