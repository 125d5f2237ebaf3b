"""What users call data (`sources`), which rank sees which sample (`sharding`), and Parquet files."""

from hvdtrain.data.sources import NOTHING as NOTHING
from hvdtrain.data.sources import Batch as Batch
from hvdtrain.data.sources import Consumed as Consumed
from hvdtrain.data.sources import IndexedSource as IndexedSource
from hvdtrain.data.sources import IteratedSource as IteratedSource
from hvdtrain.data.sources import Sharded as Sharded
from hvdtrain.data.sources import Source as Source
from hvdtrain.data.sources import as_array as as_array
from hvdtrain.data.sources import as_batch as as_batch
from hvdtrain.data.sources import as_source as as_source
from hvdtrain.data.sources import collate as collate
from hvdtrain.data.sources import leaves as leaves
from hvdtrain.data.sources import num_rows as num_rows
from hvdtrain.data.sources import rebuild as rebuild
from hvdtrain.data.sources import take as take
from hvdtrain.data.sources import tree_map as tree_map
from hvdtrain.data.sources import unpack as unpack
