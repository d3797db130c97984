"""Stands in for triton, the compiler of GPU kernels, so that modules which define kernels can be imported on a CPU.

Any name of it, at any depth, exists: one with a capital letter is a class, any other a module that is also a decorator.
What `triton.jit` has decorated raises NotImplementedError when it is launched or called; asking for the driver of a GPU
raises RuntimeError, as triton itself does without one. Two functions of plain arithmetic are real.
"""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "3.7.1"


class Kernel:
    """A function that would run on a GPU: it can be named, configured and never started."""

    def __init__(self, function):
        self.fn, self.__name__, self.__doc__ = function, function.__name__, function.__doc__
        self.__module__ = function.__module__

    def __call__(self, *_, **__):
        raise NotImplementedError(f"{self.__module__}.{self.__name__} is a triton kernel and needs a GPU.")

    def __getitem__(self, grid):
        return self


class _Absent(types.ModuleType):
    """A module of triton's, or a function of one."""

    def __init__(self, name):
        super().__init__(name)
        self.__path__ = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, _LOADER, is_package=True)

    def __getattr__(self, name):
        return _found(self, name)

    def __call__(self, *args, **_):
        """As a decorator: a function becomes a Kernel, a Kernel stays one; anything else configures a decorator."""
        decorated = args[0] if len(args) == 1 else None
        if isinstance(decorated, types.FunctionType):
            return Kernel(decorated)
        return decorated if isinstance(decorated, Kernel) else self

    def __bool__(self):
        return False

    def __iter__(self):
        return iter(())


class _Loader(importlib.abc.Loader):
    def create_module(self, spec):
        return sys.modules.get(spec.name) or _Absent(spec.name)

    def exec_module(self, module):
        """There is nothing to run."""


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("triton."):
            return importlib.machinery.ModuleSpec(name, _LOADER, is_package=True)
        return None


def _found(module, name):
    """A name of a module of triton's, the same one each time."""
    if name.startswith("__"):
        raise AttributeError(name)
    full = f"{module.__name__}.{name}"
    if full == "triton.runtime.driver.active":
        raise RuntimeError("No GPU is seen: agenttrain's stand-in for triton has no driver.")
    if name[0].isupper():
        value = type(name, (), {"__init__": lambda self, *_, **__: None, "__module__": module.__name__})
    else:
        value = sys.modules.setdefault(full, _Absent(full))
    setattr(module, name, value)
    return value


def __getattr__(name):
    return _found(sys.modules[__name__], name)


def cdiv(x, y):
    """How many blocks of y hold x."""
    return (x + y - 1) // y


def next_power_of_2(n):
    """The smallest power of two from n on."""
    return 1 << max(n - 1, 0).bit_length()


_LOADER = _Loader()
sys.meta_path.append(_Finder())
