"""The drop-in: lazy public names, ours first, the rest of DeepGEMM's from an installed `deep_gemm`.

`import prime_kernels as deep_gemm` has to work for a program written for `deep_gemm`. Which names such a
program may use is read from the manifest that vendoring writes (`_vendor/manifest.json`), so the list is
always that of the pinned release. Nothing of `deep_gemm` is imported before one of its names is used. The
package's own name is never written here: it works under any top-level name, also beside an unrelated
`deep_gemm`.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType

PACKAGE = __package__ or ""
MANIFEST = Path(__file__).parent / "_vendor" / "manifest.json"
UPSTREAM = "deep_gemm"
UPSTREAM_DISTRIBUTION = "sgl-deep-gemm"
# The `deep_gemm` shim wheel sets this: its names are ours, so nothing can be taken from it.
SHIM_MARK = "__prime_kernels_shim__"

# The installed `deep_gemm`, once a name of it was used through this package.
_adopted: ModuleType | None = None


@functools.cache
def upstream_names() -> Mapping[str, frozenset[str]]:
    """DeepGEMM's modules ("" is the package) and the public names of each; empty without a manifest."""
    try:
        modules = json.loads(MANIFEST.read_text("utf-8"))["names"]
    except FileNotFoundError:
        return {}
    return {module: frozenset(names) for module, names in modules.items()}


def upstream_module(module: str = "") -> ModuleType:
    """Import `deep_gemm` or one of its modules.

    Raises ImportError, which says what to install, when there is none or when the one found is our own shim
    (or this very package under that name).
    """
    wanted = f"{UPSTREAM}.{module}" if module else UPSTREAM
    need = f"{wanted} is not part of {PACKAGE}; it is taken from the package `{UPSTREAM_DISTRIBUTION}`"
    if PACKAGE.partition(".")[0] == UPSTREAM:
        raise ImportError(
            f"{need}, which cannot be installed beside a package that carries its name", name=wanted
        )
    try:
        root = importlib.import_module(UPSTREAM)
    except ModuleNotFoundError as error:
        if error.name != UPSTREAM:
            raise
        raise ImportError(
            f"{need}, which is not installed: pip install {UPSTREAM_DISTRIBUTION}", name=wanted
        ) from error
    if getattr(root, SHIM_MARK, False):
        raise ImportError(
            f"{need}, but the installed `{UPSTREAM}` is the shim that re-exports {PACKAGE}: uninstall the "
            f"shim, then pip install {UPSTREAM_DISTRIBUTION}",
            name=wanted,
        )
    _adopt(root)
    return importlib.import_module(wanted) if module else root


def upstream_attribute(name: str, module: str = "") -> object:
    """A public name of `deep_gemm` or of its module `module`, imported at this call. ImportError as above."""
    try:
        return getattr(upstream_module(module), name)
    except ImportError as error:
        where = f"{UPSTREAM}.{module}" if module else UPSTREAM
        raise ImportError(f"{name}: {error}", name=f"{where}.{name}") from error


def _adopt(root: ModuleType) -> None:
    """Give `deep_gemm` the SM limit that was set here before its first use."""
    global _adopted
    if _adopted is None:
        from . import runtime

        _adopted = root
        limit = runtime.sm_limit()
        if limit is not None:
            forward_num_sms(limit)


def forward_num_sms(num_sms: int) -> None:
    """Pass the SM limit on to the installed `deep_gemm`, when it is in use and knows such a limit."""
    setter = getattr(_adopted, "set_num_sms", None)
    if setter is not None:
        setter(num_sms)


def lazy_names(
    module: str, own: Mapping[str, str], upstream: str | None = None
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of `module`.

    `own` maps each public name to the module (relative to this package) that defines it; names of DeepGEMM's
    module `upstream` that are not in it are taken from the installed `deep_gemm`. What was found is kept in
    the module, so the next use is a plain attribute.
    """

    def find(name: str) -> object:
        if name in own:
            return getattr(importlib.import_module(own[name], PACKAGE), name)
        known = upstream_names()
        if upstream is not None and not name.startswith("_"):
            path = f"{upstream}.{name}".lstrip(".")
            if path in known:
                return importlib.import_module(f"{module}.{name}")
            if name in known.get(upstream, ()):
                return upstream_attribute(name, upstream)
        hint = "" if known else " (the vendored headers are missing too: run scripts/vendor_deepgemm.py)"
        raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}")

    def module_getattr(name: str) -> object:
        value = find(name)
        setattr(sys.modules[module], name, value)
        return value

    def module_dir() -> list[str]:
        names = set(vars(sys.modules[module])) | own.keys()
        if upstream is not None:
            names |= upstream_names().get(upstream, frozenset())
        return sorted(names)

    return module_getattr, module_dir


class _AliasLoader(Loader):
    """Puts an already named module in the place of the one that is being imported."""

    def __init__(self, load: Callable[[], ModuleType]) -> None:
        self.load = load

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        # The import system returns what it then finds in sys.modules, so the alias is the very same module
        # object.
        sys.modules[module.__name__] = self.load()


class AliasFinder(MetaPathFinder):
    """Resolves `import PACKAGE.x` to the module that `load("x")` returns, for each x that `knows` accepts.

    It has to come before the finder for files: an aliased package brings its own `__path__`, and the files
    there would be loaded a second time under the alias' name.
    """

    def __init__(self, package: str, knows: Callable[[str], bool], load: Callable[[str], ModuleType]) -> None:
        self.prefix = package + "."
        self.knows = knows
        self.load = load

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        module = fullname.removeprefix(self.prefix)
        if module == fullname or not self.knows(module):
            return None
        return spec_from_loader(fullname, _AliasLoader(lambda: self.load(module)))


def is_own_module(module: str) -> bool:
    """Whether this package itself has the module `module` (dotted, relative to the package)."""
    path = Path(__file__).parent.joinpath(*module.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def install_upstream_modules() -> None:
    """Make `import PACKAGE.utils` and the like reach the installed `deep_gemm`'s modules, never ours."""

    def knows(module: str) -> bool:
        return module in upstream_names() and not is_own_module(module)

    sys.meta_path.insert(0, AliasFinder(PACKAGE, knows, upstream_module))
