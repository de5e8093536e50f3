# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What ``doctor`` hears from a real vLLM, in a process of its own; one start of vLLM for each case."""

import json
import os
from pathlib import Path
from typing import Any, Final

import pytest

from nixl_telemetry.cli.doctor import process
from nixl_telemetry.cli.doctor.command import doctor
from tests.support.commands import run

SECONDS: Final = 300
OWN: Final = {"kv_connector": "InstrumentedNixlPushConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}

pytestmark = pytest.mark.timeout(SECONDS)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("NIXL", "OTEL_", "KUBERNETES_"))]:
        monkeypatch.delenv(name)


def test_vllm_says_what_it_makes_of_a_config(tmp_path: Path) -> None:
    """Of a file of arguments, too; its log and its banners are not in the way."""
    file = tmp_path / "args.yaml"
    file.write_text("port: 8123\ndata-parallel-size: 2\n")

    answer, reason = process.ask_vllm(
        ["my/model", "--config", str(file), "--kv-transfer-config", json.dumps(OWN)], SECONDS
    )

    assert answer is not None, reason
    assert (answer["plugin_loaded"], answer["device"], answer["buffer_devices"]) == (True, "cpu", ["cpu"])
    assert (answer["values"]["port"], answer["values"]["data_parallel_size"]) == (8123, 2)
    assert answer["transfer"]["kv_connector"] == "InstrumentedNixlPushConnector"
    assert answer["connector_class"].endswith(".InstrumentedNixlPushConnector")
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST" in answer["known_variables"]


def test_a_good_one_is_quiet_and_a_bad_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """With everything real: vLLM, NIXL, the plugin."""
    arguments = ["--timeout", SECONDS, "--peer", "localhost", "--json"]
    good = run(doctor, *arguments, "--kv-transfer-config", json.dumps(OWN))
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    bad = run(doctor, *arguments, "--kv-transfer-config", json.dumps({**OWN, "kv_buffer_device": "cuda"}))

    assert good.exit_code == 0, good.output
    assert {one["level"] for one in json.loads(good.stdout)["findings"]} <= {"ok", "note"}
    assert bad.exit_code == 1
    told: list[dict[str, Any]] = [one for one in json.loads(bad.stdout)["findings"] if one["level"] == "problem"]
    assert [one["what"] for one in told if "kv_buffer_device" in one["what"]] == [
        'kv_buffer_device is "cuda", and on cpu NIXL connectors take cpu only'
    ]
    assert any(one["what"].startswith('VLLM_PLUGINS is "another", which leaves out nixl_telemetry') for one in told)


def test_what_vllm_refuses() -> None:
    answer, reason = process.ask_vllm(["my/model", "--no-such-option", "x"], SECONDS)

    assert answer is not None, reason
    assert answer["refused"] == "vLLM refuses the arguments: unrecognized arguments: --no-such-option x"
