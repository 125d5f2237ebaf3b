"""Turn the gradients of each rank's backward passes into those with which all ranks step."""
