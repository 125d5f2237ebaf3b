"""Names and numbers that several rooms share; HVDTRAIN_RUN_DIR is `process_tree.RUN_DIR`."""

RUN_NAME = "HVDTRAIN_RUN_NAME"
RUN_ID = "HVDTRAIN_RUN_ID"
DEBUG = "HVDTRAIN_DEBUG"  # 1: each process prints its whole traceback
EXIT_STOPPED = 75  # EX_TEMPFAIL: stopped on request; the same command resumes
