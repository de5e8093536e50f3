# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Requests through a prefill and a decode instance, as a router sends them, and what a client sees of them."""

import itertools
import json
import random
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx

from benchmarks.clients import new_client
from nixl_telemetry.testbed import MODEL_NAME, Pair, TinyModel
from nixl_telemetry.testbed.pair import REMOTE_DECODE

_TIMEOUT_SECONDS: Final = 120.0
_PATH: Final = "/v1/completions"


@dataclass(frozen=True)
class Request:
    """One request."""

    prompt: str
    max_tokens: int


@dataclass(frozen=True)
class Timing:
    """What the client saw. Seconds."""

    first_token: float
    """From sending the request to the prefill instance to the first token of the decode instance."""
    between: tuple[float, ...]
    """From each token to the next."""
    total: float


def requests(model: TinyModel, count: int, lengths: tuple[int, int], max_tokens: int, seed: int) -> list[Request]:
    """Requests whose prompts are of random lengths between two, the same for the same seed."""
    drawing = random.Random(seed)  # noqa: S311 (no secret)
    return [
        Request(model.prompt(drawing.randint(*lengths), drawing.randrange(2**32)), max_tokens) for _ in range(count)
    ]


def send(client: httpx.Client, pair: Pair, request: Request) -> Timing:
    """One request through both instances, sampled, with the answer streamed."""
    name = str(uuid.uuid4())
    trace = f"00-{uuid.uuid4().hex}-{uuid.uuid4().hex[:16]}-01"
    headers = {"X-Request-Id": name, "traceparent": trace}
    body = {"model": MODEL_NAME, "prompt": request.prompt, "temperature": 0, "ignore_eos": True}
    start = time.perf_counter()
    prefilled = client.post(
        pair.prefill.url + _PATH,
        json={**body, "max_tokens": 1, "kv_transfer_params": dict(REMOTE_DECODE)},
        headers=headers,
    )
    prefilled.raise_for_status()
    handed_over = {"kv_transfer_params": prefilled.json()["kv_transfer_params"]}
    full = {**body, "max_tokens": request.max_tokens, "stream": True, "return_token_ids": True, **handed_over}
    with client.stream("POST", pair.decode.url + _PATH, json=full, headers=headers) as response:
        response.raise_for_status()
        moments = list(_token_moments(response))
    between = tuple(after - before for before, after in itertools.pairwise(moments))
    return Timing(moments[0] - start, between, moments[-1] - start)


def run(pair: Pair, work: Sequence[Request], clients: int) -> tuple[list[Timing], float]:
    """All requests, by clients that each send one after the other; the timings, and the seconds that all took."""
    waiting = iter(list(work))
    lock = threading.Lock()
    timings: list[Timing] = []
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            with new_client(_TIMEOUT_SECONDS) as client:
                while not failures:
                    with lock:
                        request = next(waiting, None)
                    if request is None:
                        return
                    timing = send(client, pair, request)
                    with lock:
                        timings.append(timing)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=serve) for _ in range(clients)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return timings, time.perf_counter() - start


def _token_moments(response: httpx.Response) -> Iterator[float]:
    """When each token came; those of one message came together."""
    for line in response.iter_lines():
        data = line.removeprefix("data: ")
        if data in (line, "[DONE]"):
            continue
        now = time.perf_counter()
        choices: list[dict[str, Any]] = json.loads(data)["choices"]
        for _ in (choices[0].get("token_ids") or ()) if choices else ():
            yield now
