"""One page of HTML about a plan: predicted times, heat maps, lengths, mixture, a drawn microbatch.

In: values of `torchmix plan --json`, and those of `ReportNumbers`. Out: one file that needs no network and no script.
Must hold: each number of a picture stands in the file as JSON, in `<script type="application/json" id="values">`; text
of the recipe's is escaped. Cost: that of the charts; some hundred kilobytes.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchmix.cli.plan.report.figures import colors_of, heat_maps, lengths, mixture, ratios, times
from torchmix.cli.plan.report.numbers import ReportNumbers
from torchmix.cli.plan.simulate import seconds_text
from torchmix.cli.terminal import count_text, percent_text
from torchmix.planner.simulation.rivals import ORDERS

MEETINGS = {"at_end": "at the end of a step", "each_microbatch": "in each microbatch"}
COMPARED = ("arrival order", "hash order")
"""Orders that the plan's gain is said over."""
HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 68em; padding: 0 1em; color: #222;
  background: #fff }}
h1 {{ font-size: 1.5em; margin-bottom: .2em }} h2 {{ font-size: 1.15em; margin: 2em 0 .3em }}
p {{ margin: .4em 0; max-width: 56em }} p.facts, figcaption {{ color: #555 }} figure {{ margin: .6em 0 1.4em }}
figure > svg {{ width: 100%; height: auto }} figure.drawn {{ overflow-x: auto }} figure.drawn > svg {{ width: auto }}
figcaption {{ font-size: .9em; max-width: 60em }} li {{ margin: .2em 0 }}
table {{ border-collapse: collapse; margin: .6em 0 }} td, th {{ padding: .25em .8em; text-align: right }}
td:first-child, th:first-child {{ text-align: left }} thead {{ border-bottom: 1px solid #999 }}
tr.ours {{ font-weight: 600; background: #eef2fb }} .gain {{ font-size: 1.15em }}
</style></head><body>
"""


def write_report(path: Path, values: Mapping[str, Any], numbers: ReportNumbers) -> None:
    """Write the page.

    Args:
        path: The file to write.
        values: Of the plan, as `--json` prints them.
        numbers: Of the same steps.

    Raises:
        OSError: The file cannot be written.
    """
    shown = numbers.values()
    aside = path.with_name(f".{path.name}.partial")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.writelines(_parts(values, shown, numbers.drawing(_colors(shown))))
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _parts(values: Mapping[str, Any], shown: Mapping[str, Any], drawing: str) -> Iterator[str]:
    title = html.escape(f"Plan of {Path(values['recipe']).name}")
    last = values["first_step"] + values["num_steps"] - 1
    ranks = values["dp"] * values["tp"] * values["cp"] * values["pp"]
    yield HEAD.format(title=title)
    yield f"<h1>{title}</h1>\n"
    yield (
        f'<p class="facts">steps {count_text(values["first_step"])} to {count_text(last)} of {values["part"]} &middot; '
        f"{count_text(ranks)} ranks: dp {values['dp']}, cp {values['cp']}, pp {values['pp']}, tp {values['tp']}, "
        f"micro-batch size {values['micro_batch_size']} &middot; {count_text(values['capacity_tokens'])} tokens a "
        f"step, {percent_text(values['fill'])} filled &middot; recipe {values['recipe_fingerprint']}, catalog "
        f"{values['catalog_fingerprint']}, order digest {values['order_digest']}</p>\n"
    )
    if "simulation" in values:
        yield from _simulation(values["simulation"])
    yield from _balance(values, shown)
    yield from _data(values, shown)
    yield "<h2>How pieces come to ranks</h2>\n"
    yield _figure(
        drawing,
        f"Microbatch 0 of step {shown['shown_step']['step']}: pieces of documents come from their source into a "
        f"sample, the sample into a microbatch of a rank.",
        kind="drawn",
    )
    if "simulation" in values:
        yield "<h2>What is assumed</h2>\n<ul>\n"
        yield from (f"<li>{html.escape(line)}</li>\n" for line in values["simulation"]["assumptions"])
        yield "</ul>\n"
    content = json.dumps({"plan": values, "shown": shown}).replace("<", "\\u003c")
    yield f'<script type="application/json" id="values">{content}</script>\n</body></html>\n'


def _simulation(found: Mapping[str, Any]) -> Iterator[str]:
    orders = found["orders"]
    yield f"<h2>Predicted time of a step: {html.escape(found['model'])} on {count_text(found['world'])} ranks</h2>\n"
    for kind, where in MEETINGS.items():
        times_of = {name: one[kind]["over_ideal"] for name, one in orders.items()}
        gains = (f"{times_of[name] / times_of['this plan']:.2f} x as fast as {name}" for name in COMPARED)
        yield f'<p class="gain">Where ranks meet {where}, this plan is {" and ".join(gains)}.</p>\n'
    yield _figure(
        times(orders, found["pipeline_bubble"]),
        "The ideal is equal work for all ranks, in a pipeline without a bubble. Communication costs nothing here; all "
        "assumptions stand at the end of the page.",
    )
    yield "<table><thead><tr><th>order</th><th>meet at the end</th><th>x ideal</th><th>in each microbatch</th>"
    yield "<th>x ideal</th></tr></thead><tbody>\n"
    for name, ways in orders.items():
        predicted = [ways[kind] for kind in MEETINGS]
        cells = "".join(f"<td>{seconds_text(one['seconds'])}</td><td>{one['over_ideal']:.3f}</td>" for one in predicted)
        yield f"<tr{' class=ours' if name == 'this plan' else ''}><td>{name}</td>{cells}</tr>\n"
    yield "</tbody></table>\n<ul>\n"
    yield from (f"<li><b>{name}</b>: {meaning}.</li>\n" for name, meaning in ORDERS.items())
    yield "</ul>\n"


def _balance(values: Mapping[str, Any], shown: Mapping[str, Any]) -> Iterator[str]:
    step = shown["shown_step"]
    yield f"<h2>Work of each rank in each microbatch, step {step['step']}</h2>\n"
    yield (
        "<p>A microbatch takes as long as that of its slowest rank, so what counts is the darkest cell of each column, "
        "which the bars repeat. Both pictures have the same samples and one scale. Samples of like cost meet in one "
        "microbatch of the plan; costly ones are in the middle, as suits a pipeline.</p>\n"
    )
    yield _figure(
        heat_maps(step["hash_order"], step["plan"], rows="data-parallel rank", columns="microbatch", columns_wait=True),
        f"Backbone. Of the steps planned, balance changes this one most. Over all of them the plan is at "
        f"{values['balance_ratio']:.4f} x the lower bound, hash order at {values['hash_order_ratio']:.4f}.",
    )
    for name, module in step["modules"].items():
        consumers = "consumer in the replica" + (", bin by bin" if module["num_bins"] > 1 else "")
        facts = values["modules"][name]
        yield _figure(
            heat_maps(
                module["hash_order"], module["plan"], rows="data-parallel rank", columns=consumers, columns_wait=False
            ),
            f"Module {html.escape(name)}: {count_text(module['num_items'])} {module['unit']}s over {module['axis']}. "
            f"Over all steps its slowest consumer is at {facts['balance_ratio']:.4f} x the lower bound, in hash order "
            f"at {facts['hash_order_ratio']:.4f}. A large item cannot be divided, so a bound may be one item.",
        )
    yield _figure(
        ratios(shown["steps"], shown["hash_order_ratio"], shown["balance_ratio"], shown["fill"]),
        "All steps: the balance of the backbone, and how full the samples are.",
    )


def _data(values: Mapping[str, Any], shown: Mapping[str, Any]) -> Iterator[str]:
    colors = _colors(shown)
    yield "<h2>What the steps hold</h2>\n"
    yield _figure(
        mixture(shown["steps"], shown["streams"], shown["delivered_tokens"], colors),
        "Tokens of each stream in the samples of a step.",
    )
    heads = "".join(f"<th>{name}</th>" for name in ("stream", "share", "given", "tokens", "epochs"))
    yield f"<table><thead><tr>{heads}</tr></thead><tbody>\n"
    for one in values["sources"]:
        yield (
            f"<tr><td>{html.escape(one['name'])}</td><td>{percent_text(one['share'])}</td>"
            f"<td>{percent_text(one['delivered_share'])}</td><td>{count_text(one['delivered_tokens'])}</td>"
            f"<td>{one['epochs']:,.4g}</td></tr>\n"
        )
    yield "</tbody></table>\n"
    lengths_of = shown["documents_by_length"]
    yield _figure(
        lengths(lengths_of["documents"], lengths_of["from_tokens"], shown["length"], colors),
        "Documents that begin in these steps, by length: classes double. Few long documents may hold most of the "
        "tokens, and most of the attention's work.",
    )


def _colors(shown: Mapping[str, Any]) -> dict[str, str]:
    return colors_of(shown["streams"], shown["delivered_tokens"])


def _figure(drawn: str, caption: str, *, kind: str = "chart") -> str:
    return f'<figure class="{kind}">{drawn}<figcaption>{caption}</figcaption></figure>\n'
