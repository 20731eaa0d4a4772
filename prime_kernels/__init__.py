"""Trainable expert-parallel mixture-of-experts kernels.

Everything is imported at first use: importing the package compiles nothing, needs no GPU and creates no CUDA
context. Names of DeepGEMM that are not listed here come from an installed `deep_gemm` (see `_dropin`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._dropin import install_upstream_modules, lazy_names
from ._version import __version__

if TYPE_CHECKING:
    from .bf16 import bf16_mega_moe as bf16_mega_moe
    from .bf16 import bf16_mega_moe_backward as bf16_mega_moe_backward
    from .bf16 import transform_weights_for_mega_moe as transform_weights_for_mega_moe
    from .gemm import (
        get_mk_alignment_for_contiguous_layout as get_mk_alignment_for_contiguous_layout,
    )
    from .gemm import k_grouped_bf16_gemm_tn_contiguous as k_grouped_bf16_gemm_tn_contiguous
    from .gemm import m_grouped_bf16_gemm_nn_contiguous as m_grouped_bf16_gemm_nn_contiguous
    from .gemm import m_grouped_bf16_gemm_nt_contiguous as m_grouped_bf16_gemm_nt_contiguous
    from .module import MegaMoE as MegaMoE
    from .op import mega_moe as mega_moe
    from .registry import is_available as is_available
    from .registry import load as load
    from .registry import status as status
    from .runtime import get_backend as get_backend
    from .runtime import get_device as get_device
    from .runtime import get_num_sms as get_num_sms
    from .runtime import get_pool_capacity_factor as get_pool_capacity_factor
    from .runtime import get_synchronous_checks as get_synchronous_checks
    from .runtime import get_timeout_seconds as get_timeout_seconds
    from .runtime import set_backend as set_backend
    from .runtime import set_device as set_device
    from .runtime import set_num_sms as set_num_sms
    from .runtime import set_pool_capacity_factor as set_pool_capacity_factor
    from .runtime import set_synchronous_checks as set_synchronous_checks
    from .runtime import set_timeout_seconds as set_timeout_seconds
    from .symm import SymmBuffer as SymmBuffer
    from .symm import get_symm_buffer_for_mega_moe as get_symm_buffer_for_mega_moe

# Public name -> the module that defines it.
_OWN = {
    "MegaMoE": ".module",
    "SymmBuffer": ".symm",
    "bf16_mega_moe": ".bf16",
    "bf16_mega_moe_backward": ".bf16",
    "get_backend": ".runtime",
    "get_mk_alignment_for_contiguous_layout": ".gemm",
    "get_device": ".runtime",
    "get_num_sms": ".runtime",
    "get_pool_capacity_factor": ".runtime",
    "get_symm_buffer_for_mega_moe": ".symm",
    "get_synchronous_checks": ".runtime",
    "get_timeout_seconds": ".runtime",
    "is_available": ".registry",
    "k_grouped_bf16_gemm_tn_contiguous": ".gemm",
    "load": ".registry",
    "m_grouped_bf16_gemm_nn_contiguous": ".gemm",
    "m_grouped_bf16_gemm_nt_contiguous": ".gemm",
    "mega_moe": ".op",
    "set_backend": ".runtime",
    "set_device": ".runtime",
    "set_num_sms": ".runtime",
    "set_pool_capacity_factor": ".runtime",
    "set_synchronous_checks": ".runtime",
    "set_timeout_seconds": ".runtime",
    "status": ".registry",
    "transform_weights_for_mega_moe": ".bf16",
}

__all__ = ["__version__", *_OWN]

__getattr__, __dir__ = lazy_names(__name__, _OWN, upstream="")
install_upstream_modules()
