from __future__ import annotations

import numpy as np

from torchmix.constructor.spans import boundaries_of_documents, boundaries_of_samples


def test_each_sample_is_a_segment() -> None:
    boundaries = boundaries_of_samples(6, length=10, micro_batch_size=3)
    assert boundaries.cu_seqlens.tolist() == [0, 10, 20, 30, 0, 10, 20, 30]
    assert boundaries.cu_seqlens_padded.tolist() == [0, 10, 20, 30, 0, 10, 20, 30]
    assert boundaries.stop.tolist() == [4, 8]
    assert boundaries.max_seqlen.tolist() == [10, 10]


def test_a_full_sample_has_no_tail_and_one_without_pieces_is_all_tail() -> None:
    boundaries = boundaries_of_documents(
        np.array([0, 0, 2]),
        np.array([5, 8, 1]),
        np.array([8, 8, 8]),
        num_samples=4,
        length=16,
        micro_batch_size=2,
    )
    # sample 0: 5 (8), 8 (8); sample 1: tail 16; sample 2: 1 (8), tail 8; sample 3: tail 16
    assert boundaries.cu_seqlens.tolist() == [0, 5, 13, 13, *[0, 1, 1, 1]]
    assert boundaries.cu_seqlens_padded.tolist() == [0, 8, 16, 32, *[0, 8, 16, 32]]
    assert boundaries.stop.tolist() == [4, 8]
    assert boundaries.max_seqlen.tolist() == [16, 16]


def test_a_replica_without_any_piece_is_all_tail() -> None:
    none = np.zeros(0, np.int64)
    boundaries = boundaries_of_documents(none, none, none, num_samples=2, length=16, micro_batch_size=1)
    assert boundaries.cu_seqlens.tolist() == [0, 0, 0, 0]
    assert boundaries.cu_seqlens_padded.tolist() == [0, 16, 0, 16]
