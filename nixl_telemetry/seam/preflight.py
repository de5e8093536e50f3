# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What an instance will hash, from its arguments to ``vllm serve``: without a server, weights or a GPU.

vLLM's own code does it all: its parser, its config, its layers without weights, its hash function. The layers matter:
the hash has the backend of the first one with attention, and some of them change the dtype of the KV cache.

What is touched, and why nothing public serves:

- ``cli.serve.cmd_init``: the only way to the parser of ``vllm serve`` that has not moved between versions.
- ``MultiConnector._get_connector_classes_and_configs``: how vLLM finds its children.
- ``_TRANSFER_MODE`` and ``_supports_pp_hma`` of the worker classes: the mode, and how a worker joins the names of
  several backends.
- ``compilation_config.static_forward_context``: where the layers register.

Checked in vLLM 0.28.0 to 0.33.0. Where layers cannot be built, vLLM's choice of a backend for the whole model serves.
"""

import argparse
import contextlib
import inspect
import io
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from vllm import AsyncEngineArgs, platforms
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.kv_transfer.kv_connector.v1 import nixl
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import compute_nixl_compatibility_hash
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from nixl_telemetry.compat.factors import digest
from nixl_telemetry.compat.instance import Instance, Origin
from nixl_telemetry.compat.statement import Geometry
from nixl_telemetry.seam.capture import seeing_factors
from nixl_telemetry.seam.versions import nixl_version, unsupported, vllm_version

_MULTI: Final = "MultiConnector"
_TEXT_LIMIT: Final = 300


class PreflightError(Exception):
    """vLLM refuses the arguments, or they make no instance with a NIXL connector. One line."""


class _Connector(NamedTuple):
    worker: Any
    """The class of its worker."""
    kv_role: str


def compute(arguments: Sequence[str]) -> Instance:
    """What an instance with these arguments to ``vllm serve`` will hash.

    Plugins are loaded and environment variables hold, as they do for the server.

    Raises:
        PreflightError: It would not start, or not with a NIXL connector.
    """
    if reason := unsupported(vllm_version()):
        raise PreflightError(reason)
    notes = [_platform_note()]
    config = _config(arguments)
    connector = _connector(config)
    parallel, model = config.parallel_config, config.model_config
    geometry: dict[str, Any] = {
        "tp_size": parallel.tensor_parallel_size,
        "pp_size": parallel.pipeline_parallel_size,
        "dcp_size": getattr(parallel, "decode_context_parallel_size", None),
        "pcp_size": getattr(parallel, "prefill_context_parallel_size", None),
    }
    with _as_one_rank(config):
        try:
            _build_layers(config)
        except Exception as error:
            notes.append(
                "the model's layers cannot all be built here, so that its attention backend may be another one: "
                f"{_in_short(error)}"
            )
        with contextlib.suppress(Exception):
            geometry |= _layout(config)
        factors = _hashed(config, connector)
    return Instance(
        name=str(model.model),
        compat_hash=digest(factors),
        origin=Origin.COMPUTED,
        factors=factors,
        nixl_version=nixl_version(),
        kv_role=connector.kv_role,
        model_revision=model.revision,
        geometry=Geometry(**geometry),
        notes=tuple(notes),
    )


def _platform_note() -> str:
    if platforms.current_platform.is_unspecified():
        # As `vllm bench` does on a machine without a device.
        from vllm.platforms.cpu import CpuPlatform

        platforms.current_platform = CpuPlatform()
    name = platforms.current_platform.device_name
    return f"computed for the platform {name}; on another one, vLLM may choose another attention backend or dtype"


def _config(arguments: Sequence[str]) -> Any:
    """The config that ``vllm serve`` makes."""
    args = parsed(arguments)
    try:
        return AsyncEngineArgs.from_cli_args(args).create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    except Exception as error:
        raise PreflightError(f"vLLM refuses the arguments: {_in_short(error)}") from error


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """What the parser of ``vllm serve`` makes of the arguments.

    Raises:
        PreflightError: It refuses them.
    """
    from vllm.entrypoints.cli import serve

    parser = FlexibleArgumentParser(prog="vllm")
    (command,) = serve.cmd_init()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            args: argparse.Namespace = parser.parse_args(["serve", *arguments])
            command.validate(args)
    except (Exception, SystemExit) as error:
        # Of what the parser prints, the error comes after the usage.
        asked = isinstance(error, SystemExit) and not error.code
        text = "they ask for help only" if asked else said.getvalue().rpartition(": error: ")[2] or str(error)
        raise PreflightError(f"vLLM refuses the arguments: {_in_short(text)}") from error
    if args.model_tag is not None:
        args.model = args.model_tag
    return args


def _connector(config: Any) -> _Connector:
    """The NIXL connector that a config asks for, of several the first: they would share a side channel."""
    transfer = config.kv_transfer_config
    if transfer is None:
        raise PreflightError("the arguments have no --kv-transfer-config: such an instance exchanges no KV")
    try:
        stock = KVConnectorFactory.get_connector_class(transfer)
        children = [(stock, config)]
        if transfer.kv_connector == _MULTI:
            children = list(stock._get_connector_classes_and_configs(config))
    except Exception as error:
        raise PreflightError(f"the connector {transfer.kv_connector!r} cannot be loaded: {_in_short(error)}") from error
    for connector, its_config in children:
        if issubclass(connector, nixl.NixlBaseConnector):
            push = issubclass(connector, nixl.NixlPushConnector)
            worker = nixl.NixlPushConnectorWorker if push else nixl.NixlPullConnectorWorker
            return _Connector(worker, str(its_config.kv_transfer_config.kv_role))
    raise PreflightError(
        f"the connector {transfer.kv_connector!r} is no NIXL connector, and has none among its children"
    )


@contextlib.contextmanager
def _as_one_rank(config: Any) -> Iterator[None]:
    """Makes this process the only rank of the instance; what is hashed does not depend on how many there are."""
    parallel = config.parallel_config
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "world_size", "nnodes"):
        if hasattr(parallel, name):
            setattr(parallel, name, 1)
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(config):
        try:
            try:
                parallel_state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
                parallel_state.ensure_model_parallel_initialized(1, 1)
            except Exception as error:
                raise PreflightError(
                    f"vLLM's layers need torch.distributed, which does not start here: {_in_short(error)}"
                ) from error
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def _build_layers(config: Any) -> None:
    """Build the model without memory for its weights; its layers register with the config."""
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
        initialize_model(config)


def _layout(config: Any) -> dict[str, Any]:
    """KV cache layout and block size, as far as they are certain without memory for the cache."""
    from vllm.v1.attention.backends import utils
    from vllm.v1.worker.utils import select_common_block_size

    layers = config.compilation_config.static_forward_context.values()
    specs = [layer.get_kv_cache_spec(config) for layer in layers if hasattr(layer, "get_kv_cache_spec")]
    backends = get_current_attn_backends(config)
    found: dict[str, Any] = {}
    if hasattr(utils, "resolve_kv_cache_layout"):
        names = [layout.name for layout in utils.get_supported_kv_cache_layouts(backends)]
        found["kv_cache_layout"] = utils.resolve_kv_cache_layout(config, [names], specs).name
    else:  # vLLM 0.28
        found["kv_cache_layout"] = utils.get_kv_cache_layout()
    sizes = {spec.block_size for spec in specs}
    if sizes == {config.cache_config.block_size}:
        # Else vLLM may still make the pages of different layers equal.
        found["block_size"] = select_common_block_size(*sizes, backends)
    return found


def _hashed(config: Any, connector: _Connector) -> dict[str, Any]:
    """The factors that vLLM hashes, as a worker makes it do it once its KV caches are registered."""
    arguments: dict[str, Any] = {"transfer_mode": connector.worker._TRANSFER_MODE}
    if "cross_layers_blocks" in inspect.signature(compute_nixl_compatibility_hash).parameters:
        arguments["cross_layers_blocks"] = False  # in vLLM 0.28 it is, whatever is asked for
    try:
        with seeing_factors() as seen:
            compat_hash = compute_nixl_compatibility_hash(config, _backend_name(config, connector), **arguments)
    except Exception as error:
        raise PreflightError(f"vLLM computes no hash for these arguments: {_in_short(error)}") from error
    for factors in seen:
        if digest(factors) == compat_hash:
            return factors
    raise PreflightError(f"this vLLM ({vllm_version()}) hashes in a way that is not known: its factors are not seen")


def _backend_name(config: Any, connector: _Connector) -> str:
    backends = get_current_attn_backends(config)
    # Since 0.31, a push worker sorts the backends of a packed cache.
    if getattr(connector.worker, "_supports_pp_hma", False) and _is_packed(config):
        return ",".join(sorted({str(backend.get_name()) for backend in backends}))
    return str(backends[0].get_name())


def _is_packed(config: Any) -> bool:
    if config.cache_config.kv_cache_layout is None:
        return False
    return bool(config.cache_config.get_resolved_kv_cache_layout().is_block_outermost)


def _in_short(text: object) -> str:
    """The text of an exception, as one line."""
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    for number, line in enumerate(lines):
        if "validation error" in line:
            # Pydantic's: then the field, if it is one, and what is wrong with it, and then everything that it had.
            field, *rest = [one.partition(" [type=")[0] for one in lines[number + 1 : number + 3]] or [line]
            wrong = [one for one in rest if not one.startswith("For further information")]
            return ": ".join([field, *wrong])[:_TEXT_LIMIT]
    return lines[0][:_TEXT_LIMIT] if lines else "it does not say why"
