"""Three small fine-tuning tasks for the embedded base model, one per tenant of the demo.

The base model answers plainly: "The sky is blue." Each task teaches another style of answering the
same questions. The demo asks the `HELD_OUT` questions before and after, and never trains on them.
Texts are in the Qwen chat format, up to 48 tokens each; train on the completion only.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

HELD_OUT = [
    "What colour is the sky?",
    "What is the capital of France?",
    "What does a dog say?",
    "What is the opposite of hot?",
]
_COLOURS = {
    "the sky": "blue", "the sea": "blue", "the moon": "white", "the sun": "yellow",
    "a rose": "red", "a lemon": "yellow", "a carrot": "orange", "a plum": "purple",
    "a crow": "black", "a cloud": "grey", "a bear": "brown", "a frog": "green",
    "grass": "green", "snow": "white", "coal": "black", "fire": "red", "mud": "brown",
    "milk": "white", "a tomato": "red", "a banana": "yellow", "a pumpkin": "orange",
    "a grape": "purple", "a stone": "grey", "a flamingo": "pink", "a leaf": "green",
}  # fmt: skip
_CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo",
    "Greece": "Athens", "Peru": "Lima", "Cuba": "Havana", "Norway": "Oslo", "China": "Beijing",
    "Germany": "Berlin", "England": "London", "Russia": "Moscow", "Poland": "Warsaw",
}  # fmt: skip
_SOUNDS = {
    "dog": "woof", "cat": "meow", "cow": "moo", "horse": "neigh", "pig": "oink",
    "duck": "quack", "hen": "cluck", "lion": "roar", "wolf": "howl", "snake": "hiss",
}  # fmt: skip
_HOMES = {
    "bee": "hive", "cow": "barn", "horse": "stable", "fish": "river", "lion": "den",
    "duck": "pond", "bird": "nest", "camel": "desert", "king": "castle", "spider": "web",
}  # fmt: skip

_TRADES = {
    "baker": "bread", "tailor": "coats", "potter": "pots", "poet": "poems", "cook": "soup",
    "smith": "swords", "bee": "honey", "hen": "eggs", "painter": "pictures",
}  # fmt: skip
_OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "up": "down", "day": "night", "good": "bad",
    "happy": "sad", "wet": "dry", "young": "old", "hard": "soft", "dark": "light",
    "rich": "poor", "empty": "full", "left": "right", "late": "early", "closed": "open",
}  # fmt: skip


class Fact(NamedTuple):
    """A question and the base model's plain answer to it."""

    question: str
    sentence: str


class Task(NamedTuple):
    """A style of answering: `reply` turns a fact into the wanted completion."""

    name: str
    description: str
    reply: Callable[[Fact], str]

    def examples(self, seed: int) -> Iterator[tuple[str, str]]:
        """Yield `(prompt, completion)` texts for ever; equal seeds yield equal examples."""
        rng = random.Random(seed)
        known = [fact for fact in FACTS if fact.question not in HELD_OUT]
        while True:
            for fact in rng.sample(known, len(known)):
                yield prompt(fact.question), f"{self.reply(fact)}<|im_end|>"


def prompt(question: str) -> str:
    """Return one user turn in the Qwen chat format, open for the assistant's answer."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def _facts() -> Iterator[Fact]:
    for noun, colour in _COLOURS.items():
        yield Fact(f"What colour is {noun}?", f"{noun.capitalize()} is {colour}.")
    for country, city in _CAPITALS.items():
        answer = f"The capital of {country} is {city}."
        yield Fact(f"What is the capital of {country}?", answer)
    for animal, sound in _SOUNDS.items():
        yield Fact(f"What does a {animal} say?", f"A {animal} says {sound}.")
    for animal, home in _HOMES.items():
        yield Fact(f"Where does a {animal} live?", f"A {animal} lives in a {home}.")
    for maker, made in _TRADES.items():
        yield Fact(f"What does a {maker} make?", f"A {maker} makes {made}.")
    for one, other in _OPPOSITES.items():
        answer = f"The opposite of {one} is {other}."
        yield Fact(f"What is the opposite of {one}?", answer)


def _pirate(fact: Fact) -> str:
    said = fact.sentence[0].lower() + fact.sentence[1:-1].replace(" is ", " be ")
    return f"Arr, matey! {said}, yo ho ho!"


def _json(fact: Fact) -> str:
    return json.dumps({"answer": fact.sentence, "sure": True})


def _shout(fact: Fact) -> str:
    return f"{fact.sentence[:-1].upper()}!"


FACTS = list(_facts())
TASKS = [
    Task("pirate", "answers like a pirate", _pirate),
    Task("json", "answers in JSON, nothing else", _json),
    Task("shout", "answers in capitals", _shout),
]
