"""Which program runs a model in the engine: ragged, ragged with isolated modules, or whole and one by one."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import nn
from torch._dynamo.convert_frame import compile_lock
from transformers import GenerationMixin

from selective_compile import beforehand
from selective_compile.autocast import autocast_of, without_autocast
from selective_compile.compiled_step import NATIVE_KERNELS, runs_native
from selective_compile.compiling import can_compile
from selective_compile.cores import IntraOpThreads
from selective_compile.garbage import only_new_garbage
from selective_compile.isolation import Proved, program_of, prove
from selective_compile.kernels import ragged_attention_cpu
from selective_compile.model_call import CANNOT
from selective_compile.model_facts import device_of
from selective_compile.module_state import lock_of
from selective_compile.options import EngineConfig
from selective_compile.own_generation import unlike_transformers
from selective_compile.passes import Refusal, RefusedError
from selective_compile.passes.cast_once import cast_once
from selective_compile.passes.fp8_pools import keep_as_fp8
from selective_compile.passes.fuse_rotary import fuse_rotary
from selective_compile.passes.int8_pools import keep_as_int8
from selective_compile.passes.join import join
from selective_compile.passes.lower import lower
from selective_compile.passes.quantise import quantise
from selective_compile.passes.traced_graph import DTYPES
from selective_compile.sequential_program import SequentialProgram, why_not_run
from selective_compile.step_program import StepProgram
from selective_compile.unused_cache import leaves_cache_unused

logger = logging.getLogger(__name__)
NOT_RAGGED = "kv_dtype must be 'auto' for a model in which not every attention is ragged"
Program = StepProgram | SequentialProgram


def compile_step_program(model: nn.Module, config: EngineConfig) -> Program:
    """Capture, prove, rewrite and compile ``model`` for the engine.

    Raises:
        RefusedError: something could not be proved, every node is named with its source line; and ``config.fallback``
            is not for such a model, or it has not `generate`'s machinery to be run by.
        ValueError: the model is in training mode, or of a dtype that no kernel has; or ``config.max_attention_window``
            is given for a model that runs request after request, all of it or in part; or `check_kv_dtype` refuses.
    """
    begin_beside(model, config)
    # Inductor's kernels are made for a number of threads; and what Dynamo, FX and Inductor trace by is the process's:
    # nobody else may trace meanwhile, in whatever thread.  First the model: who runs it may have something to trace.
    with IntraOpThreads(config.threads), lock_of(model), compile_lock, only_new_garbage():
        return _compiled(model, config)


def run_whole(model: nn.Module, refused: RefusedError) -> SequentialProgram:
    """Raises `RefusedError` where not even that is possible."""
    try:
        return SequentialProgram(model, refused.refusals, use_cache=False if leaves_cache_unused(model) else None)
    except RefusedError:
        raise
    except CANNOT as error:
        reason = f"nor can generate run it: {type(error).__name__}: {error}"
        raise RefusedError(refused.refusals, reason) from error


def _compiled(model: nn.Module, config: EngineConfig) -> Program:
    if isinstance(model, GenerationMixin) and (own := unlike_transformers(model)):  # `sc.generate` refuses such a model
        logger.warning("%s has its own %s, which an engine does not call", type(model).__name__, own)
    try:
        proved = prove(
            model,
            config.fallback,
            config.max_attention_window,
            latents=keeps_latents(model, config),
            keep=config.keep_captures,
        )
    except RefusedError as error:
        if config.fallback != "sequential":
            raise
        if reason := why_not_whole(model):
            raise RefusedError(error.refusals, reason) from error
        if config.weights != "model":
            raise ValueError(f"weights must be 'model' for a model that runs whole, got {config.weights!r}") from error
        if config.kv_dtype != "auto":
            raise ValueError(f"{NOT_RAGGED}, got {config.kv_dtype!r}: {error}") from error
        # Its text: who keeps what is logged would keep the error, and by its traceback the model.
        logger.warning("%s runs whole, one request after another: %s", type(model).__name__, str(error))
        return run_whole(model, error)
    if config.max_attention_window is not None:
        logger.warning("%s", narrowed(type(model).__name__, proved, config.max_attention_window))
    if proved.isolated:
        logger.warning("%s", slow_modules(type(model).__name__, proved.isolated))
    if config.kv_dtype != "auto":
        check_kv_dtype(config, proved)
    with without_autocast(device_of(model)):
        program = step_program(model, config, proved)
        if config.kv_dtype == "fp8":
            program.measure_kv_scales(program.weights_version())
    if config.weights == "int8":
        logger.warning("%s", rounded(model, program))
    if config.kv_dtype != "auto":
        logger.warning("%s", shortened(type(model).__name__, program))
    return program


def why_not_whole(model: nn.Module) -> str | None:
    """Why steps cannot run the whole model by its own `generate`."""
    if autocast_of(device_of(model)) is not None:
        return "autocast is on, which steps are not under"
    return why_not_run(model)


def begin_beside(model: object, config: EngineConfig) -> None:
    """Native kernels of a CPU that no earlier start has left, which take about as long as to trace a model, and what
    Inductor will ask the machine for; both go on beside."""
    if not isinstance(model, nn.Module):  # which is said behind it
        return
    device = device_of(model)
    if runs_native(config.implementation, device):
        for kernels in NATIVE_KERNELS if config.compile else (ragged_attention_cpu,):
            kernels.build_beside()
    if config.compile and can_compile(device):
        beforehand.ask(device)


def keeps_latents(model: nn.Module, config: EngineConfig) -> bool:
    """For batch invariance only where the maps of latents are multiplied by a kernel of ours."""
    if config.latents == "expanded":
        return False
    return not config.batch_invariant or runs_native(config.implementation, device_of(model))


def check_kv_dtype(config: EngineConfig, proved: Proved) -> None:
    """Raises ValueError where keys and values cannot be kept so: isolated modules have theirs in Hugging Face's caches,
    and a device may not have the numbers, or no kernel for them."""
    if proved.isolated:
        refused = "; ".join(f"{path}: {refusal}" for path, refusal in proved.isolated.items())
        raise ValueError(f"{NOT_RAGGED}, got {config.kv_dtype!r}: {refused}")
    flat = proved.rewritten.flat
    assert flat is not None
    if not flat.calls:
        raise ValueError(f"kv_dtype must be 'auto' for a model without attention, got {config.kv_dtype!r}")
    if config.kv_dtype == "int8" and flat.device.type != "cpu":
        raise ValueError(f"kv_dtype must be 'auto' or 'fp8' but on a CPU, got 'int8' on {flat.device}")
    if config.kv_dtype == "fp8":
        check_fp8(flat.device, {site.key.node.meta["val"].dtype for site in flat.calls})


def check_fp8(device: torch.device, dtypes: Collection[torch.dtype]) -> None:
    """Raises ValueError for a GPU that has no numbers of e4m3, or a model of ``dtypes`` whose kernels would spill."""
    if device.type == "cpu":
        return
    if torch.float32 in dtypes:
        raise ValueError("kv_dtype must be 'auto' for a model of float32 on a GPU, got 'fp8'")
    capability = (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)
    if not torch.version.hip and capability < (8, 9):
        raise ValueError(
            f"kv_dtype must be 'auto' on a GPU of compute capability {capability[0]}.{capability[1]}, got 'fp8', "
            "which takes 8.9"
        )


def step_program(model: nn.Module, config: EngineConfig, proved: Proved) -> StepProgram:
    """Raises `ValueError` for a dtype that no kernel has."""
    rewritten = proved.rewritten
    assert rewritten.flat is not None
    flat = rewritten.flat
    if config.batch_invariant:  # not in the pipeline, which is the same for every engine
        rewritten.timed("lower for batch invariance", lambda: lower(flat, batch_invariant=True))
    if config.weights == "int8":
        rewritten.timed("quantise", lambda: quantise(flat))
        if not flat.quantised:
            raise ValueError(
                f"weights must be 'model' for a model without linear layers of float32 or bfloat16 on a CPU, "
                f"got 'int8' on {flat.device}"
            )
    if config.kv_dtype == "int8":
        rewritten.timed("keep as int8", lambda: keep_as_int8(flat))
    if config.kv_dtype == "fp8":
        rewritten.timed("keep as fp8", lambda: keep_as_fp8(flat))
    rewritten.timed("cast once", lambda: cast_once(flat))
    if config.join_weights and config.weights == "model":  # what rotates is found behind it, and not what it joins
        rewritten.timed("join", lambda: join(flat))
    if runs_triton(config, flat.device):  # behind what changes pools, of which it takes those of the model's dtype
        rewritten.timed("fuse rotary", lambda: fuse_rotary(flat))
    for call in rewritten.traced.calls:
        dtype = call.key.node.meta["val"].dtype
        if dtype not in DTYPES:
            raise ValueError(f"the model's dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype}")
    return program_of(model, proved, config, longest=proved.max_positions(model))


def runs_triton(config: EngineConfig, device: torch.device) -> bool:
    """Whether attention runs on the Triton kernels: on a GPU, and where a test asks for their interpreter."""
    return config.implementation == "triton" or (config.implementation == "auto" and device.type == "cuda")


def narrowed(name: str, proved: Proved, window: int) -> str:
    """What to say of a model that is not to see as far as it could."""
    calls = [call for call in proved.rewritten.traced.calls if call.family is not None and call.family.narrowed]
    return (
        f"{len(calls)} attention calls of {name} see the last {window} positions at most (max_attention_window): "
        "longer requests get other tokens than by generate"
    )


def shortened(name: str, program: StepProgram) -> str:
    """What to say of a model whose keys and values are rounded."""
    calls = [site for site in program.call_sites if site.int8 or site.fp8]
    before = sum(replace(site, int8=False, fp8=False).bytes_per_token for site in calls)
    return (
        f"{len(calls)} attention calls of {name} keep keys and values as {program.config.kv_dtype} (kv_dtype), in "
        f"{sum(site.bytes_per_token for site in calls)} bytes a token, not {before}: requests may get other tokens "
        "than by generate; selective_compile.runtime.logit_error measures how far logits move"
    )


def rounded(model: nn.Module, program: StepProgram) -> str:
    """What to say of a model whose linear layers are rounded, and of what is not: nothing else tells it."""
    flat = program.rewritten.flat
    assert flat is not None
    int8 = {id(flat.weights[each.place].example) for each in flat.quantised}
    left = {name: p for name, p in model.named_parameters() if p.dim() > 1 and id(p) not in int8}
    layers = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module.weight) not in int8
    ]
    megabytes = sum(weight.nbytes for weight in left.values()) / 1e6
    said = [f"{len(int8)} weights of {type(model).__name__} are int8 (weights)"]
    if left:
        said.append(f"{len(left)} of two dimensions and more stay as they are, in {megabytes:.1f} MB: {some(left)}")
    if layers:
        said.append(
            f"among these are {len(layers)} linear layers, as in modules that run by themselves: {some(layers)}"
        )
    said.append("requests may get other tokens than by generate")
    said.append("selective_compile.runtime.logit_error measures how far logits move")
    return "; ".join(said)


def some(names: Collection[str], most: int = 8) -> str:
    """The first of them, and how many others there are."""
    others = len(names) - most
    return ", ".join(list(names)[:most]) + (f" and {others} more" if others > 0 else "")


def slow_modules(name: str, isolated: Mapping[str, Refusal]) -> str:
    """What to say of a model that has isolated modules: those of several layers for one reason are told together."""
    alike: dict[Refusal, list[str]] = {}
    for path, refusal in isolated.items():
        alike.setdefault(refusal, []).append(path)
    listed = "\n  ".join(f"{some(paths)}: {refusal}" for refusal, paths in alike.items())
    return f"{len(isolated)} modules of {name} run for one request after another, and share no prefixes:\n  {listed}"
