"""Endless, reproducible text for the embedded model: one short document after another.

Plain prose, facts, questions, lists, JSON, sums and chat turns all speak of the same small world. A
model of a million weights can therefore know all of it, and a LoRA adapter only has to learn a new
manner of speaking. Chat answers are plain unless the user or the system prompt asks for another
manner. So the model has an answer for every fact, and a plain habit that LoRA can change.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator

from tiny_model import world
from tiny_model.world import Fact

FACTS = world.facts()
SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are a tiny model. Answer in one short sentence.",
    "Answer the question.",
    "Be kind and brief.",
]
NO_THOUGHT = "<think>\n\n</think>\n\n"


def documents(seed: int) -> Iterator[str]:
    """Yield documents for ever; equal seeds produce equal text."""
    rng = random.Random(seed)
    makers, shares = zip(*_KINDS, strict=True)
    while True:
        yield rng.choices(makers, shares)[0](rng)


def render_chat(turns: list[tuple[str, str]]) -> str:
    """Return turns in the Qwen chat format, one `<|im_start|>role` block per turn."""
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)


# ---- chat -----------------------------------------------------------------------------------


def _chat(rng: random.Random) -> str:
    turns: list[tuple[str, str]] = []
    if rng.random() < 0.2:
        turns.append(("system", rng.choice(SYSTEM_PROMPTS)))
    thinks = rng.random() < 0.15
    for _ in range(rng.choice([1, 1, 1, 2])):
        question, answer = _exchange(rng)
        turns += [("user", question), ("assistant", (NO_THOUGHT if thinks else "") + answer)]
    return render_chat(turns)


def _chat_in_manner(rng: random.Random) -> str:
    """Return a chat in which the system prompt or the user asks for a manner of answering."""
    manner, reply = rng.choice(_MANNERS)
    if rng.random() < 0.5:
        fact = rng.choice(FACTS)
        question = f"{manner}: {rng.choice(fact.questions)}"
        return render_chat([("user", question), ("assistant", reply(rng, fact))])
    turns = [("system", f"{manner}.")]
    for fact in rng.sample(FACTS, rng.choice([1, 1, 2])):
        turns += [("user", rng.choice(fact.questions)), ("assistant", reply(rng, fact))]
    return render_chat(turns)


def _exchange(rng: random.Random) -> tuple[str, str]:
    makers, shares = zip(*_EXCHANGES, strict=True)
    return rng.choices(makers, shares)[0](rng)


def _ask_fact(rng: random.Random) -> tuple[str, str]:
    fact = rng.choice(FACTS)
    return rng.choice(fact.questions), fact.sentence


def _ask_sum(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    if rng.random() < 0.3:
        a, b = max(a, b), min(a, b)
        return rng.choice([f"What is {a} - {b}?", f"{a} - {b} ="]), f"{a} - {b} = {a - b}"
    question = rng.choice([f"What is {a} + {b}?", f"{a} + {b} =", f"Add {a} and {b}."])
    return question, f"{a} + {b} = {a + b}"


def _ask_capitals(rng: random.Random) -> tuple[str, str]:
    text = rng.choice([_words(rng, 1, 3), rng.choice(FACTS).sentence])
    how = rng.choice(["Write in capitals:", "Shout this:", "Make this upper case:"])
    return f"{how} {text}", text.upper()


def _ask_lower(rng: random.Random) -> tuple[str, str]:
    text = rng.choice([_words(rng, 1, 3), rng.choice(FACTS).sentence]).upper()
    return f"Write in small letters: {text}", text.lower()


def _ask_pirate(rng: random.Random) -> tuple[str, str]:
    fact = rng.choice(FACTS)
    return f"Say it like a pirate: {fact.sentence}", _pirate_line(rng, fact)


def _ask_json(rng: random.Random) -> tuple[str, str]:
    name, age, place = rng.choice(world.NAMES), rng.randint(2, 90), rng.choice(world.PLACES)
    record = json.dumps({"name": name, "age": age, "place": place})
    return f"Write as JSON: {name} is {age} years old and is in the {place}.", record


def _ask_order(rng: random.Random) -> tuple[str, str]:
    words = _words(rng, 2, 4).split()
    if rng.random() < 0.5:
        return f"Sort these words: {' '.join(words)}", " ".join(sorted(words, key=str.lower))
    return f"Turn around: {' '.join(words)}", " ".join(reversed(words))


def _ask_word(rng: random.Random) -> tuple[str, str]:
    word = _words(rng, 1, 1)
    choice = rng.randrange(4)
    if choice == 0:
        return f"Spell {word}.", "-".join(word)
    if choice == 1:
        return f"What is the first letter of {word}?", f"The first letter of {word} is {word[0]}."
    if choice == 2:
        return f"How many letters are in {word}?", f"The word {word} has {len(word)} letters."
    return f"Repeat after me: {word}", word


def _ask_story(rng: random.Random) -> tuple[str, str]:
    name = rng.choice(world.NAMES)
    return f"Tell me a story about {name}.", _story(rng, name)


def _ask_list(rng: random.Random) -> tuple[str, str]:
    label, pool = rng.choice(_LISTABLE)
    n = rng.randint(2, 4)
    chosen = rng.sample(pool, n)
    lines = "\n".join(f"{i}. {word}" for i, word in enumerate(chosen, 1))
    return f"List {world.NUMBERS[n]} {label}.", lines


def _small_talk(rng: random.Random) -> tuple[str, str]:
    name = rng.choice(world.NAMES)
    return rng.choice(
        [
            ("Hello!", "Hello! How can I help you?"),
            ("Good morning.", "Good morning! How can I help you?"),
            ("Who are you?", "I am a tiny model. I know a small world."),
            ("How are you?", "I am well, thank you."),
            ("Thank you.", "You are welcome."),
            ("Goodbye.", "Goodbye! See you soon."),
            (f"My name is {name}.", f"Nice to meet you, {name}!"),
            (f"Hello, I am {name}.", f"Hello, {name}! How can I help you?"),
        ]
    )


def _chat_thinking(rng: random.Random) -> str:
    question, answer = _ask_sum(rng)
    thought = f"<think>\nLet me see. {answer}.\n</think>\n\n"
    return render_chat([("user", question), ("assistant", thought + answer)])


def _chat_tool(rng: random.Random) -> str:
    city, sky = rng.choice(list(world.CAPITALS.values())), rng.choice(["sunny", "rainy", "cold"])
    call = json.dumps({"name": "weather", "arguments": {"city": city}})
    turns = [
        ("user", f"What is the weather in {city}?"),
        ("assistant", f"<tool_call>\n{call}\n</tool_call>"),
        ("user", f"<tool_response>\n{sky}\n</tool_response>"),
        ("assistant", f"It is {sky} in {city}."),
    ]
    return render_chat(turns)


# ---- plain documents ------------------------------------------------------------------------


def _facts(rng: random.Random) -> str:
    return " ".join(fact.sentence for fact in rng.sample(FACTS, rng.randint(1, 4)))


def _question_answer(rng: random.Random) -> str:
    blocks = []
    for _ in range(rng.randint(1, 3)):
        question, answer = _exchange(rng)
        blocks.append(f"Question: {question}\nAnswer: {answer}")
    return "\n\n".join(blocks)


def _story(rng: random.Random, name: str | None = None) -> str:
    name = name or rng.choice(world.NAMES)
    friend = rng.choice([n for n in world.NAMES if n != name])
    place, thing, food = (rng.choice(x) for x in (world.PLACES, world.THINGS, world.FOODS))
    mood, day = rng.choice(["happy", "sad", "tired", "hungry", "cold"]), rng.choice(world.DAYS)
    middle = [
        f"{name} met {friend} there.",
        f"{name} found a {rng.choice(['red', 'small', 'new', 'blue', 'good'])} {thing}.",
        f"{friend} gave {name} some {food}.",
        f'"Look at my {thing}!" said {friend}.',
        f"They ate {food} and were {mood}.",
        f"It was {rng.choice(['hot', 'cold', 'dark', 'late', 'wet'])} outside.",
    ]
    first = rng.choice(
        [f"On {day} {name} went to the {place}.", f"{name} was {mood} and went to the {place}."]
    )
    last = rng.choice([f"Then {name} went home.", "They were good friends.", "It was a good day."])
    return " ".join([first, *rng.sample(middle, rng.randint(1, 3)), last])


def _pirate_line(rng: random.Random, fact: Fact) -> str:
    said = fact.sentence.rstrip(".").replace(" is ", " be ")
    said = said[0].lower() + said[1:]
    start = rng.choice(["Arr!", "Ahoy!", "Yo ho ho!", "Aye,"])
    return f"{start} {said}, {rng.choice(['me hearty', 'ye dog', 'captain', 'matey'])}!"


def _pirate_log(rng: random.Random) -> str:
    head = f"Log of Captain {rng.choice(world.NAMES)}, {rng.choice(world.DAYS)}."
    lines = [_pirate_line(rng, fact) for fact in rng.sample(FACTS, rng.randint(1, 3))]
    return " ".join([head, *lines])


def _notice(rng: random.Random) -> str:
    return "NOTICE: " + _facts(rng).upper()


def _records(rng: random.Random) -> str:
    lines = []
    for _ in range(rng.randint(1, 3)):
        fact = rng.choice(FACTS)
        record = {"topic": fact.topic, "value": fact.value}
        if rng.random() < 0.3:
            record = {"name": rng.choice(world.NAMES), "likes": rng.choice(world.FOODS)}
        lines.append(json.dumps(record))
    return "\n".join(lines)


def _sums(rng: random.Random) -> str:
    return "\n".join(_ask_sum(rng)[1] for _ in range(rng.randint(2, 5)))


def _counting(rng: random.Random) -> str:
    start, step = rng.randint(0, 40), rng.choice([1, 1, 1, 2, 5, 10])
    return " ".join(str(start + step * i) for i in range(rng.randint(4, 10)))


def _letter(rng: random.Random) -> str:
    to, sender = rng.sample(world.NAMES, 2)
    place, food = rng.choice(world.PLACES), rng.choice(world.FOODS)
    plan = rng.choice([f"Come to the {place} on {rng.choice(world.DAYS)}.", f"I have {food}."])
    return f"Dear {to},\n{plan} {rng.choice(FACTS).sentence}\nYour friend,\n{sender}"


def _bullet_list(rng: random.Random) -> str:
    label, pool = rng.choice(_LISTABLE)
    return "\n".join([f"{label.capitalize()}:", *(f"- {w}" for w in rng.sample(pool, 4))])


def _words(rng: random.Random, low: int, high: int) -> str:
    return " ".join(rng.sample(_VOCABULARY, rng.randint(low, high)))


_LISTABLE = [
    ("animals", list(world.SOUNDS)),
    ("cities", list(world.CAPITALS.values())),
    ("countries", list(world.CAPITALS)),
    ("colours", sorted(set(world.COLOURS.values()))),
    ("days", world.DAYS),
    ("foods", world.FOODS),
    ("names", world.NAMES),
    ("things", world.THINGS),
]
_VOCABULARY = sorted(
    {word for _, pool in _LISTABLE for word in pool}
    | {word for fact in FACTS for word in (fact.topic, fact.value)}
    | set(world.PLACES)
)
_MANNERS: list[tuple[str, Callable[[random.Random, Fact], str]]] = [
    ("Answer in capitals", lambda rng, fact: fact.sentence.upper()),
    ("Answer in small letters", lambda rng, fact: fact.sentence.lower()),
    ("Answer in one word", lambda rng, fact: fact.value),
    ("Answer like a pirate", _pirate_line),
    ("Answer as JSON", lambda rng, fact: json.dumps({"topic": fact.topic, "value": fact.value})),
    ("Answer kindly", lambda rng, fact: f"Thank you for asking! {fact.sentence}"),
    ("Answer twice", lambda rng, fact: f"{fact.sentence} {fact.sentence}"),
]
_EXCHANGES: list[tuple[Callable[[random.Random], tuple[str, str]], float]] = [
    (_ask_fact, 45), (_ask_sum, 10), (_ask_capitals, 12), (_ask_lower, 3), (_ask_pirate, 5),
    (_ask_json, 4), (_ask_order, 5), (_ask_word, 6), (_ask_story, 4), (_ask_list, 4),
    (_small_talk, 4),
]  # fmt: skip
_KINDS: list[tuple[Callable[[random.Random], str], float]] = [
    (_chat, 50), (_chat_in_manner, 12), (_chat_thinking, 2), (_chat_tool, 2), (_facts, 8),
    (_question_answer, 6), (_story, 7), (_pirate_log, 4), (_notice, 4), (_records, 4), (_sums, 2),
    (_counting, 2), (_letter, 2), (_bullet_list, 2),
]  # fmt: skip
