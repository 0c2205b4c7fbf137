"""The kinds of adapters. A new kind is a file in this package and a line in ``KINDS``."""

from collections.abc import Mapping

from tuneserve_engine.adapters.kinds.base import (
    FORM,
    AdapterKind,
    TargetShapes,
    adapter_bytes,
    decomposition_bytes,
    parameters,
)
from tuneserve_engine.adapters.kinds.lora import Lora, as_lora
from tuneserve_engine.adapters.kinds.osft import FORMS, RATIO, Osft
from tuneserve_engine.adapters.kinds.rslora import RsLora
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.errors import UserError

__all__ = [
    "KINDS",
    "adapter_bytes",
    "arithmetic",
    "decomposition_bytes",
    "exported",
    "kind_named",
    "kind_of",
    "parameters",
    "validated",
]

KINDS: Mapping[str, Mapping[str, AdapterKind]] = {
    "lora": {"": Lora()},
    "rslora": {"": RsLora()},
    "osft": {form: Osft(form) for form in FORMS},
}
"""The kinds by name and by form; the first form is the default."""


def kind_named(name: str) -> AdapterKind:
    """Return the kind in its first form, which has the options of all forms.

    Raises ``UserError`` for an unknown name.
    """
    return next(iter(_forms(name).values()))


def kind_of(config: AdapterConfig) -> AdapterKind:
    """Return the adapter's kind. Raises ``UserError`` for an unknown name or form."""
    forms = _forms(config.kind)
    form = config.options.get(FORM, next(iter(forms)))
    if form not in forms:
        raise UserError(
            f"{FORM} is {form[:64]!r}; adapters of kind {config.kind} have {', '.join(forms)}"
        )
    return forms[form]


def validated(config: AdapterConfig, shapes: TargetShapes, max_rank: int) -> AdapterConfig:
    """Return the configuration to store: its rank is the highest of its targets.

    Raises ``UserError`` if the kind does not accept the configuration, or if its rank is above
    ``max_rank``.
    """
    options = kind_named(config.kind).options
    for name in config.options:
        if name not in options:
            raise UserError(
                f"{name[:64]!r} is no option of adapters of kind {config.kind}; it has "
                f"{', '.join(options) or 'none'}"
            )
    kind = kind_of(config)
    config = kind.validated_options(config, shapes)
    if config.rank > max_rank:
        error = UserError(
            f"this adapter has rank {config.rank}; this server takes 1 to {max_rank}; "
            f"{arithmetic(config, shapes)}; choose a lower rank"
            f"{' or ' + RATIO if RATIO in options else ''}, or ask the operator to raise max_rank"
        )
        error.no_room = True  # on this worker: another one may be planned for such a rank
        raise error
    return config


def exported(config: AdapterConfig) -> AdapterConfig:
    """Return the configuration of the LoRA with the same effect."""
    kind = kind_of(config)
    return config if kind.name == Lora.name else as_lora(config, kind.scale(config))


def _forms(name: str) -> Mapping[str, AdapterKind]:
    forms = KINDS.get(name)
    if forms is None:
        raise UserError(
            f"adapter {name[:64]!r} is no kind of adapter; this server has "
            f"{', '.join(KINDS)}; leave it out for lora"
        )
    return forms


def arithmetic(config: AdapterConfig, shapes: TargetShapes) -> str:
    """Describe the device memory of such an adapter, and the memory that all of its kind share."""
    kind = kind_of(config)
    taken = adapter_bytes(kind, shapes, config.rank) / 2**20
    text = (
        f"at rank {config.rank} an adapter takes {taken:,.1f} MiB of the device (weights, two "
        "moments and gradient, 4 bytes a number, with up to rank * (inputs + outputs + 1) numbers "
        "of every weight in each)"
    )
    if kind.needs_decomposition:
        shared = decomposition_bytes(shapes, config.rank) / 2**20
        text += f", and the directions that all of its kind share {shared:,.1f} MiB"
    return text
