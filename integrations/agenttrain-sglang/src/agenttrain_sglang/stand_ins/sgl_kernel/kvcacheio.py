"""Stands in for sgl_kernel.kvcacheio, copies between a GPU's cache and the host's: all of it raises when called."""

from sgl_kernel import __getattr__  # noqa: F401
