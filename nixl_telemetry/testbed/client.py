# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""One completion request, and what came back."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from nixl_telemetry.testbed.errors import HttpStatusError

MODEL_NAME = "tiny"


@dataclass(frozen=True)
class Completion:
    """The answer to a completion request.

    Attributes:
        text: The generated text.
        token_ids: The generated tokens; empty when the server does not return them.
        finish_reason: Why generation ended.
        kv_transfer_params: What a prefill instance wants handed to the decode instance.
        seconds: From sending the request to having read the answer.
        raw: The whole JSON body.
        headers: The response headers, names in lower case.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    kv_transfer_params: dict[str, Any] | None
    seconds: float
    raw: dict[str, Any]
    headers: dict[str, str]


def complete(
    base_url: str,
    prompt: str | Sequence[int],
    max_tokens: int = 8,
    *,
    headers: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    **body: Any,
) -> Completion:
    """Asks *base_url* for a greedy completion of exactly *max_tokens* tokens.

    Args:
        base_url: A vLLM server or a router.
        prompt: Text or token ids.
        max_tokens: How many tokens to generate; the end-of-text token does not end it.
        headers: Additional request headers.
        timeout: Seconds without any byte from the server.
        **body: More members of the JSON body, overriding the defaults.

    Raises:
        HttpStatusError: The server refused or failed.
    """
    url = f"{base_url}/v1/completions"
    request = {
        "model": MODEL_NAME,
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **body,
    }
    begin = time.perf_counter()
    response = httpx.post(url, json=request, headers=dict(headers or {}), timeout=timeout, trust_env=False)
    seconds = time.perf_counter() - begin
    if not response.is_success:
        raise HttpStatusError(url, response.status_code, response.text)
    raw: dict[str, Any] = response.json()
    choice = raw["choices"][0]
    return Completion(
        text=choice["text"],
        token_ids=tuple(choice.get("token_ids") or ()),
        finish_reason=choice.get("finish_reason"),
        kv_transfer_params=raw.get("kv_transfer_params"),
        seconds=seconds,
        raw=raw,
        headers=dict(response.headers),
    )


def get_text(url: str, timeout: float = 10.0) -> str:
    """Returns the body of a GET.

    Raises:
        HttpStatusError: The server refused or failed.
    """
    response = httpx.get(url, timeout=timeout, trust_env=False)
    if not response.is_success:
        raise HttpStatusError(url, response.status_code, response.text)
    return response.text
