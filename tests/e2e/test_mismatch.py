# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Pairs that do not fit, on real servers: explained factor by factor, before the first request and after it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import pytest
from typer.testing import CliRunner

from nixl_telemetry.cli.main import app
from nixl_telemetry.compat.factors import value_text
from nixl_telemetry.testbed import (
    CONSUMER,
    PRODUCER,
    HttpStatusError,
    OtlpReceiver,
    ReceivedSpan,
    ServerConfig,
    VllmServer,
    disaggregated_completion,
    running,
)
from tests.e2e.conftest import MODEL, MODULE, START_SECONDS, Servers, metric, new_server
from tests.support.peers import wait_until

ROOT: Final = Path(__file__).resolve().parents[2]
REJECTIONS: Final = "nixl_handshake_rejections_total"
OLDER: Final = {"0.28.0": 7, "0.31.0": 13}
"""Older releases of vLLM in environments of their own, and their connector versions."""


@dataclass(frozen=True)
class Variant:
    """A decode instance that differs from the prefill instances in one factor."""

    factor: str
    here: Any
    """The factor's value at the decode instance."""
    there: Any
    """The factor's value at the prefill instance."""
    connector: str = "NixlPullConnector"
    dtype: str = "bfloat16"
    args: tuple[str, ...] = field(default=(), repr=False)

    def config(self, model: Path, endpoint: str, audit: Path) -> ServerConfig:
        """The instrumented server, with an audit trail."""
        return ServerConfig(
            model.with_name("other") if self.factor == "model" else model,
            CONSUMER,
            self.connector,
            MODULE,
            otlp_endpoint=endpoint,
            dtype=self.dtype,
            env={"NIXLTEL_AUDIT_DIR": str(audit)},
            args=self.args,
            fork=True,
        )


def shape(**values: int) -> tuple[str, ...]:
    """The same model by its name, in another shape."""
    return ("--load-format", "dummy", "--hf-overrides", json.dumps(values))


VARIANTS: Final = {
    variant.factor: variant
    for variant in (
        Variant("transfer_mode", "push", "pull", connector="NixlPushConnector"),
        Variant("dtype", "torch.float32", "torch.bfloat16", dtype="float32"),
        Variant("cache_dtype", "bfloat16", "auto", args=("--kv-cache-dtype", "bfloat16")),
        Variant("num_kv_heads", 2, 4, args=shape(num_key_value_heads=2)),
        Variant("num_hidden_layers", 2, 4, args=shape(num_hidden_layers=2)),
        Variant("is_hma_enabled", False, True, args=("--disable-hybrid-kv-cache-manager",)),
        Variant("model", "other", "model"),  # the ends of the paths
    )
}


class Fleet:
    """Two prefill instances that stay, and decode instances that come and go in waves: memory is for five servers."""

    STAYING: Final = ("prefill", "stock_prefill")
    WAVES: Final = (
        ("transfer_mode", "dtype", "cache_dtype"),
        ("num_kv_heads", "num_hidden_layers"),
        ("is_hma_enabled", "model"),
        ("fits", *OLDER),
    )

    def __init__(self, model: Path, receiver: OtlpReceiver, logs: Path) -> None:
        self.model = model
        self.receiver = receiver
        self.audit = logs / "audit"
        self.keyed = logs / "keyed-audit"
        self.key = logs / "key"
        self.rejected: set[tuple[str, str]] = set()
        """Factor and source of each rejection that a test has seen."""
        self._logs = logs
        self._staying = ExitStack()
        self._wave = ExitStack()
        self._servers: dict[str, VllmServer] = {}
        self._hashes: dict[str, str] = {}

    def start(self) -> None:
        """Start the prefill instances."""
        self._start(self._staying, *self.STAYING)

    def stop(self) -> None:
        """Stop everything."""
        self._wave.close()
        self._staying.close()

    def pair(self, prefill: str, decode: str) -> tuple[VllmServer, VllmServer]:
        """Two servers, which alone run; the wave of either is started."""
        for name in (prefill, decode):
            if name not in self._servers:
                self._wave.close()
                self._servers = {staying: self._servers[staying] for staying in self.STAYING}
                self._start(self._wave, *next(wave for wave in self.WAVES if name in wave))
        return Servers(self._servers).pair(prefill, decode)

    def hash_of(self, name: str) -> str:
        """What a server answered, or answers, to ``probe``."""
        if name not in self._hashes:
            self.pair("prefill", name)
        return self._hashes[name]

    def config(self, name: str) -> ServerConfig:
        """How a server is started."""
        endpoint = self.receiver.grpc_endpoint
        stock = ServerConfig(self.model, PRODUCER, fork=True)
        match name:
            case "stock_prefill":
                return stock
            case "prefill":
                return replace(stock, connector_module=MODULE)
            case "fits":
                return replace(
                    stock,
                    role=CONSUMER,
                    connector_module=MODULE,
                    otlp_endpoint=endpoint,
                    extra_config={"telemetry": {"audit_dir": str(self.keyed), "audit_key_file": str(self.key)}},
                    args=("--revision", "v2"),  # which the hash does not cover
                )
            case _ if name in OLDER:
                return replace(stock, python=ROOT / ".venvs" / f"vllm-{name}" / "bin" / "python")
        return VARIANTS[name].config(self.model, endpoint, self.audit)

    def _start(self, stack: ExitStack, *names: str) -> None:
        Servers(self._servers).wake()
        started = {name: new_server(name, self.config(name), self._logs) for name in names}
        stack.enter_context(running(started.values(), timeout=START_SECONDS))
        self._servers |= started
        self._hashes |= {name: run("probe", side_channel(server))[1]["compat_hash"] for name, server in started.items()}


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """All of them, with two models that differ in their names only."""
    with tempfile.TemporaryDirectory(prefix="nixl-telemetry-e2e-") as folder, OtlpReceiver() as receiver:
        for name in ("model", "other"):
            MODEL.write(Path(folder, name))
        Path(folder, "key").write_bytes(os.urandom(32))
        fleet = Fleet(Path(folder, "model"), receiver, Path(folder))
        try:
            fleet.start()
            yield fleet
        finally:
            fleet.stop()


def side_channel(server: VllmServer) -> str:
    """Where a server shakes hands."""
    return f"127.0.0.1:{server.side_channel_port}"


def run(*arguments: str) -> tuple[int, Any]:
    """Exit code and JSON of a command."""
    result = CliRunner().invoke(app, [*arguments, "--json"])
    return result.exit_code, json.loads(result.stdout)


def checked(prefill: VllmServer, decode: VllmServer) -> tuple[int, dict[str, Any]]:
    """Exit code of ``check``, and what it says of the pair."""
    code, report = run("check", side_channel(prefill), side_channel(decode))
    (pair,) = report["pairs"]
    return code, pair


def refused(prefill: VllmServer, decode: VllmServer, seed: int) -> str:
    """Send a request that must fail; returns the first line of the exception in the decode instance's log."""
    before = len(decode.log_text())
    with pytest.raises(HttpStatusError) as caught:
        disaggregated_completion(prefill, decode, MODEL.prompt(40, seed=seed))
    assert caught.value.status == 500
    assert caught.value.url.startswith(decode.url)
    lines = [line for line in decode.log_text()[before:].splitlines() if "RuntimeError: prefill" in line]
    assert lines, decode.log_text()[before:][-3000:]
    return lines[0].partition("RuntimeError: ")[2]


def rejection(receiver: OtlpReceiver, prefill: VllmServer, source: str) -> ReceivedSpan:
    """The handshake span of a rejection by this prefill instance."""

    def found(spans: Any) -> list[ReceivedSpan]:
        return [
            span
            for span in spans
            if span.name == "nixl.handshake"
            and span.attributes["server.port"] == prefill.side_channel_port
            and span.attributes.get("nixl.compat.source") == source
        ]

    return found(receiver.wait_for(lambda spans: bool(found(spans)), timeout=30))[-1]


@pytest.mark.parametrize(("name", "source"), [("prefill", "exchanged"), ("stock_prefill", "recovered")])
@pytest.mark.parametrize("factor", VARIANTS)
def test_a_mismatch_is_explained(fleet: Fleet, factor: str, name: str, source: str) -> None:
    """With an instrumented peer it is told, with a stock one found, and ``check`` says the same before any request."""
    prefill, decode = fleet.pair(name, factor)
    here, there = VARIANTS[factor].here, VARIANTS[factor].there
    if factor == "model":
        here, there = str(fleet.model.with_name("other")), str(fleet.model)
    fleet.receiver.clear()

    code, pair = checked(prefill, decode)
    assert (code, pair["verdict"]) == (1, "incompatible")
    # The name of a stock instance's model is not known to the command. The decode instance has learnt it from the
    # instrumented prefill instance.
    known = factor != "model" or source == "exchanged"
    assert pair["differences"] == ([{"factor": factor, "prefill": there, "decode": here}] if known else [])
    before = metric(decode, REJECTIONS, factor=factor)
    line = refused(prefill, decode, seed=len(name))

    expected = f"{factor} is {value_text(there)} there and {value_text(here)} here ({source})"
    assert line == f"prefill {side_channel(prefill)} is incompatible: {expected}"
    assert wait_until(lambda: metric(decode, REJECTIONS, factor=factor) > before, 30)
    attributes = rejection(fleet.receiver, prefill, source).attributes
    assert attributes["error.type"] == "compat_mismatch"
    assert list(attributes["nixl.compat.differing"]) == [factor]
    assert attributes[f"nixl.compat.factor.{factor}"] == here
    assert attributes[f"nixl.remote.compat.factor.{factor}"] == there
    fleet.rejected.add((factor, source))
    assert metric(decode, REJECTIONS) == metric(decode, REJECTIONS, factor=factor)
    assert metric(decode, "nixl_telemetry_errors_total") == 0


def test_a_stock_model_name_is_unknown_unless_given(fleet: Fleet) -> None:
    """``check`` says so, and finds it when it is told."""
    prefill, decode = map(side_channel, fleet.pair("stock_prefill", "model"))

    code, report = run("check", prefill, decode)
    assert code == 1
    assert report["pairs"][0]["differences"] == []
    code, report = run("check", prefill, decode, "--factor", f"model={fleet.model}")
    assert code == 1
    assert [difference["factor"] for difference in report["pairs"][0]["differences"]] == ["model"]


def test_a_pair_that_fits(fleet: Fleet) -> None:
    """``check`` says so with a warning of what the hash does not cover, and so does the decode instance."""
    prefill, decode = fleet.pair("prefill", "fits")

    code, pair = checked(prefill, decode)
    assert (code, pair["verdict"]) == (0, "compatible")
    assert [difference["name"] for difference in pair["geometry"]] == ["model_revision"]
    assert "nixl.compat.uncovered_difference" not in decode.log_text()
    disaggregated_completion(prefill, decode, MODEL.prompt(40, seed=5))

    assert wait_until(lambda: "event=nixl.compat.uncovered_difference" in decode.log_text(), 30)
    assert "nixl.compat.uncovered=model_revision" in decode.log_text()
    factor_info = decode.metrics().select("nixl_compat_factor_info")
    assert {sample.labels["factor"]: sample.labels["value"] for sample in factor_info}["num_kv_heads"] == "4"
    assert len(factor_info) == 12
    assert checked(*fleet.pair("stock_prefill", "fits"))[0] == 0


@pytest.mark.parametrize("version", OLDER)
def test_a_rolling_upgrade(fleet: Fleet, version: str) -> None:
    """A stock prefill instance of an older release: the versions are named with both values."""
    prefill, decode = fleet.pair(version, "fits")
    expected = [
        {"factor": "vllm_version", "prefill": version, "decode": "0.32.0"},
        {"factor": "nixl_connector_version", "prefill": OLDER[version], "decode": 14},
    ]

    code, pair = checked(prefill, decode)
    assert (code, pair["differences"]) == (1, expected)
    line = refused(prefill, decode, seed=9)

    assert line == (
        f'prefill {side_channel(prefill)} is incompatible: vllm_version is "{version}" there and "0.32.0" here; '
        f"nixl_connector_version is {OLDER[version]} there and 14 here (recovered)"
    )
    assert wait_until(lambda: metric(decode, REJECTIONS, factor="vllm_version") > 0, 30)


def audit(*arguments: object) -> Any:
    """JSON of an audit command that is content."""
    result = CliRunner().invoke(app, ["audit", *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return (
        [json.loads(line) for line in result.stdout.splitlines()]
        if arguments[0] == "show"
        else json.loads(result.stdout)
    )


def test_every_rejection_is_in_the_audit_trail(fleet: Fleet) -> None:
    """Those of the tests before, of servers that were killed meanwhile."""
    if not fleet.rejected:
        test_a_mismatch_is_explained(fleet, "transfer_mode", "prefill", "exchanged")
    fleet.pair("prefill", "fits")
    rejected = [
        record for record in audit("show", fleet.audit, "--event", "handshake") if record["decision"] == "rejected"
    ]

    seen = {(*record["nixl.compat.differing"], record["nixl.compat.source"]) for record in rejected}
    assert seen == fleet.rejected
    audit("verify", fleet.audit)


def test_the_audit_trail_of_a_killed_worker(fleet: Fleet) -> None:
    """``kill -9`` under load: what was counted is there and sound, and the end says that nothing closed it."""
    prefill, decode = fleet.pair("prefill", "fits")
    served = threading.Semaphore(0)
    count = 0

    def load() -> None:
        nonlocal count
        with contextlib.suppress(Exception):
            for seed in range(1000):
                disaggregated_completion(prefill, decode, MODEL.prompt(40, seed=1000 + seed), 1)
                count += 1
                served.release()

    thread = threading.Thread(target=load)
    before = len(transfers(fleet))
    thread.start()
    for _ in range(10):
        assert served.acquire(timeout=60)
    (worker,) = [member for member in decode.process.members() if "Worker" in member.title]
    os.kill(worker.pid, signal.SIGKILL)
    thread.join(timeout=120)

    assert not thread.is_alive()
    # The records of 50 ms may have been in the queue.
    assert count - 3 <= len(transfers(fleet)) - before <= count + 1
    report = audit("verify", fleet.keyed, "--key-file", fleet.key)
    assert "not_closed" in json.dumps(report)
    for record in transfers(fleet)[-5:]:
        assert record["nixl.transfer.block.count"] == 2
        assert record["nixl.transfer.operation"] == "READ"


def transfers(fleet: Fleet) -> list[dict[str, Any]]:
    """The transfers that the instance with a key has recorded."""
    return list(audit("show", fleet.keyed, "--event", "transfer"))


COMPUTE: Final = """
import json, sys
from nixl_telemetry.seam.preflight import compute
answers = [compute(arguments).compat_hash for arguments in json.load(sys.stdin)]
print("ANSWERS", json.dumps(answers))
"""


def test_factors_are_those_of_the_running_server(fleet: Fleet) -> None:
    """From the same arguments, without a server: digest for digest what ``probe`` reads from the running one."""
    names = ["prefill", "stock_prefill", "fits", *VARIANTS]
    configs = {name: fleet.config(name) for name in names}
    # What follows the module's name.
    arguments = [config.argv(port=1)[3:] for config in configs.values()]
    result = subprocess.run(
        [sys.executable, "-c", COMPUTE],  # finds the package here: the folder comes first on its path
        input=json.dumps(arguments),
        env=configs["prefill"].environment(side_channel_port=1),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    (answers,) = (json.loads(line.removeprefix("ANSWERS ")) for line in result.stdout.splitlines() if "ANSWERS" in line)
    computed = dict(zip(names, answers, strict=True))

    assert len(set(computed.values())) == 1 + len(VARIANTS)
    assert computed == {name: fleet.hash_of(name) for name in names}
