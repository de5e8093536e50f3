# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""``--kv-transfer-config`` and the arguments around it."""

import re
from collections.abc import Iterator
from typing import Final

from nixl_telemetry.cli.doctor.finding import Finding, fine, meant, note, problem, shown, unchecked, warning
from nixl_telemetry.cli.doctor.subject import MODES, MODULE, MULTI, OWN, Subject

_ROLES: Final = ("kv_producer", "kv_consumer", "kv_both")
_KEYS: Final = frozenset(
    {
        *("kv_connector", "engine_id", "kv_buffer_device", "kv_role", "kv_port", "kv_connector_extra_config"),
        *("kv_connector_module_path", "enable_permute_local_kv", "kv_load_failure_policy"),
    }
)
_OLD_KEYS: Final = frozenset({"kv_buffer_size", "kv_rank", "kv_parallel_size", "kv_ip"})
"""Known to vLLM 0.28 to 0.31, where they have no effect on NIXL connectors."""
_EXTRA_KEYS: Final = frozenset(
    {
        *("telemetry", "backends", "kv_lease_duration", "bidirectional_kv_xfer", "num_threads", "engine_ttl"),
        *("enforce_handshake_compat", "kv_recompute_threshold", "decoder_kv_blocks_ttl", "push_registration_timeout"),
        "connectors",
    }
)
_DEVICES: Final = ("cuda", "cpu", "xpu")
_SHORT_LEASE: Final = 10
_TYPO: Final = 0.75


def arguments(subject: Subject) -> Iterator[Finding]:
    """Readable, taken by vLLM, and with a connector."""
    if subject.transfer_error is not None:
        yield problem(subject.transfer_error, "quote the whole JSON object for your shell: '{\"kv_connector\": ...}'")
        return
    if refused := subject.asked.get("refused"):
        # What is unknown may come with a value, which may be a secret.
        text = re.sub(r"(?<=unrecognized arguments: ).*", lambda match: " ".join(_names(match[0])), str(refused))
        yield problem(text, "correct the arguments; `vllm serve --help=all` lists them")
    elif "values" in subject.asked and subject.serving:
        yield fine("vLLM takes the arguments")
    elif unread := subject.asked.get("unread"):
        yield unchecked(f"the arguments were not read by vLLM's own parser: {unread}", "use a vLLM that is supported")
    if subject.config_file is not None:
        yield unchecked(f"--config {shown(subject.config_file)} was not read: only vLLM reads it", "do without --quick")
    if subject.transfer is None:
        if subject.serving and subject.config_file is None and not refused:
            yield problem(
                "the arguments have no --kv-transfer-config: such an instance exchanges no KV",
                "add --kv-transfer-config",
            )
        else:
            yield note("no --kv-transfer-config was given: only the environment is checked")


def keys(subject: Subject) -> Iterator[Finding]:
    """Keys that vLLM refuses, and keys of the extra config that it ignores."""
    for connector in subject.connectors:
        for key in _odd(set(connector.config) - _KEYS):
            if key in _OLD_KEYS:
                refused = subject.vllm is None or not re.match(r"0\.(28|29|30|31)\.", subject.vllm.version)
                yield (problem if refused else note)(
                    f"{connector.where}{key} is set: NIXL connectors do not use it, and vLLM 0.32 and later refuse it",
                    "remove it",
                )
            elif key in _EXTRA_KEYS:
                yield problem(
                    f"{connector.where}{key} stands beside kv_connector: vLLM refuses it there",
                    f'move it into kv_connector_extra_config: {{"{key}": ...}}',
                )
            else:
                similar = meant(key, _KEYS)
                yield problem(
                    f"--kv-transfer-config has the unknown key {connector.where}{shown(key)}: vLLM refuses it",
                    f"write {similar}" if similar else f"valid keys: {', '.join(sorted(_KEYS))}",
                )
        extra = connector.config.get("kv_connector_extra_config")
        if extra is not None and not isinstance(extra, dict):
            yield problem(
                f"{connector.where}kv_connector_extra_config is {shown(extra)}", "make it an object of keys and values"
            )
        if connector.mode:
            for key in _odd(set(connector.extra) - _EXTRA_KEYS):
                if similar := meant(key, _EXTRA_KEYS, _TYPO):
                    yield warning(
                        f"{connector.where}kv_connector_extra_config has {shown(key)}, which vLLM ignores",
                        f"write {similar}",
                    )


def role(subject: Subject) -> Iterator[Finding]:
    """``kv_role``."""
    for connector in subject.connectors:
        value = connector.config.get("kv_role")
        if value in _ROLES:
            yield fine(f"{connector.where}kv_role is {value}")
        elif value is None and connector.config.get("kv_connector") is not None:
            yield problem(
                f"{connector.where}kv_role is missing: vLLM refuses a connector without one",
                "add kv_producer (prefill), kv_consumer (decode) or kv_both",
            )
        elif value is not None:
            similar = meant(str(value), _ROLES, 0.5)
            yield problem(
                f"{connector.where}kv_role is {shown(value)}, which vLLM does not know",
                f"write {similar}" if similar else "write kv_producer (prefill), kv_consumer (decode) or kv_both",
            )


def connector_names(subject: Subject) -> Iterator[Finding]:
    """Names that lead to nothing."""
    registered = set(re.findall(r'register_connector\(\s*"(\w+)"', _factory(subject)))
    for connector in subject.connectors:
        if "kv_connector" not in connector.config:
            yield problem(
                f"{connector.where}kv_connector is missing: no KV is exchanged",
                "name a connector, for example NixlConnector",
            )
        elif not connector.name:
            yield problem(
                f"{connector.where}kv_connector is {shown(connector.config['kv_connector'])}", "make it a name"
            )
        elif connector.mode or connector.module or not registered or connector.name in registered:
            if connector is subject.connectors[0] and not subject.nixl and connector.module != MODULE:
                yield warning(
                    f"kv_connector {shown(connector.name)} is no NIXL connector, and has none inside",
                    f"name one of {', '.join(sorted(MODES))}",
                )
        else:
            similar = meant(connector.name, {*registered, *OWN})
            yield problem(
                f"{connector.where}kv_connector is {shown(connector.name)}, which vLLM does not know",
                f"write {similar}" if similar else "give its kv_connector_module_path, too",
            )
    if error := subject.asked.get("connector_error"):
        yield problem(f"vLLM cannot load the connector: {error}", "correct kv_connector or kv_connector_module_path")


def children(subject: Subject) -> Iterator[Finding]:
    """A MultiConnector with more than one NIXL connector."""
    if subject.transfer is not None and subject.transfer.get("kv_connector") == MULTI and len(subject.nixl) > 1:
        listed = ", ".join(f"{one.where}kv_connector {one.name}" for one in subject.nixl)
        modes = {one.mode for one in subject.nixl}
        yield problem(
            f"a MultiConnector has {len(subject.nixl)} NIXL connectors ({listed}): they share one side channel port"
            + (", in different transfer modes" if len(modes) > 1 else ""),
            "keep one of them",
        )


def buffer_device(subject: Subject) -> Iterator[Finding]:
    """``kv_buffer_device``."""
    supported = subject.asked.get("buffer_devices")
    device = subject.asked.get("device")
    for connector in subject.nixl:
        value = connector.config.get("kv_buffer_device")
        if value is None:
            continue
        if isinstance(supported, list) and value not in supported:
            yield problem(
                f"{connector.where}kv_buffer_device is {shown(value)}, and on {device} NIXL connectors take "
                f"{' or '.join(map(str, supported))} only",
                f"write {supported[0]}",
            )
        elif value not in _DEVICES:
            similar = {"gpu": "cuda", "cuda:0": "cuda", "host": "cpu", "dram": "cpu"}.get(str(value).lower())
            yield warning(
                f"{connector.where}kv_buffer_device is {shown(value)}, which is no device of vLLM's own platforms",
                f"write {similar}"
                if similar
                else f"write {', '.join(_DEVICES)}, or what the platform's plugin asks for",
            )
        else:
            yield fine(f"{connector.where}kv_buffer_device is {value}")


def handshake_enforcement(subject: Subject) -> Iterator[Finding]:
    """``enforce_handshake_compat``."""
    for connector in subject.nixl:
        value = connector.extra.get("enforce_handshake_compat", True)
        if value is True:
            yield fine("the compatibility hash is enforced")
        elif not value:
            yield warning(
                f"{connector.where}enforce_handshake_compat is {shown(value)}: KV that does not fit is let through",
                "remove it, and use `nixl-telemetry check` to find what differs",
            )
        else:
            yield warning(
                f"{connector.where}enforce_handshake_compat is {shown(value)}, which vLLM takes for true", "write true"
            )


def engine_id(subject: Subject) -> Iterator[Finding]:
    """An engine id that is the same at every start, and in every replica."""
    value = subject.transfer.get("engine_id") if subject.transfer is not None else None
    if value is not None and "engine_id" in (subject.transfer or {}):
        yield warning(
            f"engine_id is fixed to {shown(value)}: replicas and restarts are taken for the same engine",
            "remove it: vLLM makes a new one at each start",
        )


def behaviour(subject: Subject) -> Iterator[Finding]:
    """Combinations that are refused, or hide what goes wrong."""
    for connector in subject.nixl:
        if connector.mode == "push" and connector.extra.get("bidirectional_kv_xfer"):
            yield problem(
                f"{connector.where}bidirectional_kv_xfer is on with {connector.name}: push does not support it",
                "remove bidirectional_kv_xfer, or use NixlPullConnector",
            )
        lease = connector.extra.get("kv_lease_duration")
        if isinstance(lease, int | float) and not isinstance(lease, bool) and lease < _SHORT_LEASE:
            yield warning(
                f"{connector.where}kv_lease_duration is {shown(lease)} s: prefill may release KV before it was read",
                "give at least 30, its default",
            )
        elif lease is not None and (not isinstance(lease, int | float) or isinstance(lease, bool)):
            yield problem(f"{connector.where}kv_lease_duration is {shown(lease)}", "give a number of seconds")
        if connector.config.get("kv_load_failure_policy") == "recompute":
            yield note(
                f'{connector.where}kv_load_failure_policy is "recompute": failed transfers look like slow requests',
                "watch vllm:nixl_num_failed_transfers_total",
            )
        elif (policy := connector.config.get("kv_load_failure_policy", "fail")) != "fail":
            yield problem(f"{connector.where}kv_load_failure_policy is {shown(policy)}", 'write "fail" or "recompute"')


def _factory(subject: Subject) -> str:
    name = "distributed/kv_transfer/kv_connector/factory.py"
    return subject.vllm.read(name) if subject.vllm is not None else ""


def _odd(keys: set[str]) -> list[str]:
    return sorted(map(str, keys))[:20]


def _names(text: str) -> list[str]:
    return [word.partition("=")[0] for word in text.split() if word.startswith("-")]
