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
            findings.add(keys, f"{next(each for each in wanted if each not in value)} is missing in {name}.")
        case "type":
            findings.add(keys, f"{name} is {shown}; it must be {KINDS.get(str(wanted), wanted)}.")
        case "minimum":
            findings.add(keys, f"{name} is {value}; {wanted} is the least that it can be.")
        case "enum":
            findings.add(keys, f"{name} is {shown}{nearest(str(value), map(str, wanted))}")
        case "minItems" | "maxItems":
            findings.add(keys, f"{name} has {len(value)} entries; {wanted} would do.")
        case _:
            findings.add(keys, f"{name}: {error.message}.")
