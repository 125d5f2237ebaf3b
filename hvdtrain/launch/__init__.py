"""`hvdtrain run`: ranks under horovodrun or mpirun, started anew when they die, stopped in order when asked to."""
