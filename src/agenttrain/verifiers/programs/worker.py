"""Holds the agent's modules and objects, and does with them what a test in another sandbox asks.

Stands beside the agent's code, which can do to it what it likes: whatever it answers is the agent's answer, and plain
data, or a reference to something that stays here.
"""

from __future__ import annotations

import builtins
import importlib
import io
import json
import operator
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from agenttrain.verifiers.programs import wire

MAX_SAID = 64 << 10
"""Characters of output that go along with one answer."""
PLAIN_BASES = (str, int, float, bytes, tuple, frozenset)
"""Immutable: of an object of a class of their own that is one of these, its plain value goes along."""
CHANGING = (list, dict, set, bytearray)
"""An argument of these types may be changed by a call, and goes back then."""
Call = Callable[..., Any]
OPERATIONS: dict[str, Call] = {
    **{f"__{name}__": getattr(operator, f"__{name}__") for name in ("add", "sub", "mul", "truediv", "floordiv", "mod")},
    **{f"__{name}__": getattr(operator, f"__{name}__") for name in ("pow", "matmul", "and", "or", "xor", "lshift")},
    **{f"__{name}__": getattr(operator, f"__{name}__") for name in ("rshift", "neg", "pos", "abs", "invert", "index")},
    **{f"__{name}__": getattr(operator, f"__{name}__") for name in ("eq", "lt", "le", "gt", "ge")},
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    "__delitem__": operator.delitem,
    "__contains__": operator.contains,
    "__len__": len,
    "__bool__": bool,
    "__iter__": iter,
    "__next__": next,
    "__repr__": repr,
    "__str__": str,
    "__int__": int,
    "__float__": float,
    "__round__": round,
    "__divmod__": divmod,
    "__enter__": lambda it: type(it).__enter__(it),
    "__exit__": lambda it, *args: type(it).__exit__(it, *args),
    "__instancecheck__": lambda kind, it: isinstance(it, kind),
    "__subclasscheck__": lambda kind, it: issubclass(it, kind),
    "__dir__": dir,
}


def main() -> None:
    """Read {"roots", "folder", "generation"} from stdin and answer for good."""
    given = json.loads(sys.stdin.buffer.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = [""]
    sys.path[:1] = [os.path.abspath(root) for root in given["roots"]]
    Worker(wire.Way(os.path.abspath(given["folder"])), generation=given["generation"]).serve()


class Worker:
    """Answers messages one after the other; a callback turns the table until it has returned."""

    def __init__(self, way: wire.Way, *, generation: int) -> None:
        self.way = way
        self.generation = generation
        self.objects: list[Any] = []
        self.ids: dict[int, int] = {}
        """id of an object to its place in `objects`, which keeps it."""
        self.output = {"stdout": io.StringIO(), "stderr": io.StringIO()}
        sys.stdout, sys.stderr = self.output["stdout"], self.output["stderr"]

    def serve(self) -> Any:
        """Answer until a message is the result of a callback; gives that."""
        while True:
            message = self.way.get()
            if "result" in message or "raised" in message:
                return message
            self.say(self.outcome(message))

    def say(self, answer: dict[str, Any]) -> None:
        """Answer the message that came last, with what was printed meanwhile."""
        for name, stream in self.output.items():
            said = stream.getvalue()
            if said:
                answer[name] = said[:MAX_SAID]
                stream.seek(0)
                stream.truncate()
        self.way.put(answer)

    def outcome(self, message: dict[str, Any]) -> dict[str, Any]:
        """{"value"} or {"raises"} of one operation; {"changed"}: arguments that are not what they were."""
        try:
            if message["op"] == "import":
                return {"value": self.imported(message["module"])}
            of = self.decoded(message["of"])
            args = [self.decoded(each) for each in message.get("args", ())]
            kwargs = {key: self.decoded(each) for key, each in message.get("kwargs", {}).items()}
            value = self.encoded(self.does(message, of, args, kwargs), self.path_of(message))
            return {"value": value, "changed": self.changed(message, args)}
        except wire.WireError as error:
            return {"error": str(error)}
        except BaseException as error:
            return {"raises": self.raised(error)}

    def does(self, message: dict[str, Any], of: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """One operation on an object of the agent's."""
        op = message["op"]
        if op == "get":
            return getattr(of, message["name"])
        if op == "set":
            return setattr(of, message["name"], args[0])
        if op == "delete":
            return delattr(of, message["name"])
        if op == "call":
            return of(*args, **kwargs)
        if op == "reflected":
            return OPERATIONS[message["name"]](args[0], of)
        return OPERATIONS[message["name"]](of, *args)

    def imported(self, name: str) -> Any:
        """What a module is: whether it is a package, and its public names."""
        module = importlib.import_module(name)
        public = getattr(module, "__all__", None)
        names = [str(each) for each in (public if public is not None else vars(module))]
        return {
            "package": hasattr(module, "__path__"),
            "all": [each for each in names if public is not None or not each.startswith("_")],
        }

    def changed(self, message: dict[str, Any], args: list[Any]) -> dict[str, Any]:
        """Place of each argument that the call changed, to what it is now."""
        found: dict[str, Any] = {}
        for place, (before, now) in enumerate(zip(message.get("args", ()), args, strict=True)):
            if type(now) in CHANGING and (after := self.encoded(now)) != before:
                found[str(place)] = after
        return found

    def path_of(self, message: dict[str, Any]) -> list[str] | None:
        """[module, attribute] that an object was taken from, so that a worker after this one finds it again."""
        of = message["of"]
        return [of[1], message["name"]] if message["op"] == "get" and of[0] == "module" else None

    def encoded(self, value: Any, path: list[str] | None = None) -> Any:
        return wire.encode(value, lambda other: self.reference(other, path))

    def decoded(self, data: Any) -> Any:
        return wire.decode(data, self.referenced)

    def reference(self, value: Any, path: list[str] | None = None) -> Any:
        """[what, content] of something that stays here."""
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__]
        if wire.is_builtin(value):
            return ["builtin", value.__name__]
        if isinstance(value, Callback):
            return ["callback", value.number]
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["exception", self.kind(value, path)]
        about: dict[str, Any] = {"id": self.keep(value), "generation": self.generation, "path": path}
        for base in PLAIN_BASES:
            if isinstance(value, base):
                about["base"] = self.encoded(_as_base(base, value))
                break
        return ["handle", about]

    def referenced(self, data: Any) -> Any:
        """The object that a reference names."""
        name, content = data
        if name == "module":
            return importlib.import_module(content)
        if name == "builtin":
            return getattr(builtins, content)
        if name == "callback":
            return Callback(self, content)
        if content["generation"] == self.generation:
            return self.objects[content["id"]]
        if content["path"]:
            module, attribute = content["path"]
            return getattr(importlib.import_module(module), attribute)
        raise wire.WireError("the process that held this object has ended")

    def keep(self, value: Any) -> int:
        """The number of an object; the same object has the same."""
        if id(value) not in self.ids:
            self.ids[id(value)] = len(self.objects)
            self.objects.append(value)
        return self.ids[id(value)]

    def kind(self, value: type, path: list[str] | None = None) -> Any:
        """An exception's type: its name where it is Python's own, else what it derives from too."""
        if wire.is_builtin(value):
            return value.__name__
        bases = [self.kind(base) for base in value.__bases__ if issubclass(base, BaseException)]
        about = {"id": self.keep(value), "generation": self.generation, "path": path}
        return {"name": value.__name__, "bases": bases, **about}

    def raised(self, error: BaseException) -> dict[str, Any]:
        """An exception: its type, what it was made of and what it says."""
        try:
            text = str(error)
        except BaseException:
            text = ""
        about: dict[str, Any] = {"kind": self.kind(type(error)), "text": text, "self": self.reference(error)}
        about["args"] = [self.encoded(each) for each in error.args]
        if isinstance(error, ImportError):
            about["module"] = str(error.name)
        return about


def _as_base(base: Any, value: Any) -> Any:
    return base.__new__(base, value)


class Callback:
    """A function of the test's, called from the agent's code."""

    def __init__(self, worker: Worker, number: int) -> None:
        self.worker, self.number = worker, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        worker = self.worker
        given = [worker.encoded(each) for each in args]
        worker.say(
            {
                "callback": self.number,
                "args": given,
                "kwargs": {key: worker.encoded(each) for key, each in kwargs.items()},
            }
        )
        message = worker.serve()
        if "raised" in message:
            raise wire.builtin_exception(message["raised"]["kind"])(message["raised"]["text"])
        return worker.decoded(message["result"])
