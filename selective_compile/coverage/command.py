"""`selective-compile coverage`."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from selective_compile.interrupts import ending_at_once
from selective_compile.terminal import check_file


def coverage_command(
    types: Annotated[str | None, typer.Option(help="Some, with commas.", show_default="all registered ones")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes at a time.", show_default="all cores")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Seconds for one type.")] = 240,
    out_file: Annotated[Path, typer.Option("--out", help="Results; measured types are kept.")] = Path("coverage.json"),
    page: Annotated[Path | None, typer.Option(help="Write them as Markdown too.", show_default="beside --out")] = None,
    new: Annotated[bool, typer.Option("--new", help="Only types that --out does not have.")] = False,
    generation: Annotated[bool, typer.Option("--generation", help="Fields of GenerationConfig instead.")] = False,
    mutations: Annotated[bool, typer.Option("--mutations", help="Changed attentions instead.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of text.")] = False,
) -> None:
    """Try every model type of the installed transformers, with random weights, against the model alone.

    One process for each; stopped and started again, it goes on where it was. Exit status 1 on wrong tokens. Types
    that take much longer to compile than when they were measured before are named at the end. --new: what a new
    release of transformers has that the results do not. With
    --generation: what each field of transformers' GenerationConfig comes to here; nothing is run. With --mutations:
    some types, each with its attention changed in several ways; exit status 1 if one is neither exact nor refused.

    \b
    selective-compile coverage --jobs 2 --out docs/coverage.json
    selective-compile coverage --types llama,gpt2,mamba --json
    selective-compile coverage --new --out docs/coverage.json
    selective-compile coverage --generation
    selective-compile coverage --mutations --page docs/mutations.md
    """
    if generation:
        if page is not None:
            raise ValueError(f"--page must be left out with --generation, which prints alone, got {str(page)!r}")
        return print_ledger(as_json)
    with ending_at_once():
        from selective_compile.coverage import page as pages
        from selective_compile.coverage.standing import VERDICTS, bars, verdict, wrong
        from selective_compile.coverage.sweep import Sweep, chosen_types, stored
        from selective_compile.progress import ProgressBars
        from selective_compile.tables import console

    if mutations:
        return mutate(types, jobs or os.cpu_count() or 1, page, as_json)
    chosen = chosen_types(types)
    if new:
        chosen = tuple(name for name in chosen if name not in stored(out_file)["types"])
    target = page if page is not None else out_file.with_suffix(".md")
    check_file("--out", out_file)
    check_file("--page", target)
    sweep = Sweep(types=chosen, out=out_file, jobs=jobs or os.cpu_count() or 1, limit=limit)
    out = console()
    with ProgressBars(console(stderr=True))("measuring", len(chosen)) as advance:

        def tell(name: str, facts: dict[str, Any]) -> None:
            advance(1)
            if not as_json:
                out.print(Text(f"{name}: {wrong(facts) or verdict(facts)}"), soft_wrap=True)

        results = sweep.run(tell)
    target.write_text(pages.page(results), encoding="utf-8")
    found = {name: results["types"][name] for name in chosen}
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        counts = {name: sum(verdict(facts) == name for facts in found.values()) for name in VERDICTS}
        out.print(Text(", ".join(f"{name} {count}" for name, count in counts.items() if count)), soft_wrap=True)
        if types is None and not new:
            for what, count, bar, met in bars(found):
                out.print(Text(f"{what}: {count} (bar: {bar}{'' if met else ', NOT MET'})"), soft_wrap=True)
        for name, facts in found.items():
            if "grown" in facts:
                out.print(Text(f"{name}: {facts['grown']}"), soft_wrap=True)
    mistaken = [name for name, facts in found.items() if wrong(facts)]
    if mistaken:
        raise ValueError(f"the tokens or logits are wrong without a refusal for {', '.join(mistaken)}")


def mutate(types: str | None, jobs: int, page: Path | None, as_json: bool) -> None:
    with ending_at_once():
        from selective_compile.coverage.mutation_table import mutation_page, tried, wrong_ones
        from selective_compile.coverage.mutations import MUTATED
        from selective_compile.coverage.sweep import chosen_types
        from selective_compile.progress import ProgressBars
        from selective_compile.tables import console

    check_file("--page", page)
    chosen = chosen_types(types) if types is not None else MUTATED
    out = console()
    with ProgressBars(console(stderr=True))("changing", len(chosen)) as advance:
        outcomes = tried(chosen, jobs=jobs, tell=lambda _: advance(1))
    if page is not None:
        page.write_text(mutation_page(outcomes), encoding="utf-8")
    if as_json:
        found = {name: {m: dataclasses.asdict(one) for m, one in ones.items()} for name, ones in outcomes.items()}
        typer.echo(json.dumps(found, indent=1))
    else:
        for name, ones in outcomes.items():
            kinds = ", ".join(f"{mutation} {one.kind}" for mutation, one in ones.items())
            out.print(Text(f"{name}: {kinds}"), soft_wrap=True)
    if mistaken := wrong_ones(outcomes):
        raise ValueError(f"a changed attention must be exact or refused, got {'; '.join(mistaken)}")


def print_ledger(as_json: bool) -> None:
    with ending_at_once():
        from selective_compile import generation_ledger
        from selective_compile.tables import console

    entries = generation_ledger.ledger()
    if as_json:
        typer.echo(generation_ledger.ledger_json(entries))
        return
    out = console()
    out.print(generation_ledger.ledger_table(entries))
    out.print(Text(generation_ledger.ledger_counts(entries)))
