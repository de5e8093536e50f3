# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Makes a vLLM server share two cores; Python imports this file by itself at start-up.

Engine core and workers poll shared memory with ``os.sched_yield`` for a second after each message.
Where threads outnumber cores, Linux 6.18 then starves others for many seconds, whole processes of other
sessions included: ``sched_yield`` there moves the caller behind everybody else in virtual time. A short
sleep gives the core away.
"""

import os
import time

_POLL_SECONDS = 1e-3


def _sleep_instead() -> None:
    time.sleep(_POLL_SECONDS)


os.sched_yield = _sleep_instead
