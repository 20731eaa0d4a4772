"""The memory behind a SymmBuffer of the SM90 backend and all its views: symmetric storage, pools, faults."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from . import runtime, validation
from .exchange import FLAGS_BYTES, ExchangeShape, FaultBox, PoolMemory, capturing, pool_layout
from .sm90 import Sm90Rank

# The kernels use no multicast, and setting it up fails on some hosts.
_NO_MULTICAST_ENV = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class Sm90Memory:
    """What all views of one buffer share on this rank.

    One storage of ``num_symmetric_bytes`` that every rank of the group can read and write, in which each
    shape has its own layout behind the flags and the epoch, which lie at the same place for all; the pools;
    and the record of faults.

    Args:
        shape: of the base buffer; views may be of any shape that takes no more bytes.
        rank: this rank.
        group: the EP group; None is one rank.
        device: a CUDA device.

    Construction is collective.
    """

    def __init__(
        self, shape: ExchangeShape, rank: int, group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        self.rank, self.group, self.device = rank, group, device
        self.capacity_factor = runtime.get_pool_capacity_factor()
        _, self.num_symmetric_bytes = shape.symmetric_layout()
        layout = pool_layout(shape, shape.pool_blocks(self.capacity_factor))
        self._pool_memory = PoolMemory(layout, device)
        self.storage, self._peers, self._mapping = symmetric_storage(self.num_symmetric_bytes, group, device)
        self.fault = FaultBox(pinned=device.type == "cuda")
        self._num_ranks = shape.ranks
        self._views: dict[ExchangeShape, Sm90Rank] = {}
        self._scratch: dict[tuple[str, tuple[int, ...], torch.dtype], Tensor] = {}
        self._failed = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the symmetric storage and of the pools of both directions."""
        return self.num_symmetric_bytes + self._pool_memory.num_bytes

    def view_bytes(self, shape: ExchangeShape) -> dict[str, int]:
        """What ``shape`` takes of each part of this memory."""
        layout = pool_layout(shape, shape.pool_blocks(self.capacity_factor))
        return {
            "symmetric memory": shape.symmetric_layout()[1],
            "pools of both directions": layout.both_bytes,
            "pools of the backward": layout.backward_bytes,
        }

    def view(self, shape: ExchangeShape) -> Sm90Rank:
        """The state of this rank for one shape; the same object for equal shapes.

        Raises:
            ValueError: ``shape`` needs more bytes than there are; names both.
        """
        if shape not in self._views:
            sizes = self._pool_memory.sizes()
            capacities = (self.num_symmetric_bytes, sizes["both"], sizes["backward"])
            for (what, needed), capacity in zip(self.view_bytes(shape).items(), capacities, strict=True):
                if needed > capacity:
                    raise ValueError(
                        f"the view needs {needed} bytes of {what} and its base holds {capacity} bytes; build "
                        "the base for the larger shape"
                    )
            self._views[shape] = Sm90Rank(
                shape, self.rank, self.storage, self._peers, usable_sms(self.device),
                shape.pool_blocks(self.capacity_factor), runtime.get_timeout_seconds(),
                pool_memory=self._pool_memory, fault=self.fault,
            )  # fmt: skip
        return self._views[shape]

    def scratch(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor kept for a use called ``name``; its contents last until the next call for it."""
        key = (name, shape, dtype)
        if key not in self._scratch:
            if capturing(self.device):
                raise RuntimeError(
                    f"the scratch for {name} {list(shape)} is not allocated yet; run the captured calls once "
                    "before the capture"
                )
            self._scratch[key] = torch.empty(shape, dtype=dtype, device=self.device)
        return self._scratch[key]

    def begin_call(self, rank: Sm90Rank) -> None:
        """Before each launch: raise what earlier ones recorded, and apply the process-wide settings.

        Raises:
            RuntimeError, ValueError: an earlier call's fault; this call then does nothing.
            RuntimeError: a failed buffer of several ranks that was not reset.
        """
        self.raise_faults()
        if self._failed:
            self._recover()
        rank.set_timeout(runtime.get_timeout_seconds())
        rank.use_sms(usable_sms(self.device))

    def end_call(self) -> None:
        """After each launch: with synchronous checks, wait and raise."""
        if runtime.get_synchronous_checks() and not capturing(self.device):
            self.check()

    def raise_faults(self) -> None:
        """Raise a recorded fault, without waiting for kernels under way."""
        try:
            self.fault.raise_if_set()
        except (RuntimeError, ValueError):
            # The kernels of that call gave up (flags of the call say so, to this rank too), or its routing
            # was wrong: the call that raises here is not launched, and this rank is out of step with its
            # peers.
            self._failed = True
            raise

    def check(self) -> None:
        """Wait for the kernels under way on the device and raise what they recorded."""
        synchronize(self.device)
        self.raise_faults()

    def reset(self) -> None:
        """Make a failed buffer usable again; collective. Recorded faults are dropped."""
        synchronize(self.device)
        # Nobody's kernel writes flags any more,
        validation.check_equal_on_all_ranks(self.group, {}, "reset")
        self._clear_flags()
        synchronize(self.device)
        # and nobody starts before all flags are cleared.
        validation.check_equal_on_all_ranks(self.group, {}, "reset")

    def close(self) -> None:
        """Wait for the kernels under way, let go of the pools, and raise what was recorded."""
        synchronize(self.device)
        self._views.clear()
        self._scratch.clear()
        self.raise_faults()

    def _recover(self) -> None:
        if self._num_ranks > 1:
            raise RuntimeError(
                "an earlier call on this buffer failed, and its peers may wait for different calls by now; "
                "call buffer.reset() on all ranks, or build a new buffer"
            )
        if capturing(self.device):
            raise RuntimeError(
                "an earlier call on this buffer failed; call buffer.reset() before the capture"
            )
        synchronize(self.device)
        self._clear_flags()

    def _clear_flags(self) -> None:
        self.storage[:FLAGS_BYTES].zero_()
        self.fault.clear()
        self._failed = False


def usable_sms(device: torch.device) -> int:
    """The limit of ``set_num_sms``, else all SMs of the device.

    Raises:
        ValueError: the limit is more than the device has, or less than one cluster of two.
    """
    available = torch.cuda.get_device_properties(device).multi_processor_count
    limit = runtime.sm_limit()
    if limit is None:
        return available
    if not 2 <= limit <= available:
        raise ValueError(
            f"set_num_sms was given {limit}; the SM90 kernels run on 2 to {available} SMs of {device}, "
            "in pairs"
        )
    return limit


def synchronize(device: torch.device) -> None:
    """Wait for all work on the device."""
    torch.cuda.synchronize(device)


def symmetric_storage(
    size: int, group: dist.ProcessGroup | None, device: torch.device
) -> tuple[Tensor, list[int], object]:
    """``size`` zeroed bytes on ``device``, and the address of every rank's as this device sees it.

    Collective. One rank needs no process group and gets plain device memory. The third result keeps the
    peers' memory mapped.
    """
    if group is None or dist.get_world_size(group) == 1:
        storage = torch.zeros(size, dtype=torch.uint8, device=device)
        return storage, [storage.data_ptr()], None
    return _rendezvous(size, group, device)


def _rendezvous(
    size: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[Tensor, list[int], object]:
    import torch.distributed._symmetric_memory as symmetric_memory
    from torch._C._distributed_c10d import (
        PrefixStore,
        _register_process_group,
        _SymmetricMemory,
        _unregister_process_group,
    )
    from torch.distributed import distributed_c10d

    # Under a name of its own: torch keeps the first store it saw under a group's name, and a process group
    # built after another was destroyed has the same name and another store.
    names: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(names, uuid.uuid4().hex, group=group)
    name = f"{__name__}.{names[0]}"
    store = PrefixStore(name, distributed_c10d._get_process_group_store(group))
    # Some releases of torch look the name up among these, others among process groups.
    _SymmetricMemory.set_group_info(name, dist.get_rank(group), dist.get_world_size(group), store)
    _register_process_group(name, group)  # type: ignore[arg-type]
    try:
        with torch.cuda.device(device), _without_multicast():
            storage = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
            handle = _SymmetricMemory.rendezvous(storage, name)
    finally:
        _unregister_process_group(name)  # type: ignore[arg-type]
    storage.zero_()
    synchronize(device)
    # The addresses are those of whole allocations, in which torch's pool may place the parts differently.
    offset = storage.data_ptr() - handle.buffer_ptrs[dist.get_rank(group)]
    offsets = [0] * len(handle.buffer_ptrs)
    # Also the barrier that lets nobody write to a peer's memory before it is zero.
    dist.all_gather_object(offsets, offset, group=group)
    peers = [address + offset for address, offset in zip(handle.buffer_ptrs, offsets, strict=True)]
    return storage, peers, handle


@contextmanager
def _without_multicast() -> Iterator[None]:
    before = os.environ.get(_NO_MULTICAST_ENV)
    os.environ[_NO_MULTICAST_ENV] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_MULTICAST_ENV]
        else:
            os.environ[_NO_MULTICAST_ENV] = before
