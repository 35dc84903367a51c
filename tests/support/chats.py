"""Conversations in every container, and the documents that they should become, put together apart from torchmix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.tar_shards import write_shard

Chat = list[tuple[str, str]]
"""Role and content of each message."""
CONTAINERS = (
    "jsonl",
    "sharegpt",
    "parts",
    "parquet",
    "parquet_sharegpt",
    "parquet_parts",
    "parquet_json",
    "arrow",
    "tar",
)
SHAREGPT = {"user": "human", "assistant": "gpt"}


def make_chats(seed: int, count: int) -> list[Chat | None]:
    """Conversations of up to three turns; some begin with a system message, some have no messages, some are null."""
    rng = np.random.default_rng(seed)

    def words(least: int = 0) -> str:
        return "".join(rng.choice(list('abc é\n"'), int(rng.integers(least, 12))))

    chats: list[Chat | None] = []
    for number in range(count):
        chat: Chat = [("system", words(1))] if rng.random() < 0.3 else []
        for turn in range(int(rng.integers(0, 4))):
            chat += [("user", f"{number}.{turn} {words()}"), ("assistant", words())]
        if chat and rng.random() < 0.2:
            chat.append(("user", words()))
        chats.append(None if rng.random() < 0.1 else chat)
    return chats


def plain_document(chat: Chat | None) -> tuple[list[int], list[bool]]:
    """Ids of a document of the template `plain` with the tokenizer `bytes`, and whether each is trained on."""
    ids: list[int] = []
    has_loss: list[bool] = []
    if not chat:
        return ids, has_loss
    for role, content in chat:
        for text, is_trained in ((f"{role.capitalize()}: ", False), (f"{content}\n", role == "assistant")):
            ids += text.encode()
            has_loss += [is_trained] * len(text.encode())
    return [*ids, 256], [*has_loss, chat[-1][0] == "assistant"]


def labels_of(ids: list[int], has_loss: list[bool]) -> list[int]:
    """The label of each token of a document."""
    return [token if trained else -100 for token, trained in zip(ids[1:], has_loss[1:], strict=True)] + [-100] * bool(
        ids
    )


def _message(role: str, content: str, container: str) -> dict[str, Any]:
    if "sharegpt" in container:
        return {"from": SHAREGPT.get(role, role), "value": content}
    if "parts" in container:
        parts = [{"type": "text", "text": content[:3]}, {"type": "text", "text": content[3:]}]
        return {"content": parts, "role": role}
    return (
        {"role": role, "content": content, "weight": None}
        if container == "jsonl"
        else {"content": content, "role": role}
    )


def write_chats(folder: Path, name: str, container: str, files: list[list[Chat | None]]) -> dict[str, Any]:
    """Write a source; returns what a recipe says of it."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    source: dict[str, Any] = {"tokenizer": "bytes", "messages": "messages"}
    for number, chats in enumerate(files):
        rows = [None if chat is None else [_message(*message, container) for message in chat] for chat in chats]
        path = folder / name / f"{number}.x"
        if container == "tar":
            samples = [
                (f"{i:04}", {"jpg": b"x" * i, "json": json.dumps({"m": row}).encode()}) for i, row in enumerate(rows)
            ]
            write_shard(path.with_suffix(".tar"), samples)
            source |= {"path": f"{name}/*.tar", "messages": "json.m"}
        elif container.startswith("parquet") or container == "arrow":
            values: Any = rows
            if container == "parquet_json":
                values = [None if row is None else json.dumps(row) for row in rows]
            table = pa.table({"id": list(range(len(rows))), "messages": values})
            if container == "arrow":
                with (
                    pa.OSFile(str(path.with_suffix(".arrow")), "wb") as file,
                    pa.ipc.new_file(file, table.schema) as out,
                ):
                    out.write_table(table, max_chunksize=7)
                source["path"] = f"{name}/*.arrow"
            else:
                options = {"data_page_size": 256, "row_group_size": 20, "write_page_index": number % 2 == 0}
                pq.write_table(table, path.with_suffix(".parquet"), **options)
                source["path"] = f"{name}/*.parquet"
        else:
            lines = [json.dumps({"messages": row, "other": 1}) for row in rows]
            path.with_suffix(".jsonl").write_text("\n".join(lines) + "\n")
            source["path"] = f"{name}/*.jsonl"
    return source
