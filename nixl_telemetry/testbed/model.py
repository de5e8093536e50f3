# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""A tiny Llama with fixed random weights, and a tokenizer that has one token per word."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SPECIAL = ("<s>", "</s>", "<unk>")
_SEED = 20251


@dataclass(frozen=True)
class TinyModel:
    """The shape of the model; every field but *max_tokens* is a factor of the compatibility hash or feeds one."""

    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 64
    dtype: str = "bfloat16"
    vocab_size: int = 512
    max_tokens: int = 8192

    @property
    def hidden_size(self) -> int:
        """The width of the residual stream."""
        return self.num_heads * self.head_dim

    def write(self, folder: Path) -> Path:
        """Writes config, tokenizer and weights into *folder*, the same bytes every time.

        The files are written by hand: neither torch nor transformers is imported, and every vLLM
        version can read them. Real weights, not ``--load-format dummy``, because dummy weights depend
        on the tensor-parallel size and on the version, and then so do the tokens.

        Args:
            folder: Made when missing.

        Returns:
            *folder*.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in (
            ("config.json", self._config()),
            ("tokenizer.json", self._tokenizer()),
            ("tokenizer_config.json", self._tokenizer_config()),
            ("generation_config.json", {"bos_token_id": 0, "eos_token_id": 1}),
        ):
            (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        self._write_weights(folder / "model.safetensors")
        return folder

    def prompt(self, tokens: int, seed: int = 0) -> str:
        """Returns *tokens* random words, one token each, the same for the same *seed*."""
        words = random.Random(seed)
        return " ".join(f"w{words.randrange(self.vocab_size - len(_SPECIAL))}" for _ in range(tokens))

    def _config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": 2 * self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_tokens,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "bos_token_id": 0,
            "eos_token_id": 1,
            "tie_word_embeddings": False,
            "torch_dtype": self.dtype,
        }

    def _tokenizer(self) -> dict[str, Any]:
        words = [*_SPECIAL, *(f"w{number}" for number in range(self.vocab_size - len(_SPECIAL)))]
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": number, "content": word, **flags} for number, word in enumerate(_SPECIAL)],
            "normalizer": None,
            "pre_tokenizer": {"type": "Whitespace"},
            "post_processor": None,
            "decoder": None,
            "model": {
                "type": "WordLevel",
                "vocab": {word: number for number, word in enumerate(words)},
                "unk_token": "<unk>",
            },
        }

    def _tokenizer_config(self) -> dict[str, Any]:
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "model_max_length": self.max_tokens,
            "clean_up_tokenization_spaces": False,
        }

    def _tensors(self) -> Iterator[tuple[str, tuple[int, ...], float]]:
        """Yields name, shape and standard deviation; a deviation of 0 stands for a vector of ones.

        Attention is made sharp on purpose: with the usual small deviations it averages over the whole
        prompt, and wrong KV blocks would not show in the tokens.
        """
        width, keys = self.hidden_size, self.num_kv_heads * self.head_dim
        sharp, plain = 2 * width**-0.5, width**-0.5
        yield "model.embed_tokens.weight", (self.vocab_size, width), 1.0
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.input_layernorm.weight", (width,), 0.0
            yield f"{prefix}.self_attn.q_proj.weight", (width, width), sharp
            yield f"{prefix}.self_attn.k_proj.weight", (keys, width), sharp
            yield f"{prefix}.self_attn.v_proj.weight", (keys, width), sharp
            yield f"{prefix}.self_attn.o_proj.weight", (width, width), sharp
            yield f"{prefix}.post_attention_layernorm.weight", (width,), 0.0
            yield f"{prefix}.mlp.gate_proj.weight", (2 * width, width), plain
            yield f"{prefix}.mlp.up_proj.weight", (2 * width, width), plain
            yield f"{prefix}.mlp.down_proj.weight", (width, 2 * width), plain
        yield "model.norm.weight", (width,), 0.0
        yield "lm_head.weight", (self.vocab_size, width), plain

    def _write_weights(self, path: Path) -> None:
        import numpy

        generator = numpy.random.default_rng(_SEED)
        header: dict[str, Any] = {}
        chunks: list[bytes] = []
        offset = 0
        for name, shape, deviation in self._tensors():
            values = (
                generator.standard_normal(shape, dtype=numpy.float32) * deviation if deviation else numpy.ones(shape)
            )
            # bfloat16 is the upper half of a float32; numpy has no such type.
            data = (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
            offset += len(data)
            chunks.append(data)
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + b"".join(chunks))
