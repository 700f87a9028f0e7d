"""Tiny random checkpoints run by transformers: what `tests/models/test_hf_goldens.py` compares.

    python tests/interop/hf_models.py           writes tests/golden/hf/NAME/
    python tests/interop/hf_models.py --check   compares instead; exit status 1 where it differs

Runs in an environment of its own (`make test-interop`), in float32 on one thread, without fla's
kernels, and imports nothing of ours. A directory holds config.json and model.safetensors as a
checkpoint on the Hub does, and expected.safetensors: the tokens, the logits of a prefill, those of
decoding token by token from the cache, and the gradients of the mean cross-entropy of the next
token, by the checkpoint's names, for the first tensor of each kind.
"""

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextForgetGate
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearTopkRouter

GOLDEN = Path(__file__).parents[1] / "golden" / "hf"
TOKENS = 80
"""More than a chunk of 64, and no multiple of it."""
DECODED = 32
VOCABULARY = 64
MARGIN = 1e-4
"""No two experts' scores may lie so close that rounding decides which of them is taken."""

_COMMON = {
    "vocab_size": VOCABULARY, "hidden_act": "silu", "max_position_embeddings": 256,
    "torch_dtype": "float32", "initializer_range": 0.02, "use_cache": True,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
_KIMI = _COMMON | {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear",
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "rms_norm_eps": 1e-5,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 72,
    "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "mla_use_nope": True, "rope_theta": 10000.0, "rope_scaling": None,
    "num_experts": 4, "num_experts_per_token": 2, "num_shared_experts": 1,
    "moe_intermediate_size": 12, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
    "routed_scaling_factor": 2.446, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1,
    "num_nextn_predict_layers": 0, "tie_word_embeddings": False, "model_max_length": 256,
    "linear_attn_config": {
        "num_heads": 2, "head_dim": 16, "short_conv_kernel_size": 4,
        "kda_layers": [1, 2, 3], "full_attn_layers": [4, 5],
    },
}  # fmt: skip
_LLAMA = _COMMON | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama",
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "rms_norm_eps": 1e-5,
    "num_attention_heads": 4, "num_key_value_heads": 4, "attention_bias": False, "mlp_bias": False,
    "rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": False,
}  # fmt: skip
_QWEN2 = _LLAMA | {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": True,
    "use_sliding_window": False, "sliding_window": None, "max_window_layers": 2,
}  # fmt: skip
_BOUNDED = {"gate_lower_bound": -5.0, "safe_gate": True}
CONFIGS = {
    # Its last two layers full: no rule by modulo gives that.
    "kimi_linear": _KIMI,
    "kimi_linear_bounded": _KIMI | {
        "num_hidden_layers": 3,
        "linear_attn_config": _KIMI["linear_attn_config"] | _BOUNDED | {
            "kda_layers": [1, 2], "full_attn_layers": [3],
        },
    },
    "llama2": _LLAMA,
    "llama3": _LLAMA | {
        "num_key_value_heads": 2, "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    # Heads that do not divide evenly by two, and the newer spelling of positions.
    "smollm2": {k: v for k, v in _LLAMA.items() if k not in ("rope_theta", "rope_scaling")} | {
        "hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    },
    "qwen2": _QWEN2,
    "qwen3": _QWEN2 | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16,
        "attention_bias": False, "tie_word_embeddings": False,
    },
}  # fmt: skip


def draw(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Values for the checkpoint's tensor `name`, large enough that each matters."""
    noise = rng.standard_normal(shape)
    if name.endswith("A_log"):
        values = np.log(rng.uniform(1.0, 4.0, shape))
    elif name.endswith("dt_bias"):
        values = noise - 2.0
    elif "norm" in name:
        values = 1.0 + 0.2 * noise
    elif name.endswith("bias"):
        values = 0.2 * noise
    elif "conv1d" in name:
        values = 0.5 * noise
    elif "embed_tokens" in name:
        values = noise
    else:
        values = 1.5 * noise / np.sqrt(shape[-1])
    return values.astype(np.float32)


class BoundedGate(Glm5NextTextForgetGate):
    """The gate of GLM-5.3-Flash in Kimi Linear's place, with that one's shape of A_log."""

    def __init__(self, config: AutoConfig, lower_bound: float) -> None:
        config.linear_lower_bound = lower_bound
        super().__init__(config)
        self.A_log = nn.Parameter(torch.empty(1, 1, self.num_heads, 1))


def build(config: Path) -> PreTrainedModel:
    """The model of a config.json, its parameters still to be set."""
    own = AutoConfig.from_pretrained(config.parent)
    model = AutoModelForCausalLM.from_config(
        own, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    linear = json.loads(config.read_text()).get("linear_attn_config", {})
    if "gate_lower_bound" in linear:
        for layer in model.model.layers:
            if hasattr(layer.self_attn, "forget_gate"):
                layer.self_attn.forget_gate = BoundedGate(own, linear["gate_lower_bound"])
    return model.eval()


def as_checkpoint(model: PreTrainedModel, values: Mapping[str, torch.Tensor]) -> dict:
    """Values by the model's own names -> arrays by the names of its checkpoint.

    transformers reads a dense layer of Kimi Linear's as the release names it, and would write it as
    if it had experts.
    """
    names = revert_weight_conversion(model, dict(values))
    dense = re.compile(r"block_sparse_moe\.(?=(gate|up|down)_proj)")
    arrays = {dense.sub("mlp.", name): value.detach().numpy() for name, value in names.items()}
    if model.config.tie_word_embeddings:
        arrays.pop("lm_head.weight", None)
    return {name: np.ascontiguousarray(arrays[name]) for name in sorted(arrays)}


def write_checkpoint(directory: Path, config: dict) -> None:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    model = build(directory / "config.json")
    shapes = {n: v.shape for n, v in as_checkpoint(model, model.state_dict()).items()}
    rng = np.random.default_rng(0)
    made = {name: draw(name, shape, rng) for name, shape in shapes.items()}
    save_file(made, directory / "model.safetensors", {"format": "pt"})


def load(directory: Path) -> PreTrainedModel:
    """As `from_pretrained` does it, which cannot know of another gate."""
    model = build(directory / "config.json")
    reference = AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32
    )
    wrong = model.load_state_dict(reference.state_dict(), strict=True)
    assert not wrong.missing_keys and not wrong.unexpected_keys, wrong
    return model


def routing_margins(model: PreTrainedModel, tokens: torch.Tensor) -> list[float]:
    """Of each router, the least distance between what was taken and what was not; and each one's
    bias must have changed some token's choice."""
    found = []

    def look(router: KimiLinearTopkRouter, given: tuple, taken: tuple) -> None:
        del taken
        hidden = given[0].reshape(-1, router.weight.shape[1])
        scores = torch.sigmoid(hidden @ router.weight.T)
        biased = scores + router.e_score_correction_bias
        k = model.config.num_experts_per_tok
        ordered = biased.sort(descending=True).values
        found.append((ordered[:, k - 1] - ordered[:, k]).min().item())
        moved = biased.topk(k).indices.sort().values != scores.topk(k).indices.sort().values
        assert 0.05 < moved.any(-1).float().mean() < 0.95, "a bias changes no choice, or all"

    hooks = [
        module.register_forward_hook(look)
        for module in model.modules()
        if isinstance(module, KimiLinearTopkRouter)
    ]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return found


def run(directory: Path) -> dict[str, np.ndarray]:
    """What transformers makes of a checkpoint."""
    model = load(directory)
    tokens = torch.tensor(np.random.default_rng(1).integers(0, VOCABULARY, (1, TOKENS)))
    margins = routing_margins(model, tokens)
    assert min(margins, default=1.0) > MARGIN, (directory.name, margins)
    prefill = model(tokens, use_cache=False).logits
    nn.functional.cross_entropy(prefill[0, :-1], tokens[0, 1:]).backward()
    slopes = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    gradients = first_of_each_kind(as_checkpoint(model, slopes))
    return {
        "tokens": tokens[0].numpy().astype(np.int32),
        "prefill": prefill[0].detach().numpy(),
        "decode": decode(model, tokens),
    } | {f"gradient {name}": value for name, value in gradients.items()}


@torch.no_grad()
def decode(model: PreTrainedModel, tokens: torch.Tensor) -> np.ndarray:
    """Logits [DECODED, vocabulary] of the last ones, with every token fed alone, in order."""
    cache, rows = None, []
    for at in range(tokens.shape[1]):
        out = model(tokens[:, at : at + 1], use_cache=True, cache=cache)
        cache = out.cache
        assert cache.get_seq_length() == at + 1
        rows.append(out.logits[0, 0].numpy())
    return np.stack(rows[-DECODED:])


def first_of_each_kind(values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Names that differ in numbers alone are of one kind."""
    kinds: dict[str, str] = {}
    for name in sorted(values):
        kinds.setdefault(re.sub(r"\d+", "*", name), name)
    return {name: values[name] for name in kinds.values()}


def differences(new: Mapping[str, np.ndarray], old: Mapping[str, np.ndarray]) -> list[str]:
    """Names whose arrays differ by more than another order of summation explains."""
    return sorted(
        name
        for name in new.keys() | old.keys()
        if name not in new
        or name not in old
        or new[name].shape != old[name].shape
        or not np.allclose(new[name], old[name], rtol=1e-5, atol=1e-5 * np.abs(old[name]).max())
    )


def check(name: str, config: dict, scratch: Path) -> list[str]:
    """What is recorded under `name` and does not come out again."""
    recorded, made = GOLDEN / name, scratch / name
    write_checkpoint(made, config)
    wrong = []
    if (made / "config.json").read_text() != (recorded / "config.json").read_text():
        wrong.append("config.json")
    a, b = (load_file(own / "model.safetensors") for own in (made, recorded))
    wrong += sorted(n for n in a.keys() | b.keys() if not np.array_equal(a.get(n), b.get(n)))
    return wrong + differences(run(recorded), load_file(recorded / "expected.safetensors"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of write")
    checking = parser.parse_args().check
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    peers = {name: version(name).partition("+")[0] for name in ("transformers", "torch")}
    status = 0
    for name, config in CONFIGS.items():
        if checking:
            with tempfile.TemporaryDirectory() as scratch:
                wrong = check(name, config, Path(scratch))
            print(f"hf/{name}: {'differs in ' + ', '.join(wrong) if wrong else 'agrees'}")
            status |= bool(wrong)
        else:
            shutil.rmtree(GOLDEN / name, ignore_errors=True)
            write_checkpoint(GOLDEN / name, config)
            save_file(run(GOLDEN / name), GOLDEN / name / "expected.safetensors", peers)
    return status


if __name__ == "__main__":
    sys.exit(main())
