# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Asking an instance's handshake side channel for its compatibility hash."""

import msgspec
import zmq

_ANSWER_MS = 30_000


def compatibility_hash(host: str, port: int) -> str:
    """The hash that the instance answers to its peers; it works for a stock instance too.

    Asks for rank (0, 0), which every instance has: asked for another one, a stock instance's listener ends for good.

    Raises:
        zmq.ZMQError: No answer came.
    """
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, _ANSWER_MS)
        socket.connect(f"tcp://{host}:{port}")
        socket.send(msgspec.msgpack.encode((b"get_meta_msg", 0, 0)))
        answer = msgspec.msgpack.decode(socket.recv_multipart()[0])
    return str(answer["compatibility_hash"])
