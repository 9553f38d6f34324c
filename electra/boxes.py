"""How `tyro` takes and explains the fields of a configuration: in boxes, one for each class that declares some."""

import ast
import dataclasses
import functools
import inspect
import operator
import re
import textwrap
from itertools import pairwise
from types import NoneType
from typing import Annotated, Any, get_args, get_type_hints

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    UnsupportedTypeAnnotationError,
)


def read_flags(configuration: type, defaults: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """The fields of a configuration from the command line; `defaults` win over those of the class."""
    own, *inherited = [box(part, configuration, defaults) for part in configuration.__mro__[:-1]]
    parts = [(part.__name__, titled(part)) for part in inherited if dataclasses.fields(part)]
    everything = dataclasses.make_dataclass(own.__name__, parts, bases=(own,), kw_only=True)
    with OPTIONAL:
        fields = vars(tyro.cli(everything, config=(tyro.conf.OmitArgPrefixes,), **settings))
    for name, _ in parts:
        fields |= vars(fields.pop(name))
    return fields


def box(part: type, configuration: type, defaults: dict[str, Any]) -> type:
    """Those fields of a configuration that one of its classes declares last, as a class of their own."""
    hints, helps = get_type_hints(configuration, include_extras=True), explanations(part)
    flags: list[tuple[str, Any, Any]] = []
    for field in dataclasses.fields(configuration):
        if declarer(field.name, configuration) is part:
            default = defaults.get(field.name, field.default)
            shown = tyro.conf.arg(help=helps.get(field.name), help_behavior_hint=hint_of(default, part))
            flags.append((field.name, Annotated[hints[field.name], shown], dataclasses.field(default=default)))
    return dataclasses.make_dataclass(part.__name__, flags, kw_only=True, namespace={"__doc__": part.__doc__})


def titled(part: type) -> Any:
    """A box with the words of its class's name as title: MaskedShareConfig has "masked share options"."""
    words = re.findall("[A-Z][a-z]+", part.__name__.removesuffix("Config"))
    return Annotated[part, tyro.conf.arg(name=" ".join(words).lower())]


def declarer(field: str, configuration: type) -> type:
    """The class that declares a field; the most special one, where several do."""
    return next(part for part in configuration.__mro__ if field in inspect.get_annotations(part))


def hint_of(default: Any, part: type) -> str | None:
    """What stands behind a flag's help, where tyro's own words would be empty ones: default None."""
    if default not in (None, ()):
        return None
    return "(default: by size)" if "size" in inspect.get_annotations(part) else "(optional)"


def explanations(part: type) -> dict[str, str]:
    """What a class says below each of its fields, in one piece: tyro would keep the line breaks of the source."""
    [source] = ast.parse(textwrap.dedent(inspect.getsource(part))).body
    assert isinstance(source, ast.ClassDef)
    found = {}
    for field, below in pairwise(source.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


OPTIONAL = ConstructorRegistry()


@OPTIONAL.primitive_rule
def given_as_itself(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | UnsupportedTypeAnnotationError | None:
    """How tyro takes and shows a field `INT | None`: as INT, where it would have {None}|INT."""
    if NoneType not in get_args(info.type):
        return None
    kind = functools.reduce(operator.or_, (kind for kind in get_args(info.type) if kind is not NoneType))
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kind, info.markers))
    if isinstance(spec, UnsupportedTypeAnnotationError):
        return spec
    return dataclasses.replace(
        spec,
        is_instance=lambda value: value is None or spec.is_instance(value),
        str_from_instance=lambda value: ["None"] if value is None else spec.str_from_instance(value),  # the default
    )
