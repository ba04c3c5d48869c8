"""``import deepspeed`` that gives ``deepoffload.deepspeed``, for programs that are not changed: DeepSpeed's own tests.

``tools/run_deepspeed_tests.py`` puts this folder in front of the path. What deepoffload lacks can be imported from it,
because a test module imports more than each of its tests uses. Using such a name is an error.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch

OURS = "deepoffload."
ENVIRONMENT = {
    "deepspeed.git_version_info.torch_info": {
        "version": torch.__version__,
        "cuda_version": "12.0",
        "nccl_version": "2.20",
    },
    "deepspeed.ops.__compatible_ops__": {
        "async_io": True,
        "CPUAdagradBuilder": True,
        "CPUAdamBuilder": True,
        "CPULionBuilder": True,
        "FusedAdamBuilder": True,
        "FusedLambBuilder": False,
    },
    "deepspeed.runtime.swap_tensor.MIN_SWAPPABLE_BYTES": 1 << 14,  # theirs is 1 << 20; it is the width of a model
    "deepspeed.runtime.zero.partition_parameters.partitioned_param_data_shape": [0],
    "deepspeed.utils.torch.required_torch_version": lambda **versions: True,
}
"""What tests ask to find out whether they can run, and constants of theirs: no reason to skip."""


class NotInDeepOffload(AttributeError, NotImplementedError):
    """A test has used a name that deepoffload does not have."""


class _Absent(type):
    """A class in the place of a name that is not here. Nothing is an instance of it."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotInDeepOffload(f"{cls.__module__}.{cls.__name__}")

    def __getattr__(cls, name: str) -> Any:
        if name == "NAME":  # of a builder: only looked up in __compatible_ops__
            return cls.__name__
        raise NotInDeepOffload(f"{cls.__module__}.{cls.__name__}.{name}")


class _Alias(types.ModuleType):
    """A module of DeepSpeed's: the names of ours, and stand-ins for the others."""

    def __getattr__(self, name: str) -> Any:
        path = f"{self.__name__}.{name}"
        if path in ENVIRONMENT:
            return ENVIRONMENT[path]
        if not name.startswith("__"):
            ours = _ours(self.__name__)
            if ours is not None and hasattr(ours, name):
                found = getattr(ours, name)
                if isinstance(found, types.ModuleType):
                    return importlib.import_module(path)
                if not path.startswith("deepspeed.ops.op_builder.") or hasattr(found, "NAME"):
                    return found
            return _Absent(name, (), {"__module__": self.__name__})
        ours = _ours(self.__name__)
        if ours is None:
            raise AttributeError(path)
        return getattr(ours, name)


def _ours(name: str) -> types.ModuleType | None:
    try:
        return importlib.import_module(OURS + name)
    except ModuleNotFoundError as error:
        if error.name is not None and (OURS + name).startswith(error.name):
            return None
        raise


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("deepspeed."):
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Alias(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to do: names are looked up when they are asked for."""


sys.meta_path.insert(0, _Finder())
sys.modules[__name__].__class__ = _Alias
