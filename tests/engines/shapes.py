"""Request classes and signatures, read from source: field names, types and defaults as an engine's release has them."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tests.engines.sources import Definition, Module, Tree, called, dotted

REQUIRED = inspect.Parameter.empty
"""Stands for the default of a field that has none."""


@dataclass(frozen=True)
class Expression:
    """A default that is not a literal, as it is written: `ProfileReqType.START_PROFILE`, `uuid.uuid4()`."""

    text: str


@dataclass(frozen=True)
class Made:
    """A default that is created each time by calling what is written: `list`, `lambda: ['all']`."""

    text: str


@dataclass(frozen=True)
class Field:
    """One field of a body, or one query parameter.

    Attributes:
        type: As written, with one alias resolved; empty if none is written.
    """

    name: str
    type: str = ""
    default: object = REQUIRED
    keyword_only: bool = False

    @property
    def required(self) -> bool:
        return self.default is REQUIRED


Form = Literal["dataclass", "struct", "model", "enum", "plain"]
"""How a class gets its constructor: dataclass, msgspec.Struct, pydantic.BaseModel, Enum, or by hand."""


@dataclass(frozen=True)
class Shape:
    """One class with the fields of its bases. Of an enum, the members with their values as defaults."""

    name: str
    form: Form
    fields: tuple[Field, ...]


@dataclass(frozen=True)
class Method:
    """One method of an in-process object, its parameters without `self`."""

    name: str
    asynchronous: bool
    parameters: tuple[inspect.Parameter, ...]

    @property
    def signature(self) -> inspect.Signature:
        return inspect.Signature(self.parameters)


class Annotation(NamedTuple):
    """A type taken apart.

    Attributes:
        core: The type without `Annotated` and `Optional`.
        extras: What `Annotated` adds.
    """

    core: ast.expr | None
    optional: bool
    extras: tuple[ast.expr, ...]


def literal(node: ast.expr) -> object:
    """Return the value of a default if it is a literal, else its source text."""
    try:
        value: object = ast.literal_eval(node)
    except ValueError:
        return Expression(ast.unparse(node))
    return value


def take_apart(annotation: ast.expr | None) -> Annotation:
    """`Annotated[Optional[T], x]` as (T, optional, (x,))."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    if isinstance(annotation, ast.Subscript):
        outer = dotted(annotation.value).rpartition(".")[2]
        if outer == "Annotated" and isinstance(annotation.slice, ast.Tuple):
            inner = take_apart(annotation.slice.elts[0])
            return inner._replace(extras=(*inner.extras, *annotation.slice.elts[1:]))
        if outer == "Optional":
            return take_apart(annotation.slice)._replace(optional=True)
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        sides = (annotation.left, annotation.right)
        kept = [side for side in sides if not (isinstance(side, ast.Constant) and side.value is None)]
        if len(kept) == 1:
            return take_apart(kept[0])._replace(optional=True)
    return Annotation(annotation, False, ())


def type_text(tree: Tree, module: Module, annotation: ast.expr | None) -> str:
    """A type as it is written, without what `Annotated` adds; a name that stands for another type is replaced by it."""
    core, optional, _ = take_apart(annotation)
    if core is None:
        return ""
    found = tree.follow(module, dotted(core)) if isinstance(core, ast.Name) else None
    if found is not None and isinstance(found.node, ast.Assign | ast.AnnAssign) and found.node.value is not None:
        core = found.node.value
    return f"{ast.unparse(core)} | None" if optional else ast.unparse(core)


# --- classes ----------------------------------------------------------------------------------------------------------


def read_shape(tree: Tree, found: Definition) -> Shape:
    """The class that `found` defines."""
    assert isinstance(found.node, ast.ClassDef)
    form = form_of(tree, found)
    fields: dict[str, Field] = {}
    for module, node in reversed(list(lineage(tree, found))):
        fields |= {field.name: field for field in own_fields(tree, module, node, form)}
    return Shape(found.node.name, form, tuple(fields.values()))


def lineage(tree: Tree, found: Definition) -> Iterator[tuple[Module, ast.ClassDef]]:
    """A class and its bases, most derived first, as far as they lie in the tree. Each once; a shared base last."""
    order: dict[int, tuple[Module, ast.ClassDef]] = {}

    def visit(module: Module, node: ast.ClassDef) -> None:
        order.pop(id(node), None)
        order[id(node)] = (module, node)
        for base in node.bases:
            above = tree.follow(module, dotted(base))
            if above is not None and isinstance(above.node, ast.ClassDef):
                visit(above.module, above.node)

    assert isinstance(found.node, ast.ClassDef)
    visit(found.module, found.node)
    return iter(order.values())


def form_of(tree: Tree, found: Definition) -> Form:
    known: dict[str, Form] = {"Struct": "struct", "BaseModel": "model", "Enum": "enum", "IntEnum": "enum"}
    for _, node in lineage(tree, found):
        marks = {called(mark) or dotted(mark).rpartition(".")[2] for mark in node.decorator_list}
        if marks & {"dataclass", "config"}:  # `config` is vLLM's own dataclass
            return "dataclass"
        for base in node.bases:
            form = known.get(dotted(base).rpartition(".")[2])
            if form is not None:
                return form
    return "plain"


def own_fields(tree: Tree, module: Module, node: ast.ClassDef, form: Form) -> Iterator[Field]:
    """What this class itself adds."""
    everywhere = form == "model" or says_keyword_only([*node.keywords, *decorator_keywords(node)])
    for statement in node.body:
        if form == "enum" and isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            yield Field(statement.targets[0].id, "", literal(statement.value))
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and form != "enum":
            written = ast.unparse(statement.annotation)
            if written.rpartition(".")[2] == "KW_ONLY":  # a mark, not a field: those after it have to be named
                everywhere = True
                continue
            hidden = statement.target.id.startswith("_") and form == "model"
            if not hidden and not written.startswith(("ClassVar", "typing.ClassVar")):
                kind = type_text(tree, module, statement.annotation)
                default, keyword_only = field_default(statement.value)
                yield Field(statement.target.id, kind, default, everywhere or keyword_only)


def decorator_keywords(node: ast.ClassDef) -> list[ast.keyword]:
    return [keyword for mark in node.decorator_list if isinstance(mark, ast.Call) for keyword in mark.keywords]


def says_keyword_only(keywords: list[ast.keyword]) -> bool:
    return any(keyword.arg == "kw_only" and getattr(keyword.value, "value", False) is True for keyword in keywords)


def field_default(value: ast.expr | None) -> tuple[object, bool]:
    """What is written right of a field, as (default, whether it says that it is keyword only)."""
    if value is None:
        return REQUIRED, False
    if not isinstance(value, ast.Call) or called(value) not in {"field", "Field", "Query", "Body", "Form", "File"}:
        return literal(value), False
    options = {keyword.arg: keyword.value for keyword in value.keywords}
    keyword_only = says_keyword_only(value.keywords)
    if "default_factory" in options:
        return Made(ast.unparse(options["default_factory"])), keyword_only
    positional = None if called(value) == "field" or not value.args else value.args[0]
    default = options.get("default", positional)
    if default is None or (isinstance(default, ast.Constant) and default.value is ...):
        return REQUIRED, keyword_only
    return literal(default), keyword_only


# --- methods ----------------------------------------------------------------------------------------------------------


def read_methods(tree: Tree, found: Definition) -> dict[str, Method]:
    """Every method of a class and its bases that is called on an instance: no properties, static or class methods."""
    methods: dict[str, Method] = {}
    for module, node in reversed(list(lineage(tree, found))):
        for part in node.body:
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                marks = {dotted(mark).rpartition(".")[2] for mark in part.decorator_list}
                methods.pop(part.name, None)
                if not marks & {"property", "cached_property", "staticmethod", "classmethod", "setter"}:
                    methods[part.name] = read_method(tree, module, part)
    return methods


def read_method(tree: Tree, module: Module, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Method:
    parameters = tuple(parameters_of(tree, module, node.args))
    return Method(node.name, isinstance(node, ast.AsyncFunctionDef), parameters[1:])


def parameters_of(tree: Tree, module: Module, args: ast.arguments) -> Iterator[inspect.Parameter]:
    """The parameters of a function in their order; a default that is no literal is an `Expression`."""

    def made(arg: ast.arg, default: ast.expr | None, kind: inspect._ParameterKind) -> inspect.Parameter:
        value = REQUIRED if default is None else literal(default)
        return inspect.Parameter(
            arg.arg, kind, default=value, annotation=type_text(tree, module, arg.annotation) or REQUIRED
        )

    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + list(args.defaults)
    for position, (arg, default) in enumerate(zip(plain, defaults, strict=True)):
        only = position < len(args.posonlyargs)
        yield made(arg, default, inspect.Parameter.POSITIONAL_ONLY if only else inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if args.vararg is not None:
        yield made(args.vararg, None, inspect.Parameter.VAR_POSITIONAL)
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield made(arg, default, inspect.Parameter.KEYWORD_ONLY)
    if args.kwarg is not None:
        yield made(args.kwarg, None, inspect.Parameter.VAR_KEYWORD)


def read_attributes(tree: Tree, found: Definition) -> frozenset[str]:
    """Names that instances have besides methods: class attributes, properties, and what methods set on `self`."""
    names: set[str] = set()
    for _, node in lineage(tree, found):
        for part in ast.walk(node):
            if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and dotted(part.value) == "self":
                names.add(part.attr)
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                names.add(statement.target.id)
            elif isinstance(statement, ast.Assign):
                names |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
            elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                marks = {dotted(mark).rpartition(".")[2] for mark in statement.decorator_list}
                names |= {statement.name} if marks & {"property", "cached_property"} else set()
    return frozenset(names)
