# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Every check, by topic. A check looks at the subject and gives what it finds; it changes nothing."""

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from nixl_telemetry.cli.doctor.checks import config, environment, network, peers, settings, signals, wiring
from nixl_telemetry.cli.doctor.finding import Finding
from nixl_telemetry.cli.doctor.subject import Subject


class Check(NamedTuple):
    """One check."""

    topic: str
    look: Callable[[Subject], Iterator[Finding]]

    @property
    def name(self) -> str:
        """In words."""
        return self.look.__name__.replace("_", " ")


CHECKS: Final = tuple(
    Check(topic, look)
    for topic, looks in (
        (
            "environment",
            (
                environment.vllm,
                environment.known_bad_vllm,
                environment.nixl,
                environment.nixl_version,
                environment.nixl_telemetry_of_nixl,
                environment.variables_of_vllm,
            ),
        ),
        (
            "config",
            (
                config.arguments,
                config.keys,
                config.role,
                config.connector_names,
                config.children,
                config.buffer_device,
                config.handshake_enforcement,
                config.engine_id,
                config.behaviour,
            ),
        ),
        ("wiring", (wiring.plugin, wiring.module_path, wiring.in_force)),
        (
            "network",
            (network.side_channel_host, network.side_channel_ports, network.api_port, network.port_of_vllm),
        ),
        ("peers", (peers.peer_hosts, peers.peer_modes, peers.peer_roles)),
        ("settings", (settings.variables, settings.in_config, settings.switched_off, settings.allowed_peers)),
        (
            "signals",
            (
                signals.traces,
                signals.exporter,
                signals.endpoint,
                signals.sampler,
                signals.trace_file,
                signals.log_level,
                signals.audit_folder,
                signals.audit_key,
                signals.prometheus_folder,
            ),
        ),
    )
    for look in looks
)
