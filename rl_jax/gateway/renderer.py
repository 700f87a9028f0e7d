"""[N] Between chat messages and token ids, without ever tokenising sampled text again.

Built from what a Hugging Face tokenizer directory holds: a `tokenizers.Tokenizer` and a Jinja chat
template. A rollout's token log is prompt(), sampled ids, extend(), sampled ids, ...: sampled ids go
in as they are, because decoding and encoding them need not give them back (BPE), and what follows
them is the difference of two renderings of a dummy conversation, tokenised on its own. Knows
nothing of models, sessions or rewards.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2.sandbox
import numpy as np
from tokenizers import Tokenizer

from rl_jax.tasks.base import Message

_DUMMY = {"role": "user", "content": "?"}


@dataclass(frozen=True, eq=False)
class Renderer:
    tokenizer: Tokenizer
    template: jinja2.Template
    stops: tuple[str, ...]
    """Texts of the tokens that end an assistant turn; the first one ends an answer."""
    stop_ids: tuple[int, ...]
    """Their ids."""
    call_pattern: re.Pattern[str]
    """Finds each tool call in a turn's text, stop token included; groups `name`, `arguments`."""
    added: re.Pattern[str]
    """Any added token's text."""
    named: Mapping[str, str]
    """What the template knows besides the messages: the texts of `bos_token` and its like."""

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.get_vocab_size(with_added_tokens=True)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The ids from which the assistant's next turn is sampled."""
        return self._encode(self._render(messages, generate=True))

    def extend(
        self, messages: Sequence[Message], new: Sequence[Message], *, closed: bool
    ) -> list[int]:
        """The ids to append after the last sampled id, up to where the next turn is sampled.

        `messages` ends in the sampled assistant turn, `new` answers it, all at once. `closed` says
        whether the sampled ids end in a stop token; where they do not, one is put first.
        """
        begin, end, before = self._last_turn(messages)
        after = self._render([_DUMMY, messages[-1], *new], generate=True)
        if after[:end] != before[:end]:
            raise ValueError("chat template rewrites an assistant turn once messages follow it")
        return self._encode(after[end if closed else begin :])

    def parse(self, ids: Sequence[int]) -> Message:
        """The assistant message that sampled ids say.

        A call that does not fit the pattern stays in `content`, its tokens spelled out.
        """
        text = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        found = list(self.call_pattern.finditer(text))
        if not found:
            return {"role": "assistant", "content": text.removesuffix(self.stops[0]).strip()}
        calls = [{"name": call["name"], "arguments": call["arguments"]} for call in found]
        content = text[: found[0].start()].strip()
        return {"role": "assistant", "content": content, "tool_calls": calls}

    def tokenize(self, messages: Sequence[Message]) -> tuple[np.ndarray, np.ndarray]:
        """A finished conversation as a rollout would log it: ids int32[T], loss mask bool[T].

        The mask is true on the assistant's turns, each with its stop token.
        """
        if not messages or messages[-1]["role"] != "assistant":
            raise ValueError("a conversation to learn from ends in an assistant message")
        ids: list[int] = []
        mask: list[bool] = []
        done = 0
        for at, message in enumerate(messages):
            if message["role"] == "assistant":
                head, new = messages[:done], messages[done:at]
                given = self.extend(head, new, closed=True) if head else self.prompt(new)
                sampled = self._turn(message)
                ids += given + sampled
                mask += [False] * len(given) + [True] * len(sampled)
                done = at + 1
        return np.array(ids, np.int32), np.array(mask, np.bool_)

    def _turn(self, message: Message) -> list[int]:
        """The ids of an assistant message, from after the generation prompt to its stop token."""
        _, end, text = self._last_turn([message])
        head = self._render([_DUMMY], generate=True)
        if not text.startswith(head):
            raise ValueError("chat template opens a past assistant turn unlike one to be sampled")
        return self._encode(text[len(head) : end])

    def _last_turn(self, messages: Sequence[Message]) -> tuple[int, int, str]:
        """(begin, end of its stop token, text) of the last message in a dummy conversation."""
        text = self._render([_DUMMY, messages[-1]], generate=False)
        begin, stop = max((text.rfind(stop), stop) for stop in self.stops)
        if messages[-1]["role"] != "assistant" or begin < 0:
            raise ValueError("the last message must be an assistant turn that the template closes")
        return begin, begin + len(stop), text

    def _render(self, messages: Sequence[Message], *, generate: bool) -> str:
        shown = [self._disarm(message) for message in messages]
        return self.template.render(self.named, messages=shown, add_generation_prompt=generate)

    def _disarm(self, message: Message) -> Message:
        """No text from outside may pass for a token that structures the conversation."""
        if message["role"] == "assistant":
            return message
        content = self.added.sub(lambda token: f"{token[0][0]} {token[0][1:]}", message["content"])
        return {**message, "content": content}

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def build_renderer(
    tokenizer: Tokenizer,
    template: str,
    *,
    stops: Sequence[str],
    call_pattern: str,
    named: Mapping[str, str] = MappingProxyType({}),
) -> Renderer:
    """A renderer from the template's text; the keywords as the fields say."""
    added = {token.content: id for id, token in tokenizer.get_added_tokens_decoder().items()}
    for stop in stops:
        if stop not in added:
            raise ValueError(f"the stop token {stop!r} is not a special token of the tokenizer")
    pattern = re.compile(call_pattern, re.DOTALL)
    if not {"name", "arguments"} <= pattern.groupindex.keys():
        raise ValueError(f"the call pattern {call_pattern!r} needs groups name and arguments")
    any_added = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))))
    compiled = _environment().from_string(template)
    stop_ids = tuple(added[stop] for stop in stops)
    return Renderer(tokenizer, compiled, tuple(stops), stop_ids, pattern, any_added, named)


def _environment() -> jinja2.Environment:
    """Jinja as Hugging Face sets it up for chat templates."""

    def fail(message: str) -> NoReturn:
        raise ValueError(f"chat template: {message}")

    def to_json(value: Any, **keywords: Any) -> str:
        return json.dumps(value, ensure_ascii=False, **keywords)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = fail
    environment.filters["tojson"] = to_json
    return environment
