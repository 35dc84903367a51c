"""The second implementation, written from docs/formats.md alone, against the vectors and against the planner.

It shares nothing with the package. Where it and the vectors agree, the document says enough to write the formats again.
"""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support import book_order
from tests.support.book_contexts import BookRuns
from tests.support.book_jobs import BookJob, Piece, job_of_run, name_hash, streams_of_run
from tests.support.book_order import BookSource
from tests.support.book_pack import piece_hash
from tests.support.book_steps import steps
from tests.support.mixtures import make_planner
from tests.support.recipes import make_recipe
from tests.writers.write_vectors import DIGESTS, FILE, written_again
from torchmix.catalog.sizes import SourceSizes
from torchmix.errors import SourceExhausted
from torchmix.recipe.load import check_recipe
from torchmix.recipe.structs import Balance, Context, Packing, Shuffle

VECTORS = json.loads(FILE.read_text(encoding="utf-8"))
SOURCES = {name: BookSource(name=name, **sizes) for name, sizes in VECTORS["sources"].items()}


def test_the_book_gives_every_hash_and_order_of_the_vectors() -> None:
    for vector in VECTORS["named_key"]:
        assert book_order.named_key(vector["seed"], *vector["path"]) == int(vector["key"], 16)
    for vector in VECTORS["name_hash"]:
        assert name_hash(vector.get("stream", vector["name"]), vector["name"]) == int(vector["hash"], 16)
    for vector in VECTORS["mix64"]:
        assert book_order.mix64(int(vector["in"], 16)) == int(vector["out"], 16)
    for vector in VECTORS["hash_columns"]:
        assert book_order.hash_columns(int(vector["key"], 16), *vector["columns"]) == int(vector["hash"], 16)
    for vector in VECTORS["keyed_order"]:
        assert book_order.keyed_order(int(vector["key"], 16), vector["count"]) == vector["order"]
    for vector in VECTORS["order_by"]:
        ties = [int(tie, 16) for tie in vector["ties"]]
        assert book_order.order_by(vector["majors"], ties, vector["major_bits"]) == vector["order"]
    for vector in VECTORS["permute"]:
        key = int(vector["key"], 16)
        assert [book_order.permute(x, vector["n"], key) for x in vector["positions"]] == vector["images"]
    for vector in VECTORS["integer_shares"]:
        shares = {name: Fraction(share) for name, share in vector["shares"].items()}
        assert book_order.integer_shares(shares) == vector["integers"]
    for vector in VECTORS["window"]:
        rows = SOURCES[vector["source"]].window(vector["seed"], vector["epoch"], vector["window"])
        assert rows == vector["rows"]
    for vector in VECTORS["row_window"]:
        source = BookSource(
            name=vector["source"],
            first_row_of_page=[0, vector["num_rows"]],
            tokens=[],
            window_pages=1,
            method="row",
        )
        rows = source.window(vector["seed"], vector["epoch"], vector["window"])
        assert (len(rows), rows[:20]) == (vector["count"], vector["first"])
    for vector in VECTORS["piece_hash"]:
        piece = Piece(vector["source"], vector["source"], vector["epoch"], vector["row"], vector["start"], 1, 0)
        job = job_of_run({**VECTORS["runs"][0], "seed": vector["seed"]})
        assert piece_hash(job, vector["step"], piece) == int(vector["hash"], 16)


def test_runs_and_states_of_the_vectors_are_written_by_the_book_alone() -> None:
    text = FILE.read_text(encoding="utf-8")
    assert written_again(text) == text


def test_the_book_cuts_rows_as_the_vectors_do() -> None:
    for vector in VECTORS["split"]:
        for part, rows in enumerate(vector["rows"]):
            start, stop = book_order.split_bounds(vector["weights"], part)
            found = [book_order.bound(each, vector["num_rows"]) for each in (start, stop)]
            assert (start == stop) == (rows is None)
            assert rows is None or found == rows


def test_fingerprints_are_hashes_of_the_texts_in_the_vectors() -> None:
    for vector in VECTORS["recipe_fingerprint"] + VECTORS["source_fingerprint"]:
        assert hashlib.sha256(vector["text"].encode("ascii")).hexdigest()[:16] == vector["fingerprint"]
        assert json.dumps(json.loads(vector["text"]), sort_keys=True, separators=(",", ":")) == vector["text"]
    for vector in VECTORS["catalog_fingerprint"]:
        text = json.dumps(vector["sources"], sort_keys=True, separators=(",", ":"))
        assert hashlib.sha256(text.encode("ascii")).hexdigest()[:16] == vector["fingerprint"]


def test_a_state_is_magic_version_digest_and_one_map() -> None:
    for vector in VECTORS["state"]:
        data, fields = bytes.fromhex(vector["bytes"]), dict(vector["fields"])
        assert data[:15] == b"torchmix-state\x01"
        assert data[15:23] == hashlib.sha256(data[23:]).digest()[:8]
        body = msgspec.msgpack.decode(data[23:])
        for columns in (body["at"]["position"], body["at"]["pool"]):
            columns.update({name: [one for (one,) in struct.iter_unpack("<q", data)] for name, data in columns.items()})
        for part in (body, body["at"]):
            part.update({name: part[name].hex() for name in DIGESTS if name in part})
        assert body == fields


@pytest.mark.parametrize("run", VECTORS["runs"], ids=lambda run: f"{run['method']}-{run['overflow']}-{run['samples']}")
def test_the_book_gives_every_step_of_the_vectors(run: dict[str, Any]) -> None:
    made = list(
        islice(steps(job_of_run(run), streams_of_run(run, SOURCES)), None if run.get("one_pass") else len(run["steps"]))
    )
    for wanted, found in zip(run["steps"], made, strict=True):
        vector = found.vector()
        assert {name: vector[name] for name in wanted} == wanted
    assert made[-1].decisions == run["decisions"]


def percent(part: Fraction) -> str:
    return f"{100 * part.numerator / part.denominator:.3f}%"


METHODS = [("best_fit" if seed % 2 == 0 else "concat", seed + 1) for seed in range(16)]
METHODS += [("pad", 20), ("whole", 26), ("best_fit", 32)]
"""Below 26 one method for all sources, behind with sources that are cut."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(METHODS[-1][1]))
def test_the_planner_makes_the_steps_of_the_book(seed: int) -> None:
    rng = random.Random(seed)
    grows = seed // 2 % 2 == 1  # below 16, each method with each shuffle
    samples, length = rng.choice([(4, 32), (8, 48), (12, 64)])
    dp, micro_batch_size = rng.choice([(1, 1), (2, 1), (2, 2), (4, 1), (1, 4)])
    shuffle = ("page", "page", "row", "none")[seed // 4 % 4]
    books = {name: replace(random_source(rng, name), method=shuffle) for name in ("a", "zeta", "Ä")}
    sizes = {
        name: SourceSizes(
            first_row_of_page=np.array(book.first_row_of_page, np.int64),
            tokens=np.array(book.tokens, np.int32),
            window_pages=book.window_pages,
        )
        for name, book in books.items()
    }
    shares = {"a": "59.9%", "zeta": "40%", "Ä": "0.1%"}
    packing = {
        "method": next(method for method, stop in METHODS if seed < stop),
        "overflow": rng.choice(["split", "truncate", "drop"]),
        "align_tokens": rng.choice([1, 4, 8, 16]),
    }
    one_pass = seed % 6 == 5
    max_epochs = {"a": rng.randint(1, 6)} if rng.random() < 0.5 else {}
    if one_pass:
        max_epochs = dict.fromkeys(shares, 1)
    limits = {name: {"max_epochs": most, "on_exhausted": "renormalise"} for name, most in max_epochs.items()}
    ramp, documents = [(0, samples)], {}
    if seed % 3:  # steps of other sizes, up and down, and a part of a source
        ramp += [(step, samples * rng.choice((1, 2, 3, 5))) for step in sorted(rng.sample(range(1, 12), 3))]
        documents["zeta"] = (Fraction(0), Fraction(rng.randint(400, 999), 1000))
        if books["Ä"].tokens[-1]:
            documents["Ä"] = (Fraction(rng.randint(1, 500), 1000), Fraction(1))
        if seed % 2:
            ramp = [(step, 5 * samples // (1 + count) // 4 * 4) for count, (step, _) in enumerate(ramp)]
    longer = [(step, length * times) for step, times in ((2, 2), (5, 4), (7, 24), (9, 1), (12, 3))] if grows else []
    stages = [
        (step, [count for first, count in ramp if first <= step][-1], dict(longer).get(step))
        for step in sorted({*dict(ramp), *dict(longer)})
    ]
    cuts = {name: {"documents": tuple(map(percent, part))} for name, part in documents.items()}
    flows = {name for name in shares if rng.random() < 0.6} | {"a"} if seed >= 26 else set()
    overflows, longest = rules_of_sources(rng, shares, flows, packing, length=length)
    for name in shares:
        own = {"method": "concat" if name in flows else None, "overflow": overflows.get(name)}
        cuts[name] = {**cuts.get(name, {}), "packing": {**own, "max_length": longest.get(name)}}
    keys = {name: {**limits.get(name, {}), **cuts.get(name, {})} for name in shares}
    if packing["method"] == "whole":
        micro_batch_size = 1
    context = Context(
        rank_tokens=rng.choice([512, 2048]),
        align=rng.choice([1, 3]),
        per_microbatch=rng.choice([0, 99]),
        microbatches_of=1 + seed % 3,
    )
    layout = {"dp": dp, "micro_batch_size": micro_batch_size}
    runs: BookRuns | None = None
    recipe = make_recipe(
        shares,
        samples=stages,
        length=length,
        seed=seed,
        packing={**packing, "method": "best_fit"} if packing["method"] == "whole" else packing,
        sources=keys,
    )
    recipe = msgspec.structs.replace(recipe, shuffle=Shuffle(method=shuffle))
    if packing["method"] == "whole":
        balance = Balance(context=context, model=recipe.balance.model)
        whole = msgspec.structs.replace(recipe, packing=Packing(**packing), balance=balance)
        recipe = check_recipe(whole)
        layout |= {"cp": 4, "pp": rng.choice([1, 2])}
    model = recipe.balance.model
    assert model is not None and model.kv_heads is None
    cost = (model.layers * (4 * model.hidden + 3 * model.ffn) + (model.vocab or 0), model.layers, 0)
    if packing["method"] == "whole":
        ranks = dp * layout["cp"]
        runs = BookRuns(
            per_token=cost[0],
            per_pair=cost[1],
            per_exchanged=-(-cost[0] // 128),
            per_microbatch=context.per_microbatch,
            rank_tokens=context.rank_tokens,
            align=context.align,
            sizes=tuple(1 << bit for bit in range(6) if 1 << bit <= ranks),
            ranks=ranks,
            stages=layout["pp"],
            microbatches_of=context.microbatches_of,
        )
    planner = make_planner(recipe, sizes, **layout, one_pass=one_pass)
    job = BookJob(
        seed=seed,
        ramp=ramp,
        longer=longer,
        length=length,
        **packing,
        shares={name: Fraction(share[:-1]) / 100 for name, share in shares.items()},
        max_epochs=max_epochs,
        documents=documents,
        cut=frozenset(flows),
        overflows=overflows,
        longest=longest,
        one_pass=one_pass,
        dp=dp,
        micro_batch_size=micro_batch_size,
        cost=cost,
        runs=runs,
    )
    cursor = planner.start()
    made = list(islice(steps(job, books), 15))
    for book in made:
        skipped = planner.skip(cursor)
        plan, cursor = planner.step(cursor)
        assert (skipped.step, skipped.order_digest) == (cursor.step, cursor.order_digest)
        place = f"seed {seed}, step {plan.step}"
        assert [row[2] for row in book.rows] == plan.sample_offset.tolist(), place
        assert (book.order_digest, book.plan_digest) == (plan.order_digest.hex(), plan.plan_digest.hex()), place
        assert list(book.asked.values()) == plan.asked_tokens.tolist(), place
        if runs is not None:
            report = plan.balance
            assert (book.cost, book.hash_order_cost) == (report.cost, report.hash_order_cost), place
            assert book.lower_bound == report.lower_bound, place
    if len(made) < 15:
        assert one_pass
        with pytest.raises(SourceExhausted):
            planner.step(cursor)


def rules_of_sources(
    rng: random.Random, names: Iterable[str], flows: set[str], packing: Mapping[str, Any], *, length: int
) -> tuple[dict[str, str], dict[str, int]]:
    """What happens to long documents of some sources, and which of them are too long."""
    overflows = {name: rng.choice(["split", "truncate", "drop"]) for name in names if rng.random() < 0.4}
    longest = {}
    for name in names:
        is_split = overflows.get(name, packing["overflow"]) == "split"
        if rng.random() < 0.5 and not (is_split and (packing["method"] == "concat" or name in flows)):
            longest[name] = rng.choice([16, length // 2 // 16 * 16, length, 2 * length, 4 * length, 24 * length])
            longest[name] -= 0 if is_split else rng.choice([0, 1, 5])
    return overflows, longest


def random_source(rng: random.Random, name: str) -> BookSource:
    """A few dozen documents, some empty, some longer than a batch, in pages of any number of rows."""
    count = rng.randint(3, 60)
    kinds = (0, 1, 20, 20, 150, 150, rng.choice([150, 1500]))
    tokens = [rng.randint(min(1, most), most) for most in rng.choices(kinds, k=count)]
    tokens[0] = 5  # nothing may be without tokens
    cuts = sorted(rng.randint(0, count) for _ in range(rng.randint(0, 8)))
    return BookSource(name=name, first_row_of_page=[0, *cuts, count], tokens=tokens, window_pages=rng.randint(1, 4))
