"""Every file of examples/ runs as its reader would run it, small and on the CPU, and its own check passes."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torchtitan_library

REPO = Path(__file__).resolve().parents[2]
EXAMPLES = REPO / "examples"
# Generous for two cores that run other tests beside these.
TIMEOUT_SECONDS = 300
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@dataclass(frozen=True)
class Example:
    """How to run one. ``needs``: modules of its library; ``prints``: a pattern of what it tells;
    ``before``: what runs first, in the same process."""

    prints: str
    arguments: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    before: str = ""


STAND_IN = (
    f"sys.path.append({str(REPO / 'tests')!r}); import torchtitan_library\n"
    "torchtitan_library.stand_in_for_kernels()"
)

RUNS = {
    "activation_checkpointing": Example(
        r"full +experts ran forward 4 times\nselective +experts ran forward 2"
    ),
    "deep_gemm_drop_in": Example(r"y \d\.\de-03, dx \d\.\de-03, dtopk \d\.\de-03, dw1 .*, dw2 "),
    "fsdp2_expert_parallel": Example(
        r"EP 4, +2 steps: loss .*\n(.*\n)*EP 2, +4 steps: loss", ("--steps", "2"), (*TORCHRUN, "4")
    ),
    "gradient_accumulation": Example(r"gate_up: relative error .*, down: relative error"),
    "prime_rl_dispatch": Example("step 19 loss", needs=("pydantic",)),
    "save_and_load": Example(r"state dict: losses .*\n(.*\n)*distributed checkpoint: losses"),
    "torchtitan_moe": Example(
        "with the library's experts",
        needs=torchtitan_library.PACKAGES,
        before="" if torchtitan_library.has_triton() else STAND_IN,
    ),
    # Inductor takes half a minute to compile it.
    "training_loop": Example(r"step  39  loss 0\.", ("--backend", "aot_eager")),
    "transformers_qwen3_moe": Example(r"step  59  loss .*\nhijklmno", needs=("transformers",)),
}


def run(name: str, *arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """The file in a process of its own; ``code`` runs before it, in the same process."""
    example = RUNS[name]
    path = str(EXAMPLES / f"{name}.py")
    program = [*example.launcher, path]
    if code:
        start = f"import runpy, sys; sys.argv[0] = {path!r}"
        program = ["-c", f"{start}\n{code}\nrunpy.run_path({path!r}, run_name='__main__')"]
    paths = [str(REPO), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, *program, *example.arguments, *arguments],
        cwd=REPO, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS,
    )  # fmt: skip


def skip_without_library(name: str) -> None:
    missing = [module for module in RUNS[name].needs if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"{name}.py needs {', '.join(missing)}, which is not installed")


@pytest.mark.parametrize("name", RUNS)
def test_example(name: str) -> None:
    skip_without_library(name)
    result = run(name, code=RUNS[name].before)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(RUNS[name].prints, result.stdout), result.stdout


# What would make each one's check fail, were it not right.
BROKEN = {
    "activation_checkpointing": (
        "import torch.utils.checkpoint as c; right = c.create_selective_checkpoint_contexts\n"
        "nothing = lambda *args, **options: c.CheckpointPolicy.PREFER_RECOMPUTE\n"
        "c.create_selective_checkpoint_contexts = lambda policy: right(nothing)"
    ),
    "deep_gemm_drop_in": ("import torch.nn.functional as F; silu = F.silu; F.silu = lambda x: silu(1.1 * x)"),
    "gradient_accumulation": (
        "import prime_kernels.reference as r; right = r.moe_backward\n"
        "r.moe_backward = lambda dy, *rest: right(1.01 * dy, *rest)"
    ),
    "save_and_load": ("from torch.optim import AdamW; AdamW.load_state_dict = lambda self, state_dict: None"),
    "training_loop": "import torch; torch.optim.AdamW.step = lambda self: None",
}


@pytest.mark.parametrize("name", BROKEN)
def test_its_check_can_fail(name: str) -> None:
    result = run(name, code=BROKEN[name])
    assert result.returncode == 1, result.stdout + result.stderr
    assert "Traceback" not in result.stderr, result.stderr


def test_every_file_is_run_and_listed() -> None:
    files = {path.stem for path in EXAMPLES.glob("*.py")}
    assert files == set(RUNS)
    table = (EXAMPLES / "README.md").read_text()
    for name in files:
        [row] = [line for line in table.splitlines() if line.startswith(f"| [{name}.py]({name}.py) |")]
        launcher = "torchrun --nproc-per-node 4" if RUNS[name].launcher else "python"
        assert f"| `{launcher} examples/{name}.py` |" in row
        assert (EXAMPLES / f"{name}.py").read_text().count(f"{launcher} examples/{name}.py") >= 1


def test_links_of_the_table_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", (EXAMPLES / "README.md").read_text())
    assert links
    assert [link for link in links if not (EXAMPLES / link).exists()] == []
