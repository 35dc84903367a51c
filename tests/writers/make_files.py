"""Parquet files by one writer, in all the ways it can write them. Runs in that writer's environment, without torchmix.

    python make_files.py WRITER FOLDER [--rows 400] [--columns ids,text]

WRITER is pyarrow, polars, duckdb, fastparquet, arro3, datasets or spark. `--columns` is for pyarrow.

The rows are the same for every writer, drawn from a seed: token lists of many lengths, also empty and null, in several
types and depths, and texts. Values repeat enough for dictionaries. `torchmix` must give of each column what pyarrow
gives when it reads the whole file; `check_files.py` compares.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
from pathlib import Path

CODECS = ("none", "snappy", "gzip", "zstd", "lz4", "brotli")


def make_rows(num_rows: int) -> dict:
    """Columns by name, as Python lists: `ids` and deeper ones, `text` and others."""
    rng = random.Random(20)
    words = ["alpha", "Straße", "日本語", "naïve", "🙂", "the quick brown fox ", "\n", "1234567890"]

    def ids(most: int = 60, highest: int = 30_000) -> list:
        kind = rng.random()
        if kind < 0.05:
            return None
        if kind < 0.12:
            return []
        if kind < 0.14:
            return [rng.randrange(highest) for _ in range(rng.randrange(500, 1500))]  # longer than small pages
        return [min(highest - 1, int(rng.expovariate(1 / 300))) for _ in range(rng.randrange(1, most))]

    def some(of, most: int) -> list:
        return [of() for _ in range(rng.randrange(most))]

    def text() -> str:
        return None if rng.random() < 0.05 else "".join(rng.choice(words) for _ in range(rng.randrange(12)))

    def maybe(value):
        return None if rng.random() < 0.06 else value

    every = range(num_rows)
    lists = [ids() for _ in every]
    return {
        "id": list(every),
        "ids": lists,
        "full": [row or [7] for row in lists],
        "long": [None if row is None else [value + (1 << 40) for value in row] for row in lists],
        "tiny": [None if row is None else [value % 100 for value in row] for row in lists],
        "deep": [maybe(some(lambda: ids(8), 5)) for _ in every],
        "turns": [
            maybe([maybe({"role": rng.choice("ab"), "ids": ids(12)}) for _ in range(rng.randrange(4))]) for _ in every
        ],
        "meta": [maybe({"text": text(), "ids": ids(20)}) for _ in every],
        "four": [maybe([rng.randrange(99) for _ in range(4)]) for _ in every],
        "text": [text() for _ in every],
        "words": [rng.choice(words) for _ in every],
        "nothing": [None] * num_rows,
    }


def arrow_table(rows: dict):
    """All rows as an Arrow table, with the types that Parquet can hold."""
    import pyarrow as pa

    integers = pa.list_(pa.int32())
    types = {
        "id": pa.int64(),
        "ids": integers,
        "full": pa.list_(pa.field("element", pa.int32(), nullable=False)),
        "long": pa.large_list(pa.int64()),
        "tiny": pa.list_(pa.uint8()),
        "deep": pa.list_(integers),
        "turns": pa.list_(pa.struct({"role": pa.string(), "ids": pa.list_(pa.int16())})),
        "meta": pa.struct({"text": pa.large_string(), "ids": pa.list_(pa.uint32())}),
        "four": pa.list_(pa.int32(), 4),
        "text": pa.string(),
        "words": pa.string(),
        "nothing": integers,
    }
    if int(pa.__version__.split(".")[0]) < 18:  # it cannot write null lists of a fixed size
        rows = {**rows, "four": [row or [0, 0, 0, 0] for row in rows["four"]]}
    fields = [pa.field(name, type, nullable=name != "full") for name, type in types.items()]
    columns = [pa.array(rows[field.name], field.type) for field in fields]
    table = pa.table(columns, pa.schema(fields))
    raw = pa.array([None if value is None else value.encode() for value in rows["text"]], pa.binary())
    return table.append_column("raw", raw).append_column("named", table["words"].dictionary_encode())


def write_pyarrow(rows: dict, folder: Path) -> None:
    import inspect

    import pyarrow as pa
    import pyarrow.parquet as pq

    table = arrow_table(rows)
    if rows["columns"]:
        table = table.select(rows["columns"])
    known = inspect.signature(pq.ParquetWriter.__init__).parameters
    choices = {
        "data_page_version": ("1.0", "2.0"),
        "write_page_index": (False, True),
        "use_dictionary": (True, False),
        "compression": CODECS,
    }
    if "write_page_index" not in known and "write_page_index" not in (pq.write_table.__doc__ or ""):
        del choices["write_page_index"]
    for values in itertools.product(*choices.values()):
        settings = dict(zip(choices, values, strict=True))
        name = "-".join(str(value) for value in values)
        pq.write_table(table, folder / f"{name}.parquet", data_page_size=700, row_group_size=170, **settings)
    if rows["columns"]:
        return
    encodings = {"ids": "DELTA_BINARY_PACKED", "text": "DELTA_BYTE_ARRAY", "words": "DELTA_LENGTH_BYTE_ARRAY"}
    small = {"data_page_size": 700, "row_group_size": 170, "use_dictionary": False}
    release = int(pa.__version__.split(".")[0])
    for version in ("1.0", "2.0"):
        flat = table.select(["text", "words"])
        settings = {name: encodings[name] for name in flat.column_names}
        path = folder / f"delta-{version}.parquet"
        if release >= 14:
            pq.write_table(flat, path, column_encoding=settings, data_page_version=version, **small)
        for compliant, leaf in ((True, "element"), (False, "item")):
            for encoding in ("DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"):
                if encoding == "BYTE_STREAM_SPLIT" and release < 17:
                    continue
                pq.write_table(
                    table.select(["ids"]),
                    folder / f"{encoding}-{version}-{leaf}.parquet",
                    column_encoding={f"ids.list.{leaf}": encoding},
                    use_compliant_nested_type=compliant,
                    data_page_version=version,
                    store_schema=compliant,
                    **small,
                )
    pq.write_table(table, folder / "defaults.parquet")
    pq.write_table(table[:0], folder / "no rows.parquet")


def write_polars(rows: dict, folder: Path) -> None:
    import polars as pl

    columns = {
        "id": pl.Series(rows["id"], dtype=pl.Int64),
        "ids": pl.Series(rows["ids"], dtype=pl.List(pl.Int32)),
        "long": pl.Series(rows["long"], dtype=pl.List(pl.Int64)),
        "tiny": pl.Series(rows["tiny"], dtype=pl.List(pl.UInt8)),
        "deep": pl.Series(rows["deep"], dtype=pl.List(pl.List(pl.Int32))),
        "turns": pl.Series(rows["turns"], dtype=pl.List(pl.Struct({"role": pl.String, "ids": pl.List(pl.Int16)}))),
        "meta": pl.Series(rows["meta"], dtype=pl.Struct({"text": pl.String, "ids": pl.List(pl.UInt32)})),
        "four": pl.Series(rows["four"], dtype=pl.Array(pl.Int32, 4)),
        "text": pl.Series(rows["text"], dtype=pl.String),
        "words": pl.Series(rows["words"], dtype=pl.Categorical),
        "raw": pl.Series([None if value is None else value.encode() for value in rows["text"]], dtype=pl.Binary),
    }
    frame = pl.DataFrame(columns)
    for codec in ("uncompressed", "snappy", "gzip", "zstd", "lz4", "brotli"):
        for page_bytes in (700, None):
            path = folder / f"{codec}-{page_bytes}.parquet"
            frame.write_parquet(path, compression=codec, row_group_size=170, data_page_size=page_bytes)
    frame.lazy().sink_parquet(folder / "sink.parquet", row_group_size=170, data_page_size=700)


def write_duckdb(rows: dict, folder: Path) -> None:
    import duckdb

    # DuckDB 2.0 writes null lists of a fixed size so that pyarrow refuses the whole file; without them.
    rows = {**rows, "four": [row or [0, 0, 0, 0] for row in rows["four"]]}
    table = arrow_table(rows).drop_columns(["nothing", "named"])
    connection = duckdb.connect()
    connection.register("rows", table)
    for codec in ("uncompressed", "snappy", "gzip", "zstd", "lz4", "lz4_raw", "brotli"):
        for version in ("v1", "v2"):
            path = folder / f"{codec}-{version}.parquet"
            settings = f"format parquet, codec '{codec}', parquet_version {version}, row_group_size 2048"
            connection.execute(f"copy rows to '{path}' ({settings})")
    if len(rows["id"]) >= 400:  # pages are cut at 100 MB
        many = "select list_transform(range(0, 1 + (row * 7919) % 12000), lambda x: ((x * row) % 50257)::int) as ids"
        many += " from range(0, 9000) t(row)"
        connection.execute(f"copy ({many}) to '{folder / 'large.parquet'}' (format parquet, codec 'zstd')")
        sql = f"copy ({many}) to '{folder / 'large-v2.parquet'}' (format parquet, codec 'snappy', parquet_version v2)"
        connection.execute(sql)


def write_fastparquet(rows: dict, folder: Path) -> None:
    import fastparquet
    import pandas as pd

    frame = pd.DataFrame({"id": rows["id"], "text": rows["text"], "words": rows["words"]})
    frame["named"] = frame["words"].astype("category")
    frame["raw"] = [b"" if value is None else value.encode() for value in rows["text"]]
    for codec in ("UNCOMPRESSED", "SNAPPY", "GZIP", "ZSTD", "LZ4", "BROTLI"):
        path = str(folder / f"{codec}.parquet")
        encodings = {"raw": "bytes", "text": "utf8", "words": "utf8"}
        fastparquet.write(path, frame, compression=codec, row_group_offsets=170, object_encoding=encodings)


def write_arro3(rows: dict, folder: Path) -> None:
    import arro3.io

    # pyarrow cannot read a column of dictionary type whole if it is encoded by deltas, as `named` would be.
    table = arrow_table(rows).drop_columns(["nothing", "named"])
    names = {"none": "uncompressed", "snappy": "snappy", "gzip": "gzip(6)", "zstd": "zstd(1)", "lz4": "lz4_raw"}
    names["brotli"] = "brotli(1)"
    for codec, version, dictionary in itertools.product(names, ("parquet_1_0", "parquet_2_0"), (True, False)):
        arro3.io.write_parquet(
            table,
            folder / f"{codec}-{version}-{dictionary}.parquet",
            compression=names[codec],
            writer_version=version,
            dictionary_enabled=dictionary,
            data_page_size_limit=700,
            write_batch_size=16,
            max_row_group_size=170,
            bloom_filter_enabled=dictionary,
            skip_arrow_metadata=codec == "gzip",
        )


def write_datasets(rows: dict, folder: Path) -> None:
    import datasets

    table = arrow_table(rows).drop_columns(["nothing", "named"])
    dataset = datasets.Dataset(table)
    dataset.to_parquet(folder / "defaults.parquet")
    dataset.to_parquet(folder / "batches.parquet", batch_size=100)


def write_spark(rows: dict, folder: Path) -> None:
    from pyspark.sql import SparkSession, types

    integers = types.ArrayType(types.IntegerType())
    turn = types.StructType(
        [types.StructField("role", types.StringType()), types.StructField("ids", types.ArrayType(types.ShortType()))]
    )
    meta = types.StructType([types.StructField("text", types.StringType()), types.StructField("ids", integers)])
    schema = {
        "id": types.LongType(),
        "ids": integers,
        "long": types.ArrayType(types.LongType()),
        "tiny": types.ArrayType(types.ByteType()),
        "deep": types.ArrayType(integers),
        "turns": types.ArrayType(turn),
        "meta": meta,
        "text": types.StringType(),
        "words": types.StringType(),
    }
    fields = types.StructType([types.StructField(name, type) for name, type in schema.items()])
    spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")

    def plain(value):
        return tuple(map(plain, value.values())) if isinstance(value, dict) else value

    columns = [[plain(value) if name == "meta" else value for value in rows[name]] for name in schema]
    turns = columns[list(schema).index("turns")]
    columns[list(schema).index("turns")] = [None if row is None else [plain(turn) for turn in row] for row in turns]
    frame = spark.createDataFrame(list(zip(*columns, strict=True)), fields).coalesce(1)
    for codec, version, legacy in itertools.product(
        ("none", "snappy", "gzip", "zstd", "lz4raw"), ("v1", "v2"), ("false", "true")
    ):
        target = folder / f"{codec}-{version}-{legacy}"
        options = {
            "compression": codec,
            "parquet.page.size": 700,
            "parquet.page.row.count.limit": 40,
            "parquet.block.size": 60_000,
            "parquet.writer.version": version,
            "parquet.bloom.filter.enabled#text": "true",
            "parquet.bloom.filter.max.bytes": 256,
        }
        spark.conf.set("spark.sql.parquet.writeLegacyFormat", legacy)
        frame.write.options(**options).parquet(str(target))
        [part] = target.glob("*.parquet")
        part.rename(folder / f"{target.name}.parquet")
        shutil.rmtree(target)
    spark.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("writer")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--columns", default="")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True)
    rows = make_rows(arguments.rows) | {"columns": [name for name in arguments.columns.split(",") if name]}
    globals()[f"write_{arguments.writer}"](rows, arguments.folder)


if __name__ == "__main__":
    main()
