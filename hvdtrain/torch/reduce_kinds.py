"""Which reductions there are: Horovod's own numbers for them."""

from __future__ import annotations

# Horovod's own numbers for its reduction operations.
Average = 0
Sum = 1
Adasum = 2
Min = 3
Max = 4
Product = 5
