"""Ranks as the tasks of a Spark job, and a DataFrame as their data."""

from hvdtrain.integrations.spark.driver import run
from hvdtrain.integrations.spark.table import write_parquet

__all__ = ["run", "write_parquet"]
