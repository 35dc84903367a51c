"""Three judges of what a row of the matrix gave: tensors, order, and a ledger with the shares that were asked.

In: the microbatches of every rank, the plans of the steps, and the project with its own arithmetic. Out: how much was
compared; an AssertionError says what does not hold. Must hold: the oracle has the tensors from raw files, the book
has the order from docs/formats.md, and the ledger has who may be given when, and how much was asked of whom.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import groupby, pairwise, product
from typing import Any

import numpy as np

from tests.pairs.project import SEED, Project, epoch_stream, modules_of, set_change
from tests.pairs.shelf import RESET
from tests.support import book_steps, oracle
from tests.support.book_jobs import BookJob
from tests.support.book_order import BookSource
from tests.support.book_shares import mean_shares, shares_of_tree
from tests.support.book_streams import BookStream, drawn_pages, flat_of, selection_of, stream_of, window_pages_of
from tests.support.image_record import Record, exchanged
from tests.support.oracle_job import assert_equal
from tests.support.sounds import SOUND
from tests.support.videos import VIDEO
from torchmix.catalog.store import Catalog
from torchmix.constructor.fields import Microbatch
from torchmix.parallel.topology import Topology
from torchmix.planner.cursor import Cursor, gone_by
from torchmix.planner.plan import StepPlan
from torchmix.planner.planner import Planner
from torchmix.stateful.tower import open_tower
from torchmix.steps.replay import columns_of_pieces

UNIT_ARRAYS = {"image": "pixel_values", "sound": SOUND.unit_array, "video": VIDEO.unit_array}
"""By kind of items."""


@dataclass(frozen=True, kw_only=True)
class Leg:
    """Steps of one layout, between two changes of anything."""

    project: Project
    sizes: Mapping[str, int]
    topology: Topology
    """Of these sizes; ranks of groups that are apart stand together."""
    micro_batch: int
    plans: list[StepPlan]
    cursors: list[Cursor]
    """Before each step, and behind the last one."""
    planner: Planner
    catalog: Catalog
    given: list[list[Microbatch]]
    """By rank."""
    digests: list[str]
    is_edited: bool = False


@dataclass
class Verdict:
    """What was compared."""

    tokens: int = 0
    images: int = 0
    items: int = 0
    booked: int = 0
    """Steps whose order is the book's."""
    spans: int = 0
    epochs: int = 0
    shares: int = 0
    ran_out: int = 0
    notes: list[str] = field(default_factory=list)


def pieces_of(plan: StepPlan) -> list[dict[str, Any]]:
    """The rows of a step as a plan on disk has them."""
    columns = {name: np.asarray(values).tolist() for name, values in columns_of_pieces(plan).items()}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def judge(legs: Sequence[Leg]) -> Verdict:
    """All three."""
    verdict = Verdict()
    for leg in legs:
        _tensors(leg, verdict)
    _ledger(legs, verdict)
    _shares(legs, verdict)
    _book(legs, verdict)
    return verdict


class _InEpochs:
    """The documents of a source, by row and epoch."""

    def __init__(self, project: Project, source: str) -> None:
        self._project, self._source = project, source

    def __getitem__(self, place: tuple[int, int]) -> oracle.Document:
        return self._project.document(self._source, *place)


def _tensors(leg: Leg, verdict: Verdict) -> None:
    """Every field of every rank, and every item of a module, from raw files."""
    row, project = leg.project.row, leg.project
    reset = {"main": RESET if row["rows"] == "ids" else ord("~")} if row["reset_id"] == "given" else {}
    has_images = row["module"] == "image"
    taken = [0] * len(leg.given)
    documents = {name: project.documents(name) for name in leg.plans[0].sources} if leg.plans else {}
    assert leg.digests == [plan.order_digest.hex() for plan in leg.plans], "order digests are those of the plan"
    for plan in leg.plans:
        pieces, placement = pieces_of(plan), plan.placement
        job = oracle.Job(
            length=plan.length,
            boundaries=row["boundaries"],
            method=row["method"],
            align_tokens=int(row["align"]),
            micro_batch_size=leg.micro_batch,
            positions=None if row["positions"] == "none" else row["positions"],
            reset_ids={name: one for name, one in reset.items() if name in documents},
            reset_loss=row["reset_loss"],
            broadcast_at=None if row["broadcast_at"] == "none" else row["broadcast_at"],
            **leg.sizes,
        )
        if (runs := plan.contexts) is not None:
            bins = (runs.microbatch_of_bin.tolist(), runs.first_rank_of_bin.tolist(), runs.size_of_bin.tolist())
            expected = oracle.microbatches_of_runs(
                pieces,
                documents,
                replace(job, align_tokens=runs.align),
                bins=[*zip(*bins, strict=True)],
                bin_of_sample=runs.bin_of_sample.tolist(),
                padded_tokens=runs.padded_tokens.tolist(),
            )
        else:
            places = zip(placement.dp_rank_of_sample.tolist(), placement.microbatch_of_sample.tolist(), strict=True)
            expected = oracle.microbatches_of_step(
                [{**one, "row": (one["row"], one["epoch"])} for one in pieces],
                {name: _InEpochs(project, name) for name in documents},
                job,
                samples=[*places],
                has_images=has_images,
            )
        expected = _by_rank(leg, expected)
        of_ranks = []
        for rank, wanted in enumerate(expected):
            mine = leg.given[rank][taken[rank] : taken[rank] + len(wanted)]
            taken[rank] += len(wanted)
            assert len(mine) == len(wanted), f"rank {rank} has {len(mine)} microbatches of step {plan.step}"
            of_ranks.append(mine)
            for found, one in zip(mine, wanted, strict=True):
                fields = {name: value for name, value in one.items() if name != "placed"}
                assert_equal(found, fields, f"step {plan.step}, rank {rank}")
                assert all(getattr(found, name) is None for name, value in fields.items() if value is None)
                verdict.tokens += 0 if one["tokens"] is None else one["tokens"].size
        if has_images:
            _images(leg, plan, pieces, expected, of_ranks, verdict)
        elif row["module"] == "document":
            _items(leg, plan, pieces, documents, of_ranks, verdict)
    assert taken == [len(given) for given in leg.given], "nothing else is given"


def _by_rank(leg: Leg, expected: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """What the oracle has in Megatron's order of ranks, in that of the job."""
    plain = Topology(**leg.sizes)
    places = [leg.topology.coordinates_of(rank) for rank in range(leg.topology.world_size)]
    return [expected[plain.rank_at(tp=at.tp, cp=at.cp, pp=at.pp, dp=at.dp)] for at in places]


def _consumers(leg: Leg) -> list[int]:
    """Ranks of which each computes items that no other one of them does."""
    axis = leg.project.row["module_axis"]
    found = []
    for rank in range(leg.topology.world_size):
        place = leg.topology.coordinates_of(rank)
        same = {"WORLD": (), "CP": (place.tp, place.pp), "DP": (place.tp, place.pp, place.cp)}[axis]
        if not any(same):
            found.append(rank)
    return found


def _groups(leg: Leg, step: list[Microbatch]) -> list[list[Microbatch]]:
    return [step] if leg.project.row["module_scope"] == "step" else [[one] for one in step]


def _items(
    leg: Leg,
    plan: StepPlan,
    pieces: list[dict[str, Any]],
    documents: Mapping[str, Sequence[oracle.Document]],
    of_ranks: list[list[Microbatch]],
    verdict: Verdict,
) -> None:
    wanted: Counter[tuple[Any, ...]] = Counter()
    for piece in pieces:
        if leg.project.row["module_sources"] == "none" or piece["source"] == "main":
            start, stop = piece["start"], piece["start"] + piece["tokens"]
            ids = tuple(documents[piece["source"]][piece["row"]].ids[start:stop])
            wanted[plan.sources.index(piece["source"]), piece["row"], start, ids] += 1
    found: Counter[tuple[Any, ...]] = Counter()
    for rank in _consumers(leg):
        for group in _groups(leg, of_ranks[rank]):
            batch = group[0].modules["vision"]
            arrays = {name: array.tolist() for name, array in batch.arrays.items()}
            first = 0
            for i, count in enumerate(batch.units.tolist()):
                ids = tuple(arrays["tokens"][first : first + count])
                found[arrays["source"][i], arrays["row"][i], arrays["start"][i], ids] += 1
                first += count
    assert found == wanted, f"step {plan.step}: items of documents"
    verdict.items += found.total()


def _images(
    leg: Leg,
    plan: StepPlan,
    pieces: list[dict[str, Any]],
    expected: list[list[dict[str, Any]]],
    of_ranks: list[list[Microbatch]],
    verdict: Verdict,
) -> None:
    wanted: Counter[float] = Counter()
    for piece in pieces:
        document = leg.project.document(piece["source"], piece["row"], piece["epoch"])
        for first, (code, count) in document.images.items():
            wanted[code] += piece["start"] <= first <= piece["start"] + piece["tokens"] - count
    if leg.project.row["image_more"] == "tensor":
        _towers(leg, of_ranks)
    of_modules = [_encoded(leg, of_ranks, *one) for one in modules_of(leg.project.row).items()]
    for rank, microbatches in enumerate(expected):
        of_rank = [one["placed"] for one in microbatches if one["placed"] is not None]
        placed = [sum(parts) for parts in zip(*(records[rank].placed for records in of_modules), strict=True)]
        for found, one in zip(placed, of_rank, strict=True):
            np.testing.assert_array_equal(found, one, err_msg=f"images of step {plan.step}, rank {rank}")
    codes = Counter(code for records in of_modules for rank in _consumers(leg) for code, *_ in records[rank].images)
    assert codes == +wanted, f"step {plan.step}: each image is encoded once"
    verdict.images += codes.total()


def _encoded(leg: Leg, of_ranks: list[list[Microbatch]], module: str, kind: str) -> list[Record]:
    """What each rank encodes of a module in a step, and gets of it."""
    array = UNIT_ARRAYS[kind]
    records = [
        Record(topology=leg.topology.with_rank(rank), module=module, unit_array=array) for rank in range(len(of_ranks))
    ]
    for groups in zip(*(_groups(leg, step) for step in of_ranks), strict=True):
        encoded = [record.encode(group) for record, group in zip(records, groups, strict=True)]
        rows, routes = [pair[0] for pair in encoded], [pair[1] for pair in encoded]
        for rank, record in enumerate(records):
            record.embed(groups[rank], exchanged(rows, routes, rank), routes[rank])
    return records


def _towers(leg: Leg, of_ranks: list[list[Microbatch]]) -> None:
    """What the tower of a model takes: rows of patches, or pictures that are put together here by loops."""
    tower = open_tower(leg.project.path, "vision")
    for rank in _consumers(leg):
        for group in _groups(leg, of_ranks[rank]):
            batch = group[0].modules["vision"]
            patches = batch.arrays["pixel_values"].numpy().astype(np.float64).reshape(-1, 3, 16) / 255
            patches = (patches - 0.5) / np.array([0.2, 0.3, 0.4])[:, None]
            found = tower(batch).numpy()
            if leg.project.row["image_rule"] == "dynamic":
                np.testing.assert_allclose(found, patches.reshape(-1, 48), atol=1e-5)
                continue
            at, merge = 0, 1 if leg.project.row["image_rule"] == "anyres" else 2
            pictures = np.zeros(found.shape)
            sides = [side for segments, *side in batch.arrays["grid_thw"].tolist() for _ in range(segments)]
            for picture, (rows, columns) in zip(pictures, sides, strict=True):
                for y, x, dy, dx in product(range(0, rows, merge), range(0, columns, merge), *[range(merge)] * 2):
                    top, left = 4 * (y + dy), 4 * (x + dx)
                    picture[:, top : top + 4, left : left + 4] = patches[at].reshape(3, 4, 4)
                    at += 1
            np.testing.assert_allclose(found, pictures, atol=1e-5)


def _spans(legs: Sequence[Leg]) -> Iterator[tuple[Leg, str, str, int, int, int, int]]:
    """Leg, stream, source, epoch, row, start and stop of everything that was given."""
    for leg in legs:
        for plan in leg.plans:
            new = plan.pieces
            columns = (new.stream, new.source, new.epoch, new.row, new.start, new.tokens)
            for stream, source, epoch, row, start, tokens in zip(*(one.tolist() for one in columns), strict=True):
                yield leg, plan.streams[stream], plan.sources[source], epoch, row, start, start + tokens


def _ledger(legs: Sequence[Leg], verdict: Verdict) -> None:
    """In each epoch of a stream each token of its rows once, of no others, and none is lost of a whole epoch."""
    for is_edited, group in groupby(legs, lambda leg: leg.is_edited):
        some = list(group)
        last, project = some[-1], some[-1].project
        rows, names = project.rows(), last.planner.sources
        least = {name: project.counted(name) for name in names}
        most = {name: project.counted(name, at_longest=True) for name in names}
        given: dict[tuple[str, int], dict[tuple[str, int], list[tuple[int, int]]]] = defaultdict(dict)
        for _, stream, source, epoch, row, start, stop in _spans(some):
            given[stream, epoch].setdefault((source, row), []).append((start, stop))
            verdict.spans += 1
        pool, cursor = last.cursors[-1].pool, last.cursors[-1]
        columns = (pool.stream, pool.source, pool.epoch, pool.row, pool.start, pool.tokens)
        for stream, source, epoch, row, start, tokens in zip(*(one.tolist() for one in columns), strict=True):
            of_stream = given[last.planner.streams[stream], epoch]
            of_stream.setdefault((names[source], row), []).append((start, start + tokens))
        epochs = dict(zip(last.planner.streams, cursor.position.epoch.tolist(), strict=True))
        assert set(epochs) == set(rows), "streams are those of the recipe"
        for (stream, epoch), documents in given.items():
            for (source, row), spans in documents.items():
                assert row in rows[stream].get(source, ()), f"{stream} has no row {row} of {source}"
                ordered = sorted(spans)
                assert all(a[1] <= b[0] for a, b in pairwise(ordered)), f"{stream}: row {row} of {source} twice"
                assert ordered[0][0] >= 0 and ordered[-1][1] <= most[source][row], f"{stream} {source} {row}"
            if epoch < epochs[stream] and not is_edited:
                for source, held in rows[stream].items():
                    for row in held:
                        tokens = sum(stop - start for start, stop in documents.get((source, row), ()))
                        assert least[source][row] <= tokens <= most[source][row], (
                            f"{stream} lost tokens of row {row} of {source}"
                        )
                verdict.epochs += 1
        if project.row["life"] == "one_pass":
            assert all(epoch == 1 for epoch in epochs.values()), "a pass goes through each stream"
            assert not len(pool), "a pass leaves nothing"


def _plain(project: Project) -> dict[str, Any]:
    """The recipe's shares over the run, as `book_shares` takes them."""
    start = project.shares_tree(project.weights)
    row, found = project.row, {"mixture": start}
    if row["schedule"] == "none" or project.part != "train":
        return found
    capacity = 16 * project.length
    after = project.shares_tree(1 - project.weights)
    if row["schedule"] == "set":
        path, share = set_change(project)
        change = {"from": f"{2 * capacity} tokens", "mixture": _with_share(start, path.split("."), share)}
    elif row["schedule"] == "mixture":
        change = {"from": f"{capacity + 100} tokens", "to": f"{3 * capacity + 50} tokens", "mixture": after}
    elif row["schedule"] == "file":
        samples = (16, 16, 24, 24) if row["samples"] == "ramp" else (16,) * 4
        stop = sum(samples) * project.length if row["samples"] != "lengths" else 4 * capacity
        change = {"from": f"{2 * capacity} tokens", "to": f"{stop} tokens", "mixture": after}
    else:
        change = {"from": {"epochs": 1, "of": epoch_stream(project)}, "to": f"{capacity} tokens", "mixture": after}
    return {**found, "schedule": [change]}


def _with_share(tree: dict[str, Any], path: list[str], share: Fraction) -> dict[str, Any]:
    """A tree in which a child has a share of its group, and its siblings keep their ratios in what is left."""

    def weight(value: Any) -> Fraction:
        return Fraction(value["share"] if isinstance(value, dict) else value)

    if len(path) > 1:
        one = tree[path[0]]
        return {**tree, path[0]: {**one, "children": _with_share(one["children"], path[1:], share)}}
    rest = sum((weight(value) for name, value in tree.items() if name != path[0]), Fraction(0))
    found = {}
    for name, value in tree.items():
        part = share if name == path[0] else (1 - share) * weight(value) / rest
        found[name] = {**value, "share": part} if isinstance(value, dict) else part
    return found


def _shares(legs: Sequence[Leg], verdict: Verdict) -> None:
    """What was asked of each stream in a step is its share, and what it gave is near what was asked."""
    consumed, begun = 0, None
    asked_in_all: Counter[str] = Counter()
    drawn_in_all: Counter[str] = Counter()
    for leg in legs:
        if leg.is_edited and asked_in_all:
            asked_in_all, drawn_in_all = Counter(), Counter()
        row, plain = leg.project.row, _plain(leg.project)
        longest = max(max(leg.project.counted(name, at_longest=True)) for name in leg.planner.sources)
        for plan, (before, after) in zip(leg.plans, pairwise(leg.cursors), strict=True):
            names = leg.planner.streams
            if begun is None and row["schedule"] == "epoch" and leg.project.part == "train":
                of = names.index(epoch_stream(leg.project))
                begun = consumed if before.position.epoch[of] >= 1 else None
            gone, now = set(gone_by(before.decisions)), set(gone_by(after.decisions))
            shares = mean_shares(plain, consumed, consumed + plan.capacity_tokens, gone, begun)
            consumed += plan.capacity_tokens
            verdict.ran_out += len(now - gone)
            asked, all_asked = dict(zip(names, plan.asked_tokens.tolist(), strict=True)), int(plan.asked_tokens.sum())
            total = sum(shares.values(), Fraction(0))
            for s, name in enumerate(names):
                asked_in_all[name] += asked[name]
                drawn_in_all[name] += int(plan.drawn_tokens[s])
                if gone == now and total and not leg.is_edited:
                    share = shares.get(name, Fraction(0)) / total
                    low, high = share, share
                    if row["dynamic"] != "none" and leg.project.part == "train":
                        low, high = share / 6, min(Fraction(1), share * 6)
                    most = 1 + share * len(names) + Fraction(len(names) * all_asked, 2**32)
                    most += 64 * (row["unit"] == "documents")
                    off = max(low * all_asked - asked[name], asked[name] - high * all_asked)
                    assert off <= most, f"step {plan.step}: {name} is off by {float(off)} of {all_asked}"
                    verdict.shares += 1
                if name not in now and row["unit"] == "tokens" and not leg.is_edited and row["method"] != "pad":
                    piece = min(plan.length, longest)
                    apart = abs(asked_in_all[name] - drawn_in_all[name])
                    assert 2 * apart <= max(piece, plan.length), f"step {plan.step}: {name} gave {apart} too much"


def _book(legs: Sequence[Leg], verdict: Verdict) -> None:
    """The order of the steps before the first edit, by the second implementation."""
    leg, project = legs[0], legs[0].project
    row = project.row
    runs_out = row["bounds"] == "renormalise" or row["selection"] == "bounded" or row["life"] == "one_pass"
    tree = project.shares_tree(project.weights)
    has_groups = any(isinstance(value, dict) for value in tree.values())
    if (
        (project.part == "train" and (row["schedule"] != "none" or row["dynamic"] != "none"))
        or row["unit"] == "documents"
        or row["samples"] == "lengths"
        or (runs_out and has_groups)
        or (row["bounds"] != "none" and row["split_by"] != "none" and row["bounds"] == "renormalise")
    ):
        return
    streams = _book_streams(leg)
    capped = {name for name in streams if row["life"] == "one_pass"}
    most = dict.fromkeys(capped, 1)
    if project.part == "train" and row["life"] != "one_pass":
        if row["bounds"] == "renormalise":
            most |= {name: 1 for name in streams if name in ("main", "f")}
        if row["selection"] == "bounded":
            most |= {name: 2 for name in streams if name == "picked"}
    job = BookJob(
        seed=SEED,
        ramp=_ramp(project),
        length=project.length,
        method=row["method"],
        overflow="split" if row["overflow"] == "error" else row["overflow"],
        align_tokens=int(row["align"]),
        shares=shares_of_tree(tree, set()),
        max_epochs=most,
        cut=frozenset({"main"} if row["cut"] == "given" else ()),
        overflows={} if row["own_overflow"] in ("none", "error") else {"main": row["own_overflow"]},
        longest={"main": project.most_of_main} if row["own_overflow"] in ("split", "truncate") else {},
        one_pass=row["life"] == "one_pass",
    )
    plans = [plan for one in legs if not one.is_edited for plan in one.plans]
    if not plans:
        return
    stop = plans[-1].step + 1
    found = {}
    for step in book_steps.steps(job, streams):
        found[step.step] = step.order_digest
        if step.step + 1 == stop:
            break
    for plan in plans:
        assert found.get(plan.step) == plan.order_digest.hex(), f"step {plan.step} is not the book's"
        verdict.booked += 1


def _ramp(project: Project) -> list[tuple[int, int]]:
    """Stages of the batch; validation has the last one."""
    if project.row["samples"] == "number":
        return [(0, 16)]
    return [(0, 16), (2, 24)] if project.part == "train" else [(0, 24)]


def _book_streams(leg: Leg) -> dict[str, BookStream]:
    project, rows = leg.project, leg.project.rows()
    sources: dict[str, BookSource] = {}
    whole: dict[str, BookSource] = {}
    for name in leg.planner.sources:
        sizes = leg.catalog.sources[name].sizes
        used = project._used(name)
        tokens = [
            n if r in used and r not in project.denied.get(name, ()) else 0
            for r, n in enumerate(len(document.ids) for document in project.documents(name))
        ]
        sources[name] = BookSource(
            name=name,
            first_row_of_page=np.asarray(sizes.first_row_of_page[:]).tolist(),
            tokens=tokens,
            window_pages=sizes.window_pages,
            method=project.row["shuffle"],
        )
        whole[name] = replace(sources[name], tokens=[len(document.ids) for document in project.documents(name)])
    found = {}
    for name, of_stream in rows.items():
        members = []
        for source, kept in sorted(of_stream.items()):
            one = sources[source]
            if name == "f":  # of a member, rows that the part does not use cannot be drawn
                kept = kept & set(project._used(source))
            if len(kept) == len(one.tokens):
                members.append(stream_of(one))
            else:
                window = min(one.num_pages, -(-one.window_pages * len(one.tokens) // len(kept)))
                members.append(selection_of(name, one, sorted(kept), window))
        if name == "f":
            most = 3 if project.row["window"] == "small" else 256
            size = 1 << 16 if project.row["window"] == "small" else 1 << 26
            of_size = [replace(one, rows=replace(one.rows, tokens=whole[one.rows.name].tokens)) for one in members]
            if project.row["format"] == "webdataset":  # a sample is a page, and 64 count as one
                pages = [drawn_pages(one) for one in members]
                most = most * sum(pages) // max(1, sum(-(-count // 64) for count in pages))
            found[name] = flat_of(name, members, window_pages_of(of_size, most, size))
        else:
            found[name] = members[0]
    return dict(sorted(found.items()))
