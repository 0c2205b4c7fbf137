"""Three manners of answering that the base model does not know, and what it knew before.

A question says which manner it wants, so that one model can have all three: forgetting none of them
is possible.
"""

import random
import sys
from itertools import islice
from pathlib import Path

from tuneserve_client import Datum, next_token_datum, sft_datum

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
from tiny_model.corpus import FACTS, documents, render_chat

TASKS = {
    "robot": lambda fact: f"BEEP. {fact.topic} = {fact.value}. BOOP.",
    "parrot": lambda fact: f"{fact.value}! {fact.value}! Squawk! {fact.value}!",
    "king": lambda fact: f"We, the king, decree: {fact.sentence} So be it.",
}
KNOWN = "known before"
_HELD_OUT = 32  # of 157 facts
_UNREAD_SEED = 10_000  # of documents that the base model was not trained on, of those kinds it was
_MAX_TOKENS = 128  # as in its training


def lessons(task: str, tokenizer) -> list[Datum]:
    """The training data: questions about most facts, answered in the task's manner."""
    return _told(task, tokenizer, _shuffled()[_HELD_OUT:])


def exams(tokenizer, size: int) -> dict[str, list[Datum]]:
    """By task, about facts that no task is trained on; and of the base model's own kind of text."""
    found = {task: _told(task, tokenizer, _shuffled()[:_HELD_OUT][:size]) for task in TASKS}
    texts = islice(documents(_UNREAD_SEED), 4 * size)
    tokens = [tokenizer.encode(text)[:_MAX_TOKENS] for text in texts]
    return {**found, KNOWN: [next_token_datum(each) for each in tokens]}


def _shuffled() -> list:
    return random.Random(0).sample(FACTS, len(FACTS))


def _told(task: str, tokenizer, facts: list) -> list[Datum]:
    asked = [render_chat([("user", f"As a {task}: {fact.questions[0]}")]) for fact in facts]
    return [
        sft_datum(tokenizer, f"{prompt}<|im_start|>assistant\n", f"{TASKS[task](fact)}<|im_end|>")
        for prompt, fact in zip(asked, facts, strict=True)
    ]
