"""`hvdtrain run` and `hvdtrain.run`: start ranks by horovodrun or mpirun, restart them, and stop them in order."""
