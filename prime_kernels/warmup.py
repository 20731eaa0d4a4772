"""`python -m prime_kernels warmup`: compiles a model's kernels into the cache. Needs no GPU and no driver.

For container images and job launchers: the first step of a training run then compiles nothing. With
`--aot-dir` the cubins are written under keys that need no compiler to compute, which is what a wheel ships
(`scripts/build_wheel.sh --aot`).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from . import gemm, sm90, vendored_forward
from .backward import sm90_bf16 as backward_kernel
from .forward import sm90_bf16 as forward_kernel
from .jit import (
    CompileError,
    Cubin,
    KernelCache,
    KernelSource,
    ToolchainError,
    compile_kernel,
    default_cache_dir,
)
from .jit.keys import source_key
from .models import MODELS, ModelShape, model_shape
from .sizes import SIZE_LIMITS

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
# Width of the name column in the report.
NAME_WIDTH = 54

# What tells kernels of one name apart, by how their C++ names begin and go on.
_MEGA_MOE_ENTRY = re.compile(r"::(?:Forward|Backward)Config<(\d+), (\d+), (true|false), (true|false),")
_VENDORED_ENTRY = re.compile(r"_mega_moe_impl<\d+u, (\d+)u, (\d+)u,")
_GEMM_ENTRY = re.compile(
    r"::sm90_bf16_gemm_impl<[\w:]+, [\w:]+, (\d+), (\d+), (\d+),.*, (true|false), [\w:]+>$"
)


def _takes_all(_: ModelShape) -> None:
    return None


@dataclass(frozen=True)
class KernelGroup:
    """Kernels that exist for one precision on one architecture.

    run: False for kernels that this version compiles but never launches.
    refuses: why the kernels do not take a model that the group leaves out; None for a model they take.
    """

    description: str
    sources: Callable[[ModelShape, int], Sequence[KernelSource]]
    run: bool
    refuses: Callable[[ModelShape], str | None] = _takes_all


def _grouped_gemms(shape: ModelShape, ep: int) -> Sequence[KernelSource]:
    return gemm.kernel_sources(shape.hidden, shape.intermediate, shape.experts_per_rank(ep))


def _mega_moe_refuses(shape: ModelShape) -> str | None:
    limits = SIZE_LIMITS["sm90"]
    sizes = ((shape.hidden, limits.hidden, "H"), (shape.intermediate, limits.intermediate, "I"))
    for size, limit, name in sizes:
        if not limit.takes(size):
            return f"{name} is {size}, they need {limit}"
    return None


def _mega_moe(shape: ModelShape, ep: int) -> Sequence[KernelSource]:
    """The route plan and both directions, with a limit in SwiGLU where the model has one."""
    shape.experts_per_rank(ep)
    clamped = shape.activation_clamp is not None
    return (
        *(sm90.plan_source(entry) for entry in sm90.PLAN_ENTRIES),
        *(
            module.source(shape.hidden, shape.intermediate, clamped, keeps_z)
            for keeps_z in (False, True)
            for module in (forward_kernel, backward_kernel)
        ),
    )


# (architecture, precision) -> what is compiled for it. A new kernel joins here.
MANIFEST: dict[tuple[str, str], tuple[KernelGroup, ...]] = {
    ("sm_90a", "bf16"): (
        KernelGroup("BF16 Mega MoE forward and backward", _mega_moe, run=True, refuses=_mega_moe_refuses),
        KernelGroup("grouped BF16 GEMMs", _grouped_gemms, run=True),
    ),
    ("sm_90a", "fp8"): (
        KernelGroup("vendored SM90 FP8 forward: compiled, never run", vendored_forward.sm90_fp8, run=False),
    ),
    ("sm_100a", "bf16"): (
        KernelGroup(
            "vendored SM100 BF16 forward: compiled, never run", vendored_forward.sm100_bf16, run=False
        ),
    ),
    ("sm_100a", "mxfp8"): (
        KernelGroup(
            "vendored SM100 MXFP8 forwards: compiled, never run", vendored_forward.sm100_mxfp8, run=False
        ),
    ),
}


@dataclass(frozen=True)
class Target:
    """What to compile for: a model, the ranks that share its experts, a precision and an architecture."""

    model: str
    ep: int
    precision: str
    arch: str

    @classmethod
    def parse(cls, text: str) -> Target:
        """Reads `MODEL:EP:PRECISION:ARCH`, for example `qwen3-30b-a3b:8:bf16:sm_90a`."""
        parts = text.split(":")
        if len(parts) != 4 or not parts[1].isdecimal():
            raise ValueError(
                f"{text!r} is not MODEL:EP:PRECISION:ARCH, for example qwen3-30b-a3b:8:bf16:sm_90a"
            )
        return cls(parts[0], int(parts[1]), parts[2], parts[3])


def kernel_groups(precision: str, arch: str) -> tuple[KernelGroup, ...]:
    """Kernels of a precision on an architecture. Raises ValueError that lists the pairs which have any."""
    groups = MANIFEST.get((arch, precision))
    if groups is None:
        known = ", ".join(f"{a} {p}" for a, p in MANIFEST)
        raise ValueError(
            f"no kernels for precision {precision!r} on {arch!r}; there are kernels for: {known}"
        )
    return groups


def kernel_sources(model: str, ep: int, precision: str, arch: str) -> list[KernelSource]:
    """Every kernel that `model` on `ep` ranks needs in `precision` on `arch`, without duplicates.

    Raises ValueError for an unknown model, precision or architecture, for experts that `ep` ranks cannot
    share, and for a shape that a kernel does not take.
    """
    shape = model_shape(model)
    groups = kernel_groups(precision, arch)
    taken = [group for group in groups if group.refuses(shape) is None]
    return list(dict.fromkeys(source for group in taken for source in group.sources(shape, ep)))


def write_aot(
    sources: Sequence[KernelSource], directory: Path, *, cache_dir: Path | None = None
) -> list[Path]:
    """Compiles `sources` and stores them in `directory` as a wheel ships them; returns the cubins' paths."""
    store = KernelCache(directory)
    return [
        store.store(source.name, source_key(source), compile_kernel(source, cache_dir=cache_dir))
        for source in sources
    ]


def describe(source: KernelSource) -> str:
    """The kernel's name and what it is compiled for; sizes that come with a launch are left out."""
    details: list[str] = []
    if match := _MEGA_MOE_ENTRY.search(source.entry):
        hidden, intermediate, clamped, kept_z = match.groups()
        details = [f"H {hidden}", f"I {intermediate}"]
        details += ["clamped"] if clamped == "true" else []
        details += ["z kept"] if kept_z == "true" else []
    elif match := _VENDORED_ENTRY.search(source.entry):
        details = [f"H {match[1]}", f"I {match[2]}"]
    elif match := _GEMM_ENTRY.search(source.entry):
        details = [f"{dim} {match[index]}" for index, dim in enumerate("MNK", 1) if match[index] != "0"]
        details += ["added to C"] if match[4] == "true" else []
    return f"{source.name} {', '.join(details)}".rstrip()


def _summary(cubin: Cubin, seconds: float) -> str:
    resources = cubin.resources
    how = f"compiled in {seconds:.1f} s" if cubin.origin == "compiled" else f"found ({cubin.origin})"
    spills = (
        f"{resources.spill_store_bytes + resources.spill_load_bytes} B of spills"
        if resources.spills
        else "no spills"
    )
    return f"{how}; {resources.registers} registers, {resources.stack_bytes} B stack, {spills}"


def _compile_one(source: KernelSource, cache_dir: Path, aot_dir: Path | None) -> tuple[bool, str]:
    """Whether the kernel is now stored, and the line to print."""
    started = time.monotonic()
    name = f"{describe(source):<{NAME_WIDTH}}"
    try:
        cubin = compile_kernel(source, cache_dir=cache_dir)
        path = cubin.path
        if aot_dir is not None:
            path = KernelCache(aot_dir).store(source.name, source_key(source), cubin)
    except CompileError as error:
        return False, f"{name} FAILED\n{error}"
    except OSError as error:
        return False, f"{name} FAILED: {error}"
    if path is None:
        return False, f"{name} FAILED: compiled, but {cache_dir} could not be written"
    lines = [f"{name} {_summary(cubin, time.monotonic() - started)}"]
    lines += [f"  assembler: {warning}" for warning in cubin.warnings]
    return True, "\n".join(lines)


def warm_up(
    targets: Sequence[Target], *, cache_dir: Path | None = None, aot_dir: Path | None = None, jobs: int = 1
) -> bool:
    """Compiles every kernel of `targets`, printing a line for each. True when all of them are stored."""
    directory = cache_dir if cache_dir is not None else default_cache_dir()
    print(f"cache: {directory}" if aot_dir is None else f"cubins for a wheel: {aot_dir}")
    sources: dict[KernelSource, None] = {}
    for target in targets:
        for group in kernel_groups(target.precision, target.arch):
            refusal = group.refuses(model_shape(target.model))
            what = group.description if refusal is None else f"without the {group.description}: {refusal}"
            print(f"{target.model}, {target.ep} ranks, {target.precision}, {target.arch}: {what}")
        found = kernel_sources(target.model, target.ep, target.precision, target.arch)
        sources.update(dict.fromkeys(found))
    stored = True
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        futures = [pool.submit(_compile_one, source, directory, aot_dir) for source in sources]
        try:
            for future in futures:
                ok, line = future.result()
                stored = stored and ok
                print(line, file=sys.stdout if ok else sys.stderr, flush=True)
        finally:
            # After an interruption, or when nobody reads the output any more, nothing else is compiled.
            pool.shutdown(cancel_futures=True)
    return stored


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__} warmup",
        description="Compile the kernels of a model into the cache. Needs no GPU.",
        epilog=f"models: {', '.join(sorted(MODELS))}; kernels: {', '.join(f'{a} {p}' for a, p in MANIFEST)}",
    )
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="MODEL:EP:PRECISION:ARCH",
        help="several at once, instead of the options",
    )
    parser.add_argument("--model", help="name of a model, see below")
    parser.add_argument("--ep", type=int, default=1, help="ranks that share the experts (default: 1)")
    parser.add_argument("--precision", default="bf16", help="bf16, fp8 or mxfp8 (default: bf16)")
    parser.add_argument("--arch", default="sm_90a", help="sm_90a or sm_100a (default: sm_90a)")
    parser.add_argument("--cache-dir", type=Path, help="directory to fill (default: the cache of this user)")
    parser.add_argument("--aot-dir", type=Path, help="also store the cubins here, as a wheel ships them")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="kernels compiled at once (default: the cores)"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Exit code 0: every kernel is stored; 1: at least one is not; 2: wrong arguments or nothing to compile
    with.
    """
    parser = _parser()
    arguments = parser.parse_args(list(argv))
    if (arguments.model is None) == (not arguments.targets):
        parser.error("give either --model or MODEL:EP:PRECISION:ARCH")
    if arguments.jobs < 1:
        parser.error(f"--jobs {arguments.jobs} must be at least 1")
    try:
        if arguments.targets:
            targets = [Target.parse(text) for text in arguments.targets]
        else:
            targets = [Target(arguments.model, arguments.ep, arguments.precision, arguments.arch)]
        stored = warm_up(
            targets,
            cache_dir=arguments.cache_dir and arguments.cache_dir.absolute(),
            aot_dir=arguments.aot_dir and arguments.aot_dir.absolute(),
            jobs=arguments.jobs,
        )
    except (ValueError, ToolchainError) as error:
        print(f"warmup: {error}", file=sys.stderr)
        return EXIT_USAGE
    return EXIT_OK if stored else EXIT_FAILED
