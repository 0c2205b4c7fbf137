"""The streaming of continuations while they are sampled, before their results exist."""

from collections.abc import Sequence
from dataclasses import replace

from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_engine.core.jobs import EncodedTokenDelta, SampleCommand
from tuneserve_engine.store.pubsub import TokenEvents
from tuneserve_server.base_model_text import BaseText
from tuneserve_server.errors import ApiError
from tuneserve_server.openai.responses import (
    Choice,
    IncrementalText,
    SampledAnswer,
    ScoredToken,
    ints,
    scored_token,
)


def stable_prefix_length(text: str, start: int, stops: Sequence[str]) -> int:
    """Return the length of the text that is final: no stop string can begin in it.

    The text up to ``start`` is known to be final.
    """
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


class StreamedChoice:
    """A continuation that is being sampled, and how much of it has been sent."""

    def __init__(
        self, text: BaseText, stops: Sequence[str], eos: Sequence[int], *, scored: bool
    ) -> None:
        self._text = text
        self._stops = stops
        self._eos = eos
        self._spoken = IncrementalText(text)
        self._scored: list[ScoredToken] | None = [] if scored else None
        self._said = self._said_tokens = 0

    def add_deltas(self, part: EncodedTokenDelta) -> None:
        """Take the new tokens of the part; none of them if an earlier part was lost."""
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
        """Return the text that can be sent and has not been, or None."""
        text, start, first = self._spoken.text, self._said, self._said_tokens
        self._said = stable_prefix_length(text, start, self._stops)
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
        """Return the unsent rest of the result.

        Raises ``ApiError`` if the result differs from the part that was sent.
        """
        said, scored = self._spoken.text[: self._said], whole.scored
        ours = None if self._scored is None else self._scored[: self._said_tokens]
        if not whole.text.startswith(said) or ours != (scored and scored[: self._said_tokens]):
            raise ApiError(
                "the answer began again on a worker with other hardware, and its text differs from "
                "the part that was already sent; send the request again"
            )
        return replace(
            whole, text=whole.text[self._said :], scored=scored and scored[self._said_tokens :]
        )


class StreamedChoices:
    """All continuations of a request, which has one command for each prompt. Its calls block.

    The calls return pieces: a choice's index, the part to send, and whether it is the choice's
    first part.
    """

    def __init__(
        self, commands: Sequence[SampleCommand], text: BaseText, eos: Sequence[int], *, scored: bool
    ) -> None:
        self._choices: list[StreamedChoice] = []
        self._first: dict[str, int] = {}  # the index of the first choice, by stream
        for command in commands:
            self._first[command.stream] = len(self._choices)
            stops = command.stop_strings or []
            self._choices += [
                StreamedChoice(text, stops, eos, scored=scored) for _ in range(command.num_samples)
            ]
        self._begun: set[int] = set()
        self._ended = 0  # choices; they end in order

    def add_deltas(self, told: TokenEvents) -> list[tuple[int, Choice, bool]]:
        """Take token events and return the pieces that can be sent now."""
        heard: dict[int, None] = {}
        for stream, part in told:
            index = self._first[stream] + part.sequence
            if index >= self._ended:
                self._choices[index].add_deltas(part)
                heard[index] = None
        found = [(index, self._choices[index].more()) for index in heard]
        return [(index, more, self._is_first(index)) for index, more in found if more is not None]

    def end(self, answer: SampledAnswer) -> list[tuple[int, Choice, bool]]:
        """Return the rest of the next prompt's choices."""
        start, self._ended = self._ended, self._ended + len(answer.choices)
        return [
            (index, self._choices[index].rest(whole), self._is_first(index))
            for index, whole in enumerate(answer.choices, start)
        ]

    def _is_first(self, index: int) -> bool:
        is_first = index not in self._begun
        self._begun.add(index)
        return is_first
