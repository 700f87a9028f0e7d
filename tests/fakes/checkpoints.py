"""Tiny random checkpoints as Hugging Face lays them out, names and shapes written out from its
models, not from our tables."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 80,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
QWEN2 = LLAMA | {"model_type": "qwen2", "tie_word_embeddings": True}
QWEN3 = LLAMA | {"model_type": "qwen3", "head_dim": 16}
KIMI: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "vocab_size": 80,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-5, "q_lora_rank": None,
    "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
    "mla_use_nope": True, "num_experts": 4, "num_experts_per_token": 2, "num_shared_experts": 1,
    "moe_intermediate_size": 20, "moe_renormalize": True, "routed_scaling_factor": 2.446,
    "moe_router_activation_func": "sigmoid", "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "num_expert_group": 1, "topk_group": 1, "tie_word_embeddings": False,
    "linear_attn_config": {
        "num_heads": 3, "head_dim": 16, "short_conv_kernel_size": 4,
        "kda_layers": [1, 3], "full_attn_layers": [2],
    },
}  # fmt: skip
BOUNDED = KIMI | {
    "linear_attn_config": KIMI["linear_attn_config"] | {"gate_lower_bound": -5.0, "safe_gate": True}
}
FULL_RANK = BOUNDED | {
    "linear_attn_config": BOUNDED["linear_attn_config"] | {"use_full_rank_gate": True}
}
CONFIGS = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "kimi_linear": KIMI,
    "kimi_linear_bounded": BOUNDED,
    "kimi_linear_full_rank": FULL_RANK,
}
EXACT = ("A_log", "dt_bias", "e_score_correction_bias")
"""Kept in float32 by checkpoints of any dtype."""


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of every tensor, by name."""
    width, words = config["hidden_size"], (config["vocab_size"], config["hidden_size"])
    found = {"model.embed_tokens.weight": words, "model.norm.weight": (width,)}
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = words
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        block = _kimi(config, number) if "linear_attn_config" in config else _llama(config)
        block |= {
            "input_layernorm.weight": (width,), "post_attention_layernorm.weight": (width,)
        }  # fmt: skip
        found |= {f"{layer}.{name}": shape for name, shape in block.items()}
    return found


def _mlp(prefix: str, width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (hidden, width),
        f"{prefix}.up_proj.weight": (hidden, width),
        f"{prefix}.down_proj.weight": (width, hidden),
    }


def _llama(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    width, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim", width // heads)
    rows = {"q": heads * head_dim} | dict.fromkeys("kv", config["num_key_value_heads"] * head_dim)
    found = {f"self_attn.{x}_proj.weight": (n, width) for x, n in rows.items()}
    found["self_attn.o_proj.weight"] = (width, heads * head_dim)
    if config["model_type"] == "qwen2":
        found |= {f"self_attn.{x}_proj.bias": (n,) for x, n in rows.items()}
    if config["model_type"] == "qwen3":
        found |= {f"self_attn.{x}_norm.weight": (head_dim,) for x in "qk"}
    return found | _mlp("mlp", width, config["intermediate_size"])


def _kimi(config: Mapping[str, Any], number: int) -> dict[str, tuple[int, ...]]:
    width, linear = config["hidden_size"], config["linear_attn_config"]
    if number + 1 in linear["kda_layers"]:
        heads, dim = linear["num_heads"], linear["head_dim"]
        rows, taps = heads * dim, linear["short_conv_kernel_size"]
        mixer = {f"{x}_proj.weight": (rows, width) for x in "qkv"}
        mixer |= {f"{x}_conv1d.weight": (rows, 1, taps) for x in "qkv"}
        full = linear.get("use_full_rank_gate", False)
        mixer |= {f"{x}_a_proj.weight": (dim, width) for x in ("f" if full else "fg")}
        mixer |= {f"{x}_b_proj.weight": (rows, dim) for x in ("f" if full else "fg")}
        mixer |= {"g_proj.weight": (rows, width)} if full else {}
        mixer |= {
            "b_proj.weight": (heads, width), "A_log": (1, 1, heads, 1), "dt_bias": (rows,),
            "o_norm.weight": (dim,), "o_proj.weight": (width, rows),
        }  # fmt: skip
    else:
        heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
        nope, rope, value = (config[f"{x}_head_dim"] for x in ("qk_nope", "qk_rope", "v"))
        mixer = {
            "q_proj.weight": (heads * (nope + rope), width),
            "kv_a_proj_with_mqa.weight": (rank + rope, width), "kv_a_layernorm.weight": (rank,),
            "kv_b_proj.weight": (heads * (nope + value), rank),
            "o_proj.weight": (width, heads * value),
        }  # fmt: skip
    found = {f"self_attn.{name}": shape for name, shape in mixer.items()}
    if number < config["first_k_dense_replace"]:
        return found | _mlp("mlp", width, config["intermediate_size"])
    experts, hidden = config["num_experts"], config["moe_intermediate_size"]
    moe = "block_sparse_moe"
    found |= {
        f"{moe}.gate.weight": (experts, width), f"{moe}.gate.e_score_correction_bias": (experts,)
    }  # fmt: skip
    for one in range(experts):
        found |= {
            f"{moe}.experts.{one}.w1.weight": (hidden, width),
            f"{moe}.experts.{one}.w2.weight": (width, hidden),
            f"{moe}.experts.{one}.w3.weight": (hidden, width),
        }
    return found | _mlp(f"{moe}.shared_experts", width, hidden)


def values(
    config: Mapping[str, Any], dtype: Any = ml_dtypes.bfloat16, seed: int = 0
) -> dict[str, np.ndarray]:
    """Random numbers of `dtype`, those that are always kept exact in float32."""
    draws = np.random.default_rng(seed)
    return {
        name: draws.standard_normal(shape).astype(np.float32 if name.endswith(EXACT) else dtype)
        for name, shape in shapes(config).items()
    }


def write(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], files: int = 1
) -> Path:
    """A checkpoint in one file, or in several with an index."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    if files == 1:
        save_file(dict(tensors), directory / "model.safetensors", {"format": "pt"})
        return directory
    names = sorted(tensors)
    places = {}
    for i in range(files):
        file = f"model-{i + 1:05}-of-{files:05}.safetensors"
        own = names[i::files]
        save_file({n: tensors[n] for n in own}, directory / file, {"format": "pt"})
        places |= dict.fromkeys(own, file)
    total = sum(array.nbytes for array in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (directory / "model.safetensors.index.json").write_text(text)
    return directory


def write_tokenizer(directory: Path, tokens: int) -> None:
    """A byte-level BPE of single bytes, and added tokens up to `tokens` in all."""
    vocabulary = {chr(0x100 + i): i for i in range(min(tokens, 40))}
    added = [{"id": i, "content": f"<|{i}|>", "special": True} for i in range(40, tokens)]
    table = {"model": {"type": "BPE", "vocab": vocabulary, "merges": []}, "added_tokens": added}
    (directory / "tokenizer.json").write_text(json.dumps(table))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<|41|>"}')
    (directory / "chat_template.jinja").write_text("{{ messages }}")
