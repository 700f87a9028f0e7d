"""Conversations rendered by transformers: what `tests/gateway/test_real_tokenizers.py` compares.

    python tests/interop/chats.py           writes tests/golden/chats.json
    python tests/interop/chats.py --check   compares instead; exit status 1 where it differs

Runs in transformers' environment on the tokenizers that `make real` fetches, and imports nothing
of ours. Only conversations and token ids are recorded, neither templates nor vocabularies.
"""

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path

from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "chats.json"
REAL = ROOT / ".tools" / "real"
NAMES = ("qwen3", "deepseek_v3")
NAMED = ("bos_token", "eos_token", "pad_token")


def said(role: str, content: str) -> dict:
    return {"role": role, "content": content}


CONVERSATIONS = [
    [said("user", "What is 7 + 5?")],
    [said("system", "Answer in one word."), said("user", "Die Hauptstadt?\n\tVon Österreich")],
    [said("user", "Zähle: 一二三"), said("assistant", "1 2 3"), said("user", "  und weiter 🙂?")],
]  # fmt: skip


def tokenizer_of(directory: Path) -> PreTrainedTokenizerFast:
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    named = {name: settings[name] for name in NAMED if settings.get(name)}
    return PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"),
        chat_template=settings["chat_template"],
        **{name: t if isinstance(t, str) else t["content"] for name, t in named.items()},
    )


def golden() -> dict:
    def ids(tokenizer: PreTrainedTokenizerFast, conversation: list[dict]) -> list[int]:
        text = tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, tokenize=False
        )
        return tokenizer(text, add_special_tokens=False).input_ids

    made = {}
    for name in NAMES:
        tokenizer = tokenizer_of(REAL / name)
        made[name] = [ids(tokenizer, conversation) for conversation in CONVERSATIONS]
    peers = {"transformers": version("transformers")}
    return {"peer": peers, "conversations": CONVERSATIONS, "ids": made}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of write")
    made = golden()
    if not parser.parse_args().check:
        GOLDEN.write_text(json.dumps(made, ensure_ascii=False) + "\n")
        return 0
    same = made == json.loads(GOLDEN.read_text())
    print(f"{GOLDEN.name}: {'agrees' if same else 'differs'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
