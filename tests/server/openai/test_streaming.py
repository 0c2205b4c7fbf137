"""Streams of unfinished samples: their text never exceeds the result's, never ends in half a
character, and finally equals the result.
"""

import struct
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest

from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_engine.core.jobs import EncodedTokenDelta, SampleCommand
from tuneserve_engine.settings.common import TINY_MODEL
from tuneserve_server.base_model_text import BaseText
from tuneserve_server.errors import ApiError
from tuneserve_server.openai.responses import AnswerReader, Choice, SampledAnswer, read_answer
from tuneserve_server.openai.streaming import StreamedChoices, stable_prefix_length

WORDS = ["plain", " words", " naïve", "🎉", "🏴‍☠️", "日本語", "\n\n", "  ", "é", "a", "aa", "�", "𐍈"]
TOP = 2


@pytest.fixture(scope="module")
def text() -> BaseText:
    return BaseText("tuneserve/tiny", TINY_MODEL)


@pytest.fixture(scope="module")
def eos(text: BaseText) -> int:
    (found,) = text.encode("<|im_end|>")
    return found


def sequence(random: Random, tokens: Sequence[int], stopped: bool) -> wire.SampledSequence:
    """A sequence with random logprobs."""
    size = len(tokens)
    floats = [random.uniform(-9, 0) for _ in range(size * (1 + TOP))]
    top = wire.TopkLogprobs(
        token_ids=struct.pack(f"<{size * TOP}i", *random.choices(range(300), k=size * TOP)),
        logprobs=struct.pack(f"<{size * TOP}f", *floats[size:]),
        k=TOP,
        length=size,
    )
    return wire.SampledSequence(
        stop_reason=wire.STOP_REASON_STOP if stopped else wire.STOP_REASON_LENGTH,
        tokens=struct.pack(f"<{size}i", *tokens),
        logprobs=struct.pack(f"<{size}f", *floats[:size]),
        topk_sampled_logprobs=top,
    )


def cut(whole: wire.SampledSequence, start: int, end: int) -> bytes:
    """The tokens from ``start`` to ``end``, in a worker's encoding."""
    top = whole.topk_sampled_logprobs
    wide, row = slice(4 * start, 4 * end), slice(4 * TOP * start, 4 * TOP * end)
    return wire.SampledSequence(
        tokens=whole.tokens[wide],
        logprobs=whole.logprobs[wide],
        topk_sampled_logprobs=wire.TopkLogprobs(
            token_ids=top.token_ids[row], logprobs=top.logprobs[row], k=TOP, length=end - start
        ),
    ).SerializeToString()


def parts_of(
    random: Random, number: int, whole: wire.SampledSequence
) -> Iterator[EncodedTokenDelta]:
    """The whole sample in parts that end anywhere. Sometimes it starts again."""
    size, at = len(whole.tokens) // 4, 0
    while at < size:
        if random.random() < 0.1:
            at = 0
        end = min(at + random.choice((1, 1, 2, 5)), size)
        yield EncodedTokenDelta(number, at, cut(whole, at, end))
        at = end


def mixed(random: Random, streams: Sequence[Iterator[Any]]) -> Iterator[Any]:
    """The items of all streams, shuffled. Each stream stays in order."""
    left = list(streams)
    while left:
        one = random.choice(left)
        try:
            yield next(one)
        except StopIteration:
            left.remove(one)


def added(said: dict[int, Any], pieces: Sequence[tuple[int, Choice, bool]]) -> None:
    """Append the pieces to the choices so far."""
    for index, piece, is_first in pieces:
        assert is_first == (index not in said)
        before = said.setdefault(index, {"text": "", "scored": [], "why": None})
        assert before["why"] is None
        before["text"] += piece.text
        before["why"] = piece.finish_reason
        if piece.scored is None:
            before["scored"] = None
        else:
            before["scored"] += piece.scored


def as_said(choice: Choice) -> dict[str, Any]:
    return {"text": choice.text, "scored": choice.scored, "why": choice.finish_reason}


def drawn(random: Random, text: BaseText, eos: int) -> list[int]:
    """Words, or any tokens, even parts of characters, and finally the end of sequence."""
    tokens: list[int] = []
    for _ in range(random.randrange(1, 12)):
        if random.random() < 0.6:
            tokens += text.encode(random.choice(WORDS))
        else:
            tokens += random.choices(range(512), k=random.randrange(1, 4))
    return [each for each in tokens if each != eos] + [eos] * random.randrange(2) or [5]


def some_stops(random: Random, texts: Sequence[str]) -> list[str] | None:
    """Substrings of the texts, and strings that almost occur."""
    found = []
    for _ in range(random.randrange(5)):
        said = random.choice(texts) or "x"
        at = random.randrange(len(said))
        stop = said[at : at + random.randrange(1, 6)]
        found.append(stop + random.choice(["", "", "!", "a"]))
    return found or None


@pytest.mark.parametrize("seed", range(120))
def test_the_streamed_pieces_and_the_end_add_up_to_the_whole_answer(
    text: BaseText, eos: int, seed: int
) -> None:
    random = Random(seed)
    count, scored = random.randrange(1, 4), seed % 3 > 0
    commands, answers, streams = [], [], []
    for prompt in range(random.randrange(1, 4)):
        tokens = [drawn(random, text, eos) for _ in range(count)]
        stops = some_stops(random, [text.decode(each) for each in tokens])
        name = f"key/{prompt}"
        commands.append(SampleCommand([1], 0, num_samples=count, stop_strings=stops, stream=name))
        whole = [sequence(random, each, each[-1] == eos) for each in tokens]
        result = wire.SampleResponse(sequences=whole).SerializeToString()
        answers.append(read_answer(result, commands[-1], AnswerReader(text, [eos], scored)))
        for number, each in enumerate(whole):
            told = parts_of(random, number, each)
            if random.random() < 0.2:  # lose one
                told = iter([part for part in told if part.start != 2])
            streams.append(iter([(name, part) for part in told]))
    speech = StreamedChoices(commands, text, [eos], scored=scored)
    said: dict[int, Any] = {}
    waiting = list(answers)
    for named in mixed(random, streams):
        added(said, speech.add_deltas([named]))
        if random.random() < 0.02 and waiting:
            added(said, speech.end(waiting.pop(0)))
    for answer in waiting:
        added(said, speech.end(answer))
    choices = [choice for answer in answers for choice in answer.choices]
    assert said == {index: as_said(choice) for index, choice in enumerate(choices)}


@pytest.mark.parametrize("said", ["plain words", "naïve 🎉🎉 ok", "日本語", "🏴‍☠️ é"])
def test_whole_characters_are_sent_as_soon_as_possible(text: BaseText, eos: int, said: str) -> None:
    tokens = text.encode(said)
    whole = sequence(Random(1), [*tokens, eos], True)
    speech = StreamedChoices([SampleCommand([1], 0, stream="a")], text, [eos], scored=True)
    heard = ""
    for place in range(len(tokens) + 1):
        for _, piece, _ in speech.add_deltas(
            [("a", EncodedTokenDelta(0, place, cut(whole, place, place + 1)))]
        ):
            heard += piece.text
        # Everything that the tokens so far make, without an incomplete last character.
        assert heard == text.decode(tokens[: place + 1]).rstrip("\ufffd")
    assert heard == said


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    for said, start, stops, size in [
        ("abc", 0, [], 3),
        ("abc", 0, ["cd"], 2),
        ("abc", 0, ["bcd", "cx"], 1),
        ("abcd", 0, ["cd"], 2),
        ("abab", 0, ["ababc"], 0),
        ("xabab", 1, ["abc"], 3),
        ("abcd", 0, ["abcde", "c"], 0),  # the longer stop string would start earlier
        ("abcx", 0, ["abcde", "c"], 2),
        ("aaa", 1, ["aab"], 1),
        ("abc", 3, ["cd"], 3),
    ]:
        assert stable_prefix_length(said, start, stops) == size, (said, start, stops)


def test_an_answer_that_contradicts_the_streamed_text_is_refused(text: BaseText) -> None:
    speech = StreamedChoices([SampleCommand([1], 0, stream="a")], text, [], scored=False)
    whole = sequence(Random(1), text.encode("one"), False)
    assert speech.add_deltas(
        [("a", EncodedTokenDelta(0, 0, cut(whole, 0, len(whole.tokens) // 4)))]
    )
    with pytest.raises(ApiError, match="began again"):
        speech.end(SampledAnswer([Choice("other", "length", None)], 1, 1, 0))
