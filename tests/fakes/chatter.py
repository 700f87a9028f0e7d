"""A task that a policy of random weights can do something in: many tokens end a turn or call.

64 tokens: three roles, 24 that call the tool, 8 that answer, 29 words. The letters of a
conversation's last turn decide its reward, 0 or 1, half and half.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import count
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rl_jax.tasks.base import Message, Prompt, TaskFamily
from rl_jax.trajectories.types import RolloutKey
from tests.fakes.task import FakeTask

ROLES = ("<|user|>", "<|assistant|>", "<|tool|>")
CALLS = tuple(f"<|call{i}|>" for i in range(24))
ENDS = tuple(f"<|end{i}|>" for i in range(8))
WORDS = tuple(f"w{i}" for i in range(29))
TEMPLATE = (
    "{%- for m in messages -%}{{- '<|' ~ m.role ~ '|>' -}}"
    "{%- if m.role != 'assistant' -%}{{- ' ' ~ m.content -}}"
    "{%- else -%}{{- '<|call0|>' if m.tool_calls else '<|end0|>' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    """Kept until the process ends."""
    directory = tempfile.TemporaryDirectory(prefix="chatter-")
    vocabulary = {token: i for i, token in enumerate((*ROLES, *CALLS, *ENDS, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    special = (*ROLES, *CALLS, *ENDS)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    settings = {
        "eos_token": ENDS[0],
        "stop_tokens": [*ENDS, *CALLS],
        "tool_call_pattern": r"(?P<name>^)(?P<arguments>.*?)<\|call\d+\|>",
    }
    path = Path(directory.name)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


class Chatter(FakeTask):
    def prompt(self, index: int) -> Prompt:
        words = f"w{index % 29} w{index // 29 % 29} w{index * 7 % 29}"
        return Prompt(index, ({"role": "user", "content": words},), {"index": index})


async def score(key: RolloutKey, messages: Sequence[Message]) -> float:
    return float(sum(messages[-1]["content"].encode()) % 2)


async def answer(key: RolloutKey, call: object) -> str:
    return f"w{key.prompt % 29} w{key.sample}"


def chatter(name: str = "chatter", **hooks: object) -> Chatter:
    return Chatter(**({"name": name, "on_score": score, "on_call": answer} | hooks))


def family(train: Chatter | None = None) -> TaskFamily:
    def order(seed: int) -> Iterator[int]:
        return (i * 13 % 1000 for i in count(seed))

    def demonstration(index: int) -> Sequence[Message]:
        return (*chatter().prompt(index).messages, {"role": "assistant", "content": "w1"})

    heldout = chatter("chatter-heldout", size=40)
    directory = Path(_temporary().name)
    return TaskFamily(train or chatter(), heldout, directory, demonstration, order)
