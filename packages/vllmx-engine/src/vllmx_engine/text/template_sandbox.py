"""The Jinja environment of chat templates: Hugging Face's conventions, sandboxed and bounded.

Templates come with models or, where allowed, with requests, and run in our process. On top of
Jinja's immutable sandbox:

* only known methods of plain values, macros and our own functions can be called;
* the syntax tree gets a counted step in every loop, and every operation that makes a value (`+`,
  `~`, literals, filters, calls, output) is accounted for in the rendering's `Budget`, before it
  runs where its result could be far larger than its arguments;
* nothing is evaluated while compiling, no other template can be loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from datetime import datetime
from types import BuiltinMethodType, MethodType
from typing import Any, NoReturn

from jinja2 import TemplateError as JinjaError
from jinja2 import Undefined, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.filters import FILTERS
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace, _PassArg

from vllmx_engine.text.prompt_text import MARK
from vllmx_engine.text.template_budget import (
    FILTER_CHECKS,
    METHOD_CHECKS,
    BoundsError,
    Budget,
    TemplateLimits,
    check_binop,
    check_join,
    check_spec,
)
from vllmx_engine.text.template_syntax import GenerationTag, Instrument

_OMITTED_FILTERS = frozenset(
    (
        "filesizeformat",
        "forceescape",
        "pprint",
        "random",
        "striptags",
        "urlize",
        "wordwrap",
        "xmlattr",
    )
)
# fmt: off
_STR_METHODS = frozenset((
    "capitalize", "casefold", "center", "count", "endswith", "find", "index", "isalnum",
    "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric",
    "isprintable", "isspace", "istitle", "isupper", "join", "ljust", "lower", "lstrip",
    "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rjust",
    "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase",
    "title", "upper", "zfill",
))
# fmt: on
_METHODS: tuple[tuple[type, frozenset[str]], ...] = (
    (str, _STR_METHODS),
    (dict, frozenset(("copy", "get", "items", "keys", "values"))),
    (list, frozenset(("copy", "count", "index"))),
    (tuple, frozenset(("count", "index"))),
    (LoopContext, frozenset(("changed", "cycle"))),
)
_CALLABLE = (Macro, LoopContext, BlockReference, Undefined)
_MAX_DATE_FORMAT = 200
_PRINTING = frozenset(("indent", "lower", "replace", "string", "trim", "upper"))
"""Filters that take the text of any value."""
_ESCAPED_MARK = re.compile(r"(?<!\\)((?:\\\\)*)" + re.escape(json.dumps(MARK)[1:-1]))


class RaisedByTemplate(JinjaError):
    """The template called `raise_exception`."""


class TemplateNamespace(Namespace):
    """Jinja's namespace without private names, and with a text of constant size."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        Namespace.__setitem__(self, name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace attribute must not begin with an underscore: {name!r}")


class FormatMethod:
    """`str.format` or `format_map` of one string; run by the environment, with its budget."""

    def __init__(self, template: str, takes_mapping: bool) -> None:
        self.template = template
        self.takes_mapping = takes_mapping


class BoundedFormatter(SandboxedFormatter):
    """The sandbox's `str.format` with bounds on widths and on the whole."""

    def __init__(self, environment: TemplateEnvironment, budget: Budget) -> None:
        super().__init__(environment)
        self._budget = budget
        self._num_chars = 0

    def format_field(self, value: Any, format_spec: str) -> Any:
        """One field; called by `vformat`."""
        check_spec(format_spec)
        self._budget.size(value)
        text = super().format_field(_printed(value), format_spec)
        self._num_chars += len(text)
        self._budget.check_chars(self._num_chars)
        return text


class BoundedContext(Context):
    """A rendering's variables, with its budget."""

    budget: Budget

    def __init__(
        self,
        environment: TemplateEnvironment,
        parent: dict[str, Any],
        name: str | None,
        blocks: dict[str, Callable[[Context], Any]],
        globals: MutableMapping[str, Any] | None = None,  # noqa: A002  # jinja's name
    ) -> None:
        super().__init__(environment, parent, name, blocks, globals)
        self.budget = Budget(environment.limits)

    def derived(self, locals: dict[str, Any] | None = None) -> Context:  # noqa: A002
        """A context of the same rendering."""
        context = super().derived(locals)
        assert isinstance(context, BoundedContext)
        context.budget = self.budget
        return context


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Environment for chat templates with bounded work; one serves many renderings at once."""

    context_class = BoundedContext
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, limits: TemplateLimits) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[GenerationTag, loopcontrols],
        )
        self.limits = limits
        self.finalize = finalize_output
        self.filters = {
            name: _bounded_filter(name, function)
            for name, function in (FILTERS | {"tojson": to_json}).items()
            if name not in _OMITTED_FILTERS
        }
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        self.globals["namespace"] = TemplateNamespace
        self.globals["dict"] = make_dict
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = strftime_now
        self._own = {id(function): function for function in self.globals.values()}
        # Shadows the class attribute that compiled templates use to join the parts of a macro.
        self.concat = self.join_parts  # type: ignore[method-assign]

    def parse_plain(self, source: str) -> nodes.Template:
        """The syntax tree as written, for questions about the template."""
        return super()._parse(source, None, None)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        Instrument().visit(tree)
        return tree.set_environment(self)  # type: ignore[return-value]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An intercepted operator."""
        budget = _budget(context)
        if operator == "+" and type(left) is str and type(right) is str:
            text = left + right
            budget.charge(len(text))
            return text
        check_binop(budget, operator, left, right)
        if operator == "%" and isinstance(left, str):
            if isinstance(right, tuple):
                right = tuple(map(_printed, right))
            elif isinstance(right, dict) and "%(" in left:
                right = _with_printed(right)
            else:
                right = _printed(right)
        return budget.admit(self.binop_table[operator](left, right))

    def call(self, context: Context, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call in a template."""
        budget = _budget(context)
        budget.step()
        method = getattr(target, "__func__", None)
        if method is TemplateEnvironment.count_step:
            return True
        if method is TemplateEnvironment.new_container:
            return budget.admit(args[0])
        if method is TemplateEnvironment.join_values:
            return self._joined(budget, args)
        if isinstance(target, FormatMethod):
            return self._formatted(budget, target, args, kwargs)
        if isinstance(target, (BuiltinMethodType, MethodType)):
            target = _without_mark(target)
            args = self._checked_method(budget, target, args, kwargs)
        elif not isinstance(target, _CALLABLE) and id(target) not in self._own:
            raise SecurityError(f"a chat template must not call {_describe(target)}")
        return budget.admit(super().call(context, target, *args, **kwargs))

    def count_step(self) -> bool:
        """Stands in compiled loops; `call` counts it."""
        return True

    def join_values(self, *values: Any) -> str:
        """Stands for `a ~ b` in compiled templates; `call` runs it in bounds."""
        return "".join(map(text_of, values))

    def new_container(self, value: Any) -> Any:
        """Stands around literals in compiled templates; `call` measures them."""
        return value

    def join_parts(self, parts: Iterable[str]) -> str:
        """The text of a macro or block from its parts."""
        texts = list(parts)
        if sum(map(len, texts)) > self.limits.max_chars:
            raise BoundsError(f"makes a text of more than {self.limits.max_chars} characters")
        return "".join(texts)

    def wrap_str_format(self, value: Any) -> Any:
        """`str.format` as an object that `call` runs in bounds."""
        if not isinstance(value, (MethodType, BuiltinMethodType)):
            return None
        owner, name = value.__self__, value.__name__
        if name not in ("format", "format_map") or not isinstance(owner, str):
            return None
        return FormatMethod(owner, name == "format_map")

    def _checked_method(
        self, budget: Budget, method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """The arguments to call a method of a plain value with."""
        owner, name = method.__self__, method.__name__
        if not any(isinstance(owner, kind) and name in names for kind, names in _METHODS):
            raise SecurityError(f"a chat template must not call {_describe(method)}")
        if isinstance(owner, str):
            if name == "join" and args:
                return (check_join(budget, owner, args[0]), *args[1:])
            check = METHOD_CHECKS.get(name)
            if check is not None:
                check(budget, owner, {**dict(enumerate(args)), **kwargs})
        return args

    def _joined(self, budget: Budget, values: tuple[Any, ...]) -> str:
        budget.check_chars(sum(map(budget.size, values)))
        text = "".join(map(text_of, values))
        budget.charge(len(text))
        return text

    def _formatted(
        self,
        budget: Budget,
        method: FormatMethod,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        formatter = BoundedFormatter(self, budget)
        if not method.takes_mapping:
            return budget.admit(formatter.vformat(method.template, args, kwargs))
        if kwargs or len(args) != 1 or not isinstance(args[0], Mapping):
            raise TypeError("format_map() takes exactly one mapping")
        return budget.admit(formatter.vformat(method.template, (), args[0]))


def _budget(context: Context) -> Budget:
    assert isinstance(context, BoundedContext)
    return context.budget


def _without_mark(method: Any) -> Any:
    """A method that looks at the beginning of a text sees it without the mark of `prompt_text`."""
    owner, name = method.__self__, method.__name__
    if name in ("startswith", "removeprefix") and isinstance(owner, str) and owner[:1] == MARK:
        return getattr(owner.lstrip(MARK), name)
    return method


def _describe(target: Any) -> str:
    name = getattr(target, "__name__", None)
    owner = getattr(target, "__self__", None)
    if isinstance(name, str) and owner is not None:
        return f"{name!r} of a {type(owner).__name__}"
    return f"a {type(target).__name__}"


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter as a step of the budget; never evaluated while compiling."""
    check = FILTER_CHECKS.get(name)
    first = _PassArg.from_obj(function)

    @pass_context
    def bounded(context: Context, value: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        budget.step()
        if name == "tojson" and isinstance(value, Iterator):  # what `map` and `select` make
            value = list(value)
        if name in _PRINTING:
            budget.size(value)
            value = _printed(value)
        if name == "format":
            args, kwargs = tuple(map(_printed, args)), _with_printed(kwargs)
        if check is not None:
            check(budget, value, {**dict(enumerate(args)), **kwargs})
        elif name == "join":
            separator = kwargs.get("d", args[0] if args else "")
            value = check_join(budget, str(separator), value)
            if not kwargs.get("attribute", args[1:]):
                value = [text_of(each) for each in value]
        if first is _PassArg.context:
            return budget.admit(function(context, value, *args, **kwargs))
        if first is _PassArg.eval_context:
            return budget.admit(function(context.eval_ctx, value, *args, **kwargs))
        if first is _PassArg.environment:
            return budget.admit(function(context.environment, value, *args, **kwargs))
        return budget.admit(function(value, *args, **kwargs))

    return bounded


@pass_context
def finalize_output(context: Context, value: Any) -> str:
    """The text of `{{ value }}`."""
    budget = _budget(context)
    if not isinstance(value, str):
        budget.size(value)
    text = text_of(value)
    budget.charge(len(text))
    return text


def text_of(value: Any) -> str:
    """Returns Python's printed form of a value. Marks in its texts, which Python would escape, stay
    marks."""
    text = str(value)
    return text if isinstance(value, str) else _with_marks(text)


def _printed(value: Any) -> Any:
    """A list or an object as the text that Python prints of it; other values as they are."""
    return text_of(value) if isinstance(value, (list, dict, tuple)) else value


def _with_printed(members: Mapping[str, Any]) -> dict[str, Any]:
    """Members to format by their names."""
    return {key: _printed(item) for key, item in members.items()}


def _with_marks(text: str) -> str:
    return _ESCAPED_MARK.sub(rf"\1{MARK}", text)


def raise_exception(message: Any) -> NoReturn:
    """The function that a template calls to refuse a conversation."""
    raise RaisedByTemplate(str(message))


def strftime_now(format: Any) -> str:  # noqa: A002  # the name that templates use
    """The local time; templates show the date in a system prompt."""
    text = str(format)
    check_spec(text)
    if len(text) > _MAX_DATE_FORMAT:
        raise BoundsError(f"uses a date format of more than {_MAX_DATE_FORMAT} characters")
    return datetime.now().strftime(text)


def make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """`dict(...)` without the class behind it."""
    return dict(*args, **kwargs)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter would escape HTML and sort the keys."""
    text = json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    return _with_marks(text) if ensure_ascii else text
