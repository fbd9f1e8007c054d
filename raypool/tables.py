"""Tables of what users give: whatever texts are in them, also such as UTF-8 cannot have."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


def table(columns: Mapping[str, Any], index: pd.Index[Any]) -> pd.DataFrame:
    r"""Return a table of columns; texts with halves of characters in them stay what they are.

    Example:
        >>> import pandas as pd
        >>> table({"name": ["a", "half: \ud83d"]}, pd.RangeIndex(2))["name"].tolist()
        ['a', 'half: \ud83d']
    """
    import pandas as pd

    try:
        return pd.DataFrame(columns, index=index)
    except UnicodeEncodeError:  # pandas keeps texts as UTF-8 where Arrow is installed, which has no such halves
        return pd.DataFrame({name: _as_objects(column) for name, column in columns.items()}, index=index)


def _as_objects(column: Any) -> Any:
    import pandas as pd

    is_list = isinstance(column, list)
    return pd.Series(column, dtype=object) if is_list and any(isinstance(entry, str) for entry in column) else column


def fields_of(value: Any) -> Mapping[Any, Any] | None:
    """Return what a configuration holds, by name: of a mapping, dataclass, named tuple, namespace, attrs class or pydantic model.

    Returns:
        None for anything else.

    Example:
        >>> fields_of(SimpleNamespace(lr=0.1, width=8)), fields_of([0.1, 8])
        ({'lr': 0.1, 'width': 8}, None)
    """
    if isinstance(value, Mapping):
        return value
    if isinstance(value, (argparse.Namespace, SimpleNamespace)):
        return dict(vars(value))
    pydantic = sys.modules.get("pydantic.main")  # who has not imported it has no models
    if pydantic is not None and isinstance(value, pydantic.BaseModel):
        return dict(pydantic.BaseModel.__iter__(value))  # its own __iter__ may give something else
    kind: Any = type(value)
    names: Iterable[str] | None = getattr(kind, "_fields", None) if issubclass(kind, tuple) else None
    if dataclasses.is_dataclass(kind):
        names = (field.name for field in dataclasses.fields(kind))
    elif hasattr(kind, "__attrs_attrs__"):
        names = (field.name for field in kind.__attrs_attrs__)
    return None if names is None else {name: getattr(value, name, None) for name in names}


def column_name(key: Any) -> str:
    r"""Return how a column for a key is called: halves of characters are written out, since a table's names are UTF-8.

    Example:
        >>> column_name("lr"), column_name(3), column_name("half: \ud83d")
        ('lr', '3', 'half: \\ud83d')
    """
    return str(key).encode("utf-8", "backslashreplace").decode()
