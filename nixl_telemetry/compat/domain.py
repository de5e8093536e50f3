# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The values that each factor can have, as far as they are known beforehand or were learnt from peers."""

import json
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Final

from nixl_telemetry.compat.factors import FACTOR_NAMES, Factors
from nixl_telemetry.compat.releases import RELEASES, Release

_LEARNT_LIMIT: Final = 64
"""Values that are remembered of each factor; the oldest goes first."""
_LEARNT_SIZE: Final = 4096
"""Characters of JSON; a longer value is not remembered."""

# The likelier, the earlier. Sources: CacheDType in vllm/config/cache.py and get_name() of the attention backends, vLLM
# 0.13 to 0.33; head counts, head sizes and depths of published models.
_KNOWN: Final[dict[str, tuple[Any, ...]]] = {
    "transfer_mode": ("pull", "push"),
    "is_hma_enabled": (True, False),
    "cross_layers_blocks": (False, True),
    "dtype": ("torch.bfloat16", "torch.float16", "torch.float32"),
    "cache_dtype": (
        *("auto", "fp8", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla", "nvfp4"),
        *("nvfp4_ds_mla", "nvfp4_4over6", "int8_per_token_head", "int4_per_token_head", "fp8_per_token_head"),
        *("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"),
        *("ultraquant_4bit", "octave_k3v4", "octave_k3v3", "octave_k3v3_compact"),
    ),
    "attn_backend_name": (
        *("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLASH_ATTN_MLA", "FLASHMLA", "FLASHINFER_MLA", "CUTLASS_MLA"),
        *("TRITON_MLA", "FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE", "FLASH_ATTN_MLA_SPARSE", "CPU_ATTN", "ROCM_ATTN"),
        *("ROCM_AITER_FA", "ROCM_AITER_MLA", "ROCM_AITER_MLA_SPARSE", "ROCM_AITER_UNIFIED_ATTN", "AITER_TRITON_MLA"),
        *("FLEX_ATTENTION", "FLASH_ATTN_DIFFKV", "TRITON_ATTN_DIFFKV", "TOKENSPEED_MLA", "TRTLLM_RAGGED", "HPC_ATTN"),
        *("TURBOQUANT", "ULTRAQUANT", "B12X", "XPU_MLA_SPARSE", "CPU_MLA", "CPU_SDPA_MLA", "AMX_MLA", "TREE_ATTN"),
        *("MAMBA1_ATTN", "MAMBA2_ATTN", "SHORT_CONV_ATTN", "LINEAR_ATTN", "GDN_ATTN", "BAILING_LINEAR_ATTN"),
        *("DEEPSEEK_SPARSE_SWA", "DEEPSEEK_V32_INDEXER", "DEEPSEEK_V4_INDEXER", "DEEPSEEK_V41_INDEXER"),
        *("FLASHINFER_MLA_SPARSE_SM90", "FLASHINFER_MLA_SPARSE_SM120", "FLASH_ATTN_MLA_SPARSE_FA4"),
        *("ROCM_SEGMENTED_ATTN", "ROCM_OCTAVE", "ZEN_CPU_SDPA_MLA", "PLE_SHORT_CONV_ATTN", "KPOOL_TAIL"),
    ),
    "num_kv_heads": (
        8,
        4,
        1,
        2,
        16,
        32,
        *(3, 5, 6, 7, 10, 12, 14, 20, 24, 28, 36, 40, 48, 52, 56, 64, 71, 80, 96, 128),
    ),
    "head_size": (128, 64, 576, 256, 96, 80, *(16, 32, 48, 72, 112, 120, 160, 192, 288, 512)),
    "num_hidden_layers": tuple(range(1, 129)),
    "speculative_config": (None,),
}


class Domain:
    """Known values by factor and known releases, and those learnt from the peers that were met. Bounded."""

    def __init__(self) -> None:
        self._values: dict[str, _Learnt] = {}
        self._releases = _Learnt()
        self.generation = 0
        """Grows with each value that was learnt."""

    def values(self, factor: str) -> list[Any]:
        """The values of a factor, those that peers have first."""
        learnt = self._values.get(factor, _Learnt())
        return [*learnt, *(value for value in _KNOWN.get(factor, ()) if value not in learnt)]

    def releases(self) -> list[Release]:
        """The builds of vLLM, those that peers run first."""
        return [*self._releases, *(release for release in RELEASES if release not in self._releases)]

    def learn(self, factors: Factors) -> None:
        """Remember the values of an instance."""
        for factor in (*_KNOWN, "model"):
            if factor in factors:
                self.generation += self._values.setdefault(factor, _Learnt()).add(factors[factor])
        match factors:
            case {"vllm_version": str(version), "nixl_connector_version": int(number)}:
                names = tuple(sorted(name for name in factors if name in FACTOR_NAMES))
                self.generation += self._releases.add(Release(version, number, names))


class _Learnt:
    """Values that are told apart as JSON tells them apart, newest first."""

    def __init__(self) -> None:
        self._values: OrderedDict[str, Any] = OrderedDict()

    def __iter__(self) -> Iterator[Any]:
        yield from reversed(list(self._values.values()))

    def __contains__(self, value: object) -> bool:
        return json.dumps(value, sort_keys=True) in self._values

    def add(self, value: Any) -> bool:
        """Whether it is new."""
        text = json.dumps(value, sort_keys=True)
        if text in self._values or len(text) > _LEARNT_SIZE:
            return False
        self._values[text] = value
        if len(self._values) > _LEARNT_LIMIT:
            self._values.popitem(last=False)
        return True
