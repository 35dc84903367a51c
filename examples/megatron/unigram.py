"""The unigram entropy of a corpus: the loss of a model that knows how often each token occurs, and nothing else.

In: a recipe and its folder. Out: nats per token. A model with a lower loss has learned from what comes before a token.

Must hold: sources are weighted by their shares in the mixture, as in training, not by their sizes. Cost: reads every
file whole through pyarrow; seconds for the corpus of the example, not meant for a real one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from torchmix.recipe.changes import parse_shares
from torchmix.recipe.structs import Recipe, Source

END_OF_DOCUMENT = 256


def unigram_entropy(recipe: Recipe, directory: Path) -> float:
    """Entropy of the distribution of single tokens, in nats.

    Args:
        recipe: Its sources hold text for the bytes tokenizer, or lists of token ids.
        directory: The folder that the paths of the recipe are relative to.
    """
    shares = parse_shares(recipe)
    frequency: NDArray[np.float64] = np.zeros(0)
    for name, source in recipe.sources.items():
        counts = _count_tokens(source, directory)
        frequency = np.pad(frequency, (0, max(0, len(counts) - len(frequency))))
        frequency[: len(counts)] += float(shares[name]) * counts / counts.sum()
    frequency = frequency[frequency > 0]
    return float(-(frequency * np.log(frequency)).sum())


def _count_tokens(source: Source, directory: Path) -> NDArray[np.int64]:
    """[vocabulary] how often each token occurs in a source."""
    counts: NDArray[np.int64] = np.zeros(END_OF_DOCUMENT + 1, np.int64)
    for pattern in [source.path] if isinstance(source.path, str) else source.path:
        for path in sorted(directory.glob(pattern)) if "*" in pattern else [directory / pattern]:
            column = pq.read_table(path, columns=[source.text or source.tokens]).column(0).drop_null()
            for chunk in column.chunks:
                if source.text is None:
                    tokens = np.bincount(chunk.flatten().to_numpy(zero_copy_only=False), minlength=len(counts))
                else:
                    content = b"".join(value.as_buffer() for value in chunk)
                    tokens = np.bincount(np.frombuffer(content, np.uint8), minlength=len(counts))
                    tokens[END_OF_DOCUMENT] += len(chunk)
                counts = np.pad(counts, (0, max(0, len(tokens) - len(counts))))
                counts[: len(tokens)] += tokens
    return counts
