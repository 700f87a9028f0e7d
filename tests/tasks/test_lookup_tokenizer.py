"""The committed tokenizer is what its script trains, and makes one token of every word."""

import json

import pytest

from rl_jax.gateway.renderer_files import load_renderer
from rl_jax.tasks.lookup.data import TOKENIZER_DIRECTORY, load_world
from rl_jax.tasks.lookup.train_tokenizer import VOCABULARY, train, words
from rl_jax.tasks.lookup.world import World

RENDERER = load_renderer(TOKENIZER_DIRECTORY)


def test_the_file_is_what_the_script_trains():
    committed = (TOKENIZER_DIRECTORY / "tokenizer.json").read_text(encoding="utf-8")
    assert json.loads(train(load_world()).to_str()) == json.loads(committed)


def test_every_id_is_used_and_their_number_is_a_multiple_of_64():
    assert RENDERER.vocab_size == VOCABULARY == 384
    assert sorted(RENDERER.tokenizer.get_vocab().values()) == list(range(384))


def test_every_word_in_context_is_one_token_and_decodes_to_itself():
    everything = words(load_world())
    assert len(everything) == len(set(everything)) == 173
    text = "".join(f" {word}" for word in everything)
    encoded = RENDERER.tokenizer.encode(text)
    assert encoded.tokens == [f"Ġ{word}" for word in everything]
    assert RENDERER.tokenizer.decode(encoded.ids) == text


def test_a_world_of_too_many_words_is_refused():
    names = {f"{a}{b}{c}": "X" for a in "QWERTZUP" for b in "ASDFGHJK" for c in "YXCVBNM"}
    world = World(tuple(sorted(names)), ("X",), {"country": names, "currency": {"X": "XXD"}})
    with pytest.raises(ValueError, match=r"need \d+ ids more than the 384"):
        train(world)


def test_a_directory_with_a_missing_part_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer.json does not exist"):
        load_renderer(tmp_path)
    for name in ("tokenizer.json", "chat_template.jinja"):
        (tmp_path / name).write_text((TOKENIZER_DIRECTORY / name).read_text())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": null}')
    with pytest.raises(ValueError, match=r"tokenizer_config.json lacks the key eos_token"):
        load_renderer(tmp_path)
