"""`deep_gemm.mega` as clients import it; what is not listed here comes from an installed `deep_gemm`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._dropin import lazy_names

if TYPE_CHECKING:
    from ..bf16 import bf16_mega_moe as bf16_mega_moe
    from ..bf16 import bf16_mega_moe_backward as bf16_mega_moe_backward
    from ..bf16 import transform_weights_for_mega_moe as transform_weights_for_mega_moe
    from ..symm import SymmBuffer as SymmBuffer
    from ..symm import get_symm_buffer_for_mega_moe as get_symm_buffer_for_mega_moe

_OWN = {
    "SymmBuffer": ".symm",
    "bf16_mega_moe": ".bf16",
    "bf16_mega_moe_backward": ".bf16",
    "get_symm_buffer_for_mega_moe": ".symm",
    "transform_weights_for_mega_moe": ".bf16",
}

__all__ = list(_OWN)

__getattr__, __dir__ = lazy_names(__name__, _OWN, upstream="mega")
