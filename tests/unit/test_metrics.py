# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Metric updates add up, whatever thread, rank or step they come from."""

import threading

import msgspec
from hypothesis import given, strategies as st

from nixl_telemetry.signals.catalogue import (
    CONNECTOR_INFO,
    HANDSHAKE_DURATION,
    TELEMETRY_DROPPED,
    TRANSFER_BYTES,
    TRANSFERS_IN_FLIGHT,
)
from nixl_telemetry.signals.metrics import Batch, Recorder, label_values, merge, series_key


def test_nothing_recorded_nothing_sent() -> None:
    """An idle step sends nothing."""
    assert Recorder(16).drain() is None


def test_updates_are_collected_by_kind() -> None:
    """Counters and levels are summed, observations listed, an info is what it is."""
    recorder = Recorder(100)
    recorder.add(TRANSFER_BYTES, ("read",), 10)
    recorder.add(TRANSFER_BYTES, ("read",), 5)
    recorder.add(TRANSFER_BYTES, ("write",), 1)
    recorder.add(TRANSFERS_IN_FLIGHT, ("read",), 1)
    recorder.add(TRANSFERS_IN_FLIGHT, ("read",), -1)
    recorder.add(HANDSHAKE_DURATION, ("",), 0.5)
    recorder.add(HANDSHAKE_DURATION, ("",), 0.25)
    recorder.add(CONNECTOR_INFO, ("0.32.0", "1.5", "kv_both", "abc", "true"))

    batch = recorder.drain()

    assert batch == {
        "nixl_transfer_bytes_total": {"read": 15, "write": 1},
        "nixl_transfers_in_flight": {"read": 0},
        "nixl_handshake_duration_seconds": {"": [0.5, 0.25]},
        "nixl_connector_info": {"0.32.0\x1f1.5\x1fkv_both\x1fabc\x1ftrue": 1.0},
    }
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch)) == batch
    assert recorder.drain() is None


def test_a_full_recorder_drops_and_counts() -> None:
    """What comes beyond the limit is counted once, with the next batch."""
    recorder = Recorder(2)
    for _ in range(5):
        recorder.add(TRANSFER_BYTES, ("read",), 1)

    assert recorder.drain() == {"nixl_transfer_bytes_total": {"read": 2}, TELEMETRY_DROPPED.name: {"metrics": 3}}
    recorder.add(TRANSFER_BYTES, ("read",), 1)
    assert recorder.drain() == {"nixl_transfer_bytes_total": {"read": 1}}


def test_threads_lose_nothing() -> None:
    """Eight threads add while another drains."""
    recorder = Recorder(1_000_000)
    total: Batch = {}

    def add() -> None:
        for _ in range(5_000):
            recorder.add(TRANSFER_BYTES, ("read",), 1)

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        merge(total, recorder.drain() or {})
    merge(total, recorder.drain() or {})

    assert total == {"nixl_transfer_bytes_total": {"read": 40_000}}


@given(st.lists(st.lists(st.tuples(st.sampled_from(["read", "write"]), st.integers(0, 9)), max_size=5), max_size=5))
def test_merging_batches_equals_recording_all(batches: list[list[tuple[str, int]]]) -> None:
    """Ranks and steps may be cut in any way."""
    whole, merged = Recorder(1000), Batch()
    for updates in batches:
        part = Recorder(1000)
        for direction, value in updates:
            for recorder in (whole, part):
                recorder.add(TRANSFER_BYTES, (direction,), value)
                recorder.add(HANDSHAKE_DURATION, ("",), value)
        merge(merged, part.drain() or {})

    assert merged == (whole.drain() or {})


@given(st.lists(st.sampled_from(["", "read", "unknown", "0.32.0+cpu", "a b"]), min_size=1).map(tuple))
def test_series_keys_round_trip(labels: tuple[str, ...]) -> None:
    """A key gives its label values back."""
    assert label_values(series_key(labels)) == labels


def test_a_level_is_never_dropped() -> None:
    """A gauge that lost a change would be wrong until the process ends."""
    recorder = Recorder(1)
    recorder.add(TRANSFER_BYTES, ("read",), 1)
    recorder.add(TRANSFERS_IN_FLIGHT, ("read",), 1)
    recorder.add(TRANSFERS_IN_FLIGHT, ("read",), -1)

    assert recorder.drain() == {"nixl_transfer_bytes_total": {"read": 1}, "nixl_transfers_in_flight": {"read": 0}}
