"""`torchmix check`: will this recipe train as it says?

It changes nothing on disk; the exit code is that of the worst finding. Cost: the footer of every data file, and
planning of up to 1000 steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from torchmix.catalog.in_store import fetch_catalog
from torchmix.catalog.manifest import read_manifest
from torchmix.catalog.settings import SourceSettings, settings_of
from torchmix.catalog.store import Catalog, PartViews, open_catalog, views_of
from torchmix.cli.findings import (
    EXIT_CODE_OF_LEVEL,
    FINDINGS_BEFORE_INDEX,
    FINDINGS_OF_CATALOG,
    FINDINGS_OF_FORECAST,
    CheckedRun,
    Finding,
    Level,
    findings_of,
    open_document_bytes,
    rows_of_sources,
    values_of_stream,
)
from torchmix.cli.plan.command import module_lines
from torchmix.cli.run import add_layout, add_simulated_steps, add_state, forecast_of_run, layout_of_arguments, state_of
from torchmix.cli.streams import (
    denied_of_part,
    group_values,
    print_denied,
    print_groups,
    print_selections,
    rows_and_tokens,
    selection_values,
)
from torchmix.cli.terminal import (
    ExitCode,
    add_explain,
    add_part,
    add_recipe,
    at_least,
    count_text,
    percent_text,
    print_json,
    print_table,
    progress_bar,
)
from torchmix.errors import CatalogError, PlanError
from torchmix.indexing.deny_lists import check_lists
from torchmix.parallel.place_tree import Layout
from torchmix.planner.forecast import SIMULATED_STEPS, Forecast
from torchmix.planner.graph.strategy import own_functions
from torchmix.planner.stream_order import check_rows_of_part
from torchmix.recipe.amounts import bytes_text
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.load import load_recipe, recipe_directory
from torchmix.recipe.parts import Part, part_of, with_all_sources
from torchmix.recipe.sources import PARTS
from torchmix.recipe.structs import Recipe
from torchmix.steps.memory_budget import MemoryBudget

COLUMNS = {
    "source": "a source of the recipe, by its name",
    "share": "its share of the tokens that are trained on, as the recipe says, whatever runs out in these steps",
    "documents": "rows of its files, with those that have no tokens, and with rows that other parts use",
    "in files": "tokens of all these rows together",
    "first step": "the step, from 0 or the state on, in which its first document comes; ~: estimated; -: none does",
    "tokens": "of it in all steps: those that are in samples, not those that wait for a later step",
    "epochs": "how often it has gone through the rows that this part uses by then, since step 0; 0.5 is half of them "
    "once",
    "runs out": "the first step that asks for more than its max_epochs; ~: estimated; -: none does",
}
HELP = "check a recipe, its files and what each source will give"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this verb beside those of all verbs."""
    add_recipe(parser)
    add_simulated_steps(parser, "steps of the run, from 0 or the state on")
    parser.add_argument(
        "--padded-vocab-size",
        type=at_least(1),
        metavar="N",
        help="rows of the model's embedding, as Megatron pads its vocabulary; data and vocab_size are compared with it",
    )
    add_part(parser)
    add_state(parser, "look at the next N steps of its run")
    add_layout(parser)
    parser.add_argument(
        "--node-ranks", type=at_least(1), metavar="N", help="ranks of a node, for its memory (default: all of the job)"
    )
    add_explain(parser)


def run(arguments: argparse.Namespace) -> ExitCode:
    """Check, and print what was found.

    Raises:
        RecipeError: A fault in the recipe itself; nothing else can be checked then.
        StateError: `--state` is no state of this recipe and catalog, or of an edit that no word accepts.
    """
    whole = load_recipe(arguments.recipe)
    part, every = part_of(whole, arguments.part), with_all_sources(whole)
    layout = layout_of_arguments(arguments, part)
    directory = recipe_directory(arguments.recipe)
    folder = fetch_catalog(directory, whole.catalog)
    catalog, findings = _open(folder, settings_of(part.sources, part.shuffle), views_of(part))
    try:
        check_lists(directory, part.deny, folder, part.sources)
    except CatalogError as error:
        findings.append(Finding(level=Level.FINDING, where="deny", message=str(error)))
    catalog_of_all, missing = _open(folder, settings_of(every.sources, every.shuffle))
    findings = findings or missing
    seen = CheckedRun(
        whole=whole,
        every=every,
        part=part,
        directory=directory,
        layout=layout,
        node_ranks=arguments.node_ranks,
        padded_vocab_size=arguments.padded_vocab_size,
        catalog_of_all=catalog_of_all,
        catalog_of_files=catalog_of_all or catalog,
    )
    findings += findings_of(FINDINGS_BEFORE_INDEX, seen)
    result: Forecast | None = None
    if catalog is not None:
        seen = replace(seen, catalog=catalog)
        findings += findings_of(FINDINGS_OF_CATALOG, seen)
        state = state_of(arguments, part, catalog)
        total = min(arguments.steps, SIMULATED_STEPS)
        try:
            check_rows_of_part(whole, arguments.part, rows_of_sources(part, catalog))
            with progress_bar(total, unit="step", title="planning", silent=arguments.json or arguments.quiet) as bar:
                result = forecast_of_run(
                    part,
                    catalog,
                    arguments.steps,
                    state=state,
                    layout=layout,
                    simulated_steps=total,
                    progress=bar.update,
                )
            findings += findings_of(FINDINGS_OF_FORECAST, replace(seen, forecast=result))
        except PlanError as error:
            own = [key for key, name in own_functions(part).items() if name in str(error)]
            findings.append(Finding(level=Level.FINDING, where=own[0] if own else "sources", message=str(error)))
    findings = [_placed(finding, whole) for finding in findings]
    findings.sort(key=lambda finding: -EXIT_CODE_OF_LEVEL[finding.level])
    code = max((EXIT_CODE_OF_LEVEL[finding.level] for finding in findings), default=ExitCode.OK)
    if arguments.json:
        budget = seen.budget if catalog is not None else None
        print_json(_values(arguments, part, catalog, result, findings, code, budget))
    else:
        if catalog is not None and result is not None:
            _print_sources(part, catalog, result, explain=arguments.explain)
            print(f"memory of {_node_text(layout, arguments.node_ranks)}, at most: {seen.budget.text()}\n")
            print_selections(_selections(part, catalog), explain=arguments.explain)
            print_denied(denied_of_part(catalog))
            if catalog.denied:
                print()
        _print_findings(findings)
    return code


def _node_text(layout: Layout, node_ranks: int | None) -> str:
    """The node whose memory is added up."""
    ranks = layout.dp * layout.tp * layout.cp * layout.pp
    if node_ranks is None or node_ranks >= ranks:
        return "a node that reads everything" + (f" for {ranks} ranks" if ranks > 1 else "")
    return f"a node of {node_ranks} of {ranks} ranks"


def _open(
    folder: Path, settings: Mapping[str, SourceSettings], views: PartViews | None = None
) -> tuple[Catalog | None, list[Finding]]:
    """The catalog, or why there is none that fits."""
    try:
        return open_catalog(folder, settings, views), []
    except CatalogError as error:
        return None, [Finding(level=Level.FINDING, where="catalog", message=str(error))]


def _placed(finding: Finding, whole: Recipe) -> Finding:
    """The finding with the whole path of keys, where it is of a source of validation or test."""
    for part in PARTS[1:]:
        for name in getattr(getattr(whole, part), "sources", {}):
            if f"{finding.where}.".startswith(f"sources.{name}."):
                return replace(finding, where=f"{part}.{finding.where}")
    return finding


def _print_sources(part: Part, catalog: Catalog, result: Forecast, *, explain: bool) -> None:
    rows = [
        (
            source.name,
            percent_text(source.share),
            *map(count_text, rows_and_tokens(part, catalog, source.name)),
            _step_text(result, source.first_step),
            count_text(source.delivered_tokens),
            f"{source.epochs:,.4g}",
            _step_text(result, source.runs_out_step),
        )
        for source in result.sources
    ]
    num_steps = result.num_steps if result.stop_step is None else result.stop_step - result.start
    since = f" from step {count_text(result.start)} on" if result.start else ""
    print(
        f"{count_text(num_steps)} steps{since} of {count_text(result.capacity_tokens)} tokens, "
        f"{percent_text(result.fill)} filled\n"
    )
    print_table(COLUMNS, rows, explain=explain)
    print_groups(_groups(part, result), explain=explain)
    if result.simulated_steps < num_steps:
        print(f"\n~ and all sums: estimated from the first {count_text(result.simulated_steps)} steps")
    for line in module_lines({name: one for name, one in result.modules.items() if one["num_consumers"] > 1}):
        print(f"\n{line}" if line.startswith("module") else line)
    if part.packing.method == "whole" and result.simulated_steps:
        most = -(-result.overdraw_tokens // result.capacity_tokens)
        print(
            f"\noverdraw: at most {count_text(result.overdraw_tokens)} tokens are at hand beyond a step, so a document "
            f"waits {count_text(most)} step(s) at most"
        )
    open_bytes = open_document_bytes(part, catalog)
    if open_bytes:
        print(f"\nopen documents: up to {bytes_text(open_bytes)} beside read.cache, in each process that reads")
    print()


def _selections(part: Part, catalog: Catalog) -> list[dict[str, Any]]:
    if not catalog.views:
        return []
    return selection_values(catalog, read_manifest(catalog.directory).views[part.name])


def _groups(part: Part, result: Forecast) -> list[dict[str, Any]]:
    shares = {source.name: source.share for source in result.sources}
    return group_values(part, shares, {source.name: source.delivered_tokens for source in result.sources})


def _step_text(result: Forecast, step: int | None) -> str:
    if step is None:
        return "-"
    return count_text(step) if result.is_exact(step) else f"~{count_text(step)}"


def _print_findings(findings: Sequence[Finding]) -> None:
    if not findings:
        print("no findings")
    for finding in findings:
        print(f"{finding.level.value}: {finding.where}: {finding.message}")


def _values(
    arguments: argparse.Namespace,
    part: Part,
    catalog: Catalog | None,
    result: Forecast | None,
    findings: Sequence[Finding],
    code: ExitCode,
    budget: MemoryBudget | None,
) -> dict[str, Any]:
    values: dict[str, Any] = {
        "recipe": str(arguments.recipe),
        "part": arguments.part,
        "recipe_fingerprint": recipe_fingerprint(part),
        "catalog_fingerprint": catalog.fingerprint if catalog is not None else None,
        "num_steps": arguments.steps,
        "vocab_size": part.vocab_size,
        "exit_code": int(code),
        "findings": [
            {"level": finding.level.value, "where": finding.where, "message": finding.message} for finding in findings
        ],
        "sources": [],
    }
    if budget is not None:
        values["node_memory_bytes"] = budget.terms
    if catalog is not None and result is not None:
        values |= {
            "first_step": result.start,
            "simulated_steps": result.simulated_steps,
            "stop_step": result.stop_step,
            "capacity_tokens": result.capacity_tokens,
            "fill": result.fill,
            "lowest_fill": result.lowest_fill,
            "overdraw_tokens": result.overdraw_tokens,
            "modules": result.modules,
            "lowest_fill_step": result.lowest_fill_step,
            "selections": _selections(part, catalog),
            "denied": {
                name: {"num_documents": len(one.rows), "num_tokens": one.num_tokens}
                for name, one in sorted(catalog.denied.items())
            },
            "open_document_bytes": open_document_bytes(part, catalog),
        }
        values["sources"] += [values_of_stream(part, catalog, source) for source in result.sources]
    return values
