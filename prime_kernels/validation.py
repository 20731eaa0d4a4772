"""The errors of the public functions, raised before anything is launched.

Each message names the value, the limit and what to do about it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .checks import check_clamp as check_clamp
from .checks import check_int, check_no_overlap
from .exchange import MAX_EXPERTS, MAX_RANKS
from .sizes import SIZE_LIMITS, SizeLimit
from .swiglu import INTERLEAVE

if TYPE_CHECKING:
    from .symm import SymmBuffer

MAX_TOPK = 32
COPY_BYTES = 16
ACTIVATIONS = ("swiglu",)
# What a forward can keep for its backward: z, gate and up of every dispatched row.
KEEPS = ("z",)
# dtype of x, y, dy, dx and the weights of each mma_type this package runs.
DATA_DTYPES: dict[str, torch.dtype] = {
    "bf16xbf16": torch.bfloat16,
    "f32xf32": torch.float32,
    "f64xf64": torch.float64,
}
# Types of the contract whose kernels this version lacks, and the GPU they need.
PLANNED_MMA_TYPES = {"fp8xfp8": "MXFP8 needs an SM100 GPU"}


def check_equal_on_all_ranks(group: dist.ProcessGroup | None, arguments: dict[str, Any], what: str) -> None:
    """Compare ``arguments`` over the group (collective); ValueError names each differing field and ranks."""
    if group is None:
        return
    everyone: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, arguments, group=group)
    problems = []
    for name in arguments:
        ranks_of: dict[str, list[int]] = {}
        for rank, theirs in enumerate(everyone):
            ranks_of.setdefault(repr(theirs[name]), []).append(rank)
        if len(ranks_of) > 1:
            problems.append(
                f"{name} is " + ", ".join(f"{value} on rank(s) {ranks}" for value, ranks in ranks_of.items())
            )
    if problems:
        raise ValueError(f"{what}: {'; '.join(problems)}; pass equal arguments on all ranks of the group")


def check_nvlink_domain(group: dist.ProcessGroup | None, domain: str) -> None:
    """Compare the ranks' NVLink domains (collective); RuntimeError names the ranks of each."""
    if group is None:
        return
    domains: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(domains, domain, group=group)
    ranks_of: dict[str, list[int]] = {}
    for rank, name in enumerate(domains):
        ranks_of.setdefault(name, []).append(rank)
    if len(ranks_of) > 1:
        members = " and ".join(str(ranks) for ranks in ranks_of.values())
        smallest = min(len(ranks) for ranks in ranks_of.values())
        raise RuntimeError(
            f"the group's {len(domains)} ranks are in {len(ranks_of)} NVLink domains: ranks {members}; the "
            f"kernels reach peers through NVLink only, so make expert-parallel groups of at most {smallest} "
            "ranks, each inside one machine"
        )


def is_own_mma_type(mma_type: str) -> bool:
    """Whether buffers of this type are this package's; all others are upstream's."""
    if not isinstance(mma_type, str):
        raise ValueError(f"mma_type is {mma_type!r}, needs one of {', '.join(DATA_DTYPES)}")
    return mma_type in DATA_DTYPES or mma_type in PLANNED_MMA_TYPES


def no_kernel(mma_type: str) -> str:
    """The start of an error message about a type this package does not run."""
    return f"mma_type {mma_type!r} has no kernel in this package (it has {', '.join(DATA_DTYPES)})"


def check_mma_type(mma_type: str) -> None:
    """RuntimeError for a type without kernels here."""
    if mma_type in PLANNED_MMA_TYPES:
        raise RuntimeError(
            f"{no_kernel(mma_type)}: {PLANNED_MMA_TYPES[mma_type]}; use mma_type='bf16xbf16' on an SM90 GPU"
        )
    if mma_type not in DATA_DTYPES:
        raise RuntimeError(no_kernel(mma_type))


def wide_dtype(mma_type: str) -> torch.dtype:
    """dtype of topk_weights and dtopk, and the dtype weight gradients accumulate in."""
    return torch.float64 if DATA_DTYPES[mma_type] == torch.float64 else torch.float32


def check_activation(activation: str) -> None:
    """ValueError for an activation function this package does not have."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; this package has {', '.join(ACTIVATIONS)}")


def check_buffer_arguments(buffer: SymmBuffer) -> None:
    """Limits of a buffer's shape; raises ValueError, or RuntimeError for an mma_type without a kernel."""
    check_mma_type(buffer.mma_type)
    check_activation(buffer.activation)
    for name in ("num_experts", "num_max_tokens_per_rank", "num_topk", "hidden", "intermediate_hidden"):
        check_int(name, getattr(buffer, name), 1)
    check_int("num_shared_experts", buffer.num_shared_experts, 0)
    if buffer.num_experts % buffer.num_ranks:
        raise ValueError(
            f"num_experts is {buffer.num_experts}, needs a multiple of the group's {buffer.num_ranks} ranks; "
            "change the group or the expert count"
        )
    check_topk("num_topk", buffer.num_topk, buffer.num_experts)


def check_topk(name: str, topk: int, num_experts: int) -> None:
    """ValueError for more slots than experts, or than the kernels take."""
    if topk > min(num_experts, MAX_TOPK):
        raise ValueError(
            f"{name} is {topk}, at most {min(num_experts, MAX_TOPK)} is possible "
            f"(num_experts is {num_experts}, kernels take up to {MAX_TOPK}); route to fewer experts"
        )


def check_sizes(buffer: SymmBuffer) -> None:
    """H and I, once the buffer's backend is known."""
    if buffer.mma_type == "bf16xbf16":
        limits = SIZE_LIMITS[buffer.backend]
        _check_size("hidden", buffer.hidden, limits.hidden)
        _check_size("intermediate_hidden", buffer.intermediate_hidden, limits.intermediate)


def _check_size(name: str, value: int, limit: SizeLimit) -> None:
    if not limit.takes(value):
        raise ValueError(
            f"{name} is {value}, bf16xbf16 needs {limit}; use {' or '.join(map(str, limit.nearest(value)))}, "
            "or pad the weights with zeros"
        )


def check_base_type(base: Any) -> None:
    """ValueError for a base that is no buffer of this package."""
    if base is not None and not hasattr(base, "destroyed"):
        raise ValueError(f"base is a {type(base).__name__}, needs a SymmBuffer, or None to allocate")


def check_base(buffer: SymmBuffer, base: SymmBuffer) -> None:
    """The base of a view: alive (else RuntimeError), of the same group, and large enough."""
    if base.destroyed:
        raise RuntimeError("base was destroyed; build a new buffer and view that one")
    if buffer.group is not base.group:
        raise ValueError(
            f"a view and its base need the same group; got one of {buffer.num_ranks} rank(s) over a base of "
            f"{base.num_ranks}; pass the base's group or build a buffer without base"
        )


def check_base_holds(buffer: SymmBuffer, base: SymmBuffer) -> None:
    """ValueError when a view's layout takes more bytes than its base holds."""
    assert base.buffer is not None
    capacity = base.buffer.numel()
    if buffer.num_bytes > capacity:
        raise ValueError(
            f"the view needs {buffer.num_bytes} bytes and its base holds {capacity} bytes; build the "
            "base for the larger shape"
        )


def check_sm90_limits(buffer: SymmBuffer) -> None:
    """What the SM90 kernels' tables hold: ranks and experts."""
    if buffer.num_ranks > MAX_RANKS:
        raise RuntimeError(
            f"the group has {buffer.num_ranks} ranks, the SM90 kernels reach at most {MAX_RANKS}; make "
            "smaller expert-parallel groups, each inside one NVLink domain"
        )
    if buffer.num_experts > MAX_EXPERTS:
        raise ValueError(
            f"num_experts is {buffer.num_experts}, the SM90 kernels take at most {MAX_EXPERTS}; "
            'set_backend("reference") takes any number'
        )


def check_tma_access(name: str, tensor: Tensor | None) -> None:
    """Start and strides in whole 16-byte pieces, in which the SM90 kernels move matrices."""
    if tensor is None:
        return
    item = tensor.element_size()
    if tensor.data_ptr() % COPY_BYTES:
        raise ValueError(
            f"{name} starts at an address that is {tensor.data_ptr() % COPY_BYTES} bytes past a multiple of "
            f"{COPY_BYTES}, the SM90 kernels need a multiple; clone it"
        )
    for dim, (extent, stride) in enumerate(zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)):
        if extent > 1 and stride * item % COPY_BYTES:
            raise ValueError(
                f"{name} has stride {stride} in dim {dim}, the SM90 kernels need multiples of "
                f"{COPY_BYTES // item} ({COPY_BYTES} bytes); call .contiguous()"
            )


def check_fp8_dispatch(use_fp8_dispatch: bool, mma_type: str) -> None:
    """ValueError when the older argument contradicts ``mma_type``."""
    if is_own_mma_type(mma_type) and use_fp8_dispatch != mma_type.startswith("fp8x"):
        raise ValueError(
            f"use_fp8_dispatch is {use_fp8_dispatch} and mma_type is {mma_type!r}; drop use_fp8_dispatch"
        )


def check_tensor(
    name: str, tensor: Any, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """Type, device, dtype, shape, and that elements of the last dim are adjacent."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} is {_brief(tensor)}, needs a tensor of shape {list(shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the buffer is on {device}; move it there")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name} is {tensor.dtype}, needs {wanted}; convert it")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, needs {list(shape)}")
    if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} has stride {tensor.stride(-1)} in its last dim, needs 1 (other dims may be strided); "
            "call .contiguous()"
        )


def check_rows(name: str, tensor: Any, buffer: SymmBuffer) -> int:
    """A [n, H] tensor of this rank's tokens in the buffer's data type; returns n."""
    if not isinstance(tensor, Tensor) or tensor.dim() != 2:
        raise ValueError(f"{name} is {_brief(tensor)}, needs a tensor of shape [n, {buffer.hidden}]")
    num_tokens = tensor.shape[0]
    check_tensor(name, tensor, (num_tokens, buffer.hidden), (DATA_DTYPES[buffer.mma_type],), buffer.x.device)
    if num_tokens > buffer.num_max_tokens_per_rank:
        raise RuntimeError(
            f"buffer is sized for {buffer.num_max_tokens_per_rank} tokens/rank, got {num_tokens}; build it "
            f"with num_max_tokens_per_rank of at least {num_tokens}"
        )
    return num_tokens


def check_output(name: str, output: Tensor, buffer: SymmBuffer) -> None:
    """Memory of its own for each element, and none of it the buffer's."""
    check_no_overlap(name, output)
    if output.numel() and output.untyped_storage().data_ptr() == buffer.x.untyped_storage().data_ptr():
        raise ValueError(
            f"{name} lies in the buffer, whose memory the call itself uses; pass a tensor of its own memory"
        )


def _brief(value: Any) -> str:
    return f"of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def check_buffer(buffer: Any) -> None:
    """A live buffer of a type the BF16 functions take."""
    if getattr(buffer, "mma_type", None) not in DATA_DTYPES:
        raise ValueError(
            f"sym_buffer is {buffer!r}, needs a SymmBuffer of mma_type {' or '.join(DATA_DTYPES)}; "
            "build it with get_symm_buffer_for_mega_moe"
        )
    if buffer.destroyed:
        raise RuntimeError("sym_buffer was destroyed; build a new one")


def check_weights(l1: Any, l2: Any, buffer: SymmBuffer) -> None:
    """l1 [El, 2I, H] and l2 [El, H, I] in the buffer's data type."""
    dtype, device = (DATA_DTYPES[buffer.mma_type],), buffer.x.device
    experts, hidden, inter = buffer.num_local_experts, buffer.hidden, buffer.intermediate_hidden
    check_tensor("l1_weights", l1, (experts, 2 * inter, hidden), dtype, device)
    check_tensor("l2_weights", l2, (experts, hidden, inter), dtype, device)


def check_shared_weights(l1: Any, l2: Any, buffer: SymmBuffer) -> int | None:
    """The shared expert's weights come together; returns its intermediate size Is (None: no such expert)."""
    if (l1 is None) != (l2 is None):
        missing = "shared_l1_weights" if l1 is None else "shared_l2_weights"
        raise ValueError(f"{missing} is None and the other shared weight is not; pass both or neither")
    if l1 is None:
        return None
    dtype, device = (DATA_DTYPES[buffer.mma_type],), buffer.x.device
    if not isinstance(l2, Tensor) or l2.dim() != 2:
        raise ValueError(f"shared_l2_weights is {_brief(l2)}, needs a tensor of shape [{buffer.hidden}, Is]")
    inter = l2.shape[1]
    if buffer.mma_type == "bf16xbf16":
        _check_size("the shared expert's intermediate size", inter, SIZE_LIMITS[buffer.backend].intermediate)
    check_tensor("shared_l1_weights", l1, (2 * inter, buffer.hidden), dtype, device)
    check_tensor("shared_l2_weights", l2, (buffer.hidden, inter), dtype, device)
    return inter


def check_interleaved(inter: int, argument: str) -> None:
    """``inter`` is an intermediate size, ``argument`` the flag that asks for interleaving."""
    if inter % INTERLEAVE:
        raise ValueError(
            f"{argument}=False interleaves gate and up in groups of {INTERLEAVE} rows; the intermediate size "
            f"{inter} is no multiple of that, use {argument}=True"
        )


def check_token_grads(dx: Any, dtopk: Any, num_tokens: int, buffer: SymmBuffer) -> None:
    """dx [n, H] in the buffer's data type and dtopk [n, K] in the wide one."""
    data, device = DATA_DTYPES[buffer.mma_type], buffer.x.device
    check_tensor("dx", dx, (num_tokens, buffer.hidden), (data,), device)
    check_tensor("dtopk", dtopk, (num_tokens, buffer.num_topk), (wide_dtype(buffer.mma_type),), device)
    check_output("dx", dx, buffer)
    check_output("dtopk", dtopk, buffer)


def check_weight_grads(dw1: Any, dw2: Any, buffer: SymmBuffer, accumulate: bool) -> None:
    """dw1 [El, 2I, H] and dw2 [El, H, I], either of them None; fp32 (or fp64) to accumulate."""
    experts, hidden, inter = buffer.num_local_experts, buffer.hidden, buffer.intermediate_hidden
    _check_weight_grad("dw1", dw1, (experts, 2 * inter, hidden), buffer, accumulate)
    _check_weight_grad("dw2", dw2, (experts, hidden, inter), buffer, accumulate)


def check_keep(keep: str | None) -> None:
    """ValueError for something else than what a forward can keep for its backward."""
    if keep is not None and keep not in KEEPS:
        raise ValueError(
            f"keep is {keep!r}, needs None (the backward recomputes gate and up) or one of {', '.join(KEEPS)}"
        )


def check_kept_z(z: Any, rows: int, buffer: SymmBuffer) -> None:
    """z [rows, 2I] or [C, 2I] in the buffer's data type, where ``rows`` are those of this call's routing."""
    if not isinstance(z, Tensor) or z.dim() != 2:
        raise ValueError(f"z is {_brief(z)}, needs what the forward of this call kept")
    columns, dtype = 2 * buffer.intermediate_hidden, DATA_DTYPES[buffer.mma_type]
    check_tensor("z", z, (z.shape[0], columns), (dtype,), buffer.x.device)
    if z.shape[0] not in (rows, buffer.pool_rows) or not z.is_contiguous():
        raise ValueError(
            f"z has shape {list(z.shape)} and strides {z.stride()}, this call needs contiguous "
            f"[{rows}, {columns}] or [{buffer.pool_rows}, {columns}]; pass what the forward over the same "
            "buffer and routing kept"
        )


def check_shared_weight_grads(
    dw1: Any, dw2: Any, inter: int | None, buffer: SymmBuffer, accumulate: bool
) -> None:
    """``inter`` is the shared expert's intermediate size, None without shared weights."""
    if inter is None:
        for name, grad in (("shared_dw1_weights", dw1), ("shared_dw2_weights", dw2)):
            if grad is not None:
                raise ValueError(
                    f"{name} is given without shared weights; pass shared_l1_weights and shared_l2_weights"
                )
        return
    _check_weight_grad("shared_dw1_weights", dw1, (2 * inter, buffer.hidden), buffer, accumulate)
    _check_weight_grad("shared_dw2_weights", dw2, (buffer.hidden, inter), buffer, accumulate)


def _check_weight_grad(
    name: str, grad: Any, shape: tuple[int, ...], buffer: SymmBuffer, accumulate: bool
) -> None:
    if grad is None:
        return
    data, wide = DATA_DTYPES[buffer.mma_type], wide_dtype(buffer.mma_type)
    check_tensor(name, grad, shape, (data, wide) if data != wide else (data,), buffer.x.device)
    check_output(name, grad, buffer)
    if accumulate and grad.dtype != wide:
        raise ValueError(
            f"accumulate is True and {name} is {grad.dtype}, needs {wide} (a framework's main_grad): 16 bits "
            f"lose what many micro-batches add; use a {wide} gradient or accumulate=False"
        )


def check_weight_pair(l1: Any, l2: Any) -> None:
    """[..., 2I, H] and [..., H, I] that belong together, of one floating dtype."""
    for name, weight in (("l1_weights", l1), ("l2_weights", l2)):
        if not isinstance(weight, Tensor) or weight.dim() not in (2, 3):
            raise ValueError(f"{name} is {_brief(weight)}, needs a 2-D or 3-D tensor")
    matching = (*l1.shape[:-2], l1.shape[-1], l1.shape[-2] // 2)
    if l2.shape != matching or l1.shape[-2] % 2 or l1.dtype != l2.dtype:
        raise ValueError(
            f"l1_weights {l1.dtype} {list(l1.shape)} and l2_weights {l2.dtype} {list(l2.shape)} do not "
            "belong together; needs [..., 2I, H] and [..., H, I] of one dtype"
        )


def check_stats(stats: Any, buffer: SymmBuffer) -> None:
    """cumulative_local_expert_recv_stats: None or int32 [El]."""
    if stats is not None:
        shape, device = (buffer.num_local_experts,), buffer.x.device
        check_tensor("cumulative_local_expert_recv_stats", stats, shape, (torch.int32,), device)
        check_output("cumulative_local_expert_recv_stats", stats, buffer)
