# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Programs that answer and may hang, abort or print anything: each in a process that is gone afterwards."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

_QUIET: Final = {"VLLM_LOGGING_LEVEL": "ERROR", "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
_OUTPUT_LIMIT: Final = 4 * 2**20


class Ended(NamedTuple):
    """How a program ended."""

    code: int | None
    """None: it did not, and was killed."""
    output: str
    errors: str

    def reason(self) -> str:
        """In a few words, why there is no answer."""
        if self.code is None:
            return "it did not answer in time"
        if self.code < 0:
            with contextlib.suppress(ValueError):
                return f"it was ended by {signal.Signals(-self.code).name}"
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        return lines[-1] if lines else f"it ended with {self.code}"


def run(python: Sequence[str], stdin: str, timeout: float) -> Ended:
    """Run this Python with arguments, and end all that it started.

    As in the program ``vllm``, packages are not looked for in the working directory.
    """
    # A folder of its own, since torch makes one and leaves it.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        return _run(python, stdin, timeout, {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "TMPDIR": folder})


def _run(python: Sequence[str], stdin: str, timeout: float, variables: Mapping[str, str]) -> Ended:
    environment = {**os.environ, **_QUIET, **variables}
    # With an own config of its logging vLLM would open files.
    environment.pop("VLLM_LOGGING_CONFIG_PATH", None)
    # Files, and no pipes: a grandchild that lives on could hold those open.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, tempfile.TemporaryFile() as into:
        into.write(stdin.encode("utf-8", "surrogateescape"))
        into.seek(0)
        process = subprocess.Popen(  # noqa: S603  it is this Python
            [sys.executable, "-P", *python], stdin=into, stdout=out, stderr=err, env=environment, start_new_session=True
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return Ended(code, _text(out), _text(err))


def ask_vllm(arguments: Sequence[str], timeout: float) -> tuple[dict[str, Any] | None, str]:
    """What vLLM says, or why it does not."""
    ended = run(["-m", "nixl_telemetry.seam.inspection"], json.dumps(list(arguments)), timeout)
    if ended.code == 0:
        with contextlib.suppress(ValueError, IndexError, RecursionError):
            answer = json.loads(ended.output.splitlines()[-1])
            if isinstance(answer, dict):
                return answer, ""
    return None, ended.reason()


def _text(file: Any) -> str:
    file.seek(0)
    return str(file.read(_OUTPUT_LIMIT).decode(errors="replace"))
