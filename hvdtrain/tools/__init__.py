"""What `hvdtrain doctor`, `bench`, `plan` and `report` do."""
