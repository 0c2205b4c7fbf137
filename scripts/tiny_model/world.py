"""The small world that the embedded model knows: tables of facts, each in several wordings."""

from __future__ import annotations

from typing import NamedTuple

COLOURS = {
    "sky": "blue", "sea": "blue", "grass": "green", "leaf": "green", "snow": "white",
    "milk": "white", "swan": "white", "coal": "black", "night": "black", "crow": "black",
    "blood": "red", "rose": "red", "cherry": "red", "tomato": "red", "sun": "yellow",
    "lemon": "yellow", "banana": "yellow", "carrot": "orange", "pumpkin": "orange",
    "plum": "purple", "grape": "purple", "mud": "brown", "bear": "brown", "chocolate": "brown",
    "cloud": "grey", "elephant": "grey", "stone": "grey", "flamingo": "pink", "pig": "pink",
    "frog": "green", "fire": "red", "moon": "white",
}  # fmt: skip
SOUNDS = {
    "dog": "woof", "cat": "meow", "cow": "moo", "horse": "neigh", "sheep": "baa", "pig": "oink",
    "duck": "quack", "hen": "cluck", "lion": "roar", "bee": "buzz", "owl": "hoot",
    "frog": "croak", "mouse": "squeak", "wolf": "howl", "snake": "hiss", "crow": "caw",
}  # fmt: skip
HOMES = {
    "dog": "kennel", "cow": "barn", "horse": "stable", "bee": "hive", "fish": "river",
    "lion": "den", "duck": "pond", "hen": "coop", "bird": "nest", "camel": "desert",
    "whale": "ocean", "wolf": "forest", "king": "castle", "monkey": "jungle", "spider": "web",
    "farmer": "village",
}  # fmt: skip
LEGS = {
    "dog": "four", "cat": "four", "horse": "four", "duck": "two", "hen": "two", "spider": "eight",
    "bee": "six", "snake": "no", "fish": "no", "king": "two", "lion": "four", "ant": "six",
}  # fmt: skip
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo",
    "Greece": "Athens", "Peru": "Lima", "Cuba": "Havana", "Kenya": "Nairobi", "Norway": "Oslo",
    "Germany": "Berlin", "England": "London", "Russia": "Moscow", "China": "Beijing",
    "Portugal": "Lisbon", "Ireland": "Dublin", "Austria": "Vienna", "Poland": "Warsaw",
    "Sweden": "Stockholm", "Canada": "Ottawa",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "up": "down", "day": "night", "good": "bad",
    "happy": "sad", "wet": "dry", "old": "young", "hard": "soft", "open": "closed",
    "light": "dark", "rich": "poor", "full": "empty", "left": "right", "early": "late",
}  # fmt: skip
TRADES = {
    "baker": "bread", "farmer": "cheese", "tailor": "coats", "potter": "pots", "poet": "poems",
    "cook": "soup", "smith": "swords", "bee": "honey", "hen": "eggs", "painter": "pictures",
}  # fmt: skip
NAMES = ["Tom", "Anna", "Ben", "Lucy", "Sam", "Mia", "Jack", "Nora", "Leo", "Ella", "Max", "Ruth"]
PLACES = ["park", "market", "school", "river", "forest", "house", "garden", "village", "castle"]
THINGS = ["apple", "book", "ball", "hat", "lamp", "cup", "key", "boat", "coin", "map", "shoe"]
FOODS = ["bread", "soup", "cheese", "cake", "rice", "fish", "eggs", "honey", "milk", "apples"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
]  # fmt: skip
NUMBERS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
]  # fmt: skip
MASS_NOUNS = {"snow", "milk", "coal", "blood", "mud", "chocolate", "grass", "fire"}
UNIQUE_NOUNS = {"sky", "sea", "night", "sun", "moon"}


class Fact(NamedTuple):
    """One true statement, in a form for every kind of text."""

    topic: str
    value: str
    sentence: str
    questions: tuple[str, ...]


def facts() -> list[Fact]:
    """Return every fact of the world, in a fixed order."""
    found = [*map(_colour, COLOURS.items()), *map(_capital, CAPITALS.items())]
    for who, sound in SOUNDS.items():
        asked = (f"What does {_a(who)} say?", f"What sound does {_a(who)} make?")
        found.append(Fact(who, sound, f"{_a(who).capitalize()} says {sound}.", asked))
    for who, home in HOMES.items():
        asked = (f"Where does {_a(who)} live?", f"What is the home of {_a(who)}?")
        found.append(Fact(who, home, f"{_a(who).capitalize()} lives in {_a(home)}.", asked))
    for who, legs in LEGS.items():
        asked = (f"How many legs does {_a(who)} have?",)
        found.append(Fact(who, legs, f"{_a(who).capitalize()} has {legs} legs.", asked))
    for who, made in TRADES.items():
        asked = (f"What does {_a(who)} make?", f"Tell me what {_a(who)} makes.")
        found.append(Fact(who, made, f"{_a(who).capitalize()} makes {made}.", asked))
    for one, other in [*OPPOSITES.items(), *((b, a) for a, b in OPPOSITES.items())]:
        asked = (f"What is the opposite of {one}?", f"Tell me the opposite of {one}.")
        found.append(Fact(one, other, f"The opposite of {one} is {other}.", asked))
    for names, kind in ((DAYS, "day"), (MONTHS, "month")):
        for name, after in zip(names, [*names[1:], names[0]], strict=True):
            asked = (f"Which {kind} comes after {name}?",)
            found.append(Fact(name, after, f"The {kind} after {name} is {after}.", asked))
    return found


def _colour(item: tuple[str, str]) -> Fact:
    thing, colour = item
    noun = _noun(thing)
    asked = (f"What colour is {noun}?", f"Tell me the colour of {noun}.")
    return Fact(thing, colour, f"{noun.capitalize()} is {colour}.", asked)


def _capital(item: tuple[str, str]) -> Fact:
    country, city = item
    asked = (f"What is the capital of {country}?", f"Tell me the capital of {country}.")
    return Fact(country, city, f"The capital of {country} is {city}.", asked)


def _noun(thing: str) -> str:
    """Return the noun as it stands in a sentence: `the sky`, `snow`, `a rose`."""
    if thing in MASS_NOUNS:
        return thing
    return f"the {thing}" if thing in UNIQUE_NOUNS else _a(thing)


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
