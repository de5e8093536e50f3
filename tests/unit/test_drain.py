# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""``drain``: when an instance can be stopped, and what is said where it cannot."""

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final

import pytest
from typer.testing import Result

from nixl_telemetry.cli import drain as module
from nixl_telemetry.cli.drain import FORMAT, drain
from nixl_telemetry.cli.holdings import HoldingsError, read
from nixl_telemetry.cli.http_api import HttpApi, HttpApiError
from tests.support.commands import output, refused, run
from tests.support.http_apis import Asked, Reply, http_api
from tests.support.peers import free_port

MODELS: Final = {"object": "list", "data": [{"id": "served", "root": "example/model"}, {"id": "adapter"}]}
QUICK: Final = ("--interval", 0.02, "--timeout", 20)
WHERE: Final = "give HOST:PORT of the API server of one that runs"
LEASES_WHY: Final = (
    "the decode side has not fetched them; without a sign of life from it they expire after kv_lease_duration (30 s by "
    "default)"
)


def metrics(mode: str = "pull", engine: str = "0", /, **counts: int) -> str:
    """The text of an instrumented instance; what is not given is 0."""
    names = {
        "running": "vllm:num_requests_running",
        "waiting": "vllm:num_requests_waiting",
        "in_flight": "nixl_transfers_in_flight",
        "leases": "nixl_leases_held",
        "blocks": "nixl_lease_blocks_held",
        "overdue": "nixl_leases_overdue",
    }
    ours = f'engine="{engine}",model_name="tiny",transfer_mode="{mode}",connector_version="14"'
    lines = [f"{name}{{{ours}}} {counts.pop(count, 0)}.0" for count, name in names.items()]
    for side in ("registration", "blocks"):
        value = counts.pop(f"unmatched_{side}", 0)
        if mode == "push":
            lines.append(f'nixl_push_unmatched{{{ours},side="{side}"}} {value}.0')
    assert counts == {}
    # Names that begin like the others, and what stays odd to the parser of the rest.
    others = [f'vllm:num_requests_waiting_by_reason{{{ours},reason="deferred"}} 7.0', "vllm:odd{ 1"]
    return "\n".join(["# HELP nixl_leases_held How many.", "# TYPE nixl_leases_held gauge", *lines, *others, ""])


NOTHING: Final = metrics()


class Instance:
    """An instance whose ``/metrics`` changes from look to look; the last one stays.

    Args:
        looks: What it answers, one after the other.
        woken: What it answers once it was asked for a token.
    """

    def __init__(self, *looks: Any, woken: str | None = None) -> None:
        self._looks = list(looks)
        self._woken = woken
        self.requests: list[str] = []
        self.tokens: list[Asked] = []
        self.api: dict[str, Any] = {"/metrics": self._look, "/v1/models": MODELS, "/v1/completions": self._complete}

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        with http_api(self.api, self.requests) as url:
            yield url

    @property
    def looks(self) -> int:
        """How often it was looked at."""
        return self.requests.count("GET /metrics")

    def _look(self, asked: Asked) -> Any:
        return self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]

    def _complete(self, asked: Asked) -> Any:
        self.tokens.append(asked)
        if self._woken is not None:
            self._looks = [self._woken]
        return {"choices": []}


def drained(instance: Instance, *options: object) -> Result:
    """What the command comes to, quickly."""
    with instance.running() as url:
        return run(drain, url, *QUICK, *options)


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


def without_times(result: Result) -> list[str]:
    return [re.sub(r"\d+\.\d s", "T s", line).strip() for line in result.stdout.splitlines()]


# -------------------------------------------------------------------------------------------------------------- Drained


def test_an_instance_that_holds_nothing_is_looked_at_twice() -> None:
    """A request may be between its prefill and its lease in one look."""
    instance = Instance(NOTHING)
    with instance.running() as url:
        result = run(drain, url, *QUICK)

    assert result.exit_code == 0
    assert without_times(result) == ["T s  nothing is held", f"{url}  drained after T s"]
    assert instance.requests == ["GET /metrics", "GET /metrics"]


def test_host_and_port_will_do() -> None:
    with Instance(NOTHING).running() as url:
        assert run(drain, url.removeprefix("http://"), *QUICK).exit_code == 0


def test_nothing_held_has_to_be_seen_twice_in_a_row() -> None:
    instance = Instance(NOTHING, metrics(leases=1), NOTHING, Reply(503), NOTHING)

    assert drained(instance).exit_code == 0
    assert instance.looks == 6


def test_it_waits_until_nothing_is_held() -> None:
    """In a log, one line for each change."""
    instance = Instance(
        metrics(running=2, waiting=1),
        metrics(running=2, waiting=1),
        metrics(in_flight=1, leases=2, blocks=34),
        metrics(leases=1, blocks=1),
        NOTHING,
    )
    with instance.running() as url:
        result = run(drain, url, *QUICK, "--no-nudge")

    assert result.exit_code == 0
    assert without_times(result) == [
        "T s  2 running requests, 1 waiting request",
        "T s  1 transfer in flight, 2 leases (34 blocks)",
        "T s  1 lease (1 block)",
        "T s  nothing is held",
        f"{url}  drained after T s",
    ]


@pytest.mark.parametrize(
    "held", ["running", "waiting", "in_flight", "leases", "unmatched_registration", "unmatched_blocks"]
)
def test_each_of_them_keeps_it(held: str) -> None:
    """On its own, and on the second of two engines."""
    text = metrics("push", "0") + metrics("push", "1", **{held: 1})

    assert read(text.encode()).anything
    assert len(read(text.encode()).reasons()) == 1
    assert not read((metrics("push", "0") + metrics("push", "1")).encode()).anything


def test_series_are_summed() -> None:
    """Of several engines, of which one knows of another's transfer, and of several API servers."""
    engines = (
        metrics(running=1, in_flight=3, leases=1, blocks=2),
        metrics("pull", "1", running=2, in_flight=-1, leases=4),
    )
    text = "".join(engines)

    assert str(read(text.encode())) == "3 running requests, 2 transfers in flight, 5 leases (2 blocks)"


def test_json_has_everything() -> None:
    instance = Instance(metrics(leases=2, blocks=34), woken=NOTHING)
    with instance.running() as url:
        found = output(run(drain, url, *QUICK, "--json"))

    assert found.pop("seconds") < 20
    assert found == {
        "format": FORMAT,
        "verdict": "drained",
        "url": url,
        "ended": False,
        "held": {
            "running": 0,
            "waiting": 0,
            "transfers_in_flight": 0,
            "leases": 0,
            "unmatched_registrations": 0,
            "unmatched_blocks": 0,
            "lease_blocks": 0,
            "leases_overdue": 0,
        },
        "reasons": [],
        "nudges": 1,
        "notes": [],
    }


# ------------------------------------------------------------------------------------------------------------- Too late


def test_what_is_still_held_is_said_with_the_reason() -> None:
    held = metrics(
        "push",
        running=1,
        waiting=2,
        in_flight=1,
        leases=2,
        blocks=34,
        unmatched_registration=1,
        unmatched_blocks=3,
    )
    with Instance(held).running() as url:
        result = run(drain, url, "--interval", 0.05, "--timeout", 0.2)

    assert result.exit_code == 1
    assert without_times(result)[1:] == [
        f"{url}  not drained after T s",
        "1 running request: not finished yet, or the router still sends some",
        "2 waiting requests: not finished yet, or the router still sends some",
        "1 transfer in flight: posted, and not yet seen done or failed",
        f"2 leases (34 blocks): {LEASES_WHY}",
        "1 unmatched registration: the decode side waits for KV of requests whose prefill has not come, or is not done",
        "3 unmatched prefills: the decode side has not registered for their blocks; they go with their leases",
    ]


def test_json_says_what_is_still_held() -> None:
    with Instance(metrics(leases=2, blocks=34)).running() as url:
        found = output(run(drain, url, "--interval", 0.05, "--timeout", 0.2, "--no-nudge", "--json"), 1)

    assert (found["verdict"], found["ended"], found["nudges"]) == ("held", False, 0)
    assert (found["held"]["leases"], found["held"]["lease_blocks"]) == (2, 34)
    assert found["reasons"] == [f"2 leases (34 blocks): {LEASES_WHY}"]


def test_leases_that_should_have_ended_are_told() -> None:
    (reason,) = read(metrics(leases=2, overdue=1).encode()).reasons()

    assert reason == f"2 leases: {LEASES_WHY}; 1 overdue: the engine takes no step, or not all ranks have reported"
    assert not read(metrics(overdue=1).encode()).anything


def test_the_time_is_kept() -> None:
    """With an API server that does not answer, too."""
    slow = threading.Event()

    def wait(asked: Asked) -> str:
        slow.wait(5)
        return NOTHING

    with http_api({"/metrics": wait}) as url:
        started = time.monotonic()
        said = refused_after_progress(run(drain, url, "--interval", 0.05, "--timeout", 0.5))
        seconds = time.monotonic() - started
        slow.set()

    assert seconds < 4
    assert f"GET {url}/metrics: no answer in time; " in said
    assert said.endswith("0.5 s are over, what it holds is not known")


def refused_after_progress(result: Result) -> str:
    """The line with which a wait gave up."""
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    return str(line)


def test_nothing_that_was_seen_once_only_is_not_enough() -> None:
    def look(asked: Asked) -> str:
        time.sleep(0.05)
        return NOTHING

    with http_api({"/metrics": look}) as url:
        result = run(drain, url, "--interval", 20, "--timeout", 20.02)

    assert result.exit_code == 1
    assert without_times(result)[-1] == "nothing is held any more, which was seen once only"


def test_there_has_to_be_time_for_two_looks() -> None:
    assert "--timeout 1 leaves no time for two looks with --interval 1" in refused(
        run(drain, "127.0.0.1:1", "--timeout", 1)
    )


# -------------------------------------------------------------------------------------------------------- Registrations


def test_registrations_alone_are_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM never lets go of those whose prefill does not come; after another one came, the time begins anew."""
    monkeypatch.setattr(module, "_REGISTRATION_SECONDS", 1.0)
    looks = [metrics("push", unmatched_registration=count) for count in (1, 2)]
    with Instance(*[looks[0]] * 3, metrics("push", running=1), *[looks[0]] * 3, looks[1]).running() as url:
        result = run(drain, url, *QUICK, "--no-nudge")

    assert result.exit_code == 0
    assert without_times(result)[-2:] == [
        f"{url}  drained after T s",
        "note: 2 unmatched registrations: no prefill came for 1 s, and vLLM never lets go of them",
    ]
    assert float(re.findall(r"drained after (\d+\.\d) s", result.stdout)[0]) >= 1.0


@pytest.mark.parametrize("other", ["running", "leases", "in_flight", "unmatched_blocks"])
def test_registrations_are_waited_for_beside_anything_else(monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    monkeypatch.setattr(module, "_REGISTRATION_SECONDS", 0.0)
    with Instance(metrics("push", unmatched_registration=1, **{other: 1})).running() as url:
        assert run(drain, url, "--interval", 0.05, "--timeout", 0.3, "--no-nudge").exit_code == 1


# ---------------------------------------------------------------------------------------------------------------- Nudge


def test_an_idle_engine_is_asked_for_a_token() -> None:
    """What became of its leases is told with a step only."""
    instance = Instance(metrics(leases=1), woken=NOTHING)
    with instance.running() as url:
        result = run(drain, url, *QUICK)

    assert result.exit_code == 0
    assert without_times(result) == [
        "T s  1 lease",
        "T s  nothing is held",
        f"{url}  drained after T s",
        "note: idle engines were asked for a token, once",
    ]
    assert instance.requests == [
        *["GET /metrics"] * 2,
        "GET /v1/models",
        "POST /v1/completions",
        *["GET /metrics"] * 2,
    ]
    (asked,) = instance.tokens
    assert json.loads(asked.body) == {"model": "served", "prompt": ".", "max_tokens": 1}
    assert asked.headers["Content-Type"] == "application/json"
    assert (asked.headers["Authorization"], asked.headers["X-data-parallel-rank"]) == (None, None)


@pytest.mark.parametrize("held", ["in_flight", "unmatched_registration", "unmatched_blocks"])
def test_whatever_else_an_idle_engine_holds(held: str) -> None:
    assert drained(Instance(metrics("push", **{held: 1}), woken=NOTHING)).exit_code == 0


@pytest.mark.parametrize("busy", ["running", "waiting"])
def test_an_engine_with_requests_is_left_alone(busy: str) -> None:
    instance = Instance(*[metrics(leases=1, **{busy: 1})] * 5, NOTHING)

    assert drained(instance).exit_code == 0
    assert instance.tokens == []


def test_an_engine_whose_counts_change_is_left_alone() -> None:
    instance = Instance(*(metrics(leases=count) for count in (4, 3, 2, 1)), NOTHING)

    assert drained(instance).exit_code == 0
    assert instance.tokens == []


def test_no_nudge_asks_for_nothing() -> None:
    instance = Instance(*[metrics(leases=1)] * 5, NOTHING)

    assert drained(instance, "--no-nudge").exit_code == 0
    assert set(instance.requests) == {"GET /metrics"}


def test_a_nudge_is_repeated_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with every look: leases take their time to expire."""
    monkeypatch.setattr(module, "_NUDGE_SECONDS", 0.2)
    instance = Instance(metrics(leases=1))
    times: list[float] = []

    def complete(asked: Asked) -> Any:
        times.append(time.monotonic())
        if len(times) == 3:
            instance.api["/metrics"] = NOTHING
        return {}

    instance.api["/v1/completions"] = complete
    with instance.running() as url:
        result = run(drain, url, *QUICK)

    assert result.exit_code == 0
    assert [later - earlier > 0.15 for earlier, later in itertools.pairwise(times)] == [True, True]
    assert instance.requests.count("GET /v1/models") == 1
    assert without_times(result)[-1] == "note: idle engines were asked for a token, 3 times"


def test_each_engine_that_holds_something_is_asked() -> None:
    """By its place among those of the API server, which may begin with another one than the first."""
    engines = metrics("pull", "8", leases=1) + metrics("pull", "9") + metrics("pull", "10", in_flight=1)
    instance = Instance(engines, woken=NOTHING)

    assert drained(instance).exit_code == 0
    assert [asked.headers["X-data-parallel-rank"] for asked in instance.tokens] == ["0", "2"]


@pytest.mark.parametrize("given", ["option", "variable", "file with a new line"])
def test_the_key_goes_with_the_request_for_a_token(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    options = ["--api-key", "secret"] if given == "option" else []
    if not options:
        monkeypatch.setenv("VLLM_API_KEY", "secret" if given == "variable" else "secret\n")
    seen: dict[str, str | None] = {}
    instance = Instance(metrics(leases=1), woken=NOTHING)

    def models(asked: Asked) -> Any:
        seen["models"] = asked.headers.get("Authorization")
        return MODELS

    look = instance.api["/metrics"]

    def looked(asked: Asked) -> Any:
        seen["metrics"] = asked.headers.get("Authorization")
        return look(asked)

    instance.api.update({"/v1/models": models, "/metrics": looked})

    assert drained(instance, *options).exit_code == 0
    assert seen == {"models": "Bearer secret", "metrics": None}
    assert instance.tokens[0].headers["Authorization"] == "Bearer secret"


def test_the_key_does_not_follow_a_redirection() -> None:
    seen: list[str | None] = []

    def elsewhere(asked: Asked) -> Any:
        seen.append(asked.headers.get("Authorization"))
        return MODELS

    with (
        http_api({"/v1/models": elsewhere}) as other,
        http_api({"/v1/models": Reply(302, headers=(("Location", f"{other}/v1/models"),))}) as url,
    ):
        assert HttpApi.parse(url, 5, "secret").model() == "served"

    assert seen == [None]


def test_a_key_that_cannot_be_sent_is_not_printed() -> None:
    said = refused(run(drain, "127.0.0.1:1", "--api-key", "secret\r\nHost: x"))

    assert "the API key has characters that no header can carry" in said
    assert "secret" not in said


@pytest.mark.parametrize(
    ("path", "answer", "said"),
    [
        ("/v1/models", Reply(401), "GET {url}/v1/models: HTTP 401 Unauthorized"),
        ("/v1/models", {"data": []}, "GET {url}/v1/models: it names no model"),
        ("/v1/models", "[" * 100_000, "GET {url}/v1/models: it names no model"),
        ("/v1/completions", lambda _: Reply(404), "POST {url}/v1/completions: HTTP 404 Not Found"),
    ],
)
def test_a_nudge_that_fails_is_said_once(monkeypatch: pytest.MonkeyPatch, path: str, answer: Any, said: str) -> None:
    monkeypatch.setattr(module, "_NUDGE_SECONDS", 0.05)
    instance = Instance(*[metrics(leases=1)] * 10, NOTHING)
    instance.api[path] = answer
    with instance.running() as url:
        found = output(run(drain, url, *QUICK, "--json"))

    assert found["notes"] == [
        "an idle engine could not be asked for a token, so what it holds may be nothing by now: " + said.format(url=url)
    ]
    assert found["nudges"] == 0
    assert sum(path in request for request in instance.requests) > 1


# ---------------------------------------------------------------------------------------------------------- Not to tell


@pytest.mark.parametrize(
    ("text", "missing", "remedy"),
    [
        (
            "vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n",
            "nixl_transfers_in_flight, nixl_leases_held",
            "a stock connector runs, or the suite's metrics are off",
        ),
        (
            NOTHING.replace("nixl_leases_held{", "nixl_leases{"),
            "nixl_leases_held",
            "an older nixl_telemetry runs",
        ),
        (
            NOTHING.replace('"pull"', '"push"'),
            "nixl_push_unmatched",
            "an older nixl_telemetry runs",
        ),
        (
            "<html>hello</html>",
            "vllm:num_requests_running, vllm:num_requests_waiting, nixl_transfers_in_flight, nixl_leases_held",
            "it is no vLLM instance's",
        ),
    ],
)
def test_what_is_missing_is_not_nothing(text: str, missing: str, remedy: str) -> None:
    instance = Instance(text)
    with instance.running() as url:
        said = refused(run(drain, url, *QUICK))

    assert said.startswith(
        f"error: {url}/metrics has no {missing}, so whether it can be stopped cannot be said: {remedy}"
    )
    assert instance.looks == 1


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        ('{engine="0"} NaN', "has nixl_leases_held nan, which is no count"),
        ('{engine="0"} +Inf', "has nixl_leases_held inf, which is no count"),
        ('{engine="0"} 0.5', "has nixl_leases_held 0.5, which is no count"),
        ('{engine="0"} 1' + "0" * 400, "which is no count"),
        ('{engine="0"} many', "cannot be read: "),
        ('{engine="0" 1', "cannot be read: "),
        ("{" * 4000, "cannot be read: "),
        ("{" * 100_000, "cannot be read: there are too many samples, or too long ones"),
        ('{engine="0"} 1\nnixl_leases_held' * 20_000 + " 1", "cannot be read: there are too many samples"),
    ],
)
def test_garbage_is_not_nothing(sample: str, said: str) -> None:
    with pytest.raises(HoldingsError) as error:
        read(f"{NOTHING}nixl_leases_held{sample}\n".encode())

    assert said in str(error.value)
    assert len(str(error.value)) < 200


def test_garbage_ends_the_command_in_one_line() -> None:
    with Instance(f'{NOTHING}nixl_leases_held{{engine="\x1b[31m}} 1\n').running() as url:
        said = refused(run(drain, url, *QUICK))

    assert said.startswith(f"error: {url}/metrics cannot be read: ")
    assert "\x1b" not in said


def test_a_huge_answer_is_not_read() -> None:
    with Instance(NOTHING + "# \n" * (3 * 2**20)).running() as url:
        said = refused(run(drain, url, *QUICK))

    assert said == f"error: GET {url}/metrics: the answer is longer than 8388608 bytes; " + WHERE


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("127.0.0.1:{port}", "GET http://127.0.0.1:{port}/metrics: [Errno 111] Connection refused; " + WHERE),
        ("ftp://127.0.0.1", "'ftp://127.0.0.1' is no URL of an HTTP API; give http://HOST:PORT"),
    ],
)
def test_an_instance_that_is_not_there(url: str, said: str) -> None:
    port = free_port()
    started = time.monotonic()

    assert refused(run(drain, url.format(port=port), *QUICK)) == f"error: {said.format(port=port)}"
    assert time.monotonic() - started < 5


def test_another_server_is_not_waited_for() -> None:
    with http_api({}) as url:
        said = refused(run(drain, url, *QUICK))

    assert said == f"error: GET {url}/metrics: HTTP 404 Not Found; {WHERE}"


@pytest.mark.parametrize(
    "trouble", [Reply(503), Reply(429), Reply(200, NOTHING[:40], headers=(("Content-Length", "4000"),))]
)
def test_an_instance_with_trouble_is_asked_again(trouble: Reply) -> None:
    """From the start: a hook that gave up would have KV taken away. An answer that was cut is not the whole."""
    instance = Instance(trouble, NOTHING)

    assert drained(instance).exit_code == 0
    assert instance.looks == 3


@pytest.mark.parametrize("trouble", [Reply(503), Reply(404), "", "<html>"])
def test_trouble_in_the_middle_is_waited_for_until_the_time_is_over(trouble: Any) -> None:
    with Instance(metrics(leases=2), trouble).running() as url:
        said = refused_after_progress(run(drain, url, "--interval", 0.05, "--timeout", 1, "--no-nudge"))

    assert said.startswith(f"error: {'GET ' if isinstance(trouble, Reply) else ''}{url}/metrics")
    assert said.endswith("; 1 s are over, when last seen: 2 leases")


def test_an_answer_that_trickles_is_bounded_in_time() -> None:
    """Each packet is in time for the socket, and all together are not."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        done = threading.Event()

        def trickle() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.0 200 OK\r\nX: ")
                while not done.wait(0.05):
                    connection.sendall(b"x")

        thread = threading.Thread(target=trickle)
        thread.start()
        started = time.monotonic()
        with pytest.raises(HttpApiError, match="no answer in time") as error:
            HttpApi.parse(f"127.0.0.1:{server.getsockname()[1]}", 0.2).get("/metrics")
        assert time.monotonic() - started < 2
        assert error.value.may_pass
        done.set()
        thread.join()


# --------------------------------------------------------------------------------------------------------- It goes away


@pytest.mark.parametrize(
    ("held", "code", "said"),
    [
        (
            {"running": 1, "leases": 2},
            1,
            [
                "not drained after T s: it has ended",
                "1 running request: not finished yet, or the router still sends some",
                f"2 leases: {LEASES_WHY}",
            ],
        ),
        ({}, 0, ["drained after T s: it has ended"]),
    ],
)
def test_an_instance_that_ends_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, held: dict[str, int], code: int, said: list[str]
) -> None:
    """Whether it could be stopped is what it held when it was last seen."""
    with contextlib.ExitStack() as running:
        url = running.enter_context(Instance(metrics(**held)).running())
        # It ends before the second look.
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: running.close())
        monkeypatch.setattr(module, "time", clock)
        result = run(drain, url, *QUICK)

    assert result.exit_code == code
    assert without_times(result)[1:] == [
        f"T s  GET {url}/metrics: [Errno 111] Connection refused",
        f"{url}  {said[0]}",
        *said[1:],
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_at_once(number: signal.Signals) -> None:
    """And is no verdict."""
    before = signal.getsignal(number)
    instance = Instance(metrics(leases=2))
    looked = instance.api["/metrics"]

    def interrupt(asked: Asked) -> Any:
        threading.Timer(0.5, os.kill, (os.getpid(), number)).start()
        return looked(asked)

    instance.api["/metrics"] = interrupt
    with instance.running() as url:
        started = time.monotonic()
        result = run(drain, url, "--interval", 30, "--timeout", 60)

    assert time.monotonic() - started < 5
    said = refused_after_progress(result)
    assert re.sub(r"\d+\.\d s", "T s", said) == f"error: stopped by {number.name} after T s; when last seen: 2 leases"
    assert signal.getsignal(number) is before


# ------------------------------------------------------------------------------------------------------------- Terminal


def test_on_a_terminal_only_the_end_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held meanwhile is one line that changes; the cursor is there again at the end."""
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    with Instance(metrics(leases=2), metrics(leases=1), NOTHING).running() as url:
        result = run(drain, url, "--interval", 0.3, "--timeout", 20)

    assert result.exit_code == 0
    assert "2 leases" in result.stdout
    assert re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", result.stdout.rpartition("\x1b[2K")[2]).startswith(
        f"{url}  drained after"
    )
    assert result.stdout.rindex("\x1b[?25h") > result.stdout.rindex("\x1b[?25l")
