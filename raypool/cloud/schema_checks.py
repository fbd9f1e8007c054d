"""What a JSON schema says of an entry, in words, with what would be right."""

from __future__ import annotations

from typing import Any

from jsonschema.exceptions import ValidationError
from jsonschema.protocols import Validator

from raypool.cloud.documents import Findings, Keys, nearest

KINDS = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "object": "a mapping (`name: value`)",
    "array": "a list (`- one` in each line)",
}


def check(findings: Findings, schema: Validator, keys: Keys = ()) -> bool:
    """Note what is wrong with the entry at `keys`, and say whether it is as the schema wants it."""
    errors = list(schema.iter_errors(findings.at(keys)))
    for error in errors:
        _add(findings, error, (*keys, *error.absolute_path))
    return not errors


def _add(findings: Findings, error: ValidationError, keys: Keys) -> None:
    name = next((key for key in reversed(keys) if isinstance(key, str)), "the file")
    value: Any = error.instance
    wanted: Any = error.validator_value
    schema: Any = error.schema
    shown = "empty" if value is None else repr(value)
    match error.validator:
        case "additionalProperties":
            findings.check_keys(keys, schema.get("properties", {}))
        case "required":
            missing = next(each for each in wanted if error.message.startswith(repr(each)))  # one error for each that is
            findings.add(keys, f"{missing} is missing in {name}.")
        case "type":
            findings.add(keys, f"{name} is {shown}; it must be {_right(value, wanted)}.")
        case "minLength":
            findings.add(keys, f"{name} is empty; it must be text.")
        case "minimum":
            findings.add(keys, f"{name} is {value}; {wanted} is the least that it can be.")
        case "enum":
            findings.add(keys, f"{name} is {shown}{nearest(str(value), map(str, wanted))}")
        case "minItems" | "maxItems":
            findings.add(keys, f"{name} has {len(value)} entries; {wanted} would do.")
        case _:
            findings.add(keys, f"{name}: {error.message}.")


def _right(value: Any, wanted: str | list[str]) -> str:
    """Return what would be right instead of a value of a wrong type."""
    kinds = [wanted] if isinstance(wanted, str) else wanted
    if "string" in kinds and isinstance(value, bool | int | float):
        return f'text: "{str(value).lower()}", in quotes'
    return " or ".join(KINDS.get(kind, kind) for kind in kinds)
