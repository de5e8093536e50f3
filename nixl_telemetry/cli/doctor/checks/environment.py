# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What is installed, and what of vLLM's and NIXL's own variables is in the way."""

import importlib.metadata
import re
from collections.abc import Iterator
from typing import Final

from nixl_telemetry.cli.doctor import process
from nixl_telemetry.cli.doctor.finding import Finding, fine, meant, note, problem, shown, unchecked, warning
from nixl_telemetry.cli.doctor.subject import Subject, spec_of

_NIXL: Final = ("nixl", "nixl-cu12", "nixl-cu13", "nixl-rocm")
_IMPORT_SECONDS: Final = 60
_OLDEST_NIXL: Final = (1, 0)
_BAD_NIXL: Final = {
    ("nixl", "1.3.0"): "broke vLLM's own tests (vllm#45843)",
    ("nixl", "1.3.1"): "was soon replaced by 1.3.2 (dynamo#13185)",
    ("nixl-cu13", "1.4.1"): "was built without telemetry: stock vLLM discards each finished transfer, and the "
    "suite has no bytes and times (vllm#58038)",
}
_BAD_VLLM: Final = {
    "0.29.0": "on hybrid models, a request whose KV did not arrive may be answered with garbage (vllm#52234)",
}
_OFF: Final = frozenset({"n", "no", "0", "false", "off"})
_OF_NIXL: Final = (
    "NIXL_TELEMETRY_ENABLE",
    "NIXL_TELEMETRY_EXPORTER",
    "NIXL_TELEMETRY_DIR",
    "NIXL_TELEMETRY_BUFFER_SIZE",
)
_GONE: Final = {
    "VLLM_NIXL_ABORT_REQUEST_TIMEOUT": 'use "kv_lease_duration" in kv_connector_extra_config',
}
"""Variables that vLLM had, and what took their place."""
_FOREIGN: Final = re.compile(
    r"VLLM_\w*(?:SERVICE_(?:HOST|PORT)\w*|PORT_\d+_(?:TCP|UDP)\w*)|VLLM_(?:OMNI|ASCEND|SPYRE|GAUDI|RBLN|TPU)_\w+"
)
"""What Kubernetes adds for a service that is called vllm-something, and what plugins of vLLM read."""
_LINKS: Final = ("tcp://", "udp://", "sctp://")


def vllm(subject: Subject) -> Iterator[Finding]:
    """Installed, supported, and importable."""
    from nixl_telemetry.seam.versions import SUPPORTED, unsupported

    if subject.vllm is None:
        yield problem(
            "vLLM is not installed in this Python",
            "run this with the Python of the server's environment or image; `check` and `probe` work without vLLM",
        )
        return
    if unsupported(subject.vllm.version):
        first, last = (".".join(map(str, minor)) for minor in SUPPORTED)
        yield problem(
            f"vLLM {subject.vllm.version} is not supported: the stock connectors run, without telemetry",
            f"install vLLM {first} to {last}, or a newer nixl-telemetry",
        )
        return
    yield fine(f"vLLM {subject.vllm.version}")
    if subject.not_asked is not None:
        # Not an answer in time says nothing of vLLM; whatever else ended it would end a server.
        if "in time" in subject.not_asked:
            yield unchecked(
                f"vLLM itself was asked, and {subject.not_asked}", "give more --timeout, or --quick to do without it"
            )
        else:
            yield problem(
                f"vLLM {subject.vllm.version} cannot be imported: {subject.not_asked}",
                "repair the installation: a server would not start either",
            )


def known_bad_vllm(subject: Subject) -> Iterator[Finding]:
    """What is known of this version."""
    if subject.vllm and (reason := _BAD_VLLM.get(subject.vllm.version)):
        yield note(f"vLLM {subject.vllm.version}: {reason}", "prefer a newer vLLM for such models")


def nixl(subject: Subject) -> Iterator[Finding]:
    """Can be imported, which may abort: in a process of its own."""
    packages = nixl_packages()
    if not packages:
        yield problem("NIXL is not installed: no NIXL connector starts", "pip install nixl")
        return
    if subject.quick:
        yield fine("NIXL is installed; --quick does not import it")
        return
    # Over before the check is given up: nobody would end the process then.
    seconds = min(_IMPORT_SECONDS, subject.patience * 0.8)
    ended = process.run(["-c", f"import {packages[0]}._api"], "", seconds)
    if ended.code == 0:
        yield fine(f"{packages[0]} can be imported")
    elif ended.code is None:
        yield unchecked(f"{packages[0]} was not imported in {seconds:g} s", "give more --timeout, or use --quick")
    else:
        yield problem(
            f"{packages[0]} is installed and cannot be imported: {ended.reason()}",
            "install the build for this machine's CUDA or ROCm (nixl-cu12, nixl-cu13, nixl-rocm)",
        )


def nixl_packages() -> list[str]:
    """The packages of NIXL that are installed."""
    return [name for name in ("nixl", "nixl_rocm") if spec_of(name)]


def nixl_version(_subject: Subject) -> Iterator[Finding]:
    """One version of it, and a good one."""
    found = {name: version for name in _NIXL if (version := version_of(name))}
    if not found:
        return
    listed = ", ".join(f"{name} {version}" for name, version in found.items())
    bad = False
    for (name, version), reason in _BAD_NIXL.items():
        if found.get(name) == version:
            bad = True
            yield warning(f"{name} {version} {reason}", "install another version of NIXL")
    versions = set(found.values())
    if len(versions) > 1:
        bad = True
        yield warning(f"NIXL is installed in different versions: {listed}", "install the same version of each")
    numbers = [tuple(map(int, re.findall(r"\d+", version)[:2])) for version in versions]
    if any(number < _OLDEST_NIXL for number in numbers):
        bad = True
        yield warning(f"NIXL is older than 1.0: {listed}", "install the NIXL that this vLLM asks for")
    if not bad:
        yield fine(listed)


def nixl_telemetry_of_nixl(subject: Subject) -> Iterator[Finding]:
    """NIXL's own telemetry, from which bytes and times of transfers come."""
    value = subject.environ.get("NIXL_TELEMETRY_ENABLE")
    if value is not None and value.strip().lower() in _OFF:
        instrumented = subject.nixl and all(subject.is_instrumented(connector) for connector in subject.nixl)
        effect = (
            "the instrumented connectors serve, without bytes and times of transfers; stock ones fail"
            if instrumented
            else "stock connectors fail each finished transfer, and instrumented ones have no bytes and times"
        )
        yield (warning if instrumented else problem)(
            f"NIXL_TELEMETRY_ENABLE is {shown(value)}: {effect}", "unset NIXL_TELEMETRY_ENABLE"
        )
    else:
        yield fine("NIXL's own telemetry is on")
    for name in subject.environ:
        if (
            name not in _OF_NIXL
            and name.startswith("NIXL_TELEMETRY_ENABLE")
            and name != "NIXL_TELEMETRY_ENABLED_METRICS"
        ):
            yield warning(f"{name} is set, and NIXL does not read it", "set NIXL_TELEMETRY_ENABLE instead")
    exporter = subject.environ.get("NIXL_TELEMETRY_EXPORTER", "")
    ranks = subject.number("tensor_parallel_size") or 1
    if "prometheus" in exporter.lower() and ranks > 1:
        yield warning(
            f"NIXL_TELEMETRY_EXPORTER is {shown(exporter)} with tensor-parallel size {ranks}: all ranks open the same "
            "port, and all but the first fail",
            "unset it: the suite's metrics are on vLLM's own /metrics, for all ranks",
        )


def variables_of_vllm(subject: Subject) -> Iterator[Finding]:
    """Variables that vLLM does not know, and therefore ignores."""
    known = set(subject.asked.get("known_variables") or ())
    if not known and subject.vllm is not None:
        known = set(re.findall(r'^    "(VLLM_\w+)":', subject.vllm.read("envs.py"), re.MULTILINE))
    if not known:
        return
    # It does not know itself what it reads before anything else.
    known |= {"VLLM_TARGET_DEVICE", "VLLM_PORT", "VLLM_PLUGINS"}
    unknown = [
        name
        for name, value in sorted(subject.environ.items())
        if name.startswith("VLLM_") and name not in known and not (_FOREIGN.fullmatch(name) or value.startswith(_LINKS))
    ]
    for name in unknown[:20]:
        remedy = _GONE.get(name)
        if remedy is None:
            similar = meant(name, known, 0.8)
            remedy = f"set {similar} instead" if similar else "unset it, or look up how this vLLM calls it"
        yield warning(f"{name} is set, and this vLLM does not know it: it has no effect", remedy)
    if not unknown:
        yield fine("vLLM knows all VLLM_ variables that are set")


def version_of(distribution: str) -> str | None:
    """The version of a distribution; None: it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
