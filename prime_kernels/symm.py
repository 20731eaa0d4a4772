"""The staging buffer that every rank of an expert-parallel group holds."""

from __future__ import annotations

import inspect
import itertools
import logging
import math
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from . import ep, runtime, validation
from ._dropin import upstream_attribute
from .checks import check_group, zeroed_bytes
from .peer_access import check_peer_access, gpu_view
from .validation import DATA_DTYPES

if TYPE_CHECKING:
    from .sm90 import Sm90Rank
    from .sm90_memory import Sm90Memory

logger = logging.getLogger(__name__)

# Regions start at multiples of this many bytes, so that TMA and vector accesses may start at any of them.
REGION_ALIGNMENT = 128

# What callers of DeepGEMM get when they name no type.
UPSTREAM_MMA_TYPE = "fp8xfp4"

_buffers: weakref.WeakValueDictionary[int, SymmBuffer] = weakref.WeakValueDictionary()
_handles = itertools.count(1)  # its next() is one step, also with several threads


@dataclass(frozen=True)
class _Region:
    """One tensor of the buffer: where it starts (bytes), and what it holds."""

    offset: int
    shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape) * self.dtype.itemsize

    def view(self, storage: Tensor) -> Tensor:
        return storage[self.offset : self.end].view(self.dtype).view(self.shape)


def _staging_layout(tokens: int, topk: int, hidden: int, mma_type: str) -> list[_Region]:
    """x, topk_idx, topk_weights, one after the other."""
    data = DATA_DTYPES[mma_type]
    weights = torch.float64 if data == torch.float64 else torch.float32
    regions: list[_Region] = []
    end = 0
    for columns, dtype in ((hidden, data), (topk, torch.int64), (topk, weights)):
        offset = -(-end // REGION_ALIGNMENT) * REGION_ALIGNMENT
        regions.append(_Region(offset, (tokens, columns), dtype))
        end = regions[-1].end
    return regions


def lookup_buffer(handle: int) -> SymmBuffer:
    """The live buffer with this ``handle``.

    Raises:
        RuntimeError: when no such buffer is alive.
    """
    buffer = _buffers.get(handle)
    if buffer is None:
        raise RuntimeError(
            f"no buffer with handle {handle} is alive; keep a reference to the SymmBuffer while it is in use"
        )
    return buffer


def _upstream_buffer(mma_type: str) -> Any:
    """DeepGEMM's class of the same name, for a type of buffer that is upstream's."""
    try:
        return upstream_attribute("SymmBuffer", "mega")
    except ImportError as error:
        raise RuntimeError(f"{validation.no_kernel(mma_type)}, and upstream's is missing: {error}") from error


class SymmBuffer:
    """Staging memory for x and its routing, of equal layout on every rank of ``group``.

    Stage inputs on the current stream right before each call (``buffer.x[:n].copy_(...)`` and so on).
    Nothing in the buffer survives between calls, so all layers of a model can share one allocation.
    Construction is collective over ``group``.

    Args:
        group: the EP group. None is the default group, or one rank when torch.distributed is not in use.
        num_experts: E, experts over all ranks; a multiple of the group's size.
        num_max_tokens_per_rank: T, the most tokens a rank may bring to one call.
        num_topk: K, slots of a token; at most E and at most 32.
        hidden: H. bf16: a multiple of 64, with the SM90 backend of at least 256.
        intermediate_hidden: I. bf16: a multiple of 64.
        num_shared_experts: shared experts the model adds to the routed ones.
        mma_type: "bf16xbf16", or "f32xf32" / "f64xf64", which only the reference backend runs. Types this
            package has no kernels for are upstream's: the result is a buffer of the installed ``deep_gemm``.
        activation: "swiglu".
        base: a live buffer of the same group whose memory this one views; then nothing is allocated.

    Attributes:
        x: [T, H] bf16 (fp32 and fp64 for the reference-only types).
        topk_idx: int64 [T, K]; -1 marks a slot without an expert.
        topk_weights: fp32 [T, K] (fp64 for "f64xf64").
        num_bytes: bytes this buffer's layout takes on each rank; with the SM90 backend the pools of both
            directions are counted, which are allocated at their first use.
        buffer: the uint8 storage; None once destroyed.
        backend: "reference" or "sm90".
        rank, num_ranks, num_local_experts: this rank's place in the group.
        pool_rows: C, the most dispatched rows that this rank can take in one call. SM90: the pools' capacity,
            by default enough for any routing (R T K rows and a block of 128 for each group of rows), or what
            ``set_pool_capacity_factor`` left of it. Reference: R T K, enough for any routing.
        handle: an int that :func:`lookup_buffer` maps back to this object while it lives.
        kernels: modules the BF16 functions have loaded for this buffer, by kernel name.

    With the SM90 backend calls are asynchronous. What a kernel finds wrong (a peer that does not arrive,
    pools that are too small, an expert index out of range) is raised by the next call on the buffer or any
    view of it, by :meth:`check`, or by :meth:`destroy`; ``set_synchronous_checks`` makes each call wait and
    raise. The calls of a buffer and its views belong on one stream, or on streams ordered by events, and on
    one thread at a time. Destroy the buffer, or wait for its stream, before its memory is let go.

    Raises:
        ValueError: an argument outside its limits, or one that differs between ranks (names both).
        RuntimeError: no kernel for ``mma_type`` here, or a destroyed ``base``.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        mma_type = _SIGNATURE.bind(*args, **kwargs).arguments.get("mma_type", UPSTREAM_MMA_TYPE)
        if validation.is_own_mma_type(mma_type):
            return super().__new__(cls)
        # An object of another class: Python does not call our __init__ on it.
        return _upstream_buffer(mma_type)(*args, **kwargs)

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_experts: int,
        num_max_tokens_per_rank: int,
        num_topk: int,
        hidden: int,
        intermediate_hidden: int,
        num_shared_experts: int = 0,
        mma_type: str = UPSTREAM_MMA_TYPE,
        activation: str = "swiglu",
        base: SymmBuffer | None = None,
    ) -> None:
        validation.check_base_type(base)
        check_group(group)
        self.group = _resolve_group(group, base)
        self.num_experts = num_experts
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_topk = num_topk
        self.hidden = hidden
        self.intermediate_hidden = intermediate_hidden
        self.num_shared_experts = num_shared_experts
        self.mma_type = mma_type
        self.activation = activation
        self.num_ranks = ep.group_size(self.group)
        self.rank = ep.group_rank(self.group)
        # The ranks compare before any of them refuses its arguments: the others would wait for it otherwise.
        validation.check_equal_on_all_ranks(self.group, self._arguments(base), "SymmBuffer")
        validation.check_buffer_arguments(self)
        self.num_local_experts = num_experts // self.num_ranks
        self.kernels: dict[str, ModuleType] = {}
        # A view keeps its base alive; destroying the base ends its views too.
        self._base = base
        self.buffer: Tensor | None
        self.sm90: Sm90Rank | None = None
        self.sm90_memory: Sm90Memory | None = None
        if base is None:
            device = _allocation_device(self.group)
            self.backend = runtime.resolve_backend(device, mma_type)
        else:
            validation.check_base(self, base)
            assert base.buffer is not None
            device, self.backend = base.buffer.device, base.backend
        validation.check_sizes(self)
        with _outside_of_modes():
            if self.backend == "reference":
                self._use_reference(device)
            else:
                self._use_sm90(device)
        self.handle = _register(self)
        logger.info("%s", self)

    def _use_reference(self, device: torch.device) -> None:
        regions = _staging_layout(self.num_max_tokens_per_rank, self.num_topk, self.hidden, self.mma_type)
        self.num_bytes = regions[-1].end
        if self._base is None:
            self.buffer = zeroed_bytes(self.num_bytes, device)
        else:
            validation.check_base_holds(self, self._base)
            self.buffer = self._base.buffer
        assert self.buffer is not None
        self.pool_rows = self.num_ranks * self.num_max_tokens_per_rank * self.num_topk
        self.x, self.topk_idx, self.topk_weights = (region.view(self.buffer) for region in regions)

    def _use_sm90(self, device: torch.device) -> None:
        from .exchange import BLOCK_M, ExchangeShape
        from .sm90_memory import Sm90Memory

        validation.check_sm90_limits(self)
        shape = ExchangeShape(
            self.num_max_tokens_per_rank, self.num_topk, self.hidden, self.intermediate_hidden,
            self.num_experts, self.num_ranks,
        )  # fmt: skip
        if self._base is None:
            validation.check_nvlink_domain(self.group, ep.nvlink_domain())
            if self.group is not None and self.num_ranks > 1:
                check_peer_access(self.group, gpu_view(device))
            memory = Sm90Memory(shape, self.rank, self.group, device)
        else:
            assert self._base.sm90_memory is not None
            memory = self._base.sm90_memory
        self.sm90, self.sm90_memory, self.buffer = memory.view(shape), memory, memory.storage
        self.num_bytes = sum(memory.view_bytes(shape).values())
        self.pool_rows = self.sm90.pool_blocks * BLOCK_M
        self.x, self.topk_idx, self.topk_weights = self.sm90.x, self.sm90.topk_idx, self.sm90.topk_weights

    def _arguments(self, base: SymmBuffer | None) -> dict[str, Any]:
        return {
            "num_experts": self.num_experts,
            "num_max_tokens_per_rank": self.num_max_tokens_per_rank,
            "num_topk": self.num_topk,
            "hidden": self.hidden,
            "intermediate_hidden": self.intermediate_hidden,
            "num_shared_experts": self.num_shared_experts,
            "mma_type": self.mma_type,
            "activation": self.activation,
            "base bytes": None if base is None or base.buffer is None else base.buffer.numel(),
            "pool capacity factor": runtime.get_pool_capacity_factor(),
        }

    @property
    def destroyed(self) -> bool:
        """Whether :meth:`destroy` was called on this buffer or on its base."""
        return self.buffer is None or (self._base is not None and self._base.destroyed)

    def destroy(self) -> None:
        """Give the memory back; a second call does nothing. Views of this buffer end with it.

        Not collective, and not needed before the process ends: no rank waits for another here. The SM90
        backend waits for the kernels under way on this device.

        Raises:
            RuntimeError, ValueError: what those kernels recorded. The memory is given back all the same.
        """
        _buffers.pop(self.handle, None)
        memory = self.sm90_memory if self._base is None else None
        self.buffer = self.sm90 = self.sm90_memory = None
        self.group = None
        self.x = self.topk_idx = self.topk_weights = torch.empty(0)
        if memory is not None:
            memory.close()

    def check(self) -> None:
        """Wait for the kernels under way on the buffer's device and raise what they recorded.

        The reference backend raises in the calls themselves: there is nothing to wait for.

        Raises:
            RuntimeError: a peer that did not arrive, pools that are too small; a destroyed buffer.
            ValueError: an expert index out of range.
        """
        self._check_alive()
        if self.sm90_memory is not None:
            self.sm90_memory.check()

    def reset(self) -> None:
        """Make a buffer with a failed call usable again, on all ranks. Collective.

        The reference never needs it, and a buffer of one rank recovers by itself at its next call.
        """
        self._check_alive()
        if self.sm90_memory is not None:
            self.sm90_memory.reset()

    def _check_alive(self) -> None:
        if self.destroyed:
            raise RuntimeError("the buffer was destroyed; build a new one")

    def __deepcopy__(self, memo: dict[int, Any]) -> SymmBuffer:
        """The buffer itself: copies of a model share it, as its layers do."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a SymmBuffer belongs to its process and group; build one after loading instead")

    def __repr__(self) -> str:
        kind = "view" if self._base is not None else "buffer"
        size = f"{self.num_bytes} bytes on each of {self.num_ranks} rank(s)"
        state = "destroyed" if self.destroyed else size
        return (
            f"SymmBuffer({self.mma_type} {kind}, {state}, backend {self.backend}, E={self.num_experts}, "
            f"T={self.num_max_tokens_per_rank}, K={self.num_topk}, H={self.hidden}, "
            f"I={self.intermediate_hidden})"
        )


# __new__ takes whatever upstream takes; clients that inspect the class see the arguments of __init__.
_SIGNATURE = inspect.Signature(list(inspect.signature(SymmBuffer.__init__).parameters.values())[1:])
SymmBuffer.__signature__ = _SIGNATURE  # type: ignore[attr-defined]


def get_symm_buffer_for_mega_moe(
    group: dist.ProcessGroup | None,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    num_shared_experts: int = 0,
    use_fp8_dispatch: bool | None = None,
    mma_type: str = UPSTREAM_MMA_TYPE,
    activation: str = "swiglu",
) -> SymmBuffer:
    """Build a :class:`SymmBuffer`; the arguments are the same.

    Args:
        use_fp8_dispatch: what older clients pass instead of ``mma_type``; it has to agree with it.

    Raises:
        ValueError: ``use_fp8_dispatch`` contradicts ``mma_type``; else as :class:`SymmBuffer`.
    """
    if use_fp8_dispatch is not None:
        validation.check_fp8_dispatch(use_fp8_dispatch, mma_type)
        warnings.warn("use_fp8_dispatch is deprecated, pass mma_type", DeprecationWarning, stacklevel=2)
    return SymmBuffer(
        group, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden,
        num_shared_experts, mma_type, activation,
    )  # fmt: skip


def _resolve_group(group: dist.ProcessGroup | None, base: SymmBuffer | None) -> dist.ProcessGroup | None:
    # A destroyed base is refused later, after the ranks have compared: it may be alive on others.
    if group is None and base is not None and not base.destroyed:
        return base.group
    return ep.resolve_group(group)


@contextmanager
def _outside_of_modes() -> Iterator[None]:
    """Memory made in inference mode, of fake tensors or by torch.func is of no use outside of these."""
    with torch.inference_mode(False), unset_fake_temporarily(), torch._C._DisableFuncTorch():
        yield


def _allocation_device(group: dist.ProcessGroup | None) -> torch.device:
    device = runtime.get_device()
    if device is None:
        with_cuda = torch.cuda.is_available() if group is None else ep.communicates_from_cuda(group)
        device = torch.device("cuda" if with_cuda else "cpu")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise RuntimeError(
                f"device {device} was chosen for buffers (set_device or ${runtime.DEVICE_ENV}) and torch "
                f"finds {count} CUDA GPUs; choose one of these or the CPU"
            )
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
    return device


def _register(buffer: SymmBuffer) -> int:
    handle = next(_handles)
    _buffers[handle] = buffer
    return handle
