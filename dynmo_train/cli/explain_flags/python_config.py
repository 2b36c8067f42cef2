"""Configurations that other projects write as Python functions, read from their syntax tree; nothing is executed.

Megatron-Bridge's recipes assign fields of a ``ConfigContainer``; torchtitan's registry calls classes::

    cfg = _pretrain_common()                     return Trainer.Config(
    cfg.train.train_iters = 1000                     training=TrainingConfig(steps=1000),
    cfg.optimizer.main_grads_dtype = torch.float32   optimizer=default_adamw(lr=3e-4))
            │                                                │
            └──> train.train_iters = 1000                    └──> training.steps = 1000, optimizer.lr = 3e-4

Functions of the same file are followed. Every other call, condition or loop is a field whose value is not known, which
the caller refuses by name.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..._common.document import short_repr
from ..._common.errors import UsageError

MAX_CALLS, MAX_POWER = 200, 64
_CONTAINERS = ("ConfigContainer", "Trainer.Config")
# Calls whose keywords are fields of what they return, next to those of classes.
_FIELD_CALLS = frozenset({"default_adamw"})


@dataclass(frozen=True)
class Unknown:
    """A value that only the execution of a function would give: its source text, and the name of what it calls."""

    text: str


@dataclass
class PythonConfig:
    """A configuration of a Python file.

    Attributes:
        project: ``Megatron-Bridge`` or ``torchtitan``.
        function: name of the function that returns it.
        fields: dotted name of a field to its value, or to ``Unknown``, in the order of the last assignments.
        unread: statements that may change fields and are not read, as text.
    """

    project: str
    function: str
    fields: dict[str, Any] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)


def config_functions(text: str) -> list[str]:
    """Names of the functions of a file that return a configuration, in order.

    Args:
        text: Python source.

    Raises:
        UsageError: it is not Python.
    """
    return list(_functions(_tree(text)))


def _tree(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"is not Python: {error}; give a recipe of Megatron-Bridge or of torchtitan") from error


def _functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    """The functions that return a configuration: by their annotation."""
    return {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.returns is not None and ast.unparse(node.returns) in _CONTAINERS
    }


def read_python_config(text: str, function: str | None = None, modules: Sequence[str] = ()) -> PythonConfig:
    """Read a configuration of Megatron-Bridge or torchtitan.

    Args:
        text: Python source.
        function: name of the function; None takes the only one of the file.
        modules: sources of modules whose functions and constants the file imports.

    Raises:
        UsageError: not Python, no such function, or several without a name.
    """
    tree = _tree(text)
    functions = _functions(tree)
    if not functions:
        raise UsageError("has no function that returns a ConfigContainer or a Trainer.Config; give another file")
    if function is None and len(functions) > 1:
        raise UsageError(f"has {len(functions)} configurations; give --function with one of {_names(functions)}")
    name = function or next(iter(functions))
    if name not in functions:
        raise UsageError(f"has no configuration {short_repr(name)}; --function must be one of {_names(functions)}")
    returned = ast.unparse(functions[name].returns or ast.Constant(None))
    found = PythonConfig("torchtitan" if returned == "Trainer.Config" else "Megatron-Bridge", name)
    try:
        others = [_tree(module) for module in modules]
        _Reader([*others, tree], found).read(functions[name])
    except RecursionError as error:
        raise UsageError(f"{name}: is nested too deeply") from error
    return found


def _names(functions: Mapping[str, Any]) -> str:
    names = list(functions)
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


class _Reader:
    """Follows the statements of a function, and of those that it calls."""

    def __init__(self, trees: Sequence[ast.Module], found: PythonConfig) -> None:
        self.found = found
        # The last file, whose function is read, has precedence.
        body = [node for tree in trees for node in tree.body]
        self.functions = {name: node for tree in trees for name, node in _functions(tree).items()}
        self.helpers = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
        self.calls = 0
        self.constants: dict[str, Any] = {}
        for node in body:
            target, value = _assigned(node)
            if isinstance(target, ast.Name) and value is not None:
                self.constants[target.id] = self.value(value, {})

    def read(self, function: ast.FunctionDef, arguments: Mapping[str, Any] | None = None) -> None:
        """Add the fields that a function sets.

        Args:
            function: the function.
            arguments: values of its parameters; those that are absent have their defaults.
        """
        self.calls += 1
        if self.calls > MAX_CALLS:
            raise UsageError(f"{self.found.function}: calls more than {MAX_CALLS} functions")
        names = dict(arguments or {})
        for parameter, default in _defaults(function):
            names.setdefault(parameter, self.value(default, {}))
        own: set[str] = set()
        for statement in function.body:
            self._statement(statement, names, own)

    def _statement(self, node: ast.stmt, names: dict[str, Any], own: set[str]) -> None:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom | ast.Pass | ast.Assert):
            return
        if isinstance(node, ast.Return):
            if node.value is not None and not (isinstance(node.value, ast.Name) and node.value.id in own):
                self._base(node.value, names)
            return
        target, value = _assigned(node)
        path = _path(target) if target is not None else None
        if path is not None and value is not None and len(path) > 1 and path[0] in own:
            self._set(".".join(path[1:]), value, names)
        elif path is not None and value is not None and len(path) == 1 and self._is_base(value, own):
            own.add(path[0])
            self._base(value, names)
        elif path is not None and value is not None and len(path) == 1:
            names[path[0]] = self.value(value, names)
        elif any(isinstance(part, ast.Name) and part.id in own for part in ast.walk(node)):
            # A condition, a loop, or a call that takes the configuration and changes it.
            self.found.unread.append(ast.unparse(node).splitlines()[0][:120])

    def _is_base(self, node: ast.expr, own: set[str]) -> bool:
        """Whether an expression is a configuration: a call of a function that returns one."""
        if isinstance(node, ast.Name):
            return node.id in own
        if not isinstance(node, ast.Call):
            return False
        name = ast.unparse(node.func)
        return name in self.functions or name in _CONTAINERS or name.rstrip("_").endswith(("_common", "_config"))

    def _base(self, node: ast.expr, names: Mapping[str, Any]) -> None:
        """The fields of a configuration that a call returns."""
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and name in _CONTAINERS:
            for keyword in node.keywords:
                if keyword.arg is None:
                    self.found.unread.append(ast.unparse(node)[:120])
                else:
                    self._set(keyword.arg, keyword.value, names)
        elif isinstance(node, ast.Call) and (function := self.functions.get(name) or self.helpers.get(name)):
            parameters = [each.arg for each in function.args.args]
            given = dict(zip(parameters, (self.value(each, names) for each in node.args), strict=False))
            given |= {each.arg: self.value(each.value, names) for each in node.keywords if each.arg}
            self.read(function, given)
        else:
            self.found.unread.append(ast.unparse(node)[:120])

    def _set(self, name: str, node: ast.expr, names: Mapping[str, Any]) -> None:
        """Set a field, or the fields of the object that a class or a known function makes."""
        if isinstance(node, ast.Call) and not node.args and _makes_fields(node):
            self._remove(name)
            label = _class_of(node)
            if label:
                self.found.fields[f"{name}.class"] = label
            for keyword in node.keywords:
                if keyword.arg is None:
                    self.found.fields[name] = Unknown(ast.unparse(node)[:120])
                else:
                    self._set(f"{name}.{keyword.arg}", keyword.value, names)
            return
        self._remove(name)
        self.found.fields[name] = self.value(node, names)

    def _remove(self, name: str) -> None:
        """Forget a field and what it contains: the last assignment counts."""
        for known in [known for known in self.found.fields if known == name or known.startswith(f"{name}.")]:
            del self.found.fields[known]

    def value(self, node: ast.expr, names: Mapping[str, Any]) -> Any:
        """The value of an expression of literals, constants and arithmetic; else ``Unknown``."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.List | ast.Tuple):
            values = [self.value(each, names) for each in node.elts]
            return Unknown(ast.unparse(node)[:120]) if any(isinstance(each, Unknown) for each in values) else values
        if isinstance(node, ast.Name):
            return names.get(node.id, self.constants.get(node.id, Unknown(node.id)))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            inner = self.value(node.operand, names)
            if type(inner) in (int, float):
                return -inner
        if isinstance(node, ast.BinOp):
            return _arithmetic(self.value(node.left, names), node.op, self.value(node.right, names), node)
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
            return node.attr
        return Unknown(ast.unparse(node)[:120])


def _arithmetic(left: Any, operator: ast.operator, right: Any, node: ast.expr) -> Any:
    """Sums, products and quotients of numbers of moderate size."""
    unknown = Unknown(ast.unparse(node)[:120])
    if type(left) not in (int, float) or type(right) not in (int, float):
        return unknown
    if max(abs(left), abs(right)) > 2**MAX_POWER:
        return unknown
    try:
        if isinstance(operator, ast.Add):
            return left + right
        if isinstance(operator, ast.Sub):
            return left - right
        if isinstance(operator, ast.Mult):
            return left * right
        if isinstance(operator, ast.FloorDiv):
            return left // right
        if isinstance(operator, ast.Div):
            return left / right
        if isinstance(operator, ast.Pow) and 0 <= right <= MAX_POWER:
            return left**right
    except (ArithmeticError, ValueError):
        pass
    return unknown


def _defaults(function: ast.FunctionDef) -> list[tuple[str, ast.expr]]:
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs = list(zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True))
    pairs += [
        (name, value)
        for name, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if value is not None
    ]
    return [(name.arg, value) for name, value in pairs]


def _assigned(node: ast.stmt) -> tuple[ast.expr | None, ast.expr | None]:
    """Target and value of an assignment to one target; None for other statements."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        return node.targets[0], node.value
    return (node.target, node.value) if isinstance(node, ast.AnnAssign) else (None, None)


def _path(node: ast.expr) -> list[str] | None:
    """``cfg.train.lr`` as its parts; None for another target."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else None


def _makes_fields(node: ast.Call) -> bool:
    """Whether a call makes an object of its keywords: of a class, whose name has a capital."""
    name = ast.unparse(node.func)
    return name in _FIELD_CALLS or (name.replace(".", "").replace("_", "").isalnum() and name[0].isupper())


def _class_of(node: ast.Call) -> str:
    """The class, where torchtitan has several for a field: ``SelectiveAC`` of ``SelectiveAC.Config()``."""
    name = ast.unparse(node.func)
    return name.removesuffix(".Config") if name.endswith(".Config") else ""
