"""[N] The order in which prompts are asked: a seeded, endless, resumable grain dataset."""

import grain


def prompt_indices(length: int, seed: int) -> grain.DatasetIterator[int]:
    """Prompt indices of a task of `length` prompts: each once an epoch, reshuffled every epoch.

    Never ends. `get_state()` gives a JSON-able dict, `set_state(state)` goes on from it.
    """
    indices = grain.MapDataset.range(length).seed(seed).shuffle().repeat()
    in_this_thread = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return iter(indices.to_iter_dataset(in_this_thread))
