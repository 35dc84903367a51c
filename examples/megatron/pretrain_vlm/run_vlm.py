"""The real `pretrain_vlm.py` on a torchmix recipe: does the model get the planned text with its images, at each layout?

In: a checkout of Megatron-LM. Out: a line for each packing and layout, and exit code 1 if a check failed.

    python run_vlm.py ~/Megatron-LM
    python run_vlm.py ~/Megatron-LM --only "packed PP2" --keep /tmp/vlm

For each packing and layout a LLaVA of a few layers trains four steps, saved after two, and another layout goes on:

    plan      in each step the texts that the model was given, with the embeddings of each picture in the place of its
              image token, are the samples that torchmix plans without Megatron and without ranks; so are their labels,
              their loss masks and the values of their pictures
    resume    the other layout continues from the checkpoint, and is given the rest of the plan
    loss      its loss there is that of the run that was saved; Megatron's second line after a resume says a mean

Must hold: the checkout stays as it is; whatever is written is in a temporary folder. Every run has a deadline.

Cost: 16 runs, some 15 s of two cores each.
"""

from __future__ import annotations

import argparse
import io
import random
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "pretrain_gpt"))

import numpy as np
import patch
import pyarrow as pa
import pyarrow.parquet as pq
from consumed import Line, difference, hash_of, read_records
from launch import Run, Runner
from PIL import Image
from record import hash_of_picture

SAMPLES, LENGTH, STEPS, SAVE_AT = 8, 192, 4, 2
SIDE, PATCH = 16, 4
EMBEDDINGS = (SIDE // PATCH) ** 2
PLACEHOLDER, IMAGE_TOKEN = 300, -200
"""In the plan, and as Megatron's DEFAULT_IMAGE_TOKEN_INDEX."""
RECIPE = """\
version: 1
seed: 11
batch: {{samples: {samples}, length: {length}}}
sources:
  {{}}
mixture: {{plain: 30%, whole: 40%, tiled: 30%}}
packing: {{method: best_fit, overflow: error, boundaries: {boundaries}, align_tokens: 8}}
modules:
  vision: {{items: image, sizes: patches, axis: DP, near_text: always}}
"""
OPTIONS = f"patch: {PATCH}, merge: 1, tower: pictures, mean: [0.5, 0.4, 0.3], deviation: [0.2, 0.3, 0.4]"
SOURCES = {
    "plain": "{path: plain.parquet, text: text, tokenizer: bytes}",
    "whole": "{path: whole.parquet, text: text, tokenizer: bytes, images: {column: images, token: 300, "
    f"fixed: {{height: {SIDE}, width: {SIDE}}}, {OPTIONS}}}}}",
    "tiled": "{path: tiled.parquet, text: text, tokenizer: bytes, images: {column: images, token: 300, "
    f"tiles: {{size: {SIDE}, min: 1, max: 2}}, {OPTIONS}}}}}",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How ranks share the model."""

    name: str
    dp: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def flags(self) -> list[str]:
        """Megatron's; with tensor parallelism goes sequence parallelism."""
        of_tp = ["--tensor-model-parallel-size", str(self.tp), "--sequence-parallel"] if self.tp > 1 else []
        return [*of_tp, *(["--pipeline-model-parallel-size", str(self.pp)] if self.pp > 1 else [])]


ONE, DP2 = Layout(name="one"), Layout(name="DP2", dp=2)
PP2, DP2_PP2 = Layout(name="PP2", pp=2), Layout(name="DP2 x PP2", dp=2, pp=2)
TP2, TP2_PP2 = Layout(name="TP2 SP", tp=2), Layout(name="TP2 SP x PP2", tp=2, pp=2)
DP2_TP2 = Layout(name="DP2 x TP2 SP", dp=2, tp=2)
CASES = ((DP2, ONE), (PP2, DP2_PP2), (TP2, DP2_TP2), (DP2_PP2, PP2), (TP2_PP2, TP2_PP2))
"""Where a run is saved, and where it goes on: checkpoints of --ckpt-format torch have one tp and pp."""
MICRO_BATCH = {"packed": 1, "dense": 2}


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkout", type=Path, help="folder of a Megatron-LM checkout")
    parser.add_argument("--only", action="append", metavar="LINE", help='such as "packed PP2"; may be repeated')
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write everything here, and leave it; a new folder")
    parser.add_argument("--deadline-s", type=float, default=300.0, help="of one run; then all ranks print their stacks")
    options = parser.parse_args()
    known = [f"{packing} {saved.name}" for packing in MICRO_BATCH for saved, _ in CASES]
    if unknown := set(options.only or ()) - set(known):
        parser.error(f"no line is called {sorted(unknown)}; there are {known}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that ranks end, too
    with tempfile.TemporaryDirectory(prefix="torchmix-vlm-") as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        script = folder / "pretrain_vlm.py"
        original = options.checkout / "pretrain_vlm.py"
        script.write_text(patch.patched(original.read_text(encoding="utf-8")), encoding="utf-8")
        write_pictures(folder)
        runner = Runner(
            script=script, checkout=options.checkout.resolve(), folder=folder, deadline_s=options.deadline_s
        )
        failed = 0
        for packing in MICRO_BATCH:
            plan = planned(folder / f"{packing}.yaml")
            for saved, other in CASES:
                if options.only is None or f"{packing} {saved.name}" in options.only:
                    failed += not check(runner, packing, saved, other, plan)
    return int(failed > 0)


def check(runner: Runner, packing: str, saved: Layout, other: Layout, plan: dict[int, list[str]]) -> bool:
    """One line: a run that is saved, and another that goes on."""
    name = f"{packing} {saved.name}"
    checkpoints = runner.folder / "checkpoints" / name.replace(" ", "-")
    save = ["--save", str(checkpoints), "--save-interval", str(SAVE_AT)]
    first = runner.run(name, arguments(runner, packing, saved, save), ranks=saved.dp * saved.tp * saved.pp)
    found = {"plan": problems(first, saved, plan)}
    if first.is_fine:
        load = ["--load", str(checkpoints), "--ckpt-step", str(SAVE_AT)]
        ranks = other.dp * other.tp * other.pp
        then = runner.run(f"{name} resumed", arguments(runner, packing, other, load), ranks=ranks)
        found["resume"] = problems(then, other, {step: of for step, of in plan.items() if step >= SAVE_AT})
        want, have = (run.loss_of_iteration.get(SAVE_AT + 1) for run in (first, then))
        same = want is not None and have is not None and abs(want - have) <= 1e-5 * abs(want)
        found["loss"] = [] if same else [f"iteration {SAVE_AT + 1}: {have}, and {want} in the run that was saved"]
    print(f"{name}, then {other.name}:", *(f"{of} {'FAILS' if found[of] else 'ok'}" for of in found), flush=True)
    for of, what in found.items():
        print("".join(f"    {of}: {line}\n" for line in what), end="", flush=True)
    return not any(found.values())


def arguments(runner: Runner, packing: str, layout: Layout, more: Sequence[str]) -> list[str]:
    """Megatron's."""
    shared = f"""
        --data-recipe {runner.folder / packing}.yaml --tokenizer-type NullTokenizer --vocab-size 511 --num-workers 0
        --num-layers 4 --hidden-size 64 --num-attention-heads 4 --position-embedding-type learned_absolute
        --img-h {SIDE} --img-w {SIDE} --patch-dim {PATCH} --disable-vision-class-token
        --dataloader-seq-length {LENGTH - EMBEDDINGS} --seq-length {LENGTH} --max-position-embeddings {LENGTH}
        --hidden-dropout 0 --attention-dropout 0 --micro-batch-size {MICRO_BATCH[packing]}
        --global-batch-size {SAMPLES} --train-iters {STEPS} --lr-decay-iters {STEPS} --calculate-per-token-loss
        --lr 1e-3 --min-lr 1e-4 --clip-grad 1.0 --ckpt-format torch
        --eval-iters 0 --eval-interval 1000 --log-interval 1
    """
    return [*shared.split(), *layout.flags, *more]


# --- What a run was given, and what is planned: a sample is the text of its embeddings, its labels where it is trained
# on, and the values of its pictures.


def sample(tokens: Sequence[int], labels: Sequence[int], mask: Sequence[int], pictures: Sequence[str]) -> str:
    """Hashes of tokens, loss mask and labels, and of the pictures. Labels of tokens without loss are left out."""
    trained = [label for label, counts in zip(labels, mask, strict=True) if counts]
    return "-".join([hash_of(tokens), hash_of(mask), hash_of(trained), *pictures])


def planned(recipe: Path) -> dict[int, list[str]]:
    """Step -> its samples, sorted, from torchmix alone."""
    import torchmix

    tower = torchmix.open_tower(recipe, "vision")
    found: dict[int, list[str]] = defaultdict(list)
    with torchmix.build_loader(recipe, loaders="in_process", max_steps=STEPS) as loader:
        for microbatch in loader:
            batch = microbatch.modules["vision"]
            stops = np.cumsum(batch.units.tolist(), dtype=np.int64)
            by_token = {}
            for number, (_, index, token, _, _) in enumerate(batch.routes.receives.tolist()):
                if index == microbatch.index:
                    units = batch.arrays["pixel_values"][stops[number] - int(batch.units[number]) : stops[number]]
                    by_token[token] = [hash_of_picture(picture) for picture in tower.of_units(units)]
            [tokens], [labels], [mask] = (
                field.int().tolist() for field in (microbatch.tokens, microbatch.labels, microbatch.loss_mask)
            )
            mask = [0 if token == PLACEHOLDER else counts for token, counts in zip(tokens, mask, strict=True)]
            tokens = [IMAGE_TOKEN if token == PLACEHOLDER else token for token in tokens]
            pictures = [picture for token in sorted(by_token) for picture in by_token[token]]
            found[microbatch.step].append(sample(tokens, labels, mask, pictures))
    return {step: sorted(samples) for step, samples in found.items()}


def problems(run: Run, layout: Layout, plan: dict[int, list[str]]) -> list[str]:
    """What a run was given otherwise than planned."""
    if not run.is_fine:
        return [f"exit codes {run.exit_codes}", run.trouble]
    wrong: list[str] = []
    taken: dict[tuple[int, int, int, int], list[Line]] = defaultdict(list)
    for line in read_records(run.records):
        taken[line["step"], line["dp"], line["pp"], line["tp"]].append(line)
    found: dict[int, list[str]] = defaultdict(list)
    for step, dp in sorted({key[:2] for key in taken}):
        first, last = taken[step, dp, 0, 0], taken[step, dp, layout.pp - 1, 0]
        for tp in range(layout.tp):
            if (taken[step, dp, 0, tp], taken[step, dp, layout.pp - 1, tp]) != (_as(first, tp), _as(last, tp)):
                wrong.append(
                    f"step {step}, replica {dp}: tensor-parallel rank {tp} was given something else than rank 0"
                )
        if len(first) != len(last):
            wrong.append(
                f"step {step}, replica {dp}: the first stage took {len(first)} microbatches, the last {len(last)}"
            )
        for of_tokens, of_labels in zip(first, last, strict=False):
            found[step] += _samples(of_tokens, of_labels, wrong)
    return [*wrong, *difference(plan, {step: sorted(samples) for step, samples in found.items()})]


def _as(lines: Sequence[Line], tp: int) -> list[Line]:
    return [{**line, "tp": tp} for line in lines]


def _samples(first: Line, last: Line, wrong: list[str]) -> list[str]:
    """The samples of a microbatch, as the model expands them: by loops, and cut at its length."""
    rows = MICRO_BATCH["packed" if first["boundaries"] else "dense"]
    count = last["pictures"] if isinstance(last["pictures"], int) else len(last["pictures"])
    if count != len(first["pictures"]) or [t == IMAGE_TOKEN for t in last["tokens"]] != [
        t == IMAGE_TOKEN for t in first["tokens"]
    ]:
        wrong.append(f"step {first['step']}: image tokens or pictures of the last stage are not those of the first")
    width, pictures, found = len(first["tokens"]) // rows, iter(first["pictures"]), []
    for row in range(rows):
        cut = slice(row * width, (row + 1) * width)
        tokens: list[int] = []
        labels: list[int] = []
        mask: list[int] = []
        own: list[str] = []
        for token, label, counts in zip(first["tokens"][cut], last["labels"][cut], last["mask"][cut], strict=True):
            times = EMBEDDINGS if token == IMAGE_TOKEN else 1
            own += [next(pictures)] if token == IMAGE_TOKEN else []
            tokens, labels, mask = tokens + [token] * times, labels + [label] * times, mask + [counts] * times
        found.append(sample(tokens[:LENGTH], labels[:LENGTH], mask[:LENGTH], own))
    if next(pictures, None) is not None:
        wrong.append(f"step {first['step']}: more pictures than image tokens")
    return found


# --- The pictures and their texts, made on the fly, and the recipes.


def write_pictures(folder: Path) -> None:
    """Three sources of 120 rows, and `packed.yaml` and `dense.yaml`; the same files each time."""
    rng = random.Random(3)
    for name in SOURCES:
        texts, images = [], []
        for number in range(120):
            words = "".join(rng.choice("abcdefg ") for _ in range(rng.randrange(4, 40)))
            own = [_image(rng, wide=name == "tiled") for _ in range(0 if name == "plain" else rng.randrange(3))]
            place = rng.randrange(len(words))
            texts.append(f"{name}{number} {words[:place]}{'<image>' * len(own)}{words[place:]}")
            images.append(own)
        columns: dict[str, Any] = {"text": texts}
        if name != "plain":
            columns["images"] = pa.array(images, pa.list_(pa.binary()))
        pq.write_table(pa.table(columns), folder / f"{name}.parquet", row_group_size=32)
    lines = "\n  ".join(f"{name}: {words}" for name, words in SOURCES.items())
    for packing, boundaries in (("packed", "document"), ("dense", "none")):
        text = RECIPE.format(samples=SAMPLES, length=LENGTH, boundaries=boundaries).replace("{}", lines)
        (folder / f"{packing}.yaml").write_text(text, encoding="utf-8")


def _image(rng: random.Random, *, wide: bool) -> bytes:
    width, height = (rng.randrange(30, 60), rng.randrange(12, 20)) if wide else (rng.randrange(9, 40), 20)
    pixels = np.frombuffer(rng.randbytes(width * height * 3), np.uint8).reshape(height, width, 3)
    held = io.BytesIO()
    Image.fromarray(pixels).save(held, "PNG")
    return held.getvalue()


if __name__ == "__main__":
    sys.exit(main())
