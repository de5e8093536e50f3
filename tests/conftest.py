# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Settings of the whole test suite."""

import signal

from hypothesis import settings

# Real servers may run on the same two cores: time limits on examples would only measure them.
settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")

# A shell that starts the tests in the background has them ignore SIGINT, and children that are to be interrupted would
# inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["tests.support.observed"]
