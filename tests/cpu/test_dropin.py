"""`import prime_kernels as deep_gemm`: with a `deep_gemm` installed, without one, renamed, and our shim."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import prime_kernels
from prime_kernels import registry
from prime_kernels._dropin import upstream_names

REPO = Path(__file__).resolve().parents[2]
PACKAGE = REPO / "prime_kernels"
SHIM = REPO / "scripts" / "deep_gemm_shim.py"


def write_stand_in(site: Path) -> None:
    """A `deep_gemm` that has the modules and names of the vendored release; each function names itself."""
    for module, names in upstream_names().items():
        children = [other for other in upstream_names() if other.rpartition(".")[0] == module and other]
        path = site.joinpath("deep_gemm", *filter(None, module.split(".")))
        path = path / "__init__.py" if children else path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        where = f"deep_gemm.{module}".rstrip(".")
        lines = ["sms = []", "def set_num_sms(n): sms.append(n)"] if not module else []
        for name in sorted(names - {"set_num_sms"}):
            if f"{module}.{name}".lstrip(".") in upstream_names():
                lines.append(f"from . import {name}")
            else:
                lines.append(f"def {name}(*args): return ({where!r}, {name!r}, args)")
        path.write_text("\n".join(lines) + "\n")


def run_python(code: str, *path: Path, cwd: Path) -> dict[str, object]:
    """Run `code` in a fresh interpreter whose `out` dict comes back."""
    # Not through PYTHONPATH alone: an editable install of this repository must not be found first.
    program = f"import sys\nsys.path[:0] = {[str(entry) for entry in path]!r}\nout = {{}}\n"
    program += textwrap.dedent(code) + "\nimport json\nprint('\\n' + json.dumps(out))\n"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTHONPATH", None)
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=cwd, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.rstrip().splitlines()[-1])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site-packages folder with the stand-in `deep_gemm`."""
    folder = tmp_path_factory.mktemp("site")
    write_stand_in(folder)
    return folder


@pytest.fixture
def renamed(tmp_path: Path) -> Path:
    """A folder with this package as `other_name`, its generated headers linked."""
    folder = tmp_path / "renamed"
    shutil.copytree(
        PACKAGE, folder / "other_name", ignore=shutil.ignore_patterns("_vendor", "__pycache__", "._*")
    )
    (folder / "other_name" / "_vendor").symlink_to(PACKAGE / "_vendor")
    return folder


RESOLVE_EVERYTHING = """
    from {package}._dropin import upstream_names, is_own_module
    import importlib, {package} as deep_gemm
    for module, names in upstream_names().items():
        path = "{package}." + module if module else "{package}"
        found = importlib.import_module(path)
        for name in names:
            value = getattr(found, name)
            if callable(value):
                call = value() if value.__module__.startswith("deep_gemm") else value.__module__
            else:
                call = value.__name__
            out[f"{{module}}:{{name}}"] = call
"""


def test_every_name_of_the_release_resolves_ours_first(site: Path, tmp_path: Path) -> None:
    out = run_python(RESOLVE_EVERYTHING.format(package="prime_kernels"), site, REPO, cwd=tmp_path)
    ours = set(prime_kernels.__all__)
    assert len(out) > 200
    for key, value in out.items():
        module, _, name = key.partition(":")
        own = name in ours and module in ("", "mega")
        if own:
            assert str(value).startswith("prime_kernels."), key
        elif isinstance(value, list):
            assert value == [f"deep_gemm.{module}".rstrip("."), name, []], key
        elif (module, name) == ("", "mega"):
            assert value == "prime_kernels.mega"
        else:
            assert value == f"deep_gemm.{module}.{name}".replace("..", "."), key


def test_modules_are_the_very_same_and_loaded_once(site: Path, tmp_path: Path) -> None:
    out = run_python(
        """
        import prime_kernels
        import prime_kernels.utils.math as math
        from prime_kernels.testing import calc_diff
        from prime_kernels.mega import fp8_fp4_mega_moe, SymmBuffer
        import deep_gemm
        out["same"] = math is deep_gemm.utils.math and prime_kernels.utils is deep_gemm.utils
        out["spec"] = deep_gemm.utils.math.__spec__.name
        out["calls"] = [calc_diff(1, 2), fp8_fp4_mega_moe()]
        out["own"] = SymmBuffer is prime_kernels.SymmBuffer
        out["doubles"] = [
            name for name, module in sys.modules.items() if name.startswith("prime_kernels.")
            and module.__name__ not in (name, name.replace("prime_kernels", "deep_gemm"))
        ]
        """,
        site, REPO, cwd=tmp_path,
    )  # fmt: skip
    assert out == {
        "same": True,
        "spec": "deep_gemm.utils.math",
        "calls": [["deep_gemm.testing", "calc_diff", [1, 2]], ["deep_gemm.mega", "fp8_fp4_mega_moe", []]],
        "own": True,
        "doubles": [],
    }


def test_deep_gemm_is_imported_at_first_use_and_gets_the_sm_limit(site: Path, tmp_path: Path) -> None:
    out = run_python(
        """
        import prime_kernels
        prime_kernels.set_num_sms(100)
        prime_kernels.get_num_sms(), prime_kernels.mega_moe
        dir(prime_kernels), hasattr(prime_kernels, "nothing")
        out["early"] = "deep_gemm" in sys.modules
        prime_kernels.fp8_gemm_nt
        out["late"] = "deep_gemm" in sys.modules
        prime_kernels.set_num_sms(64)
        out["sms"] = sys.modules["deep_gemm"].sms
        """,
        site, REPO, cwd=tmp_path,
    )  # fmt: skip
    assert out == {"early": False, "late": True, "sms": [100, 64]}


def test_without_deep_gemm_the_error_says_what_to_install(tmp_path: Path) -> None:
    out = run_python(
        """
        import prime_kernels as deep_gemm
        def failure(code):
            try:
                exec(code, {"deep_gemm": deep_gemm})
            except Exception as error:
                return [type(error).__name__, str(error)]
        for code in ("deep_gemm.fp8_gemm_nt", "deep_gemm.utils",
                     "from prime_kernels.utils.layout import ceil_div", "from prime_kernels import einsum",
                     "from prime_kernels.mega import nvfp4_mega_moe",
                     "deep_gemm.no_such_name", "import prime_kernels.no_such_module", "deep_gemm._C"):
            out[code] = failure(code)
        out["own"] = [deep_gemm.bf16_mega_moe.__module__, deep_gemm.mega.SymmBuffer.__module__]
        """,
        REPO, cwd=tmp_path,
    )  # fmt: skip
    assert out.pop("own") == ["prime_kernels.bf16", "prime_kernels.symm"]
    assert out.pop("deep_gemm.no_such_name") == [
        "AttributeError", "module 'prime_kernels' has no attribute 'no_such_name'",
    ]  # fmt: skip
    assert out.pop("import prime_kernels.no_such_module")[0] == "ModuleNotFoundError"
    assert out.pop("deep_gemm._C")[0] == "AttributeError"
    assert len(out) == 5
    for code, (kind, message) in out.items():
        assert kind == "ImportError", code
        assert "pip install sgl-deep-gemm" in message, code
        assert "deep_gemm" in message, code


def test_a_broken_deep_gemm_is_not_called_missing(tmp_path: Path) -> None:
    (tmp_path / "deep_gemm.py").write_text("import a_module_it_needs\n")
    out = run_python(
        """
        import prime_kernels
        try:
            prime_kernels.fp8_gemm_nt
        except ImportError as error:
            out["said"] = str(error)
        """,
        tmp_path, REPO, cwd=tmp_path,
    )  # fmt: skip
    assert "a_module_it_needs" in str(out["said"])
    assert "pip install" not in str(out["said"])


def test_works_under_another_name_beside_an_unrelated_deep_gemm(
    site: Path, renamed: Path, tmp_path: Path
) -> None:
    code = RESOLVE_EVERYTHING.format(package="other_name") + """
    import torch
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(None, 4, 8, 2, 256, 128, mma_type="bf16xbf16")
    x = torch.randn(3, 256).bfloat16().requires_grad_()
    indices = torch.tensor([[0, 1], [2, -1], [3, 3]])
    up, down = torch.randn(4, 256, 256).bfloat16(), torch.randn(4, 256, 128).bfloat16()
    deep_gemm.mega_moe(x, indices, torch.rand(3, 2), up, down, buffer=buffer).float().sum().backward()
    out.clear()
    out["grad"] = bool(x.grad.abs().sum() > 0)
    out["loaded"] = sorted(n for n in sys.modules if n.split(".")[0] == "prime_kernels")
    out["ops"] = [hasattr(torch.ops.other_name, "mega_moe"), hasattr(torch.ops.prime_kernels, "mega_moe")]
    out["status"] = sorted(deep_gemm.status())
    import prime_kernels
    buffer = prime_kernels.get_symm_buffer_for_mega_moe(None, 4, 8, 2, 256, 128, mma_type="bf16xbf16")
    prime_kernels.mega_moe(x, indices, torch.rand(3, 2), up, down, buffer=buffer)
    out["both"] = [torch.ops.other_name.mega_moe is not torch.ops.prime_kernels.mega_moe]
    """  # fmt: skip
    out = run_python(code, site, renamed, REPO, cwd=tmp_path)
    assert out == {
        "grad": True,
        "loaded": [],
        "ops": [True, False],
        "status": sorted(registry.KERNELS),
        "both": [True],
    }


def test_shim_gives_our_names_and_never_asks_itself(tmp_path: Path) -> None:
    folder = tmp_path / "shim"
    (folder / "deep_gemm").mkdir(parents=True)
    shutil.copy(SHIM, folder / "deep_gemm" / "__init__.py")
    out = run_python(
        """
        import deep_gemm, prime_kernels
        from deep_gemm.mega import SymmBuffer
        import deep_gemm.mega
        from deep_gemm import bf16_mega_moe
        out["same"] = [
            SymmBuffer is prime_kernels.SymmBuffer, bf16_mega_moe is prime_kernels.bf16_mega_moe,
            deep_gemm.mega is prime_kernels.mega, deep_gemm.__version__ == prime_kernels.__version__,
        ]
        names = [name for name in sys.modules if name.startswith("deep_gemm.")]
        out["doubles"] = [name for name in names if sys.modules[name].__name__ == name]
        for code in ("deep_gemm.fp8_gemm_nt", "prime_kernels.fp8_gemm_nt",
                     "from deep_gemm.utils import align", "from deep_gemm import testing"):
            try:
                exec(code)
            except ImportError as error:
                out[code] = str(error)
        try:
            deep_gemm.nothing
        except AttributeError as error:
            out["attribute"] = str(error)
        """,
        folder, REPO, cwd=tmp_path,
    )  # fmt: skip
    assert out.pop("same") == [True] * 4
    assert out.pop("doubles") == []
    assert out.pop("attribute") == "module 'deep_gemm' has no attribute 'nothing'"
    assert len(out) == 4
    for said in out.values():
        assert "is the shim that re-exports prime_kernels" in str(said)
        assert "pip install sgl-deep-gemm" in str(said)


def test_import_is_light_and_names_are_listed(tmp_path: Path) -> None:
    out = run_python(
        """
        import prime_kernels
        out["heavy"] = [n for n in ("torch", "cuda", "numpy", "deep_gemm") if n in sys.modules]
        out["dir"] = dir(prime_kernels)
        for name in prime_kernels.__all__:
            getattr(prime_kernels, name)
        prime_kernels.status()
        import torch
        out["context"] = torch.cuda.is_initialized()
        """,
        REPO, cwd=tmp_path,
    )  # fmt: skip
    assert out["heavy"] == []
    assert out["context"] is False
    assert set(prime_kernels.__all__) | set(upstream_names()[""]) <= set(out["dir"])


def test_public_functions_are_plain_functions() -> None:
    """Some clients look at `inspect.signature` of what they import."""
    import inspect

    for name in prime_kernels.__all__:
        value = getattr(prime_kernels, name)
        if not isinstance(value, (str, type)):
            assert inspect.isfunction(value), name
            assert inspect.signature(value) is not None
