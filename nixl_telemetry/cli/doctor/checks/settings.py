# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The suite's own settings: each mistake by itself, where a start stops at the first."""

from collections.abc import Iterator, Mapping

from nixl_telemetry.cli.doctor.finding import Finding, fine, meant, note, problem, shown
from nixl_telemetry.cli.doctor.subject import Subject, bad_setting, is_setting_variable
from nixl_telemetry.settings import AUTO_VARIABLE, CONFIG_KEY, Settings, variable_of


def variables(subject: Subject) -> Iterator[Finding]:
    """``NIXLTEL_*``."""
    names = {variable_of(name): name for name in Settings.model_fields}
    good = True
    for variable, value in sorted(subject.environ.items()):
        if not is_setting_variable(variable):
            continue
        if variable not in names:
            good = False
            similar = meant(variable, [*names, AUTO_VARIABLE])
            # Without its value: what is not known may be a secret.
            yield problem(
                f"the variable {variable} is not known: vLLM does not start",
                f"write {similar}" if similar else f"unset it; valid ones: {', '.join(sorted(names))}",
            )
        elif wrong := bad_setting(names[variable], value):
            good = False
            yield problem(f"{variable} is {shown(value)}: vLLM does not start", wrong)
    if good:
        yield fine("all NIXLTEL_ variables are valid")


def in_config(subject: Subject) -> Iterator[Finding]:
    """``kv_connector_extra_config["telemetry"]``."""
    for connector in subject.nixl:
        where = f'{connector.where}kv_connector_extra_config["{CONFIG_KEY}"]'
        if not isinstance(connector.telemetry, Mapping):
            yield problem(
                f"{where} is {shown(connector.telemetry)}: vLLM does not start", "make it an object of settings"
            )
            continue
        for name, value in list(connector.telemetry.items())[:50]:
            if name not in Settings.model_fields:
                similar = meant(name, Settings.model_fields)
                yield problem(
                    f"{where} has the unknown key {shown(name)}: vLLM does not start",
                    f"write {similar}"
                    if similar
                    else f"remove it; valid keys: {', '.join(sorted(Settings.model_fields))}",
                )
            elif wrong := bad_setting(name, value):
                yield problem(f"{where}[{shown(name)}] is {shown(value)}: vLLM does not start", wrong)


def allowed_peers(subject: Subject) -> Iterator[Finding]:
    """Whom a request may have the instance connect to. vLLM asks no ``kv_role`` before it does."""
    observed = next((connector for connector in subject.nixl if subject.is_instrumented(connector)), None)
    if observed is None or not subject.settings.enabled:
        return
    if (allowed := subject.settings.allowed_peers) is not None:
        yield fine(f"allowed_peers is {shown(list(allowed))}")
        return
    telemetry = observed.telemetry if isinstance(observed.telemetry, Mapping) else {}
    # A value that is wrong was found already.
    if "allowed_peers" not in telemetry and variable_of("allowed_peers") not in subject.environ:
        yield note(
            "allowed_peers is not set: what remote_host of a client's request names is connected to, and whoever asks "
            "is told the metadata of the KV's memory",
            f"set {variable_of('allowed_peers')} to the networks of your instances, for example 10.0.0.0/8",
        )


def switched_off(subject: Subject) -> Iterator[Finding]:
    """What was switched off on purpose, or was it."""
    if not subject.settings.enabled:
        yield note("enabled is false: the connectors behave as the stock ones, with no telemetry")
        return
    for name in ("metrics", "traces", "logs"):
        if not getattr(subject.settings, name):
            yield note(f"{name} is false: no {name} of the suite")
