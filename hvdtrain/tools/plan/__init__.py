"""`hvdtrain plan`: what more ranks would bring and cost, forecast from one measured step and a link's speed."""
