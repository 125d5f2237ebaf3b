"""How the gradients of a rank's backward passes become what the optimizers of all ranks step with."""
