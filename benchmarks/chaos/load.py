# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""A steady, bounded load, and what became of each request."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import httpx

from benchmarks.clients import new_client
from benchmarks.load import Request
from nixl_telemetry.testbed import MODEL_NAME, TinyModel
from nixl_telemetry.testbed.pair import REMOTE_DECODE

CLIENTS: Final = 2
PACE_SECONDS: Final = 0.5
LOOK_SECONDS: Final = 5
"""How often the router looks which instances are up."""
"""From one request of a client to its next one, unless the answer takes longer: failing at once must not mean more
requests."""
REQUEST_SECONDS: Final = 20.0
REQUEST_LIMIT: Final = 1500
"""Of one load, whatever happens."""
LENGTHS: Final = (64, 600)
"""Tokens of a prompt."""
MAX_TOKENS: Final = (4, 16)
_PROMPTS: Final = 12
_PATH: Final = "/v1/completions"

SERVED: Final = "served"
WRONG: Final = "wrong tokens"
"""An answer came, and it is not the one that the prefill instance gives alone."""

Ask = Callable[[httpx.Client, Request], tuple[int, ...]]
"""Sends a request; the tokens of the answer. Raises what ``httpx`` raises where it fails."""


@dataclass(frozen=True)
class Outcome:
    """What became of one request. Times are of the monotonic clock."""

    start: float
    end: float
    result: str
    """``SERVED``, ``WRONG``, or how it failed: an HTTP status, or what happened to the connection."""


@dataclass(frozen=True)
class Tally:
    """Requests by what became of them."""

    sent: int
    served: int
    failures: Mapping[str, int]
    """Those that were not served, by how they failed."""


@dataclass(frozen=True)
class Phases:
    """A load, cut where the fault began and ended."""

    before: Tally
    during: Tally
    """What was under way at any time during the fault."""
    after: Tally


class Load:
    """Clients that ask one question after the other, at a steady pace, from ``with`` to its end.

    Args:
        ask: How a question is asked.
        questions: Asked in turns.
        expected: The right answer to each.
    """

    def __init__(
        self, ask: Ask, questions: Sequence[Request], expected: Mapping[Request, tuple[int, ...]] | None = None
    ) -> None:
        self._ask = ask
        self._questions = questions
        self._expected = expected or {}
        self._asked = 0
        self._outcomes: list[Outcome] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._serve, args=(number * PACE_SECONDS / CLIENTS,), daemon=True)
            for number in range(CLIENTS)
        ]

    @property
    def outcomes(self) -> list[Outcome]:
        """What became of the requests so far, in the order in which they ended."""
        with self._lock:
            return list(self._outcomes)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _serve(self, delay: float) -> None:
        due = time.monotonic() + delay
        with new_client(REQUEST_SECONDS) as client:
            while not self._ended.wait(max(0.0, due - time.monotonic())):
                with self._lock:
                    number, self._asked = self._asked, self._asked + 1
                if number >= REQUEST_LIMIT:
                    return
                question = self._questions[number % len(self._questions)]
                start = time.monotonic()
                due = start + PACE_SECONDS
                result = self._result(client, question)
                with self._lock:
                    self._outcomes.append(Outcome(start, time.monotonic(), result))

    def _result(self, client: httpx.Client, question: Request) -> str:
        try:
            tokens = self._ask(client, question)
        except httpx.HTTPStatusError as error:
            return str(error.response.status_code)
        except httpx.TimeoutException:
            return "timeout"
        except httpx.ConnectError:
            return "connection refused"
        except httpx.TransportError:
            return "connection lost"
        except (ValueError, LookupError, TypeError):
            return "no answer in the answer"
        return SERVED if self._expected.get(question, tokens) == tokens else WRONG


def questions(model: TinyModel) -> list[Request]:
    """The same ones for every pair."""
    drawing = random.Random(0)  # noqa: S311 (no secret)
    return [
        Request(model.prompt(drawing.randint(*LENGTHS), seed=number), drawing.randint(*MAX_TOKENS))
        for number in range(_PROMPTS)
    ]


def asking(url: str) -> Ask:
    """Ask a router, or one server for all."""
    return lambda client, request: _tokens(_post(client, url, request.prompt, request.max_tokens))


def asking_past_the_router(prefill: str, decode: str, side_channel_port: int) -> Ask:
    """Ask both instances as a router does, and tell the second one another side channel of the first one.

    Args:
        prefill: The prefill instance.
        decode: The decode instance.
        side_channel_port: Where the decode instance finds the prefill instance's side channel.
    """

    def ask(client: httpx.Client, request: Request) -> tuple[int, ...]:
        # Push matches both sides by it.
        name = f"chaos-{random.getrandbits(64):016x}"
        prefilled = _post(client, prefill, request.prompt, 1, name, kv_transfer_params=dict(REMOTE_DECODE))
        params = {**prefilled["kv_transfer_params"], "remote_port": side_channel_port}
        return _tokens(_post(client, decode, request.prompt, request.max_tokens, name, kv_transfer_params=params))

    return ask


def phases(outcomes: Iterable[Outcome], begin: float, end: float) -> Phases:
    """Cut a load at the begin and the end of a fault."""
    parts: tuple[list[Outcome], list[Outcome], list[Outcome]] = ([], [], [])
    for outcome in outcomes:
        parts[0 if outcome.end < begin else 2 if outcome.start >= end else 1].append(outcome)
    return Phases(*map(tally, parts))


def tally(outcomes: Iterable[Outcome]) -> Tally:
    """Count requests by what became of them."""
    counted = Counter(outcome.result for outcome in outcomes)
    served = counted.pop(SERVED, 0)
    return Tally(served + counted.total(), served, dict(sorted(counted.items())))


def recovery_seconds(outcomes: Iterable[Outcome], end: float, needed: int, limit: float) -> float | None:
    """How long after the end of a fault requests were served again; ``None`` if not within the limit.

    Args:
        outcomes: In the order in which they ended.
        end: Of the fault. What was asked before does not count.
        needed: So many have to be served one after the other; the time is that of the first one's answer.
        limit: Seconds in which all of them are to be served.
    """
    streak: list[Outcome] = []
    for outcome in _asked_after(outcomes, end):
        streak = [*streak, outcome] if outcome.result == SERVED else []
        if len(streak) == needed:
            return streak[0].end - end if outcome.end - end <= limit else None
    return None


def _asked_after(outcomes: Iterable[Outcome], moment: float) -> Iterator[Outcome]:
    return (outcome for outcome in outcomes if outcome.start >= moment)


def _post(
    client: httpx.Client, url: str, prompt: str, max_tokens: int, name: str | None = None, **more: Any
) -> dict[str, Any]:
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }
    response = client.post(url + _PATH, json=body, headers={} if name is None else {"X-Request-Id": name})
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def _tokens(answer: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(answer["choices"][0]["token_ids"])
