# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Disaggregated completions, done as a router does them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nixl_telemetry.testbed.client import Completion, complete
from nixl_telemetry.testbed.server_config import CONSUMER, PRODUCER, ServerConfig
from nixl_telemetry.testbed.vllm_server import START_SECONDS, Progress, VllmServer, running

REMOTE_DECODE: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What tells a prefill instance to keep the KV blocks for somebody else."""


@dataclass(frozen=True)
class DisaggregatedCompletion:
    """Both halves of one request.

    Attributes:
        request_id: What both instances were told as ``X-Request-Id``.
        prefill: The prefill instance's answer, with the ``kv_transfer_params`` that were passed on.
        decode: The decode instance's answer, which is the client's.
    """

    request_id: str
    prefill: Completion
    decode: Completion

    @property
    def text(self) -> str:
        """The generated text."""
        return self.decode.text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The generated tokens."""
        return self.decode.token_ids


def disaggregated_completion(
    prefill: VllmServer | str,
    decode: VllmServer | str,
    prompt: str | Sequence[int],
    max_tokens: int = 8,
    *,
    request_id: str | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    **body: Any,
) -> DisaggregatedCompletion:
    """Prefills on one instance and decodes on another.

    Args:
        prefill: A server or its base URL.
        decode: A server or its base URL.
        prompt: Text or token ids.
        max_tokens: How many tokens to generate.
        request_id: Sent to both, because push matches its two sides by it; by default a new one.
        headers: More headers for both, for example ``traceparent``.
        timeout: Seconds without any byte from a server.
        **body: More members of both JSON bodies.

    Raises:
        HttpStatusError: One of the two refused or failed; its ``url`` says which.
    """
    request_id = request_id or str(uuid.uuid4())
    sent = {**(headers or {}), "X-Request-Id": request_id}
    first = complete(
        _url(prefill), prompt, 1, headers=sent, timeout=timeout, **body, kv_transfer_params=dict(REMOTE_DECODE)
    )
    handed_over = {} if first.kv_transfer_params is None else {"kv_transfer_params": first.kv_transfer_params}
    second = complete(_url(decode), prompt, max_tokens, headers=sent, timeout=timeout, **body, **handed_over)
    return DisaggregatedCompletion(request_id, first, second)


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode instance."""

    prefill: VllmServer
    decode: VllmServer

    def complete(self, prompt: str | Sequence[int], max_tokens: int = 8, **options: Any) -> DisaggregatedCompletion:
        """Sends one request through both; see ``disaggregated_completion``."""
        return disaggregated_completion(self.prefill, self.decode, prompt, max_tokens, **options)


@contextmanager
def running_pair(
    work_dir: Path,
    config: ServerConfig,
    *,
    decode: ServerConfig | None = None,
    timeout: float = START_SECONDS,
    progress: Progress | None = None,
) -> Iterator[Pair]:
    """Runs a prefill and a decode instance.

    Args:
        work_dir: Existing folder for the logs ``prefill.log`` and ``decode.log``.
        config: Of both; the roles are set here unless ``kv_transfer_config`` overrides them.
        decode: Of the decode instance, when it differs.
        timeout: Seconds each may take to start.
        progress: Told about the wait.
    """
    pair = Pair(
        VllmServer("prefill", replace(config, role=PRODUCER), work_dir),
        VllmServer("decode", replace(decode or config, role=CONSUMER), work_dir),
    )
    with running((pair.prefill, pair.decode), timeout=timeout, progress=progress):
        yield pair


def _url(server: VllmServer | str) -> str:
    return server if isinstance(server, str) else server.url
