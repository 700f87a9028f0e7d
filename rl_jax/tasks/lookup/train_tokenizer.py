"""[H] Trains the lookup task's byte-level BPE on the words of its world and writes tokenizer.json.

Run `python -m rl_jax.tasks.lookup.train_tokenizer`. Every relation, every entity and the empty
answer become one token with their leading space; other words fall apart into letters.
"""

import string

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rl_jax.tasks.lookup.data import TOKENIZER_DIRECTORY, load_world
from rl_jax.tasks.lookup.world import NOTHING, World

VOCABULARY = 384
"""A multiple of 64; ids beyond what training found are reserved."""
SPECIAL = ("<|end|>", "<|call|>", "<|user|>", "<|tool|>", "<|assistant|>", "<|unknown|>")
ALPHABET = ["Ġ", *string.ascii_letters, *string.digits]
"""As the byte-level pre-tokenizer spells it: Ġ is the space. All else is <|unknown|>."""


def words(world: World) -> list[str]:
    """Every word that a turn can hold."""
    return [*world.relations, *world.entities, NOTHING]


def train(world: World) -> Tokenizer:
    """The tokenizer of exactly VOCABULARY ids, the same always for the same world."""
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL[-1]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2 * VOCABULARY,
        min_frequency=1,
        special_tokens=list(SPECIAL),
        initial_alphabet=ALPHABET,
        show_progress=False,
    )
    tokenizer.train_from_iterator([f" {word}" for word in words(world)], trainer)
    spare = VOCABULARY - tokenizer.get_vocab_size()
    if spare < 0:
        raise ValueError(
            f"the world's words need {-spare} ids more than the {VOCABULARY} there are"
        )
    tokenizer.add_special_tokens([f"<|reserved_{index}|>" for index in range(spare)])
    return tokenizer


if __name__ == "__main__":
    train(load_world()).save(str(TOKENIZER_DIRECTORY / "tokenizer.json"))
