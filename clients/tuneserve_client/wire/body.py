"""The base of all wire types: how strictly they are read, and the kinds of their fields."""

from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema

MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1

Id = Annotated[str, Field(min_length=1, max_length=256)]
Seq = Annotated[int, Field(ge=0, le=MAX_INT64)]
ModelSeq = Annotated[int, Field(ge=1, le=MAX_INT32)]  # 0 is the model's creation
_WITH_ELEMENTS = ("list", "set", "frozenset", "tuple", "dict")


def _texts(value: object) -> object:
    """Convert numbers and booleans to text: old SDKs let users put them into metadata."""
    if not isinstance(value, dict):
        return value
    if not all(isinstance(v, str | int | float) for v in value.values()):
        # Checked here: pydantic's own error would name the entry, whose key is the client's.
        raise ValueError("each value must be a text, a number or a boolean")
    return {k: str(v) if isinstance(v, int | float) else v for k, v in value.items()}


Metadata = Annotated[dict[str, str], BeforeValidator(_texts), Field(max_length=256)]


def _fail_fast(schema: Any) -> None:
    """Set ``fail_fast`` for all types with elements, in a schema and its inner schemas."""
    if isinstance(schema, dict):
        if schema.get("type") in _WITH_ELEMENTS:
            schema["fail_fast"] = True
        for part in schema.values():
            _fail_fast(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _fail_fast(part)


class UnknownField(NamedTuple):
    """A field that was sent and is not known."""

    place: str
    """The names of the requests it is in, each with a dot."""
    name: str
    """As sent: of any length, with any characters."""
    absent: set[str]
    """The known fields of the same request that were not sent."""


class Request(BaseModel):
    """The base of all request bodies."""

    model_config = ConfigDict(
        strict=True, extra="allow", allow_inf_nan=False, frozen=True, protected_namespaces=()
    )

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return a schema that stops at a list's first wrong element.

        Otherwise a large body could cost an error for each element.
        """
        schema = handler(source)
        _fail_fast(schema)
        return schema

    def unknown_fields(self) -> list[UnknownField]:
        """Return the sent fields that are ignored, those of nested requests included."""
        absent = type(self).model_fields.keys() - self.model_fields_set
        found = [
            UnknownField("", name, absent)
            for name in self.model_extra or ()
            if name != "type"  # a mere label
        ]
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Request):
                inner = value.unknown_fields()
                found += [each._replace(place=f"{name}.{each.place}") for each in inner]
        return found


class Response(BaseModel):
    """The base of all response bodies. None is left out; no body has a top-level ``error`` key."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())
