# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""vLLM's own parser and hash function on the arguments in the Kubernetes manifests, with another model."""

from pathlib import Path
from typing import Any

import pytest

from nixl_telemetry.cli.check import check
from nixl_telemetry.compat.instance import Instance
from nixl_telemetry.seam.preflight import compute
from nixl_telemetry.testbed.model import TinyModel
from tests.support.commands import output, run
from tests.support.manifests import SERVING


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the model and what is computed of it are."""
    TinyModel().write(tmp_path / "model")
    return tmp_path


def instance(role: str, folder: Path, connector: str = "NixlConnector") -> Instance:
    """What ``factors`` computes in the init container of a role."""
    text = (SERVING / "config" / f"{role}.yaml").read_text()
    changed = text.replace("Qwen/Qwen3-8B", str(folder / "model")).replace("NixlConnector", connector)
    config = folder / f"{role}.yaml"
    config.write_text(changed)
    return compute(["--config", str(config)])


def checked(prefill: Instance, decode: Instance, folder: Path, code: int) -> Any:
    for name, one in (("prefill", prefill), ("decode", decode)):
        (folder / f"{name}.json").write_text(one.to_json())
    return output(run(check, "--json", "--strict", folder / "prefill.json", folder / "decode.json"), code)


def test_the_two_sides_fit_until_one_is_changed(folder: Path) -> None:
    prefill, decode = instance("prefill", folder), instance("decode", folder)
    pushing = instance("decode", folder, "NixlPushConnector")

    assert (prefill.kv_role, decode.kv_role) == ("kv_producer", "kv_consumer")
    assert checked(prefill, decode, folder, 0)["verdict"] == "compatible"
    (pair,) = checked(prefill, pushing, folder, 1)["pairs"]
    assert pair["differences"] == [{"factor": "transfer_mode", "prefill": "pull", "decode": "push"}]
