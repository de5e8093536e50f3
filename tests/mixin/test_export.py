# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The configuration of the rules, and their export by the command line."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from typer.testing import CliRunner, Result

from nixl_telemetry.cli.alerts import app
from nixl_telemetry.mixin.config import LEAST_RANGE, MixinConfig, MixinConfigError
from nixl_telemetry.mixin.duration import Duration
from nixl_telemetry.mixin.rules import build_rules, prometheus_rule, rules_file
from tests.support.commands import refused

ROOT: Final = Path(__file__).resolve().parents[2]
RESERVED: Final = (
    "note: without --runbook-url and --grafana-url, links go to a reserved name under .example, which leads nowhere\n"
)


def export(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


def alert(rules: str, name: str) -> dict[str, Any]:
    groups = yaml.safe_load(rules)["groups"]
    found: dict[str, Any] = next(rule for group in groups for rule in group["rules"] if rule.get("alert") == name)
    return found


# -------------------------------------------------------------------------------------------------------- Configuration


@pytest.mark.parametrize(
    ("text", "milliseconds"), [("250ms", 250), ("90s", 90_000), ("1h30m", 5_400_000), ("3d", 259_200_000)]
)
def test_a_duration_reads_as_it_is_written(text: str, milliseconds: int) -> None:
    assert Duration.parse(text) == milliseconds
    assert Duration.parse(Duration.parse(text)) == milliseconds
    assert str(Duration(milliseconds)) == f"{Duration(milliseconds)}"
    assert Duration.parse(str(Duration(milliseconds))) == milliseconds


@pytest.mark.parametrize("value", ["", "5", 5, "0s", "-5m", "5 m", "m5", None, "1m1h"])
def test_what_is_no_duration_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="it must be a duration of more than 0, such as 90s, 5m or 1h30m"):
        Duration.parse(value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"transfer_slow": 1}, "transfer_slow=1: there is no 'transfer_slow'; valid: job_label, "),
        ({"mixed_for": "5"}, "mixed_for='5': it must be a duration of more than 0"),
        ({"transfer_objective": "1"}, "transfer_objective='1': Input should be less than 1"),
        ({"transfer_floor": "many"}, "transfer_floor='many': Input should be a valid number"),
        ({"transfer_floor": "nan"}, "transfer_floor='nan': Input should be a finite number"),
        ({"job_label": "a b"}, "job_label='a b': it must be the name of a label"),
        ({"group_labels": "cluster,a-b"}, "group_labels.1='a-b': it must be the name of a label"),
        ({"alert_prefix": "my"}, "alert_prefix='my': it must be one or more words of a capital"),
        (
            {"runbook_url": "https://docs.example.com"},
            "runbook_url='https://docs.example.com': it must have {alert} in it",
        ),
        ({"grafana_url": "grafana"}, "grafana_url='grafana': it must be an http or https URL"),
        ({"burn_windows": "1h"}, "burn_windows='1h': it must be a list, in the file of --config"),
        (
            {"handshake_failure_warning": "0.5"},
            "handshake_failure_warning=0.5: it must be less than handshake_failure_critical, which is 0.5",
        ),
        ({"burn_windows": [{"severity": "page"}]}, "burn_windows.0.severity='page': Input should be 'critical', 'warn"),
    ],
)
def test_a_bad_override_is_named(override: dict[str, Any], message: str) -> None:
    with pytest.raises(MixinConfigError, match=re.escape(message)):
        MixinConfig.load(override)


def test_a_later_override_wins() -> None:
    assert MixinConfig.load({"mixed_for": "1h"}, {"mixed_for": "2h"}).mixed_for == Duration.parse("2h")


def test_every_setting_has_a_reason() -> None:
    assert [name for name, field in MixinConfig.model_fields.items() if len(field.description or "") < 30] == []


def test_a_scaled_configuration_shortens_all_durations_and_nothing_else() -> None:
    """Ranges are never shorter than 4 s, as a rate needs a few scrapes."""
    whole, sixtieth = MixinConfig(), MixinConfig().scaled(1 / 60)

    for name in MixinConfig.model_fields:
        before, after = getattr(whole, name), getattr(sixtieth, name)
        if name == "burn_windows":
            assert [str(window.long) for window in after] == ["1m", "6m", "24m", "1h12m"]
            assert [str(window.short) for window in after] == ["5s", "30s", "2m", "6m"]
            assert [str(window.pending) for window in after] == ["2s", "15s", "1m", "3m"]
        elif isinstance(before, Duration):
            assert after == (before / 60 if name.endswith("_for") else max(before / 60, LEAST_RANGE)), name
        else:
            assert after == before, name


def test_a_scaled_configuration_leaves_no_duration_in_the_rules() -> None:
    """What is written as a literal would not be scaled: all ranges and offsets of the rules come from settings."""
    config = MixinConfig().scaled(1 / 60)
    known = {str(getattr(config, name)) for name in MixinConfig.model_fields}
    known |= {str(length) for window in config.burn_windows for length in (window.long, window.short)}
    text = " ".join(rule["expr"] for group in build_rules(config) for rule in group["rules"])

    assert set(re.findall(r"\[(\w+)\]|offset (\w+)", text)) <= {
        pair for each in known for pair in ((each, ""), ("", each))
    }


# --------------------------------------------------------------------------------------------------------------- Export


def test_rules_go_to_standard_output_alone() -> None:
    """What is said of the links goes to standard error, so that a pipe gets rules only."""
    result = export()

    assert (result.exit_code, result.stdout, result.stderr) == (0, rules_file(MixinConfig()), RESERVED)


def test_a_folder_and_a_file(tmp_path: Path) -> None:
    folder, file = export("--out", tmp_path, "--format", "prometheusrule"), export("--out", tmp_path / "mine.yml")

    assert (tmp_path / "nixl.prometheusrule.yaml").read_text("utf-8") == prometheus_rule(MixinConfig())
    assert (tmp_path / "mine.yml").read_text("utf-8") == rules_file(MixinConfig())
    assert folder.stdout + file.stdout == ""
    assert folder.stderr == f"wrote {tmp_path}/nixl.prometheusrule.yaml\n{RESERVED}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.yml", "nixl.prometheusrule.yaml"]


def test_options_reach_the_rules() -> None:
    runbooks, grafana = "https://docs.example.com/{alert}/", "https://grafana.example.com/"
    result = export(
        *("--job-label", "namespace", "--prefix", "Staging", "--runbook-url", runbooks, "--grafana-url", grafana),
        *("--set", "transfer_slow_seconds=0.25", "--set", "transfer_slow_for=1h", "--set", "group_labels=cluster"),
    )

    rule = alert(result.stdout, "StagingNixlTransferSlow")
    assert result.stderr == ""
    assert rule["for"] == "1h"
    assert "sum by (cluster, namespace, model_name, direction, le)" in rule["expr"]
    assert ") > 0.25\n" in rule["expr"]
    assert rule["annotations"]["runbook_url"] == "https://docs.example.com/NixlTransferSlow/"
    assert rule["annotations"]["dashboard_url"] == (
        "https://grafana.example.com/d/nixl-transfers"
        "?var-job={{ $labels.namespace | urlquery }}&var-model={{ $labels.model_name | urlquery }}"
    )


def test_a_file_is_read_and_set_wins_over_it(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(
        "stalled_for: 1m\ntransfer_slow_for: 1h\n"
        "burn_windows: [{severity: info, long: 2h, short: 10m, factor: 5, pending: 3m}]\n",
        encoding="utf-8",
    )

    result = export("--config", file, "--set", "stalled_for=2m")

    assert alert(result.stdout, "NixlTransferStalled")["for"] == "2m"
    assert alert(result.stdout, "NixlTransferSlow")["for"] == "1h"
    burn = alert(result.stdout, "NixlTransferErrorBudgetBurn")
    assert (burn["for"], burn["labels"]) == ("3m", {"severity": "info", "window": "2h"})


def test_namespace_and_labels_of_the_prometheusrule() -> None:
    result = export("--format", "prometheusrule", "--namespace", "monitoring", "--label", "release=prometheus")

    assert yaml.safe_load(result.stdout)["metadata"] == {
        "name": "nixl-telemetry",
        "namespace": "monitoring",
        "labels": {"release": "prometheus"},
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "for=5m"], "error: for='5m': there is no 'for'; valid: job_label, "),
        (["--set", "stalled_for"], "error: --set 'stalled_for': it must be NAME=VALUE"),
        (["--label", "a=b"], "error: --namespace and --label are for --format prometheusrule"),
        (["--format", "prometheusrule", "--label", "=b"], "error: --label '=b': it must be NAME=VALUE"),
        (
            ["--out", "{tmp}/none/rules.yaml"],
            "error: {tmp}/none/rules.yaml cannot be written: No such file or directory",
        ),
        (["--config", "{tmp}/none.yaml"], "error: {tmp}/none.yaml cannot be read: No such file or directory"),
        (["--config", "{tmp}/list.yaml"], "error: {tmp}/list.yaml holds ['a']; it must have settings by name"),
        (["--config", "{tmp}/bad.yaml"], "error: {tmp}/bad.yaml cannot be read: while parsing"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- a\n", encoding="utf-8")
    (tmp_path / "bad.yaml").write_text("a: [\n", encoding="utf-8")

    line = refused(export(*(argument.replace("{tmp}", str(tmp_path)) for argument in arguments)))

    assert line.startswith(message.replace("{tmp}", str(tmp_path)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.yaml", "list.yaml"]


def test_the_list_has_all_alerts_with_their_settings() -> None:
    result = CliRunner().invoke(app, ["list", "--set", "mixed_for=2h"])

    rules = [rule for group in build_rules(MixinConfig()) for rule in group["rules"] if "alert" in rule]
    assert [line.split()[0] for line in result.stdout.splitlines()] == [rule["alert"] for rule in rules]
    assert re.search(r"^NixlTransferModesMixed +warning +2h  mixed_for 2h$", result.stdout, flags=re.MULTILINE)


def test_it_works_without_vllm_and_without_development_packages() -> None:
    """On a laptop, from the wheel: nothing is imported that the package does not ask for."""
    code = (
        "import sys; sys.argv = ['nixl-telemetry', 'alerts', 'export', '--set', 'mixed_for=2h']\n"
        "from nixl_telemetry.cli.main import app\n"
        "try:\n    app()\nfinally:\n    print(*sys.modules, file=sys.stderr)"
    )

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)

    loaded = {name.split(".")[0] for name in done.stderr.split()}
    assert loaded & {"vllm", "torch", "nixl", "promql_parser", "grafana_foundation_sdk", "tests", "tools"} == set()
    assert done.stdout == rules_file(MixinConfig.load({"mixed_for": "2h"}))


# --------------------------------------------------------------------------------------------------------------- Boards


@pytest.mark.parametrize(
    "path", sorted((ROOT / "nixl_telemetry/mixin/boards").glob("*.json")), ids=lambda path: path.stem
)
def test_links_to_a_board_set_variables_that_it_has(path: Path) -> None:
    board = json.loads(path.read_text("utf-8"))
    variables = {variable["name"] for variable in board["templating"]["list"]}
    links = [
        urlsplit(rule["annotations"]["dashboard_url"])
        for group in build_rules(MixinConfig())
        for rule in group["rules"]
        if "alert" in rule
    ]
    mine = [link for link in links if link.path == f"/d/{board['uid']}"]

    assert mine
    assert {name.removeprefix("var-") for link in mine for name in parse_qs(link.query)} <= variables
