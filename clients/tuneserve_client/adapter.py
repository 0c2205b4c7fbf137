"""The kind of adapter that a model trains."""

from dataclasses import asdict, dataclass

from tuneserve_client.wire import types


@dataclass(frozen=True)
class Adapter:
    """The adapter to train: its kind, and the options of this kind.

    ``kind`` is ``lora``, ``rslora`` or ``osft``. Without a ``rank``, the one of ``create_model``
    applies. An ``osft`` adapter takes ``unfreeze_ratio`` in place of a rank: the share of each
    weight's singular directions that is trained, above 0 and below 1. Its ``form`` says which
    arrays are trained: ``factors`` (the default), ``short_fixed`` or ``core``. The server refuses
    options that the kind does not have.
    """

    kind: str = "lora"
    rank: int | None = None
    unfreeze_ratio: float | None = None
    form: str | None = None

    def to_wire(self) -> types.AdapterSpec:
        """Return the field of a request. Raises pydantic's ``ValidationError``."""
        return types.AdapterSpec(**asdict(self))
