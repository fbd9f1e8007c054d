"""Our docstrings in the words of what reads them for the site (Griffe)."""

import re
from typing import Any

from griffe import Extension, Object


class Docstrings(Extension):
    """Lets doctests be shown as code, and literal blocks too."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Name the section of examples as Griffe does, and set apart what Markdown would take for quotations."""
        if obj.docstring:
            text = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n").replace(
                "\n::\n", "\n"
            )
            obj.docstring.value = re.sub(
                r"^>>> .+(\n.+)*", r"```pycon\n\g<0>\n```", text, flags=re.MULTILINE
            )
