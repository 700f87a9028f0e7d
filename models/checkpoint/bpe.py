"""[N] tokenizer.json of a byte-level BPE from what a GGUF file says of it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from models.checkpoint.layout import CheckpointError

CONTROL, USER_DEFINED = 3, 4
"""Token types of GGUF that text is never merged into."""

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _bytes(use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex
    }  # fmt: skip


def _split(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False
    }  # fmt: skip


def _pieces(pre: str | None) -> tuple[Sequence[dict[str, Any]], bool]:
    """How text is cut before merging, and whether a whole piece may be a token without merges."""
    match pre:
        case "gpt-2":
            return [_bytes(True)], False
        case "smollm":
            return [{"type": "Digits", "individual_digits": True}, _bytes(True)], False
        case "llama-bpe":
            return [_split(_LLAMA3), _bytes(False)], True
    said = "is missing" if pre is None else f"= {json.dumps(pre)}"
    raise CheckpointError(f"tokenizer.ggml.pre {said}: there is gpt-2, smollm, llama-bpe")


def tokenizer_json(
    tokens: Sequence[str],
    merges: Sequence[str],
    types: Sequence[int],
    pre: str | None,
    first: int | None,
) -> str:
    """The text of tokenizer.json; `first` is the token that every text begins with."""
    cuts, whole = _pieces(pre)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = [merge.split(" ") for merge in merges]
    for merge, pair in zip(merges, pairs, strict=True):
        if len(pair) != 2 or not vocabulary.keys() >= {*pair}:
            raise CheckpointError(
                f"tokenizer.ggml.merges: {json.dumps(merge)} needs two tokens with a space between"
            )
    fixed = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": number, "content": tokens[number], **fixed, "special": kind == CONTROL}
        for number, kind in enumerate(types)
        if kind in (CONTROL, USER_DEFINED)
    ]
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": whole,
        "vocab": vocabulary,
        "merges": pairs,
    }
    table = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(cuts)},
        "post_processor": None if first is None else _beginning(tokens[first], first),
        "decoder": _bytes(True),
        "model": model,
    }
    return json.dumps(table, ensure_ascii=False, indent=1)


def _beginning(token: str, number: int) -> Mapping[str, Any]:
    special = {"SpecialToken": {"id": token, "type_id": 0}}
    text = [{"Sequence": {"id": name, "type_id": 0}} for name in ("A", "B")]
    return {
        "type": "TemplateProcessing",
        "single": [special, text[0]],
        "pair": [special, text[0], special, text[1]],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }
