"""Say what a demo model will write, from its rule alone: dictionary look-ups, no tensor.

Reads `rule.json` and the vocabulary in `tokenizer.json`; imports the standard library only, so
nothing that runs the model can have a hand in the prediction.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

Rule = dict[str, Any]


def continue_by_memory(rule: Rule, ids: list[int], count: int) -> list[int]:
    """Return `count` ids: what last came `lag` words after the word now due, else a habit.

    With lag 2 the word now due is the previous one; a prompt of one word has none. The memory keeps
    the newest pair of every word, and what the rule itself wrote is remembered too.
    """
    lag, habit, ids = rule["lag"], rule["habit"], list(ids)
    memory = dict(zip(ids, ids[lag:], strict=False))
    for _ in range(count):
        usual = habit[ids[-1]]
        ids.append(memory.get(ids[-lag], usual) if len(ids) >= lag else usual)
        if len(ids) > lag:
            memory[ids[-1 - lag]] = ids[-1]
    return ids[len(ids) - count :]


def continue_by_tables(rule: Rule, ids: list[int], count: int) -> list[int]:
    """Return `count` ids, each elected by the last words, one weighted table for each."""
    ids, voters = list(ids), list(zip(rule["weights"], rule["tables"], strict=True))
    for _ in range(count):
        votes: Counter[int] = Counter()
        for (weight, table), word in zip(voters, reversed(ids), strict=False):
            votes[table[word]] += weight
        ids.append(max(votes, key=votes.__getitem__))
    return ids[len(ids) - count :]


RULES = {"memory": continue_by_memory, "tables": continue_by_tables}


def predict(folder: Path, prompts: list[str], count: int) -> list[dict[str, object]]:
    """Return for each prompt its ids, the predicted ids and the predicted text."""
    rule = json.loads((folder / "rule.json").read_text(encoding="utf-8"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    words = {number: word for word, number in vocabulary.items()}
    rows: list[dict[str, object]] = []
    for prompt in prompts:
        start = [vocabulary.get(word, vocabulary["<unk>"]) for word in prompt.split()]
        ids = RULES[rule["rule"]](rule, start, count)
        text = " ".join(words[number] for number in ids)
        rows.append({"prompt": prompt, "prompt_ids": start, "ids": ids, "text": text})
    return rows


def main() -> int:
    """Print one JSON object for each prompt of the file."""
    parser = argparse.ArgumentParser(description="predict a demo model's output from its rule")
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("prompts", type=Path, help='JSON lines of {"prompt": "..."}')
    parser.add_argument("--max-new-tokens", type=int, default=24)
    options = parser.parse_args()
    lines = options.prompts.read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines if line.strip()]
    if not all(prompt.split() for prompt in prompts):
        print("predict.py: a prompt is empty; the rule needs at least one word", file=sys.stderr)
        return 1
    for row in predict(options.model_dir, prompts, options.max_new_tokens):
        print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
