"""Bodies that the admin API takes, and its answers other than 200."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema, field_validator

from nwor.config import DraftBounds
from nwor.modes import Mode
from server.api.http_errors import error_response, shorten

#: More than any mode's name, or bounds, with blanks around it.
_LONGEST = 40


class Refusal(Exception):  # noqa: N818  an answer, not a fault
    """An answer other than 200."""

    def __init__(self, status: HTTPStatus, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        headers = {"WWW-Authenticate": "Bearer"} if status is HTTPStatus.UNAUTHORIZED else None
        self.response = error_response(status, message, kind, param=param, headers=headers)


class ModeChange(BaseModel):
    """Body of PUT /admin/nwor: an object with one field, the mode in any case."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"mode": "stage"}]})

    #: Described in place: a reference would lead nowhere within the API's description.
    mode: Annotated[Mode, WithJsonSchema({"type": "string", "enum": [mode.value for mode in Mode]})] = Field(
        description="The mode to put in force.", examples=["stage"]
    )

    @field_validator("mode", mode="before")
    @classmethod
    def _in_any_case(cls, value: object) -> Mode:
        if not isinstance(value, str):
            raise ValueError(f"the mode must be a string, not {shorten(value)}")
        if len(value) > _LONGEST:
            raise ValueError(f"a mode has at most {_LONGEST} characters, not {len(value)}")
        return Mode.parse(value)


class DraftTokensChange(BaseModel):
    """Body of PUT /admin/nwor/draft-tokens: an object with one field, a number or bounds."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"draft_tokens": "auto:1-6"}]})

    draft_tokens: Annotated[str, WithJsonSchema({"type": ["string", "integer"]})] = Field(
        description="auto for the bounds of the start, auto:LEAST-MOST for others, or a number.",
        examples=["auto:1-6"],
    )

    @field_validator("draft_tokens", mode="before")
    @classmethod
    def _number_or_bounds(cls, value: object) -> str:
        if isinstance(value, int) and not isinstance(value, bool):
            value = shorten(value)
        if not isinstance(value, str):
            raise ValueError(f"draft_tokens must be auto, auto:LEAST-MOST or a number, not {shorten(value)}")
        word = value.strip().lower()
        if len(word) > _LONGEST:
            raise ValueError(f"draft_tokens has at most {_LONGEST} characters, not {len(word)}")
        if word.isascii() and word.isdecimal():
            return str(int(word))
        DraftBounds.parse(word, or_number=True)
        return word


Body = TypeVar("Body", bound=BaseModel)


def sentence(text: str) -> str:
    """Return an error's words as a sentence; a field's name at its start stays as it is written."""
    start = text[0] if "_" in text.split()[0] else text[0].upper()
    return f"{start}{text[1:]}."


def parse(model: type[Body], body: bytes) -> Body:
    """Return what a body asks for.

    Args:
        model: what it has to be, an object with one field.
        body: the request's body.

    Raises:
        Refusal: 400 for a body that is not that.

    """
    (name,) = model.model_fields
    example = model.model_config["json_schema_extra"]["examples"][0]  # type: ignore[call-overload,index]
    wanted = f"send a JSON object such as {json.dumps(example)}"
    try:
        values: Any = json.loads(body)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise Refusal(
            HTTPStatus.BAD_REQUEST, f"The request body is no JSON object: {wanted}.", "BadRequestError"
        )
    try:
        return model.model_validate(values)
    except ValidationError as invalid:
        # What is too much comes first: a misspelled field is missing, too.
        error = min(invalid.errors(), key=lambda found: found["type"] != "extra_forbidden")
        if error["type"] == "extra_forbidden":
            message = f"The request body has an unknown field {shorten(error['loc'][0])}: {wanted}."
        elif error["type"] == "missing":
            message = f"The request body has no field {name!r}: {wanted}."
        else:
            message = sentence(str(error["ctx"]["error"]))
        raise Refusal(HTTPStatus.BAD_REQUEST, message, "BadRequestError", name) from invalid
