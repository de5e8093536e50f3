# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Dashboards, alerts and recording rules over the metrics of :mod:`nixl_telemetry.signals.catalogue`."""
