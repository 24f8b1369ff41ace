"""For the API pages: a docstring's `Example:` is a section of code, as `Examples:` is.

`mkdocs.yml` names this file. Griffe knows the plural alone and takes the other for a note.
"""

from __future__ import annotations

from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Makes `Example:` the section that Griffe knows."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Every module, class, function and attribute comes by here."""
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
