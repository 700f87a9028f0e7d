"""GGUF files that a test made: rows as llama.cpp turns them, numbers as it quantises them."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quants
from tokenizers import Tokenizer

from models.checkpoint.bpe import tokenizer_json
from models.checkpoint.gguf_file import GgufFile
from models.checkpoint.layout import CheckpointError
from models.checkpoint.load import load_params, open_checkpoint
from rl_jax.snapshots.manifest import named_leaves
from tests.fakes import checkpoints

CONFIG = checkpoints.LLAMA | {"tie_word_embeddings": True, "intermediate_size": 64}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WORDS = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256))]
WORDS += [chr(256 + i) for i in range(256 - len(WORDS))]
TOKENS = ["<|end|>", *WORDS, "ab", "abc"]
KINDS = {
    "F32": GGMLQuantizationType.F32,
    "F16": GGMLQuantizationType.F16,
    "Q8_0": GGMLQuantizationType.Q8_0,
    "Q4_1": GGMLQuantizationType.Q4_1,
}


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Number i of a head's first half, then number i of its second, as llama.cpp turns them."""
    out = np.empty_like(rows)
    size = len(rows) // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = rows[head * size + i]
            out[head * size + 2 * i + 1] = rows[head * size + size // 2 + i]
    return out


def write(path: Path, kind: str, **changes) -> dict[str, np.ndarray]:
    """Returns the tensors by Hugging Face's names, with what quantising left of them."""
    config = CONFIG | {"vocab_size": len(TOKENS)}
    writer = GGUFWriter(path, changes.get("architecture", "llama"))
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(changes.get("heads", 4))
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    if pre := changes.get("pre", "smollm"):
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types(changes.get("types", [3, *[1] * (len(TOKENS) - 1)]))
    writer.add_token_merges(changes.get("merges", ["a b", "ab c"]))
    writer.add_eos_token_id(changes.get("eos", 0))
    changes.get("more", lambda writer: None)(writer)
    writer.add_chat_template("{{ messages[0].content }}")
    kept = {}
    for name, array in checkpoints.values(config, np.float32).items():
        stem, _, end = name.rpartition(".")
        *_, layer = stem.split("layers.")
        number, _, inner = layer.partition(".")
        theirs = NAMES[stem] if stem in NAMES else f"blk.{number}.{NAMES[inner]}"
        heads = {"attn_q": 4, "attn_k": 2}.get(theirs.split(".")[-1])
        turned = array if heads is None else interleaved(array, heads)
        how = KINDS[kind] if array.ndim > 1 else KINDS["F32"]
        if name in changes.get("integers", ()):
            writer.add_tensor(f"{theirs}.{end}", np.zeros(array.shape, np.int8))
            continue
        raw = quants.quantize(turned, how)
        writer.add_tensor(f"{theirs}.{end}", raw, raw_dtype=how)
        left = quants.dequantize(raw, how).reshape(array.shape)
        inverse = np.argsort(interleaved(np.arange(len(array)), heads)) if heads else slice(None)
        kept[name] = left[inverse]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_parameters_are_those_of_the_checkpoint_it_was_made_of(tmp_path, kind):
    kept = write(tmp_path / "m.gguf", kind)
    config = CONFIG | {"vocab_size": len(TOKENS)}
    plain = checkpoints.write(tmp_path / "hf", config, kept)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    ours, theirs = (open_checkpoint(path) for path in (tmp_path / "m.gguf", plain))
    assert ours.config == theirs.config
    left, right = (named_leaves(load_params(one, lambda _: device)) for one in (ours, theirs))
    assert left.keys() == right.keys()
    assert all(np.array_equal(left[name], right[name]) for name in left)


def test_runs_may_begin_and_end_inside_heads(tmp_path):
    kept = write(tmp_path / "m.gguf", "Q8_0")
    name = "model.layers.1.self_attn.q_proj.weight"
    source = GgufFile(tmp_path / "m.gguf")
    whole = kept[name].reshape(-1)
    for start, count in ((0, 1024), (0, 1), (33, 7), (200, 300), (1000, 24)):
        assert np.array_equal(source.run(name, start, count), whole[start : start + count])


def test_tokenizer_and_template_come_along(tmp_path):
    write(tmp_path / "m.gguf", "F32")
    carried = GgufFile(tmp_path / "m.gguf").carried
    tokenizer = Tokenizer.from_str(carried["tokenizer.json"].decode())
    text = "abc 12 é\n<|end|>"
    ids = tokenizer.encode(text).ids
    assert ids[0] == TOKENS.index("abc") and ids[-1] == 0
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert carried["chat_template.jinja"] == b"{{ messages[0].content }}"
    assert json.loads(carried["tokenizer_config.json"])["eos_token"] == "<|end|>"


def test_digits_stand_alone_only_where_the_file_says_so():
    tokens = [*TOKENS, "12"]
    kinds = [1] * len(tokens)
    apart = Tokenizer.from_str(tokenizer_json(tokens, ["1 2"], kinds, "smollm", None))
    joined = Tokenizer.from_str(tokenizer_json(tokens, ["1 2"], kinds, "gpt-2", None))
    assert apart.encode("12").tokens == ["1", "2"] and joined.encode("12").tokens == ["12"]
    begun = Tokenizer.from_str(tokenizer_json(tokens, [], kinds, "llama-bpe", 0))
    assert begun.encode("1").tokens == ["<|end|>", "1"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architecture": "gpt2"}, 'general.architecture = "gpt2": there is llama'),
        ({"pre": "deepseek"}, 'tokenizer.ggml.pre = "deepseek": there is gpt-2, smollm, llama-bpe'),
        ({"pre": None}, "tokenizer.ggml.pre is missing: there is gpt-2, smollm, llama-bpe"),
        ({"heads": 0}, "llama.attention.head_count = 0: needs an integer, at least 1"),
        ({"heads": [4, 4]}, "llama.attention.head_count = [4, 4]: needs an integer, at least 1"),
        (
            {"eos": 10**6},
            f"tokenizer.ggml.eos_token_id = 1000000: needs one of {len(TOKENS)} tokens",
        ),
        (
            {"more": lambda w: (w.add_bos_token_id(999), w.add_add_bos_token(True))},
            f"tokenizer.ggml.bos_token_id = 999: needs one of {len(TOKENS)} tokens",
        ),
        (
            {"types": [1] * (len(TOKENS) + 1)},
            f"tokenizer.ggml.token_type: has {len(TOKENS) + 1} entries for {len(TOKENS)} tokens",
        ),
        (
            {"merges": ["a b", "ab"]},
            'tokenizer.ggml.merges: "ab" needs two tokens with a space between',
        ),
        (
            {"more": lambda w: w.add_float32("llama.rope.scale_linear", 4.0)},
            "llama.rope.scale_linear = 4.0: needs 1.0, nothing else is built here",
        ),
        (
            {"more": lambda w: w.add_string("llama.rope.scaling.type", "linear")},
            'llama.rope.scaling.type = "linear": needs "none", nothing else is built here',
        ),
        (
            {"integers": ["model.norm.weight"]},
            "output_norm.weight is I8: it cannot be read",
        ),
    ],
)
def test_other_files_are_refused(tmp_path, changes, said):
    path = tmp_path / "m.gguf"
    write(path, "F32", **changes)
    with pytest.raises(CheckpointError, match="^" + str(path)) as told:
        open_checkpoint(path)
    assert str(told.value) == f"{path}: {said}"


def test_a_cut_file_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    write(path, "F32")
    for size in (path.stat().st_size - 100, 2000, 100, 10, 0):
        with path.open("r+b") as file:
            file.truncate(size)
        with pytest.raises(CheckpointError, match=f"^{path}: truncated or no GGUF file"):
            open_checkpoint(path)
