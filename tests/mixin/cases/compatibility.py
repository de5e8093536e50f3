# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Cases of the alerts on compatibility."""

from typing import Final

from tests.mixin.case import MODEL, Case, Kind, series

_LINK: Final = "nixl-handshakes?var-job=pd&var-model=org%2Fmodel"
_DEPLOYMENT: Final = {"job": "pd", "model_name": MODEL}


def _rejections(factor: str, instance: str = "d0:8000") -> str:
    return series("nixl_handshake_rejections_total", factor=factor, instance=instance)


def _info(instance: str, **labels: str) -> str:
    given = {"vllm_version": "0.32.0", "compat_hash": "aa", "handshake_enforced": "true", **labels}
    return series("nixl_connector_info", instance=instance, **given)


def _mismatch(alert: str, factor: str, other: str, why: str) -> tuple[Case, ...]:
    """Cases of an alert on rejections because of ``factor``, which those because of ``other`` do not concern."""
    labels = {**_DEPLOYMENT, "factor": factor}
    return (
        Case(
            alert,
            "warning",
            Kind.FIRES,
            "one rejection on each of three instances is one alert",
            {_rejections(factor, f"d{each}:8000"): "0x10 1x40" for each in range(3)},
            onset=11,
            labels=labels,
            description=f"Instances of {MODEL} in pd refused handshakes, 3 in 15m: {why}",
            link=_LINK,
        ),
        Case(
            alert,
            "warning",
            Kind.FIRES,
            "the first scrape of a new instance finds the counter at 1 already",
            {_rejections(factor): "_x11 1x40", _rejections(factor, "d1:8000"): "0x60"},
            onset=11,
            labels=labels,
            description=f"Instances of {MODEL} in pd refused handshakes, 1 in 15m: {why}",
            link=_LINK,
        ),
        Case(alert, "warning", Kind.THRESHOLD, "no rejection", {_rejections(factor): "0x60"}),
        Case(
            alert,
            "warning",
            Kind.RESET,
            "an instance with old rejections is restarted, and one cannot be scraped for ten minutes",
            {_rejections(factor): "7x60 0x60", _rejections(factor, "d1:8000"): "7x60 _x10 7x50"},
            since=30,
            until=120,
        ),
        Case(alert, "warning", Kind.HEALTHY, "what differs is none of its factors", {_rejections(other): "0x10 1x50"})
        if other
        else Case(
            alert,
            "warning",
            Kind.HEALTHY,
            "handshakes succeed",
            {series("nixl_handshake_duration_seconds_count"): "0+5x60", _rejections(factor): "0x60"},
        ),
    )


def _mixed(
    alert: str, differing: dict[str, str], alike: dict[str, str], description: str, link: str = ""
) -> tuple[Case, ...]:
    """Cases of an alert on what instances have in common, or not."""
    mode = {"transfer_mode": "pull"} if link else {}
    return (
        Case(
            alert,
            "warning",
            Kind.FIRES,
            "one of three instances is different, beside a stock one that tells nothing",
            {
                _info("p0:8000"): "1x99",
                _info("d0:8000"): "1x99",
                _info("d1:8000", **differing): "_x11 1x80",
                series("vllm:nixl_num_failed_transfers_total", instance="d2:8000", transfer_mode=None): "0x99",
            },
            onset=11,
            labels={**_DEPLOYMENT, **mode},
            description=description,
            link=_LINK + link,
        ),
        Case(
            alert,
            "warning",
            Kind.THRESHOLD,
            "there is one only, on P and D of several engines",
            {_info("p0:8000"): "1x99", _info("d0:8000"): "1x99", _info("d0:8000", engine="1"): "1x99"},
            until=90,
        ),
        Case(
            alert,
            "warning",
            Kind.HEALTHY,
            "instances of other models, other jobs and a difference that it is not about",
            {
                _info("d0:8000"): "1x99",
                _info("d1:8000", model_name="other", **differing): "1x99",
                _info("d2:8000", job="staging", **differing): "1x99",
                _info("d3:8000", **alike): "1x99",
            },
            until=90,
        ),
        Case(
            alert,
            "warning",
            Kind.RESET,
            "an instance comes back as another after a restart, and is the last to do so",
            {_info("d0:8000"): "1x20 stale", _info("d0:8000", **differing): "_x30 1x60"},
            until=90,
        ),
    )


CASES: Final = (
    *_mismatch(
        "NixlCompatMismatch",
        "dtype",
        "",
        "dtype differs. Requests paired so fail until one side is changed.",
    ),
    *_mismatch(
        "NixlTransferModeMismatch",
        "transfer_mode",
        "model",
        "one side pulls and the other pushes. Requests paired so fail until one is changed.",
    ),
    *_mismatch(
        "NixlConnectorVersionMismatch",
        "vllm_version",
        "transfer_mode",
        "vllm_version differs. Requests paired so fail until both sides run one release.",
    ),
    *_mixed(
        "NixlCompatHashesMixed",
        {"compat_hash": "bb"},
        {"compat_hash": "cc", "transfer_mode": "push"},
        f"The pull instances of {MODEL} in pd have 2 compatibility hashes. Handshakes between these are refused.",
        "&var-mode=pull",
    ),
    *_mixed(
        "NixlConnectorVersionsMixed",
        {"vllm_version": "0.31.0", "connector_version": "13"},
        {"compat_hash": "bb", "transfer_mode": "push"},
        f"The instances of {MODEL} in pd run 2 versions of vLLM. Two releases never exchange KV.",
    ),
    *_mixed(
        "NixlTransferModesMixed",
        {"transfer_mode": "push"},
        {"compat_hash": "bb", "vllm_version": "0.31.0"},
        f"Some instances of {MODEL} in pd pull KV and others push it. A pull and a push instance never exchange KV.",
    ),
    Case(
        "NixlEnforcementOff",
        "warning",
        Kind.FIRES,
        "two of three instances do not enforce it",
        {
            _info("p0:8000"): "1x60",
            _info("d0:8000", handshake_enforced="false"): "_x11 1x50",
            _info("d1:8000", handshake_enforced="false"): "_x11 1x50",
        },
        onset=11,
        labels=_DEPLOYMENT,
        description=f"2 engines of {MODEL} in pd run with enforce_handshake_compat set to false. KV that does not fit "
        "would give wrong output.",
        link=_LINK,
    ),
    Case(
        "NixlEnforcementOff",
        "warning",
        Kind.THRESHOLD,
        "none is left without, and there is a stock one that does not tell",
        {
            _info("d0:8000"): "1x60",
            series("vllm:nixl_num_failed_transfers_total", instance="d1:8000", transfer_mode=None): "0x60",
        },
    ),
    Case("NixlEnforcementOff", "warning", Kind.HEALTHY, "all enforce it", {_info("p0:8000"): "1x60"}),
    Case(
        "NixlEnforcementOff",
        "warning",
        Kind.RESET,
        "the instance is restarted with enforcement",
        {_info("d0:8000", handshake_enforced="false"): "1x10 stale", _info("d0:8000"): "_x12 1x50"},
    ),
    Case(
        "NixlEnforcementOff",
        "critical",
        Kind.FIRES,
        "a peer that does not fit was let through",
        {series("nixl_handshake_bypassed_total", factor="dtype"): "0x10 1x20"},
        onset=11,
        labels={**_DEPLOYMENT, "factor": "dtype"},
        description=f"Instances of {MODEL} in pd let 1 handshakes through though dtype differs. Answers made of that "
        "KV may be wrong.",
        link=_LINK,
    ),
    Case(
        "NixlEnforcementOff",
        "critical",
        Kind.THRESHOLD,
        "enforcement is off and no peer differed",
        {
            series("nixl_handshake_bypassed_total", factor="dtype"): "0x60",
            _info("d0:8000", handshake_enforced="false"): "1x60",
        },
    ),
    Case(
        "NixlEnforcementOff",
        "critical",
        Kind.RESET,
        "the instance is restarted, and has met no such peer since",
        {series("nixl_handshake_bypassed_total", factor="dtype"): "3x10 0x50"},
        since=15,
    ),
    Case(
        "NixlEnforcementOff",
        "critical",
        Kind.HEALTHY,
        "a fleet that enforces it refuses a peer",
        {_rejections("dtype"): "0x10 5x50", _info("d0:8000"): "1x60"},
    ),
)
