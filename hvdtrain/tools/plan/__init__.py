"""`hvdtrain plan`: what more ranks would bring and cost, forecast from one measured step and a link's speed.

`model` is the arithmetic, and reads a measured step; `report` shows the forecast. Nothing here imports a
framework or starts a rank.
"""
