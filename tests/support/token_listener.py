"""Records the tokens that backends report, and compares them with the final results."""

from typing import Any

from tuneserve_engine.backend.base import SampledSequence, SampleProgress, SampleResult, TokenDelta


class Listener:
    """The tokens of each sequence of each request, position by position, as bits."""

    def __init__(self) -> None:
        self.places: dict[tuple[str, int], list[Any]] = {}
        self.repeated = 0

    def hear(self, given: SampleProgress) -> None:
        assert given.new_tokens.keys() <= given.remaining.keys()
        for name, parts in given.new_tokens.items():
            for part in parts:
                self._hear(self.places.setdefault((name, part.sequence), []), part)

    def _hear(self, known: list[Any], part: TokenDelta) -> None:
        assert part.start <= len(known)  # nothing is left out
        told = places(part)
        assert told
        again = known[part.start : part.start + len(told)]
        assert told[: len(again)] == again
        self.repeated += len(again)
        known += told[len(again) :]

    def assert_heard(self, name: str, result: SampleResult) -> None:
        """Check that all reported tokens of the request are in its result."""
        for number, sequence in enumerate(result.sequences):
            told = self.places.get((name, number), [])
            assert told == places(sequence)[: len(told)]


def places(drawn: TokenDelta | SampledSequence) -> list[Any]:
    top = drawn.topk
    return [
        (
            int(token),
            drawn.logprobs[place].tobytes(),
            top and (top.token_ids[place].tobytes(), top.logprobs[place].tobytes()),
        )
        for place, token in enumerate(drawn.tokens)
    ]
