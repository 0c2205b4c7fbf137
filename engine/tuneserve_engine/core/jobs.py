"""Jobs, which the queue stores and the worker executes.

A job is data. Its payload is the exact protobuf body for ``forward_backward`` and otherwise one of
the commands below in MessagePack, resolved at admission (seed chosen, checkpoint looked up), so
that executing it again needs only the job and the model's state.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

import msgspec

from tuneserve_engine.core.adapter import AdamwParams, AdapterConfig
from tuneserve_engine.core.errors import Category, EngineError
from tuneserve_engine.core.grammar import Grammar
from tuneserve_engine.core.records import CheckpointKind, CheckpointRecord, SamplerRecord, Update
from tuneserve_engine.core.usage import CurvePoint, Usage

JSON = "application/json"
PROTOBUF = "application/x-protobuf"
MAX_BODY_BYTES = 80 * 2**20
"""The largest result body, which goes to the store in one message. It exceeds the result of any
``forward_backward`` that a worker accepts, so that no result is refused after its gradient was
added."""
MAX_SAMPLES = 256  # of one request
MAX_JOBS = 32
"""The most jobs of one batch: each has a gradient on the device."""


class JobKind(StrEnum):
    CREATE_MODEL = "create_model"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    SAVE_WEIGHTS = "save_weights"
    LOAD_WEIGHTS = "load_weights"
    SAMPLE = "sample"
    UNLOAD_MODEL = "unload_model"


@dataclass(frozen=True)
class Rejection:
    """The reason for which a request is not carried out; its ``seq_id`` is used up all the same.

    ``no_room`` (the device had no room) and ``files_away`` (a file could not be reached) are for
    the worker that sets them; they are not stored.
    """

    message: str
    category: Category = "user"
    no_room: bool = False
    files_away: bool = False

    @classmethod
    def from_error(cls, error: EngineError) -> "Rejection":
        return cls(str(error), error.category, error.no_room, error.files_away)


@dataclass(frozen=True)
class Saves:
    """The result of a save, for limits: the key of its record and the expected size of its file."""

    key: str
    size_bytes: int


@dataclass(frozen=True)
class Job:
    """One queued request.

    ``(scope, seq)`` is the client's key: a second submit with the same key is the same request.
    ``position`` is the job's place in the log of ``model_id``: jobs of one model run in that order,
    and later jobs wait for a missing one. A job without a position waits for no other job.
    ``base_model`` is the name of the base model that the job needs. The queue assigns
    ``request_id``, ``release`` (the job's place in the order of execution) and ``attempts``
    (workers that died with it). ``halvings`` is for a replay: the number of times that the first
    execution had to halve its micro-batches to fit the device. ``trace`` is the span that submitted
    the job, as a W3C ``traceparent``; empty if the job is not traced. ``saves`` is checked at
    submission against the limits on what a tenant keeps.
    """

    tenant: str
    kind: JobKind
    scope: str
    seq: int
    payload: bytes = b""
    model_id: str | None = None
    position: int | None = None
    base_model: str = ""
    rejection: Rejection | None = None
    request_id: str = ""
    release: int = 0
    attempts: int = 0
    halvings: int = 0
    trace: str = ""
    saves: Saves | None = None


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job: a result body or a rejection, never both.

    ``checkpoint``, ``sampler`` and ``updates`` change records in the transaction that stores the
    result. A checkpoint whose key exists turns the outcome into a rejection unless ``overwrite``.
    ``changed`` says that the job changed the model's state: such a job is logged, for the replay by
    a worker that has to rebuild the state, with its micro-batches halved ``halvings`` times. A
    rejected job has changed nothing.

    ``usage`` is the job's cost, if it has run; a store counts it once, however often it is
    reported. ``point`` goes into the model's curve, ``recording`` into the recordings that training
    may refer to: see ``recordings``.
    """

    request_id: str
    body: bytes = b""
    content_type: str = JSON
    rejection: Rejection | None = None
    checkpoint: CheckpointRecord | None = None
    overwrite: bool = False
    sampler: SamplerRecord | None = None
    updates: tuple[Update, ...] = ()
    changed: bool = False
    halvings: int = 0
    usage: Usage | None = None
    point: CurvePoint | None = None
    recording: bytes = b""


@dataclass(frozen=True)
class EncodedTokenDelta:
    """The tokens drawn for the ``sequence``-th continuation of a sample that has not ended.

    The tokens are those from place ``start`` on; ``drawn`` is a ``SampledSequence`` message without
    a stop reason. A sample that begins again draws the same tokens, so a place that is reported
    twice has nothing new. Lost tokens are not reported again: they come with the result.
    """

    sequence: int
    start: int
    drawn: bytes


# --- commands: the payload of every kind but forward_backward -----------------------------------


@dataclass(frozen=True)
class CreateModel:
    base_model: str
    config: AdapterConfig


@dataclass(frozen=True)
class OptimStep:
    params: AdamwParams


@dataclass(frozen=True)
class SaveWeights:
    """A save to the file ``file_id``.

    ``checkpoint`` is the record that names the file, ``sampler`` the sampling session of an unnamed
    sampler save; either becomes visible when the file is in place. ``session_key`` is the sampling
    session of an inflight save, whose ``sampler`` is the target that such sessions share.
    """

    kind: CheckpointKind
    file_id: str
    checkpoint: CheckpointRecord | None = None
    sampler: SamplerRecord | None = None
    overwrite: bool = False
    age_recipients: tuple[str, ...] = ()
    session_key: str = ""


@dataclass(frozen=True)
class LoadWeights:
    """A load of a file into a model.

    ``config`` is set if the load creates the model, in the checkpoint's shape.
    """

    file_id: str
    path: str
    optimizer: bool
    config: AdapterConfig | None = None


@dataclass(frozen=True)
class SparseTargets:
    """The CSR layout of ``target_prompt_logprobs``; the answer keeps it."""

    crow_indices: list[int]
    col_indices: list[int]


@dataclass(frozen=True)
class SampleCommand:
    """A sample: one prompt, ``num_samples`` continuations.

    ``file_id`` None samples the base model. ``max_tokens`` None means up to the context limit.
    A sample stops at EOS as well, unless ``stop_tokens`` or ``stop_strings`` is an empty list.
    ``stream`` is the name of the stream on which a client gets the drawn tokens; empty if no client
    streams. ``record`` says that training will refer to the drawn tokens.
    """

    prompt: list[int]
    seed: int
    file_id: str | None = None
    num_samples: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    grammar: Grammar | None = None
    stop_tokens: list[int] | None = None
    stop_strings: list[str] | None = None
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: list[int] | None = None
    target_shape: list[int] = field(default_factory=list)
    target_sparse: SparseTargets | None = None
    prompt_alt_tokens_k: int = 0
    stream: str = ""
    record: bool = False

    @property
    def only_scores(self) -> bool:
        """Whether the command may only score its prompt.

        It counts as such if it asks for scores and for at most one token: clients that want no
        token ask for one.
        """
        asks = self.prompt_logprobs or self.topk_prompt_logprobs or self.prompt_alt_tokens_k
        return bool(asks or self.target_prompt_logprobs is not None) and self.max_tokens in (0, 1)


Command = TypeVar("Command", CreateModel, OptimStep, SaveWeights, LoadWeights, SampleCommand)


def encode(command: CreateModel | OptimStep | SaveWeights | LoadWeights | SampleCommand) -> bytes:
    """Return the command as a job's payload."""
    return msgspec.msgpack.encode(command)


def decode(payload: bytes, command_type: type[Command]) -> Command:
    """Return the command in a payload. Raises ``msgspec.DecodeError`` for anything else."""
    return msgspec.msgpack.decode(payload, type=command_type)


def grammar_of(payload: bytes) -> Grammar | None:
    """Return the grammar of a sample; None if it has none, or if the payload is invalid."""
    try:
        return msgspec.msgpack.decode(payload, type=_GrammarNeeds).grammar
    except msgspec.DecodeError:
        return None


def snapshot_and_sequences(payload: bytes) -> tuple[str | None, int]:
    """Return the file of a sample's snapshot, if it has one, and the number of sequences.

    An invalid payload has no sequences: the sample fails at once.
    """
    try:
        size = msgspec.msgpack.decode(payload, type=_SnapshotNeeds)
    except msgspec.DecodeError:
        return None, 0
    return size.file_id, size.num_samples


class _GrammarNeeds(msgspec.Struct):
    """The field of a ``SampleCommand`` that is compiled ahead."""

    grammar: Grammar | None = None


class _SnapshotNeeds(msgspec.Struct):
    """The fields of a ``SampleCommand`` that its placement needs."""

    file_id: str | None = None
    num_samples: int = 1
