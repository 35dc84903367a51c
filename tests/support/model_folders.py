"""Folders of models, with the settings of their processors as released checkpoints have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
USUAL = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
}
QWEN = {"image_token_id": 151655, "vision_start_token_id": 151652, "vision_end_token_id": 151653}
NEXT = {"image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]], "do_pad": True}
SIDES = [384 * n for n in range(1, 7)]
PICTURE_MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "Qwen2-VL": {
        "preprocessor_config.json": {
            **USUAL,
            **CLIP,
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2VLProcessor",
            "min_pixels": 3136,
            "max_pixels": 12845056,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
        },
        "config.json": {"model_type": "qwen2_vl", **QWEN},
    },
    "Qwen3-VL": {
        "preprocessor_config.json": {
            **USUAL,
            **HALF,
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "size": {"longest_edge": 16777216, "shortest_edge": 65536},
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
        },
    },
    "InternVL3": {
        "preprocessor_config.json": {
            **USUAL,
            **IMAGENET,
            "image_processor_type": "GotOcr2ImageProcessorFast",
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 12,
            "size": {"height": 448, "width": 448},
        },
        "config.json": {"downsample_ratio": 0.5, "vision_config": {"patch_size": [14, 14]}},
        "processor_config.json": {"image_seq_length": 256, "processor_class": "InternVLProcessor"},
    },
    "LLaVA-1.5": {
        "preprocessor_config.json": {
            **USUAL,
            **CLIP,
            "image_processor_type": "CLIPImageProcessor",
            "do_center_crop": True,
            "crop_size": {"height": 336, "width": 336},
            "size": {"shortest_edge": 336},
        },
        "processor_config.json": {"patch_size": 14, "vision_feature_select_strategy": "default"},
        "config.json": {"vision_config": {"patch_size": 14}},
    },
    "LLaVA-1.5, padded": {
        "preprocessor_config.json": {
            **USUAL,
            **CLIP,
            "image_processor_type": "LlavaImageProcessor",
            "do_center_crop": True,
            "do_pad": True,
            "crop_size": {"height": 336, "width": 336},
            "size": {"shortest_edge": 336},
        },
        "config.json": {"vision_config": {"patch_size": 14}},
    },
    "LLaVA-NeXT": {
        "preprocessor_config.json": {
            **USUAL,
            **CLIP,
            **NEXT,
            "image_processor_type": "LlavaNextImageProcessor",
            "do_center_crop": True,
            "crop_size": {"height": 336, "width": 336},
            "size": {"shortest_edge": 336},
        },
        "processor_config.json": {"patch_size": 14, "vision_feature_select_strategy": "default"},
    },
    "LLaVA-OneVision": {
        "preprocessor_config.json": {
            **USUAL,
            **HALF,
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "image_grid_pinpoints": [[height, width] for height in SIDES for width in SIDES],
            "do_pad": True,
            "size": {"height": 384, "width": 384},
        },
        "processor_config.json": {"vision_aspect_ratio": "anyres_max_9", "vision_feature_select_strategy": "full"},
        "config.json": {"vision_config": {"patch_size": 14, "image_size": 384}},
    },
    "SigLIP": {
        "preprocessor_config.json": {
            **USUAL,
            **HALF,
            "image_processor_type": "SiglipImageProcessor",
            "size": {"height": 384, "width": 384},
        },
        "config.json": {"vision_config": {"patch_size": 14, "image_size": 384}},
    },
    "Gemma 3": {
        "processor_config.json": {
            "image_seq_length": 256,
            "image_processor": {
                **USUAL,
                **HALF,
                "image_processor_type": "Gemma3ImageProcessor",
                "resample": 2,
                "size": {"height": 896, "width": 896},
            },
        },
        "config.json": {"mm_tokens_per_image": 256, "vision_config": {"patch_size": 14, "image_size": 896}},
    },
}
"""Files of each model, by name."""
WHISPER = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "chunk_length": 30,
    "hop_length": 160,
    "n_fft": 400,
    "n_samples": 480000,
    "nb_max_frames": 3000,
    "padding_side": "right",
    "padding_value": 0.0,
    "sampling_rate": 16000,
}
SOUND_MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "Whisper": {"preprocessor_config.json": {**WHISPER, "feature_size": 80, "processor_class": "WhisperProcessor"}},
    "Qwen2-Audio": {
        "preprocessor_config.json": {**WHISPER, "processor_class": "Qwen2AudioProcessor"},
        "config.json": {"model_type": "qwen2_audio", "audio_token_index": 151646},
    },
}
VIDEO_MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "Qwen2.5-VL": {
        "video_preprocessor_config.json": {
            **USUAL,
            **CLIP,
            "video_processor_type": "Qwen2VLVideoProcessor",
            "size": {"longest_edge": 12845056, "shortest_edge": 3136},
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "fps": 2.0,
            "min_frames": 4,
            "max_frames": 768,
        },
        "config.json": {**QWEN, "video_token_id": 151656},
    },
}


def write_model(folder: Path, files: dict[str, dict[str, Any]]) -> Path:
    """Write the files of a model."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder
