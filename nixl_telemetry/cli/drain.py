# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""``nixl-telemetry drain``: waits until an instance can be stopped without taking KV from anybody."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any, Final

import typer

from nixl_telemetry.cli import holdings, options
from nixl_telemetry.cli.holdings import Holdings, HoldingsError
from nixl_telemetry.cli.http_api import HttpApi, HttpApiError
from nixl_telemetry.cli.output import CommandError, Exit, Printer, failing, print_json

FORMAT: Final = "nixl_telemetry.drain/1"
_PATIENCE: Final = 5.0
"""Seconds for a connection, and again for each answer: an API server that reads long prompts keeps others waiting."""
_LEAST_PATIENCE: Final = 0.5
"""Also for the last look: what is not known because there was no time to ask would be no news."""
_NUDGE_SECONDS: Final = 5.0
"""From one time that an idle engine is asked for a token to the next."""
_REGISTRATION_SECONDS: Final = 10.0
"""How long registrations alone are waited for: vLLM keeps those whose prefill does not come for ever."""

Tell = Callable[[str, str], None]
"""Takes the moment, and what is going on then."""


class Verdict(StrEnum):
    """What an instance was when the wait was over."""

    DRAINED = "drained"
    HELD = "held"


@dataclass(frozen=True)
class Outcome:
    """How the wait ended."""

    verdict: Verdict
    seconds: float
    last: Holdings
    """What was held when it was last seen."""
    ended: bool = False
    """Whether the instance ended by itself."""


def drain(
    source: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The API server of the instance, or its URL.")],
    timeout: Annotated[
        float, typer.Option(min=0.01, max=86_400, metavar="SECONDS", help="How long to wait, in all.")
    ] = 60,
    interval: Annotated[
        float, typer.Option(min=0.01, max=3600, metavar="SECONDS", help="How long from one look to the next.")
    ] = 1,
    nudge: Annotated[
        bool,
        typer.Option(
            "--nudge/--no-nudge",
            help="Ask an idle engine that holds something for a token: what became of it is told with a step only.",
        ),
    ] = True,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="VLLM_API_KEY",
            metavar="KEY",
            help="The API key of the server, for the token; better in the variable, which other users cannot see.",
            show_default=False,
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Wait until an instance can be stopped: no requests, no transfers, no KV that a peer has not fetched.

    For a preStop hook. It keeps no traffic away: whatever sends requests
    has to stop before.

    Exits with 0 if nothing is held, with 1 if something still was when
    the time was over or the instance ended, and with 2 if it is not
    known.
    """
    with failing():
        wait = Wait(HttpApi.parse(source, _PATIENCE, api_key), timeout, interval, nudge)
        out = Printer()
        with _interruptible(wait), contextlib.nullcontext(_silence) if as_json else out.progress() as tell:
            outcome = wait.run(tell)
        if as_json:
            print_json(_as_json(wait, outcome))
        else:
            _show(out, wait, outcome)
    raise typer.Exit(Exit.FINE if outcome.verdict is Verdict.DRAINED else Exit.INCOMPATIBLE)


class Wait:
    """Looks at an instance until nothing is held, or the time is over.

    Args:
        api: Its API server.
        timeout: Seconds in all.
        interval: Seconds from one look to the next.
        nudge: Whether to ask idle engines for a token.

    Raises:
        CommandError: There is no time for two looks.
    """

    def __init__(self, api: HttpApi, timeout: float, interval: float, nudge: bool) -> None:
        if timeout <= interval:
            raise CommandError(
                f"--timeout {timeout:g} leaves no time for two looks with --interval {interval:g}; give more or less"
            )
        self.api: Final = api
        self.timeout: Final = timeout
        self.nudges = 0
        """How often an engine was asked for a token."""
        self.notes: Final[list[str]] = []
        self._interval = interval
        self._nudge = nudge
        self._started = time.monotonic()
        self._last: Holdings | None = None
        self._model: str | None = None
        self._next_nudge = 0.0
        self._alone: tuple[Holdings, float] | None = None

    @property
    def seconds(self) -> float:
        """How long it lasts already."""
        return time.monotonic() - self._started

    def run(self, tell: Tell) -> Outcome:
        """Wait.

        Args:
            tell: Is told what is going on.

        Raises:
            HttpApiError: What is held is not known: from the start, or when the time is over.
        """
        # What the look before this one found, or why it found nothing.
        before: Holdings | HttpApiError | None = None
        while True:
            found = self._look()
            if self._last is None and isinstance(found, HttpApiError) and not found.may_pass:
                raise found
            tell(f"{self.seconds:6.1f} s", str(found))
            if isinstance(found, HttpApiError):
                if self._last is not None and found.refused and _refused(before):
                    verdict = Verdict.HELD if self._last.anything else Verdict.DRAINED
                    return Outcome(verdict, self.seconds, self._last, ended=True)
            else:
                self._last = found
                # A request may be between its prefill, which was counted, and its lease, which will be.
                nothing = not found.anything and isinstance(before, Holdings) and not before.anything
                if nothing or self._abandoned(found):
                    return Outcome(Verdict.DRAINED, self.seconds, found)
                if found == before:
                    self._wake(found)
            if self.seconds + self._interval > self.timeout:
                return self._over(found)
            before = found
            time.sleep(self._interval)

    def what_is_known(self) -> str:
        """What was held when it was last seen."""
        return "what it holds is not known" if self._last is None else f"when last seen: {self._last}"

    def _look(self) -> Holdings | HttpApiError:
        api = self._api()
        try:
            return holdings.read(api.get("/metrics"))
        except HttpApiError as error:
            if self._last is not None:
                return error
            return HttpApiError(f"{error}; give HOST:PORT of the API server of one that runs", may_pass=error.may_pass)
        except HoldingsError as error:
            return HttpApiError(f"{api.url}/metrics {error}")

    def _api(self) -> HttpApi:
        """The API with about as much patience as there is time: for a connection, and again for the answer."""
        left = self.timeout - self.seconds
        return replace(self.api, timeout=min(_PATIENCE, max(left / 2, _LEAST_PATIENCE)))

    def _wake(self, found: Holdings) -> None:
        """Have idle engines that hold something take a step: it may have become nothing, and nobody was told."""
        if not (self._nudge and found.idle and found.anything and self.seconds >= self._next_nudge):
            return
        self._next_nudge = self.seconds + _NUDGE_SECONDS
        try:
            if self._model is None:
                self._model = self._api().model()
            for rank in found.ranks:
                self._api().complete(self._model, rank)
                self.nudges += 1
        except HttpApiError as error:
            if not self.notes:
                self.notes.append(
                    f"an idle engine could not be asked for a token, so what it holds may be nothing by now: {error}"
                )

    def _abandoned(self, found: Holdings) -> bool:
        """Whether all that is held are registrations of requests that are not coming."""
        if not found.only_registrations:
            self._alone = None
            return False
        if self._alone is None or self._alone[0] != found:
            self._alone = (found, self.seconds)
        if self.seconds - self._alone[1] < _REGISTRATION_SECONDS:
            return False
        self.notes.append(f"{found}: no prefill came for {_REGISTRATION_SECONDS:g} s, and vLLM never lets go of them")
        return True

    def _over(self, found: Holdings | HttpApiError) -> Outcome:
        if isinstance(found, HttpApiError):
            raise HttpApiError(f"{found}; {self.timeout:g} s are over, {self.what_is_known()}")
        return Outcome(Verdict.HELD, self.seconds, found)


def _refused(before: object) -> bool:
    return isinstance(before, HttpApiError) and before.refused


@contextlib.contextmanager
def _interruptible(wait: Wait) -> Iterator[None]:
    """Ends a wait at once on SIGTERM, also as the first process of a container, where it is ignored otherwise."""

    def stop(number: int, *_: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    numbers = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
    handlers = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise CommandError(f"stopped by {interrupt} after {wait.seconds:.1f} s; {wait.what_is_known()}") from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _silence(moment: str, text: str) -> None:
    """Tells nobody."""


def _as_json(wait: Wait, outcome: Outcome) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "verdict": outcome.verdict,
        "url": wait.api.url,
        "seconds": round(outcome.seconds, 3),
        "ended": outcome.ended,
        "held": outcome.last.as_json(),
        "reasons": outcome.last.reasons() if outcome.verdict is Verdict.HELD else [],
        "nudges": wait.nudges,
        "notes": wait.notes,
    }


def _show(out: Printer, wait: Wait, outcome: Outcome) -> None:
    drained = outcome.verdict is Verdict.DRAINED
    out.line(
        f"{wait.api.url}  ",
        ("drained", "green") if drained else ("not drained", "bold red"),
        f" after {outcome.seconds:.1f} s" + (": it has ended" if outcome.ended else ""),
    )
    if not drained:
        for reason in outcome.last.reasons() or ["nothing is held any more, which was seen once only"]:
            out.line(f"  {reason}")
    if wait.nudges:
        times = "once" if wait.nudges == 1 else f"{wait.nudges} times"
        out.line(("  note: ", "yellow"), f"idle engines were asked for a token, {times}")
    for note in wait.notes:
        out.line(("  note: ", "yellow"), note)
