# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What an instance's own HTTP API tells by GET, and its side channel does not: how many ranks there are.

vLLM 0.28 to 0.33 answer ``/version``, ``/metrics`` and ``/v1/models`` (this one not without the API key, if there is
one); none of them tells the number of ranks. ``/server_info`` does, where ``VLLM_SERVER_DEV_MODE=1`` offers it. What
does not answer is left out.
"""

import http.client
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

from nixl_telemetry.cli.output import CommandError

_SIZE_LIMIT: Final = 8 * 2**20
_TEXT_LIMIT: Final = 256
_METRICS: Final = re.compile(r"^(?:vllm:cache_config_info|nixl_connector_info)\{.*$", re.MULTILINE)
_FIRST_VERSION: Final = (0, 28)
"""The first vLLM whose side channel is known to understand the query that is sent."""


class HttpApiError(CommandError):
    """The API cannot be used, or says that the instance must not be asked."""


@dataclass(frozen=True)
class HttpAnswers:
    """What the API told."""

    vllm_version: str | None = None
    tp_size: int | None = None
    pp_size: int | None = None
    compat_hash: str | None = None
    """Of an instrumented instance."""
    enforced: bool | None = None
    """Whether an instrumented instance refuses peers with other hashes."""
    factors: dict[str, Any] = field(default_factory=dict)
    """Factors that it probably hashes: what to try where it does not tell them itself."""

    def hints(self) -> dict[str, Any]:
        """Everything that may be a factor."""
        return {**({"vllm_version": self.vllm_version} if self.vllm_version else {}), **self.factors}

    def check_version(self) -> None:
        """Find out whether its side channel understands the query of today.

        Raises:
            HttpApiError: It does not, and the query would end its listener.
        """
        version = re.match(r"(\d+)\.(\d+)\.", self.vllm_version or "")
        if version and (0, 1) < (int(version[1]), int(version[2])) < _FIRST_VERSION:
            raise HttpApiError(
                f"it runs vLLM {self.vllm_version}, and side channels of vLLM before 0.28 may understand another query "
                "only and end for good on this one"
            )


def ask(url: str, timeout: float) -> HttpAnswers:
    """Ask the API, by GET only.

    Raises:
        HttpApiError: The URL is none, or nothing there answers.
    """
    base = _checked(url)
    version = _object(_get(f"{base}/version", timeout, needed=True))
    models = _object(_get(f"{base}/v1/models", timeout))
    metrics = _metrics(_get(f"{base}/metrics", timeout))
    config = _object(_object(_get(f"{base}/server_info?config_format=json", timeout)).get("vllm_config"))
    parallel, cache, model = (_object(config.get(f"{name}_config")) for name in ("parallel", "cache", "model"))
    connector = metrics.get("nixl_connector_info", {})
    listed = models.get("data")
    first = _object(listed[0]) if isinstance(listed, list) and listed else {}
    factors = {
        "model": _text(model.get("model")) or _text(first.get("root")),
        "dtype": _text(model.get("dtype")),
        "cache_dtype": _text(cache.get("cache_dtype"))
        or _text(metrics.get("vllm:cache_config_info", {}).get("cache_dtype")),
        "transfer_mode": _text(connector.get("transfer_mode")),
    }
    return HttpAnswers(
        vllm_version=_text(version.get("version")),
        tp_size=_size(parallel.get("tensor_parallel_size")),
        pp_size=_size(parallel.get("pipeline_parallel_size")),
        compat_hash=_text(connector.get("compat_hash")),
        enforced={"true": True, "false": False}.get(connector.get("handshake_enforced", "")),
        factors={name: value for name, value in factors.items() if value is not None},
    )


def _checked(url: str) -> str:
    try:
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0:
            return parts._replace(query="", fragment="").geturl().rstrip("/")
    except ValueError:  # the port is no number, or a bracket is missing
        pass
    raise HttpApiError(f"{url!r} is no URL of an HTTP API; give http://HOST:PORT")


def _get(url: str, timeout: float, *, needed: bool = False) -> bytes:
    """The body; empty where there is none, which is an error only if it is needed."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as response:  # noqa: S310  the scheme was checked
            body: bytes = response.read(_SIZE_LIMIT + 1)
    except (OSError, ValueError, http.client.HTTPException) as error:
        if not needed:
            return b""
        reason = getattr(error, "reason", None) or error
        status = f"HTTP {error.code} " if isinstance(error, urllib.error.HTTPError) else ""
        raise HttpApiError(f"GET {url}: {status}{reason}") from None
    return body if len(body) <= _SIZE_LIMIT else b""


def _object(value: Any) -> dict[str, Any]:
    """A JSON object, from its text or as it is; empty for anything else."""
    if isinstance(value, bytes):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return {}
    return value if isinstance(value, dict) else {}


def _metrics(body: bytes) -> dict[str, dict[str, str]]:
    """The labels of the two metrics that describe an instance, of one engine each."""
    text = "\n".join(_METRICS.findall(body.decode(errors="replace"))) + "\n"

    def samples() -> Iterator[tuple[str, dict[str, str]]]:
        for family in text_string_to_metric_families(text):
            yield from ((sample.name, sample.labels) for sample in family.samples)

    try:
        return dict(samples())
    except ValueError:
        return {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and 0 < len(value) <= _TEXT_LIMIT else None


def _size(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
