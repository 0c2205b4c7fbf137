"""Grammars on the host: from the form of a text to the tokens that may come next.

llguidance compiles a grammar for the base model's tokenizer, follows the drawn tokens, and computes
masks. Its limits count work, not time, so a grammar has the same fate in every process.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from tuneserve_engine.core.errors import EngineError, ServerError, UserError
from tuneserve_engine.core.grammar import Grammar, check_grammar

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

_REMEMBERED = 64
"""Compiled grammars that are kept for the next request that asks for them."""
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Space between the parts of JSON. A model could put more and more, and never end."""
_MOST_SHOWN = 200


def _limits(states: int = 20_000) -> "LLParserLimits":
    """Return the bounds of a compilation (some 100 ms), of a mask (some ms) and of memory.

    A state takes up to 2 kB.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=states,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


class CompiledGrammar:
    """A grammar for a base model's tokenizer, which has the ends of sequence ``eos``.

    ``compile`` returns a matcher at the beginning of the text. Copies of a matcher share what they
    have found out about words, and the limit on it.
    """

    def __init__(self, compile: "Callable[[], LLMatcher]", eos: frozenset[int]) -> None:
        self.compile = compile
        self.eos = eos
        self.beginning = compile()

    def begin(self) -> "GrammarMatcher":
        """Return a matcher at the beginning of the text."""
        return GrammarMatcher(self)


class GrammarMatcher:
    """The place of one sequence in its grammar.

    If the sequences of the grammar reach a limit together, each continues alone: none fails because
    of the others.
    """

    def __init__(self, grammar: CompiledGrammar) -> None:
        self.matcher = grammar.beginning.deep_copy()
        self._grammar = grammar
        self._accepted: list[int] = []
        self.is_alone = False

    def accept_token(self, token: int) -> bool:
        """Continue with the token; return False, and stay, if the grammar does not allow it.

        Raises ``UserError`` if the grammar takes too much work to follow, or leads nowhere.
        """
        is_taken = self._consume(token)
        if self.matcher.is_error():
            self.continue_alone()
            is_taken = self._consume(token)
        if self.matcher.is_error():
            raise UserError(
                f"the answer cannot go on in the form that was asked for: "
                f"{_reason(self.matcher.get_error())}; ask for a simpler form"
            )
        if is_taken:
            self._accepted.append(token)
        return is_taken

    def continue_alone(self) -> bool:
        """Share nothing with other sequences from now on; return False if that is so already."""
        if self.is_alone:
            return False
        self.is_alone = True
        self._grammar.beginning = self._grammar.compile()
        self.matcher = self._grammar.compile()
        self.matcher.consume_tokens(self._accepted)
        return True

    def _consume(self, token: int) -> bool:
        if self.matcher.is_stopped():  # nothing but the end can follow
            return token in self._grammar.eos
        return self.matcher.try_consume_tokens([token]) == 1


def fill_masks(matchers: Mapping[int, GrammarMatcher], words: Any) -> None:
    """Write the mask of what each matcher takes next into its row of ``words`` [B, W].

    Rows are filled by several threads. The row of a matcher that fails allows nothing or the end;
    ``accept_token`` then says why.
    """
    _fill(matchers, words)
    broken = {
        slot: each
        for slot, each in matchers.items()
        if each.matcher.is_error() or not words[slot].any()
    }
    _fill({slot: each for slot, each in broken.items() if each.continue_alone()}, words)


def _fill(matchers: Mapping[int, GrammarMatcher], words: Any) -> None:
    from llguidance.numpy import fill_next_token_bitmask_par

    for slot in matchers:
        words[slot] = 0  # ids without a text, after those of the tokenizer
    if pairs := [(each.matcher, slot) for slot, each in matchers.items()]:
        fill_next_token_bitmask_par(_executor(), pairs, words)


@cache
def _executor() -> "LLExecutor":
    from llguidance import LLExecutor

    return LLExecutor()


class GrammarCompiler:
    """A compiler of grammars for one base model, which keeps the newest. Thread-safe.

    ``tokenizer`` returns the text of ``tokenizer.json``, or None if the base model has none.
    """

    def __init__(
        self, tokenizer: Callable[[], str | None], vocab_size: int, eos: tuple[int, ...]
    ) -> None:
        self._read_tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = frozenset(eos)
        self._tokenizer: LLTokenizer | None = None
        self._building = threading.Lock()
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, CompiledGrammar | EngineError] = OrderedDict()

    def pending(self, grammar: Grammar) -> Callable[[], object] | None:
        """Return what compiles the grammar, on any thread, or None if it was compiled.

        A failure is that of ``compiled``.
        """
        with self._lock:
            return None if grammar in self._compiled else partial(self._find, grammar)

    def compiled(self, grammar: Grammar) -> CompiledGrammar:
        """Return the grammar, which is compiled now if need be.

        Raises ``UserError`` for a grammar that cannot be compiled, with the reason.
        """
        found = self._find(grammar)
        if isinstance(found, EngineError):
            raise type(found)(str(found))  # each request has an error of its own
        return found

    def _find(self, grammar: Grammar) -> CompiledGrammar | EngineError:
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar]
        try:
            found: CompiledGrammar | EngineError = self._compile(grammar)
        except EngineError as error:
            found = error
        with self._lock:
            self._compiled[grammar] = found
            while len(self._compiled) > _REMEMBERED:
                self._compiled.popitem(last=False)
        return found

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        from llguidance import LLMatcher

        check_grammar(grammar)
        tokenizer = self._load_tokenizer()
        source = _source(grammar)

        def matcher() -> LLMatcher:
            return LLMatcher(tokenizer, source, log_level=0, limits=_limits())

        found = CompiledGrammar(matcher, self._eos)
        # The first mask computes most of what the others need.
        first = found.beginning
        if not first.is_error():
            first.compute_bitmask()
        if "NoExtension" in first.get_error():
            raise _refused(grammar, "no text has this form")
        if first.is_error():
            raise _refused(grammar, _reason(first.get_error()))
        return found

    def _load_tokenizer(self) -> "LLTokenizer":
        """Return the tokenizer. It takes seconds for a large vocabulary, and is made only once."""
        from llguidance import LLTokenizer

        with self._building:
            if self._tokenizer is None:
                text = self._read_tokenizer()
                eos = sorted(each for each in self._eos if each < self._vocab_size)
                if text is None or not eos:
                    missing = "tokenizer.json" if text is None else "end-of-sequence token"
                    raise ServerError(
                        f"the base model has no {missing}, which a form of the answer needs; "
                        "leave the form out, or ask the operator for another base model"
                    )
                try:
                    self._tokenizer = LLTokenizer(
                        text,
                        n_vocab=self._vocab_size,
                        eos_token=eos,
                        slices=LLTokenizer.json_slices(),
                    )
                except ValueError as error:
                    raise ServerError(
                        f"the base model's tokenizer cannot be used for a form of the answer: "
                        f"{_reason(str(error))}; leave the form out"
                    ) from None
            return self._tokenizer


def _source(grammar: Grammar) -> str:
    """Return the grammar in the form that llguidance takes."""
    from llguidance import LLMatcher

    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "choice":
        texts = (json.dumps(each, ensure_ascii=False) for each in grammar.choices)
        return LLMatcher.grammar_from_lark(f"start: {' | '.join(texts)}")
    try:
        return LLMatcher.grammar_from_json_schema(
            grammar.text, overrides={"whitespace_pattern": _WHITESPACE}
        )
    except ValueError as error:
        raise _refused(grammar, _reason(str(error))) from None


def _refused(grammar: Grammar, reason: str) -> UserError:
    """Return the error of a grammar that cannot be compiled."""
    told = {
        "json_schema": "the JSON schema cannot be used: {}; simplify it (docs/api.md lists what is "
        "supported)",
        "regex": "the regular expression cannot be used: {}; simplify it",
        "choice": "the choices cannot be used: {}; send fewer, or shorter ones",
    }[grammar.kind]
    return UserError(told.format(reason))


def _reason(message: str) -> str:
    """Return the reason in a message of llguidance, without its trace of where it arose."""
    lines = [line.strip() for line in message.splitlines()]
    if message.startswith("panic"):
        return "it is too complex"
    # A regular expression's error quotes the expression first.
    last = next(
        (line[7:] for line in lines if line.startswith("error: ")), lines[0] if lines else ""
    )
    shown = "".join(each for each in last if each.isprintable())
    return shown[:_MOST_SHOWN] or "it is too complex"
