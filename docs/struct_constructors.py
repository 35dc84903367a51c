"""The reference shows how a msgspec Struct is made: griffe knows constructors of dataclasses alone."""

from __future__ import annotations

from typing import Any

from griffe import Class, Extension, Function, Parameter, ParameterKind, Parameters


class StructConstructors(Extension):
    """Gives each Struct the `__init__` that msgspec makes: every annotated field, by keyword."""

    def on_class(self, *, cls: Class, **_: Any) -> None:
        """Add the constructor of a class that names a Struct among its bases."""
        if "__init__" in cls.members or not any(str(base).split(".")[-1] == "Struct" for base in cls.bases):
            return
        fields = [
            Parameter(
                name, annotation=member.annotation, kind=ParameterKind.keyword_only, default=_default_of(member.value)
            )
            for name, member in cls.attributes.items()
            if member.annotation is not None and not {"property", "cached"} & member.labels
        ]
        this = Parameter("self", kind=ParameterKind.positional_or_keyword)
        init = Function("__init__", lineno=0, endlineno=0, parent=cls, parameters=Parameters(this, *fields))
        cls.set_member("__init__", init)


def _default_of(value: Any) -> Any:
    """The default as a reader would write it: `field(default_factory=dict)` makes an empty dict."""
    made = str(value) if value is not None else ""
    return {"field(default_factory=dict)": "{}", "field(default_factory=list)": "[]"}.get(made, value)
