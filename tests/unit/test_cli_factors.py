# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""``factors`` around vLLM's part of it, and all of these commands where vLLM is not installed."""

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, Final

import pytest

from nixl_telemetry.cli.factors import factors
from nixl_telemetry.cli.knowledge import FactorError, parse_factors
from nixl_telemetry.compat.factors import digest
from nixl_telemetry.compat.instance import Instance, Origin
from tests.support.commands import output, refused, run
from tests.support.peers import listener, payload
from tests.support.statements import FACTORS, exchanged, factors as changed, statement

ROOT: Final = Path(__file__).resolve().parents[2]

# ------------------------------------------------------------------------------------------------------ Without vLLM

# Whatever is not a dependency of the package itself.
WITHOUT: Final = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"vllm", "torch", "nixl", "httpx", "grpc"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from nixl_telemetry.cli.main import app
app(sys.argv[1:], prog_name="nixl-telemetry")
"""


def bare(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command line on a laptop."""
    command = [sys.executable, "-c", WITHOUT, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=60)


def test_all_but_factors_works_without_vllm(tmp_path: Path) -> None:
    compat_hash, encoded = exchanged(statement())
    other = digest(changed(transfer_mode="push"))
    with (
        listener({(0, 0): payload(compat_hash, {}, encoded)}) as there,
        listener({(0, 0): payload(other, {})}) as stock,
    ):
        probed = bare("probe", there.address, "--json")
        saved = tmp_path / "saved.json"
        saved.write_text(probed.stdout)
        checked = bare("check", saved, stock.address)
        explained = bare("explain", "--local", compat_hash, "--remote", other, "--like", saved)

    assert json.loads(probed.stdout)["factors"] == FACTORS
    assert (probed.returncode, probed.stderr) == (0, "")
    assert (checked.returncode, checked.stderr) == (1, "")
    assert (explained.returncode, explained.stderr) == (1, "")
    assert all('transfer_mode is "pull" on ' in done.stdout for done in (checked, explained))
    assert all("\x1b" not in done.stdout for done in (checked, explained))


def test_without_vllm_factors_says_what_it_needs() -> None:
    done = bare("factors", "--json", "--", "model", "--kv-transfer-config", "{}")

    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "it cannot be imported here (No module named 'torch'); run this with the Python of the server's" in line


def test_without_vllm_doctor_says_so_and_checks_the_rest() -> None:
    config = '{"kv_connector": "NixlConnector", "kv_role": "kv_bth"}'
    done = bare("doctor", "--peer", "localhost", "--kv-transfer-config", config)

    assert (done.returncode, done.stderr) == (1, "")
    assert "environment  vLLM is not installed in this Python → run this with the Python of the server's" in done.stdout
    assert "environment  NIXL is not installed" in done.stdout
    assert 'kv_role is "kv_bth", which vLLM does not know → write kv_both' in done.stdout


# ------------------------------------------------------------------------------------------------------ Beside vLLM


class PreflightError(Exception):
    """Stands in for the seam's."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replaces what needs vLLM; the arguments that it is given."""
    seen: list[Any] = []

    def compute(arguments: list[str]) -> Instance:
        print("what vLLM prints")  # noqa: T201
        if not arguments:
            raise PreflightError("vLLM refuses the arguments: none")
        seen.append(arguments)
        return Instance(
            name="m", compat_hash=digest(FACTORS), origin=Origin.COMPUTED, factors=FACTORS, notes=("on the cpu",)
        )

    module: Any = types.ModuleType("nixl_telemetry.seam.preflight")
    module.compute, module.PreflightError = compute, PreflightError
    monkeypatch.setitem(sys.modules, "nixl_telemetry.seam.preflight", module)
    monkeypatch.setattr("nixl_telemetry.seam.preflight", module, raising=False)
    for name in ("VLLM_LOGGING_STREAM", "VLLM_LOGGING_LEVEL", "TRANSFORMERS_VERBOSITY", "PYTHONWARNINGS"):
        monkeypatch.setenv(name, "kept")
    return seen


@pytest.mark.parametrize("before", [[], ["vllm", "serve"]])
def test_the_arguments_are_passed_as_they_are(asked: list[Any], before: list[str]) -> None:
    """A whole command line may be pasted."""
    arguments = ["my/model", "--kv-transfer-config", '{"a": 1}', "--json", "--help"]

    found = output(run(factors, "--json", "--", *before, *arguments))

    assert asked == [arguments]
    assert (found["origin"], found["compat_hash"], found["factors"]) == ("computed", digest(FACTORS), FACTORS)


def test_factors_of_another_machine_are_given_by_hand(asked: list[Any]) -> None:
    found = output(run(factors, "--json", "--factor", "attn_backend_name=FLASH_ATTN", "--", "my/model"))

    assert found["compat_hash"] == digest(changed(attn_backend_name="FLASH_ATTN"))
    assert Instance.from_json(json.dumps(found).encode()).factors == changed(attn_backend_name="FLASH_ATTN")
    assert found["notes"] == ["on the cpu", "not computed, but given by hand: attn_backend_name"]


def test_a_factor_that_this_vllm_does_not_hash_is_refused(asked: list[Any]) -> None:
    result = run(factors, "--factor", "cross_layers_blocks=true", "--", "my/model")

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1] == "error: vLLM 0.32.0 does not hash cross_layers_blocks"


def test_the_text_names_the_platform(asked: list[Any]) -> None:
    result = run(factors, "--", "my/model")

    assert result.exit_code == 0
    assert result.stdout.startswith("m  pull, vLLM 0.32.0, not running, factors computed\n")
    assert "  note: on the cpu\n" in result.stdout


def test_what_vllm_refuses_is_one_line(asked: list[Any]) -> None:
    result = run(factors, "--json", "--", "vllm", "serve")

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines() == ["what vLLM prints", "error: vLLM refuses the arguments: none"]


def test_json_is_ascii(asked: list[Any]) -> None:
    result = run(factors, "--json", "--factor", "model=\x9b\u202e\x7f", "--", "my/model")

    assert output(result)["factors"]["model"] == "\x9b\u202e\x7f"
    assert result.stdout.isascii()
    assert "\x7f" not in result.stdout


def test_no_arguments_are_a_mistake() -> None:
    assert refused(run(factors)).endswith("after `--`: nixl-telemetry factors -- MODEL ...")


def test_options_without_dashes_before_them_show_the_usage() -> None:
    result = run(factors, "my/model", "--dtype", "bfloat16")

    assert result.exit_code == 2
    assert "-- MODEL ..." in result.stderr


@pytest.mark.parametrize("model", ["/nope/model", "./nope"])
def test_a_path_that_is_not_here(model: str) -> None:
    assert refused(run(factors, "--", "vllm", "serve", model)) == f"error: the model '{model}' is no folder here"


# ---------------------------------------------------------------------------------------------------------- By hand


def test_values_are_read_as_they_are_hashed() -> None:
    texts = [
        *("model=7", 'cache_dtype="fp8"', "dtype=float16", "vllm_version=0.32.0", "num_kv_heads=8"),
        *("is_hma_enabled=false", "speculative_config=null", "transfer_mode=push", "attn_backend_name=A=B"),
    ]

    assert parse_factors(texts) == {
        "model": "7",
        "cache_dtype": "fp8",
        "dtype": "torch.float16",
        "vllm_version": "0.32.0",
        "num_kv_heads": 8,
        "is_hma_enabled": False,
        "speculative_config": None,
        "transfer_mode": "push",
        "attn_backend_name": "A=B",
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nixl_connector_version=[14]", r"nixl_connector_version is '\[14\]'; vLLM hashes a number there"),
        ("num_kv_heads=true", "a number"),
        ("head_size=128.0", "a number"),
        ("num_hidden_layers=many", "a number"),
        ("is_hma_enabled=1", "is_hma_enabled is '1'; vLLM hashes true or false there"),
        ("cross_layers_blocks=no", "true or false"),
    ],
)
def test_a_value_of_another_kind_is_refused(text: str, said: str) -> None:
    with pytest.raises(FactorError, match=said):
        parse_factors([text])


@pytest.mark.parametrize("text", ["model", "=x", "Model=x", "speculative_config=" + "[" * 100_000])
def test_what_is_no_factor(text: str) -> None:
    if text.startswith("speculative"):
        assert isinstance(parse_factors([text])["speculative_config"], str)
    else:
        with pytest.raises(FactorError):
            parse_factors([text])
