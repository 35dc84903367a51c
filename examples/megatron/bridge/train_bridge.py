"""A tiny GPT that Megatron-Bridge trains on a torchmix recipe: one rank.

    torchrun --nproc-per-node 2 train_bridge.py recipe.yaml --bridge ~/Megatron-Bridge --megatron ~/Megatron-LM \\
        --save /tmp/checkpoints --steps 6

What a user of Bridge writes of it is the line with `RecipeDataset`. All else makes a model small enough for a test,
and lets it run where there is no GPU. `--megatron` is the checkout that Bridge names in `3rdparty/Megatron-LM`.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "pretrain_gpt")]


def main() -> None:
    options = _options()
    faulthandler.dump_traceback_later(options.deadline_s, exit=True)
    _make_importable(options)

    import cpu_device
    from megatron.bridge.training import gpt_step, setup
    from megatron.bridge.training.finetune import finetune
    from megatron.bridge.training.pretrain import pretrain

    from torchmix.megatron_adapter.bridge import RecipeDataset

    if cpu_device.enabled():
        setup.set_jit_fusion_options = lambda *_: None  # its warm-up draws from the generator of the first weights
    cfg = configuration(options)
    cfg.dataset = RecipeDataset(recipe=options.recipe, loaders="in_process", accept_edit=options.accept_edit)
    if options.record is not None:
        _record(gpt_step, Path(options.record))
    (finetune if options.finetune else pretrain)(cfg, gpt_step.forward_step)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--bridge", required=True, help="checkout, or folder of a wheel's `megatron`")
    parser.add_argument("--megatron", required=True, help="checkout of the Megatron-LM that Bridge names")
    for name in ("tp", "cp", "pp", "vp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--eval-iters", type=int, default=0)
    parser.add_argument("--save")
    parser.add_argument("--save-interval", type=int, default=3)
    parser.add_argument("--load")
    parser.add_argument("--ckpt-step", type=int, help="which checkpoint of that folder; the last one if not given")
    parser.add_argument("--finetune", metavar="CHECKPOINTS", help="weights to begin with; by Bridge's entry for it")
    parser.add_argument("--exit-interval", type=int)
    parser.add_argument("--accept-edit")
    parser.add_argument("--record", help="folder for what get_batch returned")
    parser.add_argument("--deadline-s", type=float, default=300.0)
    return parser.parse_args()


def _make_importable(options: argparse.Namespace) -> None:
    """Let `import megatron` find both checkouts, and what a CPU lacks stood in for."""
    bridge = Path(options.bridge)
    sys.path[:0] = [str(bridge / "src" if (bridge / "src").is_dir() else bridge), options.megatron]
    import torch

    if torch.cuda.is_available():
        return
    import cpu_device
    import cpu_imports
    import stand_ins

    cpu_imports.enable()
    cpu_device.enable()
    stand_ins.enable()
    from megatron.core.datasets import utils
    from megatron.core.models.backends import LocalSpecProvider

    utils.compile_helpers = lambda: None  # index builders of Megatron's own datasets
    from cpu_attention import Slices, attention_of
    from megatron.core import utils as core_utils

    if getattr(core_utils, "tex", None) is None:
        core_utils.tex = Slices

    LocalSpecProvider.core_attention = lambda self: attention_of(options.length)  # type: ignore[method-assign]


def configuration(options: argparse.Namespace) -> Any:
    """Bridge's configuration of a tiny model, without its dataset."""
    import cpu_device
    import torch
    from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
    from megatron.bridge.training import config as its_config
    from megatron.bridge.training.config import (
        CheckpointConfig,
        ConfigContainer,
        DistributedDataParallelConfig,
        DistributedInitConfig,
        LoggerConfig,
        OptimizerConfig,
        RNGConfig,
        SchedulerConfig,
        TokenizerConfig,
        TrainingConfig,
    )

    on_gpu = not cpu_device.enabled()
    model = GPTModelProvider(
        num_layers=4,
        hidden_size=32,
        ffn_hidden_size=64,
        num_attention_heads=4,
        seq_length=options.length,
        vocab_size=260,
        tensor_model_parallel_size=options.tp,
        context_parallel_size=options.cp,
        pipeline_model_parallel_size=options.pp,
        virtual_pipeline_model_parallel_size=options.vp if options.vp > 1 else None,
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        calculate_per_token_loss=True,
        use_cpu_initialization=not on_gpu,
        transformer_layer_spec=local_layer_spec,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        cp_comm_type="all_gather" if options.cp > 1 else None,
        batch_p2p_comm=False,
    )
    steps = options.steps
    in_training = {"eval_interval": 2 if options.eval_iters else None, "eval_iters": options.eval_iters}
    evaluation = {}
    if hasattr(its_config, "ValidationConfig"):  # Bridge 0.3 has its fields in the section of training
        evaluation["validation"], in_training = its_config.ValidationConfig(**in_training), {}
    return ConfigContainer(
        model=model,
        train=TrainingConfig(
            train_iters=steps,
            global_batch_size=options.samples,
            micro_batch_size=options.micro_batch_size,
            exit_interval=options.exit_interval,
            **in_training,
        ),
        **evaluation,
        optimizer=OptimizerConfig(optimizer="adam", lr=1e-3, min_lr=1e-3, bf16=False, fp16=False),
        scheduler=SchedulerConfig(
            lr_decay_style="constant",
            lr_warmup_iters=0,
            lr_decay_iters=steps,
            start_weight_decay=0.0,
            end_weight_decay=0.0,
            weight_decay_incr_style="constant",
        ),
        ddp=DistributedDataParallelConfig(
            use_distributed_optimizer=False, average_in_collective=False, grad_reduce_in_fp32=True
        ),
        dataset=None,
        logger=LoggerConfig(log_interval=1, tensorboard_dir=None),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=256),
        checkpoint=CheckpointConfig(
            save=options.save,
            load=options.load,
            pretrained_checkpoint=options.finetune,
            ckpt_step=options.ckpt_step,
            save_interval=options.save_interval,
            ckpt_format="torch_dist",
            fully_parallel_save=False,
            load_rng=False,
        ),
        dist=DistributedInitConfig(distributed_backend="nccl" if on_gpu else "gloo", use_gloo_process_groups=True),
        rng=RNGConfig(seed=1),
    )


def _record(gpt_step: Any, folder: Path) -> None:
    """Write down what `get_batch` returned, behind all that Bridge does, as lines that `consumed.py` reads."""
    import torch

    original = gpt_step.get_batch
    folder.mkdir(parents=True, exist_ok=True)
    seen = {"microbatches": 0}

    def get_batch(data_iterator: Any, cfg: Any, *rest: Any, pg_collection: Any, **named: Any) -> Any:
        found = original(data_iterator, cfg, *rest, pg_collection=pg_collection, **named)
        tokens, labels, mask, attention_mask, _, packed, *_ = found
        assert attention_mask is None
        counts = _counts_of(gpt_step)
        line = {
            "step": counts.step if torch.is_grad_enabled() else None,
            **{axis: torch.distributed.get_rank(getattr(pg_collection, axis)) for axis in ("tp", "cp", "pp", "dp")},
            "chunk": named.get("vp_stage") or 0,
            "tokens": None if tokens is None else tokens.flatten().tolist(),
            "labels": None if labels is None else labels.flatten().tolist(),
            "mask": None if mask is None else mask.flatten().int().tolist(),
            "boundaries": _boundaries(packed),
            "cp_size": None,
        }
        seen["microbatches"] += 1
        with (folder / f"rank-{torch.distributed.get_rank()}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return found

    gpt_step.get_batch = get_batch


def _boundaries(packed: Any) -> list[int] | None:
    if packed is None:
        return None
    ends = packed if not isinstance(packed, dict) else packed.get("cu_seqlens_q", packed.get("cu_seqlens"))
    return [int(end) for end in ends.flatten()]


def _counts_of(gpt_step: Any) -> Any:
    """Bridge's counts, from the call of its forward step that asks."""
    frame: Any = sys._getframe(2)
    while "state" not in frame.f_locals or not hasattr(frame.f_locals["state"], "train_state"):
        frame = frame.f_back
    return frame.f_locals["state"].train_state


if __name__ == "__main__":
    main()
