"""Empty modules in place of CUDA's, which SGLang imports and never uses on a CPU with torch's own attention.

`build-sglang` copies this file into SGLang's environment, where it is imported at the start of Python.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

ABSENT = frozenset({"IPython", "sgl_kernel", "torchaudio", "torchvision"})


class _Absent(ModuleType):
    """Has any name as a module of its own. A call is an error, as the engine would compute nonsense."""

    __path__ = []  # noqa: RUF012  (as in its base class)

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        child = _Absent(f"{self.__name__}.{name}")
        child.__spec__ = ModuleSpec(child.__name__, None, is_package=True)
        return child

    def __call__(self, *_arguments: object, **_named: object) -> None:
        raise RuntimeError(f"{self.__name__} is not installed")


class _Finder:
    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in ABSENT else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(_Finder())  # last: what is installed goes first
