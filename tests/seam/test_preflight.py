# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The hash of an instance that does not run, by vLLM's own code; that a server has the same is tested with servers."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from nixl_telemetry.compat.factors import differences, digest
from nixl_telemetry.compat.instance import Instance, Origin
from nixl_telemetry.seam.preflight import PreflightError, compute
from nixl_telemetry.seam.versions import connector_version, vllm_version
from nixl_telemetry.testbed import TinyModel

PULL: Final[dict[str, Any]] = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
PUSH: Final[dict[str, Any]] = PULL | {"kv_connector": "NixlPushConnector"}
OURS: Final[dict[str, Any]] = {"kv_connector_module_path": "nixl_telemetry.connectors"}
MODELS: Final = {
    "base": TinyModel(),
    "other": TinyModel(),
    "heads": TinyModel(num_kv_heads=2),
    "wide": TinyModel(head_dim=128),
    "deep": TinyModel(num_layers=6),
}

Compute = Callable[..., Instance]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models."""
    folder = tmp_path_factory.mktemp("models")
    for name, model in MODELS.items():
        model.write(folder / name)
    return folder


@pytest.fixture(scope="module")
def computed(models: Path) -> Compute:
    """Computes an instance of one of the models."""

    def of(*arguments: str, model: str = "base", transfer: dict[str, Any] | None = None) -> Instance:
        config = json.dumps(PULL if transfer is None else transfer)
        common = ("--max-model-len", "4096", "--block-size", "32", "--kv-transfer-config", config)
        return compute([str(models / model), *common, *arguments])

    return of


@pytest.fixture(scope="module")
def base(computed: Compute) -> Instance:
    """A pull instance."""
    return computed()


def test_everything_is_told(models: Path, base: Instance) -> None:
    assert base.factors == {
        "vllm_version": vllm_version(),
        "nixl_connector_version": connector_version(),
        "model": str(models / "base"),
        "dtype": "torch.bfloat16",
        "num_kv_heads": 4,
        "head_size": 64,
        "num_hidden_layers": 4,
        "attn_backend_name": "CPU_ATTN",
        "cache_dtype": "auto",
        "is_hma_enabled": True,
        "speculative_config": None,
        "transfer_mode": "pull",
    }
    assert base.compat_hash == digest(base.factors)
    assert (base.origin, base.kv_role, base.instrumented) == (Origin.COMPUTED, "kv_both", False)
    assert base.notes == (
        "computed for the platform cpu; on another one, vLLM may choose another attention backend or dtype",
    )


def test_the_geometry_is_told_as_far_as_it_is_certain(base: Instance, computed: Compute) -> None:
    """More ranks than there are devices here; they change no hash."""
    wide = computed("--tensor-parallel-size", "2", "--revision", "abc")

    assert wide.compat_hash == base.compat_hash
    assert (base.geometry.tp_size, wide.geometry.tp_size) == (1, 2)
    assert (wide.geometry.pp_size, wide.geometry.dcp_size, wide.geometry.pcp_size) == (1, 1, 1)
    assert (wide.geometry.block_size, wide.geometry.kv_cache_layout) == (32, "LBHNC")
    assert (base.model_revision, wide.model_revision) == (None, "abc")


@pytest.mark.parametrize(
    ("arguments", "changes", "differs"),
    [
        ([], {"transfer": PUSH}, {"transfer_mode": "push"}),
        (["--dtype", "float32"], {}, {"dtype": "torch.float32"}),
        (["--kv-cache-dtype", "fp8_e5m2"], {}, {"cache_dtype": "fp8_e5m2"}),
        (["--disable-hybrid-kv-cache-manager"], {}, {"is_hma_enabled": False}),
        ([], {"model": "other"}, {}),
        ([], {"model": "heads"}, {"num_kv_heads": 2}),
        ([], {"model": "wide"}, {"head_size": 128}),
        ([], {"model": "deep"}, {"num_hidden_layers": 6}),
        (
            ["--dtype", "float32", "--disable-hybrid-kv-cache-manager"],
            {"transfer": PUSH, "model": "deep"},
            {"transfer_mode": "push", "dtype": "torch.float32", "is_hma_enabled": False, "num_hidden_layers": 6},
        ),
    ],
    ids=["mode", "dtype", "cache-dtype", "hma", "model", "heads", "head-size", "layers", "several"],
)
def test_a_configuration_differs_in_what_was_changed(
    models: Path, base: Instance, computed: Compute, arguments: list[str], changes: Any, differs: dict[str, Any]
) -> None:
    """In exactly the factors that the arguments change, hence in the hash."""
    if "model" in changes:
        differs = {**differs, "model": str(models / changes["model"])}

    changed = computed(*arguments, **changes)

    assert base.factors is not None
    assert changed.factors is not None
    assert {one.factor: one.remote for one in differences(base.factors, changed.factors)} == differs
    assert changed.compat_hash == digest(changed.factors) != base.compat_hash


@pytest.mark.parametrize(
    "transfer",
    [
        PULL | {"kv_connector": "NixlPullConnector"},
        PULL | {"kv_role": "kv_producer"},
        PULL | OURS,
        PULL | {"kv_connector": "InstrumentedNixlConnector"},
        PULL | {"kv_connector": "InstrumentedNixlPullConnector"},
        PULL | {"kv_connector_extra_config": {"enforce_handshake_compat": False}},
        {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"connectors": [PULL]}},
        {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "connectors": [
                    {"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
                    PULL | {"kv_connector": "InstrumentedNixlConnector"},
                ]
            },
        },
    ],
    ids=["pull", "role", "module", "own", "own-pull", "unenforced", "multi", "multi-own"],
)
def test_a_wiring_changes_no_hash(base: Instance, computed: Compute, transfer: dict[str, Any]) -> None:
    """An instrumented instance has the hash of the stock one; the connector may be one of several."""
    wired = computed(transfer=transfer)

    assert wired.factors is not None
    assert base.factors is not None
    without_hma = transfer["kv_connector"] == "MultiConnector" and not wired.factors["is_hma_enabled"]
    assert [one.factor for one in differences(base.factors, wired.factors)] == ["is_hma_enabled"] * without_hma
    assert wired.kv_role == transfer["kv_role"]


def test_a_push_child_is_found(computed: Compute) -> None:
    config = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}

    found = computed(transfer=config | {"kv_connector_extra_config": {"connectors": [PUSH | OURS]}})

    assert found.factors is not None
    assert found.factors["transfer_mode"] == "push"


def test_without_a_change_of_the_config(base: Instance, computed: Compute, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIXLTEL_AUTO", "1")

    assert computed().compat_hash == base.compat_hash


def test_where_layers_cannot_be_built(base: Instance, computed: Compute, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's choice for the model as a whole serves, and the reader is told."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no kernels here\nand more")

    monkeypatch.setattr("vllm.model_executor.model_loader.utils.initialize_model", fail)

    found = computed()

    assert found.compat_hash == base.compat_hash
    assert found.notes[1].endswith("so that its attention backend may be another one: no kernels here")


def test_where_no_process_group_can_be_made(base: Instance, computed: Compute, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line; and the next one is computed as if nothing had been."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no gloo here\nand more")

    with monkeypatch.context() as patch:
        patch.setattr("vllm.distributed.parallel_state.ensure_model_parallel_initialized", fail)
        with pytest.raises(PreflightError, match=r"torch\.distributed, which does not start here: no gloo here$"):
            computed()

    assert computed().compat_hash == base.compat_hash


@pytest.mark.parametrize(
    ("name", "replacement", "said"),
    [
        ("digest", lambda factors: "0" * 64, "hashes in a way that is not known"),
        ("get_current_attn_backends", lambda config: [], "vLLM computes no hash for these arguments"),
    ],
)
def test_a_hash_that_vllm_computes_otherwise(
    computed: Compute, monkeypatch: pytest.MonkeyPatch, name: str, replacement: Callable[..., Any], said: str
) -> None:
    """A later vLLM may; what is not seen is not guessed."""
    monkeypatch.setattr(f"nixl_telemetry.seam.preflight.{name}", replacement)

    with pytest.raises(PreflightError, match=said):
        computed()


def test_nothing_is_left_behind(computed: Compute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process group, which the next one would trip over, and no file."""
    from vllm.distributed import parallel_state

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    computed()

    assert not parallel_state.model_parallel_is_initialized()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{base}"], "have no --kv-transfer-config"),
        (
            ["{base}", "--kv-transfer-config", '{{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}'],
            "is no NIXL",
        ),
        (["{base}", "--kv-transfer-config", '{{"kv_connector": "Unheard", "kv_role": "kv_both"}}'], "Unheard"),
        (
            ["{base}", "--kv-transfer-config", '{{"kv_connector": "NixlConnector", "kv_role": "x"}}'],
            "kv_role: Input should be",
        ),
        (["{base}", "--kv-transfer-config", "nonsense"], "vLLM refuses the arguments: "),
        (["{base}", "--no-such-option"], "unrecognized arguments: --no-such-option"),
        (["{base}", "--config", "no/such/file.yaml"], "No such file"),
        (["--help"], "they ask for help only"),
        (["{base}", "--dtype", "float7"], "float7"),
        (["{base}/nowhere"], "vLLM refuses the arguments: "),
    ],
)
def test_what_is_refused_is_explained_in_one_line(models: Path, arguments: list[str], said: str) -> None:
    with pytest.raises(PreflightError) as caught:
        compute([argument.format(base=models / "base") for argument in arguments])

    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
