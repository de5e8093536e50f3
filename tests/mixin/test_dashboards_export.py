# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The export of the boards by the command line: each format and each option, read as Grafana or Kubernetes would."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from typer.testing import CliRunner, Result

from nixl_telemetry.cli.dashboards import app
from nixl_telemetry.mixin.boards import FOLDER, BoardOptions, build_boards, text
from nixl_telemetry.mixin.config import MixinConfig
from tests.mixin.dashboard_rules import RULES, selected, targets, variables
from tests.support.commands import refused

ROOT: Final = Path(__file__).resolve().parents[2]
UIDS: Final = sorted(path.stem for path in FOLDER.glob("*.json"))
RESERVED: Final = "note: without --runbook-url, links go to a reserved name under .example, which leads nowhere\n"
RUNBOOKS: Final = "https://docs.example.com/runbooks/{alert}.html"


def export(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


def exported(tmp_path: Path, *arguments: object) -> dict[str, dict[str, Any]]:
    """The boards of a folder, by uid; they are read back from there."""
    result = export("--out", tmp_path, *arguments)
    assert result.exit_code == 0, result.output
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(tmp_path.glob("*.json"))}


def configmaps(output: str) -> dict[str, dict[str, Any]]:
    return {document["metadata"]["name"]: document for document in yaml.safe_load_all(output)}


# -------------------------------------------------------------------------------------------------------------- Formats


def test_a_folder_has_the_boards_as_they_are_shipped(tmp_path: Path) -> None:
    out = tmp_path / "new" / "boards"

    result = export("--out", out)

    assert result.exit_code == 0
    assert result.stdout == ""
    assert result.stderr == "".join(f"wrote {out}/{uid}.json\n" for uid in UIDS) + RESERVED
    assert len(UIDS) == 5
    for uid in UIDS:
        assert (out / f"{uid}.json").read_bytes() == (FOLDER / f"{uid}.json").read_bytes()


def test_an_earlier_export_is_overwritten_and_the_rest_of_the_folder_is_not(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("{}", encoding="utf-8")

    exported(tmp_path, "--prefix", "A / ")
    boards = exported(tmp_path, "--prefix", "B / ")

    assert boards["nixl-overview"]["title"] == "B / Overview"
    assert boards["mine"] == {}


def test_configmaps_go_to_standard_output_as_one_stream() -> None:
    result = export("--format", "configmap", "--namespace", "monitoring", "--label", "team=kv", "--label", "a/b=c=d")
    documents = configmaps(result.stdout)

    assert result.exit_code == 0
    assert result.stderr == RESERVED
    assert sorted(documents) == UIDS
    for uid, document in documents.items():
        assert (document["apiVersion"], document["kind"]) == ("v1", "ConfigMap")
        assert document["metadata"] == {
            "name": uid,
            "namespace": "monitoring",
            "labels": {"grafana_dashboard": "1", "team": "kv", "a/b": "c=d"},
        }
        assert document["data"] == {f"{uid}.json": (FOLDER / f"{uid}.json").read_text(encoding="utf-8")}
        assert len(json.dumps(document)) < 2**20 - 2**16, "Kubernetes takes 1 MiB"


def test_configmaps_have_no_namespace_unless_told_and_another_label_of_the_sidecar_if_told(tmp_path: Path) -> None:
    result = export("--format", "configmap", "--out", tmp_path, "--label", "grafana_dashboard=nixl")

    assert result.exit_code == 0
    for uid in UIDS:
        (document,) = configmaps((tmp_path / f"{uid}.yaml").read_text(encoding="utf-8")).values()
        assert document["metadata"] == {"name": uid, "labels": {"grafana_dashboard": "nixl"}}


def test_a_provisioning_folder_has_what_grafana_looks_for(tmp_path: Path) -> None:
    assert export("--format", "provisioning", "--out", tmp_path).exit_code == 0

    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    (provider,) = yaml.safe_load((tmp_path / "provisioning/dashboards/nixl.yaml").read_text("utf-8"))["providers"]
    sources = yaml.safe_load((tmp_path / "provisioning/datasources/nixl.yaml").read_text("utf-8"))
    assert files == [
        *(f"dashboards/{uid}.json" for uid in UIDS),
        "provisioning/dashboards/nixl.yaml",
        "provisioning/datasources/nixl.yaml",
    ]
    assert (provider["type"], provider["options"]) == ("file", {"path": "/var/lib/grafana/dashboards/nixl"})
    assert [(each["type"], each.get("isDefault", False)) for each in sources["datasources"]] == [("prometheus", False)]
    assert sources["apiVersion"] == 1


def test_the_docs_mount_the_folder_where_the_provider_looks() -> None:
    docs = (ROOT / "docs/dashboards.md").read_text(encoding="utf-8")

    assert "grafana/dashboards:/var/lib/grafana/dashboards/nixl:ro" in docs
    assert "grafana/provisioning:/etc/grafana/provisioning:ro" in docs


# -------------------------------------------------------------------------------------------------------------- Options


def test_the_data_source_is_chosen_and_can_still_be_changed(tmp_path: Path) -> None:
    for board in exported(tmp_path, "--datasource", "Thanos").values():
        found = {each["name"]: each for each in variables(board, "datasource")}
        assert (found["datasource"]["current"]["text"], found["datasource"]["current"]["value"]) == ("Thanos", "Thanos")
        assert found["datasource"]["query"] == "prometheus"
        assert "Thanos" not in json.dumps(found["trace"])
        assert {target["datasource"]["uid"] for _, target in targets(board)} == {"${datasource}"}


def test_another_job_label_is_in_every_query_and_nowhere_else(tmp_path: Path) -> None:
    for uid, board in exported(tmp_path, "--job-label", "namespace").items():
        matchers = [set(each.matchers) for _, each in selected(board)]
        assert matchers
        assert all(("namespace", "=~", "var_job") in each for each in matchers)
        assert not any(label == "job" for each in matchers for label, _, _ in each)
        job = next(each for each in variables(board, "query") if each["name"] == "job")
        assert job["label"] == "namespace"
        assert job["query"].endswith(", namespace)")
        assert all('namespace=~"' in each["query"] for each in variables(board, "query"))
        assert all('namespace=~"$job"' in each["expr"] for each in board["annotations"]["list"])
        back = text(board).replace("namespace", "job").replace('"label": "job"', '"label": "Job"')
        assert back == (FOLDER / f"{uid}.json").read_text(encoding="utf-8")


def test_titles_have_the_prefix(tmp_path: Path) -> None:
    boards = exported(tmp_path, "--prefix", "Prod: ")

    assert {board["title"] for board in boards.values()} == {
        "Prod: Handshakes and compatibility",
        "Prod: Overview",
        "Prod: Push and leases",
        "Prod: Telemetry health",
        "Prod: Transfers",
    }


def test_runbooks_are_linked_where_they_are_served(tmp_path: Path) -> None:
    result = export("--out", tmp_path, "--runbook-url", RUNBOOKS)
    everything = "".join(path.read_text(encoding="utf-8") for path in tmp_path.glob("*.json"))

    assert "note: " not in result.stderr
    assert '"https://docs.example.com/runbooks/NixlTransferSlow.html"' in everything
    assert ".example/" not in everything


def test_thresholds_follow_the_settings_of_the_alerts(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("transfer_slow_seconds: 9\nstalled_age: 2m\ntransfer_objective: 0.99\n", encoding="utf-8")
    boards = exported(tmp_path / "out", "--config", config, "--set", "transfer_slow_seconds=0.25")

    def steps(title: str) -> list[float]:
        (panel,) = (each for each in boards["nixl-transfers"]["panels"] if each["title"] == title)
        return [step["value"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]]

    assert steps("Duration of transfers that succeed") == [None, 0.25]
    assert steps("Transfer p99") == [None, 0.25]
    assert steps("Oldest in flight") == [None, 120.0]
    assert steps("Transfers that fail") == [None, 0.01, 0.05]
    assert steps("Share that fails, by direction") == [None, 0.05]


def test_steps_that_change_places_have_the_worse_colour() -> None:
    """More may fail by the objective than the other alert allows; Grafana wants steps that rise."""
    board = build_boards(BoardOptions(config=MixinConfig.load({"transfer_objective": 0.8})))["nixl-transfers"]
    (panel,) = (each for each in board["panels"] if each["title"] == "Transfers that fail")

    steps = [(step["value"], step["color"]) for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]]
    assert steps == [(None, "green"), (0.05, "orange"), (0.05, "red")]


@pytest.mark.parametrize(
    "options",
    [
        BoardOptions(datasource="x"),
        BoardOptions(title_prefix=""),
        BoardOptions(config=MixinConfig.load({"runbook_url": RUNBOOKS, "handshake_failure_warning": 0.2})),
    ],
)
def test_an_exported_board_keeps_every_rule(options: BoardOptions) -> None:
    for board in build_boards(options).values():
        assert {name: faults for name, rule in RULES.items() if (faults := list(rule(board)))} == {}


# --------------------------------------------------------------------------------------------------------------- Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: --format folder writes several files: say where to with --out DIR"),
        (
            ["--format", "provisioning"],
            "error: --format provisioning writes several files: say where to with --out DIR",
        ),
        (["--out", "x", "--namespace", "a"], "error: --namespace and --label are for --format configmap"),
        (["--out", "x", "--label", "a=b"], "error: --namespace and --label are for --format configmap"),
        (["--format", "configmap", "--label", "a"], "error: --label 'a': it must be NAME=VALUE"),
        (["--out", "x", "--set", "slow=1"], "error: slow='1': there is no 'slow'"),
        (["--out", "x", "--job-label", "a-b"], "error: job_label='a-b': it must be the name of a label"),
    ],
)
def test_a_mistake_is_named_and_nothing_is_written(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert refused(export(*arguments)).startswith(message)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")

    message = refused(export("--out", tmp_path / "file"))

    assert message == (
        f"error: {tmp_path}/file/nixl-handshakes.json cannot be written: --out {tmp_path}/file must be a folder, or new"
    )


def test_the_list_has_every_board() -> None:
    result = CliRunner().invoke(app, ["list"])

    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == UIDS
    assert "NIXL / Push and leases" in result.stdout


# ----------------------------------------------------------------------------------------------------------- Package


def test_the_wheel_ships_the_boards_and_exports_them_without_the_sdk(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); sys.modules['grafana_foundation_sdk'] = None\n"
        "from nixl_telemetry.cli.main import app; app()"
    )
    command = [
        sys.executable,
        "-c",
        code,
        str(tmp_path / "site"),
        "dashboards",
        "export",
        "--out",
        str(tmp_path / "out"),
    ]

    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    for uid in UIDS:
        assert (tmp_path / "out" / f"{uid}.json").read_bytes() == (FOLDER / f"{uid}.json").read_bytes()
