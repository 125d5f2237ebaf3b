"""`hvdtrain bench`: measures allreduce by size and where a step's time goes, on ranks that it starts itself."""
