"""Modules of the agent's, as a test sees them: the code stays in another sandbox, and plain data comes from there.

Stands in the tests' own process, where none of the agent's code is. What comes is read as exact built-in types, or
becomes a Handle, a class of ours whose operations are asked for over there. No value that a test holds a result against
is given to the agent's code to judge: between a handle and plain data `==` is false, `<` and its like raise, and `in`
goes through the elements and compares them here.
"""

from __future__ import annotations

import builtins
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

from agenttrain.verifiers.programs import wire

MAX_ELEMENTS = 100_000
"""That `in` goes through."""
LOCAL = frozenset(
    {"__spec__", "__loader__", "__path__", "__package__", "__file__", "__cached__", "__all__", "__name__"}
)
"""Of a module: set by the import system, here."""
ASKED_FOR = frozenset(
    {"__name__", "__qualname__", "__module__", "__dict__", "__annotations__", "__version__", "__wrapped__"}
)
"""Names with two underscores that are asked for over there; no other is."""


class AgentError(RuntimeError):
    """The agent's process ended, or what it answered can't be read."""


class Wire:
    """Asks the other sandbox, one message at a time."""

    def __init__(self, way: wire.Way) -> None:
        self.way = way
        self.lock = threading.RLock()
        self.handles: dict[tuple[int, int], Handle] = {}
        self.kinds: dict[tuple[int, int], type] = {}
        self.callbacks: list[Callable[..., Any]] = []
        self.crossed: list[BaseException] = []
        """What the agent's code raised, so that it is told from what the tests raise."""

    def ask(self, op: str, of: Any = None, *, args: Sequence[Any] = (), **more: Any) -> Any:
        """What an operation over there gives.

        Raises:
            Exception: what it raised there, as the built-in type it is or derives from.
            AgentError: no answer came that can be read.
            TypeError: something that is given can't cross.
        """
        message = {"op": op, **more}
        if of is not None:
            message |= {"of": of, "args": [self.encoded(each) for each in args]}
        with self.lock:
            answer = self.answer(message)
        for place, now in (answer.get("changed") or {}).items():
            _become(args[int(place)], self.decoded(now))
        return answer["value"] if op == "import" else self.decoded(answer["value"])

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """The last answer to a message; functions of the test's that it asks for meanwhile are called."""
        while True:
            self.way.put(message)
            answer = self.way.get()
            if not isinstance(answer, dict):
                raise self.noted(AgentError("what the agent's code answered can't be read"))
            for name in ("stdout", "stderr"):
                if isinstance(answer.get(name), str):
                    getattr(sys, name).write(answer[name])
            if "callback" in answer:
                message = self.called_back(answer)
            elif "raises" in answer:
                raise self.noted(self.exception(answer["raises"]))
            elif "value" in answer:
                return answer
            else:
                raise self.noted(AgentError(f"The agent's code gave no answer: {answer.get('error')}"))

    def noted(self, error: BaseException) -> BaseException:
        self.crossed.append(error)
        return error

    def called_back(self, answer: dict[str, Any]) -> dict[str, Any]:
        """What a function of the test's returns or raises."""
        try:
            args = [self.decoded(each) for each in answer["args"]]
            kwargs = {str(key): self.decoded(each) for key, each in answer["kwargs"].items()}
            return {"result": self.encoded(self.callbacks[answer["callback"]](*args, **kwargs))}
        except Exception as error:
            return {"raised": {"kind": type(error).__name__, "text": str(error)}}

    def encoded(self, value: Any) -> Any:
        try:
            return wire.encode(value, self.reference)
        except wire.WireError as error:
            raise TypeError(str(error)) from error

    def decoded(self, data: Any) -> Any:
        try:
            return wire.decode(data, self.referenced)
        except (wire.WireError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise self.noted(AgentError(f"what the agent's code answered can't be read: {error}")) from error

    def reference(self, value: Any) -> Any:
        """[what, content] of something that is no plain data."""
        if isinstance(value, Handle):
            return value._agenttrain_reference
        if isinstance(value, ProxyModule):
            return ["module", value.__name__]
        if wire.is_builtin(value):
            return ["builtin", value.__name__]
        if isinstance(value, type) and "_agenttrain_reference" in vars(value):
            return vars(value)["_agenttrain_reference"]
        if callable(value):
            self.callbacks.append(value)
            return ["callback", len(self.callbacks) - 1]
        raise wire.WireError(
            f"A {type(value).__name__} can't be given to the agent's code, which runs apart from the tests: give plain "
            "data or a function, or judge with hidden_tests(apart=False)."
        )

    def referenced(self, data: Any) -> Any:
        """What a reference over there is here."""
        name, content = data
        if name == "handle":
            key = (int(content["generation"]), int(content["id"]))
            if key not in self.handles:
                base = self.decoded(content["base"]) if "base" in content else None
                self.handles[key] = Handle(self, ["handle", {**content, "base": None}], base)
            return self.handles[key]
        if name == "exception":
            return self.kind(content)
        if name == "builtin":
            return _builtin(content)
        if name == "module":
            return ProxyModule(str(content), self)
        if name == "callback":
            return self.callbacks[content]
        raise wire.WireError(f"there is no {name!r}")

    def kind(self, about: Any) -> type[BaseException]:
        """The type of an exception: Python's own, or one made here that derives from it as the agent's does."""
        if isinstance(about, str):
            return wire.builtin_exception(about)
        key = (int(about["generation"]), int(about["id"]))
        if key not in self.kinds:
            bases = tuple(dict.fromkeys(self.kind(base) for base in about["bases"])) or (Exception,)
            reference = ["handle", {name: about[name] for name in ("id", "generation", "path")}]
            own = {"_agenttrain_reference": reference, "__str__": lambda it: it.__dict__.get("_text", "")}
            try:
                self.kinds[key] = type(str(about["name"]), bases, own)
            except TypeError:
                self.kinds[key] = type(str(about["name"]), (Exception,), own)
        return self.kinds[key]

    def exception(self, about: dict[str, Any]) -> BaseException:
        """What was raised over there, made again here."""
        try:
            kind, args = self.kind(about["kind"]), [self.decoded(each) for each in about["args"]]
        except (AgentError, LookupError, TypeError, ValueError):
            return AgentError("what the agent's code raised can't be read")
        try:
            error = kind(*args)
        except Exception:
            error = AgentError(f"{kind.__name__}: {about.get('text')}")
        error.__dict__["_text"] = str(about.get("text"))
        if isinstance(error, ImportError) and isinstance(about.get("module"), str):
            error.name = about["module"]
        return error


_Kind = TypeVar("_Kind")


class Handle:
    """An object of the agent's, which stays where it is."""

    __slots__ = ("_agenttrain_base", "_agenttrain_reference", "_agenttrain_wire")

    def __init__(self, link: Wire, reference: Any, base: Any) -> None:
        object.__setattr__(self, "_agenttrain_wire", link)
        object.__setattr__(self, "_agenttrain_reference", reference)
        object.__setattr__(self, "_agenttrain_base", base)

    def _agenttrain_ask(self, op: str, *args: Any, **more: Any) -> Any:
        return self._agenttrain_wire.ask(op, self._agenttrain_reference, args=args, **more)

    def _agenttrain_is(self, kind: type[_Kind], name: str, *args: Any) -> _Kind:
        value = self._agenttrain_does(name, *args)
        if type(value) is not kind:
            raise AgentError(
                f"{name} of the agent's object gave a {type(value).__name__}, and must give {kind.__name__}"
            )
        return value

    def _agenttrain_does(self, name: str, *args: Any) -> Any:
        return self._agenttrain_ask("does", *args, name=name)

    def __mro_entries__(self, bases: Any) -> Any:
        raise TypeError(
            "A class of the agent's can't be derived from in a test that runs apart from it: judge with "
            "hidden_tests(apart=False)."
        )

    def __getattr__(self, name: str) -> Any:
        if not _is_asked_for(name):
            raise AttributeError(name)
        return self._agenttrain_ask("get", name=name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._agenttrain_ask("set", value, name=name)

    def __delattr__(self, name: str) -> None:
        self._agenttrain_ask("delete", name=name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        link = self._agenttrain_wire
        return self._agenttrain_ask("call", *args, kwargs={key: link.encoded(each) for key, each in kwargs.items()})

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, Handle):
            return self._agenttrain_is(bool, "__eq__", other)
        return self._agenttrain_base is not None and bool(self._agenttrain_base == other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._agenttrain_base) if self._agenttrain_base is not None else id(self)

    def __contains__(self, item: object) -> bool:
        if isinstance(item, Handle):
            return self._agenttrain_is(bool, "__contains__", item)
        if self._agenttrain_base is not None:
            return item in self._agenttrain_base
        for n, each in enumerate(self):
            if n == MAX_ELEMENTS:
                break
            if each is item or each == item:
                return True
        return False

    def __iter__(self) -> Iterator[Any]:
        elements = self._agenttrain_does("__iter__")
        return elements if isinstance(elements, Handle) else iter(elements)

    def __next__(self) -> Any:
        return self._agenttrain_does("__next__")

    def __len__(self) -> int:
        return self._agenttrain_is(int, "__len__")

    def __bool__(self) -> bool:
        return self._agenttrain_is(bool, "__bool__")

    def __repr__(self) -> str:
        return self._agenttrain_is(str, "__repr__")

    def __str__(self) -> str:
        return self._agenttrain_is(str, "__str__")

    def __int__(self) -> int:
        return self._agenttrain_is(int, "__int__")

    def __index__(self) -> int:
        return self._agenttrain_is(int, "__index__")

    def __float__(self) -> float:
        return self._agenttrain_is(float, "__float__")

    def __dir__(self) -> list[str]:
        return self._agenttrain_is(list, "__dir__")

    def __enter__(self) -> Any:
        return self._agenttrain_does("__enter__")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        return bool(self._agenttrain_does("__exit__", None, None, None))

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Handle) and (self._agenttrain_is(bool, "__instancecheck__", value))

    def __subclasscheck__(self, value: Any) -> bool:
        return isinstance(value, Handle) and (self._agenttrain_is(bool, "__subclasscheck__", value))


def _forwarded(name: str) -> Callable[..., Any]:
    def operation(self: Handle, *args: Any) -> Any:
        return self._agenttrain_does(name, *args)

    return operation


def _reflected(name: str) -> Callable[..., Any]:
    def operation(self: Handle, other: Any) -> Any:
        return self._agenttrain_ask("reflected", other, name=name)

    return operation


def _compared(name: str) -> Callable[..., Any]:
    def operation(self: Handle, other: Any) -> Any:
        if isinstance(other, Handle):
            return self._agenttrain_is(bool, name, other)
        base = self._agenttrain_base
        return NotImplemented if base is None else getattr(base, name)(other)

    return operation


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
_OTHERS = ("neg", "pos", "abs", "invert", "getitem", "setitem", "delitem", "round", "divmod")
for _name in (*_BINARY, *_OTHERS):
    setattr(Handle, f"__{_name}__", _forwarded(f"__{_name}__"))
for _name in _BINARY:
    setattr(Handle, f"__r{_name}__", _reflected(f"__{_name}__"))
for _name in ("lt", "le", "gt", "ge"):
    setattr(Handle, f"__{_name}__", _compared(f"__{_name}__"))


class ProxyModule(ModuleType):
    """A module of the agent's; its attributes are asked for each time."""

    _agenttrain_wire: Wire

    def __init__(self, name: str, link: Wire) -> None:
        super().__init__(name)
        ModuleType.__setattr__(self, "_agenttrain_wire", link)

    @property
    def __dict__(self) -> None:  # type: ignore[override]
        """None here; pytest 9.2's monkeypatch would undo by what it finds in it."""

    def _agenttrain_ask(self, op: str, name: str, *args: Any) -> Any:
        return self._agenttrain_wire.ask(op, ["module", self.__name__], args=args, name=name)

    def __getattr__(self, name: str) -> Any:
        if not _is_asked_for(name):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return self._agenttrain_ask("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in LOCAL or isinstance(value, ModuleType):
            super().__setattr__(name, value)
        else:
            self._agenttrain_ask("set", name, value)

    def __delattr__(self, name: str) -> None:
        self._agenttrain_ask("delete", name)


class Finder:
    """Finds the agent's modules over there, and no other; the first of sys.meta_path."""

    def __init__(self, link: Wire, names: Sequence[str]) -> None:
        self.link, self.names = link, frozenset(names)
        self.about: dict[str, Any] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in self.names:
            return None
        try:
            about = self.link.ask("import", module=name)
        except SystemExit as error:  # pytest would end
            raise self.link.noted(ImportError(f"{name} ended its process: SystemExit: {error}", name=name)) from error
        self.about[name] = about if isinstance(about, dict) else {}
        return ModuleSpec(name, self, origin="the agent's sandbox", is_package=bool(self.about[name].get("package")))  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ProxyModule(spec.name, self.link)

    def exec_module(self, module: ModuleType) -> None:
        public = self.about[module.__name__].get("all")
        module.__all__ = [name for name in public or () if isinstance(name, str) and _may_be_starred(name)]  # type: ignore[attr-defined]


def _is_asked_for(name: str) -> bool:
    if name.startswith("__"):
        return name in ASKED_FOR
    return not name.startswith(("_agenttrain", "_pytest", "pytest"))


def _may_be_starred(name: str) -> bool:
    """Not a name that pytest would take for a test or a fixture of a module that stars it."""
    return name.isidentifier() and not name.lower().startswith(("_", "test", "pytest", "setup", "teardown"))


def _builtin(name: Any) -> Any:
    kind = getattr(builtins, str(name), None)
    if not isinstance(kind, type):
        raise wire.WireError(f"{name!r} is no built-in type")
    return kind


def _become(given: Any, now: Any) -> None:
    """Change a container in place into what it has become over there."""
    if isinstance(given, list | bytearray) and type(given) is type(now):
        given[:] = now
    elif isinstance(given, dict | set) and isinstance(now, dict | set):
        given.clear()
        given.update(now)
