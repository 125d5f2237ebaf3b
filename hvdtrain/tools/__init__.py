"""The work of `hvdtrain doctor`, `bench`, `plan` and `report`."""
