# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""``nixl-telemetry doctor``: what is wrong with an environment and a config, before a server starts with them."""
