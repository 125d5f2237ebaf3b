"""`hvdtrain plan`: what more ranks would bring and cost, forecast from one measured step and a link's speed.

`model` is the arithmetic, `measured` reads a measured step, `units` reads quantities, `report` shows the forecast, and
`command` is the command line. Nothing here imports a framework or starts a rank.
"""
