"""What users call data (`sources`), which rank sees which sample (`sharding`), and Parquet files."""

from hvdtrain.data.sources import Sharded as Sharded
