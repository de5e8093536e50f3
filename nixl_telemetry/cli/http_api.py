# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""An instance's own HTTP API, and what it tells by GET and the side channel does not: how many ranks there are.

vLLM 0.28 to 0.33 answer ``/version``, ``/metrics`` and ``/v1/models`` (this one not without the API key, if there is
one); none of them tells the number of ranks. ``/server_info`` does, where ``VLLM_SERVER_DEV_MODE=1`` offers it. What
does not answer is left out.

What comes back is input from a stranger: bounded in size and in time.
"""

import contextlib
import http.client
import json
import re
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, Self

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from nixl_telemetry.cli.output import CommandError

_SIZE_LIMIT: Final = 8 * 2**20
_LINE_LIMIT: Final = 4096
"""Characters of a sample: the parser's time grows with their square, where they are chosen for that."""
_SAMPLES_LIMIT: Final = 20_000
"""Samples that are parsed: some of each of a thousand engines."""
_TEXT_LIMIT: Final = 256
_TOO_MANY_REQUESTS: Final = 429
_SERVER_ERRORS: Final = 500
_DESCRIPTIONS: Final = ("vllm:cache_config_info", "nixl_connector_info")
_FIRST_VERSION: Final = (0, 28)
"""The first vLLM whose side channel is known to understand the query that is sent."""


class HttpApiError(CommandError):
    """The API cannot be used, or says that the instance must not be asked.

    Args:
        problem: What is wrong.
        refused: Whether nothing listens there.
        may_pass: Whether it may answer if it is asked again.
    """

    def __init__(self, problem: str, *, refused: bool = False, may_pass: bool = False) -> None:
        super().__init__(problem)
        self.refused = refused
        self.may_pass = may_pass


@dataclass(frozen=True)
class HttpApi:
    """Where an instance is asked, and how patiently."""

    url: str
    """Without a slash at the end."""
    timeout: float
    """Seconds for a connection, and again for each answer."""
    api_key: str | None = field(default=None, repr=False)
    """For what vLLM does not answer without one."""

    @classmethod
    def parse(cls, url: str, timeout: float, api_key: str | None = None) -> Self:
        """The API at a URL, or at HOST:PORT.

        Raises:
            HttpApiError: It is neither, or the key cannot be sent.
        """
        # vLLM compares it as it is, and files of secrets end with a new line.
        key = (api_key or "").strip()
        if not re.fullmatch("[!-~]*", key):
            raise HttpApiError("the API key has characters that no header can carry; give the one of the server")
        return cls(_checked(url), timeout, key or None)

    def get(self, path: str) -> bytes:
        """The body of an answer.

        Raises:
            HttpApiError: There is none.
        """
        return self._fetch(self._request(path))

    def model(self) -> str:
        """The name of the first model that it serves.

        Raises:
            HttpApiError: It does not tell one.
        """
        path = "/v1/models"
        name = _text(_first_model(self._fetch(self._request(path, secret=True))).get("id"))
        if name is None:
            raise HttpApiError(f"GET {self.url}{path}: it names no model")
        return name

    def complete(self, model: str, rank: int | None = None) -> None:
        """Ask for one token, for which an engine takes a step.

        Args:
            model: Its name.
            rank: Which of several engines is asked.

        Raises:
            HttpApiError: It did not answer.
        """
        request = self._request("/v1/completions", secret=True)
        request.data = json.dumps({"model": model, "prompt": ".", "max_tokens": 1}).encode()
        request.add_header("Content-Type", "application/json")
        if rank is not None:
            request.add_header("X-data-parallel-rank", str(rank))
        self._fetch(request)

    def _request(self, path: str, *, secret: bool = False) -> urllib.request.Request:
        request = urllib.request.Request(f"{self.url}{path}")  # noqa: S310  the scheme was checked
        if secret and self.api_key:
            # Not one that is sent along where an answer redirects to.
            request.add_unredirected_header("Authorization", f"Bearer {self.api_key}")
        return request

    def _fetch(self, request: urllib.request.Request) -> bytes:
        asked = f"{request.get_method()} {request.full_url}"
        try:
            body = self._within(request)
        except urllib.error.HTTPError as error:
            error.close()
            busy = error.code == _TOO_MANY_REQUESTS or error.code >= _SERVER_ERRORS
            raise HttpApiError(f"{asked}: HTTP {error.code} {_short(error.reason)}", may_pass=busy) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            refused = isinstance(reason, ConnectionRefusedError)
            cut = isinstance(reason, TimeoutError | ConnectionError | http.client.IncompleteRead)
            text = "no answer in time" if isinstance(reason, TimeoutError) else _short(reason)
            raise HttpApiError(f"{asked}: {text}", refused=refused, may_pass=cut and not refused) from None
        if len(body) > _SIZE_LIMIT:
            raise HttpApiError(f"{asked}: the answer is longer than {_SIZE_LIMIT} bytes")
        return body

    def _within(self, request: urllib.request.Request) -> bytes:
        """The body, within twice the timeout: a socket's own begins anew with each packet, and names have none."""
        answer: Future[bytes] = Future()

        def ask() -> None:
            try:
                answer.set_result(_read(request, self.timeout))
            except Exception as error:
                answer.set_exception(error)

        # No pool, whose threads Python waits for at its end.
        threading.Thread(target=ask, name="http-api", daemon=True).start()
        return answer.result(2 * self.timeout)


def _read(request: urllib.request.Request, timeout: float) -> bytes:
    with urllib.request.urlopen(request, timeout=timeout) as response:  # noqa: S310  the scheme was checked
        body: bytes = response.read(_SIZE_LIMIT + 1)
        if response.length and len(body) <= _SIZE_LIMIT:
            # It ended early, and what is there would pass for the whole.
            raise http.client.IncompleteRead(body, response.length)
        return body


def samples(body: bytes, names: Iterable[str]) -> list[Sample]:
    """The samples of some metrics in the text that Prometheus reads; the rest is not parsed.

    Raises:
        ValueError: One of them cannot be read.
    """
    pattern = rf"^(?:{'|'.join(map(re.escape, names))})(?=[{{ \t]).*$"
    lines = re.findall(pattern, body.decode(errors="replace"), re.MULTILINE)
    if len(lines) > _SAMPLES_LIMIT or any(len(line) > _LINE_LIMIT for line in lines):
        raise ValueError("there are too many samples, or too long ones")
    families = text_string_to_metric_families("\n".join([*lines, ""]))
    return [sample for family in families for sample in family.samples]


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
    api = HttpApi.parse(url, timeout)
    version = _object(api.get("/version"))
    first = _first_model(_get(api, "/v1/models"))
    metrics = _metrics(_get(api, "/metrics"))
    config = _object(_object(_get(api, "/server_info?config_format=json")).get("vllm_config"))
    parallel, cache, model = (_object(config.get(f"{name}_config")) for name in ("parallel", "cache", "model"))
    connector = metrics.get("nixl_connector_info", {})
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


def _get(api: HttpApi, path: str) -> bytes:
    """The body; empty where there is none."""
    with contextlib.suppress(HttpApiError):
        return api.get(path)
    return b""


def _short(reason: object) -> str:
    return str(reason)[:_TEXT_LIMIT]


def _first_model(body: bytes) -> dict[str, Any]:
    """The first of the models that are listed; empty where there is none."""
    listed = _object(body).get("data")
    return _object(listed[0]) if isinstance(listed, list) and listed else {}


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
    try:
        return {sample.name: sample.labels for sample in samples(body, _DESCRIPTIONS)}
    except ValueError:
        return {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and 0 < len(value) <= _TEXT_LIMIT else None


def _size(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
