"""What can be said of continuations on their way, before their results are there."""

from collections.abc import Sequence
from dataclasses import replace

from tuneserve_client.proto import wire_pb2 as wire
from tuneserve_engine.jobs import Part, Sample
from tuneserve_engine.queue.streams import Told
from tuneserve_server.errors import ApiError
from tuneserve_server.openai_answer import Answer, Choice, ScoredToken, Spoken, ints, scored_token
from tuneserve_server.openai_text import BaseText


def certain(text: str, start: int, stops: Sequence[str]) -> int:
    """How much of the text stays whatever follows it: no stop string may begin before. Up to
    ``start`` it is known to stay."""
    ends = [len(text)]
    for stop in stops:
        found = text.find(stop, start)
        if found >= 0:
            ends.append(found)
            continue
        for size in range(min(len(stop) - 1, len(text) - start), 0, -1):
            if text.endswith(stop[:size]):
                ends.append(len(text) - size)
                break
    return min(ends)


class LiveChoice:
    """A continuation on its way, and how much of it has been said."""

    def __init__(
        self, text: BaseText, stops: Sequence[str], eos: Sequence[int], *, scored: bool
    ) -> None:
        self._text = text
        self._stops = stops
        self._eos = eos
        self._spoken = Spoken(text)
        self._scored: list[ScoredToken] | None = [] if scored else None
        self._said = self._said_tokens = 0

    def hear(self, part: Part) -> None:
        """Takes what is new of the part: nothing if something before it was lost."""
        known = len(self._spoken.tokens) - part.start
        if known < 0:
            return
        sequence = wire.SampledSequence.FromString(part.drawn)
        for place, token in list(enumerate(ints(sequence.tokens)))[known:]:
            if token in self._eos:
                return
            self._spoken.push(token)
            if self._scored is not None:
                offset = self._spoken.offsets[-1]
                self._scored.append(scored_token(sequence, place, offset, self._text))

    def more(self) -> Choice | None:
        """What can be said and has not been, if there is any."""
        text, start, first = self._spoken.text, self._said, self._said_tokens
        self._said = certain(text, start, self._stops)
        if self._said == start:
            return None
        scored = None
        if self._scored is not None:
            while (
                self._said_tokens < len(self._scored)
                and self._scored[self._said_tokens].offset < self._said
            ):
                self._said_tokens += 1
            scored = self._scored[first : self._said_tokens]
        return Choice(text[start : self._said], None, scored)

    def rest(self, whole: Choice) -> Choice:
        """What is left to say of the result. Raises ``ApiError`` if it is another than was said."""
        said, scored = self._spoken.text[: self._said], whole.scored
        ours = None if self._scored is None else self._scored[: self._said_tokens]
        if not whole.text.startswith(said) or ours != (scored and scored[: self._said_tokens]):
            raise ApiError(
                "the answer began again on a worker of another kind, where it is another than "
                "what you were sent; send the request again"
            )
        return replace(
            whole, text=whole.text[self._said :], scored=scored and scored[self._said_tokens :]
        )


class Speech:
    """All continuations of a request, which has one command for each prompt. Its calls block.

    Of each choice they tell the index, what is to be said, and whether it is the first of it.
    """

    def __init__(
        self, commands: Sequence[Sample], text: BaseText, eos: Sequence[int], *, scored: bool
    ) -> None:
        self._choices: list[LiveChoice] = []
        self._first: dict[str, int] = {}  # the first choice of a stream
        for command in commands:
            self._first[command.stream] = len(self._choices)
            stops = command.stop_strings or []
            self._choices += [
                LiveChoice(text, stops, eos, scored=scored) for _ in range(command.num_samples)
            ]
        self._begun: set[int] = set()
        self._ended = 0  # choices; they end in order

    def hear(self, told: Told) -> list[tuple[int, Choice, bool]]:
        """What can be said now."""
        heard: dict[int, None] = {}
        for stream, part in told:
            index = self._first[stream] + part.sequence
            if index >= self._ended:
                self._choices[index].hear(part)
                heard[index] = None
        found = [(index, self._choices[index].more()) for index in heard]
        return [(index, more, self._is_first(index)) for index, more in found if more is not None]

    def end(self, answer: Answer) -> list[tuple[int, Choice, bool]]:
        """The rest of the next prompt's choices."""
        start, self._ended = self._ended, self._ended + len(answer.choices)
        return [
            (index, self._choices[index].rest(whole), self._is_first(index))
            for index, whole in enumerate(answer.choices, start)
        ]

    def _is_first(self, index: int) -> bool:
        is_first = index not in self._begun
        self._begun.add(index)
        return is_first
