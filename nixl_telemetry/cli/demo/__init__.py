# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""``nixl-telemetry demo``: every signal of the suite, from real servers on this machine.

- ``command``: options, what must be installed, exit status
- ``folder``: where it writes
- ``story``: what happens, in order
- ``bench``: the servers
- ``evidence``: what was measured, and whether it is what should be there
- ``view``: how it looks
"""
