"""What every configuration record starts from: immutable, strict about unknown keys, paths on one line."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class Frozen(BaseModel):
    """An immutable record that refuses keys it does not know and numbers that are not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _without_control_characters(text: str) -> str:
    if any(ord(character) < 32 or character == "\x7f" for character in text):
        raise ValueError(f"expected a path without control characters, found {text!a:.80}")
    return text


PathText = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_without_control_characters)]
"""A path as a person writes it, on one line."""
