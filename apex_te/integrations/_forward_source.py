"""Flow of a block's tensors, read from the source of its forward and of those that it calls.

``read_forward`` follows all branches of the source that attributes of the modules do not decide.
It takes for granted that ``**kwargs`` of a call do not name tensors that the block computes.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from . import _matching as matching
from ._flow_values import UNKNOWN, Env, Value, either, merge
from ._function_source import UnreadableError, calls_in, files_of, source_of

_LAYERS = "transformers.modeling_layers"  # whose __call__ checkpoints forward
_DEEPEST = 12
# What tells shape, dtype or place of a tensor, not its elements.
_METADATA = frozenset(
    ("shape", "dtype", "device", "ndim", "size", "dim", "numel", "is_cuda", "requires_grad")
)
_TELLS = frozenset(("isinstance", "hasattr", "type"))
_CONSTANTS = (bool, int, float, str, type(None))


class ModuleCall(NamedTuple):
    """Call of a module in a forward.

    ``tensors`` are those that its only argument may be, None for other arguments; calls with equal
    ``where`` run all or not at all.
    """

    module: nn.Module
    tensors: frozenset[Any] | None
    where: tuple[Any, ...]


class Flow:
    """Calls and other uses of tensors in the forward of a block.

    Attributes:
        calls: each call of a leaf, or of a module whose forward was read.
        readers: by tensor, the class name of a module whose forward reads it otherwise.
        changed: tensors that were changed in place.
        inspected: ``id`` of leaves with other uses than a call, and reading weight or bias.
    """

    def __init__(self, block: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> None:
        self.calls: list[ModuleCall] = []
        self.where: tuple[Any, ...] = ()
        self.readers: dict[Any, str] = {}
        self.changed: set[Any] = set()
        self.inspected: set[int] = set()
        self.visited: set[ast.AST] = set()
        self._is_leaf = is_leaf
        self._block = block
        run = _Run(self, block, type(block).forward, 0)
        names = [arg.arg for arg in (*_arguments(run.node)[1:], *run.node.args.kwonlyargs)]
        for value in run.call({name: Value([name]) for name in names}).all_ids():
            self.readers.setdefault(value, type(block).__name__)

    def is_leaf(self, module: nn.Module) -> bool:
        """Returns True for a module whose calls are noted instead of read."""
        return self._is_leaf(module)

    def calls_elsewhere(self, owner: nn.Module, name: str) -> bool:
        """Returns True if source of the owner's classes may call its child ``name`` elsewhere."""
        names = {kind.__name__ for kind in type(owner).__mro__}
        return any(
            node not in self.visited and (own is None or own in names)
            for path in files_of(type(owner))
            for node, own in calls_in(path).get(name, ())
        )


def _arguments(node: ast.FunctionDef) -> list[ast.arg]:
    """Returns the arguments of a function that may be given by position."""
    return [*node.args.posonlyargs, *node.args.args]


class _Run:
    """One call of a function with a module as ``self``."""

    def __init__(self, flow: Flow, module: nn.Module, function: Any, depth: int) -> None:
        if depth > _DEEPEST:
            raise UnreadableError(f"calls deeper than {_DEEPEST}")
        self.flow, self.module, self.depth = flow, module, depth
        self.node = source_of(function)
        self.returned: Value | None = None
        self.breaks: list[Env | None] = []

    def call(self, given: dict[str, Value]) -> Value:
        """Follows the function with arguments by name; returns its result."""
        spec = self.node.args
        own = _arguments(self.node)
        env: Env = {own[0].arg: Value(module=self.module)}
        defaults = dict(
            zip([a.arg for a in own[len(own) - len(spec.defaults) :]], spec.defaults, strict=True)
        )
        defaults.update(
            {a.arg: d for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if d}
        )
        for arg in [*own[1:], *spec.kwonlyargs]:
            default = defaults.get(arg.arg)
            if arg.arg in given:
                env[arg.arg] = given[arg.arg]
            elif isinstance(default, ast.Constant):
                env[arg.arg] = Value(const=default.value)
            else:
                env[arg.arg] = self.fresh(arg)
        for name, value in given.items():
            if name not in env:
                self.read(value)
        before = self.flow.where
        try:
            self.body(self.node.body, env)
        finally:
            self.flow.where = before
        return self.returned or Value(const=None)

    def fresh(self, node: ast.AST) -> Value:
        """Returns a new tensor, or anything else that is not followed."""
        return Value([(id(self.module), node)])

    def read(self, value: Value) -> None:
        """Records a use that is not a call of a leaf."""
        for one in value.all_ids():
            self.flow.readers.setdefault(one, type(self.module).__name__)
        for one in (value, *(value.items or ())):
            if one.module not in (None, self.module):  # which passes itself to functions
                self.flow.inspected.update(map(id, one.module.modules()))

    # Statements: each returns the names after it, None if it does not end.

    def body(self, statements: list[ast.stmt], env: Env | None) -> Env | None:
        """Follows statements one after another."""
        for statement in statements:
            if env is None:
                return None
            env = self.statement(statement, env)
        return env

    def statement(self, node: Any, env: Env) -> Env | None:
        """Follows one statement."""
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            if node.value is not None:
                value = self.value(node.value, env)
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self.bind(target, value, env)
        elif isinstance(node, ast.AugAssign):
            self.read(self.value(node.value, env))
            before = self.value(node.target, env)
            self.read(before)
            self.flow.changed.update(before.all_ids())
            self.bind(node.target, self.fresh(node), env)
        elif isinstance(node, ast.Expr):
            self.value(node.value, env)
        elif isinstance(node, ast.Return):
            value = Value(const=None) if node.value is None else self.value(node.value, env)
            self.returned = value if self.returned is None else either(self.returned, value)
            return None
        elif isinstance(node, ast.If):
            return self.branch(node, env)
        elif isinstance(node, (ast.For, ast.While)):
            return self.loop(node, env)
        elif isinstance(node, ast.With):
            for item in node.items:
                self.read(self.value(item.context_expr, env))
                if item.optional_vars is not None:
                    self.bind(item.optional_vars, self.fresh(item), env)
            return self.body(node.body, env)
        elif isinstance(node, (ast.Break, ast.Continue)):
            self.breaks.append(env)
            return None
        elif isinstance(node, ast.Raise):
            self.skip(node)
            return None
        elif isinstance(node, ast.Assert):
            self.read(self.value(node.test, env))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                env[alias.asname or alias.name] = self.fresh(node)
        elif not isinstance(node, (ast.Pass, ast.Delete)):
            raise UnreadableError(f"a statement of kind {type(node).__name__}")
        return env

    def branch(self, node: ast.If, env: Env) -> Env | None:
        """Follows the branches that may run."""
        test = self.value(node.test, env)
        self.read(test)
        taken = [self.may_be(test, wanted) for wanted in (True, False)]
        before = self.flow.where
        ends: list[Env | None] = []
        for wanted, body in zip((True, False), (node.body, node.orelse), strict=True):
            if not taken[not wanted]:
                for statement in body:
                    self.skip(statement)
                continue
            self.flow.where = (*before, (node, wanted)) if all(taken) else before
            ends.append(self.body(body, self.given(test, env) if wanted else dict(env)))
        self.flow.where = before
        if len(ends) == 1:
            return ends[0]
        if None in ends:  # what follows runs after the other branch only
            self.flow.where = (*before, node)
        return merge(*ends)

    def loop(self, node: Any, env: Env) -> Env | None:
        """Follows a loop as often as it finds other values than before; twice is enough."""
        former, self.breaks = self.breaks, []
        if isinstance(node, ast.For):
            self.read(self.value(node.iter, env))
        after: Env | None = env
        before = self.flow.where
        self.flow.where = (*before, node)
        for _ in range(2):
            inner = dict(after or env)
            if isinstance(node, ast.For):
                self.bind(node.target, self.fresh(node), inner)
            else:
                self.read(self.value(node.test, inner))
            after = merge(after, self.body(node.body, inner))
            for ended in self.breaks:
                after = merge(after, ended)
        self.breaks = former
        self.flow.where = before
        return self.body(node.orelse, after)

    def bind(self, target: ast.AST, value: Value, env: Env) -> None:
        """Gives a value to a name, or to several; what is stored elsewhere was read."""
        if isinstance(target, ast.Name):
            env[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            items = value.items
            if items is None or len(items) != len(target.elts):
                self.read(value)
                items = [self.fresh(one) for one in target.elts]
            for one, item in zip(target.elts, items, strict=True):
                self.bind(one.value if isinstance(one, ast.Starred) else one, item, env)
        else:
            self.read(value)
            self.generic(target, env)
            if isinstance(target, ast.Subscript):
                self.flow.changed.update(self.value(target.value, env).all_ids())

    def skip(self, node: ast.AST) -> None:
        """Records the calls in source that does not run."""
        self.flow.visited.update(ast.walk(node))

    # Expressions

    @staticmethod
    def may_be(value: Value, wanted: bool) -> bool:
        """Returns True if a condition may be ``wanted``."""
        return value.const is UNKNOWN or bool(value.const) is wanted

    @staticmethod
    def given(test: Value, env: Env) -> Env:
        """Returns the names where a condition is true."""
        return {
            name: Value(value.ids, module=value.module, method=value.method, items=value.items,
                         present=True) if value in test.proves else value
            for name, value in env.items()
        }  # fmt: skip

    def value(self, node: Any, env: Env) -> Value:
        """Follows an expression; returns its value."""
        if isinstance(node, ast.Name):
            return env.get(node.id) or Value()
        if isinstance(node, ast.Constant):
            return Value(const=node.value)
        known: Any = {
            ast.Attribute: self.attribute, ast.Subscript: self.subscript, ast.Call: self.called,
            ast.IfExp: self.conditional, ast.BoolOp: self.both_oreither, ast.Compare: self.compare,
            ast.UnaryOp: self.unary, ast.Tuple: self.several, ast.List: self.several,
            ast.NamedExpr: self.named,
        }.get(type(node))  # fmt: skip
        return self.generic(node, env) if known is None else known(node, env)

    def generic(self, node: ast.AST, env: Env) -> Value:
        """Follows any other expression, which may read what its parts are."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.comprehension):
                self.generic(child, env)
            elif isinstance(child, ast.keyword):
                self.read(self.value(child.value, env))
            elif isinstance(child, ast.expr):
                self.read(self.value(child, env))
        return self.fresh(node)

    def several(self, node: Any, env: Env) -> Value:
        """Follows a tuple or list."""
        if any(isinstance(one, ast.Starred) for one in node.elts):
            return self.generic(node, env)
        return Value(items=[self.value(one, env) for one in node.elts])

    def named(self, node: ast.NamedExpr, env: Env) -> Value:
        """Follows an assignment in an expression."""
        value = self.value(node.value, env)
        self.bind(node.target, value, env)
        return value

    def conditional(self, node: ast.IfExp, env: Env) -> Value:
        """Follows ``a if test else b``."""
        test = self.value(node.test, env)
        self.read(test)
        found, before = [], self.flow.where
        for wanted, part in ((True, node.body), (False, node.orelse)):
            if self.may_be(test, wanted):
                self.flow.where = (*before, (node, wanted)) if test.const is UNKNOWN else before
                found.append(self.value(part, self.given(test, env) if wanted else env))
            else:
                self.skip(part)
        self.flow.where = before
        return found[0] if len(found) == 1 else either(*found)

    def both_oreither(self, node: ast.BoolOp, env: Env) -> Value:
        """Follows ``and`` and ``or``, whose result may be any operand that does not go on."""
        stops = isinstance(node.op, ast.Or)
        found: Value | None = None
        proves: set[Value] = set()
        before = self.flow.where
        for index, part in enumerate(node.values):
            self.flow.where = (*before, (node, index)) if index else before
            value = self.value(part, env)
            proves |= value.proves
            last = index == len(node.values) - 1
            if not last:
                self.read(value)
            if last or self.may_be(value, stops):
                found = value if found is None else either(found, value)
            if not last and not self.may_be(value, not stops):
                for rest in node.values[index + 1 :]:
                    self.skip(rest)
                break
        assert found is not None
        self.flow.where = before
        if not stops and found.const is UNKNOWN:
            found = Value(found.ids, items=found.items, proves=proves)
        return found

    def unary(self, node: ast.UnaryOp, env: Env) -> Value:
        """Follows ``not`` and signs."""
        value = self.value(node.operand, env)
        if value.const is not UNKNOWN and isinstance(node.op, (ast.Not, ast.USub)):
            return Value(const=not value.const if isinstance(node.op, ast.Not) else -value.const)
        if not isinstance(node.op, ast.Not):
            self.read(value)
        return self.fresh(node)

    def compare(self, node: ast.Compare, env: Env) -> Value:
        """Follows a comparison; one with None does not read a tensor."""
        left, *rest = [self.value(part, env) for part in (node.left, *node.comparators)]
        right, op = rest[0], node.ops[0]
        if len(rest) == 1 and isinstance(op, (ast.Is, ast.IsNot)) and right.const is None:
            if left.const is not UNKNOWN or left.module is not None or left.present:
                is_none = left.const is None
                return Value(const=is_none == isinstance(op, ast.Is))
            return Value(proves=[left] if isinstance(op, ast.IsNot) else ())
        known = left.const is not UNKNOWN and right.const is not UNKNOWN
        if known and len(rest) == 1 and isinstance(op, (ast.Eq, ast.NotEq, ast.Is, ast.IsNot)):
            equal = type(left.const) is type(right.const) and left.const == right.const
            return Value(const=equal == isinstance(op, (ast.Eq, ast.Is)))
        for one in (left, *rest):
            self.read(one)
        return Value()

    def attribute(self, node: ast.Attribute, env: Env) -> Value:
        """Follows ``base.name``: a child, method or constant of a module, or of a tensor."""
        base = self.value(node.value, env)
        module, name = base.module, node.attr
        if module is None or base.method is not None:
            if name not in _METADATA:
                self.read(base)
            return self.fresh(node)
        if name in module._modules:
            child = module._modules[name]
            return Value(const=None) if child is None else Value(module=child)
        if self.flow.is_leaf(module):
            if name not in ("weight", "bias"):
                self.flow.inspected.add(id(module))
            return self.fresh(node)
        missing = object()
        found = vars(module).get(name, inspect.getattr_static(type(module), name, missing))
        if inspect.isfunction(found):
            return Value(module=module, method=found)
        if name != "training" and isinstance(found, _CONSTANTS):
            return Value(const=found)
        return self.fresh(node)

    def subscript(self, node: ast.Subscript, env: Env) -> Value:
        """Follows ``base[index]``."""
        base, index = self.value(node.value, env), self.value(node.slice, env)
        if type(index.const) is int:
            if isinstance(base.module, (nn.ModuleList, nn.Sequential)):
                if -len(base.module) <= index.const < len(base.module):
                    return Value(module=base.module[index.const])
            elif base.items is not None and -len(base.items) <= index.const < len(base.items):
                return base.items[index.const]
        self.read(base)
        self.read(index)
        return self.fresh(node)

    def called(self, node: ast.Call, env: Env) -> Value:
        """Follows a call."""
        self.flow.visited.add(node)
        function = node.func
        if isinstance(function, ast.Name) and function.id not in env:
            if function.id in ("locals", "eval", "exec"):
                raise UnreadableError(f"a call of {function.id}")
            if function.id in _TELLS:
                return self.tells(node, function.id, env)
        target = self.value(function, env) if not isinstance(function, ast.Attribute) else None
        if isinstance(function, ast.Attribute):
            target = self.attribute(function, env)
        assert target is not None
        args = [self.value(one, env) for one in node.args]
        options = {one.arg: self.value(one.value, env) for one in node.keywords}
        name = getattr(function, "attr", getattr(function, "id", ""))
        if (name.endswith("_") and not name.endswith("__")) or {"inplace", "out"} & options.keys():
            base = [self.value(function.value, env)] if isinstance(function, ast.Attribute) else []
            self.flow.changed.update(*[one.all_ids() for one in (*base, *args, *options.values())])
        if target.module is not None:
            starred = any(isinstance(one, ast.Starred) for one in node.args)
            named = {name: value for name, value in options.items() if name is not None}
            if not starred:
                return self.of_module(node, target, args, named)
            self.flow.inspected.add(id(target.module))
        for value in (*args, *options.values()):
            self.read(value)
        return self.fresh(node)

    def tells(self, node: ast.Call, name: str, env: Env) -> Value:
        """Follows ``isinstance``, ``hasattr`` and ``type``, which do not read a tensor."""
        values = [self.value(one, env) for one in node.args]
        if name == "hasattr" and values[0].module is not None:
            return Value(const=hasattr(values[0].module, values[1].const))
        return Value()

    def of_module(
        self, node: ast.Call, target: Value, args: list[Value], options: dict[str, Value]
    ) -> Value:
        """Follows the call of a module or of a method."""
        module, flow = target.module, self.flow
        method = target.method
        if method is None:
            only = args[0].ids if len(args) == 1 and not options else None
            single = only is not None and args[0].items is None and args[0].module is None
            flow.calls.append(ModuleCall(module, only if single else None, flow.where))
            if flow.is_leaf(module):
                if not single:
                    for value in (*args, *options.values()):
                        self.read(value)
                return Value([id(module)])
        if method is not None or _is_read(module):
            try:
                run = _Run(flow, module, type(module).forward if method is None else method,
                           self.depth + 1)  # fmt: skip
                names = [arg.arg for arg in _arguments(run.node)[1:]]
                if len(args) <= len(names):
                    return run.call({**dict(zip(names, args, strict=False)), **options})
            except UnreadableError:
                for inner in module.modules():  # whatever it calls
                    flow.inspected.add(id(inner))
        for value in (*args, *options.values()):
            self.read(value)
            if getattr(module, "inplace", False):
                flow.changed.update(value.all_ids())
        return self.fresh(node)


def _is_read(module: nn.Module) -> bool:
    """Returns True if a call of ``module`` runs the forward of its class, which has source."""
    kind = type(module)
    plain = kind.__call__ is nn.Module.__call__ or kind.__call__.__module__ == _LAYERS
    return plain and not kind.__module__.startswith("torch.") and not matching.hooked(module)


def read_forward(block: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> Flow:
    """Returns what a block's forward does; raises ``UnreadableError`` if that cannot be told."""
    if not _is_read(block):
        raise UnreadableError(f"{type(block).__name__} has another forward than its class")
    return Flow(block, is_leaf)
