"""Whether a program's logits are the same bits in every batch, or what keeps them from it."""

from __future__ import annotations

import torch

from selective_compile.backend import Program, StepProgram
from selective_compile.grouped_ops import grouped_linear
from selective_compile.implementations import forced_implementation, implementation_on
from selective_compile.passes.batch_dependence import foreign_products

# Of the attention calls, by the kernels that run them: of others nobody has looked at the order of the sums.
INVARIANT = {
    "cpu": (torch.float32,),
    "triton": (torch.float32, torch.bfloat16, torch.float16),
}


def check_invariance(program: Program) -> None:
    """Refuse what was not made, or cannot be seen, to give the same bits in every batch.

    A program that runs one request after another does so by itself.  In others

    - linear layers, the LM head and experts among them, run on kernels of ours in which a row's sums have one order: on
      a CPU for the number of rows that a batch-invariant step has at least, and of experts for any; on a GPU for any,
      where it is relied on that the elements of one tile's product are computed alike wherever they stand in it.
      Matrix products by libraries, and sums of a GPU in which whatever comes first is added first, are refused by name;
    - attention runs on kernels of ours, for each row as if it were a request of its own: the keys in front of a row are
      taken in the order of their positions, in steps that do not depend on anything else, and on a GPU by one program:
      into how many splits a step's keys would go depends on the requests in it;
    - all else was proved token-wise, so that a row is computed from its own values, by code that is compiled once for
      any number of rows.  It is relied on, not proved, that this code sums a row's values (of a norm, of a router's
      softmax) in an order that does not depend on how many rows there are, and each value by the same instructions.
      Inductor's kernels do: their tiles are chosen when the graph is compiled, or when a kernel first runs, and kept.
      PyTorch's own share out a row's sum by the number of rows on a GPU; on a CPU they compute what is left behind the
      last whole vector of all rows, or of a thread's share, by other instructions. They are refused.

    Raises:
        ValueError: what depends on the batch is named, or the program was compiled for another engine.
    """
    if isinstance(program, StepProgram):
        _check_no_states(program)
        _check_no_prefix(program)
        _check_compiled_for_it(program)
        _check_products(program)
        _check_kernels(program)
        _check_compiled(program)


def _check_no_states(program: StepProgram) -> None:
    if program.state_sites or program.keeps_requests:
        names = ", ".join([*(site.name for site in program.state_sites), *program.isolated])
        raise ValueError(
            f"batch_invariant must be False for recurrences and for modules that run for one request after another, "
            f"whose sums depend on how a prompt is chunked: {names}"
        )


def _check_no_prefix(program: StepProgram) -> None:
    if program.prefix:
        raise ValueError(
            f"batch_invariant must be False for a model whose first {program.prefix} tokens see one another: each row "
            "attends as a request of its own there, which ends with it"
        )


def _check_compiled_for_it(program: StepProgram) -> None:
    """A CPU's programs are the same with it and without, but for experts, whose rows are summed by how many there are,
    and for the Triton kernels, which split keys."""
    if program.device.type == "cpu" and program.config.implementation != "triton" and not _has_groups(program):
        return
    if not program.config.batch_invariant:
        raise ValueError(
            f"batch_invariant must be that which the program was compiled for on {program.device}, "
            f"{program.config.batch_invariant}, got True"
        )


def _has_groups(program: StepProgram) -> bool:
    flat = program.rewritten.flat
    return flat is not None and any(node.target is grouped_linear for node in flat.module.graph.nodes)


def _check_products(program: StepProgram) -> None:
    foreign = foreign_products(program.rewritten.flat) if program.rewritten.flat is not None else ()
    if foreign:
        raise ValueError(f"batch_invariant must be False for products that depend on the batch: {'; '.join(foreign)}")


def _check_kernels(program: StepProgram) -> None:
    with forced_implementation(program.config.implementation):
        kernels = implementation_on(program.device.type)
    dtypes = {site.dtype for site in program.call_sites}
    if not dtypes or not dtypes.issubset(INVARIANT.get(kernels, ())):
        found = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(
            f"batch_invariant must be False but for float32 on the native kernels of a CPU, and for float32, bfloat16 "
            f"and float16 on the Triton kernels of a GPU, got {found} on {program.device} with the kernels {kernels!r}"
        )


def _check_compiled(program: StepProgram) -> None:
    if not program.config.compile:
        raise ValueError(
            f"batch_invariant must be False with compile=False on {program.device}: PyTorch's own kernels compute a "
            "row in another way for another number of rows"
        )
