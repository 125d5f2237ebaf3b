"""Users' data as steps (`sources`), the samples of each rank (`sharding`), and Parquet files."""

from hvdtrain.data.sources import Sharded as Sharded
