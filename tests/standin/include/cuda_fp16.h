// Horovod's core includes this header, and uses nothing of it.
