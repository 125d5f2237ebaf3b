"""A DataFrame as Parquet files that `hvdtrain.read_parquet` reads."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from hvdtrain.errors import HvdTrainError, PackageMissingError

_ROW_GROUP_BYTES = 16 * 2**20  # a rank unpacks one at a time
_NUMBERS = ("boolean", "tinyint", "smallint", "int", "bigint", "float", "double")


def pyspark(module: str) -> Any:
    """Return one of PySpark's modules."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise PackageMissingError("PySpark is not installed. Run: pip install pyspark pyarrow") from None


def write_parquet(data: Any, path: str, *, columns: Sequence[str] | None = None, overwrite: bool = False) -> int:
    """Write a DataFrame for ranks to read, once, and return its number of rows.

    ML vectors become lists. Rows keep the DataFrame's order: sort it if another run must have the same order.

    Args:
        data: a Spark DataFrame of numbers, lists of numbers of one length, and ML vectors.
        path: a folder, or a URL such as s3a://bucket/folder, in a file system that the executors and all ranks share.
        columns: names; None for all.
        overwrite: replace what is there.

    Raises:
        PackageMissingError: PySpark is not installed.
        ValueError: no rows, a missing column, or one that is not of numbers.
        FileExistsError: `path` exists.
        HvdTrainError: the folder does not have all rows that were written.
    """
    sql, functions, errors = map(pyspark, ("pyspark.sql", "pyspark.sql.functions", "pyspark.errors"))
    chosen = data.select(*[_as_numbers(data, name) for name in (columns or data.columns)])
    seen = sql.Observation()
    counted = chosen.observe(seen, functions.count(functions.lit(1)).alias("rows"))
    writer = counted.write.option("parquet.block.size", _ROW_GROUP_BYTES)
    try:
        writer.mode("overwrite" if overwrite else "error").parquet(path)
    except errors.AnalysisException as problem:
        if "PATH_ALREADY_EXISTS" not in str(problem):
            raise
        raise FileExistsError(f"{path} exists. Say overwrite=True to replace it") from None
    rows = int(seen.get["rows"])
    if not rows:
        raise ValueError(f"the DataFrame has no rows, so {path} is empty. Check its filters, then say overwrite=True")
    there = data.sparkSession.read.parquet(path).count()
    if there != rows:
        raise HvdTrainError(
            f"{path} has {there} rows, but {rows} were written. Executors may have written to disks of their own: "
            "choose a path in a file system that all hosts share"
        )
    return rows


def _as_numbers(data: Any, name: str) -> Any:
    """Return the column as it is written; for errors see `write_parquet`."""
    if name not in data.columns:
        raise ValueError(f"the DataFrame has no column {name!r}. It has: {', '.join(data.columns)}")
    kind = data.schema[name].dataType
    column = data[f"`{name}`"]
    if kind.typeName() == "vectorudt" or type(kind).__name__ == "VectorUDT":
        return pyspark("pyspark.ml.functions").vector_to_array(column).alias(name)
    item = kind.elementType if kind.typeName() == "array" else kind
    if item.simpleString() not in _NUMBERS:
        raise ValueError(
            f"column {name!r} is of {kind.simpleString()}, but a model takes numbers, lists of numbers and ML vectors. "
            "Encode or cast it, or leave it out by columns=[...]"
        )
    return column
